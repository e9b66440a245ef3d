//! The fixture: a filter, a sandbox `s` (and `t`, to test isolation), a recording resolver, a log.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::message::DnsTransport;
use dns_filter::{DnsConfig, DnsFilter, QueryArrival, QueryTarget};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RData;
use rules::configuration::{DnsSettings, PreResolve};
use rules::ids::SandboxId;
use rules::{Channel, LoadSources, RuleSet, SourceFile, compile};
use serde_json::Value;
use tempfile::TempDir;

use crate::recording_resolver::{
    RecordingResolver, ReplyScript, ScriptedReply, UpstreamTransport, plain_reply,
};

pub(crate) const ALLOW: &str = r#"
[[allow]]
name = "exact"
hosts = ["api.openai.com", "github.com"]
[[allow]]
name = "wild"
hosts = ["*.wild.example"]
"#;

pub(crate) const A: u16 = 1;
pub(crate) const AAAA: u16 = 28;
pub(crate) const HTTPS: u16 = 65;
pub(crate) const TXT: u16 = 16;

pub(crate) struct DnsFixture {
    pub(crate) filter: Arc<DnsFilter>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) recorder: RecordingResolver,
    pub(crate) log: Log,
    pub(crate) dir: TempDir,
}

pub(crate) fn compile_rules(policy: &str, generation: u64) -> RuleSet {
    let operator = "[[sandbox]]\nid = \"s\"\nbase = \"system\"\npolicies = [\"p\"]\ntenant = \"acme\"\nenvironment = \"staging\"\n\
        [[sandbox]]\nid = \"t\"\nbase = \"system\"\npolicies = [\"p\"]\n\
        [[sandbox]]\nid = \"marked\"\nbase = \"system\"\npolicies = [\"p\"]\nmark = 7\n";
    let file = |path: &str, text: String| SourceFile { path: path.into(), bytes: text.into_bytes() };
    let sources = LoadSources {
        operator: Some(file("sandbar.toml", operator.to_owned())),
        policies: vec![file("p.toml", format!("name = \"p\"\n{policy}"))],
        generation,
        ..LoadSources::default()
    };
    compile(&sources, &[]).unwrap_or_else(|problems| panic!("{problems:?}"))
}

impl DnsFixture {
    pub(crate) async fn new() -> Self {
        Self::build(ALLOW, plain_reply, |_| {}).await
    }

    pub(crate) async fn with_script(
        script: impl Fn(&Message, UpstreamTransport) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        Self::build(ALLOW, script, |_| {}).await
    }

    pub(crate) async fn build(
        policy: &str,
        script: impl Fn(&Message, UpstreamTransport) -> ScriptedReply + Send + Sync + 'static,
        tune: impl FnOnce(&mut DnsSettings),
    ) -> Self {
        let script: Arc<ReplyScript> = Arc::new(script);
        let recorder = RecordingResolver::start(script).await;
        let mut settings = DnsSettings::new(vec![recorder.address]);
        settings.grid_milliseconds = 0;
        settings.fold_seconds = 0;
        settings.pre_resolve = PreResolve::Off;
        tune(&mut settings);
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(audit::LogConfig::new(dir.path().join("log"))).unwrap();
        let rules = Arc::new(ArcSwap::from_pointee(compile_rules(policy, 1)));
        let config = DnsConfig { settings, budgets: Some(dir.path().join("budget.json")) };
        let filter = DnsFilter::new(rules.clone(), log.clone(), config).unwrap();
        DnsFixture { filter, rules, recorder, log, dir }
    }

    pub(crate) async fn send_packet(&self, packet: &[u8]) -> Option<Vec<u8>> {
        self.filter.answer(packet, &arrival_from("s", DnsTransport::Udp)).await
    }

    pub(crate) async fn ask(&self, name: &str, kind: u16) -> ClientAnswer {
        self.ask_as("s", name, kind).await
    }

    pub(crate) async fn ask_as(&self, sandbox: &str, name: &str, kind: u16) -> ClientAnswer {
        let packet = build_query(name, kind);
        let answer = self.filter.answer(&packet, &arrival_from(sandbox, DnsTransport::Udp)).await;
        ClientAnswer::parse(answer.expect("an answer"))
    }

    /// Waits until findings are written, which happens in separate tasks.
    pub(crate) async fn wait_for_findings(&self) {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }

    /// Stops the filter and returns all records of the log, in order.
    pub(crate) fn records(&self) -> Vec<Value> {
        self.filter.stop();
        self.log.close();
        let mut records = Vec::new();
        for entry in std::fs::read_dir(self.dir.path().join("log")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "jsonl" || extension == "log") {
                let text = std::fs::read_to_string(path).unwrap();
                records.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
            }
        }
        records
    }

    /// Returns the DNS records of one stage.
    pub(crate) fn records_at_stage(&self, stage: &str) -> Vec<Value> {
        let matches =
            |record: &Value| record["class_uid"] == 4003 && record["unmapped"]["sandbar"]["stage"] == stage;
        self.records().into_iter().filter(matches).collect()
    }

    /// Returns the reason codes of all DNS records.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let dns = |record: &&Value| record["class_uid"] == 4003;
        self.records()
            .iter()
            .filter(dns)
            .map(|record| record["status_detail"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// Asserts that a query is refused with a reason and that nothing reaches the resolver.
    pub(crate) async fn assert_refused(&self, name: &str, kind: u16, reason: &str) {
        let answer = self.ask(name, kind).await;
        assert_eq!(answer.ede.as_deref(), Some(reason), "{name}");
        assert!(answer.addresses().is_empty(), "{name}");
        assert_eq!(self.recorder.names(), Vec::<String>::new(), "{name}");
    }
}

/// Returns the number of queries that records cover, including folded ones.
pub(crate) fn count_queries(records: &[Value]) -> u64 {
    records.iter().map(|record| 1 + record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or(0)).sum()
}

pub(crate) fn arrival_from(sandbox: &str, carrier: DnsTransport) -> QueryArrival {
    QueryArrival {
        channel: Channel::Dedicated(SandboxId::parse(sandbox).unwrap()),
        carrier,
        source: Some(SocketAddr::from(([127, 0, 0, 1], 4000))),
        original_dst: None,
        toward: QueryTarget::Us,
    }
}

/// Builds a query with EDNS, as a stub resolver sends it; labels are split at dots.
pub(crate) fn build_query(name: &str, kind: u16) -> Vec<u8> {
    build_packet(0x0100, &wire_name(name), kind, 1, Some(1232))
}

pub(crate) fn wire_name(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.trim_end_matches('.').split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    wire
}

pub(crate) fn build_packet(flags: u16, name: &[u8], kind: u16, class: u16, edns: Option<u16>) -> Vec<u8> {
    let mut packet = vec![0x12, 0x34];
    let counts = [flags, 1, 0, 0, u16::from(edns.is_some())];
    counts.iter().for_each(|field| packet.extend_from_slice(&field.to_be_bytes()));
    packet.extend_from_slice(name);
    packet.extend_from_slice(&kind.to_be_bytes());
    packet.extend_from_slice(&class.to_be_bytes());
    if let Some(payload) = edns {
        packet.extend_from_slice(&[0, 0, 41]);
        packet.extend_from_slice(&payload.to_be_bytes());
        packet.extend_from_slice(&[0; 6]);
    }
    packet
}

/// A parsed answer.
#[derive(Debug)]
pub(crate) struct ClientAnswer {
    pub(crate) message: Message,
    pub(crate) packet: Vec<u8>,
    /// The text of the extended error.
    pub(crate) ede: Option<String>,
}

impl ClientAnswer {
    pub(crate) fn parse(packet: Vec<u8>) -> Self {
        let message = Message::from_vec(&packet).unwrap();
        let text: String = packet
            .iter()
            .rev()
            .map(|byte| char::from(*byte))
            .take_while(|c| c.is_ascii_lowercase() || *c == '_')
            .collect();
        let text: String = text.chars().rev().collect();
        let known = rules::Reason::ALL.iter().any(|reason| reason.code() == text);
        ClientAnswer { message, packet, ede: known.then_some(text) }
    }

    pub(crate) fn code(&self) -> ResponseCode {
        self.message.metadata.response_code
    }

    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let address = |data: &RData| match data {
            RData::A(a) => Some(IpAddr::V4(a.0)),
            RData::AAAA(a) => Some(IpAddr::V6(a.0)),
            _ => None,
        };
        self.message.answers.iter().filter_map(|record| address(&record.data)).collect()
    }

    pub(crate) fn ttl(&self) -> u32 {
        self.message.answers[0].ttl
    }
}
