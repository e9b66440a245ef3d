//! Finds the running instance and sends requests to its admin socket.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::Value;

use proxy::admin::client as admin;
use proxy::app::{instance_paths, load_config};
use proxy::policy::files;

/// Selects the running instance.
#[derive(clap::Args, Debug)]
pub(crate) struct RunningInstance {
    /// Configuration file of the running instance
    #[arg(long, short = 'c', value_name = "FILE", default_value = "sandbar.toml")]
    config: PathBuf,
    /// Admin socket, if not the one in the configuration file
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl RunningInstance {
    pub(crate) fn new(config: PathBuf, socket: Option<PathBuf>) -> Self {
        RunningInstance { config, socket }
    }

    /// Returns the admin socket named by the configuration. Invalid policies do not matter here.
    fn socket_path(&self) -> anyhow::Result<PathBuf> {
        let configuration = files::read_config_only(&self.config).and_then(|read| load_config(&read));
        let configuration =
            configuration.context("cannot get the admin socket from the configuration file: use --socket")?;
        Ok(instance_paths(&self.config, &configuration)?.socket)
    }

    /// Sends a request and returns the response.
    pub(crate) fn request(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let socket = match &self.socket {
            Some(socket) => socket.clone(),
            None => self.socket_path()?,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let response = runtime.block_on(admin::send_command(&socket, method, path, body))?;
        serde_json::from_str(&response).context("the running instance sent an invalid response")
    }
}
