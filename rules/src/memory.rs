//! Whether a memory request is its sandbox's own: identity against channel, banks against rules,
//! environment always (P12).

use crate::facts::{Identity, IdentityClaim, MemoryFacts, Operation};
use crate::policy::{IdentityMode, MemoryTerms};
use crate::reason::Reason;
use crate::sandbox::Sandbox;
use crate::word::{BankId, BankPattern, Environment};

pub(crate) fn judge(
    sandbox: &Sandbox,
    terms: &MemoryTerms,
    facts: &MemoryFacts,
) -> Result<(), Reason> {
    let opened = match facts.operation {
        Operation::Admin => return Err(Reason::MemoryOperation),
        Operation::None => return check_harmless(sandbox, facts),
        Operation::Delete => &terms.forget,
        Operation::Read => &terms.recall,
        Operation::Write => &terms.retain,
    };
    let environment = check_identity(sandbox, terms.identity, &facts.identity)?;
    if facts.banks.is_empty() {
        return Err(Reason::BankMissing);
    }
    facts.banks.iter().try_for_each(|bank| check_bank(bank, opened, terms, environment))
}

/// A request that touches no bank needs no identity; one that claims a foreign one is refused all the same.
fn check_harmless(sandbox: &Sandbox, facts: &MemoryFacts) -> Result<(), Reason> {
    match &facts.identity {
        _ if !facts.banks.is_empty() => Err(Reason::MemoryOperation),
        IdentityClaim::Absent => Ok(()),
        IdentityClaim::Invalid(_) => Err(Reason::IdentityInvalid),
        IdentityClaim::Verified(identity) => same(sandbox, identity),
    }
}

/// The path decides who the sandbox is; a token must agree with it in every part.
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
        (IdentityClaim::Absent, IdentityMode::Required) => Err(Reason::IdentityAbsent),
        (IdentityClaim::Absent, IdentityMode::FromPath) => Ok(environment),
        (IdentityClaim::Verified(identity), _) => same(sandbox, identity).map(|()| environment),
    }
}

fn same(sandbox: &Sandbox, identity: &Identity) -> Result<(), Reason> {
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
    let own_name = bank.environment();
    let named = [terms.environment.as_ref(), own_name.as_ref()];
    let mut named = named.into_iter().flatten().peekable();
    if named.peek().is_some() && named.all(|environment| environment == own) {
        return Ok(());
    }
    Err(Reason::ForeignEnvironment)
}
