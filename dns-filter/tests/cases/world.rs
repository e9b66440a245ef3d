//! One filter, one sandbox (and a second where isolation is the point), one recording resolver, one log.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::message::Carrier;
use dns_filter::{Arrived, Config, Filter, Toward};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RData;
use rules::operator::{DnsSettings, PreResolve};
use rules::word::SandboxId;
use rules::{Channel, RuleSet, SourceFile, Sources, compile};
use serde_json::Value;
use tempfile::TempDir;

use crate::recorder::{Over, Recorder, Say, Script, plain};

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

pub(crate) struct World {
    pub(crate) filter: Arc<Filter>,
    pub(crate) rules: Arc<ArcSwap<RuleSet>>,
    pub(crate) recorder: Recorder,
    pub(crate) log: Log,
    pub(crate) dir: TempDir,
}

pub(crate) fn rules(policy: &str, generation: u64) -> RuleSet {
    let operator = "[[sandbox]]\nid = \"s\"\nbase = \"system\"\npolicies = [\"p\"]\ntenant = \"acme\"\nenvironment = \"staging\"\n\
        [[sandbox]]\nid = \"t\"\nbase = \"system\"\npolicies = [\"p\"]\n\
        [[sandbox]]\nid = \"marked\"\nbase = \"system\"\npolicies = [\"p\"]\nmark = 7\n";
    let file =
        |path: &str, text: String| SourceFile { path: path.into(), bytes: text.into_bytes() };
    let sources = Sources {
        operator: Some(file("sandbar.toml", operator.to_owned())),
        policies: vec![file("p.toml", format!("name = \"p\"\n{policy}"))],
        generation,
        ..Sources::default()
    };
    compile(&sources, &[]).unwrap_or_else(|problems| panic!("{problems:?}"))
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(ALLOW, plain, |_| {}).await
    }

    pub(crate) async fn scripted(
        script: impl Fn(&Message, Over) -> Say + Send + Sync + 'static,
    ) -> Self {
        Self::with(ALLOW, script, |_| {}).await
    }

    pub(crate) async fn with(
        policy: &str,
        script: impl Fn(&Message, Over) -> Say + Send + Sync + 'static,
        tune: impl FnOnce(&mut DnsSettings),
    ) -> Self {
        let script: Arc<Script> = Arc::new(script);
        let recorder = Recorder::start(script).await;
        let mut settings = DnsSettings::new(vec![recorder.address]);
        settings.grid_milliseconds = 0;
        settings.fold_seconds = 0;
        settings.pre_resolve = PreResolve::Off;
        tune(&mut settings);
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(audit::Config::new(dir.path().join("log"))).unwrap();
        let rules = Arc::new(ArcSwap::from_pointee(rules(policy, 1)));
        let config = Config { settings, budgets: Some(dir.path().join("budget.json")) };
        let filter = Filter::new(rules.clone(), log.clone(), config).unwrap();
        World { filter, rules, recorder, log, dir }
    }

    pub(crate) async fn raw(&self, packet: &[u8]) -> Option<Vec<u8>> {
        self.filter.answer(packet, &from("s", Carrier::Udp)).await
    }

    pub(crate) async fn ask(&self, name: &str, kind: u16) -> Told {
        self.ask_as("s", name, kind).await
    }

    pub(crate) async fn ask_as(&self, sandbox: &str, name: &str, kind: u16) -> Told {
        let packet = query(name, kind);
        let answer = self.filter.answer(&packet, &from(sandbox, Carrier::Udp)).await;
        Told::read(answer.expect("an answer"))
    }

    /// Lets findings be written: they are, beside the queries they are about.
    pub(crate) async fn settled(&self) {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }

    /// Everything the log holds, in order.
    pub(crate) fn records(&self) -> Vec<Value> {
        self.filter.stop();
        self.log.close();
        let mut records = Vec::new();
        for entry in std::fs::read_dir(self.dir.path().join("log")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "jsonl" || extension == "log")
            {
                let text = std::fs::read_to_string(path).unwrap();
                records.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
            }
        }
        records
    }

    /// The DNS records of one stage.
    pub(crate) fn staged(&self, stage: &str) -> Vec<Value> {
        let of = |record: &Value| {
            record["class_uid"] == 4003 && record["unmapped"]["sandbar"]["stage"] == stage
        };
        self.records().into_iter().filter(of).collect()
    }

    /// The reason codes of all DNS records.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let dns = |record: &&Value| record["class_uid"] == 4003;
        self.records()
            .iter()
            .filter(dns)
            .map(|record| record["status_detail"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// Refused here: nothing reached the resolver, and the log says why.
    pub(crate) async fn refuses(&self, name: &str, kind: u16, reason: &str) {
        let told = self.ask(name, kind).await;
        assert_eq!(told.ede.as_deref(), Some(reason), "{name}");
        assert!(told.addresses().is_empty(), "{name}");
        assert_eq!(self.recorder.names(), Vec::<String>::new(), "{name}");
    }
}

/// How many queries records stand for.
pub(crate) fn counted(records: &[Value]) -> u64 {
    records
        .iter()
        .map(|record| 1 + record["unmapped"]["sandbar"]["folded"].as_u64().unwrap_or(0))
        .sum()
}

pub(crate) fn from(sandbox: &str, carrier: Carrier) -> Arrived {
    Arrived {
        channel: Channel::Dedicated(SandboxId::parse(sandbox).unwrap()),
        carrier,
        source: Some(SocketAddr::from(([127, 0, 0, 1], 4000))),
        aimed: None,
        toward: Toward::Us,
    }
}

/// A query with EDNS, as a stub resolver sends it; labels are split at dots.
pub(crate) fn query(name: &str, kind: u16) -> Vec<u8> {
    packet(0x0100, &wire(name), kind, 1, Some(1232))
}

pub(crate) fn wire(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.trim_end_matches('.').split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    wire
}

pub(crate) fn packet(flags: u16, name: &[u8], kind: u16, class: u16, edns: Option<u16>) -> Vec<u8> {
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

/// An answer, read.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) message: Message,
    pub(crate) packet: Vec<u8>,
    /// The text of the extended error.
    pub(crate) ede: Option<String>,
}

impl Told {
    pub(crate) fn read(packet: Vec<u8>) -> Self {
        let message = Message::from_vec(&packet).unwrap();
        let text: String = packet
            .iter()
            .rev()
            .map(|byte| char::from(*byte))
            .take_while(|c| c.is_ascii_lowercase() || *c == '_')
            .collect();
        let text: String = text.chars().rev().collect();
        let known = rules::Reason::ALL.iter().any(|reason| reason.code() == text);
        Told { message, packet, ede: known.then_some(text) }
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
