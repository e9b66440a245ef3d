//! The admin socket: commands ask the running program, one line of JSON each way. Whoever may open the
//! socket is the operator; the sandbox never sees it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use dns_filter::{Explanation, Filter};
use rules::DomainName;
use rules::facts::QueryType;
use rules::word::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Longest request.
const REQUEST: u64 = 4096;
/// Longest answer.
const ANSWER: u64 = 256 << 10;
/// How long one command may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// Commands at once.
const COMMANDS: usize = 16;

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) dns: DnsRequest,
}

/// `sandbar dns`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DnsRequest {
    pub(crate) sandbox: String,
    pub(crate) name: String,
    pub(crate) kind: u16,
}

/// What is answered: one of both.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub(crate) dns: Option<Explanation>,
    pub(crate) error: Option<String>,
}

/// The open socket.
pub(crate) struct Admin {
    listener: UnixListener,
    filter: Arc<Filter>,
}

impl Admin {
    /// Opens the socket for its owner alone. One that an earlier process left is taken over: the log
    /// beside it is locked, so no other is running.
    pub(crate) fn open(path: &Path, filter: Arc<Filter>) -> anyhow::Result<Self> {
        let shown = path.display();
        match std::fs::remove_file(path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot remove {shown}")),
        }
        let listener =
            UnixListener::bind(path).with_context(|| format!("cannot listen on {shown}"))?;
        let owner = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(path, owner).with_context(|| format!("cannot guard {shown}"))?;
        Ok(Admin { listener, filter })
    }

    pub(crate) async fn serve(self) {
        let commands = Arc::new(Semaphore::new(COMMANDS));
        loop {
            let Ok(turn) = commands.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = self.listener.accept().await else { continue };
            let filter = self.filter.clone();
            tokio::spawn(async move {
                drop(timeout(PATIENCE, answer(stream, &filter)).await);
                drop(turn);
            });
        }
    }
}

async fn answer(mut stream: UnixStream, filter: &Arc<Filter>) -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new((&mut stream).take(REQUEST)).read_line(&mut line).await?;
    let reply = match serde_json::from_str::<Request>(&line) {
        Ok(request) => explain(filter, &request.dns).await,
        Err(error) => refused(format!("the request is not understood: {error}")),
    };
    let mut text = serde_json::to_vec(&reply)?;
    text.push(b'\n');
    stream.write_all(&text).await
}

async fn explain(filter: &Arc<Filter>, request: &DnsRequest) -> Reply {
    let sandbox = match SandboxId::parse(&request.sandbox) {
        Ok(sandbox) => sandbox,
        Err(error) => return refused(format!("the sandbox is not good: {error}")),
    };
    let name = match DomainName::parse_question(&request.name) {
        Ok(name) => name,
        Err(error) => return refused(format!("the name is not good: {error}")),
    };
    let told = filter.explain(&sandbox, &name, QueryType(request.kind)).await;
    Reply { dns: Some(told), error: None }
}

fn refused(error: String) -> Reply {
    Reply { dns: None, error: Some(error) }
}

/// Asks the running program.
pub(crate) async fn ask(socket: &Path, request: &Request) -> anyhow::Result<Reply> {
    let shown = socket.display();
    let mut stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("cannot reach {shown}: is `sandbar serve` running?"))?;
    let mut text = serde_json::to_vec(request)?;
    text.push(b'\n');
    stream.write_all(&text).await?;
    let mut line = String::new();
    let read = BufReader::new(stream.take(ANSWER)).read_line(&mut line).await;
    read.with_context(|| format!("{shown} does not answer"))?;
    serde_json::from_str(&line).with_context(|| format!("{shown} gives no answer that is one"))
}
