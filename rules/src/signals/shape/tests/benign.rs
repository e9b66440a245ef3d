//! Traces of honest tools. None raises a signal with the default thresholds.

use super::Trace;
use super::hostile::base64;

const JSON: (&str, &str) = ("accept", "application/json");

#[test]
fn pip_install() {
    let mut trace = Trace::new();
    let agent = r#"pip/24.0 {"ci":null,"cpu":"x86_64","distro":{"name":"Debian GNU/Linux","version":"12"},"implementation":{"name":"CPython","version":"3.11.2"},"installer":{"name":"pip","version":"24.0"},"openssl_version":"OpenSSL 3.0.11"}"#;
    let accept =
        "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html; q=0.1, text/html; q=0.01";
    for _ in 0..120 {
        let name = trace.word();
        let index = [
            ("accept", accept),
            ("accept-encoding", "identity"),
            ("user-agent", agent),
            ("cache-control", "max-age=0"),
        ];
        trace.send("GET", &format!("/simple/{name}/"), &index, (0, 40_000)).wait(150);
        let (first, second, hash) = (trace.hex(2), trace.hex(2), trace.hex(60));
        let (version, minor) = (trace.below(9), trace.below(40));
        let target = format!(
            "/packages/{first}/{second}/{hash}/{name}-{version}.{minor}.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
        );
        let file = [("accept", "*/*"), ("accept-encoding", "identity"), ("user-agent", agent)];
        trace.send("GET", &format!("{target}.metadata"), &file, (0, 3_000)).wait(120);
        trace.send("GET", &target, &file, (0, 300_000)).wait(400);
    }
    trace.assert_quiet("pip install");
}

#[test]
fn npm_install_of_300_packages() {
    let mut trace = Trace::new();
    let session = trace.hex(16);
    let agent = "npm/10.2.4 node/v20.11.0 linux x64 workspaces/false";
    for at in 0..300 {
        let name = format!("{}-{}", trace.word(), trace.word());
        let fields = [
            ("accept", "application/vnd.npm.install-v1+json; q=1.0, application/json; q=0.8, */*"),
            ("npm-command", "install"),
            ("npm-session", session.as_str()),
            ("npm-auth-type", "web"),
            ("pacote-req-type", "packument"),
            ("user-agent", agent),
        ];
        let scoped = if at % 4 == 0 { format!("/@types%2f{name}") } else { format!("/{name}") };
        trace.send("GET", &scoped, &fields, (0, 25_000)).wait(15);
        let (major, minor) = (trace.below(20), trace.below(30));
        let spec = format!("{name}@{major}.{minor}.1");
        let fields = [
            ("accept", "*/*"),
            ("npm-command", "install"),
            ("npm-session", session.as_str()),
            ("pacote-pkg-id", spec.as_str()),
            ("pacote-req-type", "tarball"),
            ("pacote-version", "17.0.6"),
            ("user-agent", agent),
        ];
        trace.send("GET", &format!("/{name}/-/{name}-{major}.{minor}.1.tgz"), &fields, (0, 18_000)).wait(15);
    }
    trace.send("POST", "/-/npm/v1/security/advisories/bulk", &[JSON, ("user-agent", agent)], (30_000, 2_000));
    trace.assert_quiet("npm install");
}

#[test]
fn git_clone_fetch_and_push() {
    let mut trace = Trace::new();
    let agent = ("user-agent", "git/2.43.0");
    let basic = format!("Basic {}", trace.base64(76));
    for round in 0..60 {
        let repository = format!("/team/project-{}.git", round % 7);
        let fields = [
            agent,
            ("accept", "*/*"),
            ("accept-encoding", "deflate, gzip, br, zstd"),
            ("pragma", "no-cache"),
            ("git-protocol", "version=2"),
            ("authorization", basic.as_str()),
        ];
        trace.send("GET", &format!("{repository}/info/refs?service=git-upload-pack"), &fields, (0, 900));
        let fields = [
            agent,
            ("content-type", "application/x-git-upload-pack-request"),
            ("accept", "application/x-git-upload-pack-result"),
            ("git-protocol", "version=2"),
            ("authorization", basic.as_str()),
        ];
        trace
            .send("POST", &format!("{repository}/git-upload-pack"), &fields, (2_500, 4_000_000))
            .wait(20_000);
        if round % 5 == 0 {
            trace.send(
                "GET",
                &format!("{repository}/info/refs?service=git-receive-pack"),
                &[agent, ("authorization", &basic)],
                (0, 900),
            );
            let fields = [
                agent,
                ("content-type", "application/x-git-receive-pack-request"),
                ("accept", "application/x-git-receive-pack-result"),
                ("authorization", basic.as_str()),
            ];
            trace
                .send("POST", &format!("{repository}/git-receive-pack"), &fields, (6_000_000, 300))
                .wait(60_000);
        }
    }
    trace.assert_quiet("git");
}

#[test]
fn cargo_fetch() {
    let mut trace = Trace::new();
    let agent = ("user-agent", "cargo/1.79.0 (ffa9cf99a 2024-06-03)");
    for at in 0..400 {
        let name = trace.word();
        let fields = [agent, ("accept-encoding", "gzip"), ("cargo-protocol", "version=1")];
        let etag = format!("\"{}\"", trace.hex(32));
        let cached = [
            agent,
            ("accept-encoding", "gzip"),
            ("cargo-protocol", "version=1"),
            ("if-none-match", etag.as_str()),
        ];
        let target = format!("/{}/{}/{name}", name.get(..2).unwrap(), name.get(2..4).unwrap());
        if at % 2 == 0 {
            trace.send("GET", &target, &fields, (0, 6_000))
        } else {
            trace.unchanged = true;
            trace.send("GET", &target, &cached, (0, 0))
        };
        let (major, minor) = (trace.below(5), trace.below(200));
        trace
            .send("GET", &format!("/crates/{name}/{name}-{major}.{minor}.0.crate"), &[agent], (0, 60_000))
            .wait(5);
    }
    trace.assert_quiet("cargo fetch");
}

#[test]
fn curl_uploads() {
    let mut trace = Trace::new();
    for at in 0..40 {
        let fields =
            [("user-agent", "curl/8.5.0"), ("accept", "*/*"), ("content-type", "application/octet-stream")];
        trace
            .send("PUT", &format!("/builds/nightly/artifact-{at}.tar.gz"), &fields, (20_000_000, 40))
            .wait(700_000);
    }
    trace.assert_quiet("curl uploads");
}

#[test]
fn language_model_calls() {
    for idle in [2_000, 300_000] {
        let mut trace = Trace::new();
        let bearer = format!("Bearer sk-proj-{}", trace.base64(148));
        for at in 0..600 {
            let (idempotency, retry) =
                (format!("stainless-node-retry-{}", trace.uuid()), if at % 40 == 7 { "1" } else { "0" });
            let mut fields = vec![
                JSON,
                ("content-type", "application/json"),
                ("user-agent", "OpenAI/Python 1.30.1"),
                ("x-stainless-lang", "python"),
                ("x-stainless-package-version", "1.30.1"),
                ("x-stainless-os", "Linux"),
                ("x-stainless-arch", "x64"),
                ("x-stainless-runtime", "CPython"),
                ("x-stainless-runtime-version", "3.11.8"),
                ("x-stainless-async", "false"),
                ("x-stainless-retry-count", retry),
                ("authorization", bearer.as_str()),
            ];
            let target = ["/v1/chat/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"]
                [trace.below(4) as usize];
            if at % 3 == 0 {
                fields.push(("idempotency-key", &idempotency));
            }
            let (sent, received) = (20_000 + trace.below(400_000), 1_000 + trace.below(20_000));
            let jitter = trace.below(idle);
            trace.send("POST", target, &fields, (sent, received)).wait(idle + jitter);
        }
        trace.assert_quiet("language model calls");
    }
}

#[test]
fn language_model_threads_and_runs() {
    let mut trace = Trace::new();
    for _ in 0..40 {
        let (thread, run) = (trace.base64(24), trace.base64(24));
        let fields = [
            JSON,
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "tools-2024-04-04"),
            ("x-api-key", "sk-ant-api03-constant"),
        ];
        trace.send("POST", &format!("/v1/threads/thread_{thread}/runs"), &fields, (4_000, 1_500));
        for _ in 0..5 + trace.below(20) {
            trace
                .send("GET", &format!("/v1/threads/thread_{thread}/runs/run_{run}"), &fields, (0, 1_500))
                .wait(2_000);
        }
    }
    trace.assert_quiet("threads and runs");
}

#[test]
fn s3_multipart_uploads() {
    let mut trace = Trace::new();
    let token = trace.base64(900);
    let (access, date) = ("ASIAIOSFODNN7EXAMPLE", 20_240_131);
    for file in 0..6 {
        let upload = trace.base64(128);
        for part in 1..=80 {
            let (signature, digest, invocation, checksum) =
                (trace.hex(64), trace.hex(64), trace.uuid(), trace.base64(6));
            let time = format!("{date}T{:02}{:02}{:02}Z", 10 + file, part % 60, part % 60);
            let authorization = format!(
                "AWS4-HMAC-SHA256 Credential={access}/{date}/us-east-1/s3/aws4_request, SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token, Signature={signature}"
            );
            let fields = [
                (
                    "user-agent",
                    "aws-sdk-go-v2/1.24.0 os/linux lang/go#1.21.5 md/GOOS#linux md/GOARCH#amd64 api/s3#1.47.5",
                ),
                ("accept-encoding", "identity"),
                ("amz-sdk-invocation-id", invocation.as_str()),
                ("amz-sdk-request", "attempt=1; max=3"),
                ("authorization", authorization.as_str()),
                ("content-type", "application/octet-stream"),
                ("x-amz-checksum-crc32", checksum.as_str()),
                ("x-amz-content-sha256", digest.as_str()),
                ("x-amz-date", time.as_str()),
                ("x-amz-security-token", token.as_str()),
            ];
            trace
                .send(
                    "PUT",
                    &format!(
                        "/bucket/backups/day-{file}.tar?partNumber={part}&uploadId={upload}&x-id=UploadPart"
                    ),
                    &fields,
                    (8 << 20, 0),
                )
                .wait(900);
        }
        trace
            .send("POST", &format!("/bucket/backups/day-{file}.tar?uploadId={upload}"), &[], (9_000, 600))
            .wait(1_000);
    }
    trace.assert_quiet("S3 multipart");
}

#[test]
fn presigned_urls() {
    let mut trace = Trace::new();
    let token = trace.base64(1_200);
    for part in 1..=200 {
        let (signature, object) = (trace.hex(64), trace.uuid());
        let second = part % 60;
        let target = format!(
            "/bucket/{object}.bin?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=ASIAIOSFODNN7EXAMPLE%2F20240131%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20240131T1010{second:02}Z&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Security-Token={token}&X-Amz-Signature={signature}"
        );
        trace
            .send(
                "GET",
                &target,
                &[("accept", "*/*"), ("user-agent", "python-requests/2.31.0")],
                (0, 200_000),
            )
            .wait(700);
        let (signature, policy) = (trace.base64(342), trace.base64(240));
        let target = format!(
            "/media/{object}.jpg?Expires=17067{part:05}&Policy={policy}&Signature={signature}&Key-Pair-Id=K2JCJMDEHXQW5F"
        );
        trace
            .send("GET", &target, &[("accept", "*/*"), ("user-agent", "python-requests/2.31.0")], (0, 90_000))
            .wait(300);
    }
    // Uploads to signed URLs are answered with nothing.
    for part in 1..=60 {
        let signature = trace.hex(64);
        let target = format!(
            "/bucket/upload.bin?partNumber={part}&uploadId=constant&X-Amz-Date=20240131T101000Z&X-Amz-Security-Token={token}&X-Amz-Signature={signature}"
        );
        trace.send("PUT", &target, &[("user-agent", "python-requests/2.31.0")], (8 << 20, 0)).wait(900);
    }
    trace.assert_quiet("presigned URLs");
}

#[test]
fn chromium_pages_with_cookies() {
    let mut trace = Trace::new();
    let agent = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/121.0.0.0 Safari/537.36";
    let mut session = trace.base64(420);
    let key = trace.key;
    for page in 0..60_u64 {
        let seconds = 1_700_000_000 + page * 55;
        trace.shape.learn_cookie(&key, b"_app_session", session.as_bytes());
        let cookie = format!(
            "_ga=GA1.1.123456789.1700000000; _ga_ABCDEF1234=GS1.1.1700000000.1.1.{seconds}.60.0.0; _app_session={session}; theme=dark"
        );
        let topic = format!("{}/{}", trace.word(), trace.word());
        let referer = format!("https://www.example.com/docs/{}", trace.word());
        let common = [
            ("sec-ch-ua", r#""Not A(Brand";v="99", "Google Chrome";v="121", "Chromium";v="121""#),
            ("sec-ch-ua-mobile", "?0"),
            ("sec-ch-ua-platform", "\"Linux\""),
            ("user-agent", agent),
            ("accept-encoding", "gzip, deflate, br"),
            ("accept-language", "en-US,en;q=0.9"),
            ("cookie", cookie.as_str()),
            ("referer", referer.as_str()),
        ];
        let with = |more: &[(&'static str, &'static str)]| [&common[..], more].concat();
        let html = [
            (
                "accept",
                "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
            ),
            ("upgrade-insecure-requests", "1"),
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-user", "?1"),
            ("sec-fetch-dest", "document"),
            ("priority", "u=0, i"),
        ];
        trace.send("GET", &format!("/docs/{topic}"), &with(&html), (0, 45_000)).wait(300);
        session = trace.base64(420);
        trace.shape.learn_cookie(&key, b"_app_session", session.as_bytes());
        for asset in 0..12 {
            let hash = trace.hex(20);
            let (path, accept) = [
                ("js", "*/*"),
                ("css", "text/css,*/*;q=0.1"),
                ("png", "image/avif,image/webp,image/apng,image/*,*/*;q=0.8"),
            ][asset % 3];
            let dest =
                [("sec-fetch-dest", "script"), ("sec-fetch-dest", "style"), ("sec-fetch-dest", "image")]
                    [asset % 3];
            let observation = with(&[
                ("accept", accept),
                dest,
                ("sec-fetch-mode", "no-cors"),
                ("sec-fetch-site", "same-origin"),
            ]);
            trace.send("GET", &format!("/assets/chunk-{hash}.{path}"), &observation, (0, 30_000)).wait(20);
        }
        trace.wait(54_000);
    }
    trace.assert_quiet("Chromium pages");
}

#[test]
fn page_analytics() {
    let mut trace = Trace::new();
    for page in 0..60_u64 {
        let (load, title, path) = (trace.number(), trace.word(), trace.word());
        for hit in 1..=3 {
            let (engaged, fired, parameter) =
                (trace.below(20_000), trace.below(90_000), 1_700_000_000 + page * 60);
            let target = format!(
                "/g/collect?v=2&tid=G-ABCDEF1234&gtm=45je41o0v9102341234za200&_p={load}&gcd=13l3l3l3l1&npa=0&dma=0&cid=123456789.1700000000&ul=en-us&sr=1920x1080&uaa=x86&uab=64&uamb=0&uap=Linux&_s={hit}&sid={parameter}&sct=1&seg=1&dl=https%3A%2F%2Fwww.example.com%2Fdocs%2F{path}&dt=Docs%20-%20{title}%20-%20Example%20Project&en=scroll&_et={engaged}&tfd={fired}"
            );
            let fields = [
                ("accept", "*/*"),
                ("origin", "https://www.example.com"),
                ("user-agent", "Mozilla/5.0 Chrome/121.0.0.0"),
                ("sec-fetch-mode", "no-cors"),
            ];
            trace.send("POST", &target, &fields, (0, 0)).wait(4_000 + engaged);
        }
    }
    trace.assert_quiet("page analytics");
}

#[test]
fn grpc_and_telemetry() {
    for interval in [5_000, 10_000, 60_000] {
        let mut trace = Trace::new();
        for _ in 0..86_400_000 / interval / 4 {
            let fields = [
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                ("user-agent", "OTel-OTLP-Exporter-Go/1.24.0 grpc-go/1.61.0"),
                ("grpc-accept-encoding", "gzip"),
                ("grpc-timeout", "9999969u"),
            ];
            let bytes = 600 + trace.below(3_000);
            trace.send(
                "POST",
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
                &fields,
                (bytes, 5),
            );
            let jitter = trace.below(20);
            trace.wait(interval + jitter);
        }
        trace.assert_quiet("telemetry export");
    }
    let mut trace = Trace::new();
    for _ in 0..3_000 {
        let (trace_id, span, timeout) =
            (trace.hex(32), trace.hex(16), format!("{}m", 4_000 + trace.below(1_000)));
        let parent = format!("00-{trace_id}-{span}-01");
        let method = ["Get", "List", "Watch", "Put"][trace.below(4) as usize];
        let fields = [
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("traceparent", parent.as_str()),
            ("grpc-timeout", timeout.as_str()),
            ("user-agent", "grpc-go/1.61.0"),
        ];
        trace.send("POST", &format!("/store.v1.Store/{method}"), &fields, (300, 900)).wait(250);
    }
    trace.assert_quiet("gRPC calls");
}

#[test]
fn polling() {
    let mut trace = Trace::new();
    for _ in 0..20_000 {
        trace.send(
            "GET",
            "/v1/jobs/7f3a0b1c-8d9e-4f00-a1b2-c3d4e5f60718",
            &[JSON, ("user-agent", "poller/1")],
            (0, 200),
        );
        let jitter = trace.below(30);
        trace.wait(2_000 + jitter);
    }
    trace.assert_quiet("polling one job");

    let mut trace = Trace::new();
    for at in 0..20_000 {
        trace
            .send("GET", &format!("/v1/jobs/{}", ["alpha", "beta", "gamma"][at % 3]), &[JSON], (0, 200))
            .wait(700);
    }
    trace.assert_quiet("polling three jobs in turn");

    let mut trace = Trace::new();
    for _ in 0..5_000 {
        let target = format!("/status.json?_={}", trace.now_ms);
        trace.send("GET", &target, &[JSON], (0, 400));
        let jitter = trace.below(30);
        trace.wait(5_000 + jitter);
    }
    trace.assert_quiet("polling with the time against caches");
}

#[test]
fn pagination() {
    let mut trace = Trace::new();
    for repository in 0..8 {
        for page in 1..=90 {
            let fields = [
                ("accept", "application/vnd.github+json"),
                ("authorization", "Bearer ghp_constant"),
                ("x-github-api-version", "2022-11-28"),
                ("user-agent", "octokit-core.js/5.0.0"),
            ];
            trace
                .send(
                    "GET",
                    &format!("/repos/team/project-{repository}/issues?state=all&per_page=100&page={page}"),
                    &fields,
                    (0, 200_000),
                )
                .wait(1_100);
        }
        for _ in 0..100 {
            let commit = trace.hex(40);
            trace
                .send(
                    "GET",
                    &format!("/repos/team/project-{repository}/commits/{commit}"),
                    &[JSON],
                    (0, 9_000),
                )
                .wait(300);
        }
        for _ in 0..40 {
            let cursor = trace.base64(32);
            trace
                .send(
                    "GET",
                    &format!("/repositories/1234/issues?after={cursor}&per_page=100"),
                    &[JSON],
                    (0, 150_000),
                )
                .wait(900);
        }
    }
    trace.assert_quiet("pagination");
}

#[test]
fn registry_pulls() {
    let mut trace = Trace::new();
    let agent = (
        "user-agent",
        "docker/25.0.1 go/go1.21.6 git-commit/71fa3ab kernel/6.1 os/linux arch/amd64 UpstreamClient(Docker-Client/25.0.1)",
    );
    for image in 0..12 {
        // {"alg":"RS256"} and {"access":"…"}
        let (claims, signature) = (trace.base64(329), trace.base64(340));
        let claims = base64(format!("{{\"access\":\"{claims}\"}}").as_bytes());
        let token = format!("Bearer eyJhbGciOiJSUzI1NiJ9.{claims}.{signature}AA");
        let repository = format!("/v2/library/{}", trace.word());
        let accept = "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json";
        trace.send(
            "HEAD",
            &format!("{repository}/manifests/1.{image}"),
            &[agent, ("accept", accept), ("authorization", &token)],
            (0, 0),
        );
        let digest = trace.hex(64);
        trace.send(
            "GET",
            &format!("{repository}/manifests/sha256:{digest}"),
            &[agent, ("accept", accept), ("authorization", &token)],
            (0, 2_400),
        );
        let mut layers = Vec::new();
        for _ in 0..10 {
            let digest = trace.hex(64);
            layers.push(trace.start(
                "GET",
                &format!("{repository}/blobs/sha256:{digest}"),
                &[agent, ("authorization", &token)],
            ));
            trace.wait(50);
        }
        for layer in layers {
            let outcome =
                super::RequestOutcome { sent_bytes: 0, received_bytes: 4_000_000, unchanged: false };
            trace.shape.observe_outcome(layer, outcome, trace.now_ms, &Default::default(), &mut trace.found);
            trace.wait(900);
        }
        trace.wait(400_000);
    }
    trace.assert_quiet("registry pulls");
}
