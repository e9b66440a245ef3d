//! P17: tests that exceed each bound of `limits` that a client or resolver can reach.

use std::sync::Arc;
use std::time::Duration;

use dns_filter::Resolver;
use dns_filter::limits::{
    DATAGRAM_BATCH, FLIGHT_WAITERS, IN_FLIGHT_SANDBOX, PRE_RESOLVE_POLICY, QUERY_BYTES, RECORDS,
    TCP_CONNECTIONS, TCP_IDLE_TIMEOUT, TCP_PIPELINE, TCP_WRITE_TIMEOUT, UDP_MAX, UPSTREAM_DEADLINE,
};
use dns_filter::server::{DnsAttribution, DnsFront, DnsListener};
use hickory_proto::rr::RData;
use hickory_proto::rr::rdata::TXT as Text;
use rules::ids::SandboxId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::fixture::{
    A, ALLOW, ClientAnswer, DnsFixture, TXT, build_packet, build_query, count_queries, wire_name,
};
use crate::recording_resolver::{ScriptedReply, plain_reply, reply_with};
use crate::records::permit;

const SOON: Duration = Duration::from_secs(30);
/// A policy with bits for thousands of names.
const RICH: &str = "[[allow]]\nname = \"wild\"\nhosts = [\"*.wild.example\", \"github.com\"]\ndns_bits_per_hour = 1000000000000\n[budget]\ndns_bits_per_hour = 1000000000000\n";

fn serve(world: &DnsFixture, whose: DnsAttribution) -> (std::net::SocketAddr, watch::Sender<bool>) {
    let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 1).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    (address, stop)
}

fn dedicated_attribution() -> DnsAttribution {
    DnsAttribution::Dedicated(SandboxId::parse("s").unwrap())
}

fn frame(packet: &[u8]) -> Vec<u8> {
    [&(packet.len() as u16).to_be_bytes()[..], packet].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_a_query_beyond_the_largest_size_is_refused() {
    let world = DnsFixture::new().await;
    let (address, _stop) = serve(&world, dedicated_attribution());
    let mut long = build_packet(0x100, &wire_name("github.com"), A, 1, None);
    long[11] = 1; // an additional record fills the rest
    long.extend_from_slice(&[0, 0, 16, 0, 1, 0, 0, 0, 0]);
    let rest = QUERY_BYTES - long.len() - 2;
    long.extend_from_slice(&(rest as u16).to_be_bytes());
    long.resize(QUERY_BYTES, 7);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut buffer = [0; 2048];
    client.send_to(&long, address).await.unwrap();
    let length = timeout(SOON, client.recv(&mut buffer)).await.unwrap().unwrap();
    assert_eq!(
        ClientAnswer::parse(buffer[..length].to_vec()).addresses().len(),
        1,
        "the largest size is accepted"
    );
    long.push(7);
    client.send_to(&long, address).await.unwrap();
    client.send_to(&build_query("pastebin.com", A), address).await.unwrap();
    let length = timeout(SOON, client.recv(&mut buffer)).await.unwrap().unwrap();
    let answer = ClientAnswer::parse(buffer[..length].to_vec());
    assert_eq!(answer.ede.as_deref(), Some("not_listed"), "the larger one got no answer");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&frame(&long)).await.unwrap();
    assert_eq!(timeout(SOON, stream.read(&mut [0; 1])).await.unwrap().unwrap_or(0), 0);
    let reasons = world.reasons();
    assert!(reasons.contains(&"dns_malformed".to_owned()), "recorded: {reasons:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_more_datagrams_than_a_batch_are_all_answered() {
    let world = DnsFixture::new().await;
    let (address, _stop) = serve(&world, dedicated_attribution());
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for _ in 0..DATAGRAM_BATCH * 4 {
        client.send_to(&build_query("pastebin.com", A), address).await.unwrap();
    }
    for at in 0..DATAGRAM_BATCH * 4 {
        let got = timeout(SOON, client.recv(&mut [0; 2048])).await;
        assert!(got.is_ok(), "answer {at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_an_answer_over_udp_is_at_most_udp_max() {
    let policy = "[[allow]]\nname = \"t\"\nhosts = [\"github.com\"]\ndns_types = [\"TXT\"]\n";
    let text = |at: usize| RData::TXT(Text::new(vec![format!("{at:03}{}", "x".repeat(90))]));
    let script = move |query: &hickory_proto::op::Message, over| {
        let mut message = reply_with(query, (0..60).map(|at| ("", 60, text(at))).collect());
        if over == crate::recording_resolver::UpstreamTransport::Udp {
            message.answers.clear();
            message.metadata.truncation = true;
        }
        ScriptedReply::Answer(message)
    };
    let world = DnsFixture::build(policy, script, |_| {}).await;
    let large = build_packet(0x100, &wire_name("github.com"), TXT, 1, Some(65_535));
    let answer = ClientAnswer::parse(world.send_packet(&large).await.unwrap());
    assert!(answer.packet.len() <= UDP_MAX && answer.message.metadata.truncation);
    let over_tcp = crate::fixture::arrival_from("s", dns_filter::message::DnsTransport::Tcp);
    let answer = ClientAnswer::parse(world.filter.answer(&large, &over_tcp).await.unwrap());
    assert_eq!(answer.message.answers.len(), RECORDS, "at most RECORDS records");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_queries_that_join_a_flight_are_bounded() {
    let tune = |settings: &mut rules::configuration::DnsSettings| settings.grid_milliseconds = 500;
    let world = Arc::new(DnsFixture::build(ALLOW, plain_reply, tune).await);
    let ask = |world: Arc<DnsFixture>| async move { world.ask("github.com", A).await.ede };
    let all: Vec<_> = (0..FLIGHT_WAITERS + 20).map(|_| tokio::spawn(ask(world.clone()))).collect();
    let mut refused = 0;
    for one in all {
        refused += usize::from(one.await.unwrap().as_deref() == Some("dns_overload"));
    }
    assert_eq!(refused, 20 - 1, "one leads, FLIGHT_WAITERS join, the rest are refused");
    let denied = world.records_at_stage("denied");
    assert_eq!(count_queries(&denied), 19, "and recorded");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_queries_in_flight_per_sandbox_are_bounded() {
    let tune = |settings: &mut rules::configuration::DnsSettings| {
        (settings.grid_milliseconds, settings.forwards_per_hour) = (60_000, 1_000_000);
        settings.fold_seconds = 10;
    };
    let world = Arc::new(DnsFixture::build(RICH, plain_reply, tune).await);
    let mut all = tokio::task::JoinSet::new();
    for at in 0..IN_FLIGHT_SANDBOX + 50 {
        let world = world.clone();
        all.spawn(async move { world.ask(&format!("n{at}.wild.example"), A).await.ede });
    }
    let mut refused = 0;
    while refused < 50 {
        let ede = timeout(SOON, all.join_next()).await.expect("50 are refused").unwrap().unwrap();
        assert_eq!(ede.as_deref(), Some("dns_overload"));
        refused += 1;
    }
    assert_eq!(world.filter.in_flight(), IN_FLIGHT_SANDBOX);
    all.shutdown().await;
    assert_eq!(world.filter.in_flight(), 0, "cancelled queries are no longer counted");
}

/// Sandbox `s` has as many look-ups without an answer as it can get, `marked` too, and `t` still resolves.
#[tokio::test(flavor = "multi_thread")]
async fn p20_look_ups_without_an_answer_leave_another_sandbox_its_share() {
    let silent_but_one = |query: &hickory_proto::op::Message, over| {
        let name = query.queries[0].name().to_ascii().to_lowercase();
        if name.starts_with("github") { plain_reply(query, over) } else { ScriptedReply::Silence }
    };
    let tune = |settings: &mut rules::configuration::DnsSettings| settings.forwards_per_hour = 1_000_000;
    let world = Arc::new(DnsFixture::build(RICH, silent_but_one, tune).await);
    let mut servers = Vec::new();
    for id in ["s", "marked"] {
        let whose = DnsAttribution::Dedicated(SandboxId::parse(id).unwrap());
        servers.push((serve(&world, whose), UdpSocket::bind("127.0.0.1:0").await.unwrap()));
    }
    let (mut asked, mut answer) = (0, [0; 2048]);
    let mut overloads = Vec::new();
    // Each name is asked for several times: joining queries wait, too.
    while overloads.len() < 20 {
        for ((address, _), client) in &servers {
            let packet = build_query(&format!("n{}.wild.example", asked / 3), A);
            client.send_to(&packet, address).await.unwrap();
            while let Ok(length) = client.try_recv(&mut answer) {
                overloads.extend(ClientAnswer::parse(answer[..length].to_vec()).ede);
            }
        }
        asked += 1;
        assert!(asked < 100_000, "never refused");
        if asked % 64 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await; // lets the workers read
        }
    }
    let whose = DnsAttribution::Dedicated(SandboxId::parse("t").unwrap());
    let (address, _stop) = serve(&world, whose);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(&build_query("github.com", A), address).await.unwrap();
    let length = timeout(SOON, client.recv(&mut answer)).await.unwrap().unwrap();
    assert_eq!(ClientAnswer::parse(answer[..length].to_vec()).addresses().len(), 1);
    let refused = world.records_at_stage("denied");
    let text = serde_json::to_string(&refused).unwrap();
    assert!(text.contains("sandbox `s` uses") && text.contains("asked for 1"), "says whose quota it is");
}

/// Sandbox A has filled its queue before anything is read; all queries of B, C and D are answered.
#[tokio::test(flavor = "multi_thread")]
async fn p20_a_flood_of_queries_drops_only_those_of_its_own_sandbox() {
    let world = DnsFixture::new().await;
    for whose in [DnsAttribution::Interface, DnsAttribution::SourceAddress] {
        let listener = DnsListener { bind: "[::1]:0".parse().unwrap(), whose };
        assert!(
            DnsFront::new(world.filter.clone(), 2).open(&[listener]).is_ok(),
            "the kernel takes the program"
        );
    }
    let addresses = ["127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4"];
    let whose = DnsAttribution::SourceAddress;
    let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 2).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let query = build_query("pastebin.com", A);
    for _ in 0..64 {
        let flooder = UdpSocket::bind((addresses[0], 0)).await.unwrap(); // another port each time
        for _ in 0..2000 {
            flooder.send_to(&query, address).await.unwrap();
        }
    }
    let mut clients = Vec::new();
    for source in &addresses[1..] {
        let client = UdpSocket::bind((*source, 0)).await.unwrap();
        for _ in 0..20 {
            client.send_to(&query, address).await.unwrap();
        }
        clients.push(client);
    }
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    for client in &clients {
        for at in 0..20 {
            timeout(SOON, client.recv(&mut [0; 2048]))
                .await
                .unwrap_or_else(|_| panic!("query {at}"))
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_concurrent_queries_of_a_connection_are_bounded_by_the_pipeline() {
    let tune = |settings: &mut rules::configuration::DnsSettings| {
        (settings.grid_milliseconds, settings.forwards_per_hour) = (1000, 1_000_000);
    };
    let world = DnsFixture::build(RICH, plain_reply, tune).await;
    let (address, _stop) = serve(&world, dedicated_attribution());
    let mut stream = TcpStream::connect(address).await.unwrap();
    let all: Vec<u8> =
        (0..TCP_PIPELINE * 3).flat_map(|at| frame(&build_query(&format!("n{at}.wild.example"), A))).collect();
    stream.write_all(&all).await.unwrap();
    let mut peak = 0;
    for _ in 0..TCP_PIPELINE * 3 {
        peak = peak.max(world.filter.in_flight());
        let length = timeout(SOON, stream.read_u16()).await.unwrap().unwrap();
        stream.read_exact(&mut vec![0; usize::from(length)]).await.unwrap();
    }
    assert!((1..=TCP_PIPELINE).contains(&peak), "{peak}");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_idle_connections_and_those_that_do_not_read_are_cut() {
    let world = DnsFixture::new().await;
    let (address, _stop) = serve(&world, dedicated_attribution());
    let started = Instant::now();
    let mut idle = TcpStream::connect(address).await.unwrap();
    // A small buffer, so that unread answers soon block the writer.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2048).unwrap();
    let mut deaf = socket.connect(address).await.unwrap();
    let packet = frame(&build_query("pastebin.com", A));
    let writing = async { while deaf.write_all(&packet).await.is_ok() {} };
    timeout(TCP_WRITE_TIMEOUT * 4, writing).await.expect("a client that does not read is cut");
    assert_eq!(timeout(SOON, idle.read(&mut [0; 1])).await.unwrap().unwrap_or(0), 0);
    assert!(started.elapsed() < TCP_IDLE_TIMEOUT + TCP_WRITE_TIMEOUT * 3, "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_connections_of_all_sandboxes_are_bounded() {
    let world = DnsFixture::new().await;
    // Each listener belongs to another sandbox; a single one would reach its own limit first.
    let mut open = Vec::new();
    let mut refused = 0;
    let server = {
        let listener = |id: &str| DnsListener {
            bind: "127.0.0.1:0".parse().unwrap(),
            whose: DnsAttribution::Dedicated(SandboxId::parse(id).unwrap()),
        };
        let many: Vec<_> = (0..20).map(|at| listener(&format!("x{at}"))).collect();
        DnsFront::new(world.filter.clone(), 1).open(&many).unwrap()
    };
    let addresses = server.addresses();
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    for address in addresses {
        for _ in 0..60 {
            open.push(TcpStream::connect(address).await.unwrap());
        }
    }
    for stream in &mut open {
        stream.write_all(&frame(&build_query("pastebin.com", A))).await.unwrap_or_default();
        refused += usize::from(!matches!(timeout(SOON, stream.read_u16()).await, Ok(Ok(_))));
    }
    assert!(open.len() - refused <= TCP_CONNECTIONS, "{} of {}", open.len() - refused, open.len());
    assert!(refused >= 1, "{refused}");
    assert!(world.reasons().contains(&"dns_overload".to_owned()), "and recorded");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_the_wait_for_a_silent_resolver_ends_at_the_deadline() {
    let world = DnsFixture::with_script(|_, _| ScriptedReply::Silence).await;
    let started = Instant::now();
    let resolver = Resolver::new(world.filter.clone());
    assert!(resolver.resolve(&permit(&world, "github.com")).await.is_err());
    let took = started.elapsed();
    assert!(took < UPSTREAM_DEADLINE + Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn p17_records_of_a_flood_of_refusals_are_rate_limited() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.fold_seconds = 10).await;
    let started = std::time::Instant::now();
    for at in 0..5000 {
        world.ask(&format!("w{}.example", at % 7), A).await;
    }
    let seconds = started.elapsed().as_secs() as usize + 1;
    let denied = world.records_at_stage("denied");
    let rate = audit::DenialRate::default();
    // Beyond the burst, a rate; and a summary each second.
    let limit = rate.records_burst as usize + (rate.records_per_second as usize + 1) * (seconds + 1);
    assert!(denied.len() <= limit, "{} of {limit}", denied.len());
    assert_eq!(count_queries(&denied), 5000);
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_pre_resolved_names_of_a_policy_are_bounded() {
    let names: Vec<String> =
        (0..PRE_RESOLVE_POLICY + 30).map(|at| format!("\"n{at}.ahead.example\"")).collect();
    let policy = format!("[[allow]]\nname = \"many\"\nhosts = [{}]\n", names.join(", "));
    let tune = |settings: &mut rules::configuration::DnsSettings| {
        settings.pre_resolve = rules::configuration::PreResolve::On;
    };
    let world = DnsFixture::build(&policy, plain_reply, tune).await;
    world.filter.pre_resolve_once().await;
    let asked: std::collections::HashSet<String> = world.recorder.names().into_iter().collect();
    assert!(asked.len() <= PRE_RESOLVE_POLICY, "{}", asked.len());
    assert!(asked.len() > PRE_RESOLVE_POLICY / 4, "{}", asked.len());
}
