//! Checks certificate chains: whether every certificate is fit for its role, and for how long.

use rustls_pki_types::{CertificateDer, UnixTime};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::authority::{AuthorityError, MAX_CHAIN};
use crate::constraints::NameLimits;

/// The period during which every certificate of a chain is valid, in Unix seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidityPeriod {
    pub from: u64,
    pub to: u64,
}

/// The result of checking a chain.
pub(crate) struct CheckedChain {
    pub(crate) limits: Vec<NameLimits>,
    pub(crate) valid: ValidityPeriod,
}

/// Checks `chain`, the signing certificate first, against the key that is to sign.
pub(crate) fn check_chain(
    public_key: &[u8],
    chain: &[CertificateDer<'static>],
    now: UnixTime,
) -> Result<CheckedChain, AuthorityError> {
    if chain.len() > MAX_CHAIN {
        return Err(AuthorityError::LongChain);
    }
    let parsed = parse_chain(chain)?;
    match parsed.first() {
        Some(first) if first.public_key().subject_public_key.data == public_key => {}
        Some(_) | None => return Err(AuthorityError::KeyMismatch),
    }
    let mut checked = CheckedChain { limits: Vec::new(), valid: ValidityPeriod { from: 0, to: u64::MAX } };
    for (index, certificate) in parsed.iter().enumerate() {
        check_certificate(index + 1, certificate, parsed.get(index + 1), now, &mut checked)?;
    }
    check_path_lengths(&parsed)?;
    match parsed.last() {
        Some(last) if last.verify_signature(None).is_ok() => Ok(checked),
        Some(_) | None => Err(AuthorityError::NoRoot),
    }
}

/// Checks that no authority has more authorities below it than its path length allows (RFC 5280,
/// 4.2.1.9), self-issued ones not counted. Not every client checks the root's own limit, so verifying a
/// sample leaf does not find this.
fn check_path_lengths(chain: &[X509Certificate<'_>]) -> Result<(), AuthorityError> {
    let mut below = 0;
    for (index, certificate) in chain.iter().enumerate() {
        let Ok(constraints) = certificate.basic_constraints() else {
            return Err(AuthorityError::Certificate(index + 1));
        };
        let limit = constraints.and_then(|found| found.value.path_len_constraint);
        if limit.is_some_and(|limit| limit < below) {
            return Err(AuthorityError::PathLength(index + 1));
        }
        below += u32::from(certificate.subject().as_raw() != certificate.issuer().as_raw());
    }
    Ok(())
}

fn parse_chain<'a>(chain: &'a [CertificateDer<'static>]) -> Result<Vec<X509Certificate<'a>>, AuthorityError> {
    let parse = |(index, der): (usize, &'a CertificateDer<'static>)| match X509Certificate::from_der(der) {
        Ok((_, certificate)) => Ok(certificate),
        Err(_) => Err(AuthorityError::Certificate(index + 1)),
    };
    chain.iter().enumerate().map(parse).collect()
}

fn check_certificate(
    index: usize,
    certificate: &X509Certificate<'_>,
    above: Option<&X509Certificate<'_>>,
    now: UnixTime,
    checked: &mut CheckedChain,
) -> Result<(), AuthorityError> {
    if !may_sign(certificate) {
        return Err(AuthorityError::NotAuthority(index));
    }
    if !is_for_servers(certificate) {
        return Err(AuthorityError::Purpose(index));
    }
    if above.is_some_and(|above| certificate.verify_signature(Some(above.public_key())).is_err()) {
        return Err(AuthorityError::Chain(index));
    }
    let valid = validity(certificate);
    if now.as_secs() < valid.from || now.as_secs() >= valid.to {
        return Err(AuthorityError::Expired {
            index,
            from: format_date(valid.from),
            to: format_date(valid.to),
        });
    }
    checked.limits.push(NameLimits::from_certificate(certificate).ok_or(AuthorityError::Constraints(index))?);
    checked.valid.from = checked.valid.from.max(valid.from);
    checked.valid.to = checked.valid.to.min(valid.to);
    Ok(())
}

fn may_sign(certificate: &X509Certificate<'_>) -> bool {
    let usage = match certificate.key_usage() {
        Ok(Some(usage)) => usage.value.key_cert_sign(),
        Ok(None) => true, // absent: every use is allowed (RFC 5280, 4.2.1.3)
        Err(_) => false,
    };
    certificate.is_ca() && usage
}

/// Checks that an extended key usage, if present, includes server authentication.
fn is_for_servers(certificate: &X509Certificate<'_>) -> bool {
    match certificate.extended_key_usage() {
        Ok(Some(usage)) => usage.value.server_auth || usage.value.any,
        Ok(None) => true,
        Err(_) => false,
    }
}

fn validity(certificate: &X509Certificate<'_>) -> ValidityPeriod {
    let of = |moment: i64| u64::try_from(moment).unwrap_or(0);
    let found = certificate.validity();
    ValidityPeriod { from: of(found.not_before.timestamp()), to: of(found.not_after.timestamp()) }
}

/// Returns the subject as raw DER.
pub(crate) fn raw_subject(der: &CertificateDer<'_>) -> Vec<u8> {
    X509Certificate::from_der(der).map(|(_, found)| found.subject().as_raw().to_vec()).unwrap_or_default()
}

pub(crate) fn subject(der: &CertificateDer<'_>) -> String {
    X509Certificate::from_der(der).map(|(_, found)| found.subject().to_string()).unwrap_or_default()
}

/// Converts Unix seconds for rcgen; certificates have no dates beyond the year 9999.
pub(crate) fn to_datetime(seconds: u64) -> OffsetDateTime {
    const LAST: i64 = 253_402_300_799;
    let seconds = i64::try_from(seconds).unwrap_or(LAST).min(LAST);
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Formats Unix seconds for people and JSON, in UTC.
pub fn format_date(seconds: u64) -> String {
    let at = to_datetime(seconds);
    let (day, clock) = (at.date(), at.time());
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        day.year(),
        u8::from(day.month()),
        day.day(),
        clock.hour(),
        clock.minute(),
        clock.second()
    )
}
