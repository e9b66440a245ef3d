//! Authorities: created, stored, provided, limited, and refused.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use certs::{AuthorityError, AuthorityOptions, CertificateAuthority, HostName, LeafCache, NameConstraints};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::handshake::{client_at, handshake};
use crate::{DAY, HOUR, NOW, unix_time};

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

/// Checks whether a client that trusts the authority's root accepts its leaf for `name`.
fn check_trusted(authority: CertificateAuthority, name: &str) -> Result<(), String> {
    let (anchor, name) = (authority.anchor().clone(), host(name));
    let cache = LeafCache::new(Arc::new(authority)).unwrap();
    let leaf = cache.leaf(&name, unix_time(NOW)).map_err(|error| error.code().to_owned())?;
    let client = client_at(&anchor, unix_time(NOW));
    handshake(client, name.server_name().clone(), leaf.server_config().clone())
        .map_err(|error| error.to_string())
}

#[test]
fn made_at_first_start_and_found_at_the_second() {
    let dir = tempfile::tempdir().unwrap();
    let keep = dir.path().join("ca");
    let options = AuthorityOptions::default();
    let first = CertificateAuthority::open_or_create(&keep, &options, unix_time(NOW)).unwrap().describe();
    let second = CertificateAuthority::open_or_create(&keep, &options, unix_time(NOW + DAY)).unwrap();
    assert_eq!(first, second.describe());
    assert_eq!(check_trusted(second, "api.openai.com"), Ok(()));
    assert_eq!(file_mode(&keep.join("ca.key")), 0o600);
    assert_eq!(file_mode(&keep), 0o700);
    assert!(matches!(
        CertificateAuthority::create(&keep, &options, unix_time(NOW)),
        Err(AuthorityError::Exists(_))
    ));
}

#[test]
fn two_starts_at_once_make_one_authority() {
    let dir = tempfile::tempdir().unwrap();
    let options = AuthorityOptions::default();
    let starts: Vec<_> = std::thread::scope(|scope| {
        let start =
            || CertificateAuthority::open_or_create(dir.path(), &options, unix_time(NOW)).unwrap().describe();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(starts.iter().all(|start| *start == starts[0]));
}

#[test]
fn half_an_authority_is_not_replaced_silently() {
    let dir = tempfile::tempdir().unwrap();
    CertificateAuthority::create(dir.path(), &AuthorityOptions::default(), unix_time(NOW)).unwrap();
    fs::remove_file(dir.path().join("ca.pem")).unwrap();
    let again =
        CertificateAuthority::open_or_create(dir.path(), &AuthorityOptions::default(), unix_time(NOW));
    assert!(matches!(again, Err(AuthorityError::Half { missing: "ca.pem", .. })));
    let again = CertificateAuthority::create(dir.path(), &AuthorityOptions::default(), unix_time(NOW));
    assert!(again.unwrap_err().to_string().contains("remove ca.key"));
}

#[test]
fn what_cannot_be_made_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("ca.key.1.new"), "left by an interrupted start").unwrap();
    // No certificate is valid after the year 9999; the sample leaf finds that.
    let never = CertificateAuthority::create(dir.path(), &AuthorityOptions::default(), unix_time(u64::MAX));
    assert!(matches!(never, Err(AuthorityError::Expired { .. })));
    assert!(!dir.path().join("ca.key").exists() && !dir.path().join("ca.pem").exists());
    assert!(CertificateAuthority::create(dir.path(), &AuthorityOptions::default(), unix_time(NOW)).is_ok());
}

#[test]
fn an_exposed_key_an_expired_chain_and_a_clock_before_it_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = AuthorityOptions { life: Duration::from_secs(DAY), ..Default::default() };
    CertificateAuthority::create(dir.path(), &options, unix_time(NOW)).unwrap();
    for (when, opens) in [
        (NOW - DAY - 1, false),
        (NOW - DAY, true),
        (NOW, true),
        (NOW + DAY - 1, true),
        (NOW + DAY, false),
        (0, false),
    ] {
        assert_eq!(CertificateAuthority::open(dir.path(), unix_time(when)).is_ok(), opens, "{when}");
    }
    fs::set_permissions(dir.path().join("ca.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let complaint = CertificateAuthority::open(dir.path(), unix_time(NOW)).unwrap_err().to_string();
    assert!(complaint.contains("chmod 600"), "{complaint}");
}

#[test]
fn lives_out_of_bounds_are_refused() {
    for life in [0, HOUR - 1, 11 * 365 * DAY, u64::MAX] {
        let options = AuthorityOptions { life: Duration::from_secs(life), ..Default::default() };
        let refused = CertificateAuthority::in_memory(&options, unix_time(NOW));
        assert!(matches!(refused, Err(AuthorityError::Life)), "{life}");
    }
}

#[test]
fn constraints_are_in_the_certificate_and_kept_by_the_mint() {
    let permitted = NameConstraints::from_patterns(["github.com", "*.openai.com", "10.0.0.0/8"]);
    for (name, expected) in [
        ("github.com", Ok(())),
        ("codeload.GITHUB.com.", Ok(())),
        ("api.openai.com", Ok(())),
        ("10.1.2.3", Ok(())),
        ("notgithub.com", Err("authority_constrained")),
        ("github.com.evil.example", Err("authority_constrained")),
        ("com", Err("authority_constrained")),
        ("11.1.2.3", Err("authority_constrained")),
        ("2001:db8::1", Err("authority_constrained")),
        ("::ffff:10.1.2.3", Ok(())),
        ("::ffff:11.1.2.3", Err("authority_constrained")),
    ] {
        let options = AuthorityOptions { permitted: permitted.clone(), ..Default::default() };
        let authority = CertificateAuthority::in_memory(&options, unix_time(NOW)).unwrap();
        assert_eq!(check_trusted(authority, name), expected.map_err(str::to_owned), "{name}");
    }
}

#[test]
fn only_names_or_only_addresses_exclude_the_other_kind() {
    for (patterns, name, inside) in [
        (["github.com"], "github.com", true),
        (["github.com"], "192.0.2.1", false),
        (["github.com"], "2001:db8::1", false),
        (["192.0.2.0/24"], "192.0.2.1", true),
        (["192.0.2.0/24"], "github.com", false),
    ] {
        let permitted = NameConstraints::from_patterns(patterns);
        let options = AuthorityOptions { permitted, ..Default::default() };
        let authority = CertificateAuthority::in_memory(&options, unix_time(NOW)).unwrap();
        assert_eq!(authority.permits(&host(name)), inside, "{patterns:?} {name}");
        assert_eq!(check_trusted(authority, name).is_ok(), inside, "{patterns:?} {name}");
    }
}

type OperatorIssuer<'a> = CertifiedIssuer<'a, KeyPair>;

/// Parameters of an operator's certificate, built independently of the product code.
fn params(name: &str, ca: IsCa) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.distinguished_name.push(DnType::CountryName, "DE");
    params.is_ca = ca;
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.not_before = time::OffsetDateTime::from_unix_timestamp((NOW - DAY) as i64).unwrap();
    params.not_after = time::OffsetDateTime::from_unix_timestamp((NOW + DAY) as i64).unwrap();
    params
}

fn root<'a>() -> OperatorIssuer<'a> {
    root_with(|_| ())
}

/// A root with altered parameters.
fn root_with<'a>(alter: impl FnOnce(&mut CertificateParams)) -> OperatorIssuer<'a> {
    let mut params = params("root", IsCa::Ca(BasicConstraints::Unconstrained));
    alter(&mut params);
    OperatorIssuer::self_signed(params, KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap()).unwrap()
}

fn issue_below<'a>(
    root: &OperatorIssuer<'_>,
    key: &'static rcgen::SignatureAlgorithm,
    ca: IsCa,
) -> OperatorIssuer<'a> {
    OperatorIssuer::signed_by(params("below", ca), KeyPair::generate_for(key).unwrap(), root).unwrap()
}

/// Writes a key and a chain as an operator would.
fn write_files(dir: &Path, key: &KeyPair, chain: &[&OperatorIssuer<'_>]) -> (PathBuf, PathBuf) {
    let (key_path, chain_path) = (dir.join("op.key"), dir.join("op.pem"));
    fs::write(&key_path, certs::pem::encode_private_key(key.serialized_der()).as_bytes()).unwrap();
    fs::set_permissions(&key_path, fs::Permissions::from_mode(0o600)).unwrap();
    let text: String = chain.iter().map(|signer| certs::pem::encode_certificate(signer.der())).collect();
    fs::write(&chain_path, text).unwrap();
    (key_path, chain_path)
}

const CA: IsCa = IsCa::Ca(BasicConstraints::Unconstrained);

#[test]
fn an_operators_intermediate_of_any_key_kind_is_believed_through_its_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = root();
    for key in [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
    ] {
        let intermediate = issue_below(&root, key, CA);
        let (key_path, chain_path) = write_files(dir.path(), intermediate.key(), &[&intermediate, &root]);
        let authority = CertificateAuthority::load(&key_path, &chain_path, unix_time(NOW)).unwrap();
        assert_eq!(authority.anchor(), root.der(), "{key:?}");
        assert_eq!(authority.describe().intermediates, 1, "{key:?}");
        assert_eq!(check_trusted(authority, "api.openai.com"), Ok(()), "{key:?}");
    }
}

#[test]
fn an_operators_mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (root, p256) = (root(), &rcgen::PKCS_ECDSA_P256_SHA256);
    let good = issue_below(&root, p256, CA);
    let not_ca = issue_below(&root, p256, IsCa::ExplicitNoCa);
    let tight = issue_below(&root, p256, IsCa::Ca(BasicConstraints::Constrained(0)));
    let too_deep = KeyPair::generate_for(p256).unwrap();
    let too_deep = OperatorIssuer::signed_by(params("below that", CA), too_deep, &tight).unwrap();
    let other = self::root();
    let shallow = root_with(|root| root.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let below_shallow = issue_below(&shallow, p256, CA);
    let for_clients = root_with(|root| root.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    let below_for_clients = issue_below(&for_clients, p256, CA);
    let for_any = root_with(|root| root.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any]);
    let below_for_any = issue_below(&for_any, p256, CA);
    for (what, key, chain, expected) in [
        ("good", good.key(), &[&good, &root][..], ""),
        ("a root for everything", below_for_any.key(), &[&below_for_any, &for_any], ""),
        ("without its root", good.key(), &[&good], "does not end with a root"),
        (
            "a root too shallow",
            below_shallow.key(),
            &[&below_shallow, &shallow],
            "certificate 2 of the chain allows fewer",
        ),
        (
            "a root for clients",
            below_for_clients.key(),
            &[&below_for_clients, &for_clients],
            "certificate 2 of the chain is not for servers",
        ),
        ("another's key", root.key(), &[&good, &root], "does not belong"),
        ("wrong order", good.key(), &[&root, &good], "does not belong"),
        ("a stranger's root", good.key(), &[&good, &other], "is not signed by the one after it"),
        ("not an authority", not_ca.key(), &[&not_ca, &root], "may not sign certificates"),
        (
            "path too long",
            too_deep.key(),
            &[&too_deep, &tight, &root],
            "certificate 2 of the chain allows fewer",
        ),
        ("too many", good.key(), &[&good; 9], "more than 8"),
    ] {
        let (key_path, chain_path) = write_files(dir.path(), key, chain);
        let loaded = CertificateAuthority::load(&key_path, &chain_path, unix_time(NOW));
        let complaint = loaded.err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(complaint.is_empty(), expected.is_empty(), "{what}: {complaint}");
        assert!(complaint.contains(expected), "{what}: {complaint}");
    }
}

#[test]
fn an_operators_authority_is_checked_before_it_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let root = root();
    let (key, chain) = write_files(dir.path(), root.key(), &[&root]);
    let keep = dir.path().join("keep");
    let imported = CertificateAuthority::import(&keep, &key, &chain, unix_time(NOW)).unwrap().describe();
    assert_eq!(CertificateAuthority::open(&keep, unix_time(NOW)).unwrap().describe(), imported);
    assert_eq!(file_mode(&keep.join("ca.key")), 0o600);
    fs::write(&chain, "nonsense").unwrap();
    assert!(CertificateAuthority::import(&dir.path().join("other"), &key, &chain, unix_time(NOW)).is_err());
    assert!(!dir.path().join("other").exists());
}

#[test]
fn nothing_of_a_key_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let authority =
        CertificateAuthority::create(dir.path(), &AuthorityOptions::default(), unix_time(NOW)).unwrap();
    let key = fs::read_to_string(dir.path().join("ca.key")).unwrap();
    let line = key.lines().nth(1).unwrap();
    assert!(!format!("{authority:?} {authority:#?}").contains(line));
}

fn file_mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}
