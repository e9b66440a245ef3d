//! A real consumer: rsyslog, configured as we ship it, follows the log across rotations.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::TestLog;

const DEADLINE: Duration = Duration::from_secs(30);
const SHIPPED_CONFIG: &str = include_str!("../../../deploy/log/rsyslog.conf");
const RSYSLOG_MISSING: &str = "rsyslogd does not start: `make test` installs it, or apt-get install rsyslog";

#[test]
fn rsyslog_ships_every_record_in_order_across_rotations() {
    let dir = tempfile::tempdir().unwrap();
    let log_dir = dir.path().join("log");
    let writing = TestLog::new(&log_dir);
    let siem = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = write_config(dir.path(), &log_dir, siem.local_addr().unwrap().port());
    let _rsyslog = RsyslogDaemon::start(dir.path(), &config);
    let arrived = receive_lines(siem);
    for round in 0..300 {
        writing.write_allowed("build-7", &format!("{round}.example"));
        writing.write_denied("build-7", "\u{1b}[31m\"},\"action_id\":1,{\n");
        if round % 50 == 49 {
            writing.log.reopen().unwrap();
        }
    }
    writing.log.close();
    let last = writing.log.head().sequence;
    assert!(audit::list_segments(&log_dir).unwrap().len() >= 6, "it rotated");
    let arrived: Vec<u64> = (1..=last)
        .map(|_| read_sequence(&arrived.recv_timeout(DEADLINE).expect("every record arrives")))
        .collect();
    // rsyslog reads segments side by side when it is behind, so order is that of each segment.
    for (_, segment) in audit::list_segments(&log_dir).unwrap() {
        let text = fs::read_to_string(&segment).unwrap();
        let written: Vec<u64> =
            text.lines().map(|line| record_sequence(&serde_json::from_str(line).unwrap())).collect();
        let shipped: Vec<u64> =
            arrived.iter().copied().filter(|sequence| written.contains(sequence)).collect();
        assert_eq!(shipped, written, "every record of {segment:?}, in order, none twice");
    }
}

/// The number of a record that arrived, after a look at what rsyslog made of it.
fn read_sequence(line: &str) -> u64 {
    let (header, record) = line.split_once(" - {").unwrap_or_else(|| panic!("{line}"));
    let record: Value = serde_json::from_str(&format!("{{{record}")).unwrap();
    let (time, uid) = (record["time_dt"].as_str(), record["metadata"]["uid"].as_str());
    let words: Vec<&str> = header.split(' ').collect();
    assert_eq!(words[1], time.unwrap(), "rsyslog read the record: {header}");
    assert_eq!(words[5], uid.unwrap(), "rsyslog read the record: {header}");
    record_sequence(&record)
}

fn record_sequence(record: &Value) -> u64 {
    record["metadata"]["sequence"].as_u64().unwrap()
}

/// The configuration as shipped, with the paths and the address of this test.
fn write_config(dir: &Path, log_dir: &Path, port: u16) -> PathBuf {
    let spool = dir.join("spool");
    fs::create_dir(&spool).unwrap();
    let mut text = SHIPPED_CONFIG.to_owned();
    for (shipped, here) in [
        ("/var/log/sandbar", log_dir.display().to_string()),
        ("/var/spool/rsyslog", spool.display().to_string()),
        ("siem.example", "127.0.0.1".to_owned()),
        ("6514", port.to_string()),
    ] {
        assert!(text.contains(shipped), "the shipped configuration names {shipped}");
        text = text.replace(shipped, &here);
    }
    let path = dir.join("rsyslog.conf");
    fs::write(&path, text).unwrap();
    path
}

/// A daemon of our own, ended with the value.
struct RsyslogDaemon(Child);

impl RsyslogDaemon {
    fn start(dir: &Path, config: &Path) -> Self {
        let checked =
            Command::new("rsyslogd").args(["-N1", "-f"]).arg(config).output().expect(RSYSLOG_MISSING);
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(checked.status.success(), "{said}");
        let mut command = Command::new("rsyslogd");
        command.args(["-n", "-f"]).arg(config).arg("-i").arg(dir.join("rsyslogd.pid"));
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect(RSYSLOG_MISSING))
    }
}

impl Drop for RsyslogDaemon {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Plays the SIEM: every line that arrives.
fn receive_lines(siem: TcpListener) -> Receiver<String> {
    let (sender, arrived) = channel();
    thread::spawn(move || {
        let (stream, _) = siem.accept().unwrap();
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    arrived
}
