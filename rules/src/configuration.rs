//! What the operator's file says beyond sandboxes: listeners, resolvers, where the log lies. It is
//! plain data for whoever builds the program; only a restart changes it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ipnet::Ipv4Net;

use crate::ids::{CredentialName, Environment, SandboxId, Tenant};
use crate::limits::TrafficLimits;
use crate::name::{DomainName, Host};
use crate::pattern::HostPattern;
use crate::principal::PrincipalTemplate;

/// The settings of one instance.
#[derive(Clone, Debug, Default)]
pub struct Configuration {
    /// As written: relative to the file.
    pub log_dir: Option<String>,
    pub on_invalid: OnInvalid,
    /// As written: relative to the file.
    pub admin_socket: Option<String>,
    /// The directory of the certificate authority, as written: relative to the file.
    pub ca_dir: Option<String>,
    pub credentials: Vec<CredentialFile>,
    pub dns: Option<DnsSettings>,
    pub grants: GrantSettings,
    pub limits: TrafficLimits,
    pub listeners: Vec<ListenerSettings>,
    pub upstream: UpstreamSettings,
    pub identity: Option<IdentitySettings>,
    pub memory_services: Vec<MemoryService>,
}

/// What no grant may open, and for how long one may last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantSettings {
    pub forbid_hosts: Vec<HostPattern>,
    /// Bases by name: tiers, or policies.
    pub forbid_bases: Vec<String>,
    pub most_seconds: u64,
}

impl Default for GrantSettings {
    fn default() -> Self {
        let (forbid_hosts, forbid_bases) = (Vec::new(), Vec::new());
        GrantSettings { forbid_hosts, forbid_bases, most_seconds: 86_400 }
    }
}

/// What happens while the files on disk are not good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnInvalid {
    /// Nothing passes, and what is open is cut.
    Deny,
    /// The rules in force stay.
    #[default]
    Keep,
}

/// Whose signed identities are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentitySettings {
    /// As written: relative to the file.
    pub revocations: Option<String>,
    pub issuers: Vec<IssuerSettings>,
}

/// One who signs identities, and how far it is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerSettings {
    pub name: Option<String>,
    pub trust_domain: String,
    /// Its JWK Set, as written: relative to the file.
    pub keys: String,
    pub environments: Option<Vec<Environment>>,
    pub tenants: Option<Vec<Tenant>>,
    pub algorithms: Option<Vec<String>>,
    pub life_seconds: Option<u64>,
}

/// A memory service, and as whom it is spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryService {
    pub host: Host,
    pub port: u16,
    /// The one audience of identities sent to it.
    pub audience: String,
    pub proof: ServiceAuthSettings,
}

/// How a memory service knows us, and for whom we ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceAuthSettings {
    ApiKey {
        credential: CredentialName,
        principal: PrincipalTemplate,
    },
    Principal(PrincipalTemplate),
    /// The key as written: relative to the file.
    Token {
        key: String,
        issuer: String,
        trust_domain: String,
    },
}

/// Where the value of a credential is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFile {
    pub name: CredentialName,
    /// As written: relative to the file.
    pub file: String,
}

/// How origins are reached and believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Files of root certificates, as written: relative to the file.
    pub roots: Vec<String>,
    pub system_roots: SystemRootsSetting,
    /// The firewall mark of our own connections, by which the redirect lets them pass.
    pub mark: Option<u32>,
}

/// Whether the roots of the operating system are believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemRootsSetting {
    #[default]
    Trusted,
    Ignored,
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        UpstreamSettings {
            roots: Vec::new(),
            system_roots: SystemRootsSetting::Trusted,
            mark: None,
        }
    }
}

/// Where a listener's socket comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindTarget {
    /// Opened by whoever started us: a name of `LISTEN_FDNAMES`, or a descriptor's number.
    Inherited(String),
    Tcp(SocketAddr),
    /// A path, as written: relative to the file.
    Unix(String),
}

impl BindTarget {
    /// Parses `address:port`, `unix:PATH` or `inherited:NAME`.
    pub fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(BindTarget::Unix(path.to_owned())),
            Some(("inherited", name)) if !name.is_empty() => {
                Some(BindTarget::Inherited(name.to_owned()))
            }
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

/// Where connections arrive, and what tells whose they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    pub mode: ListenerMode,
    pub bind: Vec<BindTarget>,
    pub attribution: Attribution,
}

/// What a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerMode {
    Dns,
    Explicit,
    Redirect,
    Tproxy,
}

/// How a listener knows the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribution {
    Dedicated(SandboxId),
    Interface,
    Mark,
    SourceAddress,
    Unix,
}

/// Whom the DNS filter asks, and how it answers.
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

/// A zone with resolvers of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardZone {
    pub name: DomainName,
    pub upstreams: Vec<SocketAddr>,
}

/// A name whose addresses the operator says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEntry {
    pub name: DomainName,
    pub addresses: Vec<IpAddr>,
}

/// How a refused name is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialForm {
    /// The name exists and has no such record.
    NoData,
    /// The name does not exist: stub resolvers walk on through their search list and give up fast.
    NxDomain,
    /// REFUSED: not cached, but a hard failure to some stub resolvers.
    Refused,
    /// An address where nothing is.
    Sinkhole,
}

/// Whether the exact names of policies are resolved ahead of being asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreResolve {
    Off,
    On,
}

/// Whether reverse look-ups are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReverseLookups {
    /// Those of addresses that the sandbox was given, from what is known here.
    Known,
    Off,
}

impl DnsSettings {
    /// Milliseconds of the grid that queries leave on.
    pub const GRID_MILLISECONDS: u64 = 100;
    /// Most queries a sandbox can cause to leave in an hour.
    pub const FORWARDS_PER_HOUR: u64 = 1200;
    /// Seconds in which answers that sent nothing share one record.
    pub const FOLD_SECONDS: u64 = 10;
    /// RFC 2544: no host has these, and no program takes them for its own network.
    pub const SYNTHETIC: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15);

    /// The defaults, asking `upstreams`.
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
