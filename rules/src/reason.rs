//! `Reason`: why Sandbar refused an attempt. Records, metrics, responses to clients and `explain` all carry
//! its code, and a code is never renamed or reused (P18).

use std::fmt;

/// Generates the enum and its texts from one table.
macro_rules! reasons {
    ($($name:ident $code:literal $meaning:literal $next:literal;)*) => {
        /// Why Sandbar refused an attempt.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $meaning] $name,)*
        }

        impl Reason {
            /// Every reason, sorted by code.
            pub const ALL: &[Reason] = &[$(Reason::$name,)*];

            /// Returns the stable code.
            pub const fn code(self) -> &'static str {
                match self { $(Reason::$name => $code,)* }
            }

            /// Returns the meaning, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Reason::$name => $meaning,)* }
            }

            /// Returns what the user can do about it.
            pub const fn next_step(self) -> &'static str {
                match self { $(Reason::$name => $next,)* }
            }
        }
    };
}

// The single source of the enum, its codes, its texts and `rules/REASONS.md`.
reasons! {
    AddressAsSni "address_as_sni"
        "The TLS ClientHello carries an IP address as its server name (SNI)."
        "Connect by host name.";
    AddressNotExpected "address_not_expected"
        "The name resolves to an address outside the rule's `resolves_to`."
        "Check where the name points; extend `resolves_to` if the new address is right.";
    AddressNotListed "address_not_listed"
        "The target is an IP address and no rule lists it under `addresses`."
        "Connect by host name, or list the address under `addresses` with its `ports`.";
    AmbiguousPath "ambiguous_path"
        "Servers can interpret the path in more than one way, and a rule for this host matches on paths."
        "Send the plain form of the path: no `%2f`, `..`, `//`, `;` or backslash. A rule allows an encoded slash where its `paths` spell it, such as `/@scope%2Fname`.";
    AnswerForeignBank "answer_foreign_bank"
        "The memory service returned content of a bank that the request did not name; Sandbar withheld the response."
        "Check the memory service: it mixes banks, or routes requests to the wrong one.";
    AnswerTooLarge "answer_too_large"
        "The head or the trailers of the origin server's response exceed the limit, or too many interim responses precede it."
        "Check the origin server; `answer_head_bytes`, `answer_head_fields` and `interim_answers` set the limits.";
    AnswerUnchecked "answer_unchecked"
        "Sandbar could not check the memory service's response, or found a secret in it, and withheld it."
        "Request less at once; if that does not help, check what the memory service returns.";
    AnswerUnreadable "answer_unreadable"
        "The origin server encoded its response although asked not to, so Sandbar cannot search it for the credential."
        "Ask the origin's owner to honour `Accept-Encoding: identity`.";
    BadHandshake "bad_handshake"
        "The TLS ClientHello is malformed, or the handshake failed."
        "Use TLS 1.2 or 1.3, and trust Sandbar's CA certificate (see `sandbar ca`).";
    BadMethod "bad_method"
        "The request method is not an upper-case HTTP method."
        "Send a registered method in upper case.";
    BadName "bad_name"
        "The host name is malformed, or could be read as an IP address."
        "Use the plain ASCII host name.";
    BadRequest "bad_request"
        "The request is malformed or ambiguous."
        "Send plain HTTP/1.1 or HTTP/2: one Host, one length, CRLF line endings, no trailers.";
    BankMalformed "bank_malformed"
        "The memory request names its bank with an invalid value."
        "Name the bank as plain text (letters, digits, `.`, `_`, `-`, `:`, `@`) under its exact key.";
    BankMissing "bank_missing"
        "The memory request names no bank, which many services take to mean every bank."
        "Name the bank in the request.";
    BaseForbids "base_forbids"
        "The sandbox's base layer does not allow it."
        "Ask the operator: `[[sandbox]]` sets the base, and no policy can widen it.";
    BodyLate "body_late"
        "A body did not arrive in time or at the least rate, or the body of a memory request is shorter than announced."
        "Send the body at once; `body_bytes_per_second` and `memory_body_seconds` set the limits.";
    BodyMalformed "body_malformed"
        "The body of the memory request is not a single plain JSON document."
        "Send one UTF-8 JSON object without duplicate keys, as `application/json`, uncompressed.";
    BodyTooLarge "body_too_large"
        "The request body exceeds the limit for memory services."
        "Send less at once, or raise `memory_body_bytes` under `[limits]`.";
    BudgetSpent "budget_spent"
        "The budget of this sandbox or rule is used up."
        "Wait until the budget refills (see the detail), or raise it if this traffic is expected. Retrying at once does not help.";
    BudgetUnkept "budget_unkept"
        "Sandbar could not store what was used, and forwards nothing uncounted."
        "Check the disk and directory of the log; budgets are stored next to it.";
    CanaryUsed "canary_used"
        "What leaves contains a canary: a value that no honest program sends."
        "Find out what read it; the finding names the canary.";
    ChannelsDisagree "channels_disagree"
        "The channels of the connection belong to two different sandboxes."
        "Fix the channel keys in `[[sandbox]]`; if they are right, suspect spoofing.";
    ConnectionClosing "connection_closing"
        "The request was sent ahead, and the connection closed after the response to the one before."
        "Send it again on a new connection.";
    CredentialLeaving "credential_leaving"
        "What leaves contains the value of a credential that only Sandbar may send."
        "Find out how the sandbox came by it, and replace the credential.";
    CredentialNeedsTls "credential_needs_tls"
        "The rule injects a credential, and the request does not use TLS."
        "Use https.";
    CredentialUnavailable "credential_unavailable"
        "A credential that the rule injects cannot be had or used now; the detail names it."
        "Check the source of that `[[credential]]` in the configuration.";
    CutByOperator "cut_by_operator"
        "The operator cut the connection."
        "Ask the operator.";
    DeniedByRule "denied_by_rule"
        "A `[[deny]]` rule matches it; deny always wins."
        "Remove it from the deny rule if it should be reachable.";
    DnsAnswer "dns_answer"
        "The resolver's response is malformed or incomplete, or contains invalid host names."
        "Query the resolver in the configuration for the name by hand.";
    DnsBudget "dns_budget"
        "The sandbox has used up its budget for data in DNS names: its queries are new, long or frequent."
        "List the hosts by exact name, or raise the rule's `dns_bits_per_hour` if this traffic is expected.";
    DnsMalformed "dns_malformed"
        "The DNS message is not one well-formed question."
        "Send one question with at most one OPT record.";
    DnsOperation "dns_operation"
        "The DNS message is not a plain query: it has another opcode or class, or asks for a zone transfer."
        "Send standard queries of class IN.";
    DnsOverload "dns_overload"
        "Too many queries of this sandbox are waiting for an answer."
        "Send fewer queries at once; the number of pending queries is bounded.";
    DnsTypeNotAllowed "dns_type_not_allowed"
        "The rule does not allow this DNS query type."
        "Add the type to the rule's `dns_types`.";
    EchHiddenName "ech_hidden_name"
        "The TLS ClientHello uses ECH and the rule tunnels TLS, so the real name is hidden."
        "Let the rule intercept, or set `ech = \"tolerate\"` to trust the outer name.";
    EncryptedResolver "encrypted_resolver"
        "The host is a public DNS-over-HTTPS or DNS-over-TLS resolver, and only a wildcard matches it."
        "List its exact name if the sandbox may use it.";
    FirstBytesLate "first_bytes_late"
        "The client did not send its TLS ClientHello or request in time."
        "Send it right after connecting; `first_bytes_seconds` and `head_seconds` set the time limits.";
    ForeignBank "foreign_bank"
        "The memory request names a bank that no rule opens to this sandbox for this operation."
        "Add the bank to `recall`, `retain` or `forget` of the `[[memory]]` rule.";
    ForeignEnvironment "foreign_environment"
        "The bank belongs to another environment than the sandbox."
        "Use a bank of the sandbox's own environment; no rule can open another.";
    GrantEnded "grant_ended"
        "The grant that allowed it has ended."
        "Ask the operator for a new grant, or for a rule.";
    HeadTooLarge "head_too_large"
        "The TLS ClientHello or the request head exceeds the limit."
        "Send fewer or shorter header fields; the limits are under `[limits]`.";
    IdentityAbsent "identity_absent"
        "The memory request carries no signed identity, and the rule requires one."
        "Send the token in `Sandbox-Identity`, or set `identity = \"from-channel\"`.";
    IdentityChanged "identity_changed"
        "The connection's channel now belongs to another sandbox, tenant or environment."
        "Connect again; the new connection has the new identity.";
    IdentityInvalid "identity_invalid"
        "The signed identity failed verification."
        "Fetch a fresh token; the record names the check that failed.";
    IdentityMismatch "identity_mismatch"
        "The signed identity belongs to another sandbox than the one that sent the request."
        "Send this sandbox's own token.";
    IdentityStale "identity_stale"
        "The signed identity was issued for an earlier generation of the sandbox."
        "Fetch a token issued after the sandbox was last created.";
    IdentityUnset "identity_unset"
        "The sandbox's tenant or environment is not set yet."
        "Set the sandbox's identity before it uses memory.";
    IdleTooLong "idle_too_long"
        "The connection was idle for too long."
        "Connect again; the idle timeouts are under `[limits]`.";
    Internal "internal"
        "Sandbar hit an internal error and closed the attempt."
        "Report it with the record's id.";
    LeafRefused "leaf_refused"
        "The certificate authority cannot sign a certificate for this host."
        "Check its name constraints and expiry with `sandbar ca show`.";
    LifetimeSpent "lifetime_spent"
        "The connection reached its maximum lifetime."
        "Connect again; `connection_seconds` sets the limit.";
    LogQuota "log_quota"
        "The sandbox has used up its part of the access log, and Sandbar forwards nothing without a record."
        "See `sandbar status --sandbox`; raise `max_bytes` or shorten `retention` under `[log]` if this traffic is expected.";
    LogUnwritable "log_unwritable"
        "Sandbar could not write the record of the attempt, and forwards nothing without one."
        "Check the disk and directory of the log; `sandbar log verify` shows its state.";
    MemoryFlow "memory_flow"
        "What leaves contains text of a memory bank that the destination may not receive."
        "Send something else; the policy names who may receive it with `memory = \"may-receive\"` or `receives_banks`.";
    MemoryForm "memory_form"
        "The memory request has an unsupported form: its query, encoding, upgrade or content type."
        "Send what the route accepts and nothing else: no `Upgrade`, no `Content-Encoding`, no extra query.";
    MemoryOperation "memory_operation"
        "The memory request is administrative, or its profile does not know it."
        "Use retain, recall or forget; administer the service from outside the sandbox.";
    MemoryService "memory_service"
        "The configuration has no `[[memory_service]]` for this host, or this build lacks its profile."
        "Ask the operator to add the `[[memory_service]]`; check `profile` in the `[[memory]]` rule.";
    MethodNotAllowed "method_not_allowed"
        "A rule names the host but not this method."
        "Add the method to the rule's `methods`.";
    Misdirected "misdirected"
        "The HTTP/2 request is for another host than its connection."
        "Open a separate connection for that host; clients do so on their own after a 421.";
    NameMissing "name_missing"
        "Nothing in the connection names a host, and its address is not listed."
        "Use TLS with SNI or HTTP with a Host header, or list the address under `addresses`.";
    NamesDisagree "names_disagree"
        "The attempt names two different hosts (CONNECT, SNI, Host or `:authority`)."
        "Send the same host name everywhere.";
    NoAddress "no_address"
        "The name has no address."
        "Check the name with the resolver in the configuration.";
    NotListed "not_listed"
        "No rule of this sandbox names the host."
        "Add the host to an `[[allow]]` rule.";
    OtherAccount "other_account"
        "The request carries a credential of another account, and the rule says `pin_account = \"refuse\"`."
        "Send the request without it: Sandbar adds the credential of this host.";
    OutOfPorts "out_of_ports"
        "The sandbox uses all the source ports it may use towards this address, or the kernel has none left."
        "Close or reuse connections to this host; a closed one keeps its port for a minute.";
    OwnAddress "own_address"
        "The name resolves to Sandbar itself."
        "Nothing to do: no rule can allow this.";
    PathNotAllowed "path_not_allowed"
        "A rule names the host and method but not this path."
        "Add the path to the rule's `paths`.";
    PlaceholderMisused "placeholder_misused"
        "What leaves contains the placeholder of a credential in a place where Sandbar does not replace it."
        "Send it only in the header field that the tool is made for, to the hosts of the credential; if no tool did this, find out who read it.";
    PolicyInvalid "policy_invalid"
        "The policies on disk are invalid, and the configuration sets `on_invalid = \"deny\"`."
        "Fix the file that `sandbar status` names; the policies then apply again.";
    PortNotListed "port_not_listed"
        "A rule names the host but not this port."
        "Write the port with the host (`host:port`), or add it to the rule's `ports`.";
    PrivateAddress "private_address"
        "The target is in a private, local or otherwise special address range."
        "If that is intended, name the range in the rule's `resolves_to`.";
    QuotaExhausted "quota_exhausted"
        "The sandbox uses all it may use of a resource of the gateway; the detail names it."
        "Finish or close requests and connections; `sandbar status --sandbox` shows the use, `[quota]` sets the totals.";
    RawTcpNotAllowed "raw_tcp_not_allowed"
        "The connection is neither TLS nor HTTP, and no rule allows raw TCP to this host and port."
        "Add the port to a rule's `tcp` with the exact host name.";
    RequestUnsignable "request_unsignable"
        "Sandbar cannot sign the request for AWS: its query, its body or what it says about them is malformed, or a form in it carries a signature."
        "Send it as the SDKs of AWS do; the detail says what is wrong.";
    ResolverDiscovery "resolver_discovery"
        "The name exists only to switch clients to another resolver; Sandbar always refuses it."
        "Nothing to do: clients fall back on their own.";
    ResolverUnreachable "resolver_unreachable"
        "No resolver answered in time, or all of them failed."
        "Check `upstreams` under `[dns]` in the configuration, and that Sandbar can reach them.";
    SandboxEnded "sandbox_ended"
        "The sandbox has reached its `lifetime_seconds`."
        "Create a new sandbox, or raise the lifetime.";
    SandboxRevoked "sandbox_revoked"
        "The identity of the sandbox is revoked."
        "Ask the operator; `revocations` under `[identity]` names the file.";
    SecretFound "secret_found"
        "What leaves has the shape of a key, a token or a password."
        "Remove it from the request; the finding says what it is and where. `secrets` under `[signals]` decides what to do about it.";
    SignalDenied "signal_denied"
        "The form of the request is unusual in a way that the policy denies."
        "Send it plainly; the finding says what is unusual, and `[signals]` what is denied.";
    SocksUnsupported "socks_unsupported"
        "The SOCKS request is not a SOCKS5 CONNECT without authentication."
        "Use SOCKS5 CONNECT with the host name (socks5h).";
    SpecialName "special_name"
        "The name is in a special-use zone, which only a rule for a name in that zone can open."
        "List the name itself, such as `db.corp.internal`.";
    TooManyConnections "too_many_connections"
        "The sandbox, or all sandboxes together, reached the connection limit."
        "Close some; `connections` and `connections_per_sandbox` set the limits.";
    TooManyResets "too_many_resets"
        "Too many streams of the HTTP/2 connection were reset or malformed."
        "Connect again; `resets` sets the limit.";
    TreatmentChanged "treatment_changed"
        "A policy change altered how Sandbar handles this connection while it was open."
        "Connect again.";
    UnknownChannel "unknown_channel"
        "The connection arrived on a channel that belongs to no sandbox."
        "Add the channel key to its `[[sandbox]]`.";
    UnknownSandbox "unknown_sandbox"
        "The sandbox is no longer in the configuration."
        "Add its `[[sandbox]]` again.";
    UpstreamBroke "upstream_broke"
        "The origin server broke the connection, or its response is malformed."
        "Try again; check the origin server.";
    UpstreamCertificate "upstream_certificate"
        "The origin server's certificate does not verify for its name."
        "Check the origin server; add its root to `roots` under `[upstream]` if its CA is private.";
    UpstreamTimeout "upstream_timeout"
        "The origin server did not respond in time."
        "Try again; `first_byte_seconds` and `idle_seconds` set the time limits.";
    UpstreamUnreachable "upstream_unreachable"
        "Sandbar could not connect to any address of the host."
        "Check that the origin server is up and reachable from Sandbar.";
    WrongProtocol "wrong_protocol"
        "The connection uses plain HTTP on the TLS port, or TLS on the plain HTTP port."
        "Use https on 443 and http on 80.";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

/// Returns the content of `rules/REASONS.md`.
pub fn markdown_table() -> String {
    let mut text = String::from(
        "# Reason codes\n\nEvery refusal carries one of these codes. Codes are stable: they are never renamed or reused.\n\n\
         | code | meaning | what to do |\n| --- | --- | --- |\n",
    );
    for reason in Reason::ALL {
        text += &format!("| `{}` | {} | {} |\n", reason.code(), reason.meaning(), reason.next_step());
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
            "regenerate it: cargo run -p cli -- reasons --markdown > rules/REASONS.md"
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
