//! The two files people write, as they write them and nothing more. What they mean is in `rule` and `sandboxes`.
//!
//! Plain structs with spans: a misspelt key is refused with its line, and every list entry keeps its own.

use schemars::JsonSchema;
use serde::Deserialize;
use toml::Spanned;

use crate::limits::LimitsDocument;

/// `policies/*.toml`: what a network team allows.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Sandbar policy")]
pub(crate) struct PolicyDocument {
    /// The name sandboxes refer to the policy by.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// What happens to TLS where a rule does not say; `intercept` unless written.
    #[schemars(with = "Option<TlsDocument>")]
    pub(crate) tls: Option<Spanned<TlsDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<AllowDocument>")]
    pub(crate) allow: Vec<Spanned<AllowDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<DenyDocument>")]
    pub(crate) deny: Vec<Spanned<DenyDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<MemoryDocument>")]
    pub(crate) memory: Vec<Spanned<MemoryDocument>>,
    pub(crate) budget: Option<BudgetDocument>,
    #[serde(default)]
    #[schemars(with = "Vec<TestDocument>")]
    pub(crate) test: Vec<Spanned<TestDocument>>,
}

/// `[[allow]]`: what may be reached, and on which terms.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowDocument {
    /// The rule's name; it stands in every record.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Host patterns: `x.com`, `*.x.com` (below, not the apex), `.x.com` (both), each with `:port` if not 443. An empty list opens none.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hosts: Option<Vec<Spanned<String>>>,
    /// A file of host patterns, one a line, beside the policy.
    #[schemars(with = "Option<String>")]
    pub(crate) hosts_file: Option<Spanned<String>>,
    /// Literal targets as networks (`10.2.3.4/32`); they need `ports`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) addresses: Option<Vec<Spanned<String>>>,
    /// The ports of patterns written without one; 443 unless written.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) ports: Option<Vec<Spanned<u16>>>,
    /// Ports for raw TCP of any protocol; the hosts must be exact names.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) tcp: Option<Vec<Spanned<u16>>>,
    /// Request methods; needs interception. Absent means every method.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) methods: Option<Vec<Spanned<String>>>,
    /// Shorthand for methods.
    #[schemars(with = "Option<AccessDocument>")]
    pub(crate) access: Option<Spanned<AccessDocument>>,
    /// Path patterns: `*` is one segment, `**` any number; needs interception. Absent means every path.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) paths: Option<Vec<Spanned<String>>>,
    /// The only networks the hosts may resolve to, and the only way to a private range.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) resolves_to: Option<Vec<Spanned<String>>>,
    /// Whether TLS is looked into or passed through.
    #[schemars(with = "Option<TlsDocument>")]
    pub(crate) tls: Option<Spanned<TlsDocument>>,
    /// What to do with encrypted client hellos on a tunnel; `refuse` unless written.
    #[schemars(with = "Option<EchDocument>")]
    pub(crate) ech: Option<Spanned<EchDocument>>,
    /// The name of a credential to inject; never its value.
    #[schemars(with = "Option<String>")]
    pub(crate) credential: Option<Spanned<String>>,
    /// Whether recalled memory may be sent there.
    #[schemars(with = "Option<ReceiveDocument>")]
    pub(crate) memory: Option<Spanned<ReceiveDocument>>,
    /// Whether bodies are searched for leaks; needs interception.
    #[schemars(with = "Option<bool>")]
    pub(crate) inspect: Option<Spanned<bool>>,
    /// DNS query types beyond addresses; `A`, `AAAA` and `HTTPS` unless written.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) dns_types: Option<Vec<Spanned<String>>>,
    /// Whether every CNAME target must be allowed too.
    #[schemars(with = "Option<CnameDocument>")]
    pub(crate) cname: Option<Spanned<CnameDocument>>,
    /// Bits an hour that may leave in DNS names under this rule's wildcards.
    pub(crate) dns_bits_per_hour: Option<u64>,
    /// Lets the rule name `*`, public suffixes and wildcards of them.
    #[serde(default)]
    pub(crate) dangerously_wide: bool,
    /// Budgets of this rule alone.
    pub(crate) budget: Option<BudgetDocument>,
}

/// `[[deny]]`: what is refused whatever else allows it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DenyDocument {
    /// The rule's name; `deny <first host>` unless written.
    #[schemars(with = "Option<String>")]
    pub(crate) name: Option<Spanned<String>>,
    /// Host patterns, on every port unless written with one.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hosts: Option<Vec<Spanned<String>>>,
    /// A file of host patterns, one a line, beside the policy.
    #[schemars(with = "Option<String>")]
    pub(crate) hosts_file: Option<Spanned<String>>,
    /// Literal targets as networks.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) addresses: Option<Vec<Spanned<String>>>,
    /// Only these ports; every port unless written.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) ports: Option<Vec<Spanned<u16>>>,
    /// Only these methods; forces interception of the hosts.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) methods: Option<Vec<Spanned<String>>>,
    /// Only these paths; forces interception of the hosts.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) paths: Option<Vec<Spanned<String>>>,
}

/// `[[memory]]`: a memory service, and the banks of it that may be used.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryDocument {
    /// The rule's name; it stands in every record.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// The service's exact host, with its port if not 443.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// The only networks the host may resolve to.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) resolves_to: Option<Vec<Spanned<String>>>,
    /// How the service is spoken to: `astrocyte`, `hindsight`, `mem0`, `zep`, `graphiti`, `mcp` or one of the operator's own.
    #[schemars(with = "String")]
    pub(crate) profile: Spanned<String>,
    /// Whether requests must carry a signed identity, or are given it by the path they came by; `required` unless written.
    pub(crate) identity: Option<IdentityModeDocument>,
    /// The environment of every bank there, where banks do not name their own (`staging:team-a`).
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    /// Banks that may be read, such as `staging:shared-*`.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) recall: Vec<Spanned<String>>,
    /// Banks that may be written.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) retain: Vec<Spanned<String>>,
    /// Banks whose content may be deleted.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forget: Vec<Spanned<String>>,
}

/// Limits over time; where several apply, the smallest counts. Zero lets nothing pass.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BudgetDocument {
    /// Connections open at once.
    pub(crate) connections: Option<u64>,
    /// Bits that may leave in DNS names.
    pub(crate) dns_bits_per_hour: Option<u64>,
    /// Bytes of answers and of tunnels towards the sandbox, in any day.
    pub(crate) download_bytes_per_day: Option<u64>,
    /// The same in any hour.
    pub(crate) download_bytes_per_hour: Option<u64>,
    /// How long a sandbox may use the network at all.
    pub(crate) lifetime_seconds: Option<u64>,
    /// Requests and tunnels, in any day.
    pub(crate) requests_per_day: Option<u64>,
    /// The same in any hour.
    pub(crate) requests_per_hour: Option<u64>,
    /// The same in any minute.
    pub(crate) requests_per_minute: Option<u64>,
    /// Bytes of requests, their heads included, and of tunnels from the sandbox, in any day.
    pub(crate) upload_bytes_per_day: Option<u64>,
    /// The same in any hour.
    pub(crate) upload_bytes_per_hour: Option<u64>,
}

/// `[[test]]`: an attempt and what must become of it; run by `check`, by `test` and by every reload.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TestDocument {
    /// What the test is about.
    pub(crate) name: Option<String>,
    #[schemars(with = "ExpectDocument")]
    pub(crate) expect: Spanned<ExpectDocument>,
    /// A URL, or a host with its port if not 443.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// A request method; without it and without a path only the connection is tried.
    #[schemars(with = "Option<String>")]
    pub(crate) method: Option<Spanned<String>>,
    /// A request path.
    #[schemars(with = "Option<String>")]
    pub(crate) path: Option<Spanned<String>>,
    /// `tcp` tries raw TCP instead of TLS.
    pub(crate) protocol: Option<ProtocolDocument>,
    /// A DNS query type: only the look-up is tried.
    #[schemars(with = "Option<String>")]
    pub(crate) dns: Option<Spanned<String>>,
    /// A memory bank, with `operation`.
    #[schemars(with = "Option<String>")]
    pub(crate) bank: Option<Spanned<String>>,
    /// What the memory request does.
    pub(crate) operation: Option<BankOperationDocument>,
    /// The sandbox's environment, where no `[[sandbox]]` says it.
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    /// The sandbox that tries; every sandbox with this policy unless written.
    #[schemars(with = "Option<String>")]
    pub(crate) sandbox: Option<Spanned<String>>,
    /// The reason code a denial must have.
    #[schemars(with = "Option<String>")]
    pub(crate) reason: Option<Spanned<String>>,
    /// The rule that must decide.
    pub(crate) rule: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TlsDocument {
    Intercept,
    Tunnel,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AccessDocument {
    /// GET, HEAD and OPTIONS.
    ReadOnly,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EchDocument {
    Refuse,
    Tolerate,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ReceiveDocument {
    MayReceive,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CnameDocument {
    Flatten,
    Strict,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum IdentityModeDocument {
    FromPath,
    Required,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ExpectDocument {
    Allow,
    Deny,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ProtocolDocument {
    Tcp,
    Tls,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BankOperationDocument {
    Forget,
    Recall,
    Retain,
}

/// `sandbar.toml`: the operator's file.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Sandbar operator file")]
pub(crate) struct ConfigurationDocument {
    /// The directory of policy files, relative to this file.
    #[schemars(with = "Option<String>")]
    pub(crate) policies: Option<Spanned<String>>,
    /// What happens while the files on disk are not good; `keep` unless written.
    pub(crate) on_invalid: Option<OnInvalidDocument>,
    pub(crate) log: Option<LogDocument>,
    pub(crate) dns: Option<DnsDocument>,
    pub(crate) admin: Option<AdminDocument>,
    pub(crate) ca: Option<CaDocument>,
    pub(crate) upstream: Option<UpstreamDocument>,
    pub(crate) grants: Option<GrantsDocument>,
    pub(crate) limits: Option<LimitsDocument>,
    #[serde(default)]
    #[schemars(with = "Vec<ListenerDocument>")]
    pub(crate) listener: Vec<Spanned<ListenerDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<CredentialDocument>")]
    pub(crate) credential: Vec<Spanned<CredentialDocument>>,
    pub(crate) identity: Option<SignedIdentityDocument>,
    #[serde(default)]
    #[schemars(with = "Vec<MemoryServiceDocument>")]
    pub(crate) memory_service: Vec<Spanned<MemoryServiceDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<SandboxDocument>")]
    pub(crate) sandbox: Vec<Spanned<SandboxDocument>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnInvalidDocument {
    /// Nothing passes, and what is open is cut.
    Deny,
    /// The rules in force stay.
    Keep,
}

/// `[log]`: where the access log is written.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogDocument {
    /// The directory of the log's segments.
    #[schemars(with = "String")]
    pub(crate) dir: Spanned<String>,
}

/// `[admin]`: where commands reach the running program.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdminDocument {
    /// The unix socket; `admin.sock` in the log's directory unless written.
    #[schemars(with = "String")]
    pub(crate) socket: Spanned<String>,
}

/// `[ca]`: who signs the certificates that sandboxes see.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaDocument {
    /// The directory of the authority, as `sandbar ca init` makes it; `ca` beside this file unless written.
    #[schemars(with = "String")]
    pub(crate) dir: Spanned<String>,
}

/// `[upstream]`: how origins are reached and believed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UpstreamDocument {
    /// Files of root certificates to believe.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) roots: Vec<Spanned<String>>,
    /// Whether the roots of the operating system are believed too; true unless written.
    pub(crate) system_roots: Option<bool>,
    /// The firewall mark of our own connections; setting it needs CAP_NET_ADMIN.
    pub(crate) mark: Option<u32>,
}

/// `[grants]`: what no grant may open, and for how long one may last.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GrantsDocument {
    /// Host patterns that no grant may touch.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forbid_hosts: Vec<Spanned<String>>,
    /// Bases (`untrusted`, `user`, `system`, or a policy) whose sandboxes are given none.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forbid_bases: Vec<Spanned<String>>,
    /// The longest a grant may last; a day unless written.
    #[schemars(with = "Option<u64>")]
    pub(crate) most_seconds: Option<Spanned<u64>>,
}

/// `[dns]`: whom the filter asks, and how it answers.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DnsDocument {
    /// Resolvers as `address:port`.
    #[schemars(with = "Vec<String>")]
    pub(crate) upstreams: Vec<Spanned<String>>,
    /// Zones with resolvers of their own, such as `cluster.local`; the longest name wins.
    #[serde(default)]
    #[schemars(with = "Vec<ZoneDocument>")]
    pub(crate) zone: Vec<Spanned<ZoneDocument>>,
    /// Names whose addresses stand here; no resolver is asked for them. A rule must still allow them.
    #[serde(default)]
    #[schemars(with = "Vec<HostDocument>")]
    pub(crate) host: Vec<Spanned<HostDocument>>,
    /// How a refused name is answered; `nxdomain` unless written.
    pub(crate) denial: Option<DenialDocument>,
    /// Queries leave on this grid, so that their moment says less; 100 unless written, 1000 is strict, 0 is none.
    #[schemars(with = "Option<u64>")]
    pub(crate) grid_milliseconds: Option<Spanned<u64>>,
    /// Most queries a sandbox can cause to leave in an hour; 1200 unless written, 240 is strict.
    #[schemars(with = "Option<u64>")]
    pub(crate) forwards_per_hour: Option<Spanned<u64>>,
    /// Answers that sent nothing share one record for so long; 10 unless written, 0 records each.
    #[schemars(with = "Option<u64>")]
    pub(crate) fold_seconds: Option<Spanned<u64>>,
    /// Whether the exact names of policies are resolved ahead, so that not even the moment of a look-up leaves; true unless written.
    pub(crate) pre_resolve: Option<bool>,
    /// Whether a sandbox's reverse look-ups of addresses it was given are answered here; false unless written, and they are refused.
    pub(crate) reverse: Option<bool>,
    /// The range of addresses that stand for names reached by raw TCP; `198.18.0.0/15` unless written.
    #[schemars(with = "Option<String>")]
    pub(crate) synthetic: Option<Spanned<String>>,
}

/// `[[dns.zone]]`: a zone with resolvers of its own.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ZoneDocument {
    /// The zone, such as `internal`; every name below it is asked there.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Its resolvers as `address:port`.
    #[schemars(with = "Vec<String>")]
    pub(crate) upstreams: Vec<Spanned<String>>,
}

/// `[[dns.host]]`: a name whose addresses the operator says.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostDocument {
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    #[schemars(with = "Vec<String>")]
    pub(crate) addresses: Vec<Spanned<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DenialDocument {
    Nodata,
    Nxdomain,
    Refused,
    Sinkhole,
}

/// `[[listener]]`: where connections arrive, and what tells whose they are.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListenerDocument {
    #[schemars(with = "ModeDocument")]
    pub(crate) mode: Spanned<ModeDocument>,
    /// `address:port`; for `explicit` also `unix:PATH`; `inherited:NAME` for a socket that systemd passes on.
    #[schemars(with = "Vec<String>")]
    pub(crate) bind: Vec<Spanned<String>>,
    /// The one sandbox that reaches this listener.
    #[schemars(with = "Option<String>")]
    pub(crate) sandbox: Option<Spanned<String>>,
    /// How a shared listener tells its sandboxes apart.
    #[schemars(with = "Option<AttributionDocument>")]
    pub(crate) identify: Option<Spanned<AttributionDocument>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ModeDocument {
    Dns,
    Explicit,
    Redirect,
    Tproxy,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AttributionDocument {
    Interface,
    Mark,
    SourceAddress,
    Unix,
}

/// `[[credential]]`: where a secret comes from. The value itself never stands in a file of ours.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CredentialDocument {
    /// The name rules refer to it by.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// The file that holds the value.
    #[schemars(with = "String")]
    pub(crate) file: Spanned<String>,
}

/// `[identity]`: whose signed identities are believed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignedIdentityDocument {
    /// A file of revoked tokens, sandboxes, generations, tenants and keys; it is read again when it changes.
    #[schemars(with = "Option<String>")]
    pub(crate) revocations: Option<Spanned<String>>,
    #[schemars(with = "Vec<IssuerDocument>")]
    pub(crate) issuer: Vec<Spanned<IssuerDocument>>,
}

/// `[[identity.issuer]]`: one who signs identities, and how far it is believed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IssuerDocument {
    /// The exact `iss`. Without it tokens are known by their trust domain alone, as SPIRE writes them.
    #[schemars(with = "Option<String>")]
    pub(crate) name: Option<Spanned<String>>,
    /// The only trust domain it may speak for.
    #[schemars(with = "String")]
    pub(crate) trust_domain: Spanned<String>,
    /// Its JWK Set; it is read again when it changes.
    #[schemars(with = "String")]
    pub(crate) keys: Spanned<String>,
    /// The only environments it may name; every one unless written.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) environments: Option<Vec<Spanned<String>>>,
    /// The only tenants it may name; every one unless written.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) tenants: Option<Vec<Spanned<String>>>,
    /// `ES256` unless written; `RS256` and `EdDSA` are the others.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) algorithms: Option<Vec<Spanned<String>>>,
    /// Longest life of its tokens; 600 unless written.
    pub(crate) life_seconds: Option<u64>,
}

/// `[[memory_service]]`: as whom Sandbar speaks to a memory service. Without one for its host nothing is sent there.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryServiceDocument {
    /// The service's exact host, with its port if not 443, as the `[[memory]]` rules have it.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// The service's logical name: the one `aud` that identities sent to it must have.
    #[schemars(with = "String")]
    pub(crate) audience: Spanned<String>,
    /// How Sandbar proves itself there.
    #[schemars(with = "ServiceModeDocument")]
    pub(crate) mode: Spanned<ServiceModeDocument>,
    /// For `api-key`: the name of the `[[credential]]` that holds the key.
    #[schemars(with = "Option<String>")]
    pub(crate) credential: Option<Spanned<String>>,
    /// For `api-key` and `principal`: whom the service is told it serves, of `{agent_card}`, `{environment}`, `{sandbox}` and `{tenant}`; `agent:{sandbox}` unless written.
    #[schemars(with = "Option<String>")]
    pub(crate) principal: Option<Spanned<String>>,
    /// For `token`: the private key that signs, in PKCS#8 PEM.
    #[schemars(with = "Option<String>")]
    pub(crate) key: Option<Spanned<String>>,
    /// For `token`: as whom it signs (`iss`).
    #[schemars(with = "Option<String>")]
    pub(crate) issuer: Option<Spanned<String>>,
    /// For `token`: the trust domain of the sandboxes it names.
    #[schemars(with = "Option<String>")]
    pub(crate) trust_domain: Option<Spanned<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ServiceModeDocument {
    /// A shared key, and the principal beside it.
    ApiKey,
    /// The principal alone: for a service that nobody else can reach.
    Principal,
    /// A token of at most a minute, signed for each sandbox.
    Token,
}

/// `[[sandbox]]`: who it is, how its connections are recognised, what it is judged by.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SandboxDocument {
    #[schemars(with = "String")]
    pub(crate) id: Spanned<String>,
    #[schemars(with = "Option<String>")]
    pub(crate) tenant: Option<Spanned<String>>,
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    #[schemars(with = "Option<String>")]
    pub(crate) agent_card: Option<Spanned<String>>,
    /// Counts how often a sandbox of this id was made; older identity tokens are refused.
    pub(crate) generation: Option<u64>,
    /// A tier (`untrusted`, `user`, `system`) or a policy of the operator's own; `user` unless written.
    #[schemars(with = "Option<String>")]
    pub(crate) base: Option<Spanned<String>>,
    /// The sandbox's own policies; without any, nothing is allowed.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) policies: Vec<Spanned<String>>,
    /// The firewall mark its connections carry.
    #[schemars(with = "Option<u32>")]
    pub(crate) mark: Option<Spanned<u32>>,
    /// The interface its packets come in by.
    #[schemars(with = "Option<String>")]
    pub(crate) interface: Option<Spanned<String>>,
    /// The uid it has on a unix socket.
    #[schemars(with = "Option<u32>")]
    pub(crate) unix_uid: Option<Spanned<u32>>,
    /// The network it sends from; only with `dangerously_trust_source_address`.
    #[schemars(with = "Option<String>")]
    pub(crate) source_address: Option<Spanned<String>>,
    /// Believes source addresses, which a neighbour on a shared bridge can take.
    #[serde(default)]
    pub(crate) dangerously_trust_source_address: bool,
}
