//! A record as one line for people. What peers chose is shown escaped: a log must not drive the
//! terminal of whoever reads it.

use audit::view::{Stage, View};

use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};

/// One line for people.
pub(super) fn shown(view: &View<'_>) -> String {
    let time = paint(FAINT, safe(&view.time_dt));
    let sandbox = safe(view.sandbox().unwrap_or("-"));
    format!("{time} {} {} {}", verb(view), paint(HEAD, format!("{sandbox:<10}")), what(view))
}

fn verb(view: &View<'_>) -> String {
    match view.stage() {
        Stage::Answered | Stage::Decision => paint(GOOD, "allow "),
        Stage::Denied => paint(BAD, "DENY  "),
        Stage::Finding => paint(WARN, "ALERT "),
        Stage::Lifecycle => paint(FAINT, "note  "),
        Stage::Outcome => paint(FAINT, "end   "),
    }
}

fn what(view: &View<'_>) -> String {
    match view.stage() {
        Stage::Answered | Stage::Decision | Stage::Denied => {
            format!("{} {}", target(view), why(view))
        }
        Stage::Finding => safe(view.title().unwrap_or_default()),
        Stage::Lifecycle => {
            let message = view.message.as_deref().unwrap_or_default();
            format!("{} {}", safe(view.event().unwrap_or_default()), safe(message))
        }
        Stage::Outcome => format!("{} {}", target(view), how(view)),
    }
}

fn target(view: &View<'_>) -> String {
    let host = safe(view.host().unwrap_or("-"));
    let port = view.port().map(|port| format!(":{port}")).unwrap_or_default();
    if let Some(query) = &view.query {
        return format!("{} {host}", safe(&query.kind));
    }
    let operation = view.api.as_ref().map(|api| format!("{} ", safe(&api.operation)));
    match &view.http_request {
        Some(request) => {
            let (method, url) = (safe(&request.http_method), &request.url);
            let (scheme, path) = (safe(&url.scheme), safe(&url.path));
            format!("{}{method} {scheme}://{host}{port}{path}", operation.unwrap_or_default())
        }
        None => format!("{host}{port}"),
    }
}

fn why(view: &View<'_>) -> String {
    let reason = safe(view.status_detail.as_deref().unwrap_or_default());
    let rule = view.rule().map(|rule| format!("rule `{}`", safe(rule)));
    paint(FAINT, format!("{reason} {}", rule.unwrap_or_else(|| "no rule".to_owned())))
}

fn how(view: &View<'_>) -> String {
    let (sent, received) = view.bytes();
    let status = view.status().map(|status| format!(" {status}")).unwrap_or_default();
    let ending = safe(view.ending().unwrap_or_default());
    let took = view.duration.unwrap_or_default();
    paint(FAINT, format!("{ending}{status}, {sent} B out, {received} B in, {took} ms"))
}

/// The text with everything but printable ASCII escaped.
pub(super) fn safe(text: &str) -> String {
    let escaped = |letter: char| match letter {
        ' '..='~' => letter.to_string(),
        other => other.escape_unicode().to_string(),
    };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_cannot_drive_the_terminal() {
        for (text, expected) in [
            ("plain", "plain"),
            ("\u{1b}[2J", "\\u{1b}[2J"),
            ("a\nb", "a\\u{a}b"),
            ("\u{202e}x", "\\u{202e}x"),
        ] {
            assert_eq!(safe(text), expected);
        }
    }
}
