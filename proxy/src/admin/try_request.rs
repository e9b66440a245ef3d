//! The answer to `sandbar signals try`: what the detectors say about one raw HTTP/1.1 request, and what a policy does
//! about each signal. Nothing leaves, and nothing is recorded or remembered.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, bail};
use pingora_http::RequestHeader;
use rules::budget::BudgetKind;
use rules::configuration::Configuration;
use rules::decision::{Permit, Treatment};
use rules::facts::HttpMethod;
use rules::limits::TrafficLimits;
use rules::probe::PolicyProbe;
use rules::signals::settings::{BodyInspection, SignalKind, SignalTerms};
use rules::{Decision, RuleSet};
use serde::Serialize;

use crate::admin::explain::choose_sandbox;
use crate::credential::CredentialStore;
use crate::egress::sending::{SentFraming, describe_sending};
use crate::http::chunks::ChunkValidator;
use crate::http::head::{self, BodyFraming};
use crate::http::outgoing_head;
pub use crate::inspect::{KnownSignal, TriedBits, TriedComponent, TriedSignal, known_signals};
use crate::inspect::{RequestHead, Trial, TrialFindings, TrialSet};
use crate::policy::paths::instance_paths;
use crate::report::UsageError;

/// Fields that are read; the limit on them is that of the configuration.
const MAX_FIELDS: usize = 256;

/// What to try, and by which rules.
#[derive(Clone, Copy, Default)]
pub struct TryRequest<'a> {
    /// One HTTP/1.1 request, head and body.
    pub request: &'a [u8],
    /// Where it goes, as `https://host[:port]`; by default to its `Host`, with TLS.
    pub host: Option<&'a str>,
    /// The policy; without one, the defaults apply.
    pub rules: Option<&'a RuleSet>,
    /// The sandbox; optional if there is only one.
    pub sandbox: Option<&'a str>,
    /// The configuration and its path: own patterns, credentials and canaries.
    pub configuration: Option<(&'a Path, &'a Configuration)>,
}

/// What the detectors say about a request. Never contains what they found.
#[derive(Clone, Debug, Serialize)]
pub struct TriedRequest {
    pub method: String,
    pub host: String,
    pub port: u16,
    /// What the policy says about the destination, if one was given.
    pub policy: Option<TriedPolicy>,
    /// How much of the request is searched: `all`, `head` or `none`.
    pub inspected: &'static str,
    /// The modes in force, by key of `[signals]`.
    pub settings: BTreeMap<&'static str, String>,
    /// Secrets, canaries and credentials.
    pub content: Vec<TriedSignal>,
    /// How unusual the head is.
    pub form: Vec<TriedSignal>,
    /// What the head says, in bits; none where it is not seen.
    pub header_bits: Option<TriedBits>,
    /// What could not be searched for.
    pub notes: Vec<String>,
    /// Whether anything is denied.
    pub denied: bool,
}

/// The decision about the destination.
#[derive(Clone, Debug, Serialize)]
pub struct TriedPolicy {
    pub sandbox: String,
    /// The code of the denial; none if the destination is allowed.
    pub reason: Option<&'static str>,
    /// The rule that allows or denies it.
    pub rule: Option<String>,
    /// The treatment of what is allowed.
    pub how: Option<&'static str>,
}

/// A request as it was read.
struct RawRequest {
    head: head::RequestHead,
    fields: RequestHeader,
    body: Vec<u8>,
}

/// How much of a request is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visible {
    /// The name alone: a tunnel.
    Name,
    Request,
}

impl TryRequest<'_> {
    /// Looks at the request.
    ///
    /// # Errors
    ///
    /// Returns what makes it no request, or [`UsageError`] for a host or a sandbox that there is not.
    pub fn answer(&self) -> anyhow::Result<TriedRequest> {
        let limits = self.configuration.map(|(_, configuration)| configuration.limits).unwrap_or_default();
        let request = RawRequest::parse(self.request, &limits)?;
        let probe = self.probe(&request.head)?;
        let (policy, permit) = self.decide(&probe)?;
        let mut notes = Vec::new();
        let set = self.read_set(&mut notes)?;
        if set.canaries.is_none() {
            notes.push("canaries are not searched for: `-c` names the instance that has them".to_owned());
        }
        notes.push("text recalled from memory banks is not known here".to_owned());

        let visible = permit.as_ref().map_or(Visible::Request, visible_part);
        let trial = Trial::new(&set, permit.as_ref(), &probe.host.to_string())?;
        let mut found = TrialFindings::default();
        if let Some(name) = probe.host.name() {
            trial.look_at_name(name.as_str(), &mut found);
        }
        let mut header_bits = None;
        if visible == Visible::Request {
            let leaving = outgoing_head(&request.fields, permit.as_ref())
                .map_err(|refusal| anyhow::anyhow!("the head is refused as `{}`", refusal.reason.code()))?;
            let framing = match request.head.body {
                BodyFraming::Chunked => SentFraming::Open,
                BodyFraming::Measured(length) => SentFraming::of_length(Some(length)),
            };
            let sending = describe_sending(probe.scheme, ::http::Version::HTTP_11, framing, Some(probe.port));
            let bits = trial.look_at_head(&RequestHead::of(&leaving), &sending, &mut found);
            header_bits = Some(TriedBits { limit: permit.as_ref().and_then(bit_budget), ..bits });
            let encoding = request.fields.headers.get("content-encoding").map(|coding| coding.as_bytes());
            trial.look_at_body(&request.body, encoding, &mut found);
        }

        let spent =
            header_bits.as_ref().is_some_and(|bits| bits.limit.is_some_and(|limit| bits.bits > limit));
        let refused = policy.as_ref().is_some_and(|policy| policy.reason.is_some());
        let denied = |signal: &TriedSignal| signal.verdict == "deny";
        Ok(TriedRequest {
            denied: spent || refused || found.content.iter().chain(&found.form).any(denied),
            method: request.head.method,
            host: probe.host.to_string(),
            port: probe.port,
            policy,
            inspected: coverage(visible, trial.terms()),
            settings: SignalKind::ALL.map(|kind| (kind.key(), trial.terms().mode(kind).to_string())).into(),
            content: found.content,
            form: found.form,
            header_bits,
            notes,
        })
    }

    /// Describes the attempt as `explain` does.
    fn probe(&self, head: &head::RequestHead) -> anyhow::Result<PolicyProbe> {
        let named = || {
            let authority = head.authority.as_ref()?;
            let scheme = if head.target.starts_with('/') { "https" } else { "http" };
            let port = authority.port.map(|port| format!(":{port}")).unwrap_or_default();
            Some(format!("{scheme}://{}{port}", authority.host))
        };
        let text = self.host.map(str::to_owned).or_else(named);
        let text = text.ok_or_else(|| UsageError("the request names no host: use --host".to_owned()))?;
        let mut probe = PolicyProbe::parse(&text).map_err(|error| UsageError(error.to_string()))?;
        let method = HttpMethod::parse(&head.method);
        probe.method = Some(method.with_context(|| format!("invalid method `{}`", head.method))?);
        let target = head.target.split_once("://").map_or(head.target.as_str(), |(_, rest)| {
            rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/")
        });
        probe.path = target.split('?').next().map(str::to_owned);
        Ok(probe)
    }

    fn decide(&self, probe: &PolicyProbe) -> anyhow::Result<(Option<TriedPolicy>, Option<Permit>)> {
        let Some(rules) = self.rules else {
            if self.sandbox.is_some() {
                bail!(UsageError("--sandbox needs a policy: use --policy or -c".to_owned()));
            }
            return Ok((None, None));
        };
        let sandbox = choose_sandbox(rules, self.sandbox)?;
        let policy = TriedPolicy { sandbox: sandbox.id.to_string(), reason: None, rule: None, how: None };
        Ok(match probe.decide(rules, &sandbox) {
            Decision::Allow(permit) => {
                let (rule, how) = (Some(permit.rule().rule.to_string()), Some(permit.treatment().as_str()));
                (Some(TriedPolicy { rule, how, ..policy }), Some(permit))
            }
            Decision::Deny(denial) => {
                let rule = denial.rule.as_ref().map(|rule| rule.rule.to_string());
                (Some(TriedPolicy { rule, reason: Some(denial.reason.code()), ..policy }), None)
            }
        })
    }

    /// Reads what to search for from the configuration. A file that this user may not read becomes a note.
    fn read_set(&self, notes: &mut Vec<String>) -> anyhow::Result<TrialSet> {
        let Some((path, configuration)) = self.configuration else { return Ok(TrialSet::default()) };
        let mut set = TrialSet { own_patterns: configuration.secret_patterns.clone(), ..TrialSet::default() };
        let base = path.parent().unwrap_or(Path::new(""));
        let credentials = configuration.credentials.iter();
        let credentials = credentials.map(|one| (one.name.clone(), base.join(&one.file)));
        let credentials = CredentialStore::open(credentials)?;
        for one in &configuration.credentials {
            if credentials.current(&one.name).is_err() {
                notes.push(format!("credential `{}` cannot be read, so it is not searched for", one.name));
            }
        }
        set.credentials = Some(credentials);
        if configuration.log.is_some() {
            let paths = instance_paths(path, configuration)?;
            if let Err(error) = set.read_canaries(&paths.log) {
                notes.push(format!("{error:#}"));
            }
        }
        Ok(set)
    }
}

fn visible_part(permit: &Permit) -> Visible {
    match permit.treatment() {
        Treatment::Raw | Treatment::Resolve | Treatment::Tunnel => Visible::Name,
        Treatment::Forward | Treatment::Hold { .. } | Treatment::Intercept => Visible::Request,
    }
}

fn coverage(visible: Visible, terms: &SignalTerms) -> &'static str {
    match (visible, terms.bodies()) {
        (Visible::Name, _) => "none",
        (Visible::Request, BodyInspection::Skipped) => "head",
        (Visible::Request, BodyInspection::Searched) => "all",
    }
}

/// Returns the smallest budget of bits that the permit has.
fn bit_budget(permit: &Permit) -> Option<u64> {
    let budgets = permit.rule_budgets().min(permit.sandbox_budgets());
    let budgets = permit.base_budgets().map_or(budgets, |(_, base)| budgets.min(base));
    budgets.limit(BudgetKind::HeaderBitsPerHour)
}

impl RawRequest {
    /// Reads one request, as strictly as from a connection. A head whose lines all end with LF alone, as editors write
    /// them, is read as if with CRLF.
    fn parse(bytes: &[u8], limits: &TrafficLimits) -> anyhow::Result<Self> {
        let bytes = with_crlf(head::skip_empty_line(bytes));
        let end = head::find_end(&bytes, limits).context("not an HTTP/1.1 request")?;
        let Some((head_bytes, rest)) = end.and_then(|end| bytes.split_at_checked(end)) else {
            bail!("not an HTTP/1.1 request: the head does not end with an empty line");
        };
        let head = head::parse(head_bytes, limits).context("not an HTTP/1.1 request")?;
        if head.method == "CONNECT" {
            bail!("a CONNECT has no content: give the request inside the tunnel");
        }
        let fields = read_fields(head_bytes, &head)?;
        let body = match head.body {
            BodyFraming::Measured(length) => measured_body(rest, length)?,
            BodyFraming::Chunked => chunked_body(rest)?,
        };
        Ok(RawRequest { head, fields, body })
    }
}

fn with_crlf(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.windows(2).position(|pair| pair == b"\n\n").map(|at| at + 2);
    let Some((head, body)) = end.and_then(|end| bytes.split_at_checked(end)) else { return bytes.to_vec() };
    if head.contains(&b'\r') {
        return bytes.to_vec();
    }
    let lines = head.split_inclusive(|byte| *byte == b'\n').flat_map(|line| {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        line.iter().chain(b"\r\n")
    });
    lines.chain(body).copied().collect()
}

fn read_fields(bytes: &[u8], head: &head::RequestHead) -> anyhow::Result<RequestHeader> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    parsed.parse(bytes).context("not an HTTP/1.1 request")?;
    let invalid =
        |_| anyhow::anyhow!("not an HTTP/1.1 request: the method, the target or a field is invalid");
    let mut request = RequestHeader::build(head.method.as_str(), head.target.as_bytes(), None);
    for field in parsed.headers.iter() {
        request = request.and_then(|mut request| {
            request.append_header(field.name.to_owned(), field.value)?;
            Ok(request)
        });
    }
    request.map_err(invalid)
}

/// Returns a body of known length. One line end may follow it, as editors add it.
fn measured_body(rest: &[u8], length: u64) -> anyhow::Result<Vec<u8>> {
    let body = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
    let Some((body, after)) = body else {
        bail!("`Content-Length` says {length} bytes, but {} follow the head", rest.len());
    };
    match after {
        b"" | b"\n" | b"\r\n" => Ok(body.to_vec()),
        _ if length == 0 => {
            bail!("{0} bytes follow a head that announces no body: add `Content-Length: {0}`", rest.len())
        }
        _ => bail!("{} bytes follow the request; only one can be tried", after.len()),
    }
}

/// Decodes a chunked body after its framing was checked.
fn chunked_body(rest: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut validator = ChunkValidator::default();
    let length = validator.validate(rest).context("the chunked body is malformed")?;
    if !validator.is_done() {
        bail!("the chunked body does not end with an empty chunk");
    }
    if !matches!(rest.get(length..), Some(b"" | b"\n" | b"\r\n")) {
        bail!("{} bytes follow the request; only one can be tried", rest.len().saturating_sub(length));
    }
    let (mut left, mut body) = (rest, Vec::new());
    while let Some(at) = left.iter().position(|byte| *byte == b'\n') {
        let digits = left.iter().take_while(|byte| byte.is_ascii_hexdigit());
        let size = digits.fold(0_usize, |size, digit| {
            size << 4 | char::from(*digit).to_digit(16).map_or(0, |digit| digit as usize)
        });
        let data = left.get(at + 1..).unwrap_or_default();
        let Some((chunk, after)) = data.split_at_checked(size).filter(|_| size > 0) else { break };
        body.extend_from_slice(chunk);
        left = after.strip_prefix(b"\r\n").unwrap_or(after);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_from_a_connection() {
        let limits = TrafficLimits::default();
        for (text, expected) in [
            ("GET / HTTP/1.1\r\nHost: h.example\r\n\r\n", Ok("")),
            ("GET / HTTP/1.1\nHost: h.example\n\n", Ok("")),
            ("POST / HTTP/1.1\nHost: h.example\nContent-Length: 3\n\nabc\n", Ok("abc")),
            (
                "POST / HTTP/1.1\r\nHost: h.example\r\nTransfer-Encoding: chunked\r\n\r\n\
                 3;x=y\r\nabc\r\nA\r\n\n123456789\r\n0\r\n\r\n",
                Ok("abc\n123456789"),
            ),
            ("", Err("empty line")),
            ("hello", Err("empty line")),
            ("hello\r\n\r\n", Err("not an HTTP/1.1 request")),
            ("GET / HTTP/1.1\r\n\r\n", Err("`Host`")),
            ("GET / HTTP/1.1\r\nHost: h.example\nX: y\r\n\r\n", Err("bare LF")),
            ("GET / HTTP/1.1\r\nHost: h.example\r\n\r\nabc", Err("add `Content-Length: 3`")),
            (
                "POST / HTTP/1.1\r\nHost: h.example\r\nContent-Length: 4\r\n\r\nabc",
                Err("says 4 bytes, but 3"),
            ),
            ("POST / HTTP/1.1\r\nHost: h.example\r\nContent-Length: 1\r\n\r\nabc", Err("only one")),
            ("POST / HTTP/1.1\r\nHost: h.example\r\nContent-Length: x\r\n\r\n", Err("`Content-Length`")),
            (
                "POST / HTTP/1.1\r\nHost: h.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
                Err("empty chunk"),
            ),
            (
                "POST / HTTP/1.1\r\nHost: h.example\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
                Err("malformed"),
            ),
            ("CONNECT h.example:443 HTTP/1.1\r\nHost: h.example:443\r\n\r\n", Err("inside the tunnel")),
        ] {
            let read = RawRequest::parse(text.as_bytes(), &limits);
            match (read, expected) {
                (Ok(request), Ok(body)) => assert_eq!(request.body, body.as_bytes(), "{text:?}"),
                (Err(error), Err(wanted)) => {
                    assert!(format!("{error:#}").contains(wanted), "{text:?}: {error:#}");
                }
                (Ok(_), Err(wanted)) => panic!("{text:?} is read; expected {wanted}"),
                (Err(error), Ok(_)) => panic!("{text:?}: {error:#}"),
            }
        }
    }
}
