//! Servers of other people in the world: nginx with a repository and package indexes of the tests' own, and
//! Python for what nginx does not speak.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::scene::{ProxyScene, wait_until};

pub(crate) const FILES: u16 = 8444;
pub(crate) const SOCKETS_PORT: u16 = 8445;
pub(crate) const GRPC_PORT: u16 = 8446;
const GIT_PORT: u16 = 8447;

/// A server, ended with the test.
pub(crate) struct SiteServer {
    child: Child,
    dir: PathBuf,
}

impl SiteServer {
    fn start(scene: &ProxyScene, command: &mut Command, port: u16) -> Self {
        let dir = scene.dir.path().join("site");
        let said = fs::File::create(dir.join(format!("{port}.stderr"))).unwrap();
        let child = command.stdout(Stdio::null()).stderr(said).spawn().unwrap();
        let mut server = SiteServer { child, dir };
        wait_until("the server listens", || {
            if let Some(status) = server.child.try_wait().unwrap() {
                let said = fs::read_to_string(server.dir.join(format!("{port}.stderr"))).unwrap();
                panic!("{command:?} ended with {status}: {said}");
            }
            let connect = || std::net::TcpStream::connect(("127.0.0.1", port));
            scene.net.world.enter(connect).ok().map(drop)
        });
        server
    }

    /// What nginx was asked for, one request a line: version, method, path, status, bytes.
    pub(crate) fn access_log(&self) -> String {
        fs::read_to_string(self.dir.join("access.log")).unwrap_or_default()
    }
}

impl Drop for SiteServer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Where the site's files are.
pub(crate) fn www_dir(scene: &ProxyScene) -> PathBuf {
    let www = scene.dir.path().join("site/www");
    fs::create_dir_all(&www).unwrap();
    www
}

fn write_certificate(scene: &ProxyScene) -> [String; 2] {
    www_dir(scene);
    let at = scene.dir.path().join("site");
    let (chain, key) = (at.join("chain.pem"), at.join("key.pem"));
    fs::write(&chain, &scene.minted.chain).unwrap();
    fs::write(&key, &scene.minted.key).unwrap();
    [chain, key].map(|path| path.display().to_string())
}

/// nginx with HTTP/2, serving `www`; a PUT is kept there.
pub(crate) fn start_nginx(scene: &ProxyScene) -> SiteServer {
    let log = "$server_protocol $request_method $request_uri $status $body_bytes_sent";
    start_nginx_with(scene, log, &format!("root {}/www;", scene.dir.path().join("site").display()))
}

/// nginx before the `git http-backend` of [`start_git_backend`], for one user. Its log has the user first.
pub(crate) fn start_nginx_with_password(scene: &ProxyScene, user: &str, password: &str) -> SiteServer {
    let passwords = www_dir(scene).with_file_name("passwords");
    fs::write(&passwords, format!("{user}:{{PLAIN}}{password}\n")).unwrap();
    let location = format!(
        "location / {{ auth_basic git; auth_basic_user_file {}; proxy_set_header X-User $remote_user;\n\
         proxy_pass http://127.0.0.1:{GIT_PORT}; }}",
        passwords.display()
    );
    start_nginx_with(scene, "$remote_user $request_method $request_uri $status", &location)
}

fn start_nginx_with(scene: &ProxyScene, log: &str, content: &str) -> SiteServer {
    let [chain, key] = write_certificate(scene);
    let at = scene.dir.path().join("site");
    let shown = at.display();
    let config = format!(
        "daemon off; master_process off; pid {shown}/nginx.pid; error_log stderr;\n\
         events {{ }}\n\
         http {{\n\
         log_format asked '{log}';\n\
         access_log {shown}/access.log asked; default_type application/octet-stream;\n\
         types {{ text/html html; application/json json; }}\n\
         client_body_temp_path {shown}/body; client_max_body_size 0; proxy_temp_path {shown}/proxy;\n\
         server {{ listen 0.0.0.0:{FILES} ssl http2; listen [::]:{FILES} ssl http2;\n\
         server_name files.example; ssl_certificate {chain}; ssl_certificate_key {key};\n\
         {content} }}\n}}\n"
    );
    let path = at.join("nginx.conf");
    fs::write(&path, config).unwrap();
    let mut command = scene.net.world.command("nginx");
    command.args(["-c", &path.display().to_string(), "-p"]).arg(&at);
    SiteServer::start(scene, &mut command, FILES)
}

/// `git http-backend` for the repositories below `www`, without TLS.
pub(crate) fn start_git_backend(scene: &ProxyScene, www: &Path) -> SiteServer {
    let mut command = scene.net.world.command("/usr/bin/python3");
    command.arg(integration::repository_root().join("integration/tests/proxy/git_backend.py"));
    command.arg(GIT_PORT.to_string()).arg(www);
    SiteServer::start(scene, &mut command, GIT_PORT)
}

/// A server in Python, told its port, certificate and key.
pub(crate) fn start_python(scene: &ProxyScene, python: &str, script: &str, port: u16) -> SiteServer {
    let mut command = scene.net.world.command(python);
    command.args(["-c", script, &port.to_string()]).args(write_certificate(scene));
    SiteServer::start(scene, &mut command, port)
}

/// A Python that has `module`; the system's own may have what the first on the path has not.
pub(crate) fn python_with(module: &str) -> Option<&'static str> {
    ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let mut command = Command::new(python);
        command.args(["-c", &format!("import {module}")]);
        command.output().is_ok_and(|output| output.status.success())
    })
}

/// Runs a shell script among the site's files.
pub(crate) fn run_in_site(www: &Path, script: &str) {
    let mut command = Command::new("sh");
    command.args(["-euc", script]).current_dir(www).env("HOME", www);
    for identity in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{identity}_NAME"), "a").env(format!("GIT_{identity}_EMAIL"), "a@b");
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
