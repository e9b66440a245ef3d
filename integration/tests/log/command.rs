//! `sandbar log verify`, `tail` and `query`: what they say and how they end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::{TestLog, sandbar};

const DEADLINE: Duration = Duration::from_secs(20);

/// Two segments, two sandboxes, three hosts, one of them hostile.
fn write_example_log() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let writing = TestLog::new(&log_dir(&dir));
    writing.write_allowed("build-7", "api.openai.com");
    writing.write_allowed("build-7", "github.com");
    writing.log.reopen().unwrap();
    writing.write_denied("build-7", "pastebin.com");
    writing.write_denied("trial-2", "\u{1b}[31mevil\nhost");
    writing.log.close();
    dir
}

fn log_dir(dir: &TempDir) -> PathBuf {
    dir.path().join("log")
}

fn segment_paths(dir: &Path) -> Vec<PathBuf> {
    audit::list_segments(dir).unwrap().into_iter().map(|(_, path)| path).collect()
}

fn run_log(dir: &Path, args: &[&str]) -> Output {
    sandbar().arg("log").args(args).arg(dir).output().unwrap()
}

fn stdout_text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn p8_verify_tells_intact_changed_and_incomplete_apart() {
    type Damage = fn(&[PathBuf]);
    let table: [(&str, Damage, i32, &str); 5] = [
        ("untouched", |_| (), 0, "intact"),
        (
            "one letter",
            |files| edit_file(&files[0], |text| text.replace("github.com", "gitlab.com")),
            1,
            ".jsonl:5: the record's bytes",
        ),
        (
            "a line less",
            |files| edit_file(&files[0], |text| remove_line(&text, 3)),
            1,
            ".jsonl:4: the link to the record before",
        ),
        ("a segment less", |files| fs::remove_file(&files[0]).unwrap(), 2, "records 1 to"),
        (
            "the tail less",
            |files| edit_file(&files[1], |text| remove_line(&text, text.lines().count() - 1)),
            2,
            "a checkpoint covers",
        ),
    ];
    for (name, damage, code, said) in table {
        let dir = write_example_log();
        damage(&segment_paths(&log_dir(&dir)));
        let output = run_log(&log_dir(&dir), &["verify"]);
        assert_eq!(output.status.code(), Some(code), "{name}: {}", stdout_text(&output));
        assert!(stdout_text(&output).contains(said), "{name}: {}", stdout_text(&output));
        let json: Value =
            serde_json::from_str(&stdout_text(&run_log(&log_dir(&dir), &["verify", "--json"]))).unwrap();
        let word = ["intact", "changed", "incomplete"][code as usize];
        assert_eq!(json["verified"], word, "{name}");
    }
}

fn edit_file(path: &Path, change: impl FnOnce(String) -> String) {
    fs::write(path, change(fs::read_to_string(path).unwrap())).unwrap();
}

fn remove_line(text: &str, line: usize) -> String {
    let kept = text.lines().enumerate().filter(|(at, _)| *at != line);
    kept.map(|(_, line)| format!("{line}\n")).collect()
}

#[test]
fn p8_verify_says_what_the_signatures_are_worth() {
    type Damage = fn(&Path);
    let table: [(&str, Damage, bool, i32, &str); 5] = [
        ("by the key given", |_| (), true, 0, "good"),
        ("by the key beside", |_| (), false, 0, "good"),
        ("no key", |dir| fs::remove_file(dir.join("checkpoint.pub")).unwrap(), false, 0, "unchecked"),
        (
            "no notes, but a key given",
            |dir| fs::remove_file(dir.join("access.checkpoints")).unwrap(),
            true,
            2,
            "none",
        ),
        (
            "junk among the notes",
            |dir| edit_file(&dir.join("access.checkpoints"), |text| format!("junk\n\n{text}")),
            false,
            0,
            "good",
        ),
    ];
    for (name, damage, give, code, signatures) in table {
        let dir = write_example_log();
        let key = dir.path().join("held.pub");
        fs::copy(log_dir(&dir).join("checkpoint.pub"), &key).unwrap();
        damage(&log_dir(&dir));
        let given = ["verify", "--json", "--key", key.to_str().unwrap()];
        let output = run_log(&log_dir(&dir), if give { &given } else { &given[..2] });
        assert_eq!(output.status.code(), Some(code), "{name}: {}", stdout_text(&output));
        let json: Value = serde_json::from_str(&stdout_text(&output)).unwrap();
        assert_eq!(json["signatures"], signatures, "{name}");
        let through = if signatures == "none" { &Value::Null } else { &json["last"] };
        assert_eq!(&json["attested_through"], through, "{name}");
    }
    let dir = write_example_log();
    fs::write(dir.path().join("empty.pub"), "\n").unwrap();
    let empty = dir.path().join("empty.pub");
    let output = run_log(&log_dir(&dir), &["verify", "--key", empty.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no public key found"));
}

#[test]
fn verify_takes_a_directory_under_two_spellings_once() {
    let dir = write_example_log();
    let (one, other) = (log_dir(&dir), dir.path().join(".").join("log"));
    let output = sandbar().args(["log", "verify"]).arg(one).arg(other).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stdout_text(&output));
}

#[test]
fn verify_says_what_it_cannot_read() {
    let output = run_log(Path::new("/nonexistent"), &["verify"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("sandbar: cannot read /nonexistent"), "{said}");
    assert_eq!(sandbar().args(["log", "verify"]).output().unwrap().status.code(), Some(64));
}

#[test]
fn tail_shows_what_is_wanted_and_nothing_that_acts_on_a_terminal() {
    let dir = write_example_log();
    for (args, expected) in [
        (&["--decision", "denied"][..], 2),
        (&["--decision", "denied", "--sandbox", "trial-2"], 1),
        (&["--host", "github.com"], 2),
        (&["--host", "*.openai.com", "--decision", "allowed"], 2),
        (&["--reason", "not_listed"], 2),
        (&["--since", "1h", "--reason", "not_listed"], 2),
        (&["--until", "2020-01-01T00:00:00Z"], 0),
        (&["-n", "1"], 1),
    ] {
        let args = [&["tail"], args].concat();
        let output = run_log(&log_dir(&dir), &args);
        assert_eq!(stdout_text(&output).lines().count(), expected, "{args:?}: {}", stdout_text(&output));
    }
    let all = stdout_text(&run_log(&log_dir(&dir), &["tail"]));
    assert!(all.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte)), "{all:?}");
    assert!(all.contains("DENY") && all.contains("not_listed no rule"), "{all}");
    assert!(!all.contains(" tried "), "what the target shows is not repeated: {all}");
    let log = audit::Log::open(audit::LogConfig::new(log_dir(&dir))).unwrap();
    let fronted = audit::RecordedConnection { host: Some("github.com".into()), port: Some(443), tls: None };
    let mut record = log.open_record(audit::RecordedArrival {
        channel: audit::RecordedChannel { kind: audit::StableCode("dedicated"), detail: None },
        transport: audit::Transport::TCP,
        source: None,
        original_dst: None,
    });
    record.set_facts(audit::RecordedFacts::Connection(fronted));
    let attempted = Some("GET denied\u{1b}.test denied.test /x".into());
    let reason = audit::StableCode("names_disagree");
    record.post_denial(audit::DecisionDetails { attempted, ..audit::DecisionDetails::new(reason) });
    log.close();
    let fronted = stdout_text(&run_log(&log_dir(&dir), &["tail", "--host", "denied.test"]));
    let expected = "github.com:443 names_disagree no rule tried GET denied\\u{1b}.test denied.test /x\n";
    assert!(fronted.ends_with(expected) && fronted.lines().count() == 1, "{fronted}");
    assert!(all.contains("GET https://api.openai.com:443/v1/x allowed rule `model`"), "{all}");
    let coloured = stdout_text(&run_log(&log_dir(&dir), &["tail", "--color", "always"]));
    assert!(coloured.contains("\u{1b}[31mDENY"), "{coloured}");
    let json = stdout_text(&run_log(&log_dir(&dir), &["tail", "--json", "--reason", "not_listed"]));
    assert!(json.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{json}");
}

#[test]
fn query_sums_by_host_and_reason() {
    let dir = write_example_log();
    let json = stdout_text(&run_log(&log_dir(&dir), &["query", "--json"]));
    let sums: Value = serde_json::from_str(&json).unwrap();
    let host = |name: &str| {
        let hosts = sums["hosts"].as_array().unwrap();
        hosts.iter().find(|row| row["host"] == name).unwrap().clone()
    };
    assert_eq!(host("github.com")["allowed"], 1);
    assert_eq!(host("github.com")["bytes_in"], 2000);
    assert_eq!(host("pastebin.com")["denied"], 1);
    assert_eq!(sums["total"]["allowed"], 2);
    assert_eq!(sums["total"]["denied"], 2);
    let reasons: Vec<_> = sums["reasons"].as_array().unwrap().iter().map(|row| &row["reason"]).collect();
    assert_eq!(reasons, ["allowed", "not_listed"]);
    let shown = stdout_text(&run_log(&log_dir(&dir), &["query", "--sandbox", "trial-2"]));
    assert!(shown.contains("\\u{1b}[31mevil\\u{a}host"), "{shown}");
    assert!(!shown.contains("github.com"), "{shown}");
    let listed = stdout_text(&run_log(&log_dir(&dir), &["query", "--list", "--decision", "denied"]));
    assert_eq!(listed.lines().count(), 2, "{listed}");
}

#[test]
fn what_was_refused_after_its_decision_is_not_counted_as_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let writing = TestLog::new(&log_dir(&dir));
    writing.write_allowed("build-7", "github.com");
    writing.write_overruled("build-7", "ssrf.example");
    writing.log.close();
    for (args, allowed, denied) in [
        (&[][..], 1, 1),
        (&["--decision", "allowed"], 1, 0),
        (&["--decision", "denied"], 0, 1),
        (&["--host", "ssrf.example"], 0, 1),
    ] {
        let args = [&["query", "--json"], args].concat();
        let sums: Value = serde_json::from_str(&stdout_text(&run_log(&log_dir(&dir), &args))).unwrap();
        let total = (&sums["total"]["allowed"], &sums["total"]["denied"]);
        assert_eq!(total, (&allowed.into(), &denied.into()), "{args:?}: {sums}");
        let attempts = sums["reasons"].as_array().unwrap().iter();
        let attempts: u64 = attempts.map(|row| row["attempts"].as_u64().unwrap()).sum();
        assert_eq!(attempts, allowed + denied, "{args:?}: {sums}");
    }
    let ends = stdout_text(&run_log(&log_dir(&dir), &["tail", "--reason", "private_address"]));
    assert!(ends.contains("refused private_address, 0 B out"), "{ends}");
}

#[test]
fn a_finding_is_found_by_sandbox_host_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let writing = TestLog::new(&log_dir(&dir));
    writing.write_finding("build-7", "memory.example");
    writing.log.close();
    for filter in [["--sandbox", "build-7"], ["--host", "memory.example"]] {
        let args = [&["tail", "--reason", "identity_mismatch"][..], &filter].concat();
        let said = stdout_text(&run_log(&log_dir(&dir), &args));
        assert!(said.contains("build-7    memory.example:443 identity_mismatch"), "{args:?} {said}");
    }
}

#[test]
fn tail_follows_the_log_across_rotations() {
    let dir = tempfile::tempdir().unwrap();
    let writing = TestLog::new(&log_dir(&dir));
    let following = TailProcess::start(&log_dir(&dir));
    // A follower begins at the end, so nothing counts before it has shown that it follows.
    let started = Instant::now();
    while following.lines.recv_timeout(Duration::from_millis(50)).is_err() {
        assert!(started.elapsed() < DEADLINE, "tail does not follow");
        writing.write_denied("build-7", "ready.example");
    }
    for round in 0..20 {
        writing.write_denied("build-7", &format!("{round}.example"));
        if round % 4 == 3 {
            writing.log.reopen().unwrap();
        }
    }
    for round in 0..20 {
        let mut lines = std::iter::from_fn(|| following.lines.recv_timeout(DEADLINE).ok());
        let line = lines.find(|line| !line.contains("ready.example")).expect("a line for each record");
        assert!(line.contains(&format!(" {round}.example:443 ")), "{round}: {line}");
    }
}

/// `sandbar log tail --follow`, ended with the value.
struct TailProcess {
    child: Child,
    lines: Receiver<String>,
}

impl TailProcess {
    fn start(dir: &Path) -> Self {
        let mut command = sandbar();
        command.args(["log", "tail", "--follow", "--decision", "denied"]).arg(dir);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }
}

impl Drop for TailProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
