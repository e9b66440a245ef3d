//! The admin socket: HTTP on a unix socket, for commands, probes and Prometheus. Whoever may open it is the
//! operator; the sandbox never sees it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use dns_filter::Explanation;
use rules::facts::QueryType;
use rules::word::SandboxId;
use rules::{DomainName, Reason};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::admin::explain::Question;
use crate::admin::status::{State, describe_grant};
use crate::policy::grants::Wish;

/// Longest request, head and body.
const REQUEST: u64 = 16 << 10;
/// Longest answer.
const ANSWER: u64 = 16 << 20;
/// How long one command may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// Commands at once.
const COMMANDS: usize = 16;

/// `sandbar dns`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsRequest {
    pub sandbox: String,
    pub name: String,
    pub kind: u16,
}

/// `sandbar pending approve`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Approval {
    pub seconds: u64,
    pub why: String,
    pub by: String,
}

/// What is answered.
struct Reply {
    status: u16,
    kind: &'static str,
    body: String,
}

impl Reply {
    fn json(status: u16, value: &Value) -> Self {
        Reply { status, kind: "application/json", body: format!("{value}\n") }
    }

    fn bad(status: u16, error: impl ToString) -> Self {
        Self::json(status, &json!({ "error": error.to_string() }))
    }
}

/// The open socket.
pub struct Admin {
    listener: UnixListener,
}

impl Admin {
    /// Opens the socket for its owner alone. One that an earlier process left is taken over: the log
    /// beside it is locked, so no other is running.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
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
        Ok(Admin { listener })
    }

    pub async fn serve(self, state: Arc<State>) {
        let commands = Arc::new(Semaphore::new(COMMANDS));
        loop {
            let Ok(turn) = commands.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await; // out of descriptors
                continue;
            };
            let state = state.clone();
            tokio::spawn(async move {
                drop(timeout(PATIENCE, answer(stream, &state)).await);
                drop(turn);
            });
        }
    }
}

async fn answer(mut stream: UnixStream, state: &State) -> std::io::Result<()> {
    let reply = match read(&mut stream).await {
        Ok((method, path, body)) => {
            let uid = stream.peer_cred().map(|peer| peer.uid()).ok();
            route(state, uid, &method, &path, &body).await
        }
        Err(why) => Reply::bad(400, why),
    };
    let Reply { status, kind, body } = reply;
    let head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        if status < 400 { "OK" } else { "No" },
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

/// One request: its head by `httparse`, its body by its length.
async fn read(stream: &mut UnixStream) -> Result<(String, String, Vec<u8>), &'static str> {
    let mut bytes = Vec::new();
    let mut stream = stream.take(REQUEST);
    loop {
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(&bytes) {
            Ok(httparse::Status::Complete(length)) => {
                let announced = announced(request.headers);
                if bytes.len().saturating_sub(length) >= announced {
                    let (method, path) = (request.method.unwrap_or(""), request.path.unwrap_or(""));
                    let body = bytes.get(length..length + announced).unwrap_or_default().to_vec();
                    return Ok((method.to_owned(), path.to_owned(), body));
                }
            }
            Ok(httparse::Status::Partial) => {}
            Err(_) => return Err("the request is no HTTP"),
        }
        match stream.read_buf(&mut bytes).await {
            Ok(0) | Err(_) => return Err("the request is incomplete or too long"),
            Ok(_) => {}
        }
    }
}

fn announced(fields: &[httparse::Header<'_>]) -> usize {
    let length = fields.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| std::str::from_utf8(field.value).ok());
    length.and_then(|length| length.parse().ok()).unwrap_or_default()
}

async fn route(state: &State, uid: Option<u32>, method: &str, path: &str, body: &[u8]) -> Reply {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (method, parts.as_slice()) {
        ("GET", ["health"]) => Reply::json(200, &json!({ "healthy": true })),
        ("GET", ["ready"]) => ready(state),
        ("GET", ["metrics"]) => {
            Reply { status: 200, kind: "text/plain; version=0.0.4", body: state.metrics() }
        }
        ("GET", ["jwks"]) => Reply::json(200, &state.jwks()),
        ("GET", ["status"]) => Reply::json(200, &state.status()),
        ("GET", ["connections"]) => Reply::json(200, &state.connections()),
        ("DELETE", ["connections", id]) => cut(state, id),
        ("POST", ["dns"]) => dns(state, body).await,
        ("POST", ["reload"]) => reload(state, body).await,
        ("GET", ["budgets"]) => Reply::json(200, &state.budgets()),
        ("GET", ["grants"]) => Reply::json(200, &state.grants()),
        ("POST", ["grants"]) => grant(state, uid, body).await,
        ("DELETE", ["grants", id]) => revoke(state, uid, id).await,
        ("GET", ["pending"]) => Reply::json(200, &state.pending()),
        ("POST", ["pending", number]) => approve(state, uid, number, body).await,
        ("POST", ["explain"]) => explain(state, body).await,
        ("POST", ["identities"]) => identify(state, body).await,
        _ => Reply::bad(404, "there is no such thing here"),
    }
}

/// Ready once a denial was seen, and as long as records can be written.
fn ready(state: &State) -> Reply {
    let health = state.log.health();
    let tested = state.ready.load(Ordering::Acquire);
    let ready = tested && health.ready;
    let value = json!({ "ready": ready, "self_test": tested, "log": health.ready, "trouble": health.trouble });
    Reply::json(if ready { 200 } else { 503 }, &value)
}

fn cut(state: &State, id: &str) -> Reply {
    let cut = id.parse().is_ok_and(|id| state.live.cut(id, Reason::CutByOperator));
    match cut {
        true => Reply::json(200, &json!({ "cut": true })),
        false => Reply::bad(404, format!("no open connection `{id}`: see `sandbar status`")),
    }
}

/// Loads the policies now. That they are bad is an answer, not an error.
async fn reload(state: &State, body: &[u8]) -> Reply {
    let wait = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let wait = wait.get("wait").and_then(Value::as_bool).unwrap_or_default();
    let reloader = state.reloader.clone();
    let loaded = tokio::task::spawn_blocking(move || reloader.reload()).await;
    match loaded {
        Ok(Ok(loaded)) => {
            if wait {
                loaded.settled(&state.live).await;
            }
            let (generation, cut) = (loaded.generation(), loaded.cut());
            Reply::json(200, &json!({ "generation": generation, "cut": cut }))
        }
        Ok(Err(trouble)) => {
            let rules = state.rules.load();
            let (generation, closed) = (rules.generation(), rules.is_closed());
            let told = json!({ "generation": generation, "closed": closed, "trouble": trouble });
            Reply::json(200, &told)
        }
        Err(error) => Reply::bad(500, error),
    }
}

/// Makes a grant. The kernel says who asks; whom they ask for is theirs to say.
async fn grant(state: &State, uid: Option<u32>, body: &[u8]) -> Reply {
    match serde_json::from_slice::<Wish>(body) {
        Ok(wish) => make(state, uid, wish).await.unwrap_or_else(|refused| refused),
        Err(error) => Reply::bad(400, format!("the request is not understood: {error}")),
    }
}

async fn make(state: &State, uid: Option<u32>, wish: Wish) -> Result<Reply, Reply> {
    let wish = Wish { by: signed(&wish.by, uid), ..wish };
    // In a task of its own: whoever stops waiting for it does not stop it halfway.
    let made = tokio::spawn(state.reloader.clone().grant(wish)).await;
    let made = made.unwrap_or_else(|error| Err(error.into()));
    let (kept, generation) = made.map_err(|error| Reply::bad(409, format!("{error:#}")))?;
    let mut told = describe_grant(&kept);
    told["generation"] = generation.into();
    Ok(Reply::json(200, &told))
}

/// Grants what was refused, for a while.
async fn approve(state: &State, uid: Option<u32>, number: &str, body: &[u8]) -> Reply {
    let Some(refused) = number.parse().ok().and_then(|number| state.pending.numbered(number))
    else {
        return Reply::bad(404, format!("no refusal {number} is pending: see `sandbar pending`"));
    };
    let Approval { seconds, why, by } = match serde_json::from_slice(body) {
        Ok(approval) => approval,
        Err(error) => return Reply::bad(400, format!("the request is not understood: {error}")),
    };
    let host = match refused.port {
        Some(port) => format!("{}:{port}", refused.host),
        None => refused.host,
    };
    let (methods, paths, bytes) = (None, None, None);
    let wish = Wish { sandbox: refused.sandbox, host, methods, paths, bytes, seconds, why, by };
    let made = make(state, uid, wish).await;
    if made.is_ok() {
        state.pending.settle(refused.number);
    }
    made.unwrap_or_else(|refused| refused)
}

async fn revoke(state: &State, uid: Option<u32>, id: &str) -> Reply {
    let Ok(id) = id.parse() else { return Reply::bad(400, "a grant is named by its number") };
    let (reloader, by) = (state.reloader.clone(), signed("the operator", uid));
    match tokio::task::spawn_blocking(move || reloader.revoke(id, &by)).await {
        Ok(Ok(loaded)) => {
            let (generation, cut) = (loaded.generation(), loaded.cut());
            Reply::json(200, &json!({ "id": id, "generation": generation, "cut": cut }))
        }
        Ok(Err(error)) => Reply::bad(404, format!("{error:#}")),
        Err(error) => Reply::bad(500, error),
    }
}

/// Who somebody says to be, and who the kernel says they are.
fn signed(by: &str, uid: Option<u32>) -> String {
    let uid = uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
    format!("{by} (uid {uid})")
}

/// Gives a sandbox of a warm pool its identity, once.
async fn identify(state: &State, body: &[u8]) -> Reply {
    let identity = match serde_json::from_slice(body) {
        Ok(identity) => identity,
        Err(error) => return Reply::bad(400, format!("the request is not understood: {error}")),
    };
    let reloader = state.reloader.clone();
    match tokio::task::spawn_blocking(move || reloader.identify(identity)).await {
        Ok(Ok(generation)) => Reply::json(200, &json!({ "generation": generation })),
        Ok(Err(error)) => Reply::bad(409, format!("{error:#}")),
        Err(error) => Reply::bad(500, error),
    }
}

/// Explains one attempt by the rules in force, whatever the files say.
async fn explain(state: &State, body: &[u8]) -> Reply {
    let question: Question = match serde_json::from_slice(body) {
        Ok(question) => question,
        Err(error) => return Reply::bad(400, format!("the request is not understood: {error}")),
    };
    let rules = state.rules.load_full();
    let answered = tokio::task::spawn_blocking(move || question.answer(&rules)).await;
    match answered {
        Ok(Ok(answer)) => match serde_json::to_value(&answer) {
            Ok(answer) => Reply::json(200, &answer),
            Err(error) => Reply::bad(500, error),
        },
        Ok(Err(error)) => Reply::bad(400, format!("{error:#}")),
        Err(error) => Reply::bad(500, error),
    }
}

async fn dns(state: &State, body: &[u8]) -> Reply {
    let request: DnsRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return Reply::bad(400, format!("the request is not understood: {error}")),
    };
    let sandbox = match SandboxId::parse(&request.sandbox) {
        Ok(sandbox) => sandbox,
        Err(error) => return Reply::bad(400, format!("the sandbox is not good: {error}")),
    };
    let name = match DomainName::parse_question(&request.name) {
        Ok(name) => name,
        Err(error) => return Reply::bad(400, format!("the name is not good: {error}")),
    };
    let told: Explanation = state.filter.explain(&sandbox, &name, QueryType(request.kind)).await;
    match serde_json::to_value(&told) {
        Ok(told) => Reply::json(200, &told),
        Err(error) => Reply::bad(500, error),
    }
}

/// Asks the running program.
pub async fn ask(socket: &Path, method: &str, path: &str, body: &Value) -> anyhow::Result<String> {
    let shown = socket.display();
    let mut stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("cannot reach {shown}: is `sandbar serve` running?"))?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: sandbar\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    let read = stream.take(ANSWER).read_to_string(&mut answer).await;
    read.with_context(|| format!("{shown} does not answer"))?;
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        bail!("{shown} gives no answer that is one");
    };
    if head.split(' ').nth(1) == Some("200") {
        return Ok(body.to_owned());
    }
    let told: Value = serde_json::from_str(body).unwrap_or_default();
    bail!("{}", told.get("error").and_then(Value::as_str).unwrap_or(body.trim()));
}
