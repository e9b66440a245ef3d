//! What was on the wire, by somebody who stands there: an interface of a namespace, and a port.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{DEADLINE, DnsNetwork, script_path};

/// Asked when all else is over: a witness that has seen this name has seen all before it.
const MARKER_NAME: &str = "last.marker.invalid";

pub(super) struct PacketCapture {
    namespace: String,
    server: &'static str,
    port: &'static str,
    file: PathBuf,
}

/// A message; an answer has an rcode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CapturedMessage {
    pub(super) name: String,
    pub(super) kind: u64,
    pub(super) rcode: Option<u64>,
    /// The client's id and port: which question an answer is to.
    pub(super) asked_by: (u64, u64),
}

impl DnsNetwork {
    /// Watches what the sandbox asks and is told.
    pub(super) fn capture_sandbox(&mut self) -> PacketCapture {
        self.start_capture(self.sandbox.clone(), &format!("s{}", self.id), "10.200.0.1", "53")
    }

    /// Watches what leaves: the filter's own queries to the resolver at 127.0.0.1:5300.
    pub(super) fn capture_upstream(&mut self) -> PacketCapture {
        self.start_capture(self.gateway.clone(), "lo", "127.0.0.1", "5300")
    }

    fn start_capture(
        &mut self,
        namespace: String,
        interface: &str,
        server: &'static str,
        port: &'static str,
    ) -> PacketCapture {
        let file = self.dir.path().join(format!("seen-on-{interface}"));
        let (script, path) = (script_path("witness.py"), file.display().to_string());
        self.start(&namespace, "python3", &[&script, interface, port, &path], "watching");
        PacketCapture { namespace, server, port, file }
    }
}

impl PacketCapture {
    /// All messages, once everything sent so far has been seen.
    pub(super) fn all_messages(&self, net: &DnsNetwork) -> Vec<CapturedMessage> {
        let server = format!("@{}", self.server);
        let ask = ["+tries=1", "+time=1", "-p", self.port, &server, MARKER_NAME];
        net.command_in(&self.namespace, "dig", &ask).output().unwrap(); // whether it is answered is no matter
        self.wait_until("its own marker", |seen| seen.iter().any(|seen| seen.name == MARKER_NAME));
        let mut all = self.messages();
        all.retain(|seen| seen.name != MARKER_NAME);
        all
    }

    /// Waits until what was seen is enough.
    pub(super) fn wait_until(&self, what: &str, enough: impl Fn(&[CapturedMessage]) -> bool) {
        let until = Instant::now() + DEADLINE;
        while !enough(&self.messages()) {
            assert!(Instant::now() < until, "the witness waits for {what}: {:?}", self.messages());
            sleep(Duration::from_millis(50));
        }
    }

    fn messages(&self) -> Vec<CapturedMessage> {
        let text = fs::read_to_string(&self.file).unwrap();
        text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(parse_message).collect()
    }
}

fn parse_message(line: &str) -> CapturedMessage {
    let seen: Value = serde_json::from_str(line).unwrap();
    CapturedMessage {
        name: seen["name"].as_str().unwrap().to_owned(),
        kind: seen["kind"].as_u64().unwrap(),
        rcode: seen["rcode"].as_u64(),
        asked_by: (seen["id"].as_u64().unwrap(), seen["port"].as_u64().unwrap()),
    }
}

/// The names asked for.
pub(super) fn queried_names(seen: &[CapturedMessage]) -> BTreeSet<&str> {
    seen.iter().filter(|seen| seen.rcode.is_none()).map(|seen| seen.name.as_str()).collect()
}
