//! Leaves: names, validity, a bounded cache, and the requirements of strict clients.

use std::sync::Arc;
use std::time::Duration;

use certs::leaf::{BACKDATED, LIFE, MAX_LEAVES};
use certs::{AuthorityOptions, CertificateAuthority, HostName, LeafCache};
use rustls_pki_types::ServerName;
use x509_parser::prelude::*;

use crate::handshake::{client_at, handshake};
use crate::{DAY, HOUR, NOW, unix_time};

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn cache(life: u64) -> LeafCache {
    let options = AuthorityOptions { life: Duration::from_secs(life), ..Default::default() };
    LeafCache::new(Arc::new(CertificateAuthority::in_memory(&options, unix_time(NOW)).unwrap())).unwrap()
}

fn leaf_der(cache: &LeafCache, name: &str, now: u64) -> Vec<u8> {
    cache.leaf(&host(name), unix_time(now)).unwrap().certified_key().cert[0].to_vec()
}

#[test]
fn a_client_accepts_the_leaf_for_the_decided_name_only() {
    let cache = cache(30 * DAY);
    let anchor = cache.authority().anchor().clone();
    for (decided, expects, accepted) in [
        ("api.openai.com", "api.openai.com", true),
        ("api.openai.com", "API.OPENAI.COM", true),
        ("api.openai.com", "openai.com", false),
        ("api.openai.com", "evil.example", false),
        ("bücher.example", "xn--bcher-kva.example", true),
        ("192.0.2.7", "192.0.2.7", true),
        ("192.0.2.7", "192.0.2.8", false),
        ("192.0.2.7", "a.example", false),
        ("2001:db8::7", "2001:db8::7", true),
        ("::ffff:192.0.2.7", "192.0.2.7", true),
        ("::ffff:192.0.2.7", "::ffff:192.0.2.7", false),
        (&format!("{}.example", "a".repeat(63)), &format!("{}.example", "a".repeat(63)), true),
        (&vec!["abc"; 60].join("."), &vec!["abc"; 60].join("."), true),
    ] {
        let leaf = cache.leaf(&host(decided), unix_time(NOW)).unwrap();
        let name = ServerName::try_from(expects.to_owned()).unwrap();
        let shaken = handshake(client_at(&anchor, unix_time(NOW)), name, leaf.server_config().clone());
        assert_eq!(shaken.is_ok(), accepted, "{decided} for {expects}: {shaken:?}");
    }
}

#[test]
fn a_client_with_a_wrong_clock_accepts_within_the_margins() {
    let cache = cache(30 * DAY);
    let anchor = cache.authority().anchor().clone();
    let leaf = cache.leaf(&host("a.example"), unix_time(NOW)).unwrap();
    for (when, accepted) in [
        (NOW - BACKDATED.as_secs() - 1, false),
        (NOW - BACKDATED.as_secs(), true),
        (NOW + LIFE.as_secs() - 1, true),
        (NOW + LIFE.as_secs() + 1, false),
    ] {
        let name = host("a.example").server_name().clone();
        let shaken = handshake(client_at(&anchor, unix_time(when)), name, leaf.server_config().clone());
        assert_eq!(shaken.is_ok(), accepted, "{when}: {shaken:?}");
    }
}

#[test]
fn kept_until_half_its_life_and_minted_again_when_the_clock_jumps() {
    let cache = cache(30 * DAY);
    let first = leaf_der(&cache, "a.example", NOW);
    for (jump, same) in [
        (0_i64, true),
        (HOUR as i64, true),
        (23 * HOUR as i64, true),
        (-2 * HOUR as i64, true),
        (24 * HOUR as i64, false),
        (-4 * HOUR as i64, false),
    ] {
        let again = self::cache(30 * DAY);
        let before = leaf_der(&again, "a.example", NOW);
        let after = leaf_der(&again, "a.example", NOW.checked_add_signed(jump).unwrap());
        assert_eq!(before == after, same, "{jump}");
    }
    assert_eq!(leaf_der(&cache, "A.example.", NOW), first, "one name, one leaf");
}

#[test]
fn no_leaf_outlives_the_authority_and_none_is_minted_after_it() {
    let cache = cache(3 * HOUR);
    let leaf = cache.leaf(&host("a.example"), unix_time(NOW)).unwrap();
    assert_eq!(leaf.valid().to, cache.authority().valid().to);
    for when in [NOW + 3 * HOUR, NOW + DAY, NOW - 2 * DAY, 0, u64::MAX] {
        let refused = cache.leaf(&host("a.example"), unix_time(when)).unwrap_err();
        assert_eq!(refused.code(), "authority_expired", "{when}");
    }
}

#[test]
fn p17_a_flood_of_names_stays_within_the_bound_and_leaves_the_regulars_alone() {
    let cache = cache(30 * DAY);
    let regular = leaf_der(&cache, "api.openai.com", NOW);
    for _ in 0..20 {
        assert_eq!(leaf_der(&cache, "api.openai.com", NOW), regular);
    }
    for stranger in 0..3 * MAX_LEAVES {
        let name = host(&format!("{stranger}.flood.example"));
        cache.leaf(&name, unix_time(NOW)).unwrap();
        cache.leaf(&name, unix_time(NOW)).unwrap();
        if stranger % 512 == 0 {
            assert_eq!(leaf_der(&cache, "api.openai.com", NOW), regular, "after {stranger}");
        }
    }
    assert!(cache.len() <= MAX_LEAVES, "{}", cache.len());
    assert_eq!(leaf_der(&cache, "api.openai.com", NOW), regular);
}

/// What Go, Apple and the stricter OpenSSL levels check beyond the signature.
#[test]
fn leaves_and_authorities_please_strict_clients() {
    let cache = cache(365 * DAY);
    let (der, anchor) = (leaf_der(&cache, "a.example", NOW), cache.authority().anchor().clone());
    let (rest, leaf) = X509Certificate::from_der(&der).unwrap();
    let (_, authority) = X509Certificate::from_der(&anchor).unwrap();
    assert!(rest.is_empty());
    for (what, certificate) in [("leaf", &leaf), ("authority", &authority)] {
        assert_eq!(certificate.version(), X509Version::V3, "{what}");
        let serial = certificate.raw_serial();
        assert!(serial.len() <= 20 && serial[0] & 0x80 == 0 && serial[0] != 0, "{what}: {serial:x?}");
        assert_eq!(certificate.signature_algorithm.algorithm.to_id_string(), "1.2.840.10045.4.3.2", "{what}");
        assert!(!certificate.subject().as_raw().is_empty(), "{what}");
        assert!(
            certificate.iter_extensions().all(|extension| !extension.parsed_extension().unsupported()),
            "{what}"
        );
    }
    let days = (leaf.validity().not_after.timestamp() - leaf.validity().not_before.timestamp()) / DAY as i64;
    assert!(days <= 90, "{days}");
    assert!(!leaf.is_ca());
    let usage = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.server_auth && !usage.any && !usage.client_auth);
    let names = leaf.subject_alternative_name().unwrap().unwrap();
    assert_eq!(names.value.general_names, [GeneralName::DNSName("a.example")]);
    assert_eq!(authority_key(&leaf), subject_key(&authority));
    let basic = authority.basic_constraints().unwrap().unwrap();
    assert!(basic.critical && basic.value.ca && basic.value.path_len_constraint == Some(0));
    let usage = authority.key_usage().unwrap().unwrap();
    assert!(usage.critical && usage.value.key_cert_sign());
}

#[test]
fn name_constraints_are_critical() {
    let permitted = certs::NameConstraints::from_patterns(["a.example"]);
    let options = AuthorityOptions { permitted, ..Default::default() };
    let authority = CertificateAuthority::in_memory(&options, unix_time(NOW)).unwrap();
    let (_, parsed) = X509Certificate::from_der(authority.anchor()).unwrap();
    assert!(parsed.name_constraints().unwrap().unwrap().critical, "RFC 5280, 4.2.1.10");
}

fn authority_key(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| {
        let ParsedExtension::AuthorityKeyIdentifier(found) = extension.parsed_extension() else {
            return None;
        };
        Some(found.key_identifier.as_ref()?.0.to_vec())
    })
}

fn subject_key(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| {
        let ParsedExtension::SubjectKeyIdentifier(found) = extension.parsed_extension() else {
            return None;
        };
        Some(found.0.to_vec())
    })
}
