//! Signatures of AWS, version 4: a request that the sandbox signed with keys of its own, or not at all, is signed with
//! Sandbar's.
//!
//! What is signed is what leaves. So this comes last, after everything else that changes the request, and it takes part
//! in the passing of the body: [`RequestSigning::take`] gives the bytes that are searched, [`RequestSigning::seal`]
//! those that are sent.

mod canonical;
mod chunked;
mod claims;
mod payload;
mod signature;

use std::time::SystemTime;

use aws_lc_rs::digest;
use bytes::Bytes;
use http::HeaderValue;
use pingora_http::RequestHeader;
use rules::Reason;
use secrecy::ExposeSecret;

use self::canonical::{
    canonical_fields, canonical_query, canonical_request, object_path, parse_query, query_text, service_path,
};
use self::chunked::{CHUNK_BYTES, ChunkDecoder, ChunkEncoder, encoded_length};
pub(crate) use self::claims::strip_signature;
use self::claims::{check_form, set_target};
use self::payload::{ChunkedPayload, PayloadKind, ServiceKind, UNSIGNED, payload_kind};
pub(crate) use self::payload::{MAX_HELD, MAX_HELD_OPEN};
use self::signature::{EMPTY_DIGEST, SigningKey, digest_hex, hex};
use crate::credential::value::AwsKeys;
use crate::report::refusal::Refusal;

/// Bytes that signing holds of a body in chunks: what has not filled a chunk, and a chunk.
pub(crate) const CHUNKED_BYTES: u64 = 2 * CHUNK_BYTES as u64;

/// Why a request cannot be signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SigningFault {
    #[error("the body in aws-chunked is malformed: {0}")]
    Chunks(&'static str),
    #[error("the clock of this machine shows no date that a signature can carry")]
    Clock,
    #[error("the body has another length than `X-Amz-Decoded-Content-Length` says")]
    DecodedLength,
    #[error(
        "`X-Amz-Content-Sha256`, `X-Amz-Decoded-Content-Length` or `Content-Encoding: aws-chunked` says what Sandbar \
         cannot sign"
    )]
    Declaration,
    #[error("the body has another digest than `X-Amz-Content-Sha256` says")]
    Digest,
    #[error("the body is a form with a signature of its own, which Sandbar does not pass on")]
    Form,
    #[error("the path is not valid percent-encoding")]
    Path,
    #[error("the query is not valid percent-encoding")]
    Query,
    #[error(
        "the body is longer than {} bytes, or {} bytes without `Content-Length`, and has to be held for its digest: \
         declare it in `X-Amz-Content-Sha256`",
        MAX_HELD,
        MAX_HELD_OPEN
    )]
    TooLong,
    #[error("the trailers of the body are not the checksums that `X-Amz-Trailer` names")]
    Trailer,
}

impl SigningFault {
    const NO_END: Self = SigningFault::Chunks("its end is missing");
}

impl From<SigningFault> for Refusal {
    fn from(fault: SigningFault) -> Self {
        Refusal::from(Reason::RequestUnsignable).with_detail(fault)
    }
}

/// The signing of one request.
pub(crate) struct RequestSigning {
    service: String,
    region: String,
    kind: PayloadKind,
    /// What the request announces as the length of its body.
    length: Option<u64>,
    body: BodySigning,
}

/// What signing does with the body, once the request is signed.
enum BodySigning {
    /// Nothing.
    Passed,
    /// It is compared with its digest.
    Compared { digest: digest::Context, taken: u64 },
    /// It is here already.
    Held(Bytes),
    /// Its chunks are replaced.
    Chunked(Box<(ChunkDecoder, ChunkEncoder)>),
}

impl RequestSigning {
    /// Reads how the request, as the sandbox sent it, is to be signed. `length` is that of its body, if it announces
    /// one; a request without a body has zero.
    pub(crate) fn new(
        service: &str,
        region: &str,
        request: &RequestHeader,
        length: Option<u64>,
    ) -> Result<Self, SigningFault> {
        let kind = payload_kind(request, ServiceKind::of(service), length)?;
        match &kind {
            PayloadKind::Held { .. } if length.is_some_and(|length| length > MAX_HELD) => {
                return Err(SigningFault::TooLong);
            }
            // Pingora gives no body to filters that is none.
            PayloadKind::Declared(digest) if length == Some(0) && digest != EMPTY_DIGEST => {
                return Err(SigningFault::Digest);
            }
            PayloadKind::Chunked(_) if length == Some(0) => return Err(SigningFault::NO_END),
            PayloadKind::Unsigned
            | PayloadKind::Declared(_)
            | PayloadKind::Held { .. }
            | PayloadKind::Chunked(_) => {}
        }
        let (service, region) = (service.to_owned(), region.to_owned());
        Ok(RequestSigning { service, region, kind, length, body: BodySigning::Passed })
    }

    /// Returns the most bytes that have to be read before the request can be signed, if its body has to be.
    pub(crate) fn must_hold(&self) -> Option<u64> {
        match &self.kind {
            PayloadKind::Held { .. } if self.length.is_some() => Some(MAX_HELD),
            PayloadKind::Held { .. } => Some(MAX_HELD_OPEN),
            PayloadKind::Unsigned | PayloadKind::Declared(_) | PayloadKind::Chunked(_) => None,
        }
    }

    /// Takes the whole body, which [`must_hold`](Self::must_hold) asked for.
    pub(crate) fn hold(&mut self, body: Bytes) -> Result<(), SigningFault> {
        let PayloadKind::Held { declared, is_form } = &self.kind else { return Ok(()) };
        let digest = digest_hex(&body);
        if declared.as_ref().is_some_and(|declared| *declared != digest) {
            return Err(SigningFault::Digest);
        }
        if *is_form {
            check_form(&body)?;
        }
        self.length = Some(body.len() as u64);
        self.body = BodySigning::Held(body);
        self.kind = PayloadKind::Held { declared: Some(digest), is_form: *is_form };
        Ok(())
    }

    /// Returns how many bytes signing holds of a body that passes.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        match &self.kind {
            PayloadKind::Chunked(_) => CHUNKED_BYTES,
            PayloadKind::Unsigned | PayloadKind::Declared(_) | PayloadKind::Held { .. } => 0,
        }
    }

    /// Returns the length of the body that [`take`](Self::take) gives.
    pub(crate) fn content_length(&self) -> Option<u64> {
        match &self.kind {
            PayloadKind::Chunked(chunked) => chunked.length,
            PayloadKind::Unsigned | PayloadKind::Declared(_) | PayloadKind::Held { .. } => self.length,
        }
    }

    /// Signs the request as it leaves, and begins with its body, perhaps not for the first time.
    pub(crate) fn sign(
        &mut self,
        request: &mut RequestHeader,
        keys: &AwsKeys,
        now: SystemTime,
    ) -> Result<(), SigningFault> {
        strip_signature(request)?;
        let key = SigningKey::derive(keys, &self.service, &self.region, now)?;
        let payload = match &self.kind {
            PayloadKind::Unsigned => UNSIGNED,
            PayloadKind::Declared(digest) => digest,
            PayloadKind::Held { declared, .. } => declared.as_deref().ok_or(SigningFault::Digest)?,
            PayloadKind::Chunked(chunked) => chunked.form.as_str(),
        };
        set_field(request, "X-Amz-Date", &key.time)?;
        set_field(request, "X-Amz-Content-Sha256", payload)?;
        if let Some(token) = &keys.session_token {
            set_field(request, "X-Amz-Security-Token", token.expose_secret())?;
        }
        let length = match &self.kind {
            PayloadKind::Chunked(ChunkedPayload { form, length, trailers }) => {
                length.map(|length| encoded_length(*form, length, trailers))
            }
            PayloadKind::Held { .. } => {
                request.remove_header("expect"); // the client went on already
                self.length
            }
            PayloadKind::Unsigned | PayloadKind::Declared(_) => None,
        };
        if let Some(length) = length {
            request.remove_header("transfer-encoding");
            set_field(request, "Content-Length", &length.to_string())?;
        }
        let parameters = parse_query(request.uri.query().unwrap_or_default())?;
        let path = request.uri.path().to_owned();
        let (sent_path, path) = match ServiceKind::of(&self.service) {
            ServiceKind::ObjectStore => object_path(&path).map(|path| (path.clone(), path))?,
            ServiceKind::Other => (path.clone(), service_path(&path)),
        };
        set_target(request, &sent_path, &query_text(&parameters))?;
        let fields = canonical_fields(&request.headers);
        let query = canonical_query(&parameters);
        let canonical = canonical_request(request.method.as_str(), &path, &query, &fields, payload);
        let signature = key.sign_request(&canonical);
        set_field(request, "Authorization", &key.authorization(keys, &fields.0, &signature))?;
        self.begin_body(key, signature);
        Ok(())
    }

    fn begin_body(&mut self, key: SigningKey, signature: String) {
        match &self.kind {
            PayloadKind::Unsigned => self.body = BodySigning::Passed,
            PayloadKind::Declared(_) => {
                let digest = digest::Context::new(&digest::SHA256);
                self.body = BodySigning::Compared { digest, taken: 0 };
            }
            PayloadKind::Held { .. } => {} // it stays
            PayloadKind::Chunked(ChunkedPayload { form, length, trailers }) => {
                let decoder = ChunkDecoder::new(*form, *length, trailers);
                let encoder = ChunkEncoder::new(*form, key, signature);
                self.body = BodySigning::Chunked(Box::new((decoder, encoder)));
            }
        }
    }

    /// Takes the next bytes of the body as they came, and returns what the body consists of.
    ///
    /// A body that is compared with its digest is compared before its last byte is returned.
    pub(crate) fn take(&mut self, bytes: Option<Bytes>, last: bool) -> Result<Option<Bytes>, SigningFault> {
        let arrived = bytes.as_deref().unwrap_or_default();
        match &mut self.body {
            BodySigning::Passed => Ok(bytes),
            BodySigning::Compared { digest, taken } => {
                digest.update(arrived);
                *taken += arrived.len() as u64;
                if (last || self.length == Some(*taken))
                    && let PayloadKind::Declared(declared) = &self.kind
                    && *declared != hex(digest.clone().finish().as_ref())
                {
                    return Err(SigningFault::Digest);
                }
                Ok(bytes)
            }
            BodySigning::Held(body) if last => Ok(Some(body.clone())),
            BodySigning::Held(_) => Ok(Some(Bytes::new())),
            BodySigning::Chunked(chunked) => {
                let content = chunked.0.decode(arrived)?;
                if last {
                    chunked.0.finish()?;
                }
                Ok(Some(content))
            }
        }
    }

    /// Returns what leaves for the next bytes that the body consists of.
    pub(crate) fn seal(&mut self, content: Option<Bytes>, last: bool) -> Result<Option<Bytes>, SigningFault> {
        let BodySigning::Chunked(chunked) = &mut self.body else { return Ok(content) };
        let (decoder, encoder) = &mut **chunked;
        let mut sealed = encoder.encode(content.as_deref().unwrap_or_default());
        if last {
            sealed = [sealed, encoder.finish(decoder.finish()?)].concat().into();
        }
        Ok(Some(sealed))
    }
}

/// Sets a field that no table of HPACK keeps.
fn set_field(request: &mut RequestHeader, name: &'static str, value: &str) -> Result<(), SigningFault> {
    let mut value = HeaderValue::from_str(value).map_err(|_| SigningFault::Declaration)?;
    value.set_sensitive(matches!(name, "Authorization" | "X-Amz-Security-Token"));
    request.insert_header(name, value).map_err(|_| SigningFault::Declaration)
}

#[cfg(test)]
mod tests;
