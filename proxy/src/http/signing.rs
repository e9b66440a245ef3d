//! Requests that are signed for AWS, between the phases of a request: what has to be known of the body is read before
//! the head leaves.

use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use pingora_core::prelude::Result;
use pingora_proxy::Session;
use rules::Reason;
use tokio::time::timeout;

use super::context::RequestState;
use crate::credential::sigv4::{MAX_HELD_OPEN, RequestSigning, SigningFault};
use crate::quota::{RequestQuota, ReservedBuffer};
use crate::report::refusal::Refusal;

/// How long the client may take to send a body that has to be held.
const HELD_TIMEOUT: Duration = Duration::from_secs(120);
/// The coding in which chunks of AWS are, which does not concern what is in them.
const CHUNKS: &[u8] = b"aws-chunked";

/// Reads the body if it must be known before the request can be signed. `length` is what the request announces.
pub(super) async fn hold_body(
    session: &mut Session,
    signing: &mut RequestSigning,
    quota: &mut RequestQuota,
    length: Option<u64>,
) -> Result<(), Refusal> {
    let Some(limit) = signing.must_hold() else { return Ok(()) };
    if session.req_header().headers.contains_key("expect") {
        let written = session.write_continue_response().await;
        written.map_err(|_| Refusal::from(Reason::BodyLate))?;
    }
    let buffer = ReservedBuffer::new(&mut quota.buffers);
    let read = timeout(HELD_TIMEOUT, read_body(session, limit, length, buffer)).await;
    let body = read.map_err(|_| Refusal::from(Reason::BodyLate))??;
    Ok(signing.hold(body)?)
}

/// Reads a body to its end, and leaves its last bytes in Pingora's buffer for retries: Pingora passes a body that has
/// ended on only from there, and `request_body_filter` puts all of it in their place. The buffer takes 64 KiB, so it is
/// turned on when no more than that is to come.
async fn read_body(
    session: &mut Session,
    limit: u64,
    length: Option<u64>,
    mut body: ReservedBuffer<'_>,
) -> Result<Bytes, Refusal> {
    loop {
        let left = length.unwrap_or(MAX_HELD_OPEN).saturating_sub(body.len());
        if left <= MAX_HELD_OPEN {
            session.downstream_session.enable_retry_buffering();
        }
        match session.downstream_session.read_request_body().await {
            Ok(Some(bytes)) if body.len() + bytes.len() as u64 > limit => {
                return Err(SigningFault::TooLong.into());
            }
            Ok(Some(bytes)) => body.extend(&bytes, limit)?,
            Ok(None) => break,
            Err(_) => {
                return Err(
                    Refusal::from(Reason::BodyLate).with_detail("the client went away before its end")
                );
            }
        }
    }
    let is_kept = session.downstream_session.get_retry_buffer().is_some();
    match body.len() == 0 || is_kept {
        true => Ok(body.freeze()),
        false => Err(Reason::Internal.into()), // it would wait for a body that never comes
    }
}

/// Returns how the content of a body is compressed, which its chunks hide.
pub(super) fn content_coding(fields: &HeaderMap) -> Option<Vec<u8>> {
    let coding = fields.get("content-encoding")?.as_bytes();
    let codings = coding.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    let rest: Vec<&[u8]> = codings.filter(|coding| !coding.eq_ignore_ascii_case(CHUNKS)).collect();
    Some(rest.join(&b","[..])).filter(|rest| !rest.is_empty())
}

impl RequestState {
    /// Takes the next bytes of a signed body as they came, and leaves what the body consists of.
    pub(super) fn open_signed_body(&mut self, body: &mut Option<Bytes>, last: bool) -> Result<()> {
        self.with_signing(body, |signing, bytes| signing.take(bytes, last))
    }

    /// Replaces the next bytes that a signed body consists of by what leaves for them.
    pub(super) fn seal_signed_body(&mut self, body: &mut Option<Bytes>, last: bool) -> Result<()> {
        self.with_signing(body, |signing, bytes| signing.seal(bytes, last))
    }

    fn with_signing(
        &mut self,
        body: &mut Option<Bytes>,
        pass: impl FnOnce(&mut RequestSigning, Option<Bytes>) -> Result<Option<Bytes>, SigningFault>,
    ) -> Result<()> {
        let Some(signing) = &mut self.departed()?.signing else { return Ok(()) };
        *body = pass(signing, body.take()).map_err(|fault| self.fail(fault))?;
        Ok(())
    }
}
