//! `sandbar ca env` before the tools it is for. Each is run twice: with the variables it must reach the server,
//! without them it must refuse it, which shows that the variable did it and that the tool verifies at all.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use certs::{CertificateAuthority, LeafCache, UnixTime};
use integration::sandbar;

use super::program::{clean_command, is_installed, output_text, report_skipped, require_program};
use super::server::{GREETING, LeafServer};

/// No tool takes longer to fetch one page from loopback.
const TOOL_TIMEOUT: Duration = Duration::from_secs(60);

/// An authority and its trust files as the commands make them, and a server behind it.
struct TrustFixture {
    dir: tempfile::TempDir,
    variables: BTreeMap<String, String>,
    server: LeafServer,
    url: String,
}

impl TrustFixture {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("sandbar-").tempdir().unwrap();
        let ca = dir.path().join("ca");
        for args in [["ca", "init"], ["ca", "bundle"]] {
            run_successfully(sandbar().args(args).arg("--dir").arg(&ca));
        }
        let printed = run_successfully(sandbar().args(["ca", "env", "--json", "--dir"]).arg(&ca));
        let variables = serde_json::from_slice(&printed.stdout).unwrap();
        let authority = CertificateAuthority::open(&ca, UnixTime::now()).unwrap();
        let server = LeafServer::start(&LeafCache::new(Arc::new(authority)).unwrap(), "localhost");
        let url = format!("https://localhost:{}/", server.address.port());
        Self { dir, variables, server, url }
    }

    /// Runs a tool with and without the variables; `@` in an argument stands for the server's URL.
    fn assert_trust(&self, program: &str, args: &[&str]) {
        let without = self.try_reach(program, args, &BTreeMap::new());
        assert!(without.is_err(), "{program} {args:?} does not verify at all");
        let with = self.try_reach(program, args, &self.variables);
        assert!(with.is_ok(), "{program} {args:?} does not trust us: {}", with.unwrap_err());
    }

    /// Whether the tool's request arrived, or what it said instead.
    fn try_reach(
        &self,
        program: &str,
        args: &[&str],
        variables: &BTreeMap<String, String>,
    ) -> Result<(), String> {
        let home = tempfile::tempdir().unwrap();
        let args = args.iter().map(|arg| arg.replace('@', &self.url));
        let before = self.server.request_count();
        let output = run_to_end(clean_command(program, home.path()).args(args).envs(variables));
        if self.server.request_count() > before { Ok(()) } else { Err(output_text(&output)) }
    }

    /// Puts a source file where the tool will find it.
    fn write_file(&self, name: &str, content: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    }
}

fn run_successfully(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", output_text(&output));
    output
}

/// Runs to the end, or kills what takes too long.
fn run_to_end(command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > TOOL_TIMEOUT {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn curl_openssl_git_and_wget() {
    for (program, package) in [("curl", "curl"), ("openssl", "openssl"), ("git", "git"), ("wget", "wget")] {
        require_program(program, package);
    }
    let world = TrustFixture::new();
    world.assert_trust("curl", &["--silent", "--show-error", "@"]);
    let request = r#"host=${1#https://}; printf 'GET / HTTP/1.0\r\n\r\n' |
        openssl s_client -quiet -verify_return_error -connect "${host%/}""#;
    world.assert_trust("sh", &["-c", request, "sh", "@"]);
    world.assert_trust("git", &["ls-remote", "@repository"]);
    world.assert_trust("wget", &["--quiet", "--tries=1", "--output-document=-", "@"]);
}

#[test]
fn python_and_pip() {
    require_program("python3", "python3");
    let world = TrustFixture::new();
    world.assert_trust(
        "python3",
        &["-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1]).read()", "@"],
    );
    for module in ["requests", "httpx", "pip._vendor.requests", "aiohttp", "botocore.httpsession"] {
        let Some(python) = python_with(module) else {
            report_skipped(&format!("Python's {module}"));
            continue;
        };
        world.assert_trust(python, &["-c", &fetch_script(module), "@"]);
    }
    if let Some(python) = python_with("pip") {
        let args = [
            "-m",
            "pip",
            "download",
            "x",
            "--no-deps",
            "--retries=0",
            "--disable-pip-version-check",
            "--timeout=5",
            "--index-url=@",
        ];
        world.assert_trust(python, &args);
    }
    if is_installed("uv") {
        world.assert_trust(
            "uv",
            &["pip", "compile", "--no-cache", "--index-url=@", &world.write_file("requirements.in", "x")],
        );
    }
}

/// A Python that has `module`; the system's own may have what the first on the path has not.
fn python_with(module: &str) -> Option<&'static str> {
    ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let import = format!("import {module}");
        Command::new(python).args(["-c", &import]).output().is_ok_and(|output| output.status.success())
    })
}

fn fetch_script(module: &str) -> String {
    match module {
        "aiohttp" => "import sys, asyncio, aiohttp\n\
             async def main():\n    async with aiohttp.ClientSession() as s:\n        await (await s.get(sys.argv[1])).read()\n\
             asyncio.run(main())"
            .to_owned(),
        "botocore.httpsession" => "import sys, botocore.config as c, botocore.session as s\n\
             s.get_session().create_client('sts', region_name='us-east-1', endpoint_url=sys.argv[1], \
             aws_access_key_id='a', aws_secret_access_key='b', \
             config=c.Config(retries={'max_attempts': 0})).get_caller_identity()"
            .to_owned(),
        _ => format!("import sys, {module} as m; m.get(sys.argv[1])"),
    }
}

#[test]
fn node_and_npm() {
    let world = TrustFixture::new();
    if is_installed("node") {
        world.assert_trust("node", &["-e", "fetch(process.argv[1]).then(r => r.text())", "@"]);
    }
    if is_installed("npm") {
        world.assert_trust("npm", &["view", "x", "--registry=@", "--fetch-retries=0"]);
    }
}

#[test]
fn cargo_and_the_rest() {
    require_program("cargo", "cargo");
    let world = TrustFixture::new();
    world.assert_trust("cargo", &["search", "x", "--index=sparse+@"]);
    for (program, args) in [
        ("ruby", &["-ropen-uri", "-e", "URI.open(ARGV[0]).read", "@"][..]),
        ("php", &["-r", "exit(file_get_contents($argv[1]) === false ? 1 : 0);", "@"]),
        ("deno", &["eval", "await fetch(Deno.args[0])", "@"]),
    ] {
        if is_installed(program) {
            world.assert_trust(program, args);
        }
    }
}

#[test]
fn java_with_the_trust_store() {
    if !is_installed("java") {
        return;
    }
    let world = TrustFixture::new();
    let source = world.write_file(
        "Fetch.java",
        "public class Fetch { public static void main(String[] a) throws Exception {\n\
         new java.net.URL(a[0]).openStream().readAllBytes(); } }",
    );
    world.assert_trust("java", &["-XX:TieredStopAtLevel=1", &source, "@"]);
    if is_installed("keytool") {
        let store = world.dir.path().join("ca-trust/truststore.p12");
        let listed = run_successfully(
            Command::new("keytool").args(["-list", "-storepass", "changeit", "-keystore"]).arg(&store),
        );
        assert!(output_text(&listed).contains("trustedCertEntry"), "{}", output_text(&listed));
    }
}

#[test]
fn go_with_the_bundle() {
    if !is_installed("go") {
        return;
    }
    let world = TrustFixture::new();
    let source = world.write_file(
        "fetch.go",
        "package main\nimport (\n\"net/http\"\n\"os\"\n)\nfunc main() {\n\
         if _, err := http.Get(os.Args[1]); err != nil { panic(err) }\n}\n",
    );
    // Built once: the variables are for the program, not for the compiler.
    let binary = world.dir.path().join("fetch");
    let built =
        run_to_end(clean_command("go", world.dir.path()).arg("build").arg("-o").arg(&binary).arg(&source));
    assert!(built.status.success(), "{}", output_text(&built));
    world.assert_trust(binary.to_str().unwrap(), &["@"]);
}

#[test]
fn the_shell_form_is_what_a_shell_takes() {
    require_program("curl", "curl");
    let world = TrustFixture::new();
    let printed = run_successfully(sandbar().args(["ca", "env", "--dir"]).arg(world.dir.path().join("ca")));
    let script = format!("{}\ncurl --silent --show-error \"$1\"", output_text(&printed));
    let home: &Path = world.dir.path();
    let output = run_to_end(clean_command("sh", home).args(["-euc", &script, "sh", &world.url]));
    assert!(output_text(&output).contains(GREETING), "{}", output_text(&output));
}
