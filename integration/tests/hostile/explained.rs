//! `explain` and the data path give one answer (P3): random policies, each in force, and random attempts, each both
//! explained and made. What was made is judged by the client's answer and by the access log.

use std::fs;
use std::sync::Arc;

use integration::sandbar;
use rcgen::CertificateParams;
use rustls::ClientConfig;
use serde_json::Value;

use crate::handshake::{OriginCa, client_config_with, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance, record_stage};
use crate::origin::ScriptedOrigin;
use crate::wire::RawConnection;

const HOSTS: [&str; 3] = ["x.test", "a.x.test", "y.test"];
const PATTERNS: [&str; 6] = ["x.test", "a.x.test", "*.x.test", ".x.test", "y.test", "*.test"];
const POLICIES: usize = 40;
const ATTEMPTS: usize = 12;

/// The same numbers in every run.
struct Numbers(u64);

impl Numbers {
    /// The next number below `end` (xorshift, good enough to choose by).
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// One attempt.
#[derive(Debug)]
struct Attempt {
    secure: bool,
    /// In absolute form, to the proxy itself, and not through CONNECT.
    absolute: bool,
    host: &'static str,
    port: u16,
    method: &'static str,
    path: &'static str,
}

/// What became of it: how it passed and by which rule, or the code of its refusal.
type AttemptResult = Result<(String, String), String>;

struct ExplainScene {
    world: SandbarInstance,
    tls: Arc<ClientConfig>,
}

fn random_rule(numbers: &mut Numbers, at: usize, ports: [u16; 2]) -> String {
    let (pattern, port) = (numbers.choose(&PATTERNS), numbers.choose(&ports));
    let exact = pattern.trim_start_matches('*').trim_start_matches('.');
    let allow = |host: &str, more: &str| {
        format!(
            "[[allow]]\nname = \"r{at}\"\nhosts = [\"{host}\"]\nresolves_to = [\"127.0.0.0/8\"]\n\
             dangerously_wide = true\n{more}\n"
        )
    };
    let deny = |more: &str| format!("[[deny]]\nname = \"r{at}\"\nhosts = [\"{pattern}\"]\n{more}\n");
    match numbers.below(9) {
        0 | 1 => allow(exact, &format!("tcp = [{port}]")),
        2 => allow(pattern, &format!("ports = [{port}]\ntls = \"tunnel\"")),
        3 => allow(pattern, &format!("ports = [{port}]\nmethods = [\"GET\"]")),
        4 => allow(pattern, &format!("ports = [{port}]\npaths = [\"/v1/**\"]")),
        5 => deny("methods = [\"POST\"]"),
        6 => deny(&format!("ports = [{port}]\npaths = [\"/v1/secret\"]")),
        _ => allow(pattern, &format!("ports = [{}, {}]", ports[0], ports[1])),
    }
}

impl ExplainScene {
    /// Puts a random policy into force. Where one does not load, because a rule of it could never act, its last rule
    /// is left out.
    fn load_policy(&self, numbers: &mut Numbers, ports: [u16; 2]) -> String {
        let mut rules: Vec<String> = (0..4).map(|at| random_rule(numbers, at, ports)).collect();
        loop {
            let policy = format!("name = \"p\"\n{}", rules.concat());
            fs::write(self.world.policy_dir().join("p.toml"), &policy).unwrap();
            let config = self.world.config_path();
            let reload = sandbar().args(["reload", "--wait", "-c"]).arg(&config).output().unwrap();
            if reload.status.success() {
                return policy;
            }
            rules.pop();
        }
    }

    fn explain(&self, attempt: &Attempt) -> AttemptResult {
        let Attempt { secure, host, port, method, path, .. } = attempt;
        let scheme = if *secure { "https" } else { "http" };
        let output = sandbar()
            .args(["explain", "--json", "-c"])
            .arg(self.world.config_path())
            .args(["--method", method, &format!("{scheme}://{host}:{port}{path}")])
            .output()
            .unwrap();
        let said: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match said["decision"].as_str() {
            Some("allow") => Ok((text(&said["how"]), text(&said["rule"]["rule"]))),
            _ => Err(text(&said["reason"])),
        }
    }

    fn make(&self, attempt: &Attempt) -> AttemptResult {
        let Attempt { secure, absolute, host, port, method, path } = attempt;
        let since = self.world.record_count();
        let mut wire = self.world.connect();
        let mut target = format!("http://{host}:{port}{path}");
        if !absolute {
            wire.send(format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"));
            let head = wire.read_until(b"\r\n\r\n").expect("CONNECT is answered");
            let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
            if !head.starts_with("http/1.1 200 ") {
                let code = head.lines().find_map(|line| line.strip_prefix("sandbar-reason: "));
                return Err(code.expect("a refusal has its code").to_owned());
            }
            target = (*path).to_owned();
        }
        if *secure {
            match tls_handshake(wire, &self.tls, host) {
                Ok(inside) => wire = inside,
                Err(_) => return Err(self.wait_for_refusal(since)),
            }
        }
        self.request(
            wire,
            since,
            &format!("{method} {target} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"),
            method,
        )
    }

    fn request(&self, mut wire: RawConnection, since: usize, request: &str, method: &str) -> AttemptResult {
        wire.send(request);
        let Some(answer) = wire.read_response(method) else { return Err(self.wait_for_refusal(since)) };
        if let Some(code) = answer.field("sandbar-reason") {
            return Err(code.to_owned());
        }
        assert_eq!(answer.status, 200, "{request}: {}", answer.text());
        let passed = |record: &Value| record_stage(record) == "decision";
        let record = self.world.wait_for_record(since, request, passed);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let how = text(&record["unmapped"]["sandbar"]["carried"]);
        Ok((how, text(&record["firewall_rule"]["name"])))
    }

    /// The code of the last refusal.
    fn wait_for_refusal(&self, since: usize) -> String {
        let refused =
            |record: &Value| record_stage(record) == "refusal" || record["disposition"] == "Blocked";
        let record = self.world.wait_for_record(since, "the refusal", refused);
        record["status_detail"].as_str().unwrap().to_owned()
    }
}

#[test]
fn p3_explain_agrees_with_what_becomes_of_random_attempts_under_random_policies() {
    let root = OriginCa::new();
    let names: Vec<String> = HOSTS.iter().map(|host| (*host).to_owned()).collect();
    let params = CertificateParams::new(names).unwrap();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config_with(params)));
    let ports = [plain.port(), tls.port()];
    let hosts = HOSTS.map(|host| (host, plain.port()));
    let world = InstanceSetup::with_hosts(&hosts).with_roots(root.pem()).start();
    let trusted = [fs::read(world.ca_path()).unwrap(), root.pem().into_bytes()].concat();
    let scene = ExplainScene { world, tls: client_config_with(&trusted, "http/1.1") };

    let mut numbers = Numbers(0x5eed_cafe_f00d_0001);
    let (mut passed, mut refused) = (0, 0);
    let mut kinds = std::collections::BTreeMap::<String, usize>::new();
    for _ in 0..POLICIES {
        let policy = scene.load_policy(&mut numbers, ports);
        for _ in 0..ATTEMPTS {
            let secure = numbers.below(2) == 0;
            let attempt = Attempt {
                secure,
                absolute: !secure && numbers.below(2) == 0,
                host: numbers.choose(&HOSTS),
                port: if secure { ports[1] } else { ports[0] },
                method: numbers.choose(&["GET", "POST", "DELETE"]),
                path: numbers.choose(&["/v1/a", "/v1/secret", "/other", "/v1/..%2fother"]),
            };
            let reached = plain.requests().len() + tls.requests().len();
            let (explained, made) = (scene.explain(&attempt), scene.make(&attempt));
            // Raw TCP needs a tunnel: a proxy that is asked for a request would have to read it.
            let raw = matches!(&explained, Ok((how, _)) if how == "raw");
            let expected = if raw && attempt.absolute { Err("wrong_protocol".to_owned()) } else { explained };
            assert_eq!(made, expected, "{attempt:?}\n{policy}");
            let arrived = plain.requests().len() + tls.requests().len() - reached;
            assert_eq!(arrived, usize::from(made.is_ok()), "{attempt:?}\n{policy}");
            match &made {
                Ok((how, _)) => {
                    passed += 1;
                    *kinds.entry(how.clone()).or_default() += 1;
                }
                Err(code) => {
                    refused += 1;
                    *kinds.entry(code.clone()).or_default() += 1;
                }
            }
        }
    }
    println!("{passed} passed, {refused} refused: {kinds:?}");
    for kind in ["raw", "tunnel", "forward", "method_not_allowed", "path_not_allowed", "denied_by_rule"] {
        assert!(kinds.contains_key(kind), "no attempt ended as {kind}: {kinds:?}");
    }
}

/// A rule that denies an address denies it by whatever name a request goes there, also where it names methods.
#[test]
fn p1_a_denied_address_is_denied_for_names_that_lead_there() {
    let root = OriginCa::new();
    let (plain, tls) =
        (ScriptedOrigin::start_plain(), ScriptedOrigin::start_tls(root.server_config("x.test")));
    let setup = InstanceSetup::with_hosts(&[("x.test", plain.port()), ("x.test", tls.port())]);
    let deny = "[[deny]]\nname = \"no writes\"\naddresses = [\"127.0.0.1/32\"]\nmethods = [\"POST\"]\n";
    let setup = InstanceSetup { policy: setup.policy.clone() + deny, ..setup };
    let world = setup.with_roots(root.pem()).start();
    let config = client_config_with(&fs::read(world.ca_path()).unwrap(), "http/1.1");
    for origin in [&plain, &tls] {
        let port = origin.port();
        let open = || match port == tls.port() {
            true => tls_handshake(world.open_tunnel("x.test", port), &config, "x.test").unwrap(),
            false => world.open_tunnel("x.test", port),
        };
        let request = |method: &str| {
            let mut wire = open();
            wire.send(format!("{method} /x HTTP/1.1\r\nHost: x.test:{port}\r\nContent-Length: 0\r\n\r\n"));
            wire.read_response(method).unwrap()
        };
        assert_eq!(request("GET").status, 200);
        let before = origin.requests().len();
        let answer = request("POST");
        world.assert_refused("POST", &answer, 403, "denied_by_rule");
        assert!(answer.text().contains("no writes"), "{}", answer.text());
        assert_eq!(origin.requests().len(), before);
    }
}
