//! The two files as written: policies and the configuration. `policy_builder`, `configuration` and `sandboxes`
//! give them meaning.
//!
//! The structs are plain and spanned, so that a misspelt key or an invalid list entry is reported at its
//! location. Doc comments of the fields become descriptions in the JSON Schema.

use schemars::JsonSchema;
use serde::Deserialize;
use toml::Spanned;

use super::credential_document::CredentialDocument;
use crate::limits::LimitsDocument;
use crate::quota::QuotaDocument;
use crate::signals::shape::ThresholdsDocument;

/// A policy, `policies/*.toml`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Sandbar policy")]
pub(crate) struct PolicyDocument {
    /// The policy's name, which `[[sandbox]]` entries refer to.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// TLS treatment for rules that do not set their own; default `intercept`.
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
    /// What to do about what leaves, for every rule of the policy.
    pub(crate) signals: Option<SignalsDocument>,
    #[serde(default)]
    #[schemars(with = "Vec<TestDocument>")]
    pub(crate) test: Vec<Spanned<TestDocument>>,
}

/// `[[allow]]`: destinations the sandbox may reach, and on which terms.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowDocument {
    /// The rule's name; every record of the rule carries it.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Host patterns: `x.com`, `*.x.com` (below, not the apex), `.x.com` (both), each with `:port` if not 443. An empty list allows nothing.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hosts: Option<Vec<Spanned<String>>>,
    /// A file of host patterns, one per line, relative to the policy.
    #[schemars(with = "Option<String>")]
    pub(crate) hosts_file: Option<Spanned<String>>,
    /// Literal IP targets as networks (`10.2.3.4/32`); needs `ports` or `tcp`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) addresses: Option<Vec<Spanned<String>>>,
    /// The ports of patterns without one; default 443.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) ports: Option<Vec<Spanned<u16>>>,
    /// Ports for raw TCP with any protocol; the hosts must be exact names.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) tcp: Option<Vec<Spanned<u16>>>,
    /// Request methods; needs interception. Default: every method.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) methods: Option<Vec<Spanned<String>>>,
    /// Shorthand for `methods`.
    #[schemars(with = "Option<AccessDocument>")]
    pub(crate) access: Option<Spanned<AccessDocument>>,
    /// Path patterns: `*` is one segment, `**` any number; needs interception. Default: every path.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) paths: Option<Vec<Spanned<String>>>,
    /// The only networks the hosts may resolve to; required to reach a private range.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) resolves_to: Option<Vec<Spanned<String>>>,
    /// Whether to intercept TLS or tunnel it.
    #[schemars(with = "Option<TlsDocument>")]
    pub(crate) tls: Option<Spanned<TlsDocument>>,
    /// How a tunnel treats Encrypted ClientHello; default `refuse`.
    #[schemars(with = "Option<EchDocument>")]
    pub(crate) ech: Option<Spanned<EchDocument>>,
    /// The name of a credential to inject; never its value.
    #[schemars(with = "Option<String>")]
    pub(crate) credential: Option<Spanned<String>>,
    /// Allowed DNS query types; default `A`, `AAAA` and `HTTPS`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) dns_types: Option<Vec<Spanned<String>>>,
    /// Whether every CNAME target must be allowed too (`strict`).
    #[schemars(with = "Option<CnameDocument>")]
    pub(crate) cname: Option<Spanned<CnameDocument>>,
    /// Bits per hour that may leave in DNS names under this rule's wildcards.
    pub(crate) dns_bits_per_hour: Option<u64>,
    /// Permits `*`, public suffixes and wildcards of them, and networks that include special ranges.
    #[serde(default)]
    pub(crate) dangerously_wide: bool,
    /// The only header fields that requests keep, besides those that HTTP itself needs; needs interception. Default: every field.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) headers: Option<Vec<Spanned<String>>>,
    /// Whether to search the bodies of requests; default true. Needs interception if true is written.
    #[schemars(with = "Option<bool>")]
    pub(crate) inspect: Option<Spanned<bool>>,
    /// Whether the hosts may receive recalled text of every memory bank.
    #[schemars(with = "Option<ReceiveDocument>")]
    pub(crate) memory: Option<Spanned<ReceiveDocument>>,
    /// The memory banks whose recalled text the hosts may receive, such as `staging:shared-*`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) receives_banks: Option<Vec<Spanned<String>>>,
    /// What to do about what leaves by this rule, instead of what the policy says.
    pub(crate) signals: Option<SignalsDocument>,
    /// Budgets of this rule alone.
    pub(crate) budget: Option<RuleBudgetDocument>,
}

/// `[[deny]]`: destinations to refuse, whatever allows them.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DenyDocument {
    /// The rule's name; default `deny <first host>`.
    #[schemars(with = "Option<String>")]
    pub(crate) name: Option<Spanned<String>>,
    /// Host patterns; without `:port` they match every port.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hosts: Option<Vec<Spanned<String>>>,
    /// A file of host patterns, one per line, relative to the policy.
    #[schemars(with = "Option<String>")]
    pub(crate) hosts_file: Option<Spanned<String>>,
    /// Literal IP targets as networks.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) addresses: Option<Vec<Spanned<String>>>,
    /// Deny only these ports; default: every port.
    #[schemars(with = "Option<Vec<u16>>")]
    pub(crate) ports: Option<Vec<Spanned<u16>>>,
    /// Deny only these methods; forces interception of the hosts.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) methods: Option<Vec<Spanned<String>>>,
    /// Deny only these paths; forces interception of the hosts.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) paths: Option<Vec<Spanned<String>>>,
}

/// `[[memory]]`: a memory service, and the banks the sandbox may use.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryDocument {
    /// The rule's name; every record of the rule carries it.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// The service's exact host, with its port if not 443.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// The only networks the host may resolve to.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) resolves_to: Option<Vec<Spanned<String>>>,
    /// The built-in profile of the service's API: `astrocyte`.
    #[schemars(with = "String")]
    pub(crate) profile: Spanned<String>,
    /// Whether requests must carry a signed identity (`required`, the default) or take the identity of the channel they arrived on (`from-channel`).
    pub(crate) identity: Option<IdentityModeDocument>,
    /// The environment of all banks of the service, if bank names do not carry one (`staging:team-a`).
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    /// Banks the sandbox may read, such as `staging:shared-*`.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) recall: Vec<Spanned<String>>,
    /// Banks the sandbox may write.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) retain: Vec<Spanned<String>>,
    /// Banks the sandbox may delete content from.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forget: Vec<Spanned<String>>,
    /// Other banks whose recalled text the sandbox may retain here.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) receives_banks: Option<Vec<Spanned<String>>>,
    /// What to do about what leaves by this rule, instead of what the policy says.
    pub(crate) signals: Option<SignalsDocument>,
}

/// What to do about what leaves: `off`, `flag` (record a finding) or `deny` (refuse it). Layers: the stricter counts.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignalsDocument {
    /// Uploads that repeat at one interval or exceed what the host usually gets; default `flag`.
    pub(crate) body: Option<SignalModeDocument>,
    /// Canaries: `deny` (the default) or `flag`; a canary is always an alarm.
    pub(crate) canaries: Option<CanaryModeDocument>,
    /// Unusual header fields, encoded values in them, and more header bits than usual; default `flag`.
    pub(crate) headers: Option<SignalModeDocument>,
    /// Recalled text of memory banks for hosts that may not receive it; default `flag`.
    pub(crate) memory_flow: Option<SignalModeDocument>,
    /// Shapes of keys, tokens and passwords; default `flag`.
    pub(crate) secrets: Option<SignalModeDocument>,
    /// Beyond which values signals are raised.
    pub(crate) thresholds: Option<ThresholdsDocument>,
    /// Unusual paths and queries, and encoded values in them; default `flag`.
    pub(crate) url: Option<SignalModeDocument>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SignalModeDocument {
    Deny,
    Flag,
    Off,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CanaryModeDocument {
    Deny,
    Flag,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ReceiveDocument {
    MayReceive,
}

/// Usage limits; if several apply, the smallest counts. Zero allows nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BudgetDocument {
    /// Concurrent connections.
    pub(crate) connections: Option<u64>,
    /// Bits that may leave in DNS names, in any hour.
    pub(crate) dns_bits_per_hour: Option<u64>,
    /// Bytes of responses, and of tunnels towards the sandbox, in any day.
    pub(crate) download_bytes_per_day: Option<u64>,
    /// Bytes of responses, and of tunnels towards the sandbox, in any hour.
    pub(crate) download_bytes_per_hour: Option<u64>,
    /// Bits that requests may say outside their bodies, in any hour.
    pub(crate) header_bits_per_hour: Option<u64>,
    /// How long a sandbox may use the network, in seconds.
    pub(crate) lifetime_seconds: Option<u64>,
    /// Requests and tunnels, in any day.
    pub(crate) requests_per_day: Option<u64>,
    /// Requests and tunnels, in any hour.
    pub(crate) requests_per_hour: Option<u64>,
    /// Requests and tunnels, in any minute.
    pub(crate) requests_per_minute: Option<u64>,
    /// Bytes of requests including their heads, and of tunnels from the sandbox, in any day.
    pub(crate) upload_bytes_per_day: Option<u64>,
    /// Bytes of requests including their heads, and of tunnels from the sandbox, in any hour.
    pub(crate) upload_bytes_per_hour: Option<u64>,
}

/// Usage limits of one rule; if several apply, the smallest counts. Zero allows nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleBudgetDocument {
    /// Concurrent connections.
    pub(crate) connections: Option<u64>,
    /// Bits that may leave in DNS names, in any hour.
    pub(crate) dns_bits_per_hour: Option<u64>,
    /// Bytes of responses, and of tunnels towards the sandbox, in any day.
    pub(crate) download_bytes_per_day: Option<u64>,
    /// Bytes of responses, and of tunnels towards the sandbox, in any hour.
    pub(crate) download_bytes_per_hour: Option<u64>,
    /// Bits that requests may say outside their bodies, in any hour.
    pub(crate) header_bits_per_hour: Option<u64>,
    /// Requests and tunnels, in any day.
    pub(crate) requests_per_day: Option<u64>,
    /// Requests and tunnels, in any hour.
    pub(crate) requests_per_hour: Option<u64>,
    /// Requests and tunnels, in any minute.
    pub(crate) requests_per_minute: Option<u64>,
    /// Bytes of requests including their heads, and of tunnels from the sandbox, in any day.
    pub(crate) upload_bytes_per_day: Option<u64>,
    /// Bytes of requests including their heads, and of tunnels from the sandbox, in any hour.
    pub(crate) upload_bytes_per_hour: Option<u64>,
}

/// `[[test]]`: an attempt with its expected decision; `check`, `test` and every reload run it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TestDocument {
    /// The name of the test.
    pub(crate) name: Option<String>,
    /// The expected decision.
    #[schemars(with = "ExpectDocument")]
    pub(crate) expect: Spanned<ExpectDocument>,
    /// A URL, or a host with its port if not 443.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// A request method; without `method` and `path` only the connection is tested.
    #[schemars(with = "Option<String>")]
    pub(crate) method: Option<Spanned<String>>,
    /// A request path.
    #[schemars(with = "Option<String>")]
    pub(crate) path: Option<Spanned<String>>,
    /// `tcp` tests raw TCP instead of TLS.
    pub(crate) protocol: Option<ProtocolDocument>,
    /// A DNS query type; only the lookup is tested.
    #[schemars(with = "Option<String>")]
    pub(crate) dns: Option<Spanned<String>>,
    /// A memory bank, to test a memory request.
    #[schemars(with = "Option<String>")]
    pub(crate) bank: Option<Spanned<String>>,
    /// The operation of the memory request; default `recall`.
    pub(crate) operation: Option<BankOperationDocument>,
    /// The sandbox's environment, if its `[[sandbox]]` sets none.
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    /// The sandbox to test; default: every sandbox with this policy.
    #[schemars(with = "Option<String>")]
    pub(crate) sandbox: Option<Spanned<String>>,
    /// The expected reason code of a denial.
    #[schemars(with = "Option<String>")]
    pub(crate) reason: Option<Spanned<String>>,
    /// The rule expected to decide.
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
pub(crate) enum CnameDocument {
    Flatten,
    Strict,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum IdentityModeDocument {
    FromChannel,
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

/// `sandbar.toml`: the configuration.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Sandbar configuration")]
pub(crate) struct ConfigurationDocument {
    /// The directory of policy files, relative to this file.
    #[schemars(with = "Option<String>")]
    pub(crate) policies: Option<Spanned<String>>,
    /// What a reload does if the files on disk are invalid; default `keep`.
    pub(crate) on_invalid: Option<OnInvalidDocument>,
    pub(crate) log: Option<LogDocument>,
    pub(crate) dns: Option<DnsDocument>,
    pub(crate) admin: Option<AdminDocument>,
    pub(crate) ca: Option<CaDocument>,
    pub(crate) upstream: Option<UpstreamDocument>,
    pub(crate) grants: Option<GrantsDocument>,
    pub(crate) limits: Option<LimitsDocument>,
    pub(crate) quota: Option<QuotaDocument>,
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
    #[schemars(with = "Vec<SecretPatternDocument>")]
    pub(crate) secret_pattern: Vec<Spanned<SecretPatternDocument>>,
    #[serde(default)]
    #[schemars(with = "Vec<SandboxDocument>")]
    pub(crate) sandbox: Vec<Spanned<SandboxDocument>>,
}

/// `[[secret_pattern]]`: a shape of secrets of your own, besides those that Sandbar knows.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SecretPatternDocument {
    /// What it is, in words for findings.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// A literal prefix with a character class and a length, such as `acme_[A-Za-z0-9]{32}`, or a literal text.
    #[schemars(with = "String")]
    pub(crate) pattern: Spanned<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnInvalidDocument {
    /// Refuse everything and cut open connections.
    Deny,
    /// Keep the current rules.
    Keep,
}

/// `[log]`: the access log.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogDocument {
    /// The directory of the log segments.
    #[schemars(with = "String")]
    pub(crate) dir: Spanned<String>,
    /// How long closed segments are kept, such as `30d`; units `s`, `m`, `h`, `d`. Absent: for ever.
    #[schemars(with = "Option<String>")]
    pub(crate) retention: Option<Spanned<String>>,
    /// Bytes of the log on disk, divided among the sandboxes; default 80 % of the disk's free space and the log.
    #[schemars(with = "Option<u64>")]
    pub(crate) max_bytes: Option<Spanned<u64>>,
    /// A segment ends when it has this many bytes; default 67108864.
    #[schemars(with = "Option<u64>")]
    pub(crate) segment_bytes: Option<Spanned<u64>>,
    /// A segment ends when it is this old; default `1d`.
    #[schemars(with = "Option<String>")]
    pub(crate) segment_age: Option<Spanned<String>>,
    /// What a record survives before its attempt proceeds; default `process`.
    pub(crate) durability: Option<DurabilityDocument>,
    /// Whether closed segments are compressed; default false.
    pub(crate) compress: Option<bool>,
    /// Whether records contain query strings, which often carry secrets; default false.
    pub(crate) query_strings: Option<bool>,
    /// Attempts that may be under way at the same time, divided among the sandboxes; default 65536.
    #[schemars(with = "Option<u64>")]
    pub(crate) open_decisions: Option<Spanned<u64>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DurabilityDocument {
    /// A power loss.
    Disk,
    /// The death of Sandbar's process.
    Process,
}

/// `[admin]`: the admin API of the running instance.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdminDocument {
    /// The unix socket; default `admin.sock` in the log directory.
    #[schemars(with = "String")]
    pub(crate) socket: Spanned<String>,
}

/// `[ca]`: the certificate authority that signs the certificates sandboxes see.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaDocument {
    /// The directory of the certificate authority, as `sandbar ca init` creates it; default `ca` next to this file.
    #[schemars(with = "String")]
    pub(crate) dir: Spanned<String>,
}

/// `[upstream]`: connections to origin servers.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UpstreamDocument {
    /// Files of root certificates to trust.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) roots: Vec<Spanned<String>>,
    /// Whether to trust the operating system's roots too; default true.
    pub(crate) system_roots: Option<bool>,
    /// The firewall mark (`SO_MARK`) of Sandbar's own connections; needs CAP_NET_ADMIN.
    pub(crate) mark: Option<u32>,
}

/// `[grants]`: limits on grants.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GrantsDocument {
    /// Host patterns that no grant may match.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forbid_hosts: Vec<Spanned<String>>,
    /// Bases (`untrusted`, `user`, `system`, or a policy) whose sandboxes get no grants.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) forbid_bases: Vec<Spanned<String>>,
    /// Longest duration of a grant in seconds; default one day.
    #[schemars(with = "Option<u64>")]
    pub(crate) most_seconds: Option<Spanned<u64>>,
}

/// `[dns]`: upstream resolvers, and how the DNS filter answers.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DnsDocument {
    /// Resolvers as `address:port`.
    #[schemars(with = "Vec<String>")]
    pub(crate) upstreams: Vec<Spanned<String>>,
    /// Zones with their own resolvers, such as `cluster.local`; the longest match wins.
    #[serde(default)]
    #[schemars(with = "Vec<ZoneDocument>")]
    pub(crate) zone: Vec<Spanned<ZoneDocument>>,
    /// Names with fixed addresses, answered without a resolver. A rule must still allow them.
    #[serde(default)]
    #[schemars(with = "Vec<HostDocument>")]
    pub(crate) host: Vec<Spanned<HostDocument>>,
    /// The answer for a refused name; default `nxdomain`.
    pub(crate) denial: Option<DenialDocument>,
    /// Time grid on which queries leave, so that their timing carries less information; default 100, strict 1000, 0 disables it.
    #[schemars(with = "Option<u64>")]
    pub(crate) grid_milliseconds: Option<Spanned<u64>>,
    /// Most queries per hour that a sandbox can cause to leave; default 1200, strict 240.
    #[schemars(with = "Option<u64>")]
    pub(crate) forwards_per_hour: Option<Spanned<u64>>,
    /// Seconds during which answers without an upstream query share one record; default 10, 0 records each.
    #[schemars(with = "Option<u64>")]
    pub(crate) fold_seconds: Option<Spanned<u64>>,
    /// Whether to resolve the exact names of policies in advance, so that not even the time of a lookup leaves; default true.
    pub(crate) pre_resolve: Option<bool>,
    /// Whether to answer a sandbox's reverse lookups of addresses it received; default false, which refuses them.
    pub(crate) reverse: Option<bool>,
    /// The range of synthetic addresses for names reached by raw TCP; default `198.18.0.0/15`.
    #[schemars(with = "Option<String>")]
    pub(crate) synthetic: Option<Spanned<String>>,
}

/// `[[dns.zone]]`: a zone with its own resolvers.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ZoneDocument {
    /// The zone, such as `internal`, with every name below it.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Its resolvers as `address:port`.
    #[schemars(with = "Vec<String>")]
    pub(crate) upstreams: Vec<Spanned<String>>,
}

/// `[[dns.host]]`: a name with fixed addresses.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostDocument {
    /// The exact name.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Its addresses.
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

/// `[[listener]]`: where connections arrive, and how Sandbar attributes them to a sandbox.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListenerDocument {
    /// The protocol of the listener, or how it learns the original destination.
    #[schemars(with = "ModeDocument")]
    pub(crate) mode: Spanned<ModeDocument>,
    /// `address:port`; for `explicit` also `unix:PATH`; `inherited:NAME` for a socket passed by systemd.
    #[schemars(with = "Vec<String>")]
    pub(crate) bind: Vec<Spanned<String>>,
    /// The one sandbox that can reach this listener.
    #[schemars(with = "Option<String>")]
    pub(crate) sandbox: Option<Spanned<String>>,
    /// How a shared listener identifies the sandbox.
    #[schemars(with = "Option<AttributionDocument>")]
    pub(crate) identify: Option<Spanned<AttributionDocument>>,
    /// Other sandboxes reach this listener's address, and only a firewall keeps them from its port.
    #[serde(default)]
    pub(crate) dangerously_share_address: bool,
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

/// `[identity]`: trusted issuers of signed identities.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignedIdentityDocument {
    /// A file of revoked tokens, sandboxes, generations, tenants and keys; reloaded when it changes.
    #[schemars(with = "Option<String>")]
    pub(crate) revocations: Option<Spanned<String>>,
    #[schemars(with = "Vec<IssuerDocument>")]
    pub(crate) issuer: Vec<Spanned<IssuerDocument>>,
}

/// `[[identity.issuer]]`: a trusted issuer, and what it may sign.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IssuerDocument {
    /// The exact `iss`. Without it Sandbar selects the issuer by trust domain alone, as for tokens from SPIRE.
    #[schemars(with = "Option<String>")]
    pub(crate) name: Option<Spanned<String>>,
    /// The only trust domain it may sign for.
    #[schemars(with = "String")]
    pub(crate) trust_domain: Spanned<String>,
    /// The file of its JWK Set; reloaded when it changes.
    #[schemars(with = "String")]
    pub(crate) keys: Spanned<String>,
    /// The only environments it may name; default: all.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) environments: Option<Vec<Spanned<String>>>,
    /// The only tenants it may name; default: all.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) tenants: Option<Vec<Spanned<String>>>,
    /// Accepted algorithms of `ES256`, `RS256` and `EdDSA`; default `ES256`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) algorithms: Option<Vec<Spanned<String>>>,
    /// Longest lifetime of its tokens, in seconds; default 600.
    pub(crate) life_seconds: Option<u64>,
}

/// `[[memory_service]]`: how Sandbar authenticates to a memory service. Without one for its host Sandbar sends nothing there.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryServiceDocument {
    /// The service's exact host, with its port if not 443, as in the `[[memory]]` rules.
    #[schemars(with = "String")]
    pub(crate) host: Spanned<String>,
    /// The service's logical name: the only `aud` of identities sent to it.
    #[schemars(with = "String")]
    pub(crate) audience: Spanned<String>,
    /// How Sandbar authenticates.
    #[schemars(with = "ServiceModeDocument")]
    pub(crate) mode: Spanned<ServiceModeDocument>,
    /// For `api-key`: the name of the `[[credential]]` that holds the key.
    #[schemars(with = "Option<String>")]
    pub(crate) credential: Option<Spanned<String>>,
    /// For `api-key` and `principal`: the principal Sandbar sends, a template of `{agent_card}`, `{environment}`, `{sandbox}` and `{tenant}`; default `agent:{sandbox}`.
    #[schemars(with = "Option<String>")]
    pub(crate) principal: Option<Spanned<String>>,
    /// For `token`: the signing key, in PKCS#8 PEM.
    #[schemars(with = "Option<String>")]
    pub(crate) key: Option<Spanned<String>>,
    /// For `token`: the issuer (`iss`).
    #[schemars(with = "Option<String>")]
    pub(crate) issuer: Option<Spanned<String>>,
    /// For `token`: the trust domain of the sandboxes it names.
    #[schemars(with = "Option<String>")]
    pub(crate) trust_domain: Option<Spanned<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ServiceModeDocument {
    /// A shared key, together with the principal.
    ApiKey,
    /// The principal alone, for a service that only Sandbar can reach.
    Principal,
    /// A token with a lifetime of at most a minute, signed for each sandbox.
    Token,
}

/// `[[sandbox]]`: its identity, its channels and its policies.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SandboxDocument {
    /// The sandbox's id, which records carry.
    #[schemars(with = "String")]
    pub(crate) id: Spanned<String>,
    /// Its owner; identity tokens must name the same.
    #[schemars(with = "Option<String>")]
    pub(crate) tenant: Option<Spanned<String>>,
    /// Its environment, such as `staging`; identity tokens and memory banks must name the same.
    #[schemars(with = "Option<String>")]
    pub(crate) environment: Option<Spanned<String>>,
    /// The kind of agent that runs in it, for the `principal` of a memory service.
    #[schemars(with = "Option<String>")]
    pub(crate) agent_card: Option<Spanned<String>>,
    /// How many times a sandbox with this id was created; Sandbar refuses identity tokens of earlier generations.
    pub(crate) generation: Option<u64>,
    /// A tier (`untrusted`, `user`, `system`) or a policy of the operator; default `user`.
    #[schemars(with = "Option<String>")]
    pub(crate) base: Option<Spanned<String>>,
    /// The sandbox's own policies; without any, Sandbar allows nothing.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) policies: Vec<Spanned<String>>,
    /// The firewall mark of its connections.
    #[schemars(with = "Option<u32>")]
    pub(crate) mark: Option<Spanned<u32>>,
    /// The interface its packets arrive on.
    #[schemars(with = "Option<String>")]
    pub(crate) interface: Option<Spanned<String>>,
    /// The uid of its peer on a unix socket.
    #[schemars(with = "Option<u32>")]
    pub(crate) unix_uid: Option<Spanned<u32>>,
    /// The network it sends from; needs `dangerously_trust_source_address`.
    #[schemars(with = "Option<String>")]
    pub(crate) source_address: Option<Spanned<String>>,
    /// Trusts source addresses, which a neighbour on a shared bridge can spoof.
    #[serde(default)]
    pub(crate) dangerously_trust_source_address: bool,
}
