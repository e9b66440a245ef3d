//! The banks that a request names: every value of every selector. The guard assumes no precedence among them: all must
//! be permitted, so it does not matter which one the service uses.

use rules::Reason;
use rules::ids::BankId;

use super::form::QueryParams;
use super::json::JsonValue;
use super::profile::{BankSelector, JsonPointer, PointerStep, RouteMatch};
use crate::report::refusal::Refusal;

/// Limit of the banks in one request.
pub(super) const MAX_BANKS: usize = 64;

/// Returns every bank that the request names, each once, in the order of the profile.
pub(super) fn select_banks(
    matched: &RouteMatch<'_>,
    query: &QueryParams<'_>,
    body: Option<&JsonValue>,
) -> Result<Vec<BankId>, Refusal> {
    let mut banks = Vec::new();
    for selector in &matched.route.banks {
        match selector {
            BankSelector::Body(pointer) => {
                visit_values(body.unwrap_or(&JsonValue::Null), pointer, &mut |value| {
                    add_value(value, &mut banks)
                })?;
            }
            BankSelector::Path(name) => {
                let named = matched.named.iter().find(|(known, _)| known == name);
                named.map_or(Ok(()), |(_, text)| add_bank(text, &mut banks))?;
            }
            BankSelector::Query(name) => {
                query.value(name).map_or(Ok(()), |text| add_bank(text, &mut banks))?;
            }
        }
    }
    Ok(banks)
}

/// Refuses a body that has a field its route refuses. Null counts as absent.
pub(super) fn refuse_field(pointer: &JsonPointer, body: &JsonValue) -> Result<(), Refusal> {
    visit_values(body, pointer, &mut |value| match value {
        JsonValue::Null => Ok(()),
        JsonValue::Array(_)
        | JsonValue::Object(_)
        | JsonValue::Other
        | JsonValue::Text(_)
        | JsonValue::TextTooLong => Err(Refusal::from(Reason::MemoryOperation)
            .with_detail(format!("`{pointer}` would affect more than the named bank"))),
    })
}

/// Calls `check` with every value at `pointer` in an answer, and with null if there is none. Unlike in a request, an
/// empty list, or null instead of a list, has no values.
pub(super) fn check_answer_banks(
    json: &JsonValue,
    pointer: &JsonPointer,
    check: &dyn Fn(&JsonValue) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    walk_answer(json, &pointer.0, check)
}

fn walk_answer(
    json: &JsonValue,
    steps: &[PointerStep],
    check: &dyn Fn(&JsonValue) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    match (steps.split_first(), json) {
        (None, value) => check(value),
        (Some((PointerStep::Key(key), rest)), JsonValue::Object(members)) => {
            let named = members.iter().find(|(known, _)| known == key);
            named.map_or_else(|| check(&JsonValue::Null), |(_, value)| walk_answer(value, rest, check))
        }
        (Some((PointerStep::Each, _)), JsonValue::Null) => Ok(()),
        (Some((PointerStep::Each, rest)), JsonValue::Array(elements)) => {
            elements.iter().try_for_each(|element| walk_answer(element, rest, check))
        }
        (Some(_), other) => check(other),
    }
}

/// Calls `each` with every value at `pointer` in a request.
pub(super) fn visit_values<'a>(
    json: &'a JsonValue,
    pointer: &JsonPointer,
    each: &mut dyn FnMut(&'a JsonValue) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    walk_request(json, &pointer.0, each)
}

fn walk_request<'a>(
    json: &'a JsonValue,
    steps: &[PointerStep],
    each: &mut dyn FnMut(&'a JsonValue) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let malformed = |why| Err(Refusal::from(Reason::BankMalformed).with_detail(why));
    match (steps.split_first(), json) {
        (None, value) => each(value),
        (Some(_), JsonValue::Null) => Ok(()),
        (Some((PointerStep::Key(key), rest)), JsonValue::Object(members)) => {
            // A service that folds case or separators in keys would read this bank instead of ours.
            if members.iter().any(|(known, _)| known != key && fold_key(known) == fold_key(key)) {
                return malformed(
                    "a key differs only in case or separators from the one that names the bank",
                );
            }
            let named = members.iter().find(|(known, _)| known == key);
            named.map_or(Ok(()), |(_, value)| walk_request(value, rest, each))
        }
        (Some((PointerStep::Each, _)), JsonValue::Array(elements)) if elements.is_empty() => {
            malformed("an empty list of banks can mean every bank")
        }
        (Some((PointerStep::Each, rest)), JsonValue::Array(elements)) => {
            elements.iter().try_for_each(|element| walk_request(element, rest, each))
        }
        (Some(_), _) => malformed("the place that names the bank has another type"),
    }
}

fn fold_key(key: &str) -> String {
    let letters = key.chars().filter(|letter| !matches!(letter, '_' | '-' | ' '));
    letters.flat_map(char::to_lowercase).collect()
}

/// Adds the bank that a value names. Null counts as absent, as some clients write it.
fn add_value(value: &JsonValue, banks: &mut Vec<BankId>) -> Result<(), Refusal> {
    match value {
        JsonValue::Null => Ok(()),
        JsonValue::Text(text) => add_bank(text, banks),
        JsonValue::Array(_) | JsonValue::Object(_) | JsonValue::Other | JsonValue::TextTooLong => {
            Err(Refusal::from(Reason::BankMalformed).with_detail("the name of a bank is not a string"))
        }
    }
}

fn add_bank(text: &str, banks: &mut Vec<BankId>) -> Result<(), Refusal> {
    let malformed = |error| Refusal::from(Reason::BankMalformed).with_detail(error);
    let bank = BankId::parse(text).map_err(malformed)?;
    if !banks.contains(&bank) {
        if banks.len() >= MAX_BANKS {
            let why = format!("it names more than {MAX_BANKS} banks");
            return Err(Refusal::from(Reason::BankMalformed).with_detail(why));
        }
        banks.push(bank);
    }
    Ok(())
}

impl std::fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|step| match step {
            PointerStep::Each => f.write_str("/*"),
            PointerStep::Key(key) => write!(f, "/{key}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use rules::ids::ProfileName;

    use super::super::json;
    use super::super::profile::MemoryProfile;
    use super::*;

    #[test]
    fn p12_every_value_of_every_selector_counts() {
        let profile = MemoryProfile::by_name(&ProfileName::parse("astrocyte").unwrap()).unwrap();
        let matched = profile.find_route("POST", "/v1/recall").unwrap();
        let query = QueryParams::parse(None, &matched).unwrap();
        for (body, banks) in [
            (r#"{"bank_id":"a"}"#, Ok("a")),
            (r#"{"bank_id":"a","banks":["b","a","c"]}"#, Ok("a b c")),
            (r#"{"bank_id":"a","banks":null}"#, Ok("a")),
            (r#"{"bank_id":null,"banks":["a"]}"#, Ok("a")),
            (r#"{"bank\u005fid":"\u0061"}"#, Ok("a")),
            (r#"{"bank_id":"a","metadata":{"bank_id":"b"}}"#, Ok("a")),
            (r#"{"query":"x"}"#, Ok("")),
            (r#"{"bank_id":null}"#, Ok("")),
            (r#"{"bank_id":"a","banks":[]}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a","banks":[null]}"#, Ok("a")),
            (r#"{"bank_id":"a","banks":"b"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a","banks":[["b"]]}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":1}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":["a"]}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":{"a":1}}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":true}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":""}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"*"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a\n"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"ａ"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a","bankId":"b"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a","Bank_Id":"b"}"#, Err(Reason::BankMalformed)),
            (r#"{"bank_id":"a","bank-id":"b"}"#, Err(Reason::BankMalformed)),
            (r#"["a"]"#, Err(Reason::BankMalformed)),
            (r#""a""#, Err(Reason::BankMalformed)),
        ] {
            let json = json::parse_json(body.as_bytes()).unwrap();
            let named = super::select_banks(&matched, &query, Some(&json));
            let named = named.map(|all| all.iter().map(|bank| bank.as_str()).collect::<Vec<_>>().join(" "));
            let named = named.map_err(|refusal| refusal.reason);
            assert_eq!(named, banks.map(str::to_owned), "{body}");
        }
    }

    #[test]
    fn p17_the_number_of_banks_is_limited() {
        let profile = MemoryProfile::by_name(&ProfileName::parse("astrocyte").unwrap()).unwrap();
        let matched = profile.find_route("POST", "/v1/recall").unwrap();
        let query = QueryParams::parse(None, &matched).unwrap();
        for (count, good) in [(MAX_BANKS, true), (MAX_BANKS + 1, false)] {
            let banks: Vec<String> = (0..count).map(|bank| format!("\"b{bank}\"")).collect();
            let body = format!("{{\"banks\":[{}]}}", banks.join(","));
            let json = json::parse_json(body.as_bytes()).unwrap();
            assert_eq!(super::select_banks(&matched, &query, Some(&json)).is_ok(), good, "{count}");
        }
    }
}
