//! Leaves before OpenSSL, curl, Python, Node, Java and Go: right ones accepted, wrong ones refused.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use certs::{AuthorityOptions, CertificateAuthority, HostName, LeafCache, NameConstraints, UnixTime};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

use super::program::{clean_command, is_installed, output_text, require_program};
use super::server::LeafServer;

/// One handshake: whom the client wants, where it goes, whom it trusts, and whether it should be content.
struct HandshakeCase {
    what: &'static str,
    expects: String,
    address: SocketAddr,
    trusts: PathBuf,
    accepted: bool,
}

/// Names and addresses under every kind of authority, and two that must fail for each.
fn handshake_cases(dir: &Path) -> Vec<HandshakeCase> {
    let mut cases = Vec::new();
    let stranger = dir.join("stranger.pem");
    fs::write(&stranger, new_authority(None).anchor_pem()).unwrap();
    for (what, authority) in authorities(dir) {
        let trusts = dir.join(format!("{what}.pem"));
        fs::write(&trusts, authority.anchor_pem()).unwrap();
        let leaves = LeafCache::new(Arc::new(authority)).unwrap();
        let deep = format!("{}.a.example", ["abc"; 40].join("."));
        for host in ["a.example", "bücher.a.example", &deep, "127.0.0.1", "::1"] {
            let address = LeafServer::start(&leaves, host).address;
            let expects = HostName::parse(host).unwrap().to_string();
            let good = HandshakeCase { what, expects, address, trusts: trusts.clone(), accepted: true };
            let other_name = "b.a.example".to_owned();
            cases.push(HandshakeCase {
                expects: other_name,
                trusts: trusts.clone(),
                accepted: false,
                ..good
            });
            cases.push(HandshakeCase {
                trusts: stranger.clone(),
                accepted: false,
                expects: good.expects.clone(),
                ..good
            });
            cases.push(good);
        }
    }
    cases
}

fn new_authority(permitted: Option<NameConstraints>) -> CertificateAuthority {
    let options = AuthorityOptions { permitted, ..Default::default() };
    CertificateAuthority::in_memory(&options, UnixTime::now()).unwrap()
}

fn authorities(dir: &Path) -> [(&'static str, CertificateAuthority); 3] {
    let limited = NameConstraints::from_patterns(["a.example", "127.0.0.0/8", "::1"]);
    [("plain", new_authority(None)), ("limited", new_authority(limited)), ("given", operator_authority(dir))]
}

/// An operator's intermediate under an operator's root.
fn operator_authority(dir: &Path) -> CertificateAuthority {
    let params = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.use_authority_key_identifier_extension = true;
        params
    };
    let root = CertifiedIssuer::self_signed(params("root"), KeyPair::generate().unwrap()).unwrap();
    let issuer = CertifiedIssuer::signed_by(params("issuer"), KeyPair::generate().unwrap(), &root).unwrap();
    let (key, chain) = (dir.join("given.key"), dir.join("given-chain.pem"));
    fs::write(&key, certs::pem::encode_private_key(issuer.key().serialized_der()).as_bytes()).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let pem: String = [&issuer, &root].map(|found| certs::pem::encode_certificate(found.der())).concat();
    fs::write(&chain, pem).unwrap();
    CertificateAuthority::load(&key, &chain, UnixTime::now()).unwrap()
}

#[test]
fn openssl_accepts_our_leaves_at_its_strictest() {
    require_program("openssl", "openssl");
    let dir = tempfile::tempdir().unwrap();
    for case in handshake_cases(dir.path()) {
        let is_address = case.expects.parse::<std::net::IpAddr>().is_ok();
        let by = if is_address { "-verify_ip" } else { "-verify_hostname" };
        let mut openssl = clean_command("openssl", dir.path());
        openssl.args([
            "s_client",
            "-brief",
            "-verify_return_error",
            "-x509_strict",
            "-no-CApath",
            "-no-CAstore",
        ]);
        openssl
            .args(["-connect", &case.address.to_string(), by, &case.expects])
            .arg("-CAfile")
            .arg(&case.trusts);
        let output = openssl.stdin(Stdio::null()).output().unwrap();
        assert_case(&case, "openssl", output.status.success(), &output_text(&output));
    }
}

#[test]
fn curl_accepts_our_leaves() {
    require_program("curl", "curl");
    let dir = tempfile::tempdir().unwrap();
    for case in handshake_cases(dir.path()) {
        let host = url_host(&case.expects);
        let url = format!("https://{host}:{}/", case.address.port());
        let mut curl = clean_command("curl", dir.path());
        curl.args(["--silent", "--show-error", "--max-time", "20", &url, "--cacert"]).arg(&case.trusts);
        curl.args([
            "--connect-to",
            &format!("::{}:{}", url_host(&case.address.ip().to_string()), case.address.port()),
        ]);
        let output = curl.output().unwrap();
        assert_case(&case, "curl", output.status.success(), &output_text(&output));
    }
}

#[test]
fn python_accepts_our_leaves() {
    require_program("python3", "python3");
    run_probe("python3", &["probe.py"], include_str!("probes/probe.py"));
}

#[test]
fn node_accepts_our_leaves() {
    if is_installed("node") {
        run_probe("node", &["probe.js"], include_str!("probes/probe.js"));
    }
}

#[test]
fn java_accepts_our_leaves() {
    if is_installed("java") {
        run_probe("java", &["-XX:TieredStopAtLevel=1", "Probe.java"], include_str!("probes/Probe.java"));
    }
}

#[test]
fn go_accepts_our_leaves() {
    if is_installed("go") {
        run_probe("go", &["run", "probe.go"], include_str!("probes/probe.go"));
    }
}

/// Gives a small program one line a case; it answers one line each, `ok` or the complaint.
fn run_probe(program: &str, args: &[&str], source: &str) {
    let dir = tempfile::tempdir().unwrap();
    let cases = handshake_cases(dir.path());
    fs::write(dir.path().join(args.last().unwrap()), source).unwrap();
    let line = |case: &HandshakeCase| {
        let (ip, port) = (case.address.ip(), case.address.port());
        format!("{} {ip} {port} {}\n", case.expects, case.trusts.display())
    };
    fs::write(dir.path().join("cases"), cases.iter().map(line).collect::<String>()).unwrap();
    let output = clean_command(program, dir.path()).args(args).arg("cases").output().unwrap();
    let answers: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), cases.len(), "{program}: {}", output_text(&output));
    for (case, answer) in cases.iter().zip(&answers) {
        assert_case(case, program, answer == "ok", answer);
    }
}

fn assert_case(case: &HandshakeCase, tool: &str, accepted: bool, said: &str) {
    let HandshakeCase { what, expects, address, .. } = case;
    assert_eq!(accepted, case.accepted, "{tool}, {what} authority, {expects} at {address}: {said}");
}

fn url_host(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}
