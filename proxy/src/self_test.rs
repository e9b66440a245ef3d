//! Readiness: only after this process has refused something it must refuse, and has recorded it.

use rules::operator::Mode;
use rules::{Channel, RuleSet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Duration, timeout};

use crate::accept::{Accepted, Gate};
use crate::egress::stream::Socket;

/// No policy opens it: the zone is reserved (RFC 6761, section 6.4).
const REFUSED: &str = "self-test.sandbar.invalid:443";
/// Longest the test may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends a request through a connection's whole life and looks for the refusal.
///
/// # Errors
///
/// Says what was seen instead.
pub(crate) async fn see_a_denial(gate: &Gate, rules: &RuleSet) -> Result<(), String> {
    let channels = match rules.sandboxes().iter().next() {
        Some(sandbox) => vec![Channel::Dedicated(sandbox.id.clone())],
        None => Vec::new(), // nobody's, which is refused too
    };
    let (mut client, server) = UnixStream::pair().map_err(|error| error.to_string())?;
    let socket = Socket::Unix(server);
    let accepted = Accepted { socket, mode: Mode::Explicit, channels, source: None, aimed: None };
    // The client goes with its answer, or the refusal would wait for it to say more.
    let asked = async move {
        let request = format!("CONNECT {REFUSED} HTTP/1.1\r\nHost: {REFUSED}\r\n\r\n");
        client.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let both = async { tokio::join!(gate.serve(accepted), asked).1 };
    match timeout(PATIENCE, both).await {
        Ok(Ok(answer)) if answer.starts_with("HTTP/1.1 403 ") => Ok(()),
        Ok(Ok(answer)) if rules.sandboxes().iter().next().is_none() && answer.is_empty() => Ok(()),
        Ok(Ok(answer)) => Err(format!("expected a refusal, got {:?}", answer.lines().next())),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the self-test took too long".to_owned()),
    }
}
