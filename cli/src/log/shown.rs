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
        Stage::Finding => {
            let code = safe(view.status_detail.as_deref().unwrap_or_default());
            format!("{} {code} {}", target(view), safe(view.title().unwrap_or_default()))
        }
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
        return format!("{} {host}", safe(query.kind.as_deref().unwrap_or("-")));
    }
    let operation = view.api.as_ref().map(|api| format!("{} ", safe(&api.operation)));
    let request = view.http_request.as_ref();
    match request.and_then(|request| Some((request, request.url.as_ref()?))) {
        Some((request, url)) => {
            let method = safe(&request.http_method);
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
    let reason = view.status_detail.as_deref().filter(|_| ending != "completed");
    let reason = reason.map(|reason| format!(" {}", safe(reason))).unwrap_or_default();
    let took = view.duration.map(|took| format!(", {took} ms")).unwrap_or_default();
    paint(FAINT, format!("{ending}{reason}{status}, {sent} B out, {received} B in{took}"))
}

/// A record as JSON that acts on no terminal, whoever wrote it: what is not printable ASCII can
/// stand in a string only, where an escape means the same, or be a space between members.
pub(super) fn json(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    for letter in String::from_utf8_lossy(line).chars() {
        match letter {
            ' '..='~' => text.push(letter),
            '\0'..' ' => text.push(' '),
            other => {
                let units = other.encode_utf16(&mut [0; 2]).to_vec();
                units.iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
            }
        }
    }
    text
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
    fn a_forged_line_cannot_drive_the_terminal_as_json_either() {
        let forged = "{\"a\":\r\"\u{202e}\u{9b}31m\u{7f}\u{1f600}\"}";
        let shown = json(forged.as_bytes());
        assert!(shown.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{shown}");
        let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(read(&shown), read(forged));
    }

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
