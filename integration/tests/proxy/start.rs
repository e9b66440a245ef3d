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
    assert_start_refused(
        ProxySetup { log, ..ProxySetup::default() },
        &["cannot open the access log"],
    );
}

#[test]
fn p16_a_policy_with_a_fault() {
    let policy = "name = \"p\"\n[[allow]]\nname = \"x\"\nhost = [\"open.example\"]\n".to_owned();
    assert_start_refused(ProxySetup { policy, ..ProxySetup::default() }, &["p.toml:4:1", "hosts"]);
}

#[test]
fn p16_peer_credentials_where_there_are_none() {
    let listeners =
        "[[listener]]\nmode = \"explicit\"\nbind = [\"0.0.0.0:3128\"]\nidentify = \"unix\"\n";
    assert_start_refused(
        ProxySetup { listeners: listeners.to_owned(), ..ProxySetup::default() },
        &["unix:PATH"],
    );
}
