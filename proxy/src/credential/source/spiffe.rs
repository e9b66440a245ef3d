//! JWT-SVIDs of a SPIFFE Workload API: one unary gRPC call over a unix socket.
//!
//! The two messages have three fields each, so they are written and read by hand (protobuf's length-delimited fields,
//! wire type 2; field numbers from workload.proto of the SPIFFE specification).

use std::path::Path;
use std::time::Duration;

use ::http::{HeaderMap, Method, Request};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::{Buf, BufMut, Bytes};
use rules::credential::SpiffeSource;
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use zeroize::Zeroizing;

use super::Fetched;
use super::assertion::unix_seconds;
use super::endpoint::ANSWER;
use crate::credential::error::{CredentialError, EndpointFault, printable};
use crate::credential::secret_file::SecretFiles;
use crate::credential::value::CredentialValue;

/// Bytes before a gRPC message: a flag and the length.
const FRAME_HEAD: usize = 5;
const CALL: &str = "http://localhost/SpiffeWorkloadAPI/FetchJWTSVID";
/// The field that keeps others from being tricked into calling the API.
const SECURITY_FIELD: &str = "workload.spiffe.io";

pub(super) async fn fetch(
    source: &SpiffeSource,
    files: &SecretFiles,
    timeout: Duration,
) -> Result<Fetched, CredentialError> {
    let socket = files.resolve(source.socket.strip_prefix("unix://").unwrap_or(&source.socket));
    let fault = |fault| CredentialError::Endpoint { host: socket.display().to_string(), fault };
    let malformed = |why: &str| fault(EndpointFault::Answer(why.to_owned()));
    let message = call(&socket, &source.audience, source.id.as_deref(), timeout).await.map_err(fault)?;
    let token =
        first_token(&message, source.id.as_deref()).ok_or_else(|| malformed("it has no such identity"))?;
    let life = time_left(token).ok_or_else(|| malformed("its identity is not a token with an end"))?;
    let value =
        CredentialValue::parse(token).map_err(|error| fault(EndpointFault::Value(Box::new(error))))?;
    Ok(Fetched { value, life: Some(life) })
}

/// Calls `FetchJWTSVID` and returns the message of the answer.
async fn call(
    socket: &Path,
    audience: &[String],
    id: Option<&str>,
    timeout: Duration,
) -> Result<Zeroizing<Vec<u8>>, EndpointFault> {
    let protocol = |error: h2::Error| EndpointFault::Protocol(printable(&error.to_string()));
    let stream =
        UnixStream::connect(socket).await.map_err(|error| EndpointFault::Connect(error.to_string()))?;
    let mut builder = h2::client::Builder::new();
    builder.max_header_list_size(16 << 10).enable_push(false);
    let (sender, connection) = builder.handshake(stream).await.map_err(protocol)?;
    let mut tasks = JoinSet::new(); // ends the connection with this function
    tasks.spawn(connection);
    let mut sender = sender.ready().await.map_err(protocol)?;
    let request = Request::builder()
        .method(Method::POST)
        .uri(CALL)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-timeout", format!("{}m", timeout.as_millis().min(99_999_999)))
        .header(SECURITY_FIELD, "true")
        .body(())
        .map_err(|error| EndpointFault::Protocol(error.to_string()))?;
    let (answer, mut body) = sender.send_request(request, false).map_err(protocol)?;
    body.send_data(encode_request(audience, id), true).map_err(protocol)?;
    let answer = answer.await.map_err(protocol)?;
    if answer.status() != 200 {
        return Err(EndpointFault::Status { status: answer.status().as_u16(), said: String::new() });
    }
    check_status(answer.headers())?; // an answer without body has its status there
    let mut body = answer.into_body();
    let mut message = Zeroizing::new(Vec::with_capacity(ANSWER)); // no copies while it grows
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(protocol)?;
        body.flow_control().release_capacity(piece.len()).map_err(protocol)?;
        if message.len() + piece.len() > ANSWER {
            return Err(EndpointFault::Long(ANSWER));
        }
        message.extend_from_slice(&piece);
    }
    if let Some(trailers) = body.trailers().await.map_err(protocol)? {
        check_status(&trailers)?;
    }
    let mut framed = &message[..];
    let plain = framed.len() >= FRAME_HEAD && framed.get_u8() == 0;
    if !plain || framed.get_u32() as usize != framed.len() {
        return Err(EndpointFault::Answer("it is not one gRPC message".to_owned()));
    }
    Ok(Zeroizing::new(framed.to_vec()))
}

/// Fails unless the call succeeded, if these fields say how it ended.
fn check_status(fields: &HeaderMap) -> Result<(), EndpointFault> {
    let text = |name: &str| fields.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status") {
        None | Some("0") => Ok(()),
        Some(code) => {
            let said = text("grpc-message").unwrap_or_default();
            Err(EndpointFault::Answer(printable(&format!("gRPC status {code} {said}"))))
        }
    }
}

/// Encodes `JWTSVIDRequest { repeated string audience = 1; string spiffe_id = 2; }` in a gRPC frame.
fn encode_request(audience: &[String], id: Option<&str>) -> Bytes {
    let mut message = Vec::new();
    let fields = audience.iter().map(|name| (1, name.as_str())).chain(id.map(|id| (2, id)));
    for (number, text) in fields {
        message.put_u8(number << 3 | 2);
        let mut length = text.len();
        while length >= 0x80 {
            message.put_u8(length as u8 | 0x80);
            length >>= 7;
        }
        message.put_u8(length as u8);
        message.put_slice(text.as_bytes());
    }
    let mut frame = Vec::with_capacity(FRAME_HEAD + message.len());
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(&message);
    frame.into()
}

/// Returns the token of the identity asked for, or of the first, from
/// `JWTSVIDResponse { repeated JWTSVID svids = 1; }` with `JWTSVID { string spiffe_id = 1; string svid = 2; }`.
fn first_token<'a>(message: &'a [u8], id: Option<&str>) -> Option<&'a str> {
    let identities = fields(message)?.into_iter().filter(|(number, _)| *number == 1);
    for (_, identity) in identities {
        let parts = fields(identity)?;
        let part = |wanted: u64| parts.iter().find(|(number, _)| *number == wanted).map(|(_, text)| *text);
        let named = part(1).and_then(|name| std::str::from_utf8(name).ok()).unwrap_or_default();
        if id.is_none_or(|id| id == named) {
            return part(2).and_then(|token| std::str::from_utf8(token).ok());
        }
    }
    None
}

/// Splits a message into its length-delimited fields. Others are skipped; a malformed message is none.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        match tag & 7 {
            0 => drop(varint(&mut message)?),
            1 => message = message.get(8..)?,
            2 => {
                let length = usize::try_from(varint(&mut message)?).ok()?;
                let (field, rest) = message.split_at_checked(length)?;
                found.push((tag >> 3, field));
                message = rest;
            }
            5 => message = message.get(4..)?,
            _ => return None,
        }
    }
    Some(found)
}

fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// How long a token is still valid, by its own `exp`. The agent signed it; who receives it verifies that.
fn time_left(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let claims = token.split('.').nth(1)?;
    let claims = Zeroizing::new(URL_SAFE_NO_PAD.decode(claims).ok()?);
    let Claims { exp } = serde_json::from_slice(&claims).ok()?;
    Some(Duration::from_secs(exp.saturating_sub(unix_seconds())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_messages_are_read_to_nothing() {
        for message in [
            &[0x0a][..],
            &[0x0a, 0x05, 0x12],
            &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
            &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f, 0x00],
            &[0x0b, 0x00],
            &[0x09, 0x00],
            &[0x0d, 0x00],
            &[],
        ] {
            assert_eq!(first_token(message, None), None, "{message:02x?}");
        }
    }

    #[test]
    fn the_identity_asked_for_is_found_among_unknown_fields() {
        let identity = |id: &str, token: &str| {
            let mut inner = Vec::new();
            for (number, text) in [(1u8, id), (2, token), (3, "a hint")] {
                inner.extend([number << 3 | 2, text.len() as u8]);
                inner.extend(text.as_bytes());
            }
            [&[0x0a, inner.len() as u8][..], &inner, &[0x10, 0x07]].concat() // and a number that is not known
        };
        let message =
            [identity("spiffe://a/one", "first-token"), identity("spiffe://a/two", "second-token")].concat();
        assert_eq!(first_token(&message, None), Some("first-token"));
        assert_eq!(first_token(&message, Some("spiffe://a/two")), Some("second-token"));
        assert_eq!(first_token(&message, Some("spiffe://a/three")), None);
    }

    #[test]
    fn a_long_audience_is_encoded() {
        let name = "x".repeat(300);
        let frame = encode_request(&[name.clone()], Some("spiffe://a/one"));
        let message = frame.get(FRAME_HEAD..).unwrap();
        let found = fields(message).unwrap();
        assert_eq!(found, [(1, name.as_bytes()), (2, b"spiffe://a/one".as_slice())]);
    }
}
