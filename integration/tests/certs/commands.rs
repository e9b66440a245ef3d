//! `sandbar ca` and `sandbar identity` as people and scripts use them: what is printed, and the exit status.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use integration::sandbar;
use serde_json::Value;

use super::program::{output_text, require_program};

/// Runs `sandbar` in `dir`; gives the exit status and what it printed.
fn run_in(dir: &Path, args: &[&str]) -> (i32, String) {
    let output = sandbar().current_dir(dir).args(args).output().unwrap();
    (output.status.code().unwrap(), output_text(&output))
}

fn run_json(dir: &Path, args: &[&str]) -> Value {
    let output = sandbar().current_dir(dir).args(args).arg("--json").output().unwrap();
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{args:?}: {}", output_text(&output)))
}

const ISSUE_ARGS: [&str; 12] = [
    "identity",
    "issue",
    "--dir",
    "id",
    "--sandbox",
    "build-7",
    "--tenant",
    "acme",
    "--environment",
    "staging",
    "--audience",
    "memory",
];

/// What `identity init` takes when it is not told another.
const DEFAULT_DOMAIN: &str = "sandbar.internal";

#[test]
fn the_authority_from_first_to_last() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    assert_eq!(
        run_in(
            at,
            &["ca", "init", "--dir", "ca", "--permit", "github.com", "--permit", "10.0.0.0/8"]
        )
        .0,
        0
    );
    assert_eq!(fs::metadata(at.join("ca/ca.key")).unwrap().permissions().mode() & 0o777, 0o600);
    let shown = run_json(at, &["ca", "show", "--dir", "ca"]);
    assert_eq!(shown["permitted"], serde_json::json!(["github.com", "10.0.0.0/8"]));
    let (status, exported) = run_in(at, &["ca", "export", "--dir", "ca"]);
    assert!(status == 0 && exported.starts_with("-----BEGIN CERTIFICATE-----"), "{exported}");
    assert_eq!(
        run_in(at, &["ca", "export", "--dir", "ca", "--format", "der", "--out", "ca.der"]).0,
        0
    );
    let (status, said) = run_in(at, &["ca", "env", "--dir", "ca"]);
    assert!(status == 2 && said.contains("sandbar ca bundle --dir ca"), "{said}");
    assert_eq!(run_in(at, &["ca", "bundle", "--dir", "ca"]).0, 0);
    for file in ["sandbar-ca.pem", "bundle.pem", "truststore.p12", "wgetrc", "php/sandbar.ini"] {
        let mode = fs::metadata(at.join("ca-trust").join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "{file}");
    }
    assert_eq!(fs::read_to_string(at.join("ca-trust/sandbar-ca.pem")).unwrap(), exported);
    let bundle = fs::read_to_string(at.join("ca-trust/bundle.pem")).unwrap();
    let mode = fs::metadata(at.join("ca-trust")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755, "others must be able to read it");
    assert!(
        bundle.starts_with(&exported) && bundle.matches("BEGIN").count() > 10,
        "ours and the system's"
    );
}

#[test]
fn nobodys_file_is_written_over_by_accident() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    run_in(at, &["ca", "init", "--dir", "ca"]);
    fs::write(at.join("mine.pem"), "mine").unwrap();
    fs::create_dir(at.join("certs")).unwrap();
    fs::write(at.join("certs/bundle.pem"), "mine").unwrap();
    let export = ["ca", "export", "--dir", "ca", "--out", "mine.pem"];
    let bundle = ["ca", "bundle", "--dir", "ca", "--out", "certs"];
    for (args, file) in [(export, "mine.pem"), (bundle, "certs/bundle.pem")] {
        let (status, said) = run_in(at, &args);
        assert!(status == 2 && said.contains("--force"), "{args:?}: {said}");
        assert_eq!(fs::read_to_string(at.join(file)).unwrap(), "mine", "{args:?}");
        assert_eq!(run_in(at, &[&args[..], &["--force"]].concat()).0, 0, "{args:?}");
        assert_ne!(fs::read_to_string(at.join(file)).unwrap(), "mine", "{args:?}");
    }
    assert_eq!(run_in(at, &bundle).0, 0, "its own files it replaces");
    fs::write(at.join("certs/wgetrc"), "mine").unwrap();
    assert_eq!(run_in(at, &bundle).0, 2, "but not one that somebody changed since");
    let said = run_json(at, &["ca", "export", "--dir", "ca"]);
    assert!(said["pem"].as_str().unwrap().starts_with("-----BEGIN"), "{said}");
    assert_eq!(said["sha256"].as_str().unwrap().len(), 64);
    let (status, said) = run_in(at, &["ca", "env", "--dir", "none", "--at", "/etc/sandbar"]);
    assert!(status == 2 && said.contains("ca init --dir none"), "{said}");
}

#[test]
fn every_form_of_the_variables_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    run_in(at, &["ca", "init", "--dir", "ca"]);
    let env = |format| {
        run_in(at, &["ca", "env", "--dir", "ca", "--at", "/etc/sandbar", "--format", format]).1
    };
    let expected = run_json(at, &["ca", "env", "--dir", "ca", "--at", "/etc/sandbar"]);
    let expected = expected.as_object().unwrap();
    assert_eq!(expected["SSL_CERT_FILE"], "/etc/sandbar/bundle.pem");
    assert_eq!(expected["NODE_EXTRA_CA_CERTS"], "/etc/sandbar/sandbar-ca.pem");
    for (name, value) in expected {
        let value = value.as_str().unwrap();
        assert!(env("sh").contains(&format!("export {name}='{value}'\n")), "{name}");
        assert!(env("dotenv").contains(&format!("{name}=\"{value}\"\n")), "{name}");
        assert!(env("docker").contains(&format!("{name}={value}\n")), "{name}");
        assert!(env("k8s").contains(&format!("- name: {name}\n  value: \"{value}\"\n")), "{name}");
    }
    let (status, said) = run_in(at, &["ca", "env", "--dir", "ca", "--at", "/with space"]);
    assert!(status == 2 && said.contains("/with space"), "{said}");
}

#[test]
fn an_operators_own_authority_made_by_openssl() {
    require_program("openssl", "openssl");
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for (kind, options) in [
        ("ec", &["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"][..]),
        ("rsa", &["-newkey", "rsa:2048"]),
        ("ed25519", &["-newkey", "ed25519"]),
        // As Active Directory writes them, with an attribute that stands twice.
        (
            "directory",
            &["-newkey", "rsa:2048", "-subj", "/DC=example/DC=corp/OU=a/OU=b/CN=Acme Root"],
        ),
        (
            "excluding",
            &[
                "-newkey",
                "rsa:2048",
                "-addext",
                "nameConstraints=critical,excluded;DNS:.corp.example",
            ],
        ),
    ] {
        let mut openssl = Command::new("openssl");
        openssl.current_dir(at).args([
            "req", "-x509", "-nodes", "-days", "30", "-keyout", "key.pem", "-out", "cert.pem",
        ]);
        if !options.contains(&"-subj") {
            openssl.args(["-subj", "/C=DE/O=Acme GmbH/CN=Acme Root"]);
        }
        openssl.args(["-addext", "keyUsage=critical,keyCertSign"]);
        let output = openssl.args(options).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        let (status, said) =
            run_in(at, &["ca", "init", "--dir", kind, "--key", "key.pem", "--chain", "cert.pem"]);
        assert!(status == 0 && said.contains("Acme Root"), "{kind}: {said}");
        let everything =
            if kind == "excluding" { "everything but .corp.example" } else { "everything\n" };
        assert!(said.contains(everything), "{kind}: {said}");
    }
}

#[test]
fn mistakes_with_the_authority() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    run_in(at, &["ca", "init", "--dir", "ca"]);
    fs::write(at.join("junk.pem"), "junk").unwrap();
    fs::set_permissions(at.join("junk.pem"), fs::Permissions::from_mode(0o600)).unwrap();
    for (args, status, said) in [
        (&["ca", "init", "--dir", "ca"][..], 2, "already"),
        (&["ca", "init", "--dir", "x", "--permit", "*"], 2, "--permit"),
        (&["ca", "init", "--dir", "x", "--for", "1s"], 2, "between one hour"),
        (&["ca", "init", "--dir", "long", "--for", "10y"], 0, "Sandbar"),
        (&["ca", "init", "--dir", "x", "--for", "soon"], 64, "soon"),
        (&["ca", "init", "--dir", "x", "--key", "junk.pem"], 64, "--chain"),
        (
            &["ca", "init", "--dir", "x", "--key", "junk.pem", "--chain", "junk.pem"],
            2,
            "no private key",
        ),
        (&["ca", "show", "--dir", "none"], 2, "sandbar ca init --dir none"),
        (&["ca", "show"], 64, "--dir"),
        (&["ca"], 64, "init"),
    ] {
        let found = run_in(at, args);
        assert!(found.0 == status && found.1.contains(said), "{args:?}: {found:?}");
        assert!(!at.join("x/ca.key").exists(), "{args:?}");
    }
}

#[test]
fn identity_from_first_to_last() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    assert_eq!(
        run_in(
            at,
            &[
                "identity",
                "init",
                "--dir",
                "id",
                "--trust-domain",
                "staging.acme.example",
                "--environment",
                "staging",
                "--environment",
                "trial",
            ]
        )
        .0,
        0
    );
    let (status, said) =
        run_in(at, &ISSUE_ARGS.map(|arg| if arg == "staging" { "production" } else { arg }));
    assert!(status == 2 && said.contains("production"), "{said}");
    let (status, token) = run_in(at, &ISSUE_ARGS);
    let token = token.trim();
    assert!(status == 0 && token.split('.').count() == 3, "{token}");
    let verify = |more: &[&str]| {
        run_in(at, &[&["identity", "verify", "--audience", "memory"], more].concat())
    };
    assert_eq!(verify(&["--dir", "id", token]).0, 0);
    let by_jwks = |domain| verify(&["--jwks", "id/jwks.json", "--trust-domain", domain, token]);
    assert_eq!(by_jwks("staging.acme.example").0, 0);
    let (status, said) = by_jwks("prod.acme.example");
    assert!(status == 1 && said.contains("identity_trust_domain"), "{said}");
    let seen = run_json(at, &["identity", "verify", "--dir", "id", "--audience", "memory", token]);
    assert_eq!(
        (&seen["sandbox"], &seen["tenant"], &seen["environment"]),
        (&"build-7".into(), &"acme".into(), &"staging".into())
    );
    assert_eq!(
        seen["subject"],
        "spiffe://staging.acme.example/tenant/acme/env/staging/sandbox/build-7"
    );

    let (_, set) = run_in(at, &["identity", "jwks", "--dir", "id"]);
    let set: Value = serde_json::from_str(&set).unwrap();
    assert_eq!(set["keys"].as_array().unwrap().len(), 1);
    assert!(set["keys"][0].get("d").is_none(), "public halves only");
    assert_eq!(run_in(at, &["identity", "rotate", "--dir", "id"]).0, 0);
    assert_eq!(verify(&["--dir", "id", token]).0, 0, "after rotation too");
    let said = run_json(at, &["identity", "inspect", token]);
    assert_eq!(said["claims"]["aud"], "memory");
    assert!(said["verified"].is_null());
    let (_, said) = run_in(at, &["identity", "inspect", token]);
    assert!(said.contains("not verified") && !said.contains(token.rsplit('.').next().unwrap()));
}

#[test]
fn refusals_have_a_reason_and_a_status() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    run_in(at, &["identity", "init", "--dir", "id"]);
    run_in(at, &["identity", "init", "--dir", "other"]);
    let token = run_in(at, &ISSUE_ARGS).1.trim().to_owned();
    fs::write(
        at.join("revoked.json"),
        r#"{"tenants":[{"tenant":"acme","issued_before":99999999999}]}"#,
    )
    .unwrap();
    fs::write(at.join("junk.json"), "junk").unwrap();
    let other = "identity_unknown_key";
    for (args, status, said) in [
        (&["--dir", "id", "--audience", "other", &token][..], 1, "identity_audience"),
        (&["--dir", "other", "--audience", "memory", &token], 1, other),
        (
            &[
                "--jwks",
                "other/jwks.json",
                "--trust-domain",
                DEFAULT_DOMAIN,
                "--audience",
                "memory",
                &token,
            ],
            1,
            other,
        ),
        (
            &[
                "--jwks",
                "id/jwks.json",
                "--trust-domain",
                DEFAULT_DOMAIN,
                "--issuer",
                "x",
                "--audience",
                "memory",
                &token,
            ],
            1,
            "identity_unknown_issuer",
        ),
        (&["--dir", "id", "--audience", "memory", "a.b.c"], 1, "identity_malformed"),
        (
            &[
                "--jwks",
                "id/jwks.json",
                "--trust-domain",
                DEFAULT_DOMAIN,
                "--audience",
                "memory",
                "a.b.c",
            ],
            1,
            "identity_malformed",
        ),
        (&["--dir", "id", "--audience", "memory", ""], 1, "identity_absent"),
        (
            &["--dir", "id", "--audience", "memory", "--revocations", "revoked.json", &token],
            1,
            "identity_revoked",
        ),
        (
            &["--dir", "id", "--audience", "memory", "--revocations", "junk.json", &token],
            2,
            "junk.json",
        ),
        (
            &[
                "--jwks",
                "junk.json",
                "--trust-domain",
                DEFAULT_DOMAIN,
                "--audience",
                "memory",
                &token,
            ],
            2,
            "junk.json",
        ),
        (
            &[
                "--jwks",
                "id/jwks.json",
                "--trust-domain",
                DEFAULT_DOMAIN,
                "--algorithm",
                "RS256",
                "--audience",
                "memory",
                &token,
            ],
            2,
            "it contains no key",
        ),
        (&["--dir", "none", "--audience", "memory", &token], 2, "sandbar identity init --dir none"),
        (&["--audience", "memory", &token], 64, "--jwks"),
        (&["--jwks", "id/jwks.json", "--audience", "memory", &token], 64, "--trust-domain"),
        (
            &["--dir", "id", "--trust-domain", DEFAULT_DOMAIN, "--audience", "memory", &token],
            64,
            "--dir",
        ),
        (&["--dir", "id", "--algorithm", "RS256", "--audience", "memory", &token], 64, "--dir"),
        (&["--dir", "id", "--subject", "/{sandbox}", "--audience", "memory", &token], 64, "--dir"),
        (&["--dir", "id", &token], 64, "--audience"),
    ] {
        let found = run_in(at, &[&["identity", "verify"], args].concat());
        assert!(found.0 == status && found.1.contains(said), "{args:?}: {found:?}");
    }
    let json = run_json(at, &["identity", "verify", "--dir", "id", "--audience", "other", &token]);
    assert_eq!((&json["verified"], &json["reason"]), (&false.into(), &"identity_audience".into()));
    for (more, status) in [
        (&["--for", "10m"][..], 0),
        (&["--generation", "7"], 0),
        (&["--for", "11m"], 2),
        (&["--for", "0s"], 2),
        (&["--for", "x"], 64),
    ] {
        assert_eq!(run_in(at, &[&ISSUE_ARGS, more].concat()).0, status, "{more:?}");
    }
}

#[test]
fn a_token_may_come_by_standard_input_and_cannot_steer_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    run_in(at, &["identity", "init", "--dir", "id"]);
    let token = run_in(at, &ISSUE_ARGS).1;
    let args = ["identity", "verify", "--dir", "id", "--audience", "memory", "-"];
    for (input, status) in [(token.clone(), 0), (format!("{token} x"), 1), ("a".repeat(100_000), 1)]
    {
        let mut child = sandbar()
            .current_dir(at)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // It stops reading once the token is too large, so the rest may not be taken.
        drop(child.stdin.take().unwrap().write_all(input.as_bytes()));
        assert_eq!(child.wait().unwrap().code(), Some(status));
    }
    // {"alg":"x"} . {"\u001b[2J": "\u009b31m"}
    let (_, said) = run_in(
        at,
        &["identity", "inspect", "eyJhbGciOiJ4In0.eyJcdTAwMWJbMkoiOiAiXHUwMDliMzFtIn0.AA"],
    );
    assert!(
        said.contains("\\u{1b}") && !said.contains('\u{9b}') && !said.contains("\u{1b}[2J"),
        "{said:?}"
    );
}
