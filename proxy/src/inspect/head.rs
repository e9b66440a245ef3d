//! What a request says outside its body: method, path, query, header fields, cookies.

use std::sync::Arc;

use pingora_http::RequestHeader;
use rules::signals::bits::RequestParts;
use rules::signals::content::{ContentScanner, ScanLimits};
use rules::signals::{Signal, SignalCode, SignalPlace, ViewMatcher};

use super::scan_set::{AttemptMatchers, SharedMatchers};

/// Fields that follow from the body, from the connection or from what Sandbar sets: the sandbox says nothing with them.
const DERIVED_FIELDS: [&str; 6] =
    ["connection", "content-length", "host", "keep-alive", "te", "transfer-encoding"];

/// Fields in which a client shows its own credential to a service. A key there is where it belongs, so its shape is no
/// signal; canaries, values that only Sandbar may send and recalled text are.
const CREDENTIAL_FIELDS: &[&str] = &[
    "api-key",
    "authorization",
    "dd-api-key",
    "dd-application-key",
    "openai-api-key",
    "private-token",
    "x-amz-security-token",
    "x-api-key",
    "x-auth-token",
    "x-github-token",
    "x-gitlab-token",
    "x-goog-api-key",
    "x-vault-token",
];

/// A cookie may hold the token of a session, and no other secret.
const COOKIE: &str = "cookie";
const SESSION_TOKEN: &str = "JSON web token";

/// Parameters of a query with the same purpose, most of them in signed URLs.
const CREDENTIAL_PARAMETERS: &[&str] = &[
    "awsaccesskeyid",
    "googleaccessid",
    "sig",
    "signature",
    "x-amz-credential",
    "x-amz-security-token",
    "x-amz-signature",
    "x-goog-credential",
    "x-goog-signature",
];

/// The head of a request in the form in which it leaves.
pub(crate) struct RequestHead<'a> {
    method: &'a str,
    path: &'a [u8],
    query: Option<&'a [u8]>,
    fields: Vec<(&'a str, &'a [u8])>,
}

impl<'a> RequestHead<'a> {
    /// Reads a head whose fields are stripped and in canonical order.
    pub(crate) fn of(request: &'a RequestHeader) -> Self {
        let uri = &request.uri;
        let fields = request.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
        RequestHead {
            method: request.method.as_str(),
            path: uri.path().as_bytes(),
            query: uri.query().map(str::as_bytes),
            fields: fields.filter(|(name, _)| DERIVED_FIELDS.binary_search(name).is_err()).collect(),
        }
    }

    /// Returns whether what follows the head can be searched: no messages of another protocol, and no compression that
    /// is not decoded.
    pub(super) fn is_searchable(&self) -> bool {
        if self.upgrades() {
            return false;
        }
        let known: [&[u8]; 4] = [b"deflate", b"gzip", b"identity", b"x-gzip"];
        let coding = self.fields.iter().find(|(name, _)| *name == "content-encoding");
        coding.is_none_or(|(_, coding)| known.iter().any(|known| coding.eq_ignore_ascii_case(known)))
    }

    /// Returns whether the connection is to switch to messages, which are not searched.
    fn upgrades(&self) -> bool {
        self.fields.iter().any(|(name, _)| *name == "sec-websocket-key")
    }

    /// Returns how many bytes of it are searched.
    pub(super) fn size(&self) -> usize {
        let fields = self.fields.iter().map(|(name, value)| name.len() + value.len());
        self.path.len() + self.query.map_or(0, <[u8]>::len) + fields.sum::<usize>()
    }

    pub(crate) fn parts(&self) -> RequestParts<'_> {
        RequestParts { method: self.method, path: self.path, query: self.query, fields: &self.fields }
    }
}

/// Searches a head. Each part is searched raw and decoded; recalled text is also followed from one part to the next.
pub(super) fn scan(matchers: &Arc<AttemptMatchers>, head: &RequestHead<'_>, found: &mut Vec<Signal>) {
    let factory = Arc::new(SharedMatchers(matchers.clone()));
    let mut scanner = ContentScanner::new(SignalPlace::Path, factory.clone(), ScanLimits::default());
    // A scanner reports a thing once. What is forgiven in one place must still be reported in another, so those
    // places have a scanner of their own.
    let mut own_scanner = ContentScanner::new(SignalPlace::Path, factory, ScanLimits::default());
    scanner.scan_field(head.path, || SignalPlace::Path, found);
    for pair in head.query.unwrap_or_default().split(|byte| *byte == b'&') {
        let name = pair.split(|byte| *byte == b'=').next().unwrap_or_default();
        if is_credential_name(CREDENTIAL_PARAMETERS, &String::from_utf8_lossy(name)) {
            let known = found.len();
            own_scanner.scan_field(pair, || SignalPlace::Query, found);
            forgive_own_credentials(found, known);
        } else {
            scanner.scan_field(pair, || SignalPlace::Query, found);
        }
    }
    let (own, others): (Vec<_>, Vec<_>) = head
        .fields
        .iter()
        .partition(|(name, _)| *name == COOKIE || is_credential_name(CREDENTIAL_FIELDS, name));
    let values: Vec<&[u8]> = others.iter().map(|(_, value)| *value).collect();
    let place = |at: usize| SignalPlace::Field(others.get(at).map_or("", |(name, _)| name).to_owned());
    scanner.scan_fields(&values, place, found);
    for (name, value) in own {
        let known = found.len();
        own_scanner.scan_field(value, || SignalPlace::Field((*name).to_owned()), found);
        match *name == *COOKIE {
            true => forgive(found, known, |signal| signal.what == SESSION_TOKEN),
            false => forgive_own_credentials(found, known),
        }
    }
    for (name, _) in head.fields.iter().filter(|(name, _)| name.len() > MIN_NAME) {
        scanner.scan_field(name.as_bytes(), || SignalPlace::FieldName, found);
    }
    if matchers.has_flow() {
        follow_text(matchers, head, found);
    }
}

fn is_credential_name(names: &[&str], name: &str) -> bool {
    names.binary_search(&name.to_ascii_lowercase().as_str()).is_ok()
}

/// Removes what a client's own credential raised from the signals behind the first `known`.
fn forgive_own_credentials(found: &mut Vec<Signal>, known: usize) {
    forgive(found, known, |signal| signal.code == SignalCode::SecretFound);
}

/// Removes the signals behind the first `known` that are `forgiven`.
fn forgive(found: &mut Vec<Signal>, known: usize, forgiven: impl Fn(&Signal) -> bool) {
    let mut at = 0;
    found.retain(|signal| {
        at += 1;
        at <= known || !forgiven(signal)
    });
}

/// A shorter field name holds neither a secret nor recalled text.
const MIN_NAME: usize = 16;

/// Searches a head for recalled text that is split over its parts.
fn follow_text(matchers: &Arc<AttemptMatchers>, head: &RequestHead<'_>, found: &mut Vec<Signal>) {
    let known = found.len();
    let mut feed = matchers.flow_matcher();
    let parts = [Some(head.path), head.query].into_iter().flatten();
    let parts = parts.chain(head.fields.iter().map(|(_, value)| *value));
    parts.for_each(|part| feed.feed(part, found));
    dedup_from(found, known);
}

/// Removes what was found in one part already, and says that the rest is in the head as a whole.
fn dedup_from(found: &mut Vec<Signal>, known: usize) {
    let tail = found.split_off(known);
    for signal in tail {
        if !found.iter().any(|other| other.code == signal.code && other.what == signal.what) {
            found.push(Signal { place: SignalPlace::Attempt, ..signal });
        }
    }
}

/// Searches the name of a host.
pub(super) fn scan_name(matchers: &Arc<AttemptMatchers>, name: &str, found: &mut Vec<Signal>) {
    let factory = Arc::new(SharedMatchers(matchers.clone()));
    let mut scanner = ContentScanner::new(SignalPlace::HostName, factory, ScanLimits::default());
    scanner.scan_field(name.as_bytes(), || SignalPlace::HostName, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_fields_are_sorted_for_the_search() {
        assert!(DERIVED_FIELDS.is_sorted());
        assert!(CREDENTIAL_FIELDS.is_sorted() && CREDENTIAL_PARAMETERS.is_sorted());
    }
}
