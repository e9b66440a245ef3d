//! A credential that never enters the sandbox (P11): put in for the bound host, method and path only, over TLS
//! that verifies; whatever the sandbox sent in its place is gone, and what the origin sends back is covered.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tempfile::TempDir;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance, wait_until};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::wire::{RawConnection, RawResponse};

pub(crate) const SECRET: &str = "sk-live/0123456789+abcdef==";

/// An origin with a credential for `POST /v1/**` and `GET /ws/**`, and one without.
pub(crate) struct CredentialScene {
    pub(crate) world: SandbarInstance,
    pub(crate) bound: ScriptedOrigin,
    pub(crate) other: ScriptedOrigin,
    secret: TempDir,
}

impl CredentialScene {
    pub(crate) fn new() -> Self {
        let root = OriginCa::new();
        let (bound, other) = (
            ScriptedOrigin::start_tls(root.server_config("a.test")),
            ScriptedOrigin::start_tls(root.server_config("b.test")),
        );
        let secret = tempfile::tempdir().unwrap();
        fs::write(secret.path().join("key"), format!("{SECRET}\n")).unwrap();
        let policy = format!(
            "[[allow]]\nname = \"model\"\nhosts = [\"a.test:{0}\"]\nmethods = [\"POST\"]\npaths = [\"/v1/**\"]\n\
             credential = \"key\"\nresolves_to = [\"127.0.0.0/8\"]\n\
             [[allow]]\nname = \"sockets\"\nhosts = [\"a.test:{0}\"]\nmethods = [\"GET\"]\npaths = [\"/ws/**\"]\n\
             credential = \"key\"\nresolves_to = [\"127.0.0.0/8\"]\n\
             [[allow]]\nname = \"open\"\nhosts = [\"a.test:{0}\", \"b.test:{1}\"]\nmethods = [\"GET\"]\n\
             resolves_to = [\"127.0.0.0/8\"]\n",
            bound.port(),
            other.port()
        );
        let file = secret.path().join("key").display().to_string();
        let tables = format!(
            "[[credential]]\nname = \"key\"\nfile = \"{file}\"\nhosts = [\"a.test:{}\"]\n",
            bound.port()
        );
        let hosts = vec!["a.test", "b.test"];
        let plan = InstanceSetup { policy, tables, hosts, ..InstanceSetup::default() };
        let world = plan.with_roots(root.pem()).start();
        CredentialScene { world, bound, other, secret }
    }

    pub(crate) fn send_request(
        &self,
        host: &str,
        origin: &ScriptedOrigin,
        line: &str,
        fields: &str,
    ) -> RawResponse {
        let mut wire = self.connect_tls(host, origin);
        let port = origin.port();
        wire.send(format!("{line} HTTP/1.1\r\nHost: {host}:{port}\r\n{fields}\r\n"));
        wire.read_response("POST").unwrap()
    }

    /// A connection of the sandbox to an origin, in TLS.
    fn connect_tls(&self, host: &str, origin: &ScriptedOrigin) -> RawConnection {
        let config = client_config(&self.world, "http/1.1");
        tls_handshake(self.world.open_tunnel(host, origin.port()), &config, host).unwrap()
    }

    /// A connection to the origin that has a credential.
    pub(crate) fn connect_bound(&self) -> RawConnection {
        self.connect_tls("a.test", &self.bound)
    }

    pub(crate) fn send_post(&self, fields: &str) -> RawResponse {
        self.send_request("a.test", &self.bound, "POST /v1/chat", &format!("Content-Length: 0\r\n{fields}"))
    }

    /// Waits until the credential's file was looked at and requests are answered as it is now.
    pub(crate) fn wait_for_answer(&self, what: &str, fits: impl Fn(&RawResponse) -> bool) -> RawResponse {
        wait_until(what, || fits(&self.send_post("")));
        self.send_post("Authorization: Bearer mine\r\n")
    }

    /// The file that holds the credential.
    pub(crate) fn credential_file(&self) -> PathBuf {
        self.secret.path().join("key")
    }

    /// What the origin got as `Authorization`, of its last request.
    pub(crate) fn received_authorization(origin: &ScriptedOrigin) -> Vec<String> {
        let requests = origin.requests();
        let last = requests.last().unwrap();
        let named = last.fields.iter().filter(|(name, _)| name.eq_ignore_ascii_case("authorization"));
        named.map(|(_, value)| value.clone()).collect()
    }

    pub(crate) fn log_text(&self) -> String {
        let segments = fs::read_dir(self.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        segments
            .filter(|path| path.extension().is_some_and(|kind| kind == "jsonl"))
            .map(|path| text(&path))
            .collect()
    }
}

// proves: allow.credential, credential.name, credential.file
#[test]
fn p11_it_goes_to_the_bound_host_method_and_path_and_nowhere_else() {
    let scene = CredentialScene::new();
    assert_eq!(scene.send_post("").status, 200);
    assert_eq!(CredentialScene::received_authorization(&scene.bound), [format!("Bearer {SECRET}")]);
    for fields in [
        "Authorization: Bearer mine\r\n",
        "authorization: Bearer one\r\nAUTHORIZATION: Basic dHdv\r\nAuthorization: Bearer three\r\n",
        "Connection: authorization\r\nAuthorization: Bearer mine\r\n",
        "Connection: close, Authorization\r\n",
    ] {
        assert_eq!(scene.send_post(fields).status, 200, "{fields:?}");
        assert_eq!(
            CredentialScene::received_authorization(&scene.bound),
            [format!("Bearer {SECRET}")],
            "{fields:?}"
        );
    }
    let mine = "Authorization: Bearer mine\r\n";
    assert_eq!(scene.send_request("a.test", &scene.bound, "GET /v1/chat", mine).status, 200);
    let none: [String; 0] = [];
    assert_eq!(
        CredentialScene::received_authorization(&scene.bound),
        none,
        "another rule of that host has none, nor the sandbox's own"
    );
    assert_eq!(scene.send_request("b.test", &scene.other, "GET /v1/chat", mine).status, 200);
    assert_eq!(CredentialScene::received_authorization(&scene.other), ["Bearer mine"]);
    let answer = scene.send_request("a.test", &scene.bound, "POST /v2/chat", "Content-Length: 0\r\n");
    scene.world.assert_refused("another path", &answer, 403, "path_not_allowed");
    assert!(!scene.log_text().contains(SECRET), "it is in no record");
    assert!(scene.log_text().contains("\"key\""), "its name is");
}

#[test]
fn p11_without_it_nothing_is_sent() {
    let scene = CredentialScene::new();
    assert_eq!(scene.send_post("").status, 200);
    let file = scene.credential_file();
    for (what, content, why) in [
        ("gone", None, "cannot read the file"),
        ("two lines", Some("a-secret-of\nmany lines"), "a header field cannot carry"),
        ("short", Some("x"), "is shorter than"),
    ] {
        match content {
            None => fs::remove_file(&file).unwrap(),
            Some(content) => fs::write(&file, content).unwrap(),
        }
        let refused = |answer: &RawResponse| scene.world.record_says(answer, why);
        scene.wait_for_answer(what, refused);
        let before = scene.bound.requests().len();
        let answer = scene.wait_for_answer(what, refused);
        scene.world.assert_refused(what, &answer, 502, "credential_unavailable");
        assert!(scene.world.record_says(&answer, "credential `key`"), "{what}: {}", answer.text());
        assert_eq!(scene.bound.requests().len(), before, "{what}: a request left without it");
    }
    fs::write(&file, "another-secret-of-ours").unwrap();
    scene.wait_for_answer("it is read again", |answer| answer.status == 200);
    assert_eq!(CredentialScene::received_authorization(&scene.bound), ["Bearer another-secret-of-ours"]);
}

#[test]
fn p11_what_the_origin_sends_back_is_covered_and_found() {
    let percent = "sk-live%2F0123456789%2Babcdef%3D%3D";
    let based = STANDARD.encode(format!("Bearer {SECRET}"));
    for (what, echo) in [("plain", SECRET), ("percent", percent), ("base64", &based)] {
        let scene = CredentialScene::new();
        let body = format!("you sent {echo}, thanks");
        let answer = format!(
            "HTTP/1.1 200 OK\r\nX-Echo: {echo}\r\nX-Echo: second\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        scene.bound.set_reply(OriginReply::Say(answer.into_bytes()));
        let answer = scene.send_post("");
        let shown = format!("{:?} {}", answer.fields, answer.text());
        assert!(!shown.contains(SECRET) && !shown.contains(percent), "{what}: {shown}");
        assert!(!shown.contains(based.get(12..40).unwrap()), "{what}: {shown}");
        assert!(shown.contains("second") && shown.contains("thanks"), "{what}: the rest passes: {shown}");
        scene.world.wait_for_record(0, what, |record| record.to_string().contains("credential_echoed"));
        assert!(!scene.log_text().contains(SECRET), "{what}: it is in no record");
    }
}

#[test]
fn p11_an_encoded_answer_cannot_be_searched_and_is_withheld() {
    let scene = CredentialScene::new();
    let answer = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz";
    scene.bound.set_reply(OriginReply::Say(answer.as_bytes().to_vec()));
    let answer = scene.send_post("Accept-Encoding: gzip\r\n");
    scene.world.assert_refused("encoded", &answer, 502, "answer_unreadable");
    let requests = scene.bound.requests();
    let asked = requests
        .last()
        .unwrap()
        .fields
        .iter()
        .filter(|(name, _)| name.eq_ignore_ascii_case("accept-encoding"));
    assert_eq!(asked.map(|(_, value)| value.as_str()).collect::<Vec<_>>(), ["identity"]);
}

#[test]
fn p11_a_value_that_only_sandbar_may_send_does_not_leave() {
    let scene = CredentialScene::new();
    for (host, origin, line) in [("b.test", &scene.other, "GET /x"), ("a.test", &scene.bound, "POST /v1/x")] {
        let answer =
            scene.send_request(host, origin, line, &format!("X-Data: {SECRET}\r\nContent-Length: 0\r\n"));
        scene.world.assert_refused(line, &answer, 403, "credential_leaving");
        assert!(origin.requests().is_empty(), "{line}: nothing arrived");
    }
    assert!(!scene.log_text().contains(SECRET));
}
