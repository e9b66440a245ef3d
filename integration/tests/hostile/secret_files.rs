//! What credentials need on the machine: files that others cannot read, variables, sockets; what happens when they are
//! missing at the start, at a reload and in `check`; and what the process gives away of them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::{BufMut, Bytes};
use http::{HeaderMap, Response};
use integration::{sandbar, text, write_secret};
use tokio::net::UnixListener;

use crate::instance::wait_until;
use crate::secret_sources::SourceFiles;

const VALUE: &str = "sk-0123456789-abcdef";

/// Runs `check` or `serve`, which must end by itself; what it says and its status.
fn run(command: &str, config: &Path, more: &[&str]) -> (String, i32) {
    let mut sandbar = sandbar();
    sandbar.arg(command);
    match command {
        "serve" => sandbar.arg("-c").arg(config),
        _ => sandbar.arg(config),
    };
    let output = sandbar.args(more).output().unwrap();
    (text(&[output.stdout, output.stderr].concat()), output.status.code().unwrap())
}

#[test]
fn p11_files_that_are_missing_open_or_malformed_keep_it_from_starting() {
    for (what, content, mode, why) in [
        ("missing", None, 0, "cannot read the file "),
        (
            "read by everybody",
            Some(VALUE),
            0o644,
            "every user of the machine can read its file (mode 644): chmod 600 ",
        ),
        ("written by the group", Some(VALUE), 0o660, "other users can write its file (mode 660): chmod 600 "),
        ("empty", Some("\n"), 0o600, "it is empty"),
        ("short", Some("sk-0"), 0o600, "it is shorter than 8 characters"),
        ("two lines", Some("sk-0123456789\r\nX-More: yes"), 0o600, "a header field cannot carry"),
    ] {
        let files = SourceFiles::new();
        let key = files.path("key");
        if let Some(content) = content {
            write_secret(&key, content);
            fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        }
        let config = files.configure("file = \"key\"");
        for command in ["check", "serve"] {
            let (said, status) = run(command, &config, &[]);
            assert_eq!(status, 2, "{command}, {what}: {said}");
            assert!(said.contains("credential `key`: ") && said.contains(why), "{command}, {what}: {said}");
            assert!(!said.contains("sk-0"), "{command}, {what}: {said}");
        }
        let (said, status) = run("check", &config, &["--without-credentials"]);
        assert_eq!(status, 0, "{what}: {said}");
        let (said, status) = run("check", &config, &["--json"]);
        assert!(
            status == 2 && said.contains("\"level\":\"error\"") || said.contains("\"level\": \"error\""),
            "{said}"
        );
    }
}

#[test]
fn p11_every_file_of_a_source_is_checked() {
    let files = SourceFiles::new();
    files.make_key("key.pem");
    write_secret(&files.path("good"), "a-good-secret-0123\n");
    write_secret(
        &files.path("bad.pem"),
        "-----BEGIN PRIVATE KEY-----\nc2VjcmV0LXNlY3JldA==\n-----END PRIVATE KEY-----\n",
    );
    write_secret(&files.path("bad.json"), "{\"client_email\": \"a\", \"private_key\": \"secret-secret\", }");
    write_secret(
        &files.path("aws"),
        "[one]\naws_access_key_id = AKIA0123456789\naws_secret_access_key = secret-secret\n",
    );
    let oauth =
        |rest: &str| format!("oauth2 = {{ token_url = \"https://a.test/\", client_id = \"c\", {rest} }}");
    let sigv4 = "form = { sigv4 = { service = \"s3\", region = \"eu-central-1\" } }\n";
    for (source, why) in [
        (oauth("client_secret_file = \"good\""), None),
        (oauth("client_secret_file = \"none\""), Some("cannot read the file ")),
        (
            oauth("client_secret_env = \"SANDBAR_TEST_NONE\""),
            Some("the environment variable SANDBAR_TEST_NONE is not set"),
        ),
        (oauth("grant = \"refresh_token\", refresh_token_file = \"none\""), Some("cannot read the file ")),
        (oauth("client_auth = \"private_key_jwt\", key_file = \"key.pem\""), None),
        (
            oauth("client_auth = \"private_key_jwt\", key_file = \"bad.pem\""),
            Some("unsupported key for signing tokens"),
        ),
        (oauth("grant = \"jwt_bearer\", key_file = \"good\""), Some("contains no private key")),
        (
            "google = { file = \"bad.json\", scopes = [\"a\"] }".to_owned(),
            Some("not a key file of a service account"),
        ),
        (
            "github_app = { id = \"1\", key_file = \"none\", installation = 1 }".to_owned(),
            Some("cannot read the file "),
        ),
        (format!("{sigv4}aws = {{ credentials_file = \"aws\", profile = \"one\" }}"), None),
        (
            format!("{sigv4}aws = {{ credentials_file = \"aws\", profile = \"two\" }}"),
            Some("it has no profile `two`"),
        ),
        (
            "env = \"SANDBAR_TEST_NONE\"".to_owned(),
            Some("the environment variable SANDBAR_TEST_NONE is not set"),
        ),
    ] {
        let config = files.configure(&source);
        let (said, status) = run("check", &config, &[]);
        assert_eq!(status, if why.is_some() { 2 } else { 0 }, "{source}: {said}");
        assert!(why.is_none_or(|why| said.contains(why)), "{source}: {said}");
        assert!(!said.contains("secret-secret") && !said.contains("AKIA"), "{said}");
    }
}

#[test]
fn p11_mounted_secrets_may_be_readable_to_their_container() {
    let files = SourceFiles::new();
    // As the kubelet mounts a Secret: names are links through `..data`, which is swapped as a whole.
    let volume = files.path("volume");
    fs::create_dir_all(volume.join("..one")).unwrap();
    fs::write(volume.join("..one/key"), VALUE).unwrap();
    symlink("..one", volume.join("..data")).unwrap();
    symlink("..data/key", volume.join("key")).unwrap();
    fs::set_permissions(volume.join("..one/key"), fs::Permissions::from_mode(0o644)).unwrap();
    let config = files.configure("file = \"volume/key\"");
    let (said, status) = run("check", &config, &[]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("warning: credential `key`: every user of this container can read "), "{said}");

    let volume = volume.display().to_string();
    let scene = files.start(&format!("file = \"{volume}/key\""));
    scene.wait_until_sent(VALUE);
    let volume = Path::new(&volume);
    fs::create_dir(volume.join("..two")).unwrap();
    fs::write(volume.join("..two/key"), "sk-rotated-0123456789").unwrap();
    symlink("..two", volume.join("..new")).unwrap();
    fs::rename(volume.join("..new"), volume.join("..data")).unwrap();
    scene.wait_until_sent("sk-rotated-0123456789");
}

// proves: credential.env, credential.oauth2.client_secret_env
#[test]
fn p11_a_variable_of_sandbar_holds_a_value() {
    let files = SourceFiles::new();
    let (said, status) = files.try_source_with("env = \"SANDBAR_TEST_KEY\"", &[("SANDBAR_TEST_KEY", VALUE)]);
    assert_eq!((status, said["length"].as_u64()), (0, Some(VALUE.len() as u64)), "{said}");
    assert!(!said.to_string().contains(VALUE));
    for value in ["short", "", "sk-01234\n56789"] {
        let (said, status) =
            files.try_source_with("env = \"SANDBAR_TEST_KEY\"", &[("SANDBAR_TEST_KEY", value)]);
        assert_eq!(status, 1, "{value:?}: {said}");
    }
    let url = files.url("/token");
    let source = format!(
        "oauth2 = {{ token_url = \"{url}\", client_id = \"c\", client_secret_env = \"SANDBAR_TEST_KEY\", client_auth = \"post\" }}"
    );
    let (said, status) = files.try_source_with(&source, &[("SANDBAR_TEST_KEY", VALUE)]);
    assert_eq!(status, 0, "{said}");
    assert!(text(&files.last_request().body).contains(&format!("client_secret={VALUE}")));
}

// proves: credential.aws.access_key_id_file, credential.aws.access_key_id_env, credential.aws.secret_access_key_file, credential.aws.secret_access_key_env, credential.aws.session_token_file, credential.aws.session_token_env, credential.aws.credentials_file, credential.aws.profile
#[test]
fn p11_keys_of_aws_come_from_files_variables_and_profiles() {
    let files = SourceFiles::new();
    for (name, text) in
        [("id", "AKIA0123456789"), ("secret", "a-secret-0123456789"), ("token", "a-token-0123456789")]
    {
        write_secret(&files.path(name), text);
    }
    let profiles = "[default]\naws_access_key_id = AKIADEFAULT\naws_secret_access_key = default-0123\n\
        [ci]\naws_access_key_id = AKIACI000000\naws_secret_access_key = of-the-ci-0123456\n";
    write_secret(&files.path("profiles"), profiles);
    let all =
        [("T_ID", "AKIA0123456789"), ("T_SECRET", "the-secret-in-a-variable"), ("T_TOKEN", "token-0123")];
    let try_keys = |keys: &str, variables: &[(&str, &str)]| {
        let form = "form = { sigv4 = { service = \"s3\", region = \"eu-central-1\" } }";
        files.try_source_with(&format!("{form}\naws = {{ {keys} }}"), variables)
    };
    let in_files =
        "access_key_id_file = \"id\", secret_access_key_file = \"secret\", session_token_file = \"token\"";
    let in_variables =
        "access_key_id_env = \"T_ID\", secret_access_key_env = \"T_SECRET\", session_token_env = \"T_TOKEN\"";
    for (keys, length) in [
        (in_files, 19),
        (in_variables, 24),
        ("credentials_file = \"profiles\"", 12),
        ("credentials_file = \"profiles\", profile = \"ci\"", 17),
    ] {
        let (said, status) = try_keys(keys, &all);
        assert_eq!((status, said["length"].as_u64()), (0, Some(length)), "{keys}: {said}");
        assert!(!said.to_string().contains("AKIA"), "{said}");
    }
    for missing in 0..all.len() {
        let rest: Vec<_> =
            all.iter().enumerate().filter(|(at, _)| *at != missing).map(|(_, one)| *one).collect();
        let (said, status) = try_keys(in_variables, &rest);
        let (name, _) = all[missing];
        assert!(status == 1 && said["error"].as_str().unwrap().contains(name), "{said}");
    }
    for name in ["id", "secret", "token"] {
        let path = files.path(name);
        let kept = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let (said, status) = try_keys(in_files, &[]);
        assert!(
            status == 1 && said["error"].as_str().unwrap().contains("cannot read the file "),
            "{name}: {said}"
        );
        write_secret(&path, &kept);
    }
}

/// What the Workload API of the test answers.
#[derive(Clone)]
enum WorkloadReply {
    Message(Vec<u8>),
    Status(&'static str),
    Silence,
}

/// Calls that the Workload API got: the fields and the message of each.
type WorkloadCalls = Arc<Mutex<Vec<(HeaderMap, Vec<u8>)>>>;

/// A Workload API on a unix socket: HTTP/2 without TLS, as gRPC speaks it.
fn start_workload_api(socket: &Path, reply: WorkloadReply) -> WorkloadCalls {
    let calls = WorkloadCalls::default();
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let seen = calls.clone();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = UnixListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve_workload(stream, reply.clone(), seen.clone()));
            }
        });
    });
    calls
}

async fn serve_workload(stream: tokio::net::UnixStream, reply: WorkloadReply, calls: WorkloadCalls) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    let mut open = Vec::new();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let (parts, mut body) = request.into_parts();
        assert_eq!(parts.uri.path(), "/SpiffeWorkloadAPI/FetchJWTSVID");
        let (calls, reply) = (calls.clone(), reply.clone());
        open.push(tokio::spawn(async move {
            let mut message = Vec::new();
            while let Some(Ok(piece)) = body.data().await {
                message.extend_from_slice(&piece);
            }
            calls.lock().unwrap().push((parts.headers, message));
            let head = Response::builder().header("content-type", "application/grpc");
            match reply {
                WorkloadReply::Message(message) => {
                    let mut stream = respond.send_response(head.body(()).unwrap(), false).unwrap();
                    let mut framed = vec![0];
                    framed.put_u32(message.len() as u32);
                    framed.extend(message);
                    stream.send_data(Bytes::from(framed), false).unwrap();
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", "0".parse().unwrap());
                    stream.send_trailers(trailers).unwrap();
                }
                WorkloadReply::Status(code) => {
                    let head = head.header("grpc-status", code).header("grpc-message", "no identity issued");
                    respond.send_response(head.body(()).unwrap(), true).unwrap();
                }
                WorkloadReply::Silence => std::future::pending().await,
            }
        }));
    }
}

/// A token with an end, as an agent would sign it.
fn svid(id: &str, until: u64) -> Vec<u8> {
    let claims = URL_SAFE_NO_PAD.encode(format!("{{\"sub\":\"{id}\",\"exp\":{until}}}"));
    let token = format!("eyJhbGciOiJFUzI1NiJ9.{claims}.c2lnbmF0dXJl");
    let mut inner = Vec::new();
    for (number, text) in [(1u8, id), (2, token.as_str())] {
        inner.push(number << 3 | 2);
        inner.push(u8::try_from(text.len()).unwrap());
        inner.extend(text.as_bytes());
    }
    assert!(inner.len() < 1 << 14);
    [&[0x0a, (inner.len() & 0x7f) as u8 | 0x80, (inner.len() >> 7) as u8][..], &inner].concat()
}

// proves: credential.spiffe.socket, credential.spiffe.audience, credential.spiffe.id
#[test]
fn p11_a_workload_api_gives_an_identity() {
    let two = [svid("spiffe://one.test/a", 4_000_000_000), svid("spiffe://one.test/b-longer", 4_000_000_000)]
        .concat();
    let of_the_second = svid("spiffe://one.test/b-longer", 4_000_000_000).len()
        - 3
        - 2
        - "spiffe://one.test/b-longer".len()
        - 2;
    for (what, reply, id, wanted) in [
        ("the one asked for", WorkloadReply::Message(two.clone()), "b-longer", Ok(of_the_second)),
        ("another", WorkloadReply::Message(two), "c", Err("it has no such identity")),
        ("none", WorkloadReply::Message(Vec::new()), "a", Err("it has no such identity")),
        ("refused", WorkloadReply::Status("7"), "a", Err("gRPC status 7 no identity issued")),
        ("huge", WorkloadReply::Message(vec![0x0a; 70_000]), "a", Err("more than 65536 bytes")),
        ("over", WorkloadReply::Message(svid("spiffe://one.test/a", 1)), "a", Ok(0)),
        ("silent", WorkloadReply::Silence, "a", Err("has not answered within 1 s")),
    ] {
        let files = SourceFiles::new();
        let calls = start_workload_api(&files.path("api.sock"), reply);
        let source = format!(
            "timeout_seconds = 1\nspiffe = {{ socket = \"api.sock\", audience = [\"https://a.test\"], id = \"spiffe://one.test/{id}\" }}"
        );
        let (said, status) = files.try_source(&source);
        let (fields, message) = calls.lock().unwrap().first().cloned().expect("it was asked");
        assert_eq!(fields["workload.spiffe.io"], "true", "{what}");
        let asked = text(&message);
        assert!(
            asked.contains("https://a.test") && asked.contains(&format!("spiffe://one.test/{id}")),
            "{what}"
        );
        match wanted {
            Ok(0) => assert_eq!(said["expires_in_seconds"], 0, "{what}: {said}"),
            Ok(length) => {
                assert_eq!((status, said["length"].as_u64()), (0, Some(length as u64)), "{what}: {said}")
            }
            Err(why) => {
                assert_eq!(status, 1, "{what}: {said}");
                assert!(said["error"].as_str().unwrap().contains(why), "{what}: {said}");
            }
        }
    }
}

#[test]
fn p11_credentials_follow_a_reload_and_a_broken_one_rejects_it() {
    let files = SourceFiles::new();
    for (name, value) in [("one", "sk-of-file-one-0123"), ("two", "sk-of-file-two-0123")] {
        write_secret(&files.path(name), value);
    }
    let (one, two) = (files.path("one").display().to_string(), files.path("two").display().to_string());
    let scene = files.start(&format!("file = \"{one}\""));
    scene.wait_until_sent("sk-of-file-one-0123");
    // Another file: at the next request, without a restart.
    let said = scene.world.reconfigure(|text| text.replace(&one, &two));
    assert!(!said.contains("restart"), "{said}");
    scene.wait_until_sent("sk-of-file-two-0123");
    let answer = scene.send("b.test", &scene.other, "X-Data: sk-of-file-one-0123\r\n");
    scene.world.assert_refused("the value of before", &answer, 403, "credential_leaving");

    // A credential that cannot be used rejects the load, and nothing changes.
    fs::write(scene.secrets.path().join("open"), "sk-of-file-open-0123").unwrap();
    fs::set_permissions(scene.secrets.path().join("open"), fs::Permissions::from_mode(0o644)).unwrap();
    let open = scene.secrets.path().join("open").display().to_string();
    let config = scene.world.config_path();
    let good = fs::read_to_string(&config).unwrap();
    fs::write(&config, good.replace(&two, &open)).unwrap();
    let reload = sandbar().args(["reload", "--wait", "-c"]).arg(&config).output().unwrap();
    let said = text(&[reload.stdout, reload.stderr].concat());
    assert!(
        !reload.status.success() && said.contains("credential `key`: every user of the machine can read"),
        "{said}"
    );
    assert!(!said.contains("sk-of-file"), "{said}");
    assert_eq!(scene.send_bound().status, 200);
    assert_eq!(scene.received().as_deref(), Some("Bearer sk-of-file-two-0123"));
    fs::write(&config, &good).unwrap();

    // Other hosts: the value goes to none of the old ones.
    let port = scene.bound.port();
    let before = scene.bound.requests().len();
    let narrowed = |text: &str| text.replace(&format!("hosts = [\"a.test:{port}\"]"), "hosts = [\"c.test\"]");
    fs::write(&config, narrowed(&good)).unwrap();
    let reload = sandbar().args(["reload", "--wait", "-c"]).arg(&config).output().unwrap();
    assert!(!reload.status.success(), "a rule names it for a host that is not its own");
    fs::write(&config, &good).unwrap();
    scene.world.run_command(&["reload", "--wait"]);
    assert_eq!(scene.bound.requests().len(), before);

    // A second one, added with the rule that uses it, and removed with it.
    let policy = scene.world.policy_dir().join("p.toml");
    let rules = fs::read_to_string(&policy).unwrap();
    let added = format!(
        "{good}[[credential]]\nname = \"more\"\nfile = \"{one}\"\nhosts = [\"b.test:{}\"]\n",
        scene.other.port()
    );
    fs::write(&config, &added).unwrap();
    fs::write(&policy, rules.replace("name = \"open\"\n", "name = \"open\"\ncredential = \"more\"\n"))
        .unwrap();
    scene.world.run_command(&["reload", "--wait"]);
    assert_eq!(scene.send_other().status, 200);
    let sent = scene.other.requests().last().unwrap().field("authorization").map(str::to_owned);
    assert_eq!(sent.as_deref(), Some("Bearer sk-of-file-one-0123"));
    let listed = scene.world.run_command(&["secret", "list"]);
    assert!(
        listed.contains("more") && listed.contains(&format!("for b.test:{}", scene.other.port())),
        "{listed}"
    );
    assert_eq!(listed.matches("usable, ").count(), 2, "{listed}");
    fs::write(&policy, &rules).unwrap();
    fs::write(&config, &good).unwrap();
    scene.world.run_command(&["reload", "--wait"]);
    assert_eq!(scene.send_other().status, 200);
    assert_eq!(scene.other.requests().last().unwrap().field("authorization"), None);
    let status = scene.world.run_command(&["status"]);
    assert!(status.contains("key (file): usable") && !status.contains("more (file)"), "{status}");
    for secret in ["sk-of-file-one", "sk-of-file-two"] {
        assert!(!scene.everything_shown().contains(secret));
    }
}

#[test]
fn p11_neither_a_core_dump_nor_an_argument_holds_a_value() {
    let files = SourceFiles::new();
    write_secret(&files.path("key"), VALUE);
    let path = files.path("key").display().to_string();
    let scene = files.start(&format!("file = \"{path}\""));
    scene.wait_until_sent(VALUE);
    let process = format!("/proc/{}", scene.world.pid());
    let limits = fs::read_to_string(format!("{process}/limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().filter(|word| *word == "0").count(), 2, "{core}");
    for file in ["cmdline", "environ"] {
        assert!(!text(&fs::read(format!("{process}/{file}")).unwrap()).contains(VALUE), "{file}");
    }
    wait_until("its status is known", || scene.world.run_command(&["status"]).contains("key (file): usable"));
}
