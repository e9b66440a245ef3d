//! Whole requests, with signatures that AWS documents or that botocore computed.

use std::time::{Duration, UNIX_EPOCH};

use secrecy::SecretString;

use super::*;

const DUMMY: &str = "AWS4-HMAC-SHA256 Credential=AKIDMINE/20130524/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=00";

/// The keys of AWS's examples.
pub(super) fn documented_key() -> AwsKeys {
    let secret = SecretString::from("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY");
    AwsKeys { id: "AKIAIOSFODNN7EXAMPLE".to_owned(), secret, session_token: None }
}

/// 2013-05-24, midnight.
pub(super) fn documented_time() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_369_353_600)
}

/// A request as the sandbox sends it.
fn request(line: &str, fields: &[(&'static str, &str)]) -> RequestHeader {
    let (method, target) = line.split_once(' ').unwrap();
    let mut request = RequestHeader::build(method, target.as_bytes(), None).unwrap();
    for (name, value) in fields {
        request.append_header(*name, *value).unwrap();
    }
    request
}

fn field<'a>(request: &'a RequestHeader, name: &str) -> &'a str {
    let mut values = request.headers.get_all(name).iter();
    let value = values.next().map(|value| value.to_str().unwrap()).unwrap_or_default();
    assert_eq!(values.next(), None, "{name} occurs once");
    value
}

fn sign(service: &str, mut request: RequestHeader, length: Option<u64>) -> RequestHeader {
    let mut signing = RequestSigning::new(service, "us-east-1", &request, length).unwrap();
    signing.sign(&mut request, &documented_key(), documented_time()).unwrap();
    request
}

#[test]
fn the_suite_of_aws_is_signed_as_it_says() {
    let secret = SecretString::from("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY");
    let keys = AwsKeys { id: "AKIDEXAMPLE".to_owned(), secret, session_token: None };
    let now = UNIX_EPOCH + Duration::from_secs(1_440_938_160); // 2015-08-30T12:36:00Z
    let key = SigningKey::derive(&keys, "service", "us-east-1", now).unwrap();
    for (line, fields, body, signature) in [
        ("GET /", vec![], "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        (
            "GET /?Param2=value2&Param1=value1",
            vec![],
            "",
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        ),
        (
            "GET /-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
            vec![],
            "",
            "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
        ),
        ("GET /%E1%88%B4", vec![], "", "697b34846207a3f72246f99d74ae1ee4fe54f44bb06730c58a0d339eb079596d"),
        (
            "GET /example%20space/",
            vec![],
            "",
            "446b817944c553435b35e813c261ff4e161fff982d1bacdef1c87f6785dd1662",
        ),
        ("GET /./example", vec![], "", "ef75d96142cf21edca26f06005da7988e4f8dc83a165a80865db7089db637ec5"),
        ("GET //example//", vec![], "", "9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84"),
        (
            "GET /example1/example2/../..",
            vec![],
            "",
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        ),
        (
            "POST /",
            vec![("Content-Type", "application/x-www-form-urlencoded")],
            "Param1=value1",
            "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
        ),
    ] {
        let mut request = request(line, &fields);
        request.insert_header("Host", "example.amazonaws.com").unwrap();
        request.insert_header("X-Amz-Date", key.time.as_str()).unwrap();
        let parameters = parse_query(request.uri.query().unwrap_or_default()).unwrap();
        let canonical = canonical_request(
            request.method.as_str(),
            &service_path(line.split([' ', '?']).nth(1).unwrap()),
            &canonical_query(&parameters),
            &canonical_fields(&request.headers),
            &digest_hex(body.as_bytes()),
        );
        assert_eq!(key.sign_request(&canonical), signature, "{line}");
    }
}

#[test]
fn requests_leave_as_botocore_signs_them() {
    let s3 = ("Host", "examplebucket.s3.amazonaws.com");
    let local = ("Host", "s3.example:8443");
    let (sha, hello) =
        ("X-Amz-Content-Sha256", "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9");
    let upload = |declared| {
        vec![
            local,
            ("Content-Type", "text/plain"),
            ("Content-MD5", "XrY7u+Ae7tCTyy9j7QxG6A=="),
            ("x-amz-meta-b", "  two   words "),
            ("x-amz-acl", "private"),
            (sha, declared),
        ]
    };
    for (service, line, fields, length, names, signature) in [
        (
            "s3",
            "GET /test.txt",
            vec![s3, ("Range", "bytes=0-9")],
            0,
            "host;range;x-amz-content-sha256;x-amz-date",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "s3",
            "GET /?lifecycle",
            vec![s3],
            0,
            "host;x-amz-content-sha256;x-amz-date",
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "s3",
            "GET /?prefix=J&max-keys=2",
            vec![s3],
            0,
            "host;x-amz-content-sha256;x-amz-date",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
        (
            "s3",
            "GET /b/a+b//c/../%c3%bc%20d",
            vec![local],
            0,
            "host;x-amz-content-sha256;x-amz-date",
            "488f1b7c47fc72b752b5ec9502d832d57f5af88c4555879695293151455d2ace",
        ),
        (
            "s3",
            "PUT /b/k?tagging=&x-id=PutObject",
            upload(UNSIGNED),
            11,
            "content-md5;content-type;host;x-amz-acl;x-amz-content-sha256;x-amz-date;x-amz-meta-b",
            "da0f1b80d2310791a6fed301ecb0b93afbc660e03cf3b5fd37469fd541e49454",
        ),
        (
            "s3",
            "PUT /b/k?x-id=PutObject&tagging=",
            upload(hello),
            11,
            "content-md5;content-type;host;x-amz-acl;x-amz-content-sha256;x-amz-date;x-amz-meta-b",
            "0b1ddb02dd12d956f0c75c97f793b8bda3056a4ae2964745e08ba84d178d6f56",
        ),
        (
            "lambda",
            "GET /2015-03-31/functions/arn%3Aaws%3Alambda/./x//y?Qualifier=a+b",
            vec![("Host", "lambda.example")],
            0,
            "host;x-amz-content-sha256;x-amz-date",
            "9d1d91fab67352e91017548eb8bb5cd78d6b81813d4299fadada88f1b3be14b7",
        ),
    ] {
        let mine =
            [("Authorization", DUMMY), ("X-Amz-Date", "20130524T010203Z"), ("X-Amz-Security-Token", "mine")];
        let anonymous = sign(service, request(line, &fields), Some(length));
        let own = sign(service, request(line, &[fields.as_slice(), &mine].concat()), Some(length));
        for sent in [anonymous, own] {
            let expected = format!(
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/{service}/aws4_request, \
                 SignedHeaders={names}, Signature={signature}"
            );
            assert_eq!(field(&sent, "authorization"), expected, "{line}");
            assert_eq!(field(&sent, "x-amz-date"), "20130524T000000Z", "{line}");
            assert!(sent.headers["authorization"].is_sensitive(), "HPACK keeps it in no table");
            assert_eq!(field(&sent, "x-amz-security-token"), "", "{line}");
        }
    }
}

#[test]
fn p11_a_presigned_url_is_signed_in_the_fields() {
    let presigned = "GET /b/k?versionId=1&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIDMINE%2F20130524\
                     %2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=600&X-Amz-SignedHeaders=host\
                     &X-Amz-Security-Token=mine&X-Amz-Signature=00";
    let host = [("Host", "s3.example:8443")];
    let sent = sign("s3", request(presigned, &host), Some(0));
    assert_eq!(sent.uri.to_string(), "/b/k?versionId=1");
    let plain = sign("s3", request("GET /b/k?versionId=1", &host), Some(0));
    assert_eq!(field(&sent, "authorization"), field(&plain, "authorization"));
}

#[test]
fn a_session_token_is_sent_and_signed() {
    let body = Bytes::from_static(br#"{"TableName":"t"}"#);
    let mut request = request(
        "POST /",
        &[
            ("Host", "dynamodb.example:8443"),
            ("Content-Type", "application/x-amz-json-1.0"),
            ("X-Amz-Target", "DynamoDB_20120810.GetItem"),
            ("Transfer-Encoding", "chunked"),
            ("Expect", "100-continue"),
        ],
    );
    let mut signing = RequestSigning::new("dynamodb", "us-east-1", &request, None).unwrap();
    let keys = AwsKeys { session_token: Some(SecretString::from("the-session-token")), ..documented_key() };
    let early = signing.sign(&mut request.clone(), &keys, documented_time());
    assert_eq!(early, Err(SigningFault::Digest), "its body is not known yet");
    assert_eq!(signing.must_hold(), Some(MAX_HELD_OPEN));
    signing.hold(body.clone()).unwrap();
    signing.sign(&mut request, &keys, documented_time()).unwrap();
    let authorization = field(&request, "authorization");
    assert!(
        authorization.ends_with("Signature=99e9201779bf45fd62cd36c9a15bc4bf56e637149833002a7d126deccaaf9812"),
        "{authorization}"
    );
    assert!(request.headers["x-amz-security-token"].is_sensitive());
    assert_eq!(field(&request, "content-length"), "17");
    assert_eq!((field(&request, "transfer-encoding"), field(&request, "expect")), ("", ""));
    // Pingora keeps the end of the body to send it again, which is all that it gives.
    let tail = Some(Bytes::from_static(b"t\"}"));
    assert_eq!(signing.take(tail.clone(), true), Ok(Some(body.clone())));
    signing.sign(&mut request, &keys, documented_time()).unwrap();
    assert_eq!(signing.take(tail, true), Ok(Some(body)), "again on another connection");
}

#[test]
fn a_body_ends_only_with_the_digest_that_was_signed() {
    let hello = digest_hex(b"hello world");
    let declared = [("Host", "h"), ("X-Amz-Content-Sha256", hello.as_str())];
    let empty = [("Host", "h")];
    for (fields, length, pieces, expected) in [
        (&declared[..], Some(11), vec!["hello", " world"], Ok("hello world")),
        (&declared, None, vec!["hello world", ""], Ok("hello world")),
        (&declared, Some(11), vec!["hello", " w0rld"], Err("hello")),
        // Over HTTP/2 the end follows the last byte, which must not have left by then.
        (&declared, Some(11), vec!["hello", " w0rld", ""], Err("hello")),
        (&declared, None, vec!["hello world", "!"], Err("hello world")),
        (&declared, None, vec!["hello", ""], Err("hello")),
        (&empty, Some(0), vec![""], Ok("")),
    ] {
        let mut request = request("PUT /b/k", fields);
        let mut signing = RequestSigning::new("s3", "us-east-1", &request, length).unwrap();
        for _ in 0..2 {
            signing.sign(&mut request, &documented_key(), documented_time()).unwrap();
            let (mut sent, mut fault) = (String::new(), None);
            for (at, piece) in pieces.iter().enumerate() {
                let last = at + 1 == pieces.len();
                let taken = signing.take(Some(Bytes::from_static(piece.as_bytes())), last);
                match taken.and_then(|content| signing.seal(content, last)) {
                    Ok(bytes) => sent += std::str::from_utf8(&bytes.unwrap()).unwrap(),
                    Err(found) => fault = fault.or(Some(found)),
                }
            }
            match expected {
                Ok(all) => assert_eq!((sent.as_str(), fault), (all, None), "{pieces:?}"),
                Err(part) => {
                    assert_eq!((sent.as_str(), fault), (part, Some(SigningFault::Digest)), "{pieces:?}")
                }
            }
        }
    }
}

#[test]
fn chunks_of_the_sandbox_are_replaced_by_sandbars() {
    let content = vec![b'a'; 66_560];
    let mut body = Vec::new();
    for chunk in content.chunks(8192) {
        body.extend_from_slice(
            format!("{:x};chunk-signature={}\r\n", chunk.len(), "0".repeat(64)).as_bytes(),
        );
        body.extend_from_slice(chunk);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("0;chunk-signature={}\r\n\r\n", "0".repeat(64)).as_bytes());
    let length = body.len().to_string();
    for (decoded, announced) in [(Some("66560"), "66824"), (None, "")] {
        let mut fields = vec![
            ("Host", "s3.amazonaws.com"),
            ("Authorization", DUMMY),
            ("Content-Encoding", "aws-chunked"),
            ("X-Amz-Content-Sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
        ];
        match decoded {
            Some(decoded) => fields
                .extend([("Content-Length", length.as_str()), ("X-Amz-Decoded-Content-Length", decoded)]),
            None => fields.push(("Transfer-Encoding", "chunked")),
        }
        let mut request = request("PUT /examplebucket/chunkObject.txt", &fields);
        let announces = decoded.map(|_| body.len() as u64);
        let mut signing = RequestSigning::new("s3", "us-east-1", &request, announces).unwrap();
        assert_eq!(signing.must_hold(), None);
        assert_eq!(signing.content_length(), decoded.map(|decoded| decoded.parse().unwrap()));
        signing.sign(&mut request, &documented_key(), documented_time()).unwrap();
        assert_eq!(field(&request, "content-length"), announced);
        let (mut searched, mut sent) = (Vec::new(), Vec::new());
        for (at, piece) in body.chunks(1000).enumerate() {
            let last = (at + 1) * 1000 >= body.len();
            let taken = signing.take(Some(Bytes::copy_from_slice(piece)), last).unwrap();
            searched.extend_from_slice(taken.as_deref().unwrap());
            sent.extend_from_slice(&signing.seal(taken, last).unwrap().unwrap());
        }
        assert!(searched == content, "what is searched has no chunks in it");
        assert_eq!(sent.len(), 66_824);
        assert!(sent.starts_with(b"10000;chunk-signature="));
        assert!(
            !String::from_utf8_lossy(&sent).contains(&"0".repeat(64)),
            "nothing of the sandbox's signatures"
        );
    }
}

#[test]
fn what_has_to_be_held_is_bounded() {
    let fields = [("Host", "h"), ("Content-Type", "application/x-amz-json-1.0")];
    for (length, expected) in [
        (Some(MAX_HELD), Ok(Some(MAX_HELD))),
        (Some(MAX_HELD + 1), Err(SigningFault::TooLong)),
        (None, Ok(Some(MAX_HELD_OPEN))),
        (Some(0), Ok(None)),
    ] {
        let signing = RequestSigning::new("dynamodb", "us-east-1", &request("POST /", &fields), length);
        assert_eq!(signing.map(|signing| signing.must_hold()), expected, "{length:?}");
    }
    let hello = digest_hex(b"hello");
    for (declared, expected) in
        [(hello.as_str(), SigningFault::Digest), ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", SigningFault::NO_END)]
    {
        let request = request("PUT /b/k", &[("Host", "h"), ("X-Amz-Content-Sha256", declared)]);
        let signing = RequestSigning::new("s3", "us-east-1", &request, Some(0));
        assert_eq!(signing.err(), Some(expected), "{declared}: the request has no body");
    }
    let digest = digest_hex(b"Action=A");
    let form =
        [("Content-Type", "application/x-www-form-urlencoded"), ("X-Amz-Content-Sha256", digest.as_str())];
    for (body, expected) in [("Action=A", Ok(())), ("Action=B", Err(SigningFault::Digest))] {
        let mut signing = RequestSigning::new("sqs", "us-east-1", &request("POST /", &form), None).unwrap();
        assert_eq!(signing.hold(Bytes::from_static(body.as_bytes())), expected, "{body}");
    }
    let mut signing = RequestSigning::new("sqs", "us-east-1", &request("POST /", &form[..1]), None).unwrap();
    assert_eq!(signing.hold(Bytes::from_static(b"Action=A&X-Amz-Signature=0")), Err(SigningFault::Form));
}

#[test]
fn a_clock_without_a_date_signs_nothing() {
    let mut request = request("GET /", &[("Host", "h")]);
    let mut signing = RequestSigning::new("s3", "us-east-1", &request, Some(0)).unwrap();
    let never = UNIX_EPOCH + Duration::from_secs(u64::from(u32::MAX) * 1000);
    assert_eq!(signing.sign(&mut request, &documented_key(), never), Err(SigningFault::Clock));
}
