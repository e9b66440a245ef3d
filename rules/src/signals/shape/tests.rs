//! Tests of the shape detectors: traces of honest tools that raise nothing, and attempts to move a kilobyte that do.

mod benign;
mod hostile;

use super::super::SignalPlace;
use super::super::bits::{DigestKey, RequestComponents, RequestParts};
use super::*;

/// Requests of one sandbox to one host.
struct Trace {
    key: DigestKey,
    shape: HostShape,
    now_ms: u64,
    found: Vec<Signal>,
    random: u64,
    /// Whether the next answer is 304.
    unchanged: bool,
}

/// A body, and what it is answered with.
type Bytes = (u64, u64);

impl Trace {
    fn new() -> Self {
        Trace {
            key: DigestKey::new(*b"0123456789abcdef"),
            shape: HostShape::default(),
            now_ms: 1_700_000_000_000,
            found: Vec::new(),
            random: 42,
            unchanged: false,
        }
    }

    fn wait(&mut self, ms: u64) -> &mut Self {
        self.now_ms += ms;
        self
    }

    /// Sends a request to `target`, a path and perhaps a query.
    fn send(
        &mut self,
        method: &str,
        target: &str,
        fields: &[(&str, &str)],
        (sent, received): Bytes,
    ) -> &mut Self {
        let observation = self.start(method, target, fields);
        let unchanged = std::mem::take(&mut self.unchanged);
        let outcome = RequestOutcome { sent_bytes: sent, received_bytes: received, unchanged };
        let thresholds = ShapeThresholds::default();
        self.shape.observe_outcome(observation, outcome, self.now_ms, &thresholds, &mut self.found);
        self
    }

    fn start(&mut self, method: &str, target: &str, fields: &[(&str, &str)]) -> ShapeObservation {
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query.as_bytes())),
            None => (target, None),
        };
        let fields: Vec<(&str, &[u8])> =
            fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let parts = RequestParts { method, path: path.as_bytes(), query, fields: &fields };
        let components = RequestComponents::new(&self.key, &parts);
        self.shape.observe(&components, self.now_ms, &ShapeThresholds::default(), &mut self.found)
    }

    fn number(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }

    fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    fn text(&mut self, alphabet: &str, length: usize) -> String {
        let alphabet = alphabet.as_bytes();
        (0..length).map(|_| char::from(alphabet[self.below(alphabet.len() as u64) as usize])).collect()
    }

    fn hex(&mut self, length: usize) -> String {
        self.text("0123456789abcdef", length)
    }

    fn base64(&mut self, length: usize) -> String {
        self.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", length)
    }

    fn uuid(&mut self) -> String {
        [8, 4, 4, 4, 12].map(|length| self.hex(length)).join("-")
    }

    /// Makes up a word of the kind that names packages.
    fn word(&mut self) -> String {
        const PARTS: [&str; 24] = [
            "core", "react", "util", "parse", "lodash", "merge", "path", "stream", "babel", "plugin", "type",
            "check", "fast", "glob", "color", "string", "array", "deep", "is", "promise", "event", "http",
            "json", "safe",
        ];
        let parts: Vec<&str> = (0..2 + self.below(2)).map(|_| PARTS[self.below(24) as usize]).collect();
        parts.join("-")
    }

    fn assert_quiet(&self, name: &str) {
        assert!(self.found.is_empty(), "{name}: {:#?}", self.found);
    }

    fn codes(&self) -> Vec<SignalCode> {
        let mut codes: Vec<SignalCode> = self.found.iter().map(|signal| signal.code).collect();
        codes.sort();
        codes.dedup();
        codes
    }
}

#[test]
fn a_signal_is_reported_once_an_hour_and_counted() {
    let mut trace = Trace::new();
    for _ in 0..30 {
        let data = trace.base64(500);
        let observation = trace.start("GET", &format!("/?data={data}"), &[]);
        assert!(observation.raised(SignalCode::EncodedRun) && !observation.raised(SignalCode::Beacon));
        trace.wait(250_000);
    }
    let reported = trace.found.iter().filter(|signal| signal.code == SignalCode::EncodedRun).count();
    assert_eq!((reported, trace.shape.occurrences(SignalCode::EncodedRun)), (2, 30));
    assert_eq!(trace.found[0].place, SignalPlace::Query);
    assert_eq!((trace.found[0].value, trace.found[0].threshold), (500, 384));
    assert_eq!(trace.shape.occurrences(SignalCode::ManyFields), 0);
}

#[test]
fn shapes_survive_storage_without_content() {
    let mut trace = Trace::new();
    for at in 0..50 {
        let name = format!("secret-word-{}", trace.word());
        trace.send("GET", &format!("/{name}/{at}"), &[("x-secret", &name)], (0, 0)).wait(1_000);
    }
    let json = serde_json::to_string(&trace.shape).unwrap();
    assert!(!json.contains("secret") && !json.contains("word"), "{json}");
    println!("{} bytes of state", json.len());
    let restored: HostShape = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_string(&restored).unwrap(), json);
}

#[test]
fn state_is_bounded() {
    let mut trace = Trace::new();
    let mut largest = 0;
    for at in 0..3_000 {
        let (value, name) = (trace.base64(40), trace.hex(12));
        let target = format!("/{value}/{at}?{name}={value}&n={at}");
        trace
            .send("GET", &target, &[(&name, &value), ("user-agent", &value), ("cookie", &value)], (0, 0))
            .wait(5_000);
        if at % 1_000 == 999 {
            largest = largest.max(serde_json::to_string(&trace.shape).unwrap().len());
        }
    }
    assert!(largest < 96 << 10, "{largest}");
}

#[test]
fn thresholds_are_listed() {
    let row = ("fields_per_request", 48, 250, "Fields of one request (`many_fields`).");
    assert!(ShapeThresholds::TABLE.contains(&row));
    let listed = ShapeThresholds::TABLE.iter().map(|(name, usual, ..)| (*name, *usual));
    assert_eq!(listed.collect::<Vec<_>>(), ShapeThresholds::default().values());
    assert!(ShapeThresholds::TABLE.is_sorted(), "by name");
}
