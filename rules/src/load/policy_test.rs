//! Compiles `[[test]]` entries to [`PolicyTest`]s.

use toml::Spanned;

use super::document::{BankOperationDocument, ExpectDocument, ProtocolDocument, TestDocument};
use super::policy_builder::PolicyBuilder;
use super::problem::{ProblemKind, nearest};
use crate::facts::{BankOperation, HttpMethod};
use crate::ids::{BankId, Environment, SandboxId};
use crate::policy_test::{ExpectedDecision, PolicyTest};
use crate::probe::{PolicyProbe, ProbeKind};
use crate::reason::Reason;

pub(super) fn read_test(
    builder: &mut PolicyBuilder<'_>,
    document: &TestDocument,
    line: u32,
) -> Option<PolicyTest> {
    let sandbox = document.sandbox.as_ref();
    let environment = document.environment.as_ref();
    check_keys(builder, document);
    Some(PolicyTest {
        at: builder.source.location(document.host.span()),
        name: document.name.clone(),
        line,
        expect: match document.expect.get_ref() {
            ExpectDocument::Allow => ExpectedDecision::Allow,
            ExpectDocument::Deny => ExpectedDecision::Deny,
        },
        probe: read_probe(builder, document)?,
        sandbox: sandbox.and_then(|id| builder.parse_id("sandbox", id, SandboxId::parse)),
        environment: environment.and_then(|name| builder.parse_id("environment", name, Environment::parse)),
        reason: document
            .reason
            .as_ref()
            .and_then(|code| parse_reason(builder, code, *document.expect.get_ref())),
        rule: document.rule.clone(),
    })
}

/// Reports keys that other keys would override: such a test would not test what its author meant.
fn check_keys(builder: &mut PolicyBuilder<'_>, document: &TestDocument) {
    let request = document.method.is_some() || document.path.is_some();
    let memory = document.bank.is_some() || document.operation.is_some();
    let why = match (&document.dns, document.protocol) {
        _ if document.operation.is_some() && document.bank.is_none() => "`operation` needs a `bank`",
        (Some(_), _) if request || memory || document.protocol.is_some() => {
            "`dns` tests a lookup only; remove `method`, `path`, `bank`, `operation` and `protocol`"
        }
        (Some(_), _) if document.host.get_ref().parse::<std::net::IpAddr>().is_ok() => {
            "`dns` needs a host name, not an address"
        }
        (None, Some(ProtocolDocument::Tcp)) if request || memory => {
            "`protocol = \"tcp\"` carries no requests; remove `method`, `path`, `bank` and `operation`"
        }
        (Some(_) | None, _) => return,
    };
    builder.report(document.host.span(), ProblemKind::Missing(why));
}

fn read_probe(builder: &mut PolicyBuilder<'_>, document: &TestDocument) -> Option<PolicyProbe> {
    let host = &document.host;
    let mut probe = match PolicyProbe::parse(host.get_ref()) {
        Ok(probe) => probe,
        Err(error) => return builder.reject(host.span(), ProblemKind::Syntax(error.to_string())),
    };
    if let Some(entry) = &document.method {
        match HttpMethod::parse(entry.get_ref()) {
            Ok(method) => probe.method = Some(method),
            Err(_) => {
                return builder.reject(entry.span(), ProblemKind::Method(entry.get_ref().clone()));
            }
        }
    }
    if let Some(path) = &document.path {
        probe.path = Some(path.get_ref().clone());
    }
    probe.special = probe_kind(builder, document)?;
    Some(probe)
}

fn probe_kind(builder: &mut PolicyBuilder<'_>, document: &TestDocument) -> Option<ProbeKind> {
    match (&document.dns, &document.bank, document.operation, document.protocol) {
        (Some(query), ..) => builder.parse_query_type(query).map(ProbeKind::Lookup),
        (_, Some(bank), operation, _) => {
            let bank = builder.parse_id("bank", bank, BankId::parse)?;
            Some(ProbeKind::Memory { operation: operation.map_or(BankOperation::Read, bank_operation), bank })
        }
        (.., Some(ProtocolDocument::Tcp)) => Some(ProbeKind::Raw),
        (.., Some(ProtocolDocument::Tls) | None) => Some(ProbeKind::Connection),
    }
}

fn bank_operation(document: BankOperationDocument) -> BankOperation {
    match document {
        BankOperationDocument::Forget => BankOperation::Delete,
        BankOperationDocument::Recall => BankOperation::Read,
        BankOperationDocument::Retain => BankOperation::Write,
    }
}

fn parse_reason(
    builder: &mut PolicyBuilder<'_>,
    code: &Spanned<String>,
    expect: ExpectDocument,
) -> Option<Reason> {
    let found = Reason::ALL.iter().copied().find(|reason| reason.code() == code.get_ref());
    match (found, expect) {
        (Some(reason), ExpectDocument::Deny) => Some(reason),
        (Some(_), ExpectDocument::Allow) => builder.reject(
            code.span(),
            ProblemKind::Pointless(
                "an allowed attempt has no reason; remove `reason`, or set `expect = \"deny\"`".to_owned(),
            ),
        ),
        (None, _) => {
            let near = nearest(code.get_ref(), Reason::ALL.iter().map(|reason| reason.code()));
            let help = near.map_or("`sandbar reasons` lists all codes".to_owned(), |near| {
                format!("did you mean `{near}`?")
            });
            let location = builder.source.location(code.span());
            let fault = ProblemKind::Unknown { what: "reason", name: code.get_ref().clone() };
            builder.problems.error_with_help(location, fault, help);
            None
        }
    }
}
