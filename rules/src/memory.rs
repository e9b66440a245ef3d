//! Authorization of memory requests: the identity must match the channel, the banks must match the rule, and
//! the environment must always match the sandbox's (P12).

use crate::facts::{BankOperation, IdentityClaim, MemoryFacts, TokenIdentity};
use crate::ids::{BankId, BankPattern, Environment};
use crate::policy::{IdentityMode, MemoryTerms};
use crate::reason::Reason;
use crate::sandbox::Sandbox;

/// Checks one memory request of `sandbox` against a memory rule.
pub(crate) fn authorize(sandbox: &Sandbox, terms: &MemoryTerms, facts: &MemoryFacts) -> Result<(), Reason> {
    let opened = match facts.operation {
        BankOperation::Admin => return Err(Reason::MemoryOperation),
        BankOperation::None => return check_bankless(sandbox, facts),
        BankOperation::Delete => &terms.forget,
        BankOperation::Read => &terms.recall,
        BankOperation::Write => &terms.retain,
    };
    let environment = check_identity(sandbox, terms.identity, &facts.identity)?;
    if facts.banks.is_empty() {
        return Err(Reason::BankMissing);
    }
    facts.banks.iter().try_for_each(|bank| check_bank(bank, opened, terms, environment))
}

/// Checks a request that touches no bank: it needs no identity, but must not carry another sandbox's.
fn check_bankless(sandbox: &Sandbox, facts: &MemoryFacts) -> Result<(), Reason> {
    match &facts.identity {
        _ if !facts.banks.is_empty() => Err(Reason::MemoryOperation),
        IdentityClaim::Absent => Ok(()),
        IdentityClaim::Invalid(_) => Err(Reason::IdentityInvalid),
        IdentityClaim::Revoked => Err(Reason::SandboxRevoked),
        IdentityClaim::Verified(identity) => check_claims(sandbox, identity),
    }
}

/// Checks the identity: the channel determines the sandbox, and every claim of a token must match it.
fn check_identity<'a>(
    sandbox: &'a Sandbox,
    mode: IdentityMode,
    claim: &IdentityClaim,
) -> Result<&'a Environment, Reason> {
    let (Some(_), Some(environment)) = (&sandbox.tenant, &sandbox.environment) else {
        return Err(Reason::IdentityUnset);
    };
    match (claim, mode) {
        (IdentityClaim::Invalid(_), _) => Err(Reason::IdentityInvalid),
        (IdentityClaim::Revoked, _) => Err(Reason::SandboxRevoked),
        (IdentityClaim::Absent, IdentityMode::Required) => Err(Reason::IdentityAbsent),
        (IdentityClaim::Absent, IdentityMode::FromChannel) => Ok(environment),
        (IdentityClaim::Verified(identity), _) => check_claims(sandbox, identity).map(|()| environment),
    }
}

fn check_claims(sandbox: &Sandbox, identity: &TokenIdentity) -> Result<(), Reason> {
    let agrees = identity.sandbox == sandbox.id
        && Some(&identity.tenant) == sandbox.tenant.as_ref()
        && Some(&identity.environment) == sandbox.environment.as_ref();
    match (agrees, sandbox.generation) {
        (false, _) => Err(Reason::IdentityMismatch),
        (true, Some(own)) if identity.generation != Some(own) => Err(Reason::IdentityStale),
        (true, _) => Ok(()),
    }
}

fn check_bank(
    bank: &BankId,
    opened: &[BankPattern],
    terms: &MemoryTerms,
    own: &Environment,
) -> Result<(), Reason> {
    if !opened.iter().any(|pattern| pattern.matches(bank)) {
        return Err(Reason::ForeignBank);
    }
    let bank_environment = bank.environment();
    let named = [terms.environment.as_ref(), bank_environment.as_ref()];
    let mut named = named.into_iter().flatten().peekable();
    if named.peek().is_some() && named.all(|environment| environment == own) {
        return Ok(());
    }
    Err(Reason::ForeignEnvironment)
}
