//! Requests for AWS that leave with Sandbar's signature (P11): botocore verifies each as it arrives, from the SDK of
//! Python, from curl, and from a sandbox that lies about its bodies.

mod scene;

use std::process::Command;

use self::scene::{AwsScene, OWN_ID, OWN_TOKEN, SECRET, TOKEN};
use crate::wire::RawResponse;

/// The digest of nothing.
const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const SIGNED: &str = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD";
const UNSIGNED_TRAILER: &str = "STREAMING-UNSIGNED-PAYLOAD-TRAILER";
const TRAILER: &str = "x-amz-checksum-crc32:NSRBwg==";

/// Chunks with signatures of the sandbox's own, and their end.
fn signed_chunks(pieces: &[&[u8]], end: &str) -> Vec<u8> {
    let line = |size: usize| format!("{size:x};chunk-signature={}\r\n", "5".repeat(64)).into_bytes();
    let chunks =
        pieces.iter().flat_map(|piece| [line(piece.len()), piece.to_vec(), b"\r\n".to_vec()].concat());
    chunks.chain(line(0)).chain(end.bytes()).collect()
}

#[test]
fn p11_boto3_works_with_keys_that_are_worth_nothing() {
    for protocol in ["http/1.1", "h2"] {
        let scene = AwsScene::start(protocol, Some(TOKEN));
        let said = scene.run_client();
        assert!(said.ends_with("all went well\n"), "{protocol}: {said}");
        let requests = scene.requests();
        assert!(requests.len() > 40, "{protocol}: {}", requests.len());
        for request in &requests {
            assert!(request["fault"].is_null(), "{protocol}: {request}");
        }
        let all = format!("{requests:?}").to_ascii_lowercase();
        for own in [OWN_ID, OWN_TOKEN] {
            assert!(!all.contains(&own.to_ascii_lowercase()), "{protocol}: {own} arrived");
        }
        let log = scene.log_text();
        for secret in [SECRET, TOKEN] {
            assert!(!log.contains(secret) && !said.contains(secret), "{protocol}");
        }
    }
}

#[test]
fn p11_every_protocol_is_signed_on_both_sides() {
    for origin in ["http/1.1", "h2"] {
        let scene = AwsScene::start(origin, None);
        for client in ["--http1.1", "--http2"] {
            for (what, service, args) in [
                ("anonymous", "s3", vec!["-X", "PUT", "--data-binary", "x"]),
                ("expecting", "s3", vec!["-X", "PUT", "--data-binary", "x", "-H", "Expect: 100-continue"]),
                (
                    "held",
                    "dynamodb",
                    vec!["--data-binary", "{}", "-H", "X-Amz-Target: DynamoDB_20120810.ListTables"],
                ),
                ("held, expecting", "dynamodb", vec!["--data-binary", "{}", "-H", "Expect: 100-continue"]),
                ("held, open", "dynamodb", vec!["--data-binary", "{}", "-H", "Transfer-Encoding: chunked"]),
                (
                    "held, empty and open",
                    "dynamodb",
                    vec!["--data-binary", "", "-H", "Transfer-Encoding: chunked"],
                ),
                ("no body", "s3", vec![]),
            ] {
                let answer = scene.curl(client, service, &args);
                let requests = scene.requests();
                let last = requests.last().unwrap_or_else(|| panic!("{origin} {client} {what}: {answer}"));
                assert!(last["fault"].is_null(), "{origin} {client} {what}: {last}");
                let expected = if what == "no body" { "404" } else { "200" };
                assert!(
                    answer.ends_with(expected) || last["method"] == "GET",
                    "{origin} {client} {what}: {answer}"
                );
            }
            // More than Pingora keeps to send again, and the most that is held.
            for bytes in [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, 3 << 20, 16 << 20] {
                let file = scene.write_noise(bytes);
                let answer = scene.curl(client, "dynamodb", &["--data-binary", &file]);
                let last = scene.requests().pop().unwrap();
                assert_eq!(
                    (&last["length"], &last["fault"]),
                    (&bytes.into(), &serde_json::Value::Null),
                    "{answer}"
                );
            }
        }
    }
}

#[test]
fn chunks_of_the_sandbox_arrive_as_sandbars() {
    let scene = AwsScene::start("http/1.1", Some(TOKEN));
    let large = vec![b'a'; 200_000];
    let half: &[u8] = &large[..100_000];
    let digest = |bytes: &[u8]| scene.digest(bytes);
    let crc_a = scene.crc32(&large);
    let with_trailer =
        format!("x-amz-checksum-crc32:{crc_a}\r\nx-amz-trailer-signature:{}\r\n\r\n", "6".repeat(64));
    let minio =
        format!("x-amz-checksum-crc32:{crc_a}\n\r\nx-amz-trailer-signature:{}\r\n\r\n", "6".repeat(64));
    let trailers = "X-Amz-Trailer: x-amz-checksum-crc32\r\n";
    let both = format!("{SIGNED}-TRAILER");
    for (what, form, fields, body) in [
        ("signed", SIGNED, "", signed_chunks(&[half, half], "\r\n")),
        ("signed, in tiny chunks", SIGNED, "", signed_chunks(&large.chunks(997).collect::<Vec<_>>(), "\r\n")),
        ("signed, with trailers", both.as_str(), trailers, signed_chunks(&[half, half], &with_trailer)),
        ("as MinIO writes trailers", both.as_str(), trailers, signed_chunks(&[half, half], &minio)),
    ] {
        for framing in
            [format!("Content-Length: {}\r\n", body.len()), "Transfer-Encoding: chunked\r\n".to_owned()]
        {
            let fields = format!(
                "X-Amz-Content-Sha256: {form}\r\nX-Amz-Decoded-Content-Length: {}\r\nContent-Encoding: aws-chunked\r\n\
                 {fields}{framing}",
                large.len()
            );
            let sent = match framing.starts_with("Content-Length") {
                true => body.clone(),
                false => [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n\r\n"].concat(),
            };
            let answer = scene.send("s3", "PUT /b/k", &fields, &sent);
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            let last = scene.requests().pop().unwrap();
            assert_eq!(last["digest"], digest(&large), "{what}: {last}");
            assert!(!last.to_string().contains("5555"), "{what}: {last}");
        }
    }
}

#[test]
fn p11_what_cannot_be_signed_is_refused_and_never_ends_at_the_origin() {
    let scene = AwsScene::start("http/1.1", None);
    let chunked = |form: &str, length: &str| {
        format!(
            "X-Amz-Content-Sha256: {form}\r\nX-Amz-Decoded-Content-Length: {length}\r\nX-Amz-Trailer: x-amz-checksum-crc32\r\n"
        )
    };
    let signed = |length: &str| {
        format!("X-Amz-Content-Sha256: {SIGNED}\r\nX-Amz-Decoded-Content-Length: {length}\r\n")
    };
    let unsigned = |body: &str| (chunked(UNSIGNED_TRAILER, "3"), body.as_bytes().to_vec());
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    let wrong = "0".repeat(64);
    let (length, _) = unsigned("");
    let cases: Vec<(&str, &str, &str, String, Vec<u8>, &str)> = vec![
        (
            "wrong digest",
            "s3",
            "PUT /b/k",
            format!("X-Amz-Content-Sha256: {wrong}\r\n"),
            b"abc".to_vec(),
            "another digest",
        ),
        (
            "digest of nothing",
            "s3",
            "PUT /b/k",
            format!("X-Amz-Content-Sha256: {EMPTY}\r\n"),
            b"abc".to_vec(),
            "another digest",
        ),
        (
            "no body for a digest",
            "s3",
            "PUT /b/k",
            format!("X-Amz-Content-Sha256: {wrong}\r\n"),
            Vec::new(),
            "another digest",
        ),
        (
            "held, wrong digest",
            "sqs",
            "POST /",
            format!("X-Amz-Content-Sha256: {wrong}\r\n{form}"),
            b"a=b".to_vec(),
            "another digest",
        ),
        (
            "no digest",
            "s3",
            "PUT /b/k",
            "X-Amz-Content-Sha256: none\r\n".into(),
            b"abc".to_vec(),
            "cannot sign",
        ),
        (
            "two digests",
            "s3",
            "PUT /b/k",
            format!("X-Amz-Content-Sha256: {EMPTY}\r\nx-amz-content-sha256: {EMPTY}\r\n"),
            Vec::new(),
            "cannot sign",
        ),
        (
            "hidden chunks",
            "s3",
            "PUT /b/k",
            "Content-Encoding: aws-chunked\r\n".into(),
            b"abc".to_vec(),
            "cannot sign",
        ),
        (
            "an upload form",
            "s3",
            "POST /b",
            "Content-Type: multipart/form-data; boundary=x\r\n".into(),
            b"--x--".to_vec(),
            "signature of its own",
        ),
        (
            "a signed form",
            "sqs",
            "POST /",
            form.into(),
            b"Action=A&X-Amz-Credential=AKIDMINE".to_vec(),
            "signature of its own",
        ),
        (
            "an old signed form",
            "sts",
            "POST /",
            form.into(),
            b"Action=A&AWSAccessKeyId=AKIDMINE&Signature=x".to_vec(),
            "signature of its own",
        ),
        ("a query that is none", "s3", "GET /b/k?a=%zz", String::new(), Vec::new(), "percent-encoding"),
        ("a size too large", "s3", "PUT /b/k", length.clone(), b"4\r\nabcd\r\n".to_vec(), "another length"),
        ("a huge size", "s3", "PUT /b/k", length.clone(), b"fffffffffffff\r\nabc".to_vec(), "another length"),
        ("a size too small", "s3", "PUT /b/k", length.clone(), b"2\r\nabc\r\n".to_vec(), "malformed"),
        (
            "too few bytes",
            "s3",
            "PUT /b/k",
            length.clone(),
            format!("2\r\nab\r\n0\r\n{TRAILER}\r\n\r\n").into_bytes(),
            "another length",
        ),
        ("no last chunk", "s3", "PUT /b/k", length.clone(), b"3\r\nabc\r\n".to_vec(), "its end is missing"),
        (
            "no last line",
            "s3",
            "PUT /b/k",
            length.clone(),
            format!("3\r\nabc\r\n0\r\n{TRAILER}\r\n").into_bytes(),
            "its end is missing",
        ),
        (
            "bytes after the end",
            "s3",
            "PUT /b/k",
            length.clone(),
            format!("3\r\nabc\r\n0\r\n{TRAILER}\r\n\r\nGET / HTTP/1.1\r\n\r\n").into_bytes(),
            "bytes follow",
        ),
        (
            "another trailer",
            "s3",
            "PUT /b/k",
            length.clone(),
            b"3\r\nabc\r\n0\r\nx-amz-meta-a:AAAAAA==\r\n\r\n".to_vec(),
            "trailers",
        ),
        ("no trailer", "s3", "PUT /b/k", length, b"3\r\nabc\r\n0\r\n\r\n".to_vec(), "trailers"),
        (
            "unsigned chunks",
            "s3",
            "PUT /b/k",
            signed("3"),
            b"3\r\nabc\r\n0\r\n\r\n".to_vec(),
            "size of a chunk",
        ),
        (
            "an announced trailer that cannot be",
            "s3",
            "PUT /b/k",
            format!("{}X-Amz-Trailer: x-amz-meta-a\r\n", signed("3")),
            b"abc".to_vec(),
            "trailers",
        ),
        (
            "a length that is none",
            "s3",
            "PUT /b/k",
            signed("-3"),
            signed_chunks(&[b"abc"], "\r\n"),
            "cannot sign",
        ),
    ];
    for (what, service, line, fields, body, why) in cases {
        let before = scene.requests().len();
        let fields = format!("{fields}Content-Length: {}\r\n", body.len());
        let answer = scene.send(service, line, &fields, &body);
        scene.world.assert_refused(what, &answer, 400, "request_unsignable");
        assert!(answer.text().contains(why), "{what}: {}", answer.text());
        let complete =
            scene.requests().split_off(before).into_iter().filter(|seen| seen["fault"] != "incomplete");
        assert_eq!(complete.count(), 0, "{what}: a whole request arrived");
    }
    // What has to be held is bounded.
    let answer = scene.send("dynamodb", "POST /", "Content-Length: 16777217\r\n", b"");
    scene.world.assert_refused("too long", &answer, 400, "request_unsignable");
    let open = [b"10001\r\n".as_slice(), &vec![b'x'; 65_537], b"\r\n0\r\n\r\n"].concat();
    let answer = scene.send("dynamodb", "POST /", "Transfer-Encoding: chunked\r\n", &open);
    scene.world.assert_refused("too long without a length", &answer, 400, "request_unsignable");
}

#[test]
fn p11_no_account_of_the_sandbox_arrives() {
    let scene = AwsScene::start("http/1.1", None);
    let fields = format!(
        "Authorization: AWS4-HMAC-SHA256 Credential={OWN_ID}/20200101/x/s3/aws4_request, SignedHeaders=host, Signature=0\r\n\
         X-Amz-Date: 20200101T000000Z\r\nx-amz-date: 20200101T000001Z\r\nX-Amz-Security-Token: {OWN_TOKEN}\r\n\
         x-amz-SECURITY-token: {OWN_TOKEN}\r\nX-Amz-Credential: {OWN_ID}\r\nX-Amz-S3session-Token: {OWN_TOKEN}\r\n\
         Date: Wed, 01 Jan 2020 00:00:00 GMT\r\nContent-Length: 0\r\n"
    );
    for target in [
        "/b/k".to_owned(),
        format!(
            "/b/k?X-Amz-Credential={OWN_ID}&X-Amz-Signature=00&X-Amz-Security-Token={OWN_TOKEN}&versionId=1"
        ),
        format!("/b/k?%58-aMz-credential={OWN_ID}&AWSAccessKeyId={OWN_ID}&Signature={OWN_TOKEN}"),
    ] {
        let answer = scene.send("s3", &format!("PUT {target}"), &fields, b"");
        assert_eq!(answer.status, 200, "{target}: {}", answer.text());
        let last = scene.requests().pop().unwrap();
        assert!(last["fault"].is_null(), "{target}: {last}");
        let last = last.to_string();
        assert!(!last.contains(OWN_ID) && !last.contains(OWN_TOKEN), "{target}: {last}");
    }
}

/// A body is searched without the chunks that could hide what is in it.
#[test]
fn p11_chunks_do_not_hide_a_credential() {
    let scene = AwsScene::start("http/1.1", None);
    let text = format!("all that I know: {SECRET}, and more");
    let pieces: Vec<&[u8]> = text.as_bytes().chunks(3).collect();
    let body = signed_chunks(&pieces, "\r\n");
    let fields = format!(
        "X-Amz-Content-Sha256: {SIGNED}\r\nX-Amz-Decoded-Content-Length: {}\r\nContent-Length: {}\r\n",
        text.len(),
        body.len()
    );
    let answer = scene.send("s3", "PUT /b/k", &fields, &body);
    scene.world.assert_refused("in chunks", &answer, 403, "credential_leaving");
    assert!(scene.requests().iter().all(|seen| seen["fault"] == "incomplete"), "{:?}", scene.requests());
}

impl AwsScene {
    /// What curl says of a request to a service: the body of the answer and the status.
    fn curl(&self, version: &str, service: &str, args: &[&str]) -> String {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--max-time", "60", version, "-w", " %{http_code}", "--proxy"]);
        curl.arg(format!("http://{}", self.world.listeners[0])).arg("--cacert").arg(self.world.ca_path());
        let output =
            curl.args(args).arg(format!("https://{service}.test:{}/b/k", self.port)).output().unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout))
    }

    /// The answer to a request of the sandbox.
    fn send(&self, service: &str, line: &str, fields: &str, body: &[u8]) -> RawResponse {
        let mut wire = self.connect(service);
        wire.send(format!("{line} HTTP/1.1\r\nHost: {service}.test:{}\r\n{fields}\r\n", self.port));
        wire.send(body);
        wire.read_response(line.split(' ').next().unwrap()).unwrap()
    }
}
