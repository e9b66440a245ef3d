//! One allowed and one refused request with the lines that the log has of them: made now by the explicit
//! listener, if there is one here, or else the last ones of the log.

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

/// Longest wait for the listener, and for each piece of its answer.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest until a record is to be read.
const RECORD_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

pub(super) fn collect(files: &ConfigFiles, args: &DoctorArgs) -> Vec<RequestEvidence> {
    let log = &files.places.log;
    let listener =
        files.addresses(ListenerMode::Explicit).into_iter().next().map(reachable_address);
    let wanted = [("allowed", args.allowed.as_ref()), ("refused", Some(&args.denied))];
    let made = wanted.map(|(wanted, host)| match (listener, host) {
        (Some(listener), Some(host)) => {
            let made = request_evidence(listener, wanted, host, log);
            // This machine may be no sandbox to the listener: then what one was allowed is shown.
            match wanted == "allowed" && made.record.is_some() && !made.is_allowed() {
                true => last_evidence(wanted, log).or(Some(made)),
                false => Some(made),
            }
        }
        (None, _) | (_, None) => last_evidence(wanted, log),
    });
    made.into_iter().flatten().collect()
}

/// Where a listener on every address is to be found from here.
fn reachable_address(bound: SocketAddr) -> SocketAddr {
    let here: IpAddr = match bound.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let ip = if bound.ip().is_unspecified() { here } else { bound.ip() };
    SocketAddr::new(ip, bound.port())
}

fn request_evidence(
    listener: SocketAddr,
    wanted: &'static str,
    host: &str,
    log: &Path,
) -> RequestEvidence {
    let request = format!("GET http://{host}/sandbar-doctor");
    let (answer, record) = match send_request(listener, host) {
        Ok(answer) => (answer.first_line(), answer.record_id().map(str::to_owned)),
        Err(error) => (format!("no answer: {error}"), None),
    };
    let line = poll_until(|| match &record {
        Some(record) => find_record(log, |view| view.metadata.correlation_uid == record.as_str()),
        None => find_record(log, |view| {
            view.host() == Some(host) && view.stage() == RecordStage::Decision
        }),
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

/// The last record of the log that is of this kind.
fn last_evidence(wanted: &'static str, log: &Path) -> Option<RequestEvidence> {
    let decision = if wanted == "allowed" { DecisionKind::Allowed } else { DecisionKind::Denied };
    let line = find_record(log, |view| {
        view.decision() == Some(decision)
            && matches!(
                view.stage(),
                RecordStage::Answered | RecordStage::Decision | RecordStage::Denied
            )
    })?;
    let record = correlation_id(Some(&line));
    let (request, answer) = ("the last one of the log".to_owned(), wanted.to_owned());
    Some(RequestEvidence { wanted, request, answer, record, line: Some(line) })
}

fn correlation_id(line: Option<&Value>) -> Option<String> {
    line?.pointer("/metadata/correlation_uid")?.as_str().map(str::to_owned)
}

/// The newest record that fits.
fn find_record(log: &Path, fits: impl Fn(&RecordView<'_>) -> bool) -> Option<Value> {
    let lines = storage::newest_lines(log);
    let line =
        lines.iter().rev().find(|line| RecordView::parse(line).is_some_and(|view| fits(&view)))?;
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
