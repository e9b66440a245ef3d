//! Renders a record as one line of text. Text chosen by peers is escaped, so that a log cannot
//! control the terminal of its reader.

use audit::view::{RecordStage, RecordView};

use crate::terminal::{BAD, FAINT, GOOD, HEAD, WARN, paint};

/// Renders a record as one line of text.
pub(super) fn format_record(view: &RecordView<'_>) -> String {
    let time = paint(FAINT, escape_terminal(&view.time_dt));
    let sandbox = escape_terminal(view.sandbox().unwrap_or("-"));
    format!(
        "{time} {} {} {}",
        stage_label(view),
        paint(HEAD, format!("{sandbox:<10}")),
        describe_record(view)
    )
}

fn stage_label(view: &RecordView<'_>) -> String {
    match view.stage() {
        RecordStage::Answered | RecordStage::Decision => paint(GOOD, "allow "),
        RecordStage::Denied => paint(BAD, "DENY  "),
        RecordStage::Finding => paint(WARN, "ALERT "),
        RecordStage::Lifecycle => paint(FAINT, "note  "),
        RecordStage::Outcome => paint(FAINT, "end   "),
    }
}

fn describe_record(view: &RecordView<'_>) -> String {
    match view.stage() {
        RecordStage::Answered | RecordStage::Decision | RecordStage::Denied => {
            let target = describe_target(view);
            let tried = describe_attempted(view, &target);
            format!("{target} {}{tried}", describe_reason(view))
        }
        RecordStage::Finding => {
            let code = escape_terminal(view.status_detail.as_deref().unwrap_or_default());
            format!("{} {code} {}", describe_target(view), escape_terminal(view.title().unwrap_or_default()))
        }
        RecordStage::Lifecycle => {
            let message = view.message.as_deref().unwrap_or_default();
            format!("{} {}", escape_terminal(view.event().unwrap_or_default()), escape_terminal(message))
        }
        RecordStage::Outcome => format!("{} {}", describe_target(view), describe_outcome(view)),
    }
}

fn describe_target(view: &RecordView<'_>) -> String {
    let host = escape_terminal(view.host().unwrap_or("-"));
    let port = view.port().map(|port| format!(":{port}")).unwrap_or_default();
    if let Some(query) = &view.query {
        return format!("{} {host}", escape_terminal(query.kind.as_deref().unwrap_or("-")));
    }
    let operation = view.api.as_ref().map(|api| format!("{} ", escape_terminal(&api.operation)));
    let request = view.http_request.as_ref();
    match request.and_then(|request| Some((request, request.url.as_ref()?))) {
        Some((request, url)) => {
            let method = escape_terminal(&request.http_method);
            let (scheme, path) = (escape_terminal(&url.scheme), escape_terminal(&url.path));
            format!("{}{method} {scheme}://{host}{port}{path}", operation.unwrap_or_default())
        }
        None => format!("{host}{port}"),
    }
}

/// What a refused sandbox asked for, if `target` does not show all of it.
fn describe_attempted(view: &RecordView<'_>, target: &str) -> String {
    let tried = escape_terminal(view.attempted().unwrap_or_default());
    let shown = tried.split(' ').all(|word| target.contains(word));
    if shown { String::new() } else { format!(" tried {tried}") }
}

fn describe_reason(view: &RecordView<'_>) -> String {
    let reason = escape_terminal(view.status_detail.as_deref().unwrap_or_default());
    let rule = view.rule().map(|rule| format!("rule `{}`", escape_terminal(rule)));
    paint(FAINT, format!("{reason} {}", rule.unwrap_or_else(|| "no rule".to_owned())))
}

fn describe_outcome(view: &RecordView<'_>) -> String {
    let (sent, received) = view.bytes();
    let status = view.status().map(|status| format!(" {status}")).unwrap_or_default();
    let ending = escape_terminal(view.ending().unwrap_or_default());
    let reason = view.status_detail.as_deref().filter(|_| ending != "completed");
    let reason = reason.map(|reason| format!(" {}", escape_terminal(reason))).unwrap_or_default();
    let took = view.duration.map(|took| format!(", {took} ms")).unwrap_or_default();
    paint(FAINT, format!("{ending}{reason}{status}, {sent} B out, {received} B in{took}"))
}

/// Renders a record as JSON in printable ASCII, so that it cannot control a terminal.
///
/// Other characters can occur only inside strings, where a `\u` escape means the same, or as white space
/// between members, where a space does.
pub(super) fn escape_json(line: &[u8]) -> String {
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

/// Escapes everything but printable ASCII.
pub(super) fn escape_terminal(text: &str) -> String {
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
    fn a_forged_line_cannot_control_the_terminal_as_json() {
        let forged = "{\"a\":\r\"\u{202e}\u{9b}31m\u{7f}\u{1f600}\"}";
        let shown = escape_json(forged.as_bytes());
        assert!(shown.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{shown}");
        let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(read(&shown), read(forged));
    }

    #[test]
    fn a_record_cannot_control_the_terminal() {
        for (text, expected) in [
            ("plain", "plain"),
            ("\u{1b}[2J", "\\u{1b}[2J"),
            ("a\nb", "a\\u{a}b"),
            ("\u{202e}x", "\\u{202e}x"),
        ] {
            assert_eq!(escape_terminal(text), expected);
        }
    }
}
