//! A start that cannot enforce is no start: it says why, and what to do (P16).

use super::scene::{ProxyScene, ProxySetup};

fn assert_start_refused(setup: ProxySetup, expected: &[&str]) {
    let scene = ProxyScene::prepare(setup);
    let (status, said) = scene.expect_start_refused();
    assert_eq!(status, Some(2), "{said}");
    for part in expected {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
}

/// Starts the program as systemd does: with a bound socket as file descriptor 3, and a socket for notifications.
const SOCKET_ACTIVATION: &str = r#"
import os, socket, sys
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("0.0.0.0", 3128))
listener.listen()
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)  # dup2 of 3 onto itself leaves it close-on-exec
os.environ.update(
    LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="proxy", NOTIFY_SOCKET=sys.argv[1]
)
os.execv(sys.argv[2], sys.argv[2:])
"#;

#[test]
fn a_service_manager_hands_over_a_socket_and_hears_of_ready_and_stop() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
    let heard = || {
        let mut text = [0; 64];
        let length = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).trim().to_owned()
    };
    let path = path.display().to_string();
    let prefix = ["python3", "-c", SOCKET_ACTIVATION, &path].map(str::to_owned).into();
    let listeners = "[[listener]]\nmode = \"explicit\"\nbind = [\"inherited:proxy\"]\nsandbox = \"box-0\"\n";
    let mut scene = ProxyScene::with_setup(ProxySetup {
        prefix,
        listeners: listeners.to_owned(),
        ..ProxySetup::default()
    });
    assert_eq!(heard(), "READY=1");
    let answer = scene.curl(&["-x", "http://10.77.0.1:3128", "http://denied.example/"]);
    assert_eq!(answer.status, 403, "{}", answer.text());
    scene.wait_for_refusal("not_listed", "denied.example");
    scene.stop();
    assert_eq!(heard(), "STOPPING=1");
}

#[test]
fn p16_a_socket_that_was_not_handed_over() {
    for (bind, expected) in [
        ("inherited:proxy", "no inherited socket is named `proxy`"),
        ("inherited:97", "file descriptor 97 is not a socket"),
    ] {
        assert_start_refused(
            ProxySetup { listeners: listener_table("explicit", bind), ..ProxySetup::default() },
            &[expected],
        );
    }
}

fn listener_table(mode: &str, bind: &str) -> String {
    format!("[[listener]]\nmode = \"{mode}\"\nbind = [\"{bind}\"]\nidentify = \"interface\"\n")
}

#[test]
fn p16_tproxy_without_the_privilege() {
    let drop = "--bounding-set=-net_admin,-net_raw";
    let prefix = ["setpriv", drop, "--inh-caps=-net_admin,-net_raw"].map(str::to_owned).into();
    let listeners = listener_table("tproxy", "0.0.0.0:15002");
    assert_start_refused(
        ProxySetup { prefix, listeners, ..ProxySetup::default() },
        &["0.0.0.0:15002", "CAP_NET_ADMIN", "mode = \"redirect\""],
    );
}

#[test]
fn p16_an_address_that_is_taken() {
    let listeners = listener_table("explicit", "0.0.0.0:3128");
    let scene = ProxyScene::prepare(ProxySetup { listeners, ..ProxySetup::default() });
    let taken = scene.net.gateway.enter(|| std::net::TcpListener::bind("0.0.0.0:3128")).unwrap();
    let (status, said) = scene.expect_start_refused();
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("cannot listen on 0.0.0.0:3128"), "{said}");
    drop(taken);
}

#[test]
fn p16_a_log_that_cannot_be_written() {
    let log = Some(std::path::PathBuf::from("/proc/nowhere"));
    assert_start_refused(ProxySetup { log, ..ProxySetup::default() }, &["cannot open the access log"]);
}

// proves: upstream.system_roots
#[test]
fn p16_no_root_to_trust() {
    let mut scene = ProxyScene::prepare(ProxySetup::default());
    let text = std::fs::read_to_string(scene.config_path()).unwrap();
    let without = text.replace("roots = [\"origin.pem\"]\n", "");
    assert_ne!(text, without);
    std::fs::write(scene.config_path(), &without).unwrap();
    let (status, said) = scene.expect_start_refused();
    assert_eq!(status, Some(2), "{said}");
    std::fs::write(scene.config_path(), without.replace("system_roots = false\n", "")).unwrap();
    scene.start(); // the system's roots are trusted unless excluded
}

#[test]
fn p16_a_policy_with_a_fault() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"x\"\nhost = [\"open.example\"]\n".to_owned();
    assert_start_refused(ProxySetup { policy, ..ProxySetup::default() }, &["p.toml:4:1", "hosts"]);
}

#[test]
fn p16_peer_credentials_where_there_are_none() {
    let listeners = "[[listener]]\nmode = \"explicit\"\nbind = [\"0.0.0.0:3128\"]\nidentify = \"unix\"\n";
    assert_start_refused(
        ProxySetup { listeners: listeners.to_owned(), ..ProxySetup::default() },
        &["unix:PATH"],
    );
}
