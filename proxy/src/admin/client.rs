//! The client side of the admin API, for the commands that ask a running instance.

use std::path::Path;

use anyhow::{Context, bail};
use http::header::{CONTENT_TYPE, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

/// Largest answer that is read.
const MAX_ANSWER: usize = 16 << 20;

/// Sends one command to the running instance and returns the body of its answer.
///
/// # Errors
///
/// Returns the instance's own message if it refuses the command.
pub async fn send_command(socket: &Path, method: &str, path: &str, body: &Value) -> anyhow::Result<String> {
    let shown = socket.display();
    let stream = UnixStream::connect(socket)
        .await
        .with_context(|| format!("cannot reach {shown}: is `sandbar serve` running?"))?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "sandbar")
        .header(CONTENT_TYPE, "application/json")
        .body(body)?;
    let (status, body) = exchange(stream, request)
        .await
        .with_context(|| format!("{shown} does not answer as an instance of Sandbar"))?;
    if status == StatusCode::OK {
        return Ok(body);
    }
    let refusal: Value = serde_json::from_str(&body).unwrap_or_default();
    bail!("{}", refusal.get("error").and_then(Value::as_str).unwrap_or(body.trim()));
}

async fn exchange(stream: UnixStream, request: Request<String>) -> anyhow::Result<(StatusCode, String)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection); // moves the bytes while we wait for the answer
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    connection.abort();
    let body = body.map_err(anyhow::Error::from_boxed)?.to_bytes();
    Ok((status, String::from_utf8(body.into())?))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn an_answer_is_its_body_and_a_refusal_is_its_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let listener = UnixListener::bind(&path).unwrap();
        for (answer, result) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", Ok("{}")),
            ("HTTP/1.1 409 Conflict\r\nContent-Length: 17\r\n\r\n{\"error\":\"taken\"}", Err("taken")),
            ("HTTP/1.1 502 Bad Gateway\r\n\r\nplain text\n", Err("plain text")),
            ("SSH-2.0-x\r\n", Err("does not answer")),
            ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", Err("does not answer")),
            ("", Err("does not answer")),
        ] {
            let serve = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
                stream.write_all(answer.as_bytes()).await.unwrap();
            };
            let send = send_command(&path, "POST", "/x", &Value::Bool(true));
            match (tokio::join!(serve, send).1, result) {
                (Ok(body), Ok(wanted)) => assert_eq!(body, wanted),
                (Err(error), Err(wanted)) => {
                    assert!(error.to_string().contains(wanted), "{answer:?}: {error:#}");
                }
                (got, _) => panic!("{answer:?}: {got:?}"),
            }
        }
    }
}
