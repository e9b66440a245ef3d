//! The files of the demo, as an operator and a network team would write them, in a temporary directory.

use std::fs;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use certs::UnixTime;
use certs::identity::{IssueRequest, IssuerOptions, LocalIssuer, SigningAlgorithm, TrustDomain};
use tempfile::TempDir;

use super::fake_internet::RESOLVER;
use jail::JailListeners;

/// The sandboxes of the demo.
pub(super) const SANDBOX_A: &str = "sandbox-a";
pub(super) const SANDBOX_B: &str = "sandbox-b";
/// API key of the model's host (made up).
pub(super) const SECRET: &str = "sk-demo-7f3a9c41e6b2";
/// API key of the proxy at the memory service.
const MEMORY_KEY: &str = "the-key-of-the-memory-service";
const AUDIENCE: &str = "spiffe://acme.example/memory";
const ISSUER: &str = "https://issuer.acme.example";
/// Validity of the demo's tokens.
const TOKEN_LIFETIME: Duration = Duration::from_secs(300);

/// Policy of the first sandbox.
pub(super) const POLICY_A: &str = r#"name = "agent-a"

[[allow]]
name    = "source code"
hosts   = ["code.example"]
methods = ["GET", "HEAD"]

[[allow]]
name       = "model"
hosts      = ["model.example"]
paths      = ["/v1/**"]
credential = "model"

[[allow]]
name  = "assets"
hosts = ["*.cdn.example"]

[[allow]]
name  = "metrics"
hosts = ["*.metrics.example"]

[[allow]]
name  = "downloads"
hosts = ["downloads.example"]

[[allow]]
name  = "mirror"
hosts = ["mirror.example"]

[[memory]]
name    = "team memory"
host    = "memory.example"
profile = "astrocyte"
recall  = ["staging:team-a"]
"#;

/// Policy of the second sandbox.
const POLICY_B: &str = r#"name = "agent-b"

[[allow]]
name  = "assets"
hosts = ["*.cdn.example"]

[[memory]]
name    = "team memory"
host    = "memory.example"
profile = "astrocyte"
recall  = ["staging:team-b"]
"#;

/// The directory with all files of the demo.
pub(super) struct DemoFiles {
    dir: TempDir,
}

impl DemoFiles {
    pub(super) fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("sandbar-demo-").tempdir();
        Ok(DemoFiles { dir: dir.context("cannot create a temporary directory")? })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Keeps the directory and returns its path.
    pub(super) fn persist(self) -> PathBuf {
        self.dir.keep()
    }

    /// Writes everything; the configuration names the listening sockets of each sandbox.
    pub(super) fn write(
        &self,
        root: &str,
        arrivals: &[(&str, &JailListeners)],
    ) -> anyhow::Result<LocalIssuer> {
        fs::create_dir(self.path("policies"))?;
        fs::write(self.path("policies/agent-a.toml"), POLICY_A)?;
        fs::write(self.path("policies/agent-b.toml"), POLICY_B)?;
        fs::write(self.path("internet.pem"), root)?;
        write_secret(&self.path("model.key"), SECRET)?;
        write_secret(&self.path("memory.key"), MEMORY_KEY)?;
        let options = IssuerOptions {
            issuer: ISSUER.to_owned(),
            trust_domain: TrustDomain::parse("acme.example")?,
            environments: None,
            algorithm: SigningAlgorithm::Es256,
        };
        let issuer = LocalIssuer::init(&self.path("issuer"), &options, UnixTime::now())?;
        fs::write(self.config_path(), configuration_text(arrivals))?;
        Ok(issuer)
    }

    pub(super) fn config_path(&self) -> PathBuf {
        self.path("sandbar.toml")
    }
}

/// Issues a token for a sandbox.
pub(super) fn issue_token(issuer: &LocalIssuer, sandbox: &str) -> anyhow::Result<String> {
    let request = IssueRequest {
        tenant: "acme",
        environment: "staging",
        sandbox,
        audience: AUDIENCE,
        life: TOKEN_LIFETIME,
        generation: None,
    };
    Ok(issuer.issue(&request, UnixTime::now())?.expose().to_owned())
}

fn write_secret(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(writeln!(file, "{text}")?)
}

fn configuration_text(arrivals: &[(&str, &JailListeners)]) -> String {
    let mut text = format!(
        r#"policies = "policies"

[log]
dir = "log"

[dns]
upstreams = ["{RESOLVER}"]

[upstream]
roots        = ["internet.pem"]
system_roots = false

[[credential]]
name  = "model"
file  = "model.key"
hosts = ["model.example"]

[[credential]]
name  = "memory"
file  = "memory.key"
hosts = ["memory.example"]

[[identity.issuer]]
name         = "{ISSUER}"
trust_domain = "acme.example"
keys         = "issuer/jwks.json"

[[memory_service]]
host       = "memory.example"
audience   = "{AUDIENCE}"
mode       = "api-key"
credential = "memory"
"#
    );
    for (sandbox, arrivals) in arrivals {
        text += &sandbox_section(sandbox, arrivals);
    }
    text
}

/// The configuration of one sandbox and its dedicated listeners.
fn sandbox_section(sandbox: &str, arrivals: &JailListeners) -> String {
    let bind = |sockets: &[OwnedFd]| {
        let number = |socket: &OwnedFd| format!("\"inherited:{}\"", socket.as_raw_fd());
        sockets.iter().map(number).collect::<Vec<_>>().join(", ")
    };
    let (dns, tcp) = (bind(&arrivals.dns), bind(&arrivals.tcp));
    let policy = sandbox.replace("sandbox", "agent");
    format!(
        r#"
[[listener]]
mode    = "dns"
bind    = [{dns}]
sandbox = "{sandbox}"

[[listener]]
mode    = "redirect"
bind    = [{tcp}]
sandbox = "{sandbox}"

[[sandbox]]
id          = "{sandbox}"
tenant      = "acme"
environment = "staging"
base        = "user"
policies    = ["{policy}"]
"#
    )
}
