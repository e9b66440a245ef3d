//! One allowed and one refused request with their log lines: made now through the explicit listener, if there is one,
//! or else the last ones in the log.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use audit::view::{DecisionKind, RecordStage, RecordView};
use rules::configuration::ListenerMode;
use serde_json::Value;

use super::{ConfigFiles, storage};
use crate::doctor::DoctorArgs;
use crate::doctor::report::RequestEvidence;
use crate::doctor::response::ProbeResponse;

/// Connect timeout of the listener, and read timeout of its response.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest wait for a record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(2);
/// How often to look for it.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) fn collect(files: &ConfigFiles, args: &DoctorArgs) -> Vec<RequestEvidence> {
    let log = &files.paths.log;
    let listener = files.addresses(ListenerMode::Explicit).into_iter().next().map(reachable_address);
    let wanted = [("allowed", args.allowed.as_ref()), ("refused", Some(&args.denied))];
    let made = wanted.map(|(wanted, host)| match (listener, host) {
        (Some(listener), Some(host)) => {
            let made = request_evidence(listener, wanted, host, log);
            // The listener may not know this machine as a sandbox: then show the last request it allowed to one.
            match wanted == "allowed" && made.record.is_some() && !made.is_allowed() {
                true => last_evidence(wanted, log).or(Some(made)),
                false => Some(made),
            }
        }
        (None, _) | (_, None) => last_evidence(wanted, log),
    });
    made.into_iter().flatten().collect()
}

/// Replaces an unspecified address by loopback.
fn reachable_address(bound: SocketAddr) -> SocketAddr {
    let here: IpAddr = match bound.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let ip = if bound.ip().is_unspecified() { here } else { bound.ip() };
    SocketAddr::new(ip, bound.port())
}

fn request_evidence(listener: SocketAddr, wanted: &'static str, host: &str, log: &Path) -> RequestEvidence {
    let request = format!("GET http://{host}/sandbar-doctor");
    let (answer, record) = match send_request(listener, host) {
        Ok(answer) => (answer.first_line(), answer.record_id().map(str::to_owned)),
        Err(error) => (format!("no answer: {error}"), None),
    };
    let line = poll_until(|| match &record {
        Some(record) => find_record(log, |view| view.metadata.correlation_uid == record.as_str()),
        None => find_record(log, |view| view.host() == Some(host) && view.stage() == RecordStage::Decision),
    });
    RequestEvidence {
        wanted,
        request,
        answer,
        record: record.or_else(|| correlation_id(line.as_ref())),
        line,
    }
}

fn send_request(listener: SocketAddr, host: &str) -> io::Result<ProbeResponse> {
    let mut stream = TcpStream::connect_timeout(&listener, LISTENER_TIMEOUT)?;
    stream.set_read_timeout(Some(LISTENER_TIMEOUT))?;
    write!(
        stream,
        "GET http://{host}/sandbar-doctor HTTP/1.1\r\nHost: {host}\r\nUser-Agent: sandbar-doctor\r\nConnection: close\r\n\r\n"
    )?;
    ProbeResponse::read(&mut stream)
}

/// The last allowed or refused request in the log.
fn last_evidence(wanted: &'static str, log: &Path) -> Option<RequestEvidence> {
    let decision = if wanted == "allowed" { DecisionKind::Allowed } else { DecisionKind::Denied };
    let line = find_record(log, |view| {
        view.decision() == Some(decision)
            && matches!(view.stage(), RecordStage::Answered | RecordStage::Decision | RecordStage::Denied)
    })?;
    let record = correlation_id(Some(&line));
    let (request, answer) = ("last one in the log".to_owned(), wanted.to_owned());
    Some(RequestEvidence { wanted, request, answer, record, line: Some(line) })
}

fn correlation_id(line: Option<&Value>) -> Option<String> {
    line?.pointer("/metadata/correlation_uid")?.as_str().map(str::to_owned)
}

/// The newest record that matches.
fn find_record(log: &Path, matches: impl Fn(&RecordView<'_>) -> bool) -> Option<Value> {
    let lines = storage::newest_lines(log);
    let line = lines.iter().rev().find(|line| RecordView::parse(line).is_some_and(|view| matches(&view)))?;
    serde_json::from_slice(line).ok()
}

fn poll_until(look: impl Fn() -> Option<Value>) -> Option<Value> {
    let end = Instant::now() + RECORD_TIMEOUT;
    loop {
        match look() {
            Some(found) => return Some(found),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(POLL_INTERVAL),
        }
    }
}
