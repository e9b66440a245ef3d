//! A credential that never enters the sandbox (P11): put in for the bound host, method and path only, over TLS
//! that verifies; whatever the sandbox sent in its place is gone, and what the origin sends back is covered.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tempfile::TempDir;

use crate::handshake::{Root, client, shake};
use crate::origin::{Act, Origin};
use crate::wire::{Answer, Wire};
use crate::world::{Plan, World};

pub(crate) const SECRET: &str = "sk-live/0123456789+abcdef==";

/// An origin with a credential for `POST /v1/**` and `GET /ws/**`, and one without.
pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) bound: Origin,
    other: Origin,
    secret: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let root = Root::new();
        let (bound, other) =
            (Origin::tls(root.server("a.test")), Origin::tls(root.server("b.test")));
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
        let tables = format!("[[credential]]\nname = \"key\"\nfile = \"{file}\"\n");
        let hosts = vec!["a.test", "b.test"];
        let plan = Plan { policy, tables, hosts, ..Plan::default() };
        let world = plan.roots(root.pem()).start();
        Scene { world, bound, other, secret }
    }

    fn ask(&self, host: &str, origin: &Origin, line: &str, fields: &str) -> Answer {
        let mut wire = self.connect(host, origin);
        let port = origin.port();
        wire.send(format!("{line} HTTP/1.1\r\nHost: {host}:{port}\r\n{fields}\r\n"));
        wire.answer("POST").unwrap()
    }

    /// A connection of the sandbox to an origin, in TLS.
    fn connect(&self, host: &str, origin: &Origin) -> Wire {
        let config = client(&self.world, "http/1.1");
        shake(self.world.tunnel(host, origin.port()), &config, host).unwrap()
    }

    /// A connection to the origin that has a credential.
    pub(crate) fn bound(&self) -> Wire {
        self.connect("a.test", &self.bound)
    }

    pub(crate) fn post(&self, fields: &str) -> Answer {
        self.ask("a.test", &self.bound, "POST /v1/chat", &format!("Content-Length: 0\r\n{fields}"))
    }

    /// The file that holds the credential.
    pub(crate) fn file(&self) -> PathBuf {
        self.secret.path().join("key")
    }

    /// What the origin got as `Authorization`, of its last request.
    pub(crate) fn sent(origin: &Origin) -> Vec<String> {
        let requests = origin.requests();
        let last = requests.last().unwrap();
        let named =
            last.fields.iter().filter(|(name, _)| name.eq_ignore_ascii_case("authorization"));
        named.map(|(_, value)| value.clone()).collect()
    }

    pub(crate) fn log(&self) -> String {
        let segments =
            fs::read_dir(self.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        segments
            .filter(|path| path.extension().is_some_and(|kind| kind == "jsonl"))
            .map(|path| text(&path))
            .collect()
    }
}

#[test]
fn p11_it_goes_to_the_bound_host_method_and_path_and_nowhere_else() {
    let scene = Scene::new();
    assert_eq!(scene.post("").status, 200);
    assert_eq!(Scene::sent(&scene.bound), [format!("Bearer {SECRET}")]);
    for fields in [
        "Authorization: Bearer mine\r\n",
        "authorization: Bearer one\r\nAUTHORIZATION: Basic dHdv\r\nAuthorization: Bearer three\r\n",
        "Connection: authorization\r\nAuthorization: Bearer mine\r\n",
        "Connection: close, Authorization\r\n",
    ] {
        assert_eq!(scene.post(fields).status, 200, "{fields:?}");
        assert_eq!(Scene::sent(&scene.bound), [format!("Bearer {SECRET}")], "{fields:?}");
    }
    let mine = "Authorization: Bearer mine\r\n";
    assert_eq!(scene.ask("a.test", &scene.bound, "GET /v1/chat", mine).status, 200);
    let none: [String; 0] = [];
    assert_eq!(
        Scene::sent(&scene.bound),
        none,
        "another rule of that host has none, nor the sandbox's own"
    );
    assert_eq!(scene.ask("b.test", &scene.other, "GET /v1/chat", mine).status, 200);
    assert_eq!(Scene::sent(&scene.other), ["Bearer mine"]);
    let answer = scene.ask("a.test", &scene.bound, "POST /v2/chat", "Content-Length: 0\r\n");
    scene.world.assert_refused("another path", &answer, 403, "path_not_allowed");
    assert!(!scene.log().contains(SECRET), "it is in no record");
    assert!(scene.log().contains("\"key\""), "its name is");
}

#[test]
fn p11_without_it_nothing_is_sent() {
    let scene = Scene::new();
    assert_eq!(scene.post("").status, 200);
    let file = scene.file();
    for (what, content) in
        [("gone", None), ("two lines", Some("a-secret-of\nmany lines")), ("short", Some("x"))]
    {
        match content {
            None => fs::remove_file(&file).unwrap(),
            Some(content) => fs::write(&file, content).unwrap(),
        }
        let before = scene.bound.requests().len();
        let answer = scene.post("Authorization: Bearer mine\r\n");
        scene.world.assert_refused(what, &answer, 502, "credential_unavailable");
        assert!(answer.text().contains("credential `key`"), "{what}: {}", answer.text());
        assert_eq!(scene.bound.requests().len(), before, "{what}: a request left without it");
    }
    fs::write(&file, "another-secret-of-ours").unwrap();
    assert_eq!(scene.post("").status, 200, "it is read again");
    assert_eq!(Scene::sent(&scene.bound), ["Bearer another-secret-of-ours"]);
}

#[test]
fn p11_what_the_origin_sends_back_is_covered_and_found() {
    let percent = "sk-live%2F0123456789%2Babcdef%3D%3D";
    let based = STANDARD.encode(format!("Bearer {SECRET}"));
    for (what, echo) in [("plain", SECRET), ("percent", percent), ("base64", &based)] {
        let scene = Scene::new();
        let body = format!("you sent {echo}, thanks");
        let answer = format!(
            "HTTP/1.1 200 OK\r\nX-Echo: {echo}\r\nX-Echo: second\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        scene.bound.act(Act::Say(answer.into_bytes()));
        let answer = scene.post("");
        let shown = format!("{:?} {}", answer.fields, answer.text());
        assert!(!shown.contains(SECRET) && !shown.contains(percent), "{what}: {shown}");
        assert!(!shown.contains(based.get(12..40).unwrap()), "{what}: {shown}");
        assert!(
            shown.contains("second") && shown.contains("thanks"),
            "{what}: the rest passes: {shown}"
        );
        scene.world.find(0, what, |record| record.to_string().contains("credential_echoed"));
        assert!(!scene.log().contains(SECRET), "{what}: it is in no record");
    }
}

#[test]
fn p11_an_encoded_answer_cannot_be_searched_and_is_withheld() {
    let scene = Scene::new();
    let answer = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nzzzz";
    scene.bound.act(Act::Say(answer.as_bytes().to_vec()));
    let answer = scene.post("Accept-Encoding: gzip\r\n");
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
