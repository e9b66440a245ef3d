//! Cases 40 to 42 and 64: the listeners, over real sockets.

use std::net::SocketAddr;
use std::time::Duration;

use dns_filter::limits::{DRAIN_TIMEOUT, TCP_PIPELINE};
use dns_filter::server::{DnsAttribution, DnsFront, DnsListener};
use rules::ids::SandboxId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::fixture::{A, ALLOW, ClientAnswer, DnsFixture, build_query};
use crate::recording_resolver::{ScriptedReply, plain_reply};

/// Timeout of every wait.
const SOON: Duration = Duration::from_secs(20);

async fn serve(world: &DnsFixture, bind: &str) -> (SocketAddr, watch::Sender<bool>) {
    let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
    let listener = DnsListener { bind: bind.parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 2).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    (address, stop)
}

fn frame(packet: &[u8]) -> Vec<u8> {
    [&(packet.len() as u16).to_be_bytes()[..], packet].concat()
}

async fn read_answer(stream: &mut TcpStream) -> ClientAnswer {
    let length = timeout(SOON, stream.read_u16()).await.unwrap().unwrap();
    let mut packet = vec![0; usize::from(length)];
    stream.read_exact(&mut packet).await.unwrap();
    ClientAnswer::parse(packet)
}

#[tokio::test(flavor = "multi_thread")]
async fn udp_answers_from_the_address_asked_over_both_families() {
    let world = DnsFixture::new().await;
    for (bind, asked) in
        [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.7"), ("[::1]:0", "::1"), ("[::]:0", "::1")]
    {
        let (address, _stop) = serve(&world, bind).await;
        let target = SocketAddr::new(asked.parse().unwrap(), address.port());
        let client = UdpSocket::bind(if target.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }).await.unwrap();
        client.connect(target).await.unwrap(); // the kernel drops answers from other addresses
        for name in ["github.com", "pastebin.com"] {
            client.send(&build_query(name, A)).await.unwrap();
            let mut buffer = [0; 2048];
            let length = timeout(SOON, client.recv(&mut buffer)).await.unwrap().unwrap();
            assert_eq!(
                ClientAnswer::parse(buffer[..length].to_vec()).addresses().len(),
                usize::from(name == "github.com"),
                "{bind}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn passed_sockets_are_served() {
    let world = DnsFixture::new().await;
    let whose = || DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (datagrams, connections) = (udp.local_addr().unwrap(), tcp.local_addr().unwrap());
    let (stranger, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let front = DnsFront::new(world.filter.clone(), 1);
    let (_stop, stopped) = watch::channel(false);
    for socket in [udp.into(), tcp.into()] {
        tokio::spawn(front.adopt(socket, whose()).unwrap().run(stopped.clone()));
    }
    assert!(front.adopt(std::os::fd::OwnedFd::from(stranger).into(), whose()).is_err());
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(&build_query("github.com", A), datagrams).await.unwrap();
    let mut buffer = [0; 2048];
    let length = timeout(SOON, client.recv(&mut buffer)).await.unwrap().unwrap();
    assert_eq!(ClientAnswer::parse(buffer[..length].to_vec()).addresses().len(), 1);
    let mut stream = TcpStream::connect(connections).await.unwrap();
    stream.write_all(&frame(&build_query("pastebin.com", A))).await.unwrap();
    assert_eq!(read_answer(&mut stream).await.addresses().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_40_pipelined_queries_are_answered_as_they_are_ready() {
    let world = DnsFixture::build(
        ALLOW,
        |query, over| {
            if query.queries[0].name.to_lowercase().to_string().starts_with("never") {
                ScriptedReply::Silence
            } else {
                plain_reply(query, over)
            }
        },
        |_| {},
    )
    .await;
    let (address, _stop) = serve(&world, "127.0.0.1:0").await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let all: Vec<u8> = ["never.wild.example", "github.com", "pastebin.com", "api.openai.com"]
        .iter()
        .flat_map(|name| frame(&build_query(name, A)))
        .collect();
    stream.write_all(&all).await.unwrap();
    let mut names = Vec::new();
    for _ in 0..4 {
        names.push(read_answer(&mut stream).await.message.queries[0].name.to_string());
    }
    assert_eq!(names.last().unwrap(), "never.wild.example.", "the slow query blocks no other: {names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_case_41_slow_writers_are_cut_and_connections_capped() {
    let world = DnsFixture::new().await;
    let (address, _stop) = serve(&world, "127.0.0.1:0").await;
    let started = Instant::now();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(&[0xff, 0xff]).await.unwrap();
    assert_eq!(
        timeout(SOON, slow.read(&mut [0; 1])).await.unwrap().unwrap_or(0),
        0,
        "a length of 65535 is not a query"
    );
    let mut drip = TcpStream::connect(address).await.unwrap();
    drip.write_all(&[0, 40, 1]).await.unwrap();
    assert_eq!(timeout(SOON, drip.read(&mut [0; 1])).await.unwrap().unwrap_or(0), 0);
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    let mut open = Vec::new();
    for _ in 0..70 {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    let mut refused = 0;
    for stream in &mut open {
        stream.write_all(&frame(&build_query("pastebin.com", A))).await.unwrap_or_default();
        refused += usize::from(!matches!(timeout(SOON, stream.read_u16()).await, Ok(Ok(_))));
    }
    assert_eq!(refused, 6, "at most 64 per sandbox");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_42_an_empty_message_closes_and_a_half_close_is_answered() {
    let world = DnsFixture::new().await;
    let (address, _stop) = serve(&world, "127.0.0.1:0").await;
    let mut empty = TcpStream::connect(address).await.unwrap();
    empty.write_all(&[0, 0]).await.unwrap();
    assert_eq!(timeout(SOON, empty.read(&mut [0; 1])).await.unwrap().unwrap_or(0), 0);
    let mut half = TcpStream::connect(address).await.unwrap();
    half.write_all(&frame(&build_query("github.com", A))).await.unwrap();
    half.shutdown().await.unwrap();
    assert_eq!(read_answer(&mut half).await.addresses().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn p2_case_64_an_unknown_source_address_is_refused() {
    let world = DnsFixture::new().await;
    let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose: DnsAttribution::SourceAddress };
    let server = DnsFront::new(world.filter.clone(), 1).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(server.run(stopped));
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.send_to(&build_query("github.com", A), address).await.unwrap();
    let mut buffer = [0; 2048];
    let length = timeout(SOON, client.recv(&mut buffer)).await.unwrap().unwrap();
    assert_eq!(ClientAnswer::parse(buffer[..length].to_vec()).ede.as_deref(), Some("unknown_channel"));
    assert_eq!(world.recorder.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_pending_answers() {
    let world = DnsFixture::build(ALLOW, plain_reply, |settings| settings.grid_milliseconds = 500).await;
    let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
    let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 1).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(server.run(stopped));
    let mut busy = TcpStream::connect(address).await.unwrap();
    let mut idle = TcpStream::connect(address).await.unwrap();
    let all: Vec<u8> =
        (0..TCP_PIPELINE).flat_map(|at| frame(&build_query(&format!("n{at}.wild.example"), A))).collect();
    busy.write_all(&all).await.unwrap();
    while world.filter.in_flight() < TCP_PIPELINE {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.send(true).unwrap();
    for _ in 0..TCP_PIPELINE {
        assert_eq!(read_answer(&mut busy).await.addresses().len(), 1);
    }
    assert_eq!(timeout(SOON, busy.read(&mut [0; 1])).await.unwrap().unwrap(), 0, "then it ends");
    assert_eq!(timeout(SOON, idle.read(&mut [0; 1])).await.unwrap().unwrap(), 0, "at once");
    timeout(SOON, running).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "no new connections");
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_a_stop_waits_at_most_the_drain_timeout() {
    let world = DnsFixture::new().await;
    let whose = DnsAttribution::Dedicated(SandboxId::parse("s").unwrap());
    let listener = DnsListener { bind: "127.0.0.1:0".parse().unwrap(), whose };
    let server = DnsFront::new(world.filter.clone(), 1).open(&[listener]).unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(server.run(stopped));
    // A client that sends queries forever and never reads.
    let mut endless = TcpStream::connect(address).await.unwrap();
    let asking = tokio::spawn(async move {
        while endless.write_all(&frame(&build_query("pastebin.com", A))).await.is_ok() {}
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let started = Instant::now();
    stop.send(true).unwrap();
    timeout(SOON, running).await.unwrap().unwrap().unwrap();
    let limit = DRAIN_TIMEOUT + Duration::from_secs(2);
    assert!(started.elapsed() < limit, "{:?}", started.elapsed());
    asking.abort();
}
