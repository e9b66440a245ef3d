//! `sandbar serve`: runs what the operator's file describes until it is told to stop.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::app::App;

/// Serve what the operator's file describes, until SIGTERM
#[derive(clap::Args, Debug)]
pub(crate) struct ServeArgs {
    /// The operator's file
    #[arg(long, short = 'c', value_name = "FILE", default_value = "sandbar.toml")]
    config: PathBuf,
}

/// Serves. Exit status: 0 stopped, 2 could not start or broke.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let app = App::build(&args.config)?;
        let stop = stop_on_signal()?;
        for address in app.addresses() {
            anstream::eprintln!("sandbar: answering DNS on {address}");
        }
        app.run(stop).await
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Turns true at the first SIGTERM or SIGINT.
fn stop_on_signal() -> anyhow::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.send_replace(true);
    });
    Ok(stopped)
}
