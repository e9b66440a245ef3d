//! Programs people use, as they are, in a sandbox: none of them is told of the proxy, all trust its authority
//! by the variables of `sandbar ca env`. Judged at the server.

use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use integration::{is_installed, report_skipped};

use super::net::FirewallMode;
use super::origin::noise_bytes;
use super::scene::{DEADLINE, ProxyScene, ProxySetup};
use super::site::{self, GRPC_PORT, SOCKETS_PORT, python_with, run_in_site, www_dir};

/// Runs to the end, or kills what takes too long.
pub(crate) fn run_to_end(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |stream: &mut dyn Read| {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).map(|_| bytes)
    };
    let (stdout, stderr) = std::thread::scope(|scope| {
        let (out, err) = (scope.spawn(|| read(&mut out)), scope.spawn(|| read(&mut err)));
        let end = Instant::now() + 2 * DEADLINE;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        (out.join().unwrap().unwrap(), err.join().unwrap().unwrap())
    });
    Output { status: child.wait().unwrap(), stdout, stderr }
}

pub(crate) fn run_successfully(command: &mut Command) -> String {
    let output = run_to_end(command);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out
}

#[test]
fn curl_carries_large_bodies_unchanged_both_ways() {
    const BYTES: usize = 16 << 20;
    let scene = ProxyScene::new();
    let sent = noise_bytes(BYTES);
    let file = scene.dir.path().join("upload");
    fs::write(&file, &sent).unwrap();
    let upload = format!("@{}", file.display());
    let download = format!("https://open.example/bytes/{BYTES}");
    for firewall in [FirewallMode::Redirect, FirewallMode::Tproxy] {
        scene.net.set_firewall(firewall);
        for version in ["--http1.1", "--http2"] {
            let got = scene.curl(&[version, &download]);
            assert!(got.status == 200 && got.body == sent, "{version} down: {} {}", got.status, got.said);
            for extra in [
                &["-H", "Expect:"][..],
                &["-H", "Expect: 100-continue"],
                &["-H", "Transfer-Encoding: chunked", "-H", "Expect:"],
            ] {
                let to = ["--data-binary", &upload, "-H", "Content-Type: x/y", "https://open.example/echo"];
                let args = [&[version], extra, &to[..]].concat();
                let got = scene.curl(&args);
                let same = got.body == sent;
                assert!(got.status == 200 && same, "{args:?}: {} {same} {}", got.status, got.said);
            }
        }
    }
    let expecting = |request: &&super::origin::ArrivedRequest| request.field("expect").is_some();
    assert!(scene.origin.requests().iter().filter(expecting).count() >= 2, "none asked to go on");
    assert!(scene.origin.requests().iter().all(|request| request.sni.as_deref() == Some("open.example")));
}

#[test]
fn events_arrive_as_they_are_made() {
    let scene = ProxyScene::new();
    for version in ["--http1.1", "--http2"] {
        let mut command = scene.command_in(0, "curl");
        command.args(["-sS", "-N", version, "--max-time", "60", "https://open.example/steps"]);
        let mut curl = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut answer = curl.stdout.take().unwrap();
        for step in 0..3 {
            let mut event = [0; 14];
            answer.read_exact(&mut event).unwrap(); // the next is not even made yet
            assert_eq!(String::from_utf8_lossy(&event), format!("data: step {step}\n\n"), "{version}");
            scene.origin.release_step();
        }
        assert!(curl.wait().unwrap().success(), "{version}");
    }
}

#[test]
fn both_legs_speak_http2() {
    if !is_installed("nginx") {
        return;
    }
    let scene = ProxyScene::new();
    fs::write(www_dir(&scene).join("page.json"), "{}").unwrap();
    let site = site::start_nginx(&scene);
    let got = scene.curl(&["--http2", "https://files.example:8444/page.json"]);
    assert_eq!((got.status, got.version.as_str()), (200, "2"), "{got:?}");
    assert!(site.access_log().starts_with("HTTP/2.0 GET /page.json 200"), "{}", site.access_log());
    let got = scene.curl(&["--http1.1", "https://files.example:8444/page.json"]);
    assert_eq!((got.status, got.version.as_str()), (200, "1.1"), "{got:?}");
    assert_eq!(scene.curl(&["-I", "https://files.example:8444/page.json"]).status, 200);
    assert_eq!(scene.curl(&["https://files.example:8444/nothing"]).status, 404);
    assert_eq!(site.access_log().lines().count(), 4);
}

#[test]
fn git_clones() {
    if !is_installed("nginx") || !is_installed("git") {
        return;
    }
    let scene = ProxyScene::new();
    run_in_site(
        &www_dir(&scene),
        "git init -q -b main work; cd work; echo hello > file; git add file; git commit -qm one\n\
         cd ..; git clone -q --bare work repo.git; cd repo.git; git update-server-info",
    );
    let site = site::start_nginx(&scene);
    let copy = scene.dir.path().join("copy");
    let mut git = scene.command_in(0, "git");
    run_successfully(git.args(["clone", "-q", "https://files.example:8444/repo.git"]).arg(&copy));
    assert_eq!(fs::read_to_string(copy.join("file")).unwrap(), "hello\n");
    assert!(site.access_log().contains("/repo.git/info/refs"), "{}", site.access_log());
    let mut git = scene.command_in(0, "git");
    git.args(["ls-remote", "https://denied.example/repo.git"]);
    assert!(!run_to_end(&mut git).status.success());
}

#[test]
fn pip_downloads() {
    let Some(python) = python_with("pip") else { return report_skipped("pip") };
    if !is_installed("nginx") {
        return;
    }
    let scene = ProxyScene::new();
    let at = www_dir(&scene);
    fs::create_dir_all(at.join("simple/tiny")).unwrap();
    let wheel = "tiny-1.0-py3-none-any.whl";
    let script = "import sys, zipfile\n\
        z = zipfile.ZipFile(sys.argv[1], 'w')\n\
        z.writestr('tiny.py', 'x = 1\\n')\n\
        i = 'tiny-1.0.dist-info/'\n\
        z.writestr(i + 'METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n')\n\
        z.writestr(i + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        z.writestr(i + 'RECORD', '')\n\
        z.close()\n";
    run_successfully(Command::new(python).args(["-c", script]).arg(at.join(wheel)));
    let index = format!("<a href=\"/{wheel}\">{wheel}</a>");
    fs::write(at.join("simple/tiny/index.html"), index).unwrap();
    let site = site::start_nginx(&scene);
    let into = scene.dir.path().join("downloaded");
    let mut pip = scene.command_in(0, python);
    pip.args(["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-cache-dir"]);
    pip.args(["--index-url", "https://files.example:8444/simple/", "-d"]).arg(&into).arg("tiny");
    run_successfully(&mut pip);
    assert!(into.join(wheel).is_file());
    assert!(site.access_log().contains(wheel), "{}", site.access_log());
}

#[test]
fn npm_installs() {
    if !is_installed("nginx") || !is_installed("npm") {
        return;
    }
    let scene = ProxyScene::new();
    let at = www_dir(&scene);
    fs::create_dir_all(at.join("npm/package")).unwrap();
    let package = r#"{"name": "tiny", "version": "1.0.0"}"#;
    fs::write(at.join("npm/package/package.json"), package).unwrap();
    run_in_site(&at, "cd npm; tar czf tiny-1.0.0.tgz package");
    let packument = r#"{"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0":
        {"name": "tiny", "version": "1.0.0",
         "dist": {"tarball": "https://files.example:8444/npm/tiny-1.0.0.tgz"}}}}"#;
    fs::write(at.join("npm/tiny"), packument).unwrap();
    let site = site::start_nginx(&scene);
    let project = scene.dir.path().join("project");
    fs::create_dir_all(&project).unwrap();
    let mut npm = scene.command_in(0, "npm");
    npm.current_dir(&project).args(["install", "tiny", "--no-audit", "--no-fund"]);
    npm.args(["--no-update-notifier", "--registry=https://files.example:8444/npm/"]);
    run_successfully(&mut npm);
    assert!(project.join("node_modules/tiny/package.json").is_file());
    assert!(site.access_log().contains("/npm/tiny-1.0.0.tgz 200"), "{}", site.access_log());
}

#[test]
fn cargo_fetches() {
    if !is_installed("nginx") || !is_installed("cargo") {
        return;
    }
    let scene = ProxyScene::new();
    let at = www_dir(&scene);
    fs::create_dir_all(at.join("index/ti/ny")).unwrap();
    fs::create_dir_all(at.join("tiny-1.0.0/src")).unwrap();
    let manifest = "[package]\nname = \"tiny\"\nversion = \"1.0.0\"\nedition = \"2021\"\n";
    fs::write(at.join("tiny-1.0.0/Cargo.toml"), manifest).unwrap();
    fs::write(at.join("tiny-1.0.0/src/lib.rs"), "").unwrap();
    fs::write(
        at.join("index/config.json"),
        r#"{"dl": "https://files.example:8444/{crate}-{version}.crate"}"#,
    )
    .unwrap();
    run_in_site(
        &at,
        "tar czf tiny-1.0.0.crate tiny-1.0.0\n\
         sum=$(sha256sum tiny-1.0.0.crate | cut -d' ' -f1)\n\
         echo '{\"name\":\"tiny\",\"vers\":\"1.0.0\",\"deps\":[],\"cksum\":\"'$sum'\",\"features\":{},\"yanked\":false}' > index/ti/ny/tiny",
    );
    let site = site::start_nginx(&scene);
    let project = scene.dir.path().join("project");
    fs::create_dir_all(project.join("src")).unwrap();
    fs::create_dir_all(project.join(".cargo")).unwrap();
    fs::write(project.join("src/lib.rs"), "").unwrap();
    fs::write(
        project.join("Cargo.toml"),
        "[package]\nname = \"p\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n\
         [dependencies]\ntiny = { version = \"1\", registry = \"own\" }\n",
    )
    .unwrap();
    fs::write(
        project.join(".cargo/config.toml"),
        "[registries.own]\nindex = \"sparse+https://files.example:8444/index/\"\n",
    )
    .unwrap();
    let mut cargo = scene.command_in(0, "cargo");
    cargo.current_dir(&project).arg("fetch").env("CARGO_HOME", scene.dir.path().join("cargo"));
    let rustup = std::env::var_os("RUSTUP_HOME")
        .or_else(|| std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".rustup").into()));
    cargo.envs(rustup.map(|home| ("RUSTUP_HOME", home)));
    run_successfully(&mut cargo);
    assert!(site.access_log().contains("/tiny-1.0.0.crate 200"), "{}", site.access_log());
}

#[test]
fn node_java_and_python_fetch() {
    let scene = ProxyScene::new();
    let reached = |path: &str| scene.origin.requests().iter().any(|request| request.line.contains(path));
    if is_installed("node") {
        let script = "fetch('https://open.example/node').then(r => r.text()).then(t => { if (!t.startsWith('hello')) process.exit(1) })";
        run_successfully(scene.command_in(0, "node").args(["-e", script]));
        assert!(reached("/node"));
    }
    for (module, script) in [
        (
            "requests",
            "import requests; assert requests.get('https://open.example/requests').text.startswith('hello')",
        ),
        ("httpx", "import httpx; assert httpx.get('https://open.example/httpx').text.startswith('hello')"),
        (
            "aiohttp",
            "import asyncio, aiohttp\n\
             async def main():\n    async with aiohttp.ClientSession() as s:\n        async with s.get('https://open.example/aiohttp') as r:\n            assert (await r.text()).startswith('hello')\n\
             asyncio.run(main())",
        ),
    ] {
        match python_with(module) {
            Some(python) => {
                run_successfully(scene.command_in(0, python).args(["-c", script]));
                assert!(reached(&format!("/{module}")), "{module}");
            }
            None => report_skipped(&format!("Python's {module}")),
        }
    }
    match python_with("httpx, h2") {
        Some(python) => {
            let script = "import httpx\nwith httpx.Client(http2=True) as c:\n    r = c.get('https://open.example/h2')\n    assert r.http_version == 'HTTP/2' and r.text.startswith('hello')";
            run_successfully(scene.command_in(0, python).args(["-c", script]));
            assert!(reached("/h2"));
        }
        None => report_skipped("Python's h2"),
    }
    if is_installed("java") {
        let source = scene.dir.path().join("Fetch.java");
        let text = "import java.net.URI; import java.net.http.*;\n\
            public class Fetch { public static void main(String[] a) throws Exception {\n\
            var r = HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(\"https://open.example/java\")).build(), HttpResponse.BodyHandlers.ofString());\n\
            if (!r.body().startsWith(\"hello\") || r.version() != HttpClient.Version.HTTP_2) System.exit(1); } }\n";
        fs::write(&source, text).unwrap();
        run_successfully(scene.command_in(0, "java").arg("-XX:TieredStopAtLevel=1").arg(&source));
        assert!(reached("/java"));
    }
}

#[test]
fn proxy_variables_are_enough_for_those_who_follow_them() {
    let scene = ProxyScene::new();
    let proxied = |program: &str| {
        let mut command = scene.command_in(0, program);
        for name in ["http_proxy", "https_proxy", "HTTPS_PROXY"] {
            command.env(name, "http://10.77.0.1:3128");
        }
        command
    };
    run_successfully(proxied("curl").args([
        "-sSf",
        "https://open.example/curl",
        "http://open.example/plain",
    ]));
    if let Some(python) = python_with("requests") {
        let script = "import requests; assert requests.get('https://open.example/python').ok and requests.get('http://open.example/python').ok";
        run_successfully(proxied(python).args(["-c", script]));
    }
    let lines: Vec<_> = scene.origin.requests().into_iter().map(|request| request.line).collect();
    for path in ["/curl", "/plain", "/python"] {
        assert!(lines.iter().any(|line| line.contains(path)), "{path}: {lines:?}");
    }
    let refused = run_to_end(proxied("curl").args(["-sSf", "https://denied.example/"]));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("403"), "{refused:?}");
}

const WEBSOCKET_SERVER: &str = "
import asyncio, ssl, sys, websockets
async def echo(socket, *_):
    async for message in socket:
        await socket.send(message)
async def main():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    async with websockets.serve(echo, None, int(sys.argv[1]), ssl=context, ping_interval=None):
        await asyncio.Future()
asyncio.run(main())
";

const WEBSOCKET_CLIENT: &str = "
import asyncio, websockets
async def main():
    async with websockets.connect('wss://files.example:8445/', ping_interval=None, compression=None) as socket:
        for message in ['hello', 'x' * 300000, b'\\x00' * 70000]:
            await socket.send(message)
            assert await asyncio.wait_for(socket.recv(), 30) == message
        await asyncio.sleep(5)
        await socket.send('still here')
        assert await asyncio.wait_for(socket.recv(), 30) == 'still here'
asyncio.run(main())
";

#[test]
fn a_websocket_is_carried_and_may_be_idle() {
    let Some(python) = python_with("websockets") else {
        return report_skipped("Python's websockets");
    };
    let limits = "first_bytes_seconds = 2\nhead_seconds = 2\nkeep_alive_seconds = 2";
    let scene = ProxyScene::with_setup(ProxySetup { limits: limits.to_owned(), ..ProxySetup::default() });
    let _server = site::start_python(&scene, python, WEBSOCKET_SERVER, SOCKETS_PORT);
    run_successfully(scene.command_in(0, python).args(["-c", WEBSOCKET_CLIENT]));
    let record = scene.wait_for_record("the websocket", |record| {
        record["http_response"]["code"] == 101 && record["unmapped"]["sandbar"]["stage"] == "outcome"
    });
    for way in ["bytes_in", "bytes_out"] {
        assert!(record["traffic"][way].as_u64() > Some(370_000), "{record}");
    }
}

#[test]
fn p10_a_websocket_is_cut_when_its_budget_is_spent() {
    let Some(python) = python_with("websockets") else {
        return report_skipped("Python's websockets");
    };
    let ports = "ports = [8444, 8445, 8446]";
    let budget = format!("{ports}\n[allow.budget]\nupload_bytes_per_hour = 100000");
    let policy = super::scene::POLICY.replace(ports, &budget);
    let scene = ProxyScene::with_setup(ProxySetup { policy, ..ProxySetup::default() });
    let _server = site::start_python(&scene, python, WEBSOCKET_SERVER, SOCKETS_PORT);
    let told = run_to_end(scene.command_in(0, python).args(["-c", WEBSOCKET_CLIENT]));
    assert!(!told.status.success(), "its second message is longer than it may send");
    let record = scene.wait_for_record("the cut", |record| record["status_detail"] == "budget_spent");
    assert!(record["traffic"]["bytes_out"].as_u64() <= Some(100_000), "{record}");
}

const GRPC_SERVER: &str = "
import sys, concurrent.futures, grpc
def count(request, context):
    for number in range(int(request)):
        yield str(number).encode()
    context.set_trailing_metadata((('counted', request.decode()),))
def both(requests, context):
    for request in requests:
        yield request
def fails(request, context):
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, 'not today')
handlers = {
    'Count': grpc.unary_stream_rpc_method_handler(count),
    'Both': grpc.stream_stream_rpc_method_handler(both),
    'Fails': grpc.unary_unary_rpc_method_handler(fails),
}
server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler('test.Counter', handlers),))
chain, key = open(sys.argv[2], 'rb').read(), open(sys.argv[3], 'rb').read()
server.add_secure_port('[::]:' + sys.argv[1], grpc.ssl_server_credentials(((key, chain),)))
server.start()
server.wait_for_termination()
";

const GRPC_CLIENT: &str = "
import grpc
channel = grpc.secure_channel('files.example:8446', grpc.ssl_channel_credentials())
counted = channel.unary_stream('/test.Counter/Count')(b'100', timeout=60)
assert [int(one) for one in counted] == list(range(100))
assert ('counted', '100') in [(one.key, one.value) for one in counted.trailing_metadata()]
both = channel.stream_stream('/test.Counter/Both')(iter([b'a', b'b' * 100000]), timeout=60)
assert list(both) == [b'a', b'b' * 100000]
try:
    channel.unary_unary('/test.Counter/Fails')(b'', timeout=60)
    raise SystemExit('it did not fail')
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION and error.details() == 'not today', error
";

#[test]
fn grpc_streams_and_its_trailers_are_carried() {
    let Some(python) = python_with("grpc") else { return report_skipped("Python's grpc") };
    let scene = ProxyScene::new();
    let _server = site::start_python(&scene, python, GRPC_SERVER, GRPC_PORT);
    run_successfully(
        scene.command_in(0, python).args(["-c", GRPC_CLIENT]).env("GRPC_DNS_RESOLVER", "native"),
    );
    let record = scene.wait_for_record("the call", |record| {
        record["http_request"]["url"]["path"] == "/test.Counter/Count"
            && record["unmapped"]["sandbar"]["stage"] == "outcome"
    });
    assert_eq!(record["http_request"]["version"], "2");
}

#[test]
fn chromium_loads_a_page_with_what_belongs_to_it() {
    if !is_installed("chromium") || !is_installed("certutil") || !is_installed("nginx") {
        return;
    }
    let scene = ProxyScene::new();
    let at = www_dir(&scene);
    fs::write(
        at.join("page.html"),
        "<html><body><p id=p>before</p><script src=script.js></script>\
         <script src=https://denied.example:8444/evil.js></script></body></html>",
    )
    .unwrap();
    fs::write(at.join("script.js"), "document.getElementById('p').textContent = 'after'").unwrap();
    let site = site::start_nginx(&scene);
    let store = scene.dir.path().join(".pki/nssdb");
    fs::create_dir_all(&store).unwrap();
    let database = format!("sql:{}", store.display());
    run_successfully(Command::new("certutil").args(["-N", "--empty-password", "-d", &database]));
    let ours = scene.trust.get("NODE_EXTRA_CA_CERTS").unwrap();
    run_successfully(
        Command::new("certutil").args(["-A", "-d", &database, "-n", "ours", "-t", "C,,", "-i", ours]),
    );
    let profile = format!("--user-data-dir={}", scene.dir.path().join("profile").display());
    let mut chromium = scene.command_in(0, "chromium");
    chromium.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    chromium.args([&profile, "--dump-dom", "https://files.example:8444/page.html"]);
    let dom = run_successfully(&mut chromium);
    assert!(dom.contains(">after<"), "{dom}\n{}", site.access_log());
    assert!(site.access_log().contains("HTTP/2.0 GET /script.js 200"), "{}", site.access_log());
    assert!(!site.access_log().contains("evil"), "{}", site.access_log());
    assert!(!scene.names.queried_names().iter().any(|name| name.contains("denied")));
}
