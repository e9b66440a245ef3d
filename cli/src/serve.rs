//! `sandbar serve`: runs the instance that the configuration describes, until SIGTERM or SIGINT.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use proxy::app::App;

/// Environment variable with the `tracing` filter. The default logs warnings, and what an operator should know.
const LOG_VARIABLE: &str = "SANDBAR_LOG";

/// Run the instance that the configuration describes, until SIGTERM
#[derive(clap::Args, Debug)]
pub(crate) struct ServeArgs {
    /// Configuration file
    #[arg(long, short = 'c', value_name = "FILE", default_value = "sandbar.toml")]
    config: PathBuf,
}

/// Serves. Exit status: 0 stopped by a signal, 2 failed to start or failed while running.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    init_tracing("warn,proxy=info,dns_filter=info");
    sys::process::hide_memory().context("cannot keep credentials out of core dumps")?;
    // Install one crypto provider for the process. Pingora uses rustls' default and would otherwise choose its own.
    drop(rustls::crypto::CryptoProvider::install_default(certs::crypto_provider().as_ref().clone()));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let stop = stop_on_signal()?;
        let app = App::build(&args.config, stop)?;
        for listener in app.listeners() {
            anstream::eprintln!("sandbar: listening: {listener}");
        }
        app.run().await
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Logs to stderr, filtered by `SANDBAR_LOG` or else by `default`; `SANDBAR_LOG=debug` logs every request.
pub(super) fn init_tracing(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env(LOG_VARIABLE)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    drop(subscriber.try_init()); // fails only if a subscriber is installed already
}

/// Returns a receiver that turns true at the first SIGTERM or SIGINT.
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
