//! A start that cannot enforce is no start: it says why, and what to do (P16).

use super::scene::{Scene, Setup};

fn refused(setup: Setup, expected: &[&str]) {
    let scene = Scene::stopped(setup);
    let (status, said) = scene.refuse_to_start();
    assert_eq!(status, Some(2), "{said}");
    for part in expected {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
}

fn alone(mode: &str, bind: &str) -> String {
    format!("[[listener]]\nmode = \"{mode}\"\nbind = [\"{bind}\"]\nidentify = \"interface\"\n")
}

#[test]
fn tproxy_without_the_privilege() {
    let drop = "--bounding-set=-net_admin,-net_raw";
    let prefix = ["setpriv", drop, "--inh-caps=-net_admin,-net_raw"].map(str::to_owned).into();
    let listeners = alone("tproxy", "0.0.0.0:15002");
    refused(
        Setup { prefix, listeners, ..Setup::default() },
        &["0.0.0.0:15002", "CAP_NET_ADMIN", "mode = \"redirect\""],
    );
}

#[test]
fn an_address_that_is_taken() {
    let listeners = alone("explicit", "0.0.0.0:3128");
    let scene = Scene::stopped(Setup { listeners, ..Setup::default() });
    let taken = scene.net.gateway.enter(|| std::net::TcpListener::bind("0.0.0.0:3128")).unwrap();
    let (status, said) = scene.refuse_to_start();
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("cannot listen on 0.0.0.0:3128"), "{said}");
    drop(taken);
}

#[test]
fn a_log_that_cannot_be_written() {
    let log = Some(std::path::PathBuf::from("/proc/nowhere"));
    refused(Setup { log, ..Setup::default() }, &["cannot open the access log"]);
}

#[test]
fn a_policy_with_a_fault() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"x\"\nhost = [\"open.example\"]\n".to_owned();
    refused(Setup { policy, ..Setup::default() }, &["p.toml:4:1", "hosts"]);
}

#[test]
fn peer_credentials_where_there_are_none() {
    let listeners =
        "[[listener]]\nmode = \"explicit\"\nbind = [\"0.0.0.0:3128\"]\nidentify = \"unix\"\n";
    refused(Setup { listeners: listeners.to_owned(), ..Setup::default() }, &["unix:PATH"]);
}
