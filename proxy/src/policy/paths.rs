//! Where an instance keeps its log, its admin socket and its certificate authority.

use std::path::{Path, PathBuf};

use anyhow::bail;
use rules::configuration::{Configuration, LogSettings};

/// Default admin socket, in the log directory.
const ADMIN_SOCKET: &str = "admin.sock";
/// Default directory of the certificate authority, beside the configuration.
const CA_DIR: &str = "ca";

/// Paths of an instance.
pub struct InstancePaths {
    pub log: PathBuf,
    pub socket: PathBuf,
    pub ca: PathBuf,
}

/// Returns the paths of an instance, from its configuration.
pub fn instance_paths(config: &Path, configuration: &Configuration) -> anyhow::Result<InstancePaths> {
    let base = config.parent().unwrap_or(Path::new(""));
    let Some(LogSettings { dir, .. }) = &configuration.log else {
        bail!("{}: `[log] dir` is required: the directory of the access log", config.display());
    };
    let log = base.join(dir);
    let socket = configuration.admin_socket.as_ref().map_or(log.join(ADMIN_SOCKET), |path| base.join(path));
    let ca = base.join(configuration.ca_dir.as_deref().unwrap_or(CA_DIR));
    Ok(InstancePaths { log, socket, ca })
}
