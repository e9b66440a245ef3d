//! What the audit log says about a memory call: its operation, banks and identity, and findings about it.

use audit::{
    DetectionFinding, FindingCode, FindingSeverity, MemoryCall, MemoryEffect, OpenRecord, StableCode, Text,
};
use rules::Reason;
use rules::facts::{BankOperation, IdentityClaim};
use rules::ids::{BankId, ProfileName};

use super::MemoryRequest;
use super::identity::PresentedIdentity;
use super::profile::ProfileRoute;
use crate::report::refusal::Refusal;

/// Describes a call for its record, as far as the guard has read it.
pub(super) fn memory_call(
    profile: &ProfileName,
    request: &MemoryRequest<'_>,
    route: Option<&ProfileRoute>,
    banks: &[BankId],
    presented: Option<&PresentedIdentity>,
) -> MemoryCall {
    let effect = match route.map(|route| route.operation) {
        Some(BankOperation::Admin) | None => MemoryEffect::Admin,
        Some(BankOperation::Delete) => MemoryEffect::Delete,
        Some(BankOperation::None | BankOperation::Read) => MemoryEffect::Read,
        Some(BankOperation::Write) => MemoryEffect::Write,
    };
    MemoryCall {
        request: request.recorded.clone(),
        service: profile.as_str().into(),
        operation: route.map_or("unknown", |route| route.call.as_str()).into(),
        effect,
        banks: banks.iter().map(|bank| bank.as_str().into()).collect(),
        identity: presented.and_then(|presented| presented.subject.as_deref()).map(Text::from),
        checked: presented.map_or(StableCode("not_looked_at"), |presented| presented.checked),
    }
}

/// Adds to a denial which check of the identity failed. Records a finding for a token on the channel of another
/// sandbox.
pub(super) async fn explain_denial(
    refusal: Refusal,
    presented: PresentedIdentity,
    request: &MemoryRequest<'_>,
) -> Refusal {
    let finding = match (refusal.reason, presented.claim) {
        (Reason::IdentityInvalid, IdentityClaim::Invalid(code)) => {
            return refusal.with_detail(code);
        }
        (Reason::IdentityMismatch, _) => FindingCode::IdentityMismatch,
        (Reason::IdentityStale, _) => FindingCode::IdentityStale,
        _ => return refusal,
    };
    let (sandbox, subject) = (&request.sandbox.id, presented.subject.unwrap_or_default());
    let message = format!("the channel belongs to sandbox {sandbox}; the token names {subject}");
    let title = "A signed identity arrived on the channel of another sandbox";
    record_finding(request.record, finding, title, message).await;
    refusal
}

/// Records a finding about a call.
pub(super) async fn record_finding(record: &OpenRecord, code: FindingCode, title: &str, message: String) {
    let finding = DetectionFinding {
        code,
        title: title.into(),
        severity: FindingSeverity::High,
        message: Some(message.into()),
        score: None,
        features: Vec::new(),
    };
    if record.record_finding(&finding).await.is_err() {
        tracing::warn!(finding = code.code(), "cannot record a finding");
    }
}
