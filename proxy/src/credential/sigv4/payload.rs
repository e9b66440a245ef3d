//! How the body of a request is signed: as the client says, or by its digest.

use http::{HeaderMap, Method};
use pingora_http::RequestHeader;

use super::SigningFault;
use super::canonical::parse_query;
use super::chunked::{ChunkForm, Trailer};
use super::claims::DECLARED_DIGEST;
use super::signature::EMPTY_DIGEST;

pub(super) const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
/// Most bytes of a body that is held until its digest is known, if it announces its length.
pub(crate) const MAX_HELD: u64 = 16 << 20;
/// The same for a body without a length: what Pingora keeps of one to send it again.
pub(crate) const MAX_HELD_OPEN: u64 = 64 << 10;
/// Longest body in chunks, without them: 2 to the power of 53, beyond which not every server counts exactly.
const MAX_DECODED: u64 = 1 << 53;

/// Services whose signing name is one of these store objects. Their paths are keys, which nobody may normalise.
const OBJECT_STORES: [&str; 4] = ["s3", "s3-object-lambda", "s3-outposts", "s3express"];

/// What the form of a signature depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceKind {
    ObjectStore,
    Other,
}

impl ServiceKind {
    pub(super) fn of(service: &str) -> Self {
        match OBJECT_STORES.contains(&service) {
            true => ServiceKind::ObjectStore,
            false => ServiceKind::Other,
        }
    }
}

/// How the body of a request is signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PayloadKind {
    /// Not at all, which TLS makes up for.
    Unsigned,
    /// By a digest that the client declares. The body passes as it comes, and ends only if it has that digest.
    Declared(String),
    /// By a digest that Sandbar computes of all of it first.
    Held {
        /// What the client declares, if it does.
        declared: Option<String>,
        is_form: bool,
    },
    /// In chunks.
    Chunked(ChunkedPayload),
}

/// A body in chunks, which are signed one by one, or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChunkedPayload {
    pub(super) form: ChunkForm,
    /// Bytes without the chunks around them, if the client says.
    pub(super) length: Option<u64>,
    pub(super) trailers: Vec<Trailer>,
}

/// Reads from the head of a request how its body is to be signed. `length` is what it announces.
pub(super) fn payload_kind(
    request: &RequestHeader,
    service: ServiceKind,
    length: Option<u64>,
) -> Result<PayloadKind, SigningFault> {
    let fields = &request.headers;
    let parameters = parse_query(request.uri.query().unwrap_or_default())?;
    let in_query = parameters.into_iter().find(|parameter| parameter.is_named(DECLARED_DIGEST));
    let in_query = in_query.and_then(|parameter| parameter.value).map(String::from_utf8).transpose();
    let in_query = in_query.map_err(|_| SigningFault::Declaration)?;
    let declared = single(fields, DECLARED_DIGEST)?.or(in_query.as_deref());
    let content_type = content_type(fields);
    let is_upload_form = content_type.eq_ignore_ascii_case(b"multipart/form-data");
    if service == ServiceKind::ObjectStore && request.method == Method::POST && is_upload_form {
        return Err(SigningFault::Form);
    }
    if let Some(form) = declared.and_then(ChunkForm::parse) {
        return chunked_payload(fields, form).map(PayloadKind::Chunked);
    }
    if has_coding(fields, b"aws-chunked") {
        return Err(SigningFault::Declaration); // nobody would find the end of what it hides
    }
    let is_unsigned = declared == Some(UNSIGNED);
    let declared = declared.filter(|_| !is_unsigned).map(parse_digest).transpose()?;
    let is_form = service == ServiceKind::Other
        && content_type.eq_ignore_ascii_case(b"application/x-www-form-urlencoded");
    Ok(match (declared, length) {
        (None, Some(0)) if !is_unsigned => PayloadKind::Declared(EMPTY_DIGEST.to_owned()),
        (declared, None | Some(1..)) if is_form => PayloadKind::Held { declared, is_form },
        (Some(declared), _) => PayloadKind::Declared(declared),
        (None, _) if is_unsigned || service == ServiceKind::ObjectStore => PayloadKind::Unsigned,
        (None, _) => PayloadKind::Held { declared: None, is_form },
    })
}

fn chunked_payload(fields: &HeaderMap, form: ChunkForm) -> Result<ChunkedPayload, SigningFault> {
    let length = match single(fields, "x-amz-decoded-content-length")? {
        Some(length) if length.bytes().all(|byte| byte.is_ascii_digit()) => {
            let length = length.parse().ok().filter(|length| *length <= MAX_DECODED);
            Some(length.ok_or(SigningFault::Declaration)?)
        }
        Some(_) => return Err(SigningFault::Declaration),
        None => None,
    };
    let mut trailers = Vec::new();
    for name in single(fields, "x-amz-trailer")?.into_iter().flat_map(|names| names.split(',')) {
        let trailer = Trailer::parse(name.trim()).filter(|trailer| !trailers.contains(trailer));
        trailers.push(trailer.ok_or(SigningFault::Trailer)?);
    }
    match trailers.is_empty() == form.has_trailers() {
        true => Err(SigningFault::Trailer),
        false => Ok(ChunkedPayload { form, length, trailers }),
    }
}

/// Returns the value of a field that has one at most.
fn single<'a>(fields: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, SigningFault> {
    let mut values = fields.get_all(name).iter();
    let first = values.next().map(|value| value.to_str().map_err(|_| SigningFault::Declaration));
    match values.next() {
        Some(_) => Err(SigningFault::Declaration),
        None => first.transpose(),
    }
}

fn has_coding(fields: &HeaderMap, coding: &[u8]) -> bool {
    let listed = fields.get_all("content-encoding").iter();
    let mut listed = listed.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    listed.any(|listed| listed.trim_ascii().eq_ignore_ascii_case(coding))
}

fn content_type(fields: &HeaderMap) -> &[u8] {
    let value = fields.get("content-type").map(|value| value.as_bytes()).unwrap_or_default();
    value.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii()
}

fn parse_digest(text: &str) -> Result<String, SigningFault> {
    match text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err(SigningFault::Declaration),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNED: &str = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD";

    fn kind(
        service: &str,
        line: &str,
        fields: &[(&'static str, &str)],
        length: Option<u64>,
    ) -> Result<PayloadKind, SigningFault> {
        let (method, target) = line.split_once(' ').unwrap();
        let mut request = RequestHeader::build(method, target.as_bytes(), None).unwrap();
        for (name, value) in fields {
            request.append_header(*name, *value).unwrap();
        }
        payload_kind(&request, ServiceKind::of(service), length)
    }

    #[test]
    fn the_payload_is_signed_as_the_client_declares_it() {
        let digest = "AB".repeat(32);
        let declared = || PayloadKind::Declared(digest.to_ascii_lowercase());
        let held = |declared, is_form| PayloadKind::Held { declared, is_form };
        let empty = || PayloadKind::Declared(EMPTY_DIGEST.to_owned());
        let form = ("content-type", "application/x-www-form-urlencoded; charset=utf-8");
        let (sha, unsigned) = (DECLARED_DIGEST, ("X-Amz-Content-SHA256", UNSIGNED));
        for (service, line, fields, length, expected) in [
            ("s3", "GET /", vec![], Some(0), Ok(empty())),
            ("s3", "PUT /b/k", vec![(sha, digest.as_str())], Some(5), Ok(declared())),
            ("s3", "PUT /b/k", vec![unsigned], None, Ok(PayloadKind::Unsigned)),
            ("s3", "PUT /b/k", vec![], Some(5), Ok(PayloadKind::Unsigned)),
            ("s3", "PUT /b/k?X-Amz-Signature=0", vec![], None, Ok(PayloadKind::Unsigned)),
            ("s3", "PUT /b/k?X-Amz-Content-Sha256=UNSIGNED-PAYLOAD", vec![], None, Ok(PayloadKind::Unsigned)),
            ("dynamodb", "POST /", vec![], Some(5), Ok(held(None, false))),
            ("dynamodb", "POST /", vec![(sha, digest.as_str())], Some(5), Ok(declared())),
            ("dynamodb", "GET /", vec![], Some(0), Ok(empty())),
            ("sts", "POST /", vec![form], Some(5), Ok(held(None, true))),
            ("sts", "POST /", vec![form, unsigned], Some(5), Ok(held(None, true))),
            (
                "sts",
                "POST /",
                vec![form, (sha, digest.as_str())],
                None,
                Ok(held(Some(digest.to_ascii_lowercase()), true)),
            ),
            (
                "s3",
                "POST /b",
                vec![("content-type", "Multipart/Form-Data; boundary=x")],
                Some(5),
                Err(SigningFault::Form),
            ),
            ("s3", "PUT /b/k", vec![(sha, "abc")], Some(5), Err(SigningFault::Declaration)),
            (
                "s3",
                "PUT /b/k",
                vec![(sha, UNSIGNED), (sha, UNSIGNED)],
                Some(5),
                Err(SigningFault::Declaration),
            ),
            (
                "s3",
                "PUT /b/k",
                vec![("content-encoding", "gzip, AWS-chunked")],
                Some(5),
                Err(SigningFault::Declaration),
            ),
            (
                "s3",
                "PUT /b/k",
                vec![(sha, "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD")],
                Some(5),
                Err(SigningFault::Declaration),
            ),
            ("s3", "PUT /b/k?a=%", vec![], Some(5), Err(SigningFault::Query)),
        ] {
            assert_eq!(kind(service, line, &fields, length), expected, "{service} {line} {fields:?}");
        }
    }

    #[test]
    fn chunks_have_one_length_and_the_trailers_that_they_declare() {
        let (sha, length, trailer) = (DECLARED_DIGEST, "x-amz-decoded-content-length", "x-amz-trailer");
        let with_trailers = format!("{SIGNED}-TRAILER");
        let crc = "x-amz-checksum-crc32";
        for (fields, expected) in [
            (vec![(sha, SIGNED), (length, "66560")], Ok((Some(66560), 0))),
            (vec![(sha, SIGNED)], Ok((None, 0))),
            (vec![(sha, with_trailers.as_str()), (length, "0"), (trailer, crc)], Ok((Some(0), 1))),
            (
                vec![
                    (sha, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
                    (trailer, "X-Amz-Checksum-CRC64NVME, x-amz-checksum-sha256"),
                ],
                Ok((None, 2)),
            ),
            (vec![(sha, SIGNED), (length, "-1")], Err(SigningFault::Declaration)),
            (vec![(sha, SIGNED), (length, "+1")], Err(SigningFault::Declaration)),
            (vec![(sha, SIGNED), (length, "1,1")], Err(SigningFault::Declaration)),
            (vec![(sha, SIGNED), (length, "99999999999999999")], Err(SigningFault::Declaration)),
            (vec![(sha, SIGNED), (length, "1"), (length, "1")], Err(SigningFault::Declaration)),
            (vec![(sha, SIGNED), (trailer, crc)], Err(SigningFault::Trailer)),
            (vec![(sha, with_trailers.as_str())], Err(SigningFault::Trailer)),
            (vec![(sha, with_trailers.as_str()), (trailer, "x-amz-meta-a")], Err(SigningFault::Trailer)),
            (
                vec![(sha, with_trailers.as_str()), (trailer, "x-amz-checksum-crc32,x-amz-checksum-crc32")],
                Err(SigningFault::Trailer),
            ),
        ] {
            let found = kind("s3", "PUT /b/k", &fields, None).map(|kind| match kind {
                PayloadKind::Chunked(chunked) => (chunked.length, chunked.trailers.len()),
                PayloadKind::Unsigned | PayloadKind::Declared(_) | PayloadKind::Held { .. } => {
                    panic!("{kind:?}")
                }
            });
            assert_eq!(found, expected, "{fields:?}");
        }
    }
}
