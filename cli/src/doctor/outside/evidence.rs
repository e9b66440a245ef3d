//! One allowed and one refused request with the lines that the log has of them: made now by the explicit
//! listener, if there is one here, or else the last ones of the log.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use audit::view::{Decision, Stage, View};
use rules::operator::Mode;
use serde_json::Value;

use super::{Files, keep};
use crate::doctor::DoctorArgs;
use crate::doctor::answer::Answer;
use crate::doctor::report::Evidence;

/// Longest wait for the listener, and for each piece of its answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest until a record is to be read.
const WRITTEN: Duration = Duration::from_secs(2);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(20);

pub(super) fn collect(files: &Files, args: &DoctorArgs) -> Vec<Evidence> {
    let log = &files.places.log;
    let listener = files.addresses(Mode::Explicit).into_iter().next().map(near);
    let wanted = [("allowed", args.allowed.as_ref()), ("refused", Some(&args.denied))];
    let made = wanted.map(|(wanted, host)| match (listener, host) {
        (Some(listener), Some(host)) => {
            let made = asked(listener, wanted, host, log);
            // This machine may be no sandbox to the listener: then what one was allowed is shown.
            match wanted == "allowed" && made.record.is_some() && !made.is_allowed() {
                true => last(wanted, log).or(Some(made)),
                false => Some(made),
            }
        }
        (None, _) | (_, None) => last(wanted, log),
    });
    made.into_iter().flatten().collect()
}

/// Where a listener on every address is to be found from here.
fn near(bound: SocketAddr) -> SocketAddr {
    let here: IpAddr = match bound.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let ip = if bound.ip().is_unspecified() { here } else { bound.ip() };
    SocketAddr::new(ip, bound.port())
}

fn asked(listener: SocketAddr, wanted: &'static str, host: &str, log: &Path) -> Evidence {
    let request = format!("GET http://{host}/sandbar-doctor");
    let (answer, record) = match ask(listener, host) {
        Ok(answer) => (answer.first_line(), answer.record().map(str::to_owned)),
        Err(error) => (format!("no answer: {error}"), None),
    };
    let line = until(|| match &record {
        Some(record) => find(log, |view| view.metadata.correlation_uid == record.as_str()),
        None => find(log, |view| view.host() == Some(host) && view.stage() == Stage::Decision),
    });
    Evidence { wanted, request, answer, record: record.or_else(|| id(line.as_ref())), line }
}

fn ask(listener: SocketAddr, host: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&listener, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET http://{host}/sandbar-doctor HTTP/1.1\r\nHost: {host}\r\nUser-Agent: sandbar-doctor\r\nConnection: close\r\n\r\n"
    )?;
    Answer::read(&mut stream)
}

/// The last record of the log that is of this kind.
fn last(wanted: &'static str, log: &Path) -> Option<Evidence> {
    let decision = if wanted == "allowed" { Decision::Allowed } else { Decision::Denied };
    let line = find(log, |view| {
        view.decision() == Some(decision)
            && matches!(view.stage(), Stage::Answered | Stage::Decision | Stage::Denied)
    })?;
    let record = id(Some(&line));
    let (request, answer) = ("the last one of the log".to_owned(), wanted.to_owned());
    Some(Evidence { wanted, request, answer, record, line: Some(line) })
}

fn id(line: Option<&Value>) -> Option<String> {
    line?.pointer("/metadata/correlation_uid")?.as_str().map(str::to_owned)
}

/// The newest record that fits.
fn find(log: &Path, fits: impl Fn(&View<'_>) -> bool) -> Option<Value> {
    let lines = keep::newest_lines(log);
    let line = lines.iter().rev().find(|line| View::parse(line).is_some_and(|view| fits(&view)))?;
    serde_json::from_slice(line).ok()
}

fn until(look: impl Fn() -> Option<Value>) -> Option<Value> {
    let end = Instant::now() + WRITTEN;
    loop {
        match look() {
            Some(found) => return Some(found),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(LOOK),
        }
    }
}
