//! Programs people use, as they are, inside: none is told of the proxy, all trust its authority by what they
//! find in their environment. Judged at the server.

use std::fs;
use std::process::{Child, Command, Stdio};

use integration::{is_installed, report_skipped};

use super::scene::{JailScene, RunAs, wait_until};

/// Where the site listens.
const FILES: u16 = 8444;

/// nginx in the world, ended with the test.
struct NginxProcess(Child);

impl Drop for NginxProcess {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Serves `www` of the scene as `https://files.example:8444/`.
fn start_site(scene: &JailScene) -> NginxProcess {
    let at = |name: &str| scene.path(&format!("site/{name}")).display().to_string();
    fs::create_dir_all(scene.path("site/www")).unwrap();
    fs::write(at("chain.pem"), &scene.minted.chain).unwrap();
    fs::write(at("key.pem"), &scene.minted.key).unwrap();
    let (log, root, chain, key, pid) =
        (at("access.log"), at("www"), at("chain.pem"), at("key.pem"), at("pid"));
    let conf = format!(
        "user root; daemon off; pid {pid}; error_log /dev/null; events {{}}\n\
         http {{ access_log {log}; default_type text/html;\n\
         server {{ listen {FILES} ssl http2; ssl_certificate {chain}; ssl_certificate_key {key}; root {root}; autoindex on; }} }}\n"
    );
    fs::write(at("nginx.conf"), conf).unwrap();
    let mut nginx = scene.net.world.command("nginx");
    nginx.args(["-c", &at("nginx.conf")]).stdout(Stdio::null()).stderr(Stdio::null());
    let site = NginxProcess(nginx.spawn().unwrap());
    wait_until("nginx listens", || {
        scene.net.world.enter(|| std::net::TcpStream::connect(("127.0.0.1", FILES)).ok()).map(drop)
    });
    site
}

/// Runs a script in a directory of the site.
fn run_in_site(scene: &JailScene, script: &str) {
    let www = scene.path("site/www");
    fs::create_dir_all(&www).unwrap();
    let made = Command::new("sh").args(["-euc", script]).current_dir(&www).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

fn access_log(scene: &JailScene) -> String {
    fs::read_to_string(scene.path("site/access.log")).unwrap_or_default()
}

const ALLOW_OPTIONS: [&str; 5] = ["-q", "--allow", "files.example:8444", "--allow", "open.example"];

#[test]
fn curl_wget_python_node_and_java_fetch() {
    for who in RunAs::BOTH {
        let scene = JailScene::new(who);
        scene.run_successfully(
            &ALLOW_OPTIONS,
            "curl -sSf https://open.example/curl; curl -sSf --http1.1 -4 https://open.example/four",
        );
        for (program, script) in [
            ("wget", "wget -qO- https://open.example/wget".to_owned()),
            ("/usr/bin/python3", "/usr/bin/python3 -c 'import urllib.request as u; print(u.urlopen(\"https://open.example/python3\").read())'".to_owned()),
            ("node", "node -e 'fetch(\"https://open.example/node\").then(r => r.text()).then(t => { if (!t.startsWith(\"hello\")) process.exit(1) })'".to_owned()),
        ] {
            if is_installed(program) {
                scene.run_successfully(&ALLOW_OPTIONS, &script);
                assert!(scene.origin_saw(program.trim_start_matches("/usr/bin")), "{who:?} {program}");
            }
        }
        if is_installed("java") {
            let text = "import java.net.URI; import java.net.http.*;\n\
                public class Fetch { public static void main(String[] a) throws Exception {\n\
                var r = HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(\"https://open.example/java\")).build(), HttpResponse.BodyHandlers.ofString());\n\
                if (!r.body().startsWith(\"hello\")) System.exit(1); } }\n";
            scene.write_file("work/Fetch.java", text);
            scene.run_successfully(&ALLOW_OPTIONS, "java -XX:TieredStopAtLevel=1 Fetch.java");
            assert!(scene.origin_saw("/java"), "{who:?}");
        }
    }
}

#[test]
fn git_clones() {
    if !is_installed("git") || !is_installed("nginx") {
        return;
    }
    let scene = JailScene::new(RunAs::User);
    run_in_site(
        &scene,
        "git init -q r; cd r; echo hello > file; git add file\n\
        git -c user.name=n -c user.email=e@open.example commit -qm m\n\
        cd ..; git clone -q --bare r r.git; cd r.git; git update-server-info",
    );
    let _site = start_site(&scene);
    scene.run_successfully(&ALLOW_OPTIONS, "git clone -q https://files.example:8444/r.git && cat r/file");
    assert_eq!(fs::read_to_string(scene.path("work/r/file")).unwrap(), "hello\n");
}

#[test]
fn npm_and_pip_install() {
    if !is_installed("nginx") || !is_installed("npm") {
        return;
    }
    let scene = JailScene::new(RunAs::User);
    let packument = r#"{"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "tiny", "version": "1.0.0", "dist": {"tarball": "https://files.example:8444/npm/tiny-1.0.0.tgz"}}}}"#;
    fs::create_dir_all(scene.path("site/www/npm/package")).unwrap();
    fs::write(scene.path("site/www/npm/package/package.json"), r#"{"name": "tiny", "version": "1.0.0"}"#)
        .unwrap();
    fs::write(scene.path("site/www/npm/tiny"), packument).unwrap();
    run_in_site(&scene, "cd npm; tar czf tiny-1.0.0.tgz package");
    let _site = start_site(&scene);
    scene.run_successfully(&ALLOW_OPTIONS, "npm install tiny --no-audit --no-fund --no-update-notifier --registry=https://files.example:8444/npm/");
    assert!(scene.path("work/node_modules/tiny/package.json").is_file());
    let pip = Command::new("/usr/bin/python3").args(["-m", "pip", "--version"]).output();
    if !pip.is_ok_and(|pip| pip.status.success()) {
        return report_skipped("pip");
    }
    run_in_site(
        &scene,
        "mkdir -p simple/tiny w/tiny w/tiny-1.0.dist-info; echo > w/tiny/__init__.py; cd w\n\
        printf 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n' > tiny-1.0.dist-info/METADATA\n\
        printf 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' > tiny-1.0.dist-info/WHEEL\n\
        printf 'tiny/__init__.py,,\\ntiny-1.0.dist-info/METADATA,,\\ntiny-1.0.dist-info/WHEEL,,\\ntiny-1.0.dist-info/RECORD,,\\n' > tiny-1.0.dist-info/RECORD\n\
        /usr/bin/python3 -m zipfile -c ../simple/tiny/tiny-1.0-py3-none-any.whl tiny tiny-1.0.dist-info",
    );
    scene.run_successfully(&ALLOW_OPTIONS, "/usr/bin/python3 -m pip install -q --no-input --disable-pip-version-check --target lib --index-url https://files.example:8444/simple/ tiny");
    assert!(scene.path("work/lib/tiny/__init__.py").is_file(), "{}", access_log(&scene));
}

#[test]
fn chromium_loads_a_page_in_its_own_sandbox() {
    if !is_installed("chromium") || !is_installed("certutil") || !is_installed("nginx") {
        return;
    }
    let scene = JailScene::new(RunAs::User);
    run_in_site(
        &scene,
        "echo '<html><body><p id=p>before</p><script src=script.js></script><script src=https://denied.example:8444/evil.js></script></body></html>' > page.html\n\
        echo \"document.getElementById('p').textContent = 'after'\" > script.js",
    );
    let _site = start_site(&scene);
    let script = "mkdir -p $HOME/.pki/nssdb && certutil -N --empty-password -d sql:$HOME/.pki/nssdb &&\n\
        certutil -A -d sql:$HOME/.pki/nssdb -n ours -t C,, -i $NODE_EXTRA_CA_CERTS &&\n\
        chromium --headless --disable-gpu --user-data-dir=$HOME/profile --dump-dom https://files.example:8444/page.html 2>$HOME/said";
    let dom = scene.run_successfully(&ALLOW_OPTIONS, script);
    let said = fs::read_to_string(scene.path("home/said")).unwrap();
    assert!(dom.contains(">after<"), "{dom}\n{}\n{said}", access_log(&scene));
    assert!(!access_log(&scene).contains("evil"), "{}", access_log(&scene));
    assert!(!scene.names.queried_names().iter().any(|name| name.contains("denied")));
    let (mine, other): (Vec<_>, Vec<_>) =
        scene.net.arrivals().into_iter().partition(|(_, address, _)| address.to_string() == "93.184.216.60");
    assert!(!mine.is_empty() && other.is_empty(), "{other:?}");
}

#[test]
fn a_debugger_works_inside() {
    if !is_installed("gdb") {
        return;
    }
    let scene = JailScene::new(RunAs::User);
    let out = scene.run_successfully(
        &["-q"],
        "gdb -q -batch -ex 'break main' -ex run -ex 'info inferiors' --args /usr/bin/true 2>&1; true",
    );
    assert!(out.contains("process"), "{out}");
}
