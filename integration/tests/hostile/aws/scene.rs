//! Services that verify signatures, and Sandbar before them.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use integration::repository_root;
use serde_json::Value;
use tempfile::TempDir;

use crate::handshake::{OriginCa, client_config, tls_handshake};
use crate::instance::{InstanceSetup, SandbarInstance};
use crate::wire::RawConnection;

pub(super) const ID: &str = "AKIAREALREALREALREAL";
pub(super) const SECRET: &str = "real/Secret+0123456789abcdefghijklmnopqr";
pub(super) const TOKEN: &str = "realSessionToken/0123456789+abcdefghijklmnop==";
/// What the sandbox has: as in `client.py`.
pub(super) const OWN_ID: &str = "AKIADUMMYDUMMYDUMMY0";
pub(super) const OWN_TOKEN: &str = "dummy-token";

const SERVICES: [(&str, &str); 4] =
    [("s3", "s3.test"), ("dynamodb", "dynamodb.test"), ("sts", "sts.test"), ("sqs", "sqs.test")];

/// The services, and an instance with keys for each.
pub(super) struct AwsScene {
    pub(super) world: SandbarInstance,
    pub(super) port: u16,
    origin: Child,
    dir: TempDir,
}

impl AwsScene {
    /// Starts services that speak `protocol`, with keys of a session if there is a token.
    pub(super) fn start(protocol: &str, token: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let root = OriginCa::new();
        let (leaf, key) = root.issue_leaf_for(SERVICES.map(|(_, host)| host.to_owned()));
        for (name, text) in [("leaf.pem", leaf.as_str()), ("leaf.key", &key), ("id", ID), ("secret", SECRET)]
        {
            fs::write(path(name), text).unwrap();
        }
        let mut command = Command::new(sdk_python());
        command.arg(repository_root().join("integration/tests/hostile/aws/origin.py"));
        command.args([path("leaf.pem"), path("leaf.key"), path("seen.jsonl"), PathBuf::from(protocol)]);
        command.env("REAL_ID", ID).env("REAL_SECRET", SECRET).stdout(Stdio::piped());
        let mut session = String::new();
        if let Some(token) = token {
            command.env("REAL_TOKEN", token);
            fs::write(path("token"), token).unwrap();
            session = format!(", session_token_file = \"{}\"", path("token").display());
        }
        let mut origin = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(origin.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().rsplit(' ').next().unwrap().parse().expect("the services start");
        let rule = |(service, host): (&str, &str)| {
            format!(
                "[[allow]]\nname = \"{service}\"\nhosts = [\"{host}:{port}\"]\nmethods = [\"GET\", \"HEAD\", \"PUT\", \
                 \"POST\"]\ncredential = \"{service}\"\nresolves_to = [\"127.0.0.0/8\"]\n"
            )
        };
        let credential = |(service, host): (&str, &str)| {
            format!(
                "[[credential]]\nname = \"{service}\"\nhosts = [\"{host}:{port}\"]\n\
                 form = {{ sigv4 = {{ service = \"{service}\", region = \"eu-test-1\" }} }}\n\
                 aws = {{ access_key_id_file = \"{}\", secret_access_key_file = \"{}\"{session} }}\n",
                path("id").display(),
                path("secret").display()
            )
        };
        let setup = InstanceSetup {
            policy: SERVICES.map(rule).concat(),
            tables: SERVICES.map(credential).concat(),
            hosts: SERVICES.map(|(_, host)| host).to_vec(),
            ..InstanceSetup::default()
        };
        let world = setup.with_roots(root.pem()).start();
        AwsScene { world, port, origin, dir }
    }

    /// What the client in Python says.
    pub(super) fn run_client(&self) -> String {
        let mut client = Command::new(sdk_python());
        client.arg(repository_root().join("integration/tests/hostile/aws/client.py"));
        client.arg(self.port.to_string()).arg(format!("http://{}", self.world.listeners[0]));
        let output = client.arg(self.world.ca_path()).output().unwrap();
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat()
    }

    /// Every request that arrived, with what is wrong with it, if anything is.
    pub(super) fn requests(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join("seen.jsonl")).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A connection of the sandbox to a service, in TLS.
    pub(super) fn connect(&self, service: &str) -> RawConnection {
        let (host, config) = (format!("{service}.test"), client_config(&self.world, "http/1.1"));
        tls_handshake(self.world.open_tunnel(&host, self.port), &config, &host).unwrap()
    }

    pub(super) fn log_text(&self) -> String {
        let segments = fs::read_dir(self.world.log_dir()).unwrap().map(|entry| entry.unwrap().path());
        segments.map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    }

    /// A file of so many bytes, as curl takes it.
    pub(super) fn write_noise(&self, bytes: usize) -> String {
        let path = self.dir.path().join("noise");
        fs::write(&path, vec![b'n'; bytes]).unwrap();
        format!("@{}", path.display())
    }

    pub(super) fn digest(&self, bytes: &[u8]) -> String {
        self.ask(
            "import hashlib,sys; print(hashlib.sha256(open(sys.argv[1],'rb').read()).hexdigest())",
            bytes,
        )
    }

    pub(super) fn crc32(&self, bytes: &[u8]) -> String {
        let script = "import base64,sys,zlib\n\
             print(base64.b64encode(zlib.crc32(open(sys.argv[1],'rb').read()).to_bytes(4,'big')).decode())";
        self.ask(script, bytes)
    }

    fn ask(&self, script: &str, bytes: &[u8]) -> String {
        let path = self.dir.path().join("asked");
        fs::write(&path, bytes).unwrap();
        let output = Command::new(sdk_python()).args(["-c", script]).arg(&path).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for AwsScene {
    fn drop(&mut self) {
        drop(self.origin.kill());
        drop(self.origin.wait());
    }
}

/// The Python that has the SDK: a virtual environment with the pinned packages, made once and kept below `target`.
fn sdk_python() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(repository_root().join("target"), PathBuf::from);
    let (home, install) = (target.join("aws-sdk"), repository_root().join("deploy/aws-sdk.sh"));
    let python = home.join("bin/python");
    if !is_ready(&install, &home) {
        fs::create_dir_all(&target).unwrap();
        let lock = File::create(home.with_extension("lock")).unwrap();
        lock.lock().unwrap(); // tests begin together
        if !is_ready(&install, &home) {
            let made = Command::new(&install).arg(&home).output().expect("a shell");
            let said = String::from_utf8_lossy(&made.stderr);
            assert!(made.status.success(), "the AWS SDK cannot be installed: {said}");
        }
    }
    python
}

fn is_ready(install: &Path, home: &Path) -> bool {
    Command::new(install).arg("--check").arg(home).status().is_ok_and(|status| status.success())
}
