//! How a request carries a credential: the value of the field or parameter that the form owns.

use ::http::{HeaderValue, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pingora_http::RequestHeader;
use rules::Reason;
use rules::credential::CredentialForm;
use zeroize::Zeroizing;

use crate::credential::value::CredentialValue;
use crate::report::refusal::Refusal;

/// Sets what a form other than a placeholder sets. The request has none of it left.
pub(super) fn set(
    request: &mut RequestHeader,
    form: &CredentialForm,
    value: &CredentialValue,
) -> Result<(), Refusal> {
    let text = || value.text().ok_or_else(|| unusable("its value is not text"));
    match form {
        CredentialForm::Bearer => {
            set_field(request, "authorization", &Zeroizing::new(format!("Bearer {}", text()?)))
        }
        CredentialForm::Header { name, prefix } => {
            set_field(request, name, &Zeroizing::new(format!("{prefix}{}", text()?)))
        }
        CredentialForm::Basic { user } => {
            let pair = Zeroizing::new(format!("{user}:{}", text()?));
            let encoded = Zeroizing::new(STANDARD.encode(&*pair));
            set_field(request, "authorization", &Zeroizing::new(format!("Basic {}", &*encoded)))
        }
        CredentialForm::DangerouslyQuery { name } => add_parameter(request, name, text()?),
        CredentialForm::SigV4 { .. } => Ok(()), // signed when everything else is set
        CredentialForm::Placeholder { .. } => Ok(()), // set where the sandbox sent the placeholder
    }
}

/// Sets a header field, kept out of HPACK's dynamic table.
pub(super) fn set_field(request: &mut RequestHeader, name: &str, text: &str) -> Result<(), Refusal> {
    let mut value = HeaderValue::from_str(text).map_err(|_| unusable("a header field cannot carry it"))?;
    value.set_sensitive(true);
    let set = request.insert_header(title_case(name), value);
    set.map_err(|_| unusable("its header field cannot be set"))
}

/// Adds a parameter to the query. HTTP/2 never indexes a path.
fn add_parameter(request: &mut RequestHeader, name: &str, value: &str) -> Result<(), Refusal> {
    let mut encoded = Zeroizing::new(String::with_capacity(value.len() * 3));
    for byte in value.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte))
            }
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    let query = match request.uri.query().unwrap_or_default() {
        "" => Zeroizing::new(format!("{name}={}", &*encoded)),
        query => Zeroizing::new(format!("{query}&{name}={}", &*encoded)),
    };
    set_query(request, &query).ok_or_else(|| unusable("the query cannot carry it"))
}

/// Replaces the query; an empty one leaves none.
pub(super) fn set_query(request: &mut RequestHeader, query: &str) -> Option<()> {
    let mut parts = request.uri.clone().into_parts();
    let path = request.uri.path();
    let target = match query {
        "" => path.to_owned(),
        query => format!("{path}?{query}"),
    };
    parts.path_and_query = Some(target.parse().ok()?);
    request.set_uri(Uri::from_parts(parts).ok()?);
    Some(())
}

fn unusable(why: &str) -> Refusal {
    Refusal::from(Reason::CredentialUnavailable).with_detail(why)
}

/// Writes the name of a field as most servers expect it in HTTP/1.
fn title_case(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    });
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(form: &CredentialForm, target: &str, value: &str) -> (String, Vec<(String, String, bool)>) {
        let mut request = RequestHeader::build("GET", target.as_bytes(), None).unwrap();
        set(&mut request, form, &CredentialValue::parse(value).unwrap()).unwrap();
        let fields = request.headers.iter().map(|(name, value)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned(), value.is_sensitive())
        });
        (request.uri.to_string(), fields.collect())
    }

    #[test]
    fn p11_each_form_sets_its_place_and_marks_it_sensitive() {
        let field = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned(), true)];
        let header =
            |name: &str, prefix: &str| CredentialForm::Header { name: name.into(), prefix: prefix.into() };
        for (form, fields) in [
            (CredentialForm::Bearer, field("authorization", "Bearer sk-01/23+45")),
            (header("x-api-key", ""), field("x-api-key", "sk-01/23+45")),
            (header("authorization", "token "), field("authorization", "token sk-01/23+45")),
            (
                CredentialForm::Basic { user: "x-access-token".into() },
                field("authorization", "Basic eC1hY2Nlc3MtdG9rZW46c2stMDEvMjMrNDU="),
            ),
        ] {
            assert_eq!(carried(&form, "/a?b=1", "sk-01/23+45"), ("/a?b=1".to_owned(), fields), "{form:?}");
        }
        let query = CredentialForm::DangerouslyQuery { name: "key".into() };
        for (target, expected) in [
            ("/a", "/a?key=sk-01%2F23%2B45"),
            ("/a?", "/a?key=sk-01%2F23%2B45"),
            ("/a?b=%20", "/a?b=%20&key=sk-01%2F23%2B45"),
        ] {
            assert_eq!(carried(&query, target, "sk-01/23+45"), (expected.to_owned(), Vec::new()), "{target}");
        }
    }
}
