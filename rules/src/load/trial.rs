//! `[[test]]` entries to trials.

use toml::Spanned;

use super::document::{ExpectDocument, OperationDocument, ProtocolDocument, TestDocument};
use super::problem::{Fault, nearest};
use super::rule::Builder;
use crate::facts::{Method, Operation};
use crate::probe::{Probe, Special};
use crate::reason::Reason;
use crate::trial::{Expect, Trial};
use crate::word::{BankId, Environment, SandboxId};

pub(super) fn read(builder: &mut Builder<'_>, document: &TestDocument, line: u32) -> Option<Trial> {
    let sandbox = document.sandbox.as_ref();
    let environment = document.environment.as_ref();
    check_keys(builder, document);
    Some(Trial {
        at: builder.source.place(document.host.span()),
        name: document.name.clone(),
        line,
        expect: match document.expect.get_ref() {
            ExpectDocument::Allow => Expect::Allow,
            ExpectDocument::Deny => Expect::Deny,
        },
        probe: probe(builder, document)?,
        sandbox: sandbox.and_then(|id| builder.word("sandbox", id, SandboxId::parse)),
        environment: environment
            .and_then(|name| builder.word("environment", name, Environment::parse)),
        reason: document
            .reason
            .as_ref()
            .and_then(|code| reason(builder, code, *document.expect.get_ref())),
        rule: document.rule.clone(),
    })
}

/// Keys that would be passed over beside others make a test that tests nothing.
fn check_keys(builder: &mut Builder<'_>, document: &TestDocument) {
    let request = document.method.is_some() || document.path.is_some();
    let memory = document.bank.is_some() || document.operation.is_some();
    let why = match (&document.dns, document.protocol) {
        _ if document.operation.is_some() && document.bank.is_none() => {
            "`operation` needs a `bank`"
        }
        (Some(_), _) if request || memory || document.protocol.is_some() => {
            "`dns` tries a look-up and nothing else"
        }
        (Some(_), _) if document.host.get_ref().parse::<std::net::IpAddr>().is_ok() => {
            "`dns` looks up a name, not an address"
        }
        (None, Some(ProtocolDocument::Tcp)) if request || memory => {
            "raw TCP carries no requests to try"
        }
        (Some(_) | None, _) => return,
    };
    builder.fault(document.host.span(), Fault::Missing(why));
}

fn probe(builder: &mut Builder<'_>, document: &TestDocument) -> Option<Probe> {
    let host = &document.host;
    let mut probe = match Probe::parse(host.get_ref()) {
        Ok(probe) => probe,
        Err(error) => return builder.refuse(host.span(), Fault::Syntax(error.to_string())),
    };
    if let Some(entry) = &document.method {
        match Method::parse(entry.get_ref()) {
            Ok(method) => probe.method = Some(method),
            Err(_) => return builder.refuse(entry.span(), Fault::Method(entry.get_ref().clone())),
        }
    }
    if let Some(path) = &document.path {
        probe.path = Some(path.get_ref().clone());
    }
    probe.special = special(builder, document)?;
    Some(probe)
}

fn special(builder: &mut Builder<'_>, document: &TestDocument) -> Option<Special> {
    match (&document.dns, &document.bank, document.operation, document.protocol) {
        (Some(query), ..) => builder.query_type(query).map(Special::Lookup),
        (_, Some(bank), operation, _) => {
            let bank = builder.word("bank", bank, BankId::parse)?;
            Some(Special::Memory {
                operation: operation.map_or(Operation::Read, operation_of),
                bank,
            })
        }
        (.., Some(ProtocolDocument::Tcp)) => Some(Special::Raw),
        (.., Some(ProtocolDocument::Tls) | None) => Some(Special::Connection),
    }
}

fn operation_of(document: OperationDocument) -> Operation {
    match document {
        OperationDocument::Forget => Operation::Delete,
        OperationDocument::Recall => Operation::Read,
        OperationDocument::Retain => Operation::Write,
    }
}

fn reason(
    builder: &mut Builder<'_>,
    code: &Spanned<String>,
    expect: ExpectDocument,
) -> Option<Reason> {
    let found = Reason::ALL.iter().copied().find(|reason| reason.code() == code.get_ref());
    match (found, expect) {
        (Some(reason), ExpectDocument::Deny) => Some(reason),
        (Some(_), ExpectDocument::Allow) => builder.refuse(
            code.span(),
            Fault::Pointless("what is allowed has no reason for denial".to_owned()),
        ),
        (None, _) => {
            let near = nearest(code.get_ref(), Reason::ALL.iter().map(|reason| reason.code()));
            let help = near.map_or("`sandbar reasons` lists them all".to_owned(), |near| {
                format!("did you mean `{near}`?")
            });
            let place = builder.source.place(code.span());
            let fault = Fault::Unknown { what: "reason", name: code.get_ref().clone() };
            builder.problems.error_with(place, fault, help);
            None
        }
    }
}
