//! A permitted name that leads where no name may lead (P4).

use std::net::IpAddr;

use super::scene::{ProxyScene, record_host};

#[test]
fn p4_a_permitted_name_that_leads_to_a_forbidden_address_is_refused() {
    let scene = ProxyScene::new();
    for name in ["private", "private6", "mapped", "nat64", "metadata", "gateway"] {
        for (scheme, port) in [("https", 443), ("http", 80)] {
            let host = format!("{name}.example");
            let lie = format!("{host}:{port}:93.184.216.34");
            let got = scene.curl(&["--resolve", &lie, &format!("{scheme}://{host}/")]);
            assert_eq!(got.status, 403, "{scheme} {host}: {got:?}");
            assert!(got.text().contains("private_address"), "{scheme} {host}: {got:?}");
        }
        let host = format!("{name}.example");
        let records = scene.records();
        let refused = |record: &&serde_json::Value| {
            record_host(record) == host && record["status_detail"] == "private_address"
        };
        assert!(records.iter().filter(refused).count() >= 2, "{host}");
    }
    assert_eq!(scene.origin.requests().len(), 0);
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

#[test]
fn p4_of_several_addresses_only_those_that_may_be_dialled_are() {
    let scene = ProxyScene::new();
    let got = scene.curl(&["--resolve", "mixed.example:80:1.2.3.4", "http://mixed.example/"]);
    assert_eq!((got.status, got.text().as_str()), (200, "hello from 93.184.216.38:80\n"));
    let only: IpAddr = "93.184.216.38".parse().unwrap();
    assert!(scene.net.arrivals().iter().all(|(_, address, _)| *address == only));
}

#[test]
fn p4_a_name_that_moves_is_judged_by_where_it_is_now() {
    let scene = ProxyScene::new();
    scene.names.set_addresses("open.example", &["10.78.0.2"]);
    let lie = ["--resolve", "open.example:80:1.2.3.4", "http://open.example/"];
    assert_eq!(scene.curl(&lie).status, 403);
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}

#[test]
fn p4_a_literal_address_is_no_way_around_names() {
    let scene = ProxyScene::new();
    for url in ["http://93.184.216.34/", "http://10.78.0.2/", "http://[2606:2800::34]/"] {
        let got = scene.curl(&[url]);
        assert_eq!(got.status, 400, "{url}: {got:?}");
        assert!(got.text().contains("Sandbar refused this: name_missing"), "{url}");
        let through = scene.curl(&["-x", "http://10.77.0.1:3128", url]);
        assert_eq!(through.status, 403, "{url}: {through:?}");
        let tunnel = scene.curl(&["-x", "http://10.77.0.1:3128", "-p", url]);
        assert_eq!(tunnel.connect, 403, "{url}: {tunnel:?}");
    }
    assert_eq!(scene.net.arrivals().into_iter().collect::<Vec<_>>(), []);
}
