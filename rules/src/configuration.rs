//! The settings of the configuration other than sandboxes: listeners, resolvers, paths. Plain data for the
//! program's startup. A reload applies changes of listeners; changing another setting takes a restart.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use ipnet::Ipv4Net;

use crate::credential::Credential;
use crate::ids::{CredentialName, Environment, SandboxId, Tenant};
use crate::limits::TrafficLimits;
use crate::name::{DomainName, Host};
use crate::pattern::HostPattern;
use crate::principal::PrincipalTemplate;
use crate::quota::QuotaSettings;
use crate::signals::secrets::OwnPattern;

/// The settings of one instance.
#[derive(Clone, Debug, Default)]
pub struct Configuration {
    pub log: Option<LogSettings>,
    pub on_invalid: OnInvalid,
    pub admin_socket: Option<String>,
    /// The directory of the certificate authority.
    pub ca_dir: Option<String>,
    pub credentials: Vec<Credential>,
    pub dns: Option<DnsSettings>,
    pub grants: GrantSettings,
    pub limits: TrafficLimits,
    pub quota: QuotaSettings,
    pub listeners: Vec<ListenerSettings>,
    pub upstream: UpstreamSettings,
    pub identity: Option<IdentitySettings>,
    pub memory_services: Vec<MemoryService>,
    /// The operator's own shapes of secrets.
    pub secret_patterns: Vec<OwnPattern>,
}

impl Configuration {
    /// Returns the addresses that Sandbar listens on, which no name may lead to.
    pub fn listen_addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().flat_map(|listener| &listener.bind).filter_map(BindTarget::address).collect()
    }
}

/// The access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// As written: relative to the configuration file, like every path here.
    pub dir: String,
    /// How long closed segments are kept; `None`: for ever.
    pub retention: Option<Duration>,
    /// Bytes on disk; `None`: a part of the disk.
    pub max_bytes: Option<u64>,
    pub segment_bytes: u64,
    pub segment_age: Duration,
    pub durability: DurabilitySetting,
    pub compression: CompressionSetting,
    pub query_strings: QueryStringsSetting,
    /// Decisions without outcome.
    pub open_decisions: u64,
}

/// What a record survives before its attempt proceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DurabilitySetting {
    Disk,
    Process,
}

/// Whether closed segments of the log are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionSetting {
    None,
    Zstd,
}

/// Whether records contain query strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryStringsSetting {
    Drop,
    Keep,
}

impl LogSettings {
    pub const SEGMENT_BYTES: u64 = 64 << 20;
    pub const SEGMENT_AGE: Duration = Duration::from_secs(86_400);
    pub const OPEN_DECISIONS: u64 = 65_536;

    /// Returns the default settings of a log in `dir`.
    pub fn new(dir: impl Into<String>) -> Self {
        LogSettings {
            dir: dir.into(),
            retention: None,
            max_bytes: None,
            segment_bytes: Self::SEGMENT_BYTES,
            segment_age: Self::SEGMENT_AGE,
            durability: DurabilitySetting::Process,
            compression: CompressionSetting::None,
            query_strings: QueryStringsSetting::Drop,
            open_decisions: Self::OPEN_DECISIONS,
        }
    }
}

/// Limits on grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantSettings {
    pub forbid_hosts: Vec<HostPattern>,
    /// Names of tiers or base policies.
    pub forbid_bases: Vec<String>,
    pub most_seconds: u64,
}

impl Default for GrantSettings {
    fn default() -> Self {
        let (forbid_hosts, forbid_bases) = (Vec::new(), Vec::new());
        GrantSettings { forbid_hosts, forbid_bases, most_seconds: 86_400 }
    }
}

/// What a reload does if the files on disk are invalid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnInvalid {
    /// Refuse everything and cut open connections.
    Deny,
    /// Keep the current rules.
    #[default]
    Keep,
}

/// Trusted issuers of signed identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentitySettings {
    pub revocations: Option<String>,
    pub issuers: Vec<IssuerSettings>,
}

/// A trusted issuer, and what it may sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerSettings {
    pub name: Option<String>,
    pub trust_domain: String,
    /// The file of its JWK Set.
    pub keys: String,
    pub environments: Option<Vec<Environment>>,
    pub tenants: Option<Vec<Tenant>>,
    pub algorithms: Option<Vec<String>>,
    pub life_seconds: Option<u64>,
}

/// A memory service, and how Sandbar authenticates to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryService {
    pub host: Host,
    pub port: u16,
    /// The only audience of identities sent to it.
    pub audience: String,
    pub proof: ServiceAuthSettings,
}

/// How Sandbar authenticates to a memory service, and which principal it sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceAuthSettings {
    ApiKey {
        credential: CredentialName,
        principal: PrincipalTemplate,
    },
    Principal(PrincipalTemplate),
    Token {
        /// The file of the signing key.
        key: String,
        issuer: String,
        trust_domain: String,
    },
}

/// Settings of connections to origin servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Files of root certificates.
    pub roots: Vec<String>,
    pub system_roots: SystemRootsSetting,
    /// The firewall mark of Sandbar's own connections, which exempts them from the redirect.
    pub mark: Option<u32>,
}

/// Whether to trust the operating system's roots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemRootsSetting {
    #[default]
    Trusted,
    Ignored,
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        UpstreamSettings { roots: Vec::new(), system_roots: SystemRootsSetting::Trusted, mark: None }
    }
}

/// The source of a listener's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindTarget {
    /// Opened by the parent process: a name of `LISTEN_FDNAMES`, or a file descriptor number.
    Inherited(String),
    Tcp(SocketAddr),
    /// A path.
    Unix(String),
}

impl BindTarget {
    /// Parses `address:port`, `unix:PATH` or `inherited:NAME`.
    pub fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(BindTarget::Unix(path.to_owned())),
            Some(("inherited", name)) if !name.is_empty() => Some(BindTarget::Inherited(name.to_owned())),
            _ => text.parse().ok().map(BindTarget::Tcp),
        }
    }

    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            BindTarget::Tcp(address) => Some(*address),
            BindTarget::Inherited(_) | BindTarget::Unix(_) => None,
        }
    }
}

/// Where connections arrive, and how Sandbar attributes them to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    pub mode: ListenerMode,
    pub bind: Vec<BindTarget>,
    pub attribution: Attribution,
}

/// The protocol of a listener, or how it learns the original destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerMode {
    Dns,
    Explicit,
    Redirect,
    Tproxy,
}

impl ListenerMode {
    /// As written in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            ListenerMode::Dns => "dns",
            ListenerMode::Explicit => "explicit",
            ListenerMode::Redirect => "redirect",
            ListenerMode::Tproxy => "tproxy",
        }
    }
}

/// How a listener identifies the sandbox of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribution {
    Dedicated(SandboxId),
    Interface,
    Mark,
    SourceAddress,
    Unix,
}

/// Upstream resolvers of the DNS filter, and how it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsSettings {
    pub upstreams: Vec<SocketAddr>,
    pub zones: Vec<ForwardZone>,
    pub hosts: Vec<HostEntry>,
    pub denial: DenialForm,
    pub grid_milliseconds: u64,
    pub forwards_per_hour: u64,
    pub fold_seconds: u64,
    pub pre_resolve: PreResolve,
    pub reverse: ReverseLookups,
    pub synthetic: Ipv4Net,
}

/// A zone with its own resolvers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardZone {
    pub name: DomainName,
    pub upstreams: Vec<SocketAddr>,
}

/// A name with fixed addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEntry {
    pub name: DomainName,
    pub addresses: Vec<IpAddr>,
}

/// The DNS answer for a refused name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialForm {
    /// NODATA: the name exists but has no such record.
    NoData,
    /// NXDOMAIN: the name does not exist. Stub resolvers continue with their search list and give up fast.
    NxDomain,
    /// REFUSED: not cached, but a hard failure to some stub resolvers.
    Refused,
    /// An address where nothing listens.
    Sinkhole,
}

/// Whether to resolve the exact names of policies in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreResolve {
    Off,
    On,
}

/// Whether to answer reverse lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReverseLookups {
    /// Answers those of addresses that the sandbox received, from the filter's own state.
    Known,
    Off,
}

impl DnsSettings {
    /// Default time grid on which queries leave, in milliseconds.
    pub const GRID_MILLISECONDS: u64 = 100;
    /// Default limit of queries per hour that a sandbox can cause to leave.
    pub const FORWARDS_PER_HOUR: u64 = 1200;
    /// Default time in seconds during which answers without an upstream query share one record.
    pub const FOLD_SECONDS: u64 = 10;
    /// Default range of synthetic addresses. RFC 2544 reserves it for benchmarks: no host has such an address, and
    /// programs do not mistake it for their local network.
    pub const SYNTHETIC: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15);

    /// Returns the default settings with the given resolvers.
    pub fn new(upstreams: Vec<SocketAddr>) -> Self {
        DnsSettings {
            upstreams,
            zones: Vec::new(),
            hosts: Vec::new(),
            denial: DenialForm::NxDomain,
            grid_milliseconds: Self::GRID_MILLISECONDS,
            forwards_per_hour: Self::FORWARDS_PER_HOUR,
            fold_seconds: Self::FOLD_SECONDS,
            pre_resolve: PreResolve::On,
            reverse: ReverseLookups::Off,
            synthetic: Self::SYNTHETIC,
        }
    }
}
