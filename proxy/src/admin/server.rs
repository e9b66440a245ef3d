//! The admin API: HTTP/1.1 on a unix socket, for commands, probes and Prometheus.
//!
//! Only the owner can open the socket, and a sandbox never sees it. The kernel reports the uid of every caller
//! (`SO_PEERCRED`), so a record of a grant does not depend on the name that the caller gives.

use std::convert::Infallible;
use std::fmt::Display;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rules::facts::QueryType;
use rules::ids::SandboxId;
use rules::{DomainName, Reason};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;

use crate::admin::explain::ExplainRequest;
use crate::admin::status::{AdminState, grant_json, hanging_files};
use crate::policy::grants::GrantRequest;
use crate::policy::store::LoadReport;

/// Largest request head, and largest request body.
const MAX_REQUEST: usize = 16 << 10;
/// How long one command may take; also how long an idle connection stays open.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(15);
/// How long one connection may send commands. It bounds a client that does not read its answers.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Connections at once, and therefore commands at once.
const MAX_CONNECTIONS: usize = 16;

/// The body of `POST /dns`, for `sandbar dns`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsRequest {
    pub sandbox: String,
    pub name: String,
    pub kind: u16,
}

/// The body of `POST /pending/{number}`, for `sandbar pending approve`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApprovalRequest {
    pub seconds: u64,
    pub why: String,
    pub by: String,
}

/// One request, read in full.
struct Command {
    /// The uid of the caller, from the kernel.
    uid: Option<u32>,
    method: Method,
    path: String,
    body: Bytes,
}

/// Why a command failed.
struct CommandError {
    status: StatusCode,
    message: String,
}

/// The bound admin socket.
pub struct AdminServer {
    listener: UnixListener,
}

impl AdminServer {
    /// Binds the socket with mode 0600, replacing one that an earlier process left behind. No other instance can
    /// be using it: [`audit::Log::open`] has locked the log directory beside it.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        match std::fs::remove_file(path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot remove {shown}")),
        }
        let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {shown}"))?;
        let owner = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(path, owner).with_context(|| format!("cannot set the mode of {shown}"))?;
        Ok(AdminServer { listener })
    }

    pub async fn serve(self, state: Arc<AdminState>) {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await; // out of file descriptors
                continue;
            };
            let state = state.clone();
            tokio::spawn(async move {
                serve_connection(stream, |command| respond(state.clone(), command)).await;
                drop(slot);
            });
        }
    }
}

/// Serves the commands of one connection, each within [`COMMAND_TIMEOUT`].
async fn serve_connection<F>(stream: UnixStream, respond: impl Fn(Command) -> F)
where
    F: Future<Output = Response<String>>,
{
    let uid = stream.peer_cred().map(|peer| peer.uid()).ok();
    let service = service_fn(|request: Request<Incoming>| async {
        let answer = async {
            match read_command(uid, request).await {
                Ok(command) => respond(command).await,
                Err(error) => error.into_response(),
            }
        };
        let answer = timeout(COMMAND_TIMEOUT, answer).await.unwrap_or_else(|_| {
            CommandError::new(StatusCode::SERVICE_UNAVAILABLE, "the command timed out").into_response()
        });
        Ok::<_, Infallible>(answer)
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(COMMAND_TIMEOUT)
            .max_buf_size(MAX_REQUEST)
            .serve_connection(TokioIo::new(stream), service)
    );
    // An error here is the client's: it sent no HTTP or went away. hyper has answered what can be answered.
    if timeout(CONNECTION_TIMEOUT, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown(); // finishes the command in flight
        drop(timeout(COMMAND_TIMEOUT, connection).await);
    }
}

async fn read_command(uid: Option<u32>, request: Request<Incoming>) -> Result<Command, CommandError> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_REQUEST).collect().await.map_err(|error| {
        match error.is::<LengthLimitError>() {
            true => CommandError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the request is larger than {MAX_REQUEST} bytes"),
            ),
            false => CommandError::bad_request(error),
        }
    })?;
    let (method, path) = (head.method, head.uri.path().to_owned());
    Ok(Command { uid, method, path, body: body.to_bytes() })
}

/// Answers one command. Every answer but the metrics is JSON.
async fn respond(state: Arc<AdminState>, command: Command) -> Response<String> {
    let result = match (command.method.as_str(), command.path.trim_matches('/')) {
        ("GET", "metrics") => {
            return response(StatusCode::OK, "text/plain; version=0.0.4", state.metrics());
        }
        ("GET", "ready") => return readiness(&state),
        _ => execute(&state, &command).await,
    };
    match result {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(error) => error.into_response(),
    }
}

async fn execute(state: &AdminState, command: &Command) -> Result<Value, CommandError> {
    let Command { uid, method, path, body } = command;
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match (method.as_str(), parts.as_slice()) {
        ("GET", ["health"]) => Ok(json!({ "healthy": true })),
        ("GET", ["jwks"]) => Ok(state.jwks()),
        ("GET", ["status"]) => Ok(state.status()),
        ("GET", ["sandboxes", id]) => describe_sandbox(state, id),
        ("GET", ["connections"]) => Ok(state.connections()),
        ("DELETE", ["connections", id]) => cut_connection(state, id),
        ("POST", ["dns"]) => explain_dns(state, body).await,
        ("POST", ["reload"]) => reload(state, body).await,
        ("GET", ["budgets"]) => Ok(state.budgets()),
        ("GET", ["grants"]) => Ok(state.grants()),
        ("POST", ["grants"]) => submit_grant(state, *uid, parse_body(body)?).await,
        ("DELETE", ["grants", id]) => revoke_grant(state, *uid, id).await,
        ("GET", ["pending"]) => Ok(state.pending()),
        ("POST", ["pending", number]) => approve(state, *uid, number, body).await,
        ("POST", ["explain"]) => explain(state, body).await,
        ("GET", ["sandboxes", id, "flows"]) => list_flows(state, id),
        ("GET", ["canaries"]) => Ok(state.list_canaries()),
        ("POST", ["canaries"]) => create_canary(state, *uid, body).await,
        ("DELETE", ["canaries", name]) => remove_canary(state, *uid, name).await,
        ("POST", ["identities"]) => assign_identity(state, body).await,
        _ => Err(CommandError::not_found(format!("unknown command: {method} {path}"))),
    }
}

/// Ready once the self-test has seen a denial, and while records can be written.
fn readiness(state: &AdminState) -> Response<String> {
    let health = state.log.health();
    let tested = state.ready.load(Ordering::Acquire);
    let ready = tested && health.ready;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let value = json!({
        "ready": ready,
        "self_test": tested,
        "log": health.ready,
        "trouble": health.trouble,
        "hanging_files": hanging_files(),
    });
    json_response(status, &value)
}

fn describe_sandbox(state: &AdminState, id: &str) -> Result<Value, CommandError> {
    let described = SandboxId::parse(id).ok().and_then(|id| state.sandbox(&id));
    described.ok_or_else(|| CommandError::not_found(format!("no sandbox `{id}` is configured")))
}

/// Lists which bank's text went where.
fn list_flows(state: &AdminState, id: &str) -> Result<Value, CommandError> {
    let flows = SandboxId::parse(id).ok().and_then(|id| state.flows(&id));
    flows.ok_or_else(|| CommandError::not_found(format!("no sandbox `{id}` is configured")))
}

fn cut_connection(state: &AdminState, id: &str) -> Result<Value, CommandError> {
    match id.parse().is_ok_and(|id| state.live.cut(id, Reason::CutByOperator)) {
        true => Ok(json!({ "cut": true })),
        false => Err(CommandError::not_found(format!("no open connection `{id}`: see `sandbar status`"))),
    }
}

/// Loads the policies now. An invalid policy is an answer, not an error.
async fn reload(state: &AdminState, body: &[u8]) -> Result<Value, CommandError> {
    let options = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let wait = options.get("wait").and_then(Value::as_bool).unwrap_or_default();
    match state.reloader.reload().await {
        Ok(loaded) => {
            let LoadReport { rules, settings } = loaded;
            if wait {
                rules.wait_closed(&state.live).await;
            }
            Ok(json!({
                "generation": rules.generation(),
                "cut": rules.cut_count(),
                "listeners_opened": settings.opened,
                "listeners_closed": settings.closed,
                "unapplied": settings.unapplied,
            }))
        }
        Err(trouble) => {
            let rules = state.rules.load();
            let (generation, closed) = (rules.generation(), rules.is_closed());
            Ok(json!({ "generation": generation, "closed": closed, "trouble": trouble }))
        }
    }
}

/// Makes a grant. `by` is the name that the caller gives; the uid beside it comes from the kernel.
async fn submit_grant(
    state: &AdminState,
    uid: Option<u32>,
    wish: GrantRequest,
) -> Result<Value, CommandError> {
    let wish = GrantRequest { by: name_with_uid(&wish.by, uid), ..wish };
    // In its own task: a client that disconnects must not stop it between the record and the rules.
    let created = tokio::spawn(state.reloader.clone().create_grant(wish)).await?;
    let (grant, generation) = created.map_err(CommandError::conflict)?;
    let mut value = grant_json(&grant);
    value["generation"] = generation.into();
    Ok(value)
}

/// Grants what was refused, for a while.
async fn approve(
    state: &AdminState,
    uid: Option<u32>,
    number: &str,
    body: &[u8],
) -> Result<Value, CommandError> {
    let Some(refused) = number.parse().ok().and_then(|number| state.pending.find(number)) else {
        let message = format!("no refusal {number} is pending: see `sandbar pending`");
        return Err(CommandError::not_found(message));
    };
    let ApprovalRequest { seconds, why, by } = parse_body(body)?;
    let host = match refused.port {
        Some(port) => format!("{}:{port}", refused.host),
        None => refused.host,
    };
    let (methods, paths, bytes) = (None, None, None);
    let wish = GrantRequest { sandbox: refused.sandbox, host, methods, paths, bytes, seconds, why, by };
    let value = submit_grant(state, uid, wish).await?;
    state.pending.remove(refused.number);
    Ok(value)
}

async fn revoke_grant(state: &AdminState, uid: Option<u32>, id: &str) -> Result<Value, CommandError> {
    let id = id.parse().map_err(|_| CommandError::bad_request("a grant is named by its number"))?;
    let by = name_with_uid("the operator", uid);
    let revoked = state.reloader.clone().revoke_grant(id, &by).await;
    let loaded = revoked.map_err(|error| CommandError::not_found(format!("{error:#}")))?;
    Ok(json!({ "id": id, "generation": loaded.generation(), "cut": loaded.cut_count() }))
}

/// The name that a caller gives, with the uid that the kernel reports.
fn name_with_uid(by: &str, uid: Option<u32>) -> String {
    let uid = uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
    format!("{by} (uid {uid})")
}

/// Assigns an identity to a sandbox of a warm pool, once.
async fn assign_identity(state: &AdminState, body: &[u8]) -> Result<Value, CommandError> {
    let identity = parse_body(body)?;
    let assigned = state.reloader.clone().assign_identity(identity).await;
    let generation = assigned.map_err(CommandError::conflict)?;
    Ok(json!({ "generation": generation }))
}

/// Makes a canary. In its own task, as for a grant.
async fn create_canary(state: &AdminState, uid: Option<u32>, body: &[u8]) -> Result<Value, CommandError> {
    let request = parse_body(body)?;
    let changes = state.canary_changes(name_with_uid("the operator", uid));
    tokio::spawn(changes.create(request)).await?.map_err(CommandError::conflict)
}

async fn remove_canary(state: &AdminState, uid: Option<u32>, name: &str) -> Result<Value, CommandError> {
    let changes = state.canary_changes(name_with_uid("the operator", uid));
    tokio::spawn(changes.remove(name.to_owned())).await?.map_err(CommandError::conflict)
}

/// Explains one attempt by the rules in force, whatever the files say.
async fn explain(state: &AdminState, body: &[u8]) -> Result<Value, CommandError> {
    let question: ExplainRequest = parse_body(body)?;
    let rules = state.rules.load_full();
    let reply = spawn_blocking(move || question.answer(&rules)).await?;
    let reply = reply.map_err(|error| CommandError::bad_request(format!("{error:#}")))?;
    serde_json::to_value(&reply).map_err(CommandError::internal)
}

async fn explain_dns(state: &AdminState, body: &[u8]) -> Result<Value, CommandError> {
    let request: DnsRequest = parse_body(body)?;
    let sandbox = SandboxId::parse(&request.sandbox)
        .map_err(|error| CommandError::bad_request(format!("invalid sandbox: {error}")))?;
    let name = DomainName::parse_question(&request.name)
        .map_err(|error| CommandError::bad_request(format!("invalid name: {error}")))?;
    let explanation = state.filter.explain(&sandbox, &name, QueryType(request.kind)).await;
    serde_json::to_value(&explanation).map_err(CommandError::internal)
}

fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, CommandError> {
    serde_json::from_slice(body)
        .map_err(|error| CommandError::bad_request(format!("invalid request: {error}")))
}

fn json_response(status: StatusCode, value: &Value) -> Response<String> {
    response(status, "application/json", format!("{value}\n"))
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

impl CommandError {
    fn new(status: StatusCode, message: impl Display) -> Self {
        CommandError { status, message: message.to_string() }
    }

    fn bad_request(message: impl Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    fn not_found(message: impl Display) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    fn conflict(error: anyhow::Error) -> Self {
        Self::new(StatusCode::CONFLICT, format!("{error:#}"))
    }

    fn internal(error: impl Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error)
    }

    fn into_response(self) -> Response<String> {
        json_response(self.status, &json!({ "error": self.message }))
    }
}

impl From<JoinError> for CommandError {
    fn from(error: JoinError) -> Self {
        Self::internal(error)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Sends `sent` to a server that echoes the body, or never answers `/hang`; returns everything it answers.
    async fn exchange(sent: &str) -> String {
        let (mut client, server) = UnixStream::pair().unwrap();
        let echo = async |command: Command| match command.path.as_str() {
            "/hang" => std::future::pending().await,
            "/conflict" => CommandError::conflict(anyhow::anyhow!("taken")).into_response(),
            path => {
                let body = String::from_utf8(command.body.to_vec()).unwrap();
                let uid = command.uid.is_some();
                json_response(StatusCode::OK, &json!({ "path": path, "body": body, "uid": uid }))
            }
        };
        let ask = async {
            client.write_all(sent.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            // A reset follows the answer where the server has not read everything.
            drop(client.read_to_end(&mut answer).await);
            String::from_utf8(answer).unwrap()
        };
        tokio::join!(serve_connection(server, echo), ask).1
    }

    #[tokio::test(start_paused = true)]
    async fn requests_are_answered_on_one_connection_with_proper_status_lines() {
        let get = "GET /status?x=1 HTTP/1.1\r\nHost: s\r\n\r\n";
        let post = "POST /conflict HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\n{}";
        let chunked = "POST /echo HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n\
                       2\r\nhi\r\n0\r\n\r\n";
        let answers = exchange(&format!("{get}{post}{chunked}")).await;
        let lines: Vec<&str> = answers.lines().filter(|line| line.starts_with("HTTP/")).collect();
        assert_eq!(lines, ["HTTP/1.1 200 OK", "HTTP/1.1 409 Conflict", "HTTP/1.1 200 OK"]);
        for line in [
            r#"{"body":"","path":"/status","uid":true}"#,
            r#"{"error":"taken"}"#,
            r#"{"body":"hi","path":"/echo","uid":true}"#,
        ] {
            assert!(answers.contains(line), "{line} is not in {answers}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn p17_what_is_too_large_or_too_slow_is_refused() {
        let large = "x".repeat(MAX_REQUEST + 1);
        let length = large.len();
        for (what, sent, status) in [
            ("a large head", format!("GET /{large} HTTP/1.1\r\nHost: s\r\n\r\n"), "431"),
            (
                "a large body",
                format!("POST / HTTP/1.1\r\nHost: s\r\nContent-Length: {length}\r\n\r\n{large}"),
                "413",
            ),
            (
                "a large body of unknown length",
                format!(
                    "POST / HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n{large}"
                ),
                "413",
            ),
            ("no HTTP", "hello\r\n\r\n".to_owned(), "400"),
            ("a slow command", "GET /hang HTTP/1.1\r\nHost: s\r\n\r\n".to_owned(), "503"),
            ("half a body", "POST / HTTP/1.1\r\nHost: s\r\nContent-Length: 9\r\n\r\n{".to_owned(), "503"),
            ("half a head", "GET / HTTP/1.1\r\n".to_owned(), ""),
            ("silence", String::new(), ""),
        ] {
            let answer = exchange(&sent).await;
            assert_eq!(answer.split(' ').nth(1).unwrap_or_default(), status, "{what}: {answer}");
        }
    }
}
