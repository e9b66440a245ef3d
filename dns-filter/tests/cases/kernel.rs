//! Cases 62, 64 and 69, and attribution by mark and interface: tests that need marks, forged packets and redirection,
//! each in its own network namespace. They need root, and fail with a message without it.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use audit::Receipt;
use dns_filter::server::{DnsAttribution, DnsFront, DnsListener};
use dns_filter::upstream::{UpstreamAnswer as Answer, UpstreamClient, UpstreamError};
use dns_filter::{DnsConfig, DnsFilter};
use rules::DomainName;
use rules::configuration::DnsSettings;
use rules::facts::QueryType;
use rules::ids::SandboxId;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::fixture::{A, ClientAnswer, DnsFixture, build_query};

const SOON: Duration = Duration::from_secs(10);

/// Runs a test in a new network namespace with only a loopback interface.
fn run_in_namespace<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let body = move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .expect("cannot create a network namespace: run this test as root");
        run_command("ip", &["link", "set", "lo", "up"]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    std::thread::spawn(body).join().unwrap();
}

fn run_command(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn serve(world: &DnsFixture, bind: &str, whose: DnsAttribution) -> (SocketAddr, watch::Sender<bool>) {
    let listener = DnsListener { bind: bind.parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 1).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    (address, stop)
}

async fn ask_udp(socket: &UdpSocket, to: SocketAddr) -> ClientAnswer {
    socket.send_to(&build_query("github.com", A), to).await.unwrap();
    let mut buffer = [0; 2048];
    let (length, _) = timeout(SOON, socket.recv_from(&mut buffer)).await.unwrap().unwrap();
    ClientAnswer::parse(buffer[..length].to_vec())
}

async fn ask_tcp(mut stream: TcpStream) -> ClientAnswer {
    let packet = build_query("github.com", A);
    stream.write_u16(packet.len() as u16).await.unwrap();
    stream.write_all(&packet).await.unwrap();
    let length = timeout(SOON, stream.read_u16()).await.unwrap().unwrap();
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await.unwrap();
    ClientAnswer::parse(answer)
}

#[test]
fn p2_a_firewall_mark_identifies_the_sandbox_over_udp_and_tcp() {
    run_in_namespace(|| async {
        std::fs::write("/proc/sys/net/ipv4/tcp_fwmark_accept", "1").unwrap();
        let world = DnsFixture::new().await;
        let (address, _stop) = serve(&world, "127.0.0.1:0", DnsAttribution::Mark);
        for (mark, refused) in [(7, None), (8, Some("unknown_channel")), (0, Some("unknown_channel"))] {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            socket2::SockRef::from(&udp).set_mark(mark).unwrap();
            assert_eq!(ask_udp(&udp, address).await.ede.as_deref(), refused, "UDP, {mark}");
            let tcp = TcpSocket::new_v4().unwrap();
            socket2::SockRef::from(&tcp).set_mark(mark).unwrap();
            let answer = ask_tcp(tcp.connect(address).await.unwrap()).await;
            assert_eq!(answer.ede.as_deref(), refused, "TCP, {mark}");
        }
        let records = world.records_at_stage("decision");
        assert_eq!(records[0]["actor"]["app_uid"], "marked", "identified by the mark only");
    });
}

#[test]
fn p2_an_interface_without_a_sandbox_is_refused() {
    run_in_namespace(|| async {
        let world = DnsFixture::new().await;
        let (address, _stop) = serve(&world, "127.0.0.1:0", DnsAttribution::Interface);
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        assert_eq!(ask_udp(&udp, address).await.ede.as_deref(), Some("unknown_channel"));
        let answer = ask_tcp(TcpStream::connect(address).await.unwrap()).await;
        assert_eq!(answer.ede.as_deref(), Some("unknown_channel"));
        let denied = world.records_at_stage("denied");
        assert_eq!(denied.len(), 2);
        for record in denied {
            assert_eq!(record["unmapped"]["sandbar"]["channel"]["detail"], "lo");
        }
    });
}

#[test]
fn case_62_a_connection_to_another_resolver_is_answered_here_and_flagged() {
    run_in_namespace(|| async {
        let world = DnsFixture::new().await;
        let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
        let (address, _stop) = serve(&world, "127.0.0.1:0", whose);
        run_command("ip", &["address", "add", "10.9.9.1/32", "dev", "lo"]);
        run_command("ip", &["route", "add", "8.8.8.8/32", "dev", "lo", "src", "10.9.9.1"]);
        let to = format!(":{}", address.port());
        run_command("nft", &["add", "table", "ip", "t"]);
        run_command("nft", &["add chain ip t o { type nat hook output priority -100 ; }"]);
        run_command("nft", &["add rule ip t o ip daddr 8.8.8.8 tcp dport 53 redirect to", &to]);
        let straight = ask_tcp(TcpStream::connect(address).await.unwrap()).await;
        assert_eq!(straight.addresses().len(), 1);
        let around = ask_tcp(TcpStream::connect("8.8.8.8:53").await.unwrap()).await;
        assert_eq!(around.addresses().len(), 1, "answered by the filter");
        world.wait_for_findings().await;
        let flagged = |record: &serde_json::Value| record.to_string().contains("8.8.8.8");
        let findings = world.records();
        let findings: Vec<_> =
            findings.iter().filter(|one| one["status_detail"] == "dns_bypass_attempt").collect();
        assert_eq!(findings.len(), 1, "only for the redirected query");
        assert!(flagged(findings[0]), "{}", findings[0]);
    });
}

#[test]
fn case_64_a_datagram_from_port_0_is_not_answered_and_is_recorded() {
    run_in_namespace(|| async {
        let world = DnsFixture::new().await;
        let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
        let (address, _stop) = serve(&world, "127.0.0.1:0", whose);
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).unwrap();
        let query = build_query("github.com", A);
        let mut forged = Vec::new();
        for field in [0, address.port(), query.len() as u16 + 8, 0] {
            forged.extend_from_slice(&field.to_be_bytes()); // without a checksum, as IPv4 allows
        }
        forged.extend_from_slice(&query);
        raw.send_to(&forged, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        // A second query on the same socket: once it is answered, the forged one has been processed.
        let honest = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        assert_eq!(ask_udp(&honest, address).await.addresses().len(), 1);
        assert_eq!(world.recorder.seen().len(), 1, "only the second query left");
        let denied = world.records_at_stage("denied");
        assert_eq!(denied.len(), 1);
        assert_eq!(denied[0]["status_detail"], "dns_malformed");
        assert_eq!(denied[0]["src_endpoint"]["ip"], "127.0.0.1");
    });
}

/// An upstream client that panics.
struct PanickingUpstream;

impl UpstreamClient for PanickingUpstream {
    fn ask<'a>(
        &'a self,
        _: &'a DomainName,
        _: QueryType,
        _: &'a Receipt,
    ) -> Pin<Box<dyn Future<Output = Result<Answer, UpstreamError>> + Send + 'a>> {
        panic!("in ask");
    }

    fn has_zone(&self, _: &DomainName) -> bool {
        panic!("in has_zone");
    }
}

const SPECIAL: &str = "[[allow]]\nname = \"in\"\nhosts = [\"db.corp.internal\", \"github.com\"]\nresolves_to = [\"10.0.0.0/8\"]\n";

async fn broken_filter() -> (DnsFixture, Arc<DnsFilter>) {
    let world = DnsFixture::build(SPECIAL, crate::recording_resolver::plain_reply, |_| {}).await;
    let mut settings = DnsSettings::new(Vec::new());
    settings.grid_milliseconds = 0;
    let config = DnsConfig { settings, budgets: None };
    let filter = DnsFilter::with_upstreams(
        world.rules.clone(),
        world.log.clone(),
        config,
        Arc::new(PanickingUpstream),
    );
    (world, filter.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn p16_case_69_a_worker_that_panics_closes_the_port_and_reports_it() {
    for over_tcp in [false, true] {
        let (_world, filter) = broken_filter().await;
        let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
        let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose };
        let server = DnsFront::new(filter, 2).open(&[listener]).unwrap();
        let address = server.addresses()[0];
        let (_stop, stopped) = watch::channel(false);
        let running = tokio::spawn(server.run(stopped));
        let packet = build_query("db.corp.internal", A);
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let mut tcp = TcpStream::connect(address).await.unwrap();
        if over_tcp {
            tcp.write_u16(packet.len() as u16).await.unwrap();
            tcp.write_all(&packet).await.unwrap();
        } else {
            udp.send_to(&packet, address).await.unwrap();
        }
        let ended = timeout(SOON, running).await.expect("the server ends").unwrap();
        assert!(ended.is_err(), "TCP: {over_tcp}");
        assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
        std::net::UdpSocket::bind(address).expect("no worker holds the port");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p16_case_69_a_query_that_panics_has_an_outcome_and_leaks_nothing() {
    let (world, filter) = broken_filter().await;
    let arrived = crate::fixture::arrival_from("s", dns_filter::message::DnsTransport::Udp);
    for _ in 0..3 {
        let (filter, arrived) = (filter.clone(), arrived.clone());
        let asked = tokio::spawn(async move { filter.answer(&build_query("github.com", A), &arrived).await });
        assert!(asked.await.unwrap_err().is_panic());
    }
    assert_eq!(filter.in_flight(), 0);
    let outcomes = world.records_at_stage("outcome");
    assert_eq!(outcomes.len(), 3, "one outcome each");
    assert_eq!(world.recorder.seen().len(), 0);
}
