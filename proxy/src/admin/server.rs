//! The admin socket: HTTP on a unix socket, for commands, probes and Prometheus. Whoever may open it is the
//! operator; the sandbox never sees it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use dns_filter::DnsExplanation;
use rules::facts::QueryType;
use rules::ids::SandboxId;
use rules::{DomainName, Reason};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::admin::explain::ExplainRequest;
use crate::admin::status::{AdminState, grant_json};
use crate::policy::grants::GrantRequest;

/// Longest request, head and body.
const MAX_REQUEST: u64 = 16 << 10;
/// Longest answer.
const MAX_ANSWER: u64 = 16 << 20;
/// How long one command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(15);
/// Commands at once.
const MAX_COMMANDS: usize = 16;

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
pub struct ApprovalRequest {
    pub seconds: u64,
    pub why: String,
    pub by: String,
}

/// What is answered.
struct AdminReply {
    status: u16,
    kind: &'static str,
    body: String,
}

impl AdminReply {
    fn json(status: u16, value: &Value) -> Self {
        AdminReply { status, kind: "application/json", body: format!("{value}\n") }
    }

    fn error(status: u16, error: impl ToString) -> Self {
        Self::json(status, &json!({ "error": error.to_string() }))
    }
}

/// The open socket.
pub struct AdminServer {
    listener: UnixListener,
}

impl AdminServer {
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
        Ok(AdminServer { listener })
    }

    pub async fn serve(self, state: Arc<AdminState>) {
        let commands = Arc::new(Semaphore::new(MAX_COMMANDS));
        loop {
            let Ok(turn) = commands.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await; // out of descriptors
                continue;
            };
            let state = state.clone();
            tokio::spawn(async move {
                drop(timeout(COMMAND_TIMEOUT, handle_connection(stream, &state)).await);
                drop(turn);
            });
        }
    }
}

async fn handle_connection(mut stream: UnixStream, state: &AdminState) -> std::io::Result<()> {
    let reply = match read_request(&mut stream).await {
        Ok((method, url_path, read_body)) => {
            let uid = stream.peer_cred().map(|peer| peer.uid()).ok();
            route(state, uid, &method, &url_path, &read_body).await
        }
        Err(why) => AdminReply::error(400, why),
    };
    let AdminReply { status, kind, body } = reply;
    let head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        if status < 400 { "OK" } else { "No" },
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

/// One request: its head by `httparse`, its body by its length.
async fn read_request(stream: &mut UnixStream) -> Result<(String, String, Vec<u8>), &'static str> {
    let mut bytes = Vec::new();
    let mut stream = stream.take(MAX_REQUEST);
    loop {
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(&bytes) {
            Ok(httparse::Status::Complete(length)) => {
                let announced = content_length(request.headers);
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

fn content_length(fields: &[httparse::Header<'_>]) -> usize {
    let length = fields.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| std::str::from_utf8(field.value).ok());
    length.and_then(|length| length.parse().ok()).unwrap_or_default()
}

async fn route(
    state: &AdminState,
    uid: Option<u32>,
    method: &str,
    path: &str,
    body: &[u8],
) -> AdminReply {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (method, parts.as_slice()) {
        ("GET", ["health"]) => AdminReply::json(200, &json!({ "healthy": true })),
        ("GET", ["ready"]) => readiness(state),
        ("GET", ["metrics"]) => {
            AdminReply { status: 200, kind: "text/plain; version=0.0.4", body: state.metrics() }
        }
        ("GET", ["jwks"]) => AdminReply::json(200, &state.jwks()),
        ("GET", ["status"]) => AdminReply::json(200, &state.status()),
        ("GET", ["connections"]) => AdminReply::json(200, &state.connections()),
        ("DELETE", ["connections", id]) => cut_connection(state, id),
        ("POST", ["dns"]) => explain_dns(state, body).await,
        ("POST", ["reload"]) => reload(state, body).await,
        ("GET", ["budgets"]) => AdminReply::json(200, &state.budgets()),
        ("GET", ["grants"]) => AdminReply::json(200, &state.grants()),
        ("POST", ["grants"]) => create_grant(state, uid, body).await,
        ("DELETE", ["grants", id]) => revoke_grant(state, uid, id).await,
        ("GET", ["pending"]) => AdminReply::json(200, &state.pending()),
        ("POST", ["pending", number]) => approve(state, uid, number, body).await,
        ("POST", ["explain"]) => explain(state, body).await,
        ("POST", ["identities"]) => assign_identity(state, body).await,
        _ => AdminReply::error(404, "there is no such thing here"),
    }
}

/// Ready once a denial was seen, and as long as records can be written.
fn readiness(state: &AdminState) -> AdminReply {
    let health = state.log.health();
    let tested = state.ready.load(Ordering::Acquire);
    let ready = tested && health.ready;
    let value = json!({ "ready": ready, "self_test": tested, "log": health.ready, "trouble": health.trouble });
    AdminReply::json(if ready { 200 } else { 503 }, &value)
}

fn cut_connection(state: &AdminState, id: &str) -> AdminReply {
    let cut = id.parse().is_ok_and(|id| state.live.cut(id, Reason::CutByOperator));
    match cut {
        true => AdminReply::json(200, &json!({ "cut": true })),
        false => AdminReply::error(404, format!("no open connection `{id}`: see `sandbar status`")),
    }
}

/// Loads the policies now. That they are bad is an answer, not an error.
async fn reload(state: &AdminState, body: &[u8]) -> AdminReply {
    let wait = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let wait = wait.get("wait").and_then(Value::as_bool).unwrap_or_default();
    let reloader = state.reloader.clone();
    let loaded = tokio::task::spawn_blocking(move || reloader.reload()).await;
    match loaded {
        Ok(Ok(loaded)) => {
            if wait {
                loaded.wait_closed(&state.live).await;
            }
            let (generation, cut) = (loaded.generation(), loaded.cut_count());
            AdminReply::json(200, &json!({ "generation": generation, "cut": cut }))
        }
        Ok(Err(trouble)) => {
            let rules = state.rules.load();
            let (generation, closed) = (rules.generation(), rules.is_closed());
            let told = json!({ "generation": generation, "closed": closed, "trouble": trouble });
            AdminReply::json(200, &told)
        }
        Err(error) => AdminReply::error(500, error),
    }
}

/// Makes a grant. The kernel says who asks; whom they ask for is theirs to say.
async fn create_grant(state: &AdminState, uid: Option<u32>, body: &[u8]) -> AdminReply {
    match serde_json::from_slice::<GrantRequest>(body) {
        Ok(wish) => submit_grant(state, uid, wish).await.unwrap_or_else(|refused| refused),
        Err(error) => AdminReply::error(400, format!("the request is not understood: {error}")),
    }
}

async fn submit_grant(
    state: &AdminState,
    uid: Option<u32>,
    wish: GrantRequest,
) -> Result<AdminReply, AdminReply> {
    let wish = GrantRequest { by: name_with_uid(&wish.by, uid), ..wish };
    // In a task of its own: whoever stops waiting for it does not stop it halfway.
    let made = tokio::spawn(state.reloader.clone().create_grant(wish)).await;
    let made = made.unwrap_or_else(|error| Err(error.into()));
    let (kept, generation) = made.map_err(|error| AdminReply::error(409, format!("{error:#}")))?;
    let mut told = grant_json(&kept);
    told["generation"] = generation.into();
    Ok(AdminReply::json(200, &told))
}

/// Grants what was refused, for a while.
async fn approve(state: &AdminState, uid: Option<u32>, number: &str, body: &[u8]) -> AdminReply {
    let Some(refused) = number.parse().ok().and_then(|number| state.pending.find(number)) else {
        return AdminReply::error(
            404,
            format!("no refusal {number} is pending: see `sandbar pending`"),
        );
    };
    let ApprovalRequest { seconds, why, by } = match serde_json::from_slice(body) {
        Ok(approval) => approval,
        Err(error) => {
            return AdminReply::error(400, format!("the request is not understood: {error}"));
        }
    };
    let host = match refused.port {
        Some(port) => format!("{}:{port}", refused.host),
        None => refused.host,
    };
    let (methods, paths, bytes) = (None, None, None);
    let wish =
        GrantRequest { sandbox: refused.sandbox, host, methods, paths, bytes, seconds, why, by };
    let made = submit_grant(state, uid, wish).await;
    if made.is_ok() {
        state.pending.remove(refused.number);
    }
    made.unwrap_or_else(|refused| refused)
}

async fn revoke_grant(state: &AdminState, uid: Option<u32>, id: &str) -> AdminReply {
    let Ok(id) = id.parse() else {
        return AdminReply::error(400, "a grant is named by its number");
    };
    let (reloader, by) = (state.reloader.clone(), name_with_uid("the operator", uid));
    match tokio::task::spawn_blocking(move || reloader.revoke_grant(id, &by)).await {
        Ok(Ok(loaded)) => {
            let (generation, cut) = (loaded.generation(), loaded.cut_count());
            AdminReply::json(200, &json!({ "id": id, "generation": generation, "cut": cut }))
        }
        Ok(Err(error)) => AdminReply::error(404, format!("{error:#}")),
        Err(error) => AdminReply::error(500, error),
    }
}

/// Who somebody says to be, and who the kernel says they are.
fn name_with_uid(by: &str, uid: Option<u32>) -> String {
    let uid = uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
    format!("{by} (uid {uid})")
}

/// Gives a sandbox of a warm pool its identity, once.
async fn assign_identity(state: &AdminState, body: &[u8]) -> AdminReply {
    let identity = match serde_json::from_slice(body) {
        Ok(identity) => identity,
        Err(error) => {
            return AdminReply::error(400, format!("the request is not understood: {error}"));
        }
    };
    let reloader = state.reloader.clone();
    match tokio::task::spawn_blocking(move || reloader.assign_identity(identity)).await {
        Ok(Ok(generation)) => AdminReply::json(200, &json!({ "generation": generation })),
        Ok(Err(error)) => AdminReply::error(409, format!("{error:#}")),
        Err(error) => AdminReply::error(500, error),
    }
}

/// Explains one attempt by the rules in force, whatever the files say.
async fn explain(state: &AdminState, body: &[u8]) -> AdminReply {
    let question: ExplainRequest = match serde_json::from_slice(body) {
        Ok(question) => question,
        Err(error) => {
            return AdminReply::error(400, format!("the request is not understood: {error}"));
        }
    };
    let rules = state.rules.load_full();
    let answered = tokio::task::spawn_blocking(move || question.answer(&rules)).await;
    match answered {
        Ok(Ok(answer)) => match serde_json::to_value(&answer) {
            Ok(answer) => AdminReply::json(200, &answer),
            Err(error) => AdminReply::error(500, error),
        },
        Ok(Err(error)) => AdminReply::error(400, format!("{error:#}")),
        Err(error) => AdminReply::error(500, error),
    }
}

async fn explain_dns(state: &AdminState, body: &[u8]) -> AdminReply {
    let request: DnsRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => {
            return AdminReply::error(400, format!("the request is not understood: {error}"));
        }
    };
    let sandbox = match SandboxId::parse(&request.sandbox) {
        Ok(sandbox) => sandbox,
        Err(error) => return AdminReply::error(400, format!("the sandbox is not good: {error}")),
    };
    let name = match DomainName::parse_question(&request.name) {
        Ok(name) => name,
        Err(error) => return AdminReply::error(400, format!("the name is not good: {error}")),
    };
    let told: DnsExplanation = state.filter.explain(&sandbox, &name, QueryType(request.kind)).await;
    match serde_json::to_value(&told) {
        Ok(told) => AdminReply::json(200, &told),
        Err(error) => AdminReply::error(500, error),
    }
}

/// Asks the running program.
pub async fn send_command(
    socket: &Path,
    method: &str,
    path: &str,
    body: &Value,
) -> anyhow::Result<String> {
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
    let read = stream.take(MAX_ANSWER).read_to_string(&mut answer).await;
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
