//! `Reason`: why an attempt was refused. Its code is in the record, the metrics, the answer to the
//! client and `explain` alike; a code is never renamed or reused (P18).

use std::fmt;

/// Makes the enum and its texts from one table.
macro_rules! reasons {
    ($($name:ident $code:literal $meaning:literal $next:literal;)*) => {
        /// Why an attempt was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $meaning] $name,)*
        }

        impl Reason {
            /// Every reason, in the order of the table.
            pub const ALL: &[Reason] = &[$(Reason::$name,)*];

            /// The stable code.
            pub const fn code(self) -> &'static str {
                match self { $(Reason::$name => $code,)* }
            }

            /// What it means, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Reason::$name => $meaning,)* }
            }

            /// What the user can do about it.
            pub const fn next_step(self) -> &'static str {
                match self { $(Reason::$name => $next,)* }
            }
        }
    };
}

// One table is the enum, its codes, its texts and the documentation.
reasons! {
    AddressAsSni "address_as_sni"
        "The TLS hello names an address where a host name belongs."
        "Connect by host name.";
    AddressNotExpected "address_not_expected"
        "The name resolves to an address outside the rule's `resolves_to`."
        "Check where the name points; extend `resolves_to` if the new address is right.";
    AddressNotListed "address_not_listed"
        "The target is a literal address and no rule lists it under `addresses`."
        "Connect by host name, or list the address under `addresses` with its `ports`.";
    AmbiguousPath "ambiguous_path"
        "The path can be read in more than one way and a rule for this host looks at paths."
        "Send the plain form of the path: no `%2f`, `..`, `//`, `;` or backslash.";
    AnswerForeignBank "answer_foreign_bank"
        "The memory service answered with content of a bank that was not asked for; the answer was withheld."
        "Look at the memory service: it mixes banks, or routes them to another.";
    AnswerUnchecked "answer_unchecked"
        "The answer of the memory service could not be checked, or repeats a secret; it was withheld."
        "Ask for less at once; if that does not help, look at what the memory service answers.";
    AnswerUnreadable "answer_unreadable"
        "The origin encoded its answer although it was asked not to, so it cannot be searched for the credential."
        "Ask the origin's owner to honour `Accept-Encoding: identity`.";
    BadHandshake "bad_handshake"
        "The TLS hello is malformed, or the handshake failed."
        "Use TLS 1.2 or 1.3 and trust the authority of `sandbar ca`.";
    BadMethod "bad_method"
        "The request method is not an upper-case HTTP method."
        "Send a registered method in upper case.";
    BadName "bad_name"
        "The host name is malformed or can be read as an address."
        "Use the plain ASCII host name.";
    BadRequest "bad_request"
        "The request is malformed, or can be read in more than one way."
        "Send plain HTTP/1.1 or HTTP/2: one Host, one length, CRLF line ends.";
    BankMalformed "bank_malformed"
        "What stands where the memory request names its bank is not the name of one."
        "Name the bank as plain text: letters, digits, `.`, `_`, `-`, `:`, `@`; under its exact key.";
    BankMissing "bank_missing"
        "The memory request names no bank; to many services that means every bank."
        "Name the bank in the request.";
    BaseForbids "base_forbids"
        "The sandbox's base layer does not allow it."
        "Ask the operator: the base is set in `[[sandbox]]` and no policy can widen it.";
    BodyLate "body_late"
        "The body of the memory request did not arrive in time, or not as long as was announced."
        "Send the body at once; `memory_body_seconds` bounds it.";
    BodyMalformed "body_malformed"
        "The body of the memory request is not one plain JSON document."
        "Send one UTF-8 JSON object without repeated keys, as `application/json`, not compressed.";
    BodyTooLarge "body_too_large"
        "The body is longer than bodies towards inspected hosts and memory services may be."
        "Send less at once, or raise `inspected_body_bytes` or `memory_body_bytes` under `[limits]`.";
    BudgetSpent "budget_spent"
        "What the policy lets this sandbox or this rule use is used up."
        "Wait until it refills, which is said beside; or raise the budget if this traffic is meant. Trying again at once does not help.";
    BudgetUnkept "budget_unkept"
        "What was used could not be written down, and nothing passes uncounted."
        "Look at the disk and directory of the log: budgets are kept beside it.";
    ChannelsDisagree "channels_disagree"
        "What the kernel says of the connection names two different sandboxes."
        "Fix the channel keys in `[[sandbox]]`; if they are right, something is spoofing.";
    CredentialNeedsTls "credential_needs_tls"
        "The rule injects a credential and the request is not over TLS."
        "Use https.";
    CredentialUnavailable "credential_unavailable"
        "The credential that the rule injects is missing, unreadable or malformed."
        "Look at the file of that `[[credential]]` in the operator's file.";
    CutByOperator "cut_by_operator"
        "The operator cut the connection."
        "Ask the operator.";
    DeniedByRule "denied_by_rule"
        "A `[[deny]]` rule names it; deny always wins."
        "Remove it from the deny rule if it is meant to be reachable.";
    DnsAnswer "dns_answer"
        "The resolver's answer is malformed, incomplete, or names hosts as no host can be named."
        "Ask the resolver named in the operator's file for the name by hand.";
    DnsBudget "dns_budget"
        "The sandbox has no bits left to send in DNS names: what it asks for is new, long or frequent."
        "Name the hosts exactly, or raise the rule's `dns_bits_per_hour` if this traffic is meant.";
    DnsMalformed "dns_malformed"
        "The DNS message is not one well-formed question."
        "Send one question with at most one OPT record.";
    DnsOperation "dns_operation"
        "The DNS message is no plain query: another opcode, another class, or a zone transfer."
        "Send standard queries of class IN.";
    DnsOverload "dns_overload"
        "Too many queries of this sandbox wait for an answer."
        "Ask less at once; the bounds are in the table of limits.";
    DnsTypeNotAllowed "dns_type_not_allowed"
        "The DNS query type is not one the rule allows."
        "Add the type to the rule's `dns_types`.";
    EchHiddenName "ech_hidden_name"
        "The TLS hello carries ECH and the rule tunnels, so the real name cannot be seen."
        "Let the rule intercept, or say `ech = \"tolerate\"` to trust the outer name.";
    EncryptedResolver "encrypted_resolver"
        "The host is a public DNS-over-HTTPS or -TLS resolver and only a wildcard covers it."
        "List its exact name if the sandbox may use it.";
    FirstBytesLate "first_bytes_late"
        "The connection did not say in time what it wants."
        "Send the TLS hello or the request at once; `first_bytes_seconds` and `head_seconds` bound it.";
    ForeignBank "foreign_bank"
        "The memory request names a bank that no rule opens to this sandbox for this operation."
        "Add the bank to `recall`, `retain` or `forget` of the `[[memory]]` rule.";
    ForeignEnvironment "foreign_environment"
        "The bank belongs to another environment than the sandbox."
        "Use a bank of the sandbox's own environment; no rule can open another.";
    GrantEnded "grant_ended"
        "The grant that allowed it has ended."
        "Ask the operator for another, or for a rule.";
    HeadTooLarge "head_too_large"
        "The TLS hello or the head of the request is larger than is allowed."
        "Send fewer or shorter header fields; `[limits]` names the bounds.";
    IdentityAbsent "identity_absent"
        "The memory request carries no signed identity and the rule requires one."
        "Send the token in `Sandbox-Identity`, or set `identity = \"from-path\"`.";
    IdentityInvalid "identity_invalid"
        "The signed identity does not verify."
        "Fetch a fresh token; the record says which check failed.";
    IdentityMismatch "identity_mismatch"
        "The signed identity is not that of the sandbox the request came from."
        "Send this sandbox's own token.";
    IdentityStale "identity_stale"
        "The signed identity is of an earlier generation of the sandbox."
        "Fetch a token issued after the sandbox was last created.";
    IdentityUnset "identity_unset"
        "The sandbox's tenant or environment is not set yet."
        "Set the identity of the sandbox before it uses memory.";
    IdleTooLong "idle_too_long"
        "No byte passed for too long."
        "Connect again; `[limits]` names the bounds.";
    Internal "internal"
        "Sandbar hit an internal error and closed the attempt."
        "Report it with the record's id.";
    LeafRefused "leaf_refused"
        "The authority cannot sign a certificate for this host."
        "See `sandbar ca show`: name constraints, expiry.";
    LifetimeSpent "lifetime_spent"
        "The connection is older than connections may be."
        "Connect again; `connection_seconds` bounds it.";
    LogUnwritable "log_unwritable"
        "The record of the attempt could not be written, and nothing leaves without one."
        "Look at the log's disk and directory; `sandbar log verify` says how it stands.";
    MemoryForm "memory_form"
        "The memory request is not in the one plain form: its query, encoding, upgrade or type."
        "Send what the route takes and nothing else: no `Upgrade`, no `Content-Encoding`, no stray query.";
    MemoryOperation "memory_operation"
        "The memory request is an administrative one, or one its profile does not know."
        "Use retain, recall or forget; administration happens outside the sandbox.";
    MemoryService "memory_service"
        "The operator's file has no `[[memory_service]]` for this host, or this build no such profile."
        "Ask the operator to add the `[[memory_service]]`; check `profile` in the `[[memory]]` rule.";
    MethodNotAllowed "method_not_allowed"
        "A rule names the host but not this method."
        "Add the method to the rule's `methods`.";
    Misdirected "misdirected"
        "The HTTP/2 request is for another host than the connection it came on."
        "Open a connection of its own for that host; clients do so by themselves on 421.";
    NameMissing "name_missing"
        "Nothing in the connection names a host, and its address is not listed."
        "Use TLS with SNI or HTTP with a Host header, or list the address under `addresses`.";
    NamesDisagree "names_disagree"
        "The attempt names two different hosts (CONNECT, SNI, Host or `:authority`)."
        "Send the same host name everywhere.";
    NoAddress "no_address"
        "The name has no address."
        "Check the name with the resolver named in the operator's file.";
    NotListed "not_listed"
        "No rule of this sandbox names the host."
        "Add the host to an `[[allow]]` rule.";
    OwnAddress "own_address"
        "The name leads to Sandbar itself."
        "Nothing to do: no rule opens this.";
    PathNotAllowed "path_not_allowed"
        "A rule names the host and method but not this path."
        "Add the path to the rule's `paths`.";
    PolicyInvalid "policy_invalid"
        "The policies on disk are not good, and the operator's file says `on_invalid = \"deny\"`."
        "Mend the file that `sandbar status` names; what was allowed before is allowed again then.";
    PortNotListed "port_not_listed"
        "A rule names the host but not this port."
        "Write the port with the host (`host:port`) or add it to the rule's `ports`.";
    PrivateAddress "private_address"
        "The target lies in a private, local or otherwise special address range."
        "If it is meant, name the range in the rule's `resolves_to`.";
    RawTcpNotAllowed "raw_tcp_not_allowed"
        "The connection speaks neither TLS nor HTTP and no rule opens raw TCP to this host and port."
        "Add the port to a rule's `tcp` with the exact host name.";
    ResolverDiscovery "resolver_discovery"
        "The name exists to switch clients to another resolver; it is always refused."
        "Nothing to do: clients fall back by themselves.";
    ResolverUnreachable "resolver_unreachable"
        "No resolver answered in time, or each of them failed."
        "Check `upstreams` under `[dns]` in the operator's file, and that they can be reached.";
    SandboxEnded "sandbox_ended"
        "The sandbox has used the network for as long as its `lifetime_seconds` allow."
        "Make a new sandbox, or raise the lifetime.";
    SocksUnsupported "socks_unsupported"
        "The SOCKS request is not a CONNECT of version 5 without a password."
        "Use SOCKS5 CONNECT with the host name (socks5h).";
    SpecialName "special_name"
        "The name is of a special-use zone that only a rule within that zone can open."
        "List the name itself, such as `db.corp.internal`.";
    TooManyConnections "too_many_connections"
        "The sandbox, or all of them, hold as many connections as they may."
        "Close some; `connections` and `connections_per_sandbox` bound them.";
    TooManyResets "too_many_resets"
        "The HTTP/2 connection reset or broke too many streams."
        "Connect again; `resets` bounds it.";
    TreatmentChanged "treatment_changed"
        "The rules changed how such a connection is treated while it was open."
        "Connect again.";
    UnknownChannel "unknown_channel"
        "The connection came by a path that belongs to no sandbox."
        "Add the channel key to its `[[sandbox]]`.";
    UnknownSandbox "unknown_sandbox"
        "The sandbox is not in the operator's file any more."
        "Add its `[[sandbox]]` again.";
    UpstreamBroke "upstream_broke"
        "The origin broke the connection or its answer is malformed."
        "Try again; look at the origin.";
    UpstreamCertificate "upstream_certificate"
        "The certificate of the origin does not verify for its name."
        "Check the origin; add its root under `roots` of `[upstream]` if it is private.";
    UpstreamTimeout "upstream_timeout"
        "The origin did not answer in time."
        "Try again; `first_byte_seconds` and `idle_seconds` bound it.";
    UpstreamUnreachable "upstream_unreachable"
        "No address of the host could be connected to."
        "Check that the origin is up and can be reached from Sandbar.";
    WrongProtocol "wrong_protocol"
        "Plain HTTP on the TLS port, or TLS on the plain one."
        "Use https on 443 and http on 80.";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// The documentation of every reason, as it stands in `rules/REASONS.md`.
pub fn markdown_table() -> String {
    let mut text = String::from(
        "# Reason codes\n\nEvery refusal carries one. Codes are stable: never renamed, never reused.\n\n\
         | code | meaning | what to do |\n| --- | --- | --- |\n",
    );
    for reason in Reason::ALL {
        text +=
            &format!("| `{}` | {} | {} |\n", reason.code(), reason.meaning(), reason.next_step());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p18_the_documented_table_is_the_code() {
        assert_eq!(
            include_str!("../REASONS.md"),
            markdown_table(),
            "write rules/REASONS.md anew: cargo run -p proxy -- reasons --markdown"
        );
    }

    #[test]
    fn p18_codes_are_unique_and_sorted_like_their_names() {
        let codes: Vec<&str> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        let mut sorted = codes.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(codes, sorted);
    }
}
