//! Leaves before OpenSSL, curl, Python, Node, Java and Go: right ones accepted, wrong ones refused.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use certs::{Authority, AuthorityOptions, HostName, LeafCache, NameConstraints, UnixTime};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};

use super::program::{clean, installed, needed, text};
use super::server::Server;

/// One handshake: whom the client wants, where it goes, whom it trusts, and whether it should be content.
struct Case {
    what: &'static str,
    expects: String,
    address: SocketAddr,
    trusts: PathBuf,
    accepted: bool,
}

/// Names and addresses under every kind of authority, and two that must fail for each.
fn cases(dir: &Path) -> Vec<Case> {
    let mut cases = Vec::new();
    let stranger = dir.join("stranger.pem");
    fs::write(&stranger, fresh(None).anchor_pem()).unwrap();
    for (what, authority) in authorities(dir) {
        let trusts = dir.join(format!("{what}.pem"));
        fs::write(&trusts, authority.anchor_pem()).unwrap();
        let leaves = LeafCache::new(Arc::new(authority)).unwrap();
        let deep = format!("{}.a.example", ["abc"; 40].join("."));
        for host in ["a.example", "bücher.a.example", &deep, "127.0.0.1", "::1"] {
            let address = Server::start(&leaves, host).address;
            let expects = HostName::parse(host).unwrap().to_string();
            let good = Case { what, expects, address, trusts: trusts.clone(), accepted: true };
            let other_name = "b.a.example".to_owned();
            cases.push(Case {
                expects: other_name,
                trusts: trusts.clone(),
                accepted: false,
                ..good
            });
            cases.push(Case {
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

fn fresh(permitted: Option<NameConstraints>) -> Authority {
    let options = AuthorityOptions { permitted, ..Default::default() };
    Authority::in_memory(&options, UnixTime::now()).unwrap()
}

fn authorities(dir: &Path) -> [(&'static str, Authority); 3] {
    let limited = NameConstraints::covering(["a.example", "127.0.0.0/8", "::1"]);
    [("plain", fresh(None)), ("limited", fresh(limited)), ("given", given(dir))]
}

/// An operator's intermediate under an operator's root.
fn given(dir: &Path) -> Authority {
    let params = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.use_authority_key_identifier_extension = true;
        params
    };
    let root = CertifiedIssuer::self_signed(params("root"), KeyPair::generate().unwrap()).unwrap();
    let issuer =
        CertifiedIssuer::signed_by(params("issuer"), KeyPair::generate().unwrap(), &root).unwrap();
    let (key, chain) = (dir.join("given.key"), dir.join("given-chain.pem"));
    fs::write(&key, certs::pem::from_private_key(issuer.key().serialized_der()).as_bytes())
        .unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let pem: String =
        [&issuer, &root].map(|found| certs::pem::from_certificate(found.der())).concat();
    fs::write(&chain, pem).unwrap();
    Authority::load(&key, &chain, UnixTime::now()).unwrap()
}

#[test]
fn openssl_accepts_our_leaves_at_its_strictest() {
    needed("openssl", "openssl");
    let dir = tempfile::tempdir().unwrap();
    for case in cases(dir.path()) {
        let is_address = case.expects.parse::<std::net::IpAddr>().is_ok();
        let by = if is_address { "-verify_ip" } else { "-verify_hostname" };
        let mut openssl = clean("openssl", dir.path());
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
        judge(&case, "openssl", output.status.success(), &text(&output));
    }
}

#[test]
fn curl_accepts_our_leaves() {
    needed("curl", "curl");
    let dir = tempfile::tempdir().unwrap();
    for case in cases(dir.path()) {
        let host = url_host(&case.expects);
        let url = format!("https://{host}:{}/", case.address.port());
        let mut curl = clean("curl", dir.path());
        curl.args(["--silent", "--show-error", "--max-time", "20", &url, "--cacert"])
            .arg(&case.trusts);
        curl.args([
            "--connect-to",
            &format!("::{}:{}", url_host(&case.address.ip().to_string()), case.address.port()),
        ]);
        let output = curl.output().unwrap();
        judge(&case, "curl", output.status.success(), &text(&output));
    }
}

#[test]
fn python_accepts_our_leaves() {
    needed("python3", "python3");
    probe("python3", &["probe.py"], include_str!("probes/probe.py"));
}

#[test]
fn node_accepts_our_leaves() {
    if installed("node") {
        probe("node", &["probe.js"], include_str!("probes/probe.js"));
    }
}

#[test]
fn java_accepts_our_leaves() {
    if installed("java") {
        probe(
            "java",
            &["-XX:TieredStopAtLevel=1", "Probe.java"],
            include_str!("probes/Probe.java"),
        );
    }
}

#[test]
fn go_accepts_our_leaves() {
    if installed("go") {
        probe("go", &["run", "probe.go"], include_str!("probes/probe.go"));
    }
}

/// Gives a small program one line a case; it answers one line each, `ok` or the complaint.
fn probe(program: &str, args: &[&str], source: &str) {
    let dir = tempfile::tempdir().unwrap();
    let cases = cases(dir.path());
    fs::write(dir.path().join(args.last().unwrap()), source).unwrap();
    let line = |case: &Case| {
        let (ip, port) = (case.address.ip(), case.address.port());
        format!("{} {ip} {port} {}\n", case.expects, case.trusts.display())
    };
    fs::write(dir.path().join("cases"), cases.iter().map(line).collect::<String>()).unwrap();
    let output = clean(program, dir.path()).args(args).arg("cases").output().unwrap();
    let answers: Vec<String> =
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(answers.len(), cases.len(), "{program}: {}", text(&output));
    for (case, answer) in cases.iter().zip(&answers) {
        judge(case, program, answer == "ok", answer);
    }
}

fn judge(case: &Case, tool: &str, accepted: bool, said: &str) {
    let Case { what, expects, address, .. } = case;
    assert_eq!(accepted, case.accepted, "{tool}, {what} authority, {expects} at {address}: {said}");
}

fn url_host(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}
