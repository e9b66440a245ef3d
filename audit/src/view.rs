//! Reading records back: the members people ask for, filters, and following a log as it grows.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::line_reader::{LineReader, RawLine};
use crate::record::LINE_MAX;
use crate::segment::{compressed_path, is_compressed, list_segments, open_reader};

/// Bytes that a follower reads at a time.
const CHUNK: usize = 64 * 1024;

/// The members of a record that people ask for.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordView<'a> {
    pub time: u64,
    #[serde(borrow)]
    pub time_dt: Cow<'a, str>,
    pub class_uid: u16,
    #[serde(default)]
    action_id: u8,
    #[serde(borrow, default)]
    pub status_detail: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub message: Option<Cow<'a, str>>,
    #[serde(default)]
    pub duration: Option<u64>,
    #[serde(borrow, default)]
    actor: ActorView<'a>,
    #[serde(borrow, default)]
    src_endpoint: EndpointView<'a>,
    #[serde(borrow, default)]
    dst_endpoint: EndpointView<'a>,
    #[serde(borrow, default)]
    pub http_request: Option<HttpView<'a>>,
    #[serde(default)]
    http_response: Option<ResponseView>,
    #[serde(borrow, default)]
    pub query: Option<QueryView<'a>>,
    #[serde(borrow, default)]
    pub api: Option<ApiView<'a>>,
    #[serde(borrow, default)]
    finding_info: Option<FindingView<'a>>,
    #[serde(borrow, default)]
    evidences: Vec<EvidenceView<'a>>,
    #[serde(default)]
    traffic: Option<TrafficView>,
    #[serde(borrow, default)]
    firewall_rule: Option<RuleView<'a>>,
    #[serde(borrow)]
    pub metadata: MetadataView<'a>,
    #[serde(borrow)]
    unmapped: UnmappedView<'a>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct ActorView<'a> {
    #[serde(borrow, default)]
    app_uid: Option<Cow<'a, str>>,
}

#[derive(Clone, Debug, Deserialize)]
struct EvidenceView<'a> {
    #[serde(borrow, default)]
    dst_endpoint: EndpointView<'a>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct EndpointView<'a> {
    #[serde(borrow, default)]
    uid: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    hostname: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    ip: Option<Cow<'a, str>>,
    #[serde(default)]
    port: Option<u16>,
}

/// The request of a 4002 or 6003 record.
#[derive(Clone, Debug, Deserialize)]
pub struct HttpView<'a> {
    #[serde(borrow)]
    pub http_method: Cow<'a, str>,
    #[serde(borrow, default)]
    pub url: Option<UrlView<'a>>,
}

/// The target of a request.
#[derive(Clone, Debug, Deserialize)]
pub struct UrlView<'a> {
    #[serde(borrow)]
    pub scheme: Cow<'a, str>,
    #[serde(borrow)]
    pub path: Cow<'a, str>,
}

/// The question of a 4003 record.
#[derive(Clone, Debug, Deserialize)]
pub struct QueryView<'a> {
    #[serde(borrow)]
    hostname: Cow<'a, str>,
    #[serde(borrow, default, rename = "type")]
    pub kind: Option<Cow<'a, str>>,
}

/// The operation of a 6003 record.
#[derive(Clone, Debug, Deserialize)]
pub struct ApiView<'a> {
    #[serde(borrow)]
    pub operation: Cow<'a, str>,
}

#[derive(Clone, Debug, Deserialize)]
struct FindingView<'a> {
    #[serde(borrow)]
    title: Cow<'a, str>,
}

#[derive(Clone, Debug, Deserialize)]
struct ResponseView {
    code: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TrafficView {
    bytes_in: u64,
    bytes_out: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct RuleView<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

/// The ids of a record.
#[derive(Clone, Debug, Deserialize)]
pub struct MetadataView<'a> {
    #[serde(borrow)]
    pub correlation_uid: Cow<'a, str>,
    pub sequence: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct UnmappedView<'a> {
    #[serde(borrow)]
    sandbar: SandbarView<'a>,
}

#[derive(Clone, Debug, Deserialize)]
struct SandbarView<'a> {
    #[serde(borrow)]
    stage: Cow<'a, str>,
    #[serde(borrow, default)]
    attempted: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    event: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    ending: Option<Cow<'a, str>>,
    #[serde(default)]
    folded: Option<u64>,
    #[serde(default)]
    last: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    traffic: Option<TrafficView>,
}

/// The decision in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionKind {
    Allowed,
    Denied,
}

/// Which of the records of an attempt it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordStage {
    /// Answered here: nothing was sent.
    Answered,
    Decision,
    Denied,
    Finding,
    Lifecycle,
    Outcome,
}

impl<'a> RecordView<'a> {
    /// Parses a line; `None` if it is not a record.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }

    pub fn stage(&self) -> RecordStage {
        match &*self.unmapped.sandbar.stage {
            "answered" => RecordStage::Answered,
            "decision" => RecordStage::Decision,
            "denied" => RecordStage::Denied,
            "finding" => RecordStage::Finding,
            "outcome" => RecordStage::Outcome,
            _ => RecordStage::Lifecycle,
        }
    }

    pub fn decision(&self) -> Option<DecisionKind> {
        match self.action_id {
            1 => Some(DecisionKind::Allowed),
            2 => Some(DecisionKind::Denied),
            _ => None,
        }
    }

    pub fn sandbox(&self) -> Option<&str> {
        self.src_endpoint.uid.as_deref().or(self.actor.app_uid.as_deref())
    }

    /// Returns the destination; of a finding, that of its attempt.
    fn destination(&self) -> &EndpointView<'a> {
        self.evidences.first().map_or(&self.dst_endpoint, |evidence| &evidence.dst_endpoint)
    }

    /// Returns the host, or the address if no name is known.
    pub fn host(&self) -> Option<&str> {
        let name = self.destination().hostname.as_deref();
        let asked = self.query.as_ref().map(|query| &*query.hostname);
        name.or(asked).or(self.destination().ip.as_deref())
    }

    pub fn port(&self) -> Option<u16> {
        self.destination().port
    }

    /// Returns what a refused sandbox asked for, as it wrote it.
    pub fn attempted(&self) -> Option<&str> {
        self.unmapped.sandbar.attempted.as_deref()
    }

    pub fn rule(&self) -> Option<&str> {
        self.firewall_rule.as_ref().map(|rule| &*rule.name)
    }

    pub fn status(&self) -> Option<u16> {
        self.http_response.as_ref().map(|response| response.code)
    }

    /// Returns the bytes from the sandbox and to it.
    pub fn bytes(&self) -> (u64, u64) {
        let traffic = self.traffic.as_ref().or(self.unmapped.sandbar.traffic.as_ref());
        traffic.map_or((0, 0), |traffic| (traffic.bytes_out, traffic.bytes_in))
    }

    pub fn ending(&self) -> Option<&str> {
        self.unmapped.sandbar.ending.as_deref()
    }

    pub fn event(&self) -> Option<&str> {
        self.unmapped.sandbar.event.as_deref()
    }

    /// Returns the number of attempts that this record counts and that have no record of their own.
    pub fn folded(&self) -> u64 {
        self.unmapped.sandbar.folded.unwrap_or_default()
    }

    /// Returns whether those attempts may have had other destinations than this one.
    pub fn is_summary(&self) -> bool {
        self.unmapped.sandbar.last.is_some()
    }

    pub fn title(&self) -> Option<&str> {
        self.finding_info.as_ref().map(|finding| &*finding.title)
    }
}

/// Selects records. A field that is `None` matches every record.
#[derive(Clone, Debug, Default)]
pub struct RecordFilter {
    pub sandbox: Option<String>,
    pub host: Option<HostFilter>,
    pub decision: Option<DecisionKind>,
    pub reason: Option<String>,
    /// Milliseconds since 1970.
    pub since: Option<u64>,
    /// Milliseconds since 1970, not included.
    pub until: Option<u64>,
}

impl RecordFilter {
    pub fn matches(&self, view: &RecordView<'_>) -> bool {
        let is = |wanted: &Option<String>, found: Option<&str>| {
            wanted.as_ref().is_none_or(|wanted| found == Some(wanted))
        };
        self.since.is_none_or(|since| view.time >= since)
            && self.until.is_none_or(|until| view.time < until)
            && self.decision.is_none_or(|wanted| view.decision() == Some(wanted))
            && is(&self.sandbox, view.sandbox())
            && is(&self.reason, view.status_detail.as_deref())
            && self.host.as_ref().is_none_or(|host| {
                let tried = view.attempted().into_iter().flat_map(attempted_hosts);
                view.host().into_iter().chain(tried).any(|name| host.matches(name))
            })
    }
}

/// Returns the words of an `attempted` without scheme, user and port: among them are its hosts.
fn attempted_hosts(attempted: &str) -> impl Iterator<Item = &str> {
    attempted.split_ascii_whitespace().map(|word| {
        let word = word.split_once("://").map_or(word, |(_, rest)| rest);
        let word = word.rsplit_once('@').map_or(word, |(_, rest)| rest);
        let port = word.rsplit_once(':').filter(|(_, port)| port.bytes().all(|digit| digit.is_ascii_digit()));
        port.map_or(word, |(host, _)| host)
    })
}

/// A host pattern as in a policy: `x.com` is that name, `*.x.com` names below it, `.x.com` both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFilter {
    name: String,
    reach: HostMatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostMatch {
    Below,
    Both,
    Exact,
}

impl HostFilter {
    pub fn parse(text: &str) -> Self {
        let text = text.to_ascii_lowercase();
        let (reach, name) = match (text.strip_prefix("*."), text.strip_prefix('.')) {
            (Some(name), _) => (HostMatch::Below, name),
            (None, Some(name)) => (HostMatch::Both, name),
            (None, None) => (HostMatch::Exact, text.as_str()),
        };
        Self { name: name.trim_end_matches('.').to_owned(), reach }
    }

    pub fn matches(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let exact = host == self.name;
        let below = host.strip_suffix(&self.name).is_some_and(|rest| rest.ends_with('.'));
        match self.reach {
            HostMatch::Below => below,
            HostMatch::Both => exact || below,
            HostMatch::Exact => exact,
        }
    }
}

/// Calls `each` with every line of `path` that is no longer than a record may be.
///
/// # Errors
///
/// Returns the error from reading.
pub fn for_each_line(path: &Path, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let mut lines = LineReader::new(open_reader(path)?);
    while let Some(piece) = lines.next()? {
        if let RawLine::Line(line) = piece {
            each(line);
        }
    }
    Ok(())
}

/// Reads a directory's log as it grows, from segment to segment.
pub struct Follower {
    dir: PathBuf,
    current: Option<FollowedSegment>,
    /// The start of a line that is not complete yet.
    rest: Vec<u8>,
}

struct FollowedSegment {
    first: u64,
    source: FollowedSource,
}

enum FollowedSource {
    Compressed(Box<dyn Read + Send>),
    Plain(File),
}

impl FollowedSource {
    fn open(path: &Path) -> io::Result<Self> {
        match is_compressed(path) {
            false => File::open(path).map(Self::Plain),
            true => open_reader(path).map(Self::Compressed),
        }
    }

    fn read(&mut self, chunk: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Compressed(source) => source.read(chunk),
            Self::Plain(file) => file.read(chunk),
        }
    }
}

impl Follower {
    /// Starts with the first record of the oldest segment.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), current: None, rest: Vec::new() }
    }

    /// Starts with the first record of the newest segment, or of the one `back` segments before it.
    ///
    /// # Errors
    ///
    /// Returns the error from reading the directory.
    pub fn from_newest(dir: impl Into<PathBuf>, back: usize) -> io::Result<Self> {
        let mut follower = Self::new(dir);
        let found = list_segments(&follower.dir)?;
        let at = found.len().saturating_sub(1 + back);
        if let Some((first, path)) = found.get(at) {
            follower.open_segment(*first, path)?;
        }
        Ok(follower)
    }

    /// Calls `each` with every complete line written since the last call. Returns false if there was none.
    ///
    /// # Errors
    ///
    /// Returns the error from reading.
    pub fn poll(&mut self, mut each: impl FnMut(&[u8])) -> io::Result<bool> {
        let mut any = false;
        loop {
            let next = self.next_segment()?; // before reading, or lines written in between would be missed
            let mut chunk = vec![0; CHUNK];
            let count = match &mut self.current {
                Some(followed) => followed.source.read(&mut chunk)?,
                None => 0,
            };
            if count > 0 {
                any = true;
                self.split_lines(chunk.get(..count).unwrap_or_default(), &mut each);
            } else if let Some((first, path)) = self.replaced_segment()?.or(next) {
                self.rest.clear(); // an unfinished line is not a record; the next segment names it
                self.open_segment(first, &path)?;
            } else {
                return Ok(any);
            }
        }
    }

    /// Continues with another segment, unless it has been removed meanwhile.
    fn open_segment(&mut self, first: u64, path: &Path) -> io::Result<()> {
        let compressed = compressed_path(path); // it may have been compressed meanwhile
        for path in [path, &compressed] {
            match FollowedSource::open(path) {
                Ok(source) => {
                    self.current = Some(FollowedSegment { first, source });
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the segment being read if it was removed and created again under the same name, as after
    /// a full disk.
    fn replaced_segment(&self) -> io::Result<Option<(u64, PathBuf)>> {
        let Some(FollowedSegment { first, source: FollowedSource::Plain(file) }) = &self.current else {
            return Ok(None);
        };
        let path = self.dir.join(crate::segment::segment_name(*first));
        let removed = file.metadata()?.nlink() == 0;
        Ok((removed && path.exists()).then_some((*first, path)))
    }

    fn next_segment(&self) -> io::Result<Option<(u64, PathBuf)>> {
        let current = self.current.as_ref().map(|followed| followed.first);
        let mut found = list_segments(&self.dir)?.into_iter();
        Ok(found.find(|(first, _)| current.is_none_or(|current| *first > current)))
    }

    fn split_lines(&mut self, chunk: &[u8], each: &mut impl FnMut(&[u8])) {
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            let Some(end) = piece.strip_suffix(b"\n") else {
                if self.rest.len() < LINE_MAX {
                    self.rest.extend_from_slice(piece); // beyond the limit it is not a record
                }
                continue;
            };
            self.rest.extend_from_slice(end);
            if self.rest.len() < LINE_MAX {
                each(&self.rest);
            }
            self.rest.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn hosts_match_as_in_a_policy() {
        for (pattern, host, expected) in [
            ("x.com", "x.com", true),
            ("X.com", "x.COM.", true),
            ("x.com", "a.x.com", false),
            ("*.x.com", "x.com", false),
            ("*.x.com", "b.a.x.com", true),
            ("*.x.com", "evilx.com", false),
            (".x.com", "x.com", true),
            (".x.com", "a.x.com", true),
            (".x.com", "evilx.com", false),
        ] {
            assert_eq!(HostFilter::parse(pattern).matches(host), expected, "{pattern} {host}");
        }
    }

    #[test]
    fn the_hosts_of_an_attempt_are_found_in_whatever_was_written() {
        for (attempted, host) in [
            ("CONNECT denied.test:443", "denied.test"),
            ("GET http://allowed.test:80 denied.test:80 /x", "denied.test"),
            ("GET https://***@denied.test /x", "denied.test"),
            ("SOCKS BIND 192.0.2.7:80", "192.0.2.7"),
            ("denied.test AAAA", "denied.test"),
        ] {
            let filter = HostFilter::parse(host);
            assert!(attempted_hosts(attempted).any(|name| filter.matches(name)), "{attempted}");
            let other = HostFilter::parse("enied.test");
            assert!(!attempted_hosts(attempted).any(|name| other.matches(name)), "{attempted}");
        }
    }

    #[test]
    fn a_follower_misses_nothing_across_segments() {
        let dir = tempfile::tempdir().unwrap();
        let name = |first: u64| dir.path().join(crate::segment::segment_name(first));
        let mut follower = Follower::new(dir.path());
        let mut seen = Vec::new();
        let mut poll = |seen: &mut Vec<String>| {
            follower.poll(|line| seen.push(String::from_utf8_lossy(line).into_owned())).unwrap()
        };
        assert!(!poll(&mut seen));
        fs::write(name(1), "a\nb\nun").unwrap();
        assert!(poll(&mut seen));
        fs::write(name(1), "a\nb\nunfinished\nc\n").unwrap();
        fs::write(name(5), "d\ntorn").unwrap();
        fs::write(name(9), "e\n").unwrap();
        assert!(poll(&mut seen));
        assert_eq!(seen, ["a", "b", "unfinished", "c", "d", "e"]);
        assert!(!poll(&mut seen));
    }

    #[test]
    fn a_follower_reads_what_was_made_again_and_passes_over_what_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let name = |first: u64| dir.path().join(crate::segment::segment_name(first));
        let mut follower = Follower::new(dir.path());
        let mut seen = Vec::new();
        let mut poll = |seen: &mut Vec<String>| {
            follower.poll(|line| seen.push(String::from_utf8_lossy(line).into_owned())).unwrap()
        };
        fs::write(name(1), "a\n").unwrap();
        fs::write(name(2), "").unwrap();
        poll(&mut seen);
        fs::remove_file(name(2)).unwrap();
        fs::write(name(2), "b\nc\n").unwrap();
        fs::write(name(4), format!("{}\nd\n", "x".repeat(LINE_MAX))).unwrap();
        poll(&mut seen);
        assert_eq!(seen, ["a", "b", "c", "d"], "a line longer than a record is skipped");
        fs::remove_file(name(4)).unwrap();
        assert!(!poll(&mut seen), "the last segment is gone and there is no new one");
        follower.open_segment(9, &name(9)).unwrap();
    }
}
