//! Credentials that are fetched: the token endpoint is a server of the test, with TLS that verifies, and says what an
//! honest, a broken or a hostile one would say.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use integration::{sandbar, text, write_secret};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance, wait_until};
use crate::origin::{OriginReply, ScriptedOrigin};
use crate::strict_http::StrictRequest;
use crate::wire::RawResponse;

const CLIENT_SECRET: &str = "s3cr3t-of-the-client:+/0123456789";
const FIRST: &str = "first-token-0123456789";
const SECOND: &str = "other-token-0123456789";

/// An origin that gets a credential, one that gets none, and the server that hands tokens out.
pub(crate) struct SourceScene {
    pub(crate) world: SandbarInstance,
    pub(crate) bound: ScriptedOrigin,
    pub(crate) other: ScriptedOrigin,
    pub(crate) tokens: ScriptedOrigin,
    pub(crate) secrets: TempDir,
}

/// Files for a source, and what of them the tests need.
pub(crate) struct SourceFiles {
    pub(crate) dir: TempDir,
    tokens: ScriptedOrigin,
    root: OriginCa,
}

impl SourceFiles {
    pub(crate) fn new() -> Self {
        let (dir, root) = (tempfile::tempdir().unwrap(), OriginCa::new());
        let tokens = ScriptedOrigin::start_tls(root.server_config("login.test"));
        tokens.set_reply(token_reply(FIRST, Some(3600)));
        write_secret(&dir.path().join("client-secret"), &format!("{CLIENT_SECRET}\n"));
        SourceFiles { dir, tokens, root }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://login.test:{}{path}", self.tokens.port())
    }

    /// Makes a key of RSA and returns the file of its public half.
    pub(crate) fn make_key(&self, name: &str) -> PathBuf {
        let (private, public) = (self.path(name), self.path(&format!("{name}.pub")));
        openssl(&["genrsa", "-traditional", "-out", &private.display().to_string(), "2048"]);
        fs::set_permissions(&private, fs::Permissions::from_mode(0o600)).unwrap();
        openssl(&[
            "rsa",
            "-in",
            &private.display().to_string(),
            "-pubout",
            "-out",
            &public.display().to_string(),
        ]);
        public
    }

    /// An instance whose credential has this source.
    pub(crate) fn start(self, source: &str) -> SourceScene {
        let (bound, other) = (
            ScriptedOrigin::start_tls(self.root.server_config("a.test")),
            ScriptedOrigin::start_tls(self.root.server_config("b.test")),
        );
        let policy = format!(
            "[[allow]]\nname = \"model\"\nhosts = [\"a.test:{}\"]\ncredential = \"key\"\nresolves_to = [\"127.0.0.0/8\"]\n\
             [[allow]]\nname = \"open\"\nhosts = [\"b.test:{}\"]\nresolves_to = [\"127.0.0.0/8\"]\n",
            bound.port(),
            other.port()
        );
        let tables =
            format!("[[credential]]\nname = \"key\"\n{source}\nhosts = [\"a.test:{}\"]\n", bound.port());
        let hosts = vec!["a.test", "b.test", "login.test"];
        let setup = InstanceSetup { policy, tables, hosts, ..InstanceSetup::default() };
        let world = setup.with_roots(self.root.pem()).start();
        SourceScene { world, bound, other, tokens: self.tokens, secrets: self.dir }
    }

    /// A configuration that is only tried.
    pub(crate) fn configure(&self, source: &str) -> PathBuf {
        fs::write(self.path("roots.pem"), self.root.pem()).unwrap();
        let text = format!(
            "policies = \"policies\"\n[log]\ndir = \"log\"\n[dns]\nupstreams = [\"127.0.0.1:9\"]\n\
             [[dns.host]]\nname = \"login.test\"\naddresses = [\"127.0.0.1\"]\n\
             [upstream]\nsystem_roots = false\nroots = [\"roots.pem\"]\n\
             [[credential]]\nname = \"key\"\n{source}\nhosts = [\"a.test\"]\n"
        );
        let (config, policies) = (self.path("sandbar.toml"), self.path("policies"));
        fs::create_dir_all(&policies).unwrap();
        fs::write(policies.join("p.toml"), "name = \"p\"\n").unwrap();
        fs::write(&config, text).unwrap();
        config
    }

    /// What `secret test` says of a source, and its exit status.
    pub(crate) fn try_source(&self, source: &str) -> (Value, i32) {
        self.try_source_with(source, &[])
    }

    /// The same with variables in its environment.
    pub(crate) fn try_source_with(&self, source: &str, variables: &[(&str, &str)]) -> (Value, i32) {
        let config = self.configure(source);
        let mut command = sandbar();
        command.args(["secret", "test", "key", "--json", "-c"]).arg(config).envs(variables.iter().copied());
        let output = command.output().unwrap();
        let said = text(&output.stdout);
        let value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said} {}", text(&output.stderr)));
        (value, output.status.code().unwrap())
    }

    pub(crate) fn last_request(&self) -> StrictRequest {
        self.tokens.requests().last().unwrap().clone()
    }
}

impl SourceScene {
    pub(crate) fn send(&self, host: &str, origin: &ScriptedOrigin, fields: &str) -> RawResponse {
        let config = client_config(&self.world, "http/1.1");
        let tunnel = self.world.open_tunnel(host, origin.port());
        let mut wire = tls_handshake(tunnel, &config, host).unwrap();
        let port = origin.port();
        wire.send(format!("GET /v1/chat HTTP/1.1\r\nHost: {host}:{port}\r\n{fields}\r\n"));
        wire.read_response("GET").unwrap()
    }

    pub(crate) fn send_bound(&self) -> RawResponse {
        self.send("a.test", &self.bound, "")
    }

    pub(crate) fn send_other(&self) -> RawResponse {
        self.send("b.test", &self.other, "")
    }

    pub(crate) fn received(&self) -> Option<String> {
        self.bound.requests().last()?.field("authorization").map(str::to_owned)
    }

    pub(crate) fn wait_until_sent(&self, token: &str) {
        let wanted = format!("Bearer {token}");
        wait_until(token, || self.send_bound().status == 200 && self.received().as_ref() == Some(&wanted));
    }

    /// Everything that people and machines see of the instance.
    pub(crate) fn everything_shown(&self) -> String {
        let segments = fs::read_dir(self.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        let files = segments.filter(|path| path.is_file()).map(|path| text(&fs::read(path).unwrap()));
        let log: String = files.collect();
        let status = self.world.run_command(&["status"]);
        let listed = self.world.run_command(&["secret", "list", "--json"]);
        [log, status, listed, self.metrics(), self.world.stderr_text()].concat()
    }

    fn metrics(&self) -> String {
        let socket = fs::read_dir(self.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        let socket = socket.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "sock"));
        let mut stream = UnixStream::connect(socket.expect("the admin socket is beside the log")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: sandbar\r\nConnection: close\r\n\r\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        said
    }
}

fn openssl(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("openssl").args(arguments).output().expect("`openssl` is installed");
    assert!(output.status.success(), "openssl {arguments:?}: {}", text(&output.stderr));
    output.stdout
}

fn reply(status: &str, kind: &str, body: &str) -> OriginReply {
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n", body.len());
    OriginReply::Say(format!("{head}{body}").into_bytes())
}

fn json_reply(status: &str, body: &Value) -> OriginReply {
    reply(status, "application/json", &body.to_string())
}

fn token_reply(token: &str, life: Option<u64>) -> OriginReply {
    let mut body = json!({ "access_token": token, "token_type": "Bearer" });
    if let Some(life) = life {
        body["expires_in"] = life.into();
    }
    json_reply("200 OK", &body)
}

/// The fields of a form, decoded.
fn form_fields(request: &StrictRequest) -> Vec<(String, String)> {
    let body = String::from_utf8(request.body.clone()).unwrap();
    let decode = |text: &str| {
        let mut bytes = Vec::new();
        let mut rest = text.bytes();
        while let Some(byte) = rest.next() {
            bytes.push(match byte {
                b'%' => u8::from_str_radix(&text_of([rest.next(), rest.next()]), 16).unwrap(),
                b'+' => b' ',
                plain => plain,
            });
        }
        String::from_utf8(bytes).unwrap()
    };
    body.split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect()
}

fn text_of(digits: [Option<u8>; 2]) -> String {
    digits.into_iter().flatten().map(char::from).collect()
}

fn form_field(request: &StrictRequest, name: &str) -> String {
    let found = form_fields(request).into_iter().find(|(known, _)| known == name);
    found.unwrap_or_else(|| panic!("no `{name}` in {:?}", form_fields(request))).1
}

/// Verifies a token with openssl and returns its header and claims.
fn verified(token: &str, public: &Path) -> (Value, Value) {
    let dir = tempfile::tempdir().unwrap();
    let (signed, signature) = token.rsplit_once('.').unwrap();
    let (header, claims) = signed.split_once('.').unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    fs::write(file("signed"), signed).unwrap();
    fs::write(file("signature"), URL_SAFE_NO_PAD.decode(signature).unwrap()).unwrap();
    let public = public.display().to_string();
    let (signature, signed) = (file("signature"), file("signed"));
    let said = openssl(&["dgst", "-sha256", "-verify", &public, "-signature", &signature, &signed]);
    assert!(text(&said).contains("Verified OK"), "{}", text(&said));
    let part = |part: &str| serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap();
    (part(header), part(claims))
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs()
}

// proves: credential.oauth2.token_url, credential.oauth2.client_id, credential.oauth2.client_secret_file, credential.oauth2.scopes, credential.oauth2.audience
#[test]
fn p11_a_token_is_fetched_and_replaced_before_it_ends() {
    let files = SourceFiles::new();
    // Ten seconds are kept as a margin, so that this one is replaced after about two.
    files.tokens.set_reply(token_reply(FIRST, Some(12)));
    let source = format!(
        "oauth2 = {{ token_url = \"{}\", client_id = \"gate:way\", client_secret_file = \"{}\", scopes = [\"one\", \"two\"], \
         audience = \"https://a.test\" }}",
        files.url("/token?tenant=1"),
        files.shown("client-secret")
    );
    let scene = files.start(&source);
    scene.wait_until_sent(FIRST);
    let asked = scene.tokens.requests().first().unwrap().clone();
    assert_eq!((asked.method.as_str(), asked.target.as_str()), ("POST", "/token?tenant=1"));
    // RFC 6749, section 2.3.1: both parts are form-encoded before they are joined.
    let basic = STANDARD.encode("gate%3Away:s3cr3t-of-the-client%3A%2B%2F0123456789");
    assert_eq!(asked.field("authorization"), Some(format!("Basic {basic}").as_str()));
    assert_eq!(
        form_fields(&asked),
        [("grant_type", "client_credentials"), ("scope", "one two"), ("audience", "https://a.test")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    );
    scene.tokens.set_reply(token_reply(SECOND, Some(3600)));
    scene.wait_until_sent(SECOND);
    let asked = scene.tokens.requests().len();
    for _ in 0..5 {
        assert_eq!(scene.send_bound().status, 200);
    }
    assert_eq!(scene.tokens.requests().len(), asked, "no request fetches");

    // What was replaced, and what the source alone may see, stay secret.
    for secret in [FIRST, SECOND, CLIENT_SECRET] {
        let before = scene.other.requests().len();
        let answer = scene.send("b.test", &scene.other, &format!("X-Data: {secret}\r\n"));
        scene.world.assert_refused(secret, &answer, 403, "credential_leaving");
        assert_eq!(scene.other.requests().len(), before, "nothing arrived");
        assert!(!scene.everything_shown().contains(secret), "{secret} is shown");
    }
    assert!(
        scene.metrics().contains("sandbar_credential_fetches_total{credential=\"key\",outcome=\"fetched\"}")
    );
    let status = scene.world.run_command(&["status"]);
    assert!(status.contains("key (oauth2): usable, ") && status.contains("expires in 3"), "{status}");
}

// proves: credential.timeout_seconds
#[test]
fn p11_whatever_an_endpoint_says_without_a_token_nothing_is_sent() {
    let huge = format!("{{\"access_token\":\"{}\"}}", "x".repeat(70_000));
    let control = json!({ "access_token": "sk-0123456789\r\nX-Injected: yes" });
    let bound = json!({ "access_token": FIRST, "token_type": "DPoP" });
    let at_once = json!({ "access_token": FIRST, "expires_in": 5 });
    let wordy =
        json!({ "error": "invalid_client", "error_description": format!("no such secret {CLIENT_SECRET}") });
    for (what, said, why) in [
        ("refused", json_reply("401 Unauthorized", &wordy), "answers 401: invalid_client: no such secret "),
        ("redirected", OriginReply::Say(redirect()), "answers 307"),
        ("not JSON", reply("200 OK", "text/html", "<html>"), "not JSON with an `access_token`"),
        ("no token", json_reply("200 OK", &json!({})), "not JSON with an `access_token`"),
        ("empty", json_reply("200 OK", &json!({ "access_token": "" })), "it is empty"),
        ("huge", reply("200 OK", "application/json", &huge), "more than 65536 bytes"),
        ("control characters", json_reply("200 OK", &control), "a header field cannot carry"),
        ("bound", json_reply("200 OK", &bound), "a token of type dpop"),
        ("ends at once", json_reply("200 OK", &at_once), "ends within 10 s"),
        (
            "odd end",
            json_reply("200 OK", &json!({ "access_token": FIRST, "expires_in": "soon" })),
            "not a number of seconds",
        ),
        ("no HTTP", OriginReply::SayAndClose(b"SSH-2.0-x\r\n".to_vec()), "breaks off"),
        ("silent", OriginReply::SayAndHang(Vec::new()), "has not answered within 1 s"),
        (
            "half",
            OriginReply::SayAndHang(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{".to_vec()),
            "has not answered within 1 s",
        ),
    ] {
        let files = SourceFiles::new();
        files.tokens.set_reply(said);
        let source = format!(
            "timeout_seconds = 1\noauth2 = {{ token_url = \"{}\", client_id = \"gateway\", client_secret_file = \"{}\" }}",
            files.url("/token"),
            files.shown("client-secret")
        );
        let scene = files.start(&source);
        // Those that need no credential do not wait for it.
        assert_eq!(scene.send_other().status, 200, "{what}");
        let answer = scene.send_bound();
        scene.world.assert_refused(what, &answer, 502, "credential_unavailable");
        assert!(scene.world.record_says(&answer, "credential `key`: "), "{what}: {}", answer.text());
        assert!(
            scene.world.record_says(&answer, why),
            "{what}: {}",
            scene.world.wait_for_record(0, what, |_| true)
        );
        assert!(!answer.text().contains("login.test"), "the sandbox does not learn where tokens come from");
        assert!(scene.bound.requests().is_empty(), "{what}: a request left without it");
        assert!(!scene.everything_shown().contains(CLIENT_SECRET), "{what}: the secret is shown");
        assert!(scene.metrics().contains("outcome=\"failed\"}"), "{what}");

        scene.tokens.set_reply(token_reply(SECOND, None));
        scene.wait_until_sent(SECOND); // it is tried again
    }
}

fn redirect() -> Vec<u8> {
    b"HTTP/1.1 307 Elsewhere\r\nLocation: https://evil.test/\r\nContent-Length: 0\r\n\r\n".to_vec()
}

#[test]
fn p11_an_endpoint_that_does_not_verify_gets_no_secret() {
    let files = SourceFiles::new();
    let strange = ScriptedOrigin::start_tls(OriginCa::new().server_config("login.test"));
    let named = ScriptedOrigin::start_tls(files.root.server_config("other.test"));
    for (what, port) in [("an unknown root", strange.port()), ("another name", named.port())] {
        let source = format!(
            "oauth2 = {{ token_url = \"https://login.test:{port}/token\", client_id = \"c\", client_secret_file = \"client-secret\" }}"
        );
        let (said, status) = files.try_source(&source);
        assert_eq!(status, 1, "{what}: {said}");
        assert!(
            said["error"].as_str().unwrap().contains("its certificate or TLS is not accepted"),
            "{what}: {said}"
        );
    }
    assert!(strange.requests().is_empty() && named.requests().is_empty());
    let source = "oauth2 = { token_url = \"https://nowhere.invalid/token\", client_id = \"c\", client_secret_file = \"client-secret\" }\ntimeout_seconds = 5";
    let (said, status) = files.try_source(source);
    assert_eq!(status, 1);
    assert!(said["error"].as_str().unwrap().contains("cannot be resolved"), "{said}");
}

// proves: credential.oauth2.grant, credential.oauth2.refresh_token_file, credential.oauth2.client_auth
#[test]
fn p11_a_rotated_refresh_token_is_stored_for_the_next_time() {
    let files = SourceFiles::new();
    let file = files.path("refresh");
    write_secret(&file, "first-refresh-token\n");
    let rotated = |access: &str, refresh: &str, life: u64| {
        json_reply("200 OK", &json!({ "access_token": access, "refresh_token": refresh, "expires_in": life }))
    };
    files.tokens.set_reply(rotated(FIRST, "second-refresh-token", 12));
    let source = format!(
        "oauth2 = {{ token_url = \"{}\", grant = \"refresh_token\", refresh_token_file = \"{}\", client_id = \"c\", \
         client_secret_file = \"{}\", client_auth = \"post\" }}",
        files.url("/token"),
        file.display(),
        files.shown("client-secret")
    );
    let scene = files.start(&source);
    scene.wait_until_sent(FIRST);
    let asked = scene.tokens.requests().first().unwrap().clone();
    assert_eq!(asked.field("authorization"), None);
    for (name, value) in [
        ("grant_type", "refresh_token"),
        ("refresh_token", "first-refresh-token"),
        ("client_id", "c"),
        ("client_secret", CLIENT_SECRET),
    ] {
        assert_eq!(form_field(&asked, name), value);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "second-refresh-token\n");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(scene.secrets.path()).unwrap().count(), 2, "nothing else is left there");
    scene.tokens.set_reply(rotated(SECOND, "third-refresh-token", 3600));
    scene.wait_until_sent(SECOND);
    let last = scene.tokens.requests().last().unwrap().clone();
    assert_eq!(form_field(&last, "refresh_token"), "second-refresh-token", "the new one was used");
    assert_eq!(fs::read_to_string(&file).unwrap(), "third-refresh-token\n");
    for secret in ["first-refresh-token", "second-refresh-token", "third-refresh-token"] {
        let answer = scene.send("b.test", &scene.other, &format!("X-Data: {secret}\r\n"));
        scene.world.assert_refused(secret, &answer, 403, "credential_leaving");
        assert!(!scene.everything_shown().contains(secret));
    }
}

// proves: credential.oauth2.key_file, credential.oauth2.key_id, credential.oauth2.issuer, credential.oauth2.subject, credential.oauth2.assertion_audience
#[test]
fn p11_assertions_verify_independently() {
    let files = SourceFiles::new();
    let public = files.make_key("key.pem");
    let url = files.url("/token");
    let bearer = format!(
        "oauth2 = {{ token_url = \"{url}\", grant = \"jwt_bearer\", key_file = \"key.pem\", key_id = \"k1\", issuer = \"me\", \
         subject = \"user\", assertion_audience = \"https://aud.test\", client_id = \"c\" }}"
    );
    let (said, status) = files.try_source(&bearer);
    assert_eq!(status, 0, "{said}");
    assert_eq!(
        (said["length"].as_u64(), said["expires_in_seconds"].as_u64()),
        (Some(FIRST.len() as u64), Some(3600))
    );
    assert!(!said.to_string().contains(FIRST), "{said}");
    let asked = files.last_request();
    assert_eq!(form_field(&asked, "grant_type"), "urn:ietf:params:oauth:grant-type:jwt-bearer");
    let (header, claims) = verified(&form_field(&asked, "assertion"), &public);
    assert_eq!(header, json!({ "alg": "RS256", "typ": "JWT", "kid": "k1" }));
    for (name, value) in [("iss", "me"), ("sub", "user"), ("aud", "https://aud.test")] {
        assert_eq!(claims[name], value);
    }
    let (from, until) = (claims["iat"].as_u64().unwrap(), claims["exp"].as_u64().unwrap());
    assert!(until - from == 300 && from.abs_diff(now()) < 60, "{claims}");

    // A certificate behind the key is named in the header, as Azure AD wants it.
    let key = files.shown("key.pem");
    let certificate = openssl(&["req", "-x509", "-key", &key, "-subj", "/CN=gateway", "-days", "1"]);
    let both = [fs::read(files.path("key.pem")).unwrap(), certificate.clone()].concat();
    write_secret(&files.path("both.pem"), &text(&both));
    let private = format!(
        "oauth2 = {{ token_url = \"{url}\", client_auth = \"private_key_jwt\", key_file = \"both.pem\", client_id = \"c\" }}"
    );
    let (said, status) = files.try_source(&private);
    assert_eq!(status, 0, "{said}");
    let asked = files.last_request();
    assert_eq!(form_field(&asked, "grant_type"), "client_credentials");
    assert_eq!(form_field(&asked, "client_id"), "c");
    let kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
    assert_eq!(form_field(&asked, "client_assertion_type"), kind);
    let (header, claims) = verified(&form_field(&asked, "client_assertion"), &public);
    for (name, value) in [("iss", "c"), ("sub", "c"), ("aud", url.as_str())] {
        assert_eq!(claims[name], value);
    }
    fs::write(files.path("certificate.pem"), certificate).unwrap();
    let file = files.shown("certificate.pem");
    let print = text(&openssl(&["x509", "-in", &file, "-noout", "-fingerprint", "-sha256"]));
    let digits: String = print.rsplit('=').next().unwrap().chars().filter(char::is_ascii_hexdigit).collect();
    let shown: String = URL_SAFE_NO_PAD
        .decode(header["x5t#S256"].as_str().unwrap())
        .unwrap()
        .iter()
        .map(|byte| format!("{byte:02X}"))
        .collect();
    assert_eq!(shown, digits);
}

// proves: credential.google.file, credential.google.scopes, credential.google.subject
#[test]
fn p11_a_service_account_of_google_gets_a_token() {
    let files = SourceFiles::new();
    let public = files.make_key("key.pem");
    let pkcs8 = openssl(&["pkcs8", "-topk8", "-nocrypt", "-in", &files.shown("key.pem")]);
    let account = json!({
        "type": "service_account", "client_email": "gateway@project.iam.test", "private_key_id": "k1",
        "private_key": text(&pkcs8), "token_uri": files.url("/token"),
    });
    write_secret(&files.path("account.json"), &account.to_string());
    let source = "google = { file = \"account.json\", scopes = [\"https://a.test/auth/one\", \"two\"], subject = \"user@a.test\" }";
    let (said, status) = files.try_source(source);
    assert_eq!((status, said["expires_in_seconds"].as_u64()), (0, Some(3600)), "{said}");
    let asked = files.last_request();
    assert_eq!(form_field(&asked, "grant_type"), "urn:ietf:params:oauth:grant-type:jwt-bearer");
    let (header, claims) = verified(&form_field(&asked, "assertion"), &public);
    assert_eq!(header["kid"], "k1");
    for (name, value) in [
        ("iss", "gateway@project.iam.test"),
        ("sub", "user@a.test"),
        ("aud", files.url("/token").as_str()),
        ("scope", "https://a.test/auth/one two"),
    ] {
        assert_eq!(claims[name], value);
    }
}

// proves: credential.github_app.id, credential.github_app.key_file, credential.github_app.installation, credential.github_app.repositories, credential.github_app.permissions, credential.github_app.api_url
#[test]
fn p11_an_app_of_github_gets_a_token_of_its_installation() {
    let files = SourceFiles::new();
    let public = files.make_key("key.pem");
    let answer = |until: &str| {
        json_reply("201 Created", &json!({ "token": "ghs_0123456789abcdef", "expires_at": until }))
    };
    files.tokens.set_reply(answer("2999-01-01T00:00:00Z"));
    let source = format!(
        "github_app = {{ id = \"4711\", key_file = \"key.pem\", installation = 42, repositories = [\"one\"], \
         permissions = {{ contents = \"read\" }}, api_url = \"{}\" }}",
        files.url("/api/v3")
    );
    let (said, status) = files.try_source(&source);
    assert_eq!((status, said["length"].as_u64()), (0, Some(20)), "{said}");
    assert!(said["expires_in_seconds"].as_u64().unwrap() > 3600);
    let asked = files.last_request();
    assert_eq!(
        (asked.method.as_str(), asked.target.as_str()),
        ("POST", "/api/v3/app/installations/42/access_tokens")
    );
    assert_eq!(asked.field("accept"), Some("application/vnd.github+json"));
    let body: Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!(body, json!({ "repositories": ["one"], "permissions": { "contents": "read" } }));
    let token = asked.field("authorization").unwrap().strip_prefix("Bearer ").unwrap();
    let (_, claims) = verified(token, &public);
    assert_eq!(claims["iss"], "4711");
    assert!(claims["iat"].as_u64().unwrap() <= now() - 60 && claims["exp"].as_u64().unwrap() <= now() + 600);
    for (until, why) in [("yesterday", "its `expires_at` is not a time"), ("2001-01-01T00:00:00Z", "")] {
        files.tokens.set_reply(answer(until));
        let (said, _) = files.try_source(&source);
        assert!(why.is_empty() || said["error"].as_str().unwrap().contains(why), "{said}");
        assert!(!why.is_empty() || said["expires_in_seconds"] == 0, "{said}");
    }
    files.tokens.set_reply(json_reply("404 Not Found", &json!({ "message": "Integration not found" })));
    let (said, status) = files.try_source(&source);
    assert_eq!(status, 1);
    assert!(said["error"].as_str().unwrap().contains("answers 404: Integration not found"), "{said}");
}

const STS_ANSWER: &str = "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
    <AssumeRoleWithWebIdentityResult><Credentials><SessionToken>a-session-token/==</SessionToken>\
    <SecretAccessKey>a-secret-access-key/+0123456789</SecretAccessKey><Expiration>2999-01-01T00:00:00Z</Expiration>\
    <AccessKeyId>ASIAEXAMPLE000000000</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult>\
    </AssumeRoleWithWebIdentityResponse>";

// proves: credential.aws.role, credential.aws.web_identity_token_file, credential.aws.session_name, credential.aws.sts_url, credential.aws.region
#[test]
fn p11_sts_gives_keys_for_a_web_identity() {
    let files = SourceFiles::new();
    write_secret(&files.path("identity"), "a.web.identity-token\n");
    files.tokens.set_reply(reply("200 OK", "text/xml", STS_ANSWER));
    let form = "form = { sigv4 = { service = \"s3\", region = \"eu-central-1\" } }";
    let source = format!(
        "{form}\naws = {{ role = \"arn:aws:iam::1:role/one\", web_identity_token_file = \"identity\", \
         session_name = \"gate\", sts_url = \"{}\" }}",
        files.url("/")
    );
    let (said, status) = files.try_source(&source);
    assert_eq!((status, said["length"].as_u64()), (0, Some(31)), "{said}");
    let asked = files.last_request();
    for (name, value) in [
        ("Action", "AssumeRoleWithWebIdentity"),
        ("Version", "2011-06-15"),
        ("RoleArn", "arn:aws:iam::1:role/one"),
        ("RoleSessionName", "gate"),
        ("WebIdentityToken", "a.web.identity-token"),
    ] {
        assert_eq!(form_field(&asked, name), value);
    }
    let denied = "<ErrorResponse><Error><Code>ExpiredTokenException</Code><Message>Token a.web.identity-token expired</Message>\
        </Error></ErrorResponse>";
    for (answer, why) in [
        (reply("400 Bad Request", "text/xml", denied), "answers 400: ExpiredTokenException: Token "),
        (reply("200 OK", "text/xml", &STS_ANSWER.replace("SessionToken", "Session")), "not the XML of"),
        (reply("200 OK", "text/xml", &STS_ANSWER.replace("+0123", "&#43;0123")), "not the XML of"),
    ] {
        files.tokens.set_reply(answer);
        let (said, status) = files.try_source(&source);
        assert_eq!(status, 1, "{said}");
        assert!(said["error"].as_str().unwrap().contains(why), "{said}");
        assert!(!said.to_string().contains("identity-token"), "{said}");
    }
    let regional = format!(
        "{form}\naws = {{ role = \"arn:aws:iam::1:role/one\", web_identity_token_file = \"identity\", region = \"eu-test-1\" }}"
    );
    let (said, _) = files.try_source(&format!("timeout_seconds = 5\n{regional}"));
    assert!(said["error"].as_str().unwrap().starts_with("sts.eu-test-1.amazonaws.com: "), "{said}");
}

// proves: credential.command, credential.cache_seconds
#[test]
fn p11_a_command_is_run_again_when_its_value_may_have_changed() {
    let files = SourceFiles::new();
    let (script, value) = (files.path("get"), files.path("value"));
    write_secret(&value, "sk-first-value-0123\n");
    fs::write(&script, format!("#!/bin/sh\necho run >> {0}.runs\ncat {0}\n", value.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    let scene = files.start(&format!("command = [\"{}\", \"key\"]\ncache_seconds = 2", script.display()));
    scene.wait_until_sent("sk-first-value-0123");
    write_secret(&value, "sk-other-value-0123\n");
    scene.wait_until_sent("sk-other-value-0123");
    fs::remove_file(&value).unwrap();
    wait_until("its value has ended", || scene.send_bound().status == 502);
    let before = scene.bound.requests().len();
    let answer = scene.send_bound();
    scene.world.assert_refused("no value", &answer, 502, "credential_unavailable");
    assert!(scene.world.record_says(&answer, "ended with exit status: 1: cat: "), "{}", answer.text());
    assert_eq!(scene.bound.requests().len(), before);
}
