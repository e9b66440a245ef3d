//! Deserializes TOML into documents and reports every error, not only the first.
//!
//! serde stops at its first error. After each error this reader removes the offending key or table from the
//! tree and deserializes the rest again, so that one run reports all mistakes of a file.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer, Error};

use super::problem::{MAX_PROBLEMS, ProblemKind, Problems, SourceText, may_be_secret, nearest};

/// Reads a document and adds each problem to `problems`.
///
/// A document can come back together with problems: it then lacks the parts that failed. `None` means that
/// the file is not TOML or that nothing usable is left.
pub(crate) fn read_document<T: DeserializeOwned>(
    source: &SourceText<'_>,
    problems: &mut Problems,
) -> Option<T> {
    let (mut tree, syntax) = DeTable::parse_recoverable(source.text);
    if !syntax.is_empty() {
        syntax.iter().for_each(|error| report(source, problems, error));
        return None;
    }
    for _ in 0..MAX_PROBLEMS {
        match T::deserialize(Deserializer::from(tree.clone())) {
            Ok(document) => return Some(document),
            Err(error) => {
                report(source, problems, &error);
                let span = error.span()?;
                let scope = if error.message().starts_with("unknown field") {
                    PruneScope::Key
                } else {
                    PruneScope::Table
                };
                if !prune(tree.get_mut(), &span, scope) {
                    return None;
                }
            }
        }
    }
    None
}

fn report(source: &SourceText<'_>, problems: &mut Problems, error: &Error) {
    let span = error.span().unwrap_or(0..0);
    let location = source.location(span.clone());
    let (location, (fault, help)) = match source.is_in_credential(location.line) {
        true => (source.masked_location(span), explain_error(&without_secrets(error.message()))),
        false => (location, explain_error(error.message())),
    };
    match help {
        None => problems.error(location, fault),
        Some(help) => problems.error_with_help(location, fault, help),
    }
}

/// Removes what may be a secret from a message about a `[[credential]]`: serde quotes the value it did not expect.
fn without_secrets(message: &str) -> String {
    let quoted = message
        .split_once("string \"")
        .and_then(|(head, rest)| Some((head, rest.rsplit_once("\", expected ")?.1)));
    if let Some((head, expected)) = quoted {
        return format!("{head}a string, expected {expected}");
    }
    let words = message.split('`').enumerate();
    let shown = words.map(|(at, word)| match at % 2 == 1 && may_be_secret(word) {
        true => "...",
        false => word,
    });
    shown.collect::<Vec<_>>().join("`")
}

/// Values that policies used before, with the value that replaced each.
const RENAMED_VALUES: [(&str, &str); 1] = [("from-path", "from-channel")];

/// Keys that earlier versions took although no code enforced them, or where none did: the key, another key of the
/// same table, and a hint.
const UNENFORCED_KEYS: [(&str, &str, &str); 2] = [
    (
        "inspected_body_bytes",
        "memory_body_bytes",
        "bodies are searched as they pass, whatever their size; remove it",
    ),
    ("lifetime_seconds", "requests_per_hour", "a rule has no lifetime; set it in the policy's `[budget]`"),
];

/// Rewords serde's message and suggests the known key or value nearest to a misspelt one.
fn explain_error(message: &str) -> (ProblemKind, Option<String>) {
    let words: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match (message.split('`').next().map(str::trim_end), words.split_first()) {
        (Some("unknown field"), Some((key, known))) => {
            (ProblemKind::UnknownKey { key: (*key).to_owned() }, Some(suggest_key(key, known)))
        }
        (Some("unknown variant"), Some((found, known))) => {
            let known_list = known.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
            (
                ProblemKind::Syntax(format!("`{found}` is not one of {known_list}")),
                suggest_value(found, known),
            )
        }
        (Some("missing field"), Some((key, _))) => {
            (ProblemKind::Syntax(format!("missing key `{key}`")), None)
        }
        _ => (ProblemKind::Syntax(message.trim_end().to_owned()), None),
    }
}

fn suggest_key(found: &str, known: &[&str]) -> String {
    let unenforced = UNENFORCED_KEYS.iter().find(|(key, beside, _)| *key == found && known.contains(beside));
    match unenforced {
        Some((_, _, hint)) => (*hint).to_owned(),
        None => suggest_nearest(found, known).unwrap_or_else(|| format!("known keys: {}", known.join(", "))),
    }
}

fn suggest_value(found: &str, known: &[&str]) -> Option<String> {
    let renamed = RENAMED_VALUES.iter().find(|(old, new)| *old == found && known.contains(new));
    match renamed {
        Some((_, new)) => Some(format!("it is now called `{new}`")),
        None => suggest_nearest(found, known),
    }
}

fn suggest_nearest(found: &str, known: &[&str]) -> Option<String> {
    nearest(found, known.iter().copied()).map(|word| format!("did you mean `{word}`?"))
}

/// How much of the tree to remove: the key, or the table around it, which would otherwise lack a required key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PruneScope {
    Key,
    Table,
}

fn span_covers(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Returns whether `span` is inside the value or its children; the span of a table covers only its header.
fn contains_span(value: &Spanned<DeValue<'_>>, span: &Range<usize>) -> bool {
    let below = match value.get_ref() {
        DeValue::Table(table) => {
            table.iter().any(|(key, value)| span_covers(&key.span(), span) || contains_span(value, span))
        }
        DeValue::Array(items) => items.iter().any(|item| contains_span(item, span)),
        DeValue::String(_)
        | DeValue::Integer(_)
        | DeValue::Float(_)
        | DeValue::Boolean(_)
        | DeValue::Datetime(_) => false,
    };
    below || span_covers(&value.span(), span)
}

/// Removes the part of the tree that the error refers to; returns false if no part covers `span`.
fn prune(table: &mut DeTable<'_>, span: &Range<usize>, scope: PruneScope) -> bool {
    let found =
        table.iter().find(|(key, value)| span_covers(&key.span(), span) || contains_span(value, span));
    let Some(key) = found.map(|(key, _)| key.clone()) else { return false };
    let inside = !span_covers(&key.span(), span);
    let pruned = inside && table.get_mut(&key).is_some_and(|value| prune_inside(value, span, scope));
    pruned || table.remove(&key).is_some()
}

fn prune_inside(value: &mut Spanned<DeValue<'_>>, span: &Range<usize>, scope: PruneScope) -> bool {
    match value.get_mut() {
        DeValue::Table(table) => scope == PruneScope::Key && prune(table, span, scope),
        DeValue::Array(items) => {
            let Some(at) = items.iter().position(|item| contains_span(item, span)) else {
                return false;
            };
            if !items.get_mut(at).is_some_and(|item| prune_inside(item, span, scope)) {
                let rest = items.iter().enumerate().filter(|(other, _)| *other != at);
                *items = rest.map(|(_, item)| item.clone()).collect();
            }
            true
        }
        DeValue::String(_)
        | DeValue::Integer(_)
        | DeValue::Float(_)
        | DeValue::Boolean(_)
        | DeValue::Datetime(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::document::PolicyDocument;

    fn faults(text: &str) -> Vec<String> {
        let mut problems = Problems::default();
        let source = SourceText::new("p.toml", text);
        drop(read_document::<PolicyDocument>(&source, &mut problems));
        problems.sort();
        problems
            .errors
            .iter()
            .map(|p| {
                format!("{}:{} {} [{}]", p.at.line, p.at.column, p.fault, p.help.as_deref().unwrap_or(""))
            })
            .collect()
    }

    #[test]
    fn p9_every_mistake_is_reported_with_its_location() {
        let text = r#"name = "p"
colour = 1
[[allow]]
name = "a"
hots = ["x.com"]
methds = ["GET"]
[[allow]]
name = 5
[[allow]]
hosts = ["y.com"]
[[allow]]
name = "c"
tls = "tunel"
[[deny]]
hosts = ["z.com", 7]
[bugdet]
"#;
        assert_eq!(
            faults(text),
            [
                "2:1 unknown key `colour` [known keys: name, tls, allow, deny, memory, budget, signals, test]",
                "5:1 unknown key `hots` [did you mean `hosts`?]",
                "6:1 unknown key `methds` [did you mean `methods`?]",
                "8:8 invalid type: integer `5`, expected a string []",
                "9:1 missing key `name` []",
                "13:7 `tunel` is not one of `intercept`, `tunnel` [did you mean `tunnel`?]",
                "15:19 invalid type: integer `7`, expected a string []",
                "16:2 unknown key `bugdet` [did you mean `budget`?]",
            ]
        );
    }

    #[test]
    fn renamed_values_are_refused_with_their_new_name() {
        let text = "name = \"p\"\n[[memory]]\nname = \"m\"\nhost = \"m.example\"\nprofile = \"astrocyte\"\n\
                    identity = \"from-path\"\n[[allow]]\nname = \"a\"\ntls = \"from-path\"\n";
        assert_eq!(
            faults(text),
            [
                "6:12 `from-path` is not one of `from-channel`, `required` [it is now called `from-channel`]",
                "9:7 `from-path` is not one of `intercept`, `tunnel` []",
            ]
        );
    }

    #[test]
    fn keys_that_nothing_enforces_are_refused_with_a_hint() {
        let text = "name = \"p\"\n[[allow]]\nname = \"a\"\nbudget = { lifetime_seconds = 1 }\n[budget]\n\
                    lifetime_seconds = 1\ninspect = 1\n";
        assert_eq!(
            faults(text),
            [
                "4:12 unknown key `lifetime_seconds` [a rule has no lifetime; set it in the policy's `[budget]`]",
                "7:1 unknown key `inspect` [known keys: connections, dns_bits_per_hour, download_bytes_per_day, \
                 download_bytes_per_hour, header_bits_per_hour, lifetime_seconds, requests_per_day, \
                 requests_per_hour, requests_per_minute, upload_bytes_per_day, upload_bytes_per_hour]",
            ]
        );
    }

    #[test]
    fn syntax_errors_are_all_reported() {
        let found = faults("name = \nallow = [\n[[deny]\n");
        assert!(found.len() >= 2, "{found:?}");
    }
}
