//! Properties that hold for any packet: checked by the fuzz targets here, and by a bounded run in the tests.
#![allow(dead_code, reason = "each fuzz target uses one of these")]

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use audit::Log;
use dns_filter::clean::{PermittedQuery, clean};
use dns_filter::limits::{
    ADDRESSES, RECORDS, TTL_CEILING, TTL_FLOOR, TTL_FLOOR_CHARGED, TTL_NEGATIVE, UDP_MAX, UDP_PLAIN,
};
use dns_filter::message::{DnsQuery, DnsTransport, Rcode};
use dns_filter::{DnsConfig, DnsFilter, QueryArrival, QueryStep, QueryTarget};
use hickory_proto::op::Message;
use rules::configuration::{DnsSettings, PreResolve};
use rules::facts::{Facts, NameFacts, QueryType};
use rules::ids::SandboxId;
use rules::{Channel, Decision, DomainName, LoadSources, RuleSet, SourceFile, compile};
use tokio::runtime::Runtime;

/// Upper bound of what a local answer adds to its question: OPT, extended error and one address.
const MAX_ADDED_BYTES: usize = 96;
const POLICY: &str = "name = \"p\"\n[[allow]]\nname = \"r\"\nhosts = [\"a.example\", \"*.b.example\"]\ndns_types = [\"A\", \"AAAA\", \"HTTPS\", \"TXT\", \"CNAME\", \"MX\", \"SRV\"]\n";

/// A filter without upstreams: the checks stop where a query would leave.
struct DnsFuzzFixture {
    filter: Arc<DnsFilter>,
    rules: Arc<ArcSwap<RuleSet>>,
    runtime: Runtime,
    _dir: tempfile::TempDir,
}

fn fixture() -> &'static DnsFuzzFixture {
    static FIXTURE: OnceLock<DnsFuzzFixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let policy = SourceFile { path: "p.toml".into(), bytes: POLICY.into() };
        let operator = b"[[sandbox]]\nid = \"s\"\nbase = \"system\"\npolicies = [\"p\"]\n".to_vec();
        let operator = SourceFile { path: "sandbar.toml".into(), bytes: operator };
        let sources =
            LoadSources { operator: Some(operator), policies: vec![policy], ..LoadSources::default() };
        let rules = Arc::new(ArcSwap::from_pointee(compile(&sources, &[]).unwrap()));
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(audit::LogConfig::new(dir.path())).unwrap();
        let mut settings = DnsSettings::new(Vec::new());
        settings.pre_resolve = PreResolve::Off;
        let config = DnsConfig { settings, budgets: None };
        let filter = DnsFilter::new(rules.clone(), log, config).unwrap();
        DnsFuzzFixture { filter, rules, runtime: Runtime::new().unwrap(), _dir: dir }
    })
}

/// Checks that a packet is dropped, gets an answer not much larger than itself, or asks for an allowed name.
pub(super) fn query(data: &[u8]) {
    let fixture = fixture();
    let _entered = fixture.runtime.enter(); // findings are written in tasks
    for carrier in [DnsTransport::Tcp, DnsTransport::Udp] {
        let channel = Channel::Dedicated(SandboxId::parse("s").unwrap());
        let arrived =
            QueryArrival { channel, carrier, source: None, original_dst: None, toward: QueryTarget::Us };
        match fixture.filter.start_query(data, &arrived) {
            QueryStep::Answer(answer) => check_local_answer(data, &answer),
            QueryStep::Drop => assert!(DnsQuery::parse(data).is_err(), "a valid query was dropped"),
            QueryStep::Wait(_) => check_forwarded(data),
        }
    }
}

fn check_local_answer(data: &[u8], answer: &[u8]) {
    assert_eq!(answer.get(..2), data.get(..2), "the id");
    assert_eq!(answer[2] & 0x80, 0x80, "QR is set");
    assert_eq!(answer[3] & 0x30, 0, "AD and CD are not set");
    assert!(answer.len() <= data.len() + MAX_ADDED_BYTES, "{} for {}", answer.len(), data.len());
    assert!(answer.len() <= UDP_MAX.max(UDP_PLAIN));
    Message::from_vec(answer).expect("hickory parses our answer");
}

/// Checks that the policy allows the name, by an approximation that shares no code with the rules.
fn check_forwarded(data: &[u8]) {
    let query = DnsQuery::parse(data).expect("the filter parsed it");
    let labels: Vec<String> = query
        .labels()
        .map(|label| String::from_utf8(label.to_ascii_lowercase()).expect("ASCII only"))
        .collect();
    let name = labels.join(".");
    let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    assert!(name.bytes().all(plain), "{name}");
    assert!(name == "a.example" || name.ends_with(".b.example"), "{name}");
    assert_eq!(labels.iter().map(String::len).sum::<usize>() + labels.len() - 1, name.len());
    if let Ok(message) = Message::from_vec(data) {
        assert_eq!(message.queries.len(), 1);
        assert_eq!(message.queries[0].name.to_lowercase().to_string(), format!("{name}."));
    }
}

/// Checks that a resolver's answer is refused, or cleaned within all bounds and without internal addresses.
pub(super) fn answer(data: &[u8]) {
    let Ok(message) = Message::from_vec(data) else { return };
    let rules = fixture().rules.load();
    let sandbox = rules.sandboxes().iter().next().unwrap();
    for kind in [1, 28, 65, 16, 5, 15, 33].map(QueryType) {
        for name in ["a.example", "x.b.example"] {
            let name = DomainName::parse(name).unwrap();
            let facts = Facts::Name(NameFacts { name: name.clone(), query: kind });
            let Decision::Allow(permit) = rules.decide(sandbox, &facts) else { continue };
            let asked = PermittedQuery { rules: &rules, sandbox, permit: &permit, name: &name, kind };
            check_clean_answer(&asked, &message);
        }
    }
}

fn check_clean_answer(asked: &PermittedQuery<'_>, message: &Message) {
    let Ok(cleaned) = clean(asked, message) else { return };
    assert!(cleaned.found.len() <= ADDRESSES);
    assert!(usize::from(cleaned.section.count()) <= RECORDS.max(ADDRESSES));
    assert_eq!(usize::from(cleaned.section.count()), cleaned.told.len());
    let lives = if cleaned.section.is_empty() && cleaned.withheld.is_none() {
        1..=TTL_NEGATIVE.max(TTL_FLOOR_CHARGED)
    } else {
        TTL_FLOOR..=TTL_CEILING
    };
    assert!(lives.contains(&cleaned.ttl), "{} of {lives:?}", cleaned.ttl);
    assert!(matches!(cleaned.rcode, Rcode::NOERROR | Rcode::NXDOMAIN));
    for record in &cleaned.told {
        let Ok(address) = record.rdata.to_display().parse::<IpAddr>() else { continue };
        assert!(!is_internal(address), "{address} was returned");
    }
}

/// Returns whether an address is internal, by an approximation that shares no code with the rules.
fn is_internal(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_private() || v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local(),
    }
}
