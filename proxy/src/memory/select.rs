//! Which banks a request names: every value of every selector. No precedence is guessed at; a service may
//! take whichever it likes, because all of them are asked about.

use rules::Reason;
use rules::word::BankId;

use super::form::Query;
use super::json::Json;
use super::profile::{Found, Pointer, Selector, Step};
use crate::report::refusal::Refusal;

/// Most banks in one request.
pub(super) const MAX_BANKS: usize = 64;

/// Every bank the request names, each once, in the order of the profile.
pub(super) fn banks(
    found: &Found<'_>,
    query: &Query<'_>,
    body: Option<&Json>,
) -> Result<Vec<BankId>, Refusal> {
    let mut banks = Vec::new();
    for selector in &found.route.banks {
        match selector {
            Selector::Body(pointer) => {
                values(body.unwrap_or(&Json::Null), pointer, &mut |value| take(value, &mut banks))?;
            }
            Selector::Path(name) => {
                let named = found.named.iter().find(|(known, _)| known == name);
                named.map_or(Ok(()), |(_, text)| keep(text, &mut banks))?;
            }
            Selector::Query(name) => {
                query.value(name).map_or(Ok(()), |text| keep(text, &mut banks))?;
            }
        }
    }
    Ok(banks)
}

/// Refuses a body that has what its route must not have; null is as good as absent.
pub(super) fn refuse(pointer: &Pointer, body: &Json) -> Result<(), Refusal> {
    values(body, pointer, &mut |value| match value {
        Json::Null => Ok(()),
        Json::Array(_) | Json::Object(_) | Json::Other | Json::Text(_) | Json::TextTooLong => {
            Err(Refusal::from(Reason::MemoryOperation)
                .because(format!("`{pointer}` leads beyond the bank that is named")))
        }
    })
}

/// Asks `own` about everything that stands at `pointer` in an answer. Here an empty list, or null for
/// one, is nothing to ask about, and what is missing is asked about as null.
pub(super) fn answered(
    json: &Json,
    pointer: &Pointer,
    own: &dyn Fn(&Json) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    meet(json, &pointer.0, own)
}

fn meet(
    json: &Json,
    steps: &[Step],
    own: &dyn Fn(&Json) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    match (steps.split_first(), json) {
        (None, value) => own(value),
        (Some((Step::Key(key), rest)), Json::Object(members)) => {
            let named = members.iter().find(|(known, _)| known == key);
            named.map_or_else(|| own(&Json::Null), |(_, value)| meet(value, rest, own))
        }
        (Some((Step::Each, _)), Json::Null) => Ok(()),
        (Some((Step::Each, rest)), Json::Array(elements)) => {
            elements.iter().try_for_each(|element| meet(element, rest, own))
        }
        (Some(_), other) => own(other),
    }
}

/// Calls `each` with everything that stands at `pointer`.
pub(super) fn values<'a>(
    json: &'a Json,
    pointer: &Pointer,
    each: &mut dyn FnMut(&'a Json) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    walk(json, &pointer.0, each)
}

fn walk<'a>(
    json: &'a Json,
    steps: &[Step],
    each: &mut dyn FnMut(&'a Json) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let malformed = |why| Err(Refusal::from(Reason::BankMalformed).because(why));
    match (steps.split_first(), json) {
        (None, value) => each(value),
        (Some(_), Json::Null) => Ok(()),
        (Some((Step::Key(key), rest)), Json::Object(members)) => {
            // A service that is less strict about its keys would read another bank than we do.
            if members.iter().any(|(known, _)| known != key && folded(known) == folded(key)) {
                return malformed("a key is spelt almost like the one that names the bank");
            }
            let named = members.iter().find(|(known, _)| known == key);
            named.map_or(Ok(()), |(_, value)| walk(value, rest, each))
        }
        (Some((Step::Each, _)), Json::Array(elements)) if elements.is_empty() => {
            malformed("an empty list of banks can mean every bank")
        }
        (Some((Step::Each, rest)), Json::Array(elements)) => {
            elements.iter().try_for_each(|element| walk(element, rest, each))
        }
        (Some(_), _) => malformed("something else stands where the bank is named"),
    }
}

fn folded(key: &str) -> String {
    let kept = key.chars().filter(|letter| !matches!(letter, '_' | '-' | ' '));
    kept.flat_map(char::to_lowercase).collect()
}

/// Null is what some clients write for "not given".
fn take(value: &Json, banks: &mut Vec<BankId>) -> Result<(), Refusal> {
    match value {
        Json::Null => Ok(()),
        Json::Text(text) => keep(text, banks),
        Json::Array(_) | Json::Object(_) | Json::Other | Json::TextTooLong => {
            Err(Refusal::from(Reason::BankMalformed).because("a bank is named by a text"))
        }
    }
}

fn keep(text: &str, banks: &mut Vec<BankId>) -> Result<(), Refusal> {
    let malformed = |error| Refusal::from(Reason::BankMalformed).because(error);
    let bank = BankId::parse(text).map_err(malformed)?;
    if !banks.contains(&bank) {
        if banks.len() >= MAX_BANKS {
            let why = format!("it names more than {MAX_BANKS} banks");
            return Err(Refusal::from(Reason::BankMalformed).because(why));
        }
        banks.push(bank);
    }
    Ok(())
}

impl std::fmt::Display for Pointer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|step| match step {
            Step::Each => f.write_str("/*"),
            Step::Key(key) => write!(f, "/{key}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use rules::word::ProfileName;

    use super::super::json;
    use super::super::profile::Profile;
    use super::*;

    #[test]
    fn every_value_of_every_selector_is_seen() {
        let profile = Profile::named(&ProfileName::parse("astrocyte").unwrap()).unwrap();
        let found = profile.route("POST", "/v1/recall").unwrap();
        let query = Query::parse(None, &found).unwrap();
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
            let json = json::read(body.as_bytes()).unwrap();
            let named = super::banks(&found, &query, Some(&json));
            let named =
                named.map(|all| all.iter().map(|bank| bank.as_str()).collect::<Vec<_>>().join(" "));
            let named = named.map_err(|refusal| refusal.reason);
            assert_eq!(named, banks.map(str::to_owned), "{body}");
        }
    }

    #[test]
    fn the_number_of_banks_is_bounded() {
        let profile = Profile::named(&ProfileName::parse("astrocyte").unwrap()).unwrap();
        let found = profile.route("POST", "/v1/recall").unwrap();
        let query = Query::parse(None, &found).unwrap();
        for (count, good) in [(MAX_BANKS, true), (MAX_BANKS + 1, false)] {
            let banks: Vec<String> = (0..count).map(|bank| format!("\"b{bank}\"")).collect();
            let body = format!("{{\"banks\":[{}]}}", banks.join(","));
            let json = json::read(body.as_bytes()).unwrap();
            assert_eq!(super::banks(&found, &query, Some(&json)).is_ok(), good, "{count}");
        }
    }
}
