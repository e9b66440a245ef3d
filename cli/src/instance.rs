//! Which running instance a command speaks to, and the asking.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::Value;

use proxy::admin::client as admin;
use proxy::app::{instance_paths, load_config};
use proxy::policy::files;

/// The running instance.
#[derive(clap::Args, Debug)]
pub(crate) struct RunningInstance {
    /// The operator's file of the running instance
    #[arg(long, short = 'c', value_name = "FILE", default_value = "sandbar.toml")]
    config: PathBuf,
    /// The admin socket, where it is not the one of the operator's file
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl RunningInstance {
    pub(crate) fn new(config: PathBuf, socket: Option<PathBuf>) -> Self {
        RunningInstance { config, socket }
    }

    /// Where its socket is, by its operator's file; policies that are not good do not matter.
    fn socket_path(&self) -> anyhow::Result<PathBuf> {
        let operator = files::read_config_only(&self.config).and_then(|read| load_config(&read));
        let operator =
            operator.context("the file does not say where the instance is: say --socket")?;
        Ok(instance_paths(&self.config, &operator)?.socket)
    }

    /// Asks it.
    pub(crate) fn request(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let socket = match &self.socket {
            Some(socket) => socket.clone(),
            None => self.socket_path()?,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let told = runtime.block_on(admin::send_command(&socket, method, path, body))?;
        serde_json::from_str(&told).context("the running program gave no answer that is one")
    }
}
