//! Trust in upstreams: never unverified, client certificates, and files that change.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use certs::trust::{ClientFiles, RefreshStatus, SystemStore};
use certs::{AuthorityOptions, CertificateAuthority, HostName, LeafCache, TrustSource, TrustStore, UnixTime};
use rcgen::{CertificateParams, KeyPair};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::handshake::handshake;

/// An upstream with its own authority. rustls' own client reads the system clock, so this does too.
struct TlsUpstream {
    leaves: LeafCache,
}

impl TlsUpstream {
    fn new() -> Self {
        let authority =
            CertificateAuthority::in_memory(&AuthorityOptions::default(), UnixTime::now()).unwrap();
        Self { leaves: LeafCache::new(Arc::new(authority)).unwrap() }
    }

    fn config(&self, name: &str) -> Arc<ServerConfig> {
        self.leaves.leaf(&host(name), UnixTime::now()).unwrap().server_config().clone()
    }

    fn write_anchor(&self, path: &Path) {
        replace_file(path, &self.leaves.authority().anchor_pem());
    }
}

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

/// Replaces a file by rename.
fn replace_file(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, path).unwrap();
}

fn only_roots_from(file: &Path) -> TrustSource {
    TrustSource { system: SystemStore::Excluded, files: vec![file.to_owned()], client: None }
}

fn reaches(trust: &TrustStore, name: &str, server: Arc<ServerConfig>) -> bool {
    let peer = trust.peer_for(host(name));
    handshake(peer.client_config(), peer.server_name(), server).is_ok()
}

#[test]
fn only_a_believed_upstream_of_the_right_name_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let (good, stranger) = (TlsUpstream::new(), TlsUpstream::new());
    let file = dir.path().join("roots.pem");
    good.write_anchor(&file);
    let trust = TrustStore::load(only_roots_from(&file)).unwrap();
    for (what, server, name, reached) in [
        ("right", good.config("a.example"), "a.example", true),
        ("address", good.config("192.0.2.1"), "192.0.2.1", true),
        ("another name", good.config("b.example"), "a.example", false),
        ("another authority", stranger.config("a.example"), "a.example", false),
    ] {
        assert_eq!(reaches(&trust, name, server), reached, "{what}");
        assert!(trust.peer_for(host(name)).connection().is_ok(), "{what}");
    }
}

#[test]
fn a_peer_always_has_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("roots.pem");
    TlsUpstream::new().write_anchor(&file);
    let trust = TrustStore::load(only_roots_from(&file)).unwrap();
    for nameless in ["", ".", " ", "*", "[]", "\0"] {
        assert!(HostName::parse(nameless).is_err(), "{nameless:?}");
    }
    for name in ["a.example", "192.0.2.1", "::1"] {
        assert_eq!(trust.peer_for(host(name)).name(), name);
    }
}

#[test]
fn changed_files_are_taken_over_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (TlsUpstream::new(), TlsUpstream::new());
    let file = dir.path().join("roots.pem");
    old.write_anchor(&file);
    let trust = TrustStore::load(only_roots_from(&file)).unwrap();
    let before = trust.peer_for(host("a.example")).group_key();
    assert_eq!(trust.refresh().unwrap(), RefreshStatus::Unchanged);

    for bad in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        replace_file(&file, bad);
        let complaint = trust.refresh().unwrap_err().to_string();
        assert!(complaint.contains("roots.pem"), "{complaint}");
        assert!(trust.refresh().is_err(), "the error is reported again");
        assert!(reaches(&trust, "a.example", old.config("a.example")), "the last good set stays");
    }
    fs::remove_file(&file).unwrap();
    assert!(trust.refresh().is_err());

    new.write_anchor(&file);
    assert_eq!(trust.refresh().unwrap(), RefreshStatus::Changed);
    assert!(reaches(&trust, "a.example", new.config("a.example")));
    assert!(!reaches(&trust, "a.example", old.config("a.example")));
    assert_ne!(trust.peer_for(host("a.example")).group_key(), before, "pools are kept apart");
}

#[test]
fn a_swapped_link_is_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (TlsUpstream::new(), TlsUpstream::new());
    let link = dir.path().join("roots.pem");
    for (name, upstream) in [("1", &old), ("2", &new)] {
        let path = dir.path().join(name);
        upstream.write_anchor(&path);
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    }
    std::os::unix::fs::symlink("1", &link).unwrap();
    let trust = TrustStore::load(only_roots_from(&link)).unwrap();
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("2", &link).unwrap();
    assert_eq!(trust.refresh().unwrap(), RefreshStatus::Changed);
    assert!(reaches(&trust, "a.example", new.config("a.example")));
}

#[test]
fn extra_roots_add_to_the_operators_and_nothing_is_not_enough() {
    let dir = tempfile::tempdir().unwrap();
    let (corporate, own) = (TlsUpstream::new(), TlsUpstream::new());
    let (first, second) = (dir.path().join("corporate.pem"), dir.path().join("own.pem"));
    corporate.write_anchor(&first);
    own.write_anchor(&second);
    let files = vec![first, second];
    let rule = TrustSource { system: SystemStore::Excluded, files, client: None };
    let trust = TrustStore::load(rule).unwrap();
    assert!(reaches(&trust, "a.example", corporate.config("a.example")));
    assert!(reaches(&trust, "a.example", own.config("a.example")));
    let nothing = TrustSource { system: SystemStore::Excluded, ..Default::default() };
    assert!(TrustStore::load(nothing).is_err());
}

#[test]
fn the_system_store_is_believed_unless_excluded() {
    let trust = TrustStore::load(TrustSource::default()).unwrap();
    assert!(
        trust.root_count() > 10,
        "the CA certificates of the system (Debian: ca-certificates) are needed"
    );
    assert_eq!(trust.refresh().unwrap(), RefreshStatus::Unchanged);
    assert!(!reaches(&trust, "a.example", TlsUpstream::new().config("a.example")));
}

/// A client certificate and its key as files, and the roots with which an upstream checks it.
fn write_client_files(dir: &Path) -> (ClientFiles, RootCertStore) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(["sandbar.example".to_owned()]).unwrap();
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = params.self_signed(&key).unwrap();
    let files = ClientFiles { chain: dir.join("client.pem"), key: dir.join("client.key") };
    fs::write(&files.chain, certs::pem::encode_certificate(certificate.der())).unwrap();
    fs::write(&files.key, certs::pem::encode_private_key(key.serialized_der()).as_bytes()).unwrap();
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    (files, roots)
}

/// The upstream's configuration, requiring a client certificate that `roots` verify.
fn client_auth_config(upstream: &TlsUpstream, roots: RootCertStore) -> Arc<ServerConfig> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), certs::crypto_provider());
    let leaf = upstream.leaves.leaf(&host("a.example"), UnixTime::now()).unwrap();
    let config = ServerConfig::builder_with_provider(certs::crypto_provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(leaf.certified_key().clone())));
    Arc::new(config)
}

#[test]
fn a_client_certificate_is_presented_where_one_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = TlsUpstream::new();
    let file = dir.path().join("roots.pem");
    upstream.write_anchor(&file);
    let (files, roots) = write_client_files(dir.path());
    let server = client_auth_config(&upstream, roots);
    let without = TrustStore::load(only_roots_from(&file)).unwrap();
    let with =
        TrustStore::load(TrustSource { client: Some(files.clone()), ..only_roots_from(&file) }).unwrap();
    assert!(!reaches(&without, "a.example", server.clone()));
    assert!(reaches(&with, "a.example", server));
    let peer = with.peer_for(host("a.example"));
    assert_ne!(peer.group_key(), without.peer_for(host("a.example")).group_key());
    assert_eq!(peer.client_certificate().unwrap().chain().len(), 1);
    let key = fs::read_to_string(&files.key).unwrap();
    let shown = format!("{:?} {:?} {:?}", with, peer, peer.client_certificate());
    assert!(!shown.contains(key.lines().nth(1).unwrap()));
}

#[test]
fn a_renewed_client_certificate_is_taken_over_only_with_its_key() {
    let (dir, renewed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let upstream = TlsUpstream::new();
    let file = dir.path().join("roots.pem");
    upstream.write_anchor(&file);
    let (files, _) = write_client_files(dir.path());
    let (new, roots) = write_client_files(renewed.path());
    let server = client_auth_config(&upstream, roots);
    let trust =
        TrustStore::load(TrustSource { client: Some(files.clone()), ..only_roots_from(&file) }).unwrap();
    assert!(!reaches(&trust, "a.example", server.clone()));
    fs::rename(&new.chain, &files.chain).unwrap();
    assert!(trust.refresh().unwrap_err().to_string().contains("does not belong"), "half renewed");
    fs::rename(&new.key, &files.key).unwrap();
    assert_eq!(trust.refresh().unwrap(), RefreshStatus::Changed);
    assert!(reaches(&trust, "a.example", server));
}

#[test]
fn a_client_key_of_another_certificate_or_readable_by_all_is_refused() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file: PathBuf = one.path().join("roots.pem");
    TlsUpstream::new().write_anchor(&file);
    let (mine, _) = write_client_files(one.path());
    let (other, _) = write_client_files(two.path());
    let mixed = ClientFiles { chain: mine.chain.clone(), key: other.key };
    let refused =
        TrustStore::load(TrustSource { client: Some(mixed), ..only_roots_from(&file) }).unwrap_err();
    assert!(refused.to_string().contains("does not belong"), "{refused}");
    fs::set_permissions(&mine.key, fs::Permissions::from_mode(0o644)).unwrap();
    let refused = TrustStore::load(TrustSource { client: Some(mine), ..only_roots_from(&file) }).unwrap_err();
    assert!(refused.to_string().contains("chmod 600"), "{refused}");
}

#[test]
fn p17_more_roots_than_the_bound_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let anchor = TlsUpstream::new().leaves.authority().anchor_pem();
    let files: Vec<PathBuf> = (0..4).map(|number| dir.path().join(format!("{number}.pem"))).collect();
    let copies = certs::trust::MAX_ROOTS / files.len();
    for file in &files {
        fs::write(file, anchor.repeat(copies)).unwrap();
    }
    let source = TrustSource { system: SystemStore::Excluded, files: files.clone(), client: None };
    assert_eq!(TrustStore::load(source.clone()).unwrap().root_count(), certs::trust::MAX_ROOTS);
    fs::write(&files[0], anchor.repeat(copies + 1)).unwrap();
    assert!(TrustStore::load(source).unwrap_err().to_string().contains("more than"));
}
