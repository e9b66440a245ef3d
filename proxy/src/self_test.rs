//! The self-test: the instance is ready only after it has denied an attempt that it must deny, and recorded that.

use std::sync::Arc;

use rules::configuration::ListenerMode;
use rules::{Channel, RuleSet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Duration, timeout};

use crate::accept::{AcceptedConnection, ConnectionHandler, ListenerSignals};
use crate::egress::stream::StreamSocket;

/// A name that no policy allows: the zone is reserved (RFC 6761, section 6.4).
const DENIED_TARGET: &str = "self-test.sandbar.invalid:443";
/// Time limit of the test.
const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends a CONNECT request through the whole connection handler and expects a refusal.
///
/// # Errors
///
/// Returns what happened instead.
pub(crate) async fn expect_denial(gate: &ConnectionHandler, rules: &RuleSet) -> Result<(), String> {
    let channels = match rules.sandboxes().iter().next() {
        Some(sandbox) => vec![Channel::Dedicated(sandbox.id.clone())],
        None => Vec::new(), // belongs to no sandbox, which must be refused, too
    };
    let (mut client, server) = UnixStream::pair().map_err(|error| error.to_string())?;
    let socket = StreamSocket::Unix(server);
    let (_running, stop) = watch::channel(false);
    let accepted = AcceptedConnection {
        socket,
        mode: ListenerMode::Explicit,
        channels,
        source: None,
        original_dst: None,
        listener: ListenerSignals { stop, cut: Arc::default() },
    };
    // Drop the client after the answer; the handler waits for the connection to close.
    let request = async move {
        let head = format!("CONNECT {DENIED_TARGET} HTTP/1.1\r\nHost: {DENIED_TARGET}\r\n\r\n");
        client.write_all(head.as_bytes()).await?;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let both = async { tokio::join!(gate.serve(accepted), request).1 };
    match timeout(TEST_TIMEOUT, both).await {
        Ok(Ok(answer)) if answer.starts_with("HTTP/1.1 403 ") => Ok(()),
        Ok(Ok(answer)) if rules.sandboxes().iter().next().is_none() && answer.is_empty() => Ok(()),
        Ok(Ok(answer)) => Err(format!("expected a refusal, got {:?}", answer.lines().next())),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the self-test timed out".to_owned()),
    }
}
