//! Honest clients: each does its work, loses no query and raises no alarm, and what leaves is what it was for.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::text;

use super::capture::{CapturedMessage, PacketCapture, queried_names};
use super::{DnsNetwork, SERVER, finding_codes, records_at_stage};

/// What the sandbox of a build may look up.
const POLICY: &str = r#"
name = "p"
[[allow]]
name = "exact"
hosts = ["code.example:80", "deb.example:80", "npm.example:80", "pypi.example:80", "www.example:80"]
[[allow]]
name = "wild"
hosts = ["*.wild.example"]
"#;

/// `resolv.conf` of a pod: five suffixes, and `ndots` so that each is tried before the name itself.
const RESOLV_CONF: &str = "nameserver 10.200.0.1\nsearch default.svc.cluster.local svc.cluster.local cluster.local corp.example example\noptions ndots:5 timeout:30\n";

/// Seconds a client may take on a busy machine.
const CLIENT_TIMEOUT: &str = "150";

const SERVFAIL: u64 = 2;
/// A, AAAA and HTTPS: what a policy allows unless it says otherwise.
const USUAL_TYPES: [u64; 3] = [1, 28, 65];

#[test]
fn dig_asks_for_each_kind() {
    let honest = BenignClient::new();
    honest.run_client("dig", &["+short", "www.example", "A"]).assert_contains(SERVER);
    honest.run_client("dig", &["+short", "www.example", "AAAA"]).assert_contains("2606:2800::1");
    honest.run_client("dig", &["static.wild.example", "HTTPS"]).assert_contains("status: NOERROR");
    honest.run_client("dig", &["+search", "+short", "www", "A"]).assert_contains(SERVER);
    honest.finish(&["static.wild.example", "www.example"]);
}

#[test]
fn a_search_list_of_five_suffixes_finds_its_name() {
    let honest = BenignClient::new();
    honest.run_client("getent", &["ahosts", "www"]).assert_contains(SERVER);
    honest.run_client("getent", &["ahosts", "files.wild.example"]).assert_contains(SERVER);
    let seen = honest.finish(&["files.wild.example", "www.example"]);
    for suffix in ["default.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"] {
        let tried = format!("www.{suffix}");
        assert!(queried_names(&seen).contains(tried.as_str()), "{tried} was not tried: {seen:?}");
    }
}

#[test]
fn curl_fetches() {
    let honest = BenignClient::new();
    honest.publish_file("files.wild.example", "file.txt", "what the file says");
    honest
        .run_client("curl", &["-sSf", "http://files.wild.example/file.txt"])
        .assert_contains("what the file says");
    honest.finish(&["files.wild.example"]);
}

#[test]
fn git_clones() {
    let honest = BenignClient::new();
    let bare = honest.publish_file("code.example", "ready", "").with_file_name("repo.git");
    honest.run_in_gateway(&format!(
        "git init -q source && cd source && echo hello > file && git add file \
         && git -c user.name=n -c user.email=e@example commit -q -m first \
         && git clone -q --bare . {bare} && git -C {bare} update-server-info",
        bare = bare.display()
    ));
    honest.run_client("git", &["clone", "http://code.example/repo.git", "cloned"]);
    assert_eq!(honest.read_file("cloned/file"), "hello\n");
    honest.finish(&["code.example"]);
}

#[test]
fn pip_downloads() {
    let honest = BenignClient::new();
    let wheel = "greeting-1.0-py3-none-any.whl";
    let link = format!("<a href=\"/{wheel}\">{wheel}</a>");
    honest.publish_file("pypi.example", "simple/greeting/index.html", &link);
    honest.run_in_gateway(&format!(
        "mkdir greeting-1.0.dist-info && echo 'hello = 1' > greeting.py && cd greeting-1.0.dist-info \
         && printf 'Metadata-Version: 2.1\\nName: greeting\\nVersion: 1.0\\n' > METADATA \
         && printf 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' > WHEEL \
         && printf 'greeting.py,,\\n' > RECORD && cd .. \
         && python3 -m zipfile -c {} greeting.py greeting-1.0.dist-info",
        honest.publish_file("pypi.example", wheel, "").display()
    ));
    let index = "http://pypi.example/simple";
    let trusted = ["--trusted-host", "pypi.example", "--index-url", index];
    let pip = ["PIP_CONFIG_FILE=/dev/null", "pip3", "download", "--no-input", "-d", "got"];
    honest.run_client("env", &[&pip[..], &trusted, &["greeting"]].concat());
    honest.read_file(format!("got/{wheel}"));
    honest.finish(&["pypi.example"]);
}

#[test]
fn npm_installs() {
    let honest = BenignClient::new();
    let document = r#"{"name":"greeting","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"greeting",
        "version":"1.0.0","dist":{"tarball":"http://npm.example/greeting-1.0.0.tgz"}}}}"#;
    let document = honest.publish_file("npm.example", "greeting", document);
    honest.run_in_gateway(&format!(
        "mkdir package project && echo '{{\"name\":\"greeting\",\"version\":\"1.0.0\"}}' > package/package.json \
         && echo '{{\"name\":\"project\",\"version\":\"1.0.0\"}}' > project/package.json \
         && tar czf {} package",
        document.with_file_name("greeting-1.0.0.tgz").display()
    ));
    let own = ["--userconfig", "npmrc", "--globalconfig", "npmrc-global", "--cache", "npm-cache"];
    let install = ["--prefix", "project", "--registry", "http://npm.example/", "install", "greeting"];
    honest.run_client("npm", &[&own[..], &install].concat());
    assert!(honest.read_file("project/node_modules/greeting/package.json").contains("1.0.0"));
    honest.finish(&["npm.example"]);
}

#[test]
fn apt_updates_and_downloads() {
    let honest = BenignClient::new();
    let site = honest.publish_file("deb.example", "ready", "");
    honest.run_in_gateway(&format!(
        "mkdir -p greeting/DEBIAN && printf 'Package: greeting\\nVersion: 1.0\\nArchitecture: all\\nMaintainer: n <e@example>\\nDescription: a greeting\\n' > greeting/DEBIAN/control \
         && cd {} && dpkg-deb --root-owner-group --build \"$OLDPWD/greeting\" greeting_1.0_all.deb \
         && {{ cat \"$OLDPWD/greeting/DEBIAN/control\"; echo Filename: ./greeting_1.0_all.deb; echo Size: $(stat -c %s greeting_1.0_all.deb); \
              echo SHA256: $(sha256sum < greeting_1.0_all.deb | cut -d' ' -f1); echo; }} > Packages \
         && {{ echo SHA256:; echo \" $(sha256sum < Packages | cut -d' ' -f1) $(stat -c %s Packages) Packages\"; }} > Release",
        site.parent().unwrap().display()
    ));
    // Everything of apt's own lies in the test's directory, and nothing of the machine's is read.
    let dir = honest.net.dir.path().display().to_string();
    honest.run_in_gateway("mkdir -p apt/etc/apt.conf.d apt/etc/preferences.d apt/state/lists/partial apt/cache/archives/partial && touch apt/status");
    let settings = format!(
        "Dir::Etc \"{dir}/apt/etc\";\nDir::State \"{dir}/apt/state\";\nDir::State::status \"{dir}/apt/status\";\n\
         Dir::Cache \"{dir}/apt/cache\";\nAPT::Sandbox::User \"root\";\n"
    );
    fs::write(honest.net.dir.path().join("apt.conf"), settings).unwrap();
    let source = "deb [trusted=yes] http://deb.example/ ./\n";
    fs::write(honest.net.dir.path().join("apt/etc/sources.list"), source).unwrap();
    let config = format!("APT_CONFIG={dir}/apt.conf");
    honest.run_client("env", &[&config, "apt-get", "update", "--error-on=any"]);
    honest.run_client("env", &[&config, "apt-get", "download", "greeting"]);
    assert!(honest.net.dir.path().join("greeting_1.0_all.deb").exists(), "nothing was downloaded");
    let seen = honest.finish(&["deb.example"]);
    assert!(queried_names(&seen).contains("_http._tcp.deb.example"), "apt asks for SRV first: {seen:?}");
}

#[test]
fn chromium_starts_and_shows_a_page() {
    let honest = BenignClient::new();
    honest.publish_file("www.example", "index.html", "<title>t</title><p>what the page says</p>");
    let profile = format!("--user-data-dir={}", honest.net.dir.path().join("browser").display());
    let page = "http://www.example/";
    let headless = ["--headless", "--no-sandbox", "--disable-gpu", &profile, "--dump-dom", page];
    honest.run_client("chromium", &headless).assert_contains("what the page says");
    honest.finish(&["www.example"]);
}

/// A sandbox with an honest client, and everybody who watches it.
struct BenignClient {
    net: DnsNetwork,
    sandbox: PacketCapture,
    outside: PacketCapture,
}

impl BenignClient {
    fn new() -> Self {
        let mut net = DnsNetwork::new();
        let etc = PathBuf::from(format!("/etc/netns/{}", net.sandbox));
        fs::create_dir_all(&etc).unwrap();
        fs::write(etc.join("resolv.conf"), RESOLV_CONF).unwrap();
        let site = net.dir.path().join("site").display().to_string();
        fs::create_dir(&site).unwrap();
        let script = super::script_path("site.py");
        net.start(&net.gateway.clone(), "python3", &[&script, SERVER, &site], "serving");
        net.start_resolver();
        let (sandbox, outside) = (net.capture_sandbox(), net.capture_upstream());
        net.start_filter_with(POLICY, "127.0.0.1:5300", &[]);
        BenignClient { net, sandbox, outside }
    }

    /// Puts a file where the server of `host` gives it out.
    fn publish_file(&self, host: &str, path: &str, content: &str) -> PathBuf {
        let file = self.net.dir.path().join("site").join(host).join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, content).unwrap();
        file
    }

    /// Makes ready what the client will fetch, outside of the sandbox.
    fn run_in_gateway(&self, script: &str) {
        let script = format!("set -e; {script}");
        let made = self.net.command_in(&self.net.gateway, "sh", &["-c", &script]).output().unwrap();
        assert!(made.status.success(), "{script}: {}{}", text(&made.stdout), text(&made.stderr));
    }

    /// Runs the client in the sandbox; it must succeed.
    fn run_client(&self, program: &str, args: &[&str]) -> ClientOutput {
        let args = [&["-k", "5", CLIENT_TIMEOUT, program], args].concat();
        let mut command: Command = self.net.command_in(&self.net.sandbox, "timeout", &args);
        let output = command.output().unwrap();
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{program} ends with {}: {said}", output.status);
        ClientOutput(said)
    }

    fn read_file(&self, path: impl AsRef<Path>) -> String {
        let path = self.net.dir.path().join(path);
        let read = fs::read(&path);
        text(&read.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// Nothing was lost, nothing alarmed, and of all that was asked only `expected` left. Gives what the sandbox saw.
    fn finish(mut self, expected: &[&str]) -> Vec<CapturedMessage> {
        let seen = self.sandbox.all_messages(&self.net);
        for asked in seen.iter().filter(|seen| seen.rcode.is_none()) {
            let rcodes: BTreeSet<u64> = seen
                .iter()
                .filter(|seen| seen.asked_by == asked.asked_by && seen.name == asked.name)
                .filter(|seen| seen.kind == asked.kind)
                .filter_map(|seen| seen.rcode)
                .collect();
            assert!(!rcodes.is_empty(), "{asked:?} had no answer");
            assert!(!rcodes.contains(&SERVFAIL), "{asked:?} failed");
            let allowed = expected.contains(&asked.name.as_str());
            if allowed && USUAL_TYPES.contains(&asked.kind) {
                assert_eq!(rcodes, BTreeSet::from([0]), "{asked:?}");
            }
        }
        for name in expected {
            assert!(queried_names(&seen).contains(name), "{name} was not asked for: {seen:?}");
        }
        let left = self.outside.all_messages(&self.net);
        assert_eq!(queried_names(&left), BTreeSet::from_iter(expected.iter().copied()), "what left");

        let records = self.net.stop();
        assert_eq!(finding_codes(&records), Vec::<String>::new());
        let recorded: BTreeSet<&str> = records_at_stage(&records, "decision")
            .map(|record| record["query"]["hostname"].as_str().unwrap())
            .collect();
        assert_eq!(recorded, queried_names(&left), "what the log says has left");
        let failed = records_at_stage(&records, "outcome")
            .filter(|record| record["unmapped"]["sandbar"]["ending"] == "failed");
        assert_eq!(failed.collect::<Vec<_>>(), Vec::<&serde_json::Value>::new());
        seen
    }
}

struct ClientOutput(String);

impl ClientOutput {
    fn assert_contains(&self, expected: &str) {
        assert!(self.0.contains(expected), "no `{expected}` in: {}", self.0);
    }
}
