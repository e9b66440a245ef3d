//! A resolver that records every packet it receives and answers according to a script.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME, SOA};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

/// The reply of the script to a query.
pub(crate) enum ScriptedReply {
    Answer(Message),
    /// Datagrams to send unchanged.
    Raw(Vec<Vec<u8>>),
    Silence,
}

pub(crate) type ReplyScript = dyn Fn(&Message, UpstreamTransport) -> ScriptedReply + Send + Sync;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamTransport {
    Tcp,
    Udp,
}

#[derive(Clone)]
pub(crate) struct RecordingResolver {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<SeenQuery>>>,
}

#[derive(Clone, Debug)]
pub(crate) struct SeenQuery {
    pub(crate) message: Message,
    pub(crate) packet: Vec<u8>,
    pub(crate) source: SocketAddr,
    pub(crate) over: UpstreamTransport,
}

impl RecordingResolver {
    pub(crate) async fn start(script: Arc<ReplyScript>) -> Self {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let udp = UdpSocket::bind(address).await.unwrap();
        let recorder = RecordingResolver { address, seen: Arc::default() };
        tokio::spawn(recorder.clone().serve_udp(udp, script.clone()));
        tokio::spawn(recorder.clone().serve_tcp(tcp, script));
        recorder
    }

    pub(crate) fn seen(&self) -> Vec<SeenQuery> {
        self.seen.lock().unwrap().clone()
    }

    /// Returns the names that were asked for, in lower case.
    pub(crate) fn names(&self) -> Vec<String> {
        self.seen().iter().map(|seen| seen.message.queries[0].name.to_lowercase().to_string()).collect()
    }

    fn record_query(&self, packet: &[u8], source: SocketAddr, over: UpstreamTransport) -> Message {
        let message = Message::from_vec(packet).unwrap();
        let seen = SeenQuery { message: message.clone(), packet: packet.to_vec(), source, over };
        self.seen.lock().unwrap().push(seen);
        message
    }

    async fn serve_udp(self, socket: UdpSocket, script: Arc<ReplyScript>) {
        let mut buffer = [0; 4096];
        loop {
            let Ok((length, source)) = socket.recv_from(&mut buffer).await else { continue };
            let query = self.record_query(&buffer[..length], source, UpstreamTransport::Udp);
            let packets = match script(&query, UpstreamTransport::Udp) {
                ScriptedReply::Answer(message) => vec![message.to_vec().unwrap()],
                ScriptedReply::Raw(packets) => packets,
                ScriptedReply::Silence => Vec::new(),
            };
            for packet in packets {
                socket.send_to(&packet, source).await.unwrap();
            }
        }
    }

    async fn serve_tcp(self, listener: TcpListener, script: Arc<ReplyScript>) {
        loop {
            let Ok((mut stream, source)) = listener.accept().await else { continue };
            let Ok(length) = stream.read_u16().await else { continue };
            let mut packet = vec![0; usize::from(length)];
            if stream.read_exact(&mut packet).await.is_err() {
                continue;
            }
            let query = self.record_query(&packet, source, UpstreamTransport::Tcp);
            if let ScriptedReply::Answer(message) = script(&query, UpstreamTransport::Tcp) {
                let answer = message.to_vec().unwrap();
                stream.write_u16(answer.len() as u16).await.unwrap();
                stream.write_all(&answer).await.unwrap();
            }
        }
    }
}

/// Builds an empty answer to a query.
pub(crate) fn empty_reply(query: &Message) -> Message {
    let mut message = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    message.metadata.recursion_available = true;
    message.metadata.recursion_desired = true;
    message.queries = query.queries.clone();
    message
}

pub(crate) fn error_reply(query: &Message, code: ResponseCode) -> Message {
    let mut message = empty_reply(query);
    message.metadata.response_code = code;
    message
}

/// Builds an answer with records of (owner, TTL, data); an empty owner is the name in the question.
pub(crate) fn reply_with(query: &Message, records: Vec<(&str, u32, RData)>) -> Message {
    let mut message = empty_reply(query);
    for (owner, ttl, data) in records {
        let name = if owner.is_empty() { query.queries[0].name.clone() } else { name(owner) };
        message.add_answer(Record::from_rdata(name, ttl, data));
    }
    message
}

/// Builds a negative answer with an SOA record.
pub(crate) fn negative_reply(query: &Message, code: ResponseCode, minimum: u32) -> Message {
    let mut message = error_reply(query, code);
    let soa = SOA::new(name("ns.example."), name("root.example."), 1, 2, 3, 4, minimum);
    message.add_authority(Record::from_rdata(name("example."), 3600, RData::SOA(soa)));
    message
}

/// Answers any name with one address of each family.
pub(crate) fn plain_reply(query: &Message, _: UpstreamTransport) -> ScriptedReply {
    let data = match query.queries[0].query_type {
        RecordType::A => a("93.184.216.34"),
        RecordType::AAAA => aaaa("2606:2800:220:1::1"),
        _ => return ScriptedReply::Answer(negative_reply(query, ResponseCode::NoError, 300)),
    };
    ScriptedReply::Answer(reply_with(query, vec![("", 300, data)]))
}

pub(crate) fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

pub(crate) fn a(text: &str) -> RData {
    RData::A(A(text.parse().unwrap()))
}

pub(crate) fn aaaa(text: &str) -> RData {
    RData::AAAA(AAAA(text.parse().unwrap()))
}

pub(crate) fn cname(text: &str) -> RData {
    RData::CNAME(CNAME(name(text)))
}
