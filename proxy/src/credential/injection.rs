//! Whose credentials a request carries: ours, and none of another account (P11).
//!
//! [`AccountFilter`] takes away what our forms own and what looks like a credential of another account; what is left is
//! what the sandbox said, to be searched and priced. [`Injection`] then adds ours.

use std::sync::Arc;
use std::time::SystemTime;

use ::http::header::COOKIE;
use ::http::{HeaderName, HeaderValue};
use pingora_http::RequestHeader;
use rules::credential::{Credential, CredentialForm, PinAccount};
use rules::facts::UrlScheme;
use rules::ids::CredentialName;
use rules::{Permit, Reason};

use crate::credential::account::{
    is_credential_field, is_credential_parameter, is_credential_protocol, is_same_field, names_somebody,
    plain_parameter, without_parameters,
};
use crate::credential::form;
use crate::credential::placeholder::{FieldTemplate, PlaceholderKey};
use crate::credential::sigv4::{RequestSigning, strip_signature};
use crate::credential::store::CredentialStore;
use crate::credential::value::CredentialValue;
use crate::report::refusal::Refusal;

const WEBSOCKET_PROTOCOL: &str = "sec-websocket-protocol";
/// Characters of a name that a detail shows.
const SHOWN: usize = 64;

/// What is removed from a request before ours is added.
#[derive(Clone)]
pub(crate) struct AccountFilter {
    pin: PinAccount,
    owners: Vec<Owner>,
}

/// A credential that a request will carry, and what its form owns.
#[derive(Clone)]
struct Owner {
    form: CredentialForm,
    /// The placeholder of the sandbox for it, without prefix.
    code: Option<String>,
}

/// What a filter found in a request.
#[derive(Default)]
pub(crate) struct FoundPlaceholders {
    replaced: Vec<FoundPlaceholder>,
    /// Fields in which a placeholder stands beside another credential. They are left as they are, for the search of what
    /// leaves to find.
    misplaced: Vec<HeaderName>,
}

/// A placeholder that is to be replaced.
struct FoundPlaceholder {
    /// The position of the credential.
    at: usize,
    field: HeaderName,
    template: FieldTemplate,
}

/// The credentials of one request.
pub(crate) struct Injection {
    filter: AccountFilter,
    values: Vec<Arc<CredentialValue>>,
}

impl AccountFilter {
    /// Returns the filter of a permit. `find` gives the definition of a credential.
    pub(crate) fn new(
        permit: &Permit,
        key: Option<&PlaceholderKey>,
        find: impl Fn(&CredentialName) -> Option<Arc<Credential>>,
    ) -> Result<Self, Refusal> {
        let mut owners = Vec::new();
        for name in permit.credentials() {
            let found = find(name).ok_or_else(|| unavailable(name, "it is not in the configuration"))?;
            let covers = |port| permit.host().name().is_some_and(|host| found.covers(host, port));
            if !permit.port().is_some_and(covers) {
                return Err(unavailable(name, "its `hosts` do not contain this host and port"));
            }
            let code = key.map(|key| key.code(permit.sandbox(), name));
            owners.push(Owner { form: found.form.clone(), code });
        }
        Ok(AccountFilter { pin: permit.pin_account(), owners })
    }

    /// Returns a filter for a request whose credentials are not known.
    pub(crate) fn without_credentials(pin: PinAccount) -> Self {
        AccountFilter { pin, owners: Vec::new() }
    }

    /// Removes what is not the sandbox's to send, and returns the placeholders that stood where they are replaced. Of
    /// those fields it leaves what the sandbox chose.
    ///
    /// # Errors
    ///
    /// Refuses a credential of another account if the rule says so.
    pub(crate) fn apply(&self, request: &mut RequestHeader) -> Result<FoundPlaceholders, Refusal> {
        if self.owners.is_empty() && self.pin == PinAccount::Off {
            return Ok(FoundPlaceholders::default());
        }
        if self.owners.iter().any(|owner| matches!(owner.form, CredentialForm::SigV4 { .. })) {
            strip_signature(request)?;
        }
        let found = self.take_placeholders(request)?;
        let names: Vec<HeaderName> = request.headers.keys().cloned().collect();
        for name in names {
            let is_found =
                found.misplaced.contains(&name) || found.replaced.iter().any(|one| one.field == name);
            if !is_found && self.removes_field(request, &name)? {
                request.remove_header(&name);
            }
        }
        self.remove_protocols(request)?;
        self.remove_parameters(request)?;
        Ok(found)
    }

    fn take_placeholders(&self, request: &mut RequestHeader) -> Result<FoundPlaceholders, Refusal> {
        let mut found = FoundPlaceholders::default();
        for (at, owner) in self.owners.iter().enumerate() {
            let (CredentialForm::Placeholder { headers, prefix }, Some(code)) = (&owner.form, &owner.code)
            else {
                continue;
            };
            for header in headers {
                let Ok(field) = HeaderName::from_bytes(header.as_bytes()) else { continue };
                let values = request.headers.get_all(&field).iter();
                let values: Vec<_> =
                    values.map(|value| FieldTemplate::find(value.as_bytes(), code, prefix)).collect();
                match values.as_slice() {
                    [Ok(Some(template))] => {
                        let template = template.clone();
                        let set = request.insert_header(field.clone(), template.without());
                        set.map_err(|_| Refusal::from(Reason::BadRequest))?;
                        found.replaced.push(FoundPlaceholder { at, field, template });
                    }
                    values if values.iter().any(|value| *value != Ok(None)) => found.misplaced.push(field),
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    /// Returns whether a header field goes.
    fn removes_field(&self, request: &RequestHeader, name: &HeaderName) -> Result<bool, Refusal> {
        let owned =
            self.owners.iter().filter(|owner| !matches!(owner.form, CredentialForm::Placeholder { .. }));
        let mut owned = owned.flat_map(|owner| owner.form.fields());
        if owned.any(|field| is_same_field(field, name.as_str())) {
            return Ok(true);
        }
        let is_placed = self.owners.iter().flat_map(|owner| owner.form.fields());
        let is_placed = is_placed.into_iter().any(|field| is_same_field(field, name.as_str()));
        if self.pin == PinAccount::Off || !(is_placed || is_credential_field(name.as_str())) {
            return Ok(false);
        }
        let values = || request.headers.get_all(name).iter().map(HeaderValue::as_bytes);
        let is_ours = || values().all(|value| self.is_own_placeholder(value));
        let is_harmless = || *name == COOKIE && !values().any(names_somebody);
        if self.pin == PinAccount::Refuse && !is_ours() && !is_harmless() {
            return Err(other_account(&format!("header field `{}`", shown(name.as_str()))));
        }
        Ok(true)
    }

    /// Removes entries of `Sec-WebSocket-Protocol` that carry a credential.
    fn remove_protocols(&self, request: &mut RequestHeader) -> Result<(), Refusal> {
        if self.pin == PinAccount::Off {
            return Ok(());
        }
        let values = request.headers.get_all(WEBSOCKET_PROTOCOL).iter();
        let values: Vec<String> =
            values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect();
        let entries = || values.iter().flat_map(|value| value.split(',')).map(str::trim);
        let mut kept = entries().filter(|entry| !is_credential_protocol(entry)).peekable();
        if kept.clone().count() == entries().count() {
            return Ok(());
        }
        let is_ours = |entry: &str| self.is_own_placeholder(entry.as_bytes());
        if self.pin == PinAccount::Refuse
            && entries().any(|entry| is_credential_protocol(entry) && !is_ours(entry))
        {
            return Err(other_account(&format!("header field `{WEBSOCKET_PROTOCOL}`")));
        }
        request.remove_header(WEBSOCKET_PROTOCOL);
        if kept.peek().is_some() {
            let rest = kept.collect::<Vec<_>>().join(", ");
            let set = request.insert_header("Sec-WebSocket-Protocol", rest);
            set.map_err(|_| Refusal::from(Reason::BadRequest))?;
        }
        Ok(())
    }

    fn remove_parameters(&self, request: &mut RequestHeader) -> Result<(), Refusal> {
        let Some(query) = request.uri.query().map(str::to_owned) else { return Ok(()) };
        let owned: Vec<String> = self.owners.iter().filter_map(Owner::parameter).collect();
        let is_owned = |name: &[u8]| owned.contains(&plain_parameter(name));
        let pins = self.pin != PinAccount::Off;
        let is_other = |name: &[u8]| pins && !is_owned(name) && is_credential_parameter(name);
        if self.pin == PinAccount::Refuse {
            let parts = query.split(['&', ';']).map(|part| part.split_once('=').unwrap_or((part, "")));
            let mut others = parts.filter(|(name, value)| {
                is_other(name.as_bytes()) && !self.is_own_placeholder(value.as_bytes())
            });
            if let Some((name, _)) = others.next() {
                let name = plain_parameter(name.as_bytes());
                return Err(other_account(&format!("parameter `{}`", shown(&name))));
            }
        }
        let Some(rest) = without_parameters(&query, |name| is_owned(name) || is_other(name)) else {
            return Ok(());
        };
        form::set_query(request, &rest).ok_or_else(|| Refusal::from(Reason::BadRequest))
    }

    /// Returns whether a value is the placeholder of one of the credentials and nothing else, but for a scheme and a user.
    fn is_own_placeholder(&self, value: &[u8]) -> bool {
        let codes = self.owners.iter().filter_map(|owner| owner.code.as_deref());
        codes.into_iter().any(|code| matches!(FieldTemplate::find(value, code, ""), Ok(Some(_))))
    }
}

impl Owner {
    /// The parameter that the form owns, as [`plain_parameter`] reads it.
    fn parameter(&self) -> Option<String> {
        match &self.form {
            CredentialForm::DangerouslyQuery { name } => Some(plain_parameter(name.as_bytes())),
            CredentialForm::Basic { .. }
            | CredentialForm::Bearer
            | CredentialForm::Header { .. }
            | CredentialForm::Placeholder { .. }
            | CredentialForm::SigV4 { .. } => None,
        }
    }
}

impl Injection {
    /// Finds the values of the credentials of a permit.
    ///
    /// # Errors
    ///
    /// Returns a refusal that names the credential, if one has no value now or may not go to this host.
    pub(crate) async fn prepare(
        store: &CredentialStore,
        key: &PlaceholderKey,
        permit: &Permit,
    ) -> Result<Self, Refusal> {
        let filter = AccountFilter::new(permit, Some(key), |name| store.definition(name))?;
        let mut values = Vec::new();
        for name in permit.credentials() {
            let port = permit.port().ok_or(Reason::CredentialUnavailable)?;
            values.push(store.value(name, permit.host(), port).await?);
        }
        Ok(Injection { filter, values })
    }

    pub(crate) fn filter(&self) -> &AccountFilter {
        &self.filter
    }

    /// Reads how a request, as the sandbox sent it, is to be signed, if one of the credentials signs it. `body` is the
    /// length that it announces.
    ///
    /// # Errors
    ///
    /// Refuses a request that cannot be signed.
    pub(crate) fn signing(
        &self,
        request: &RequestHeader,
        body: Option<u64>,
    ) -> Result<Option<RequestSigning>, Refusal> {
        let form = self.filter.owners.iter().find_map(|owner| match &owner.form {
            CredentialForm::SigV4 { service, region } => Some((service, region)),
            CredentialForm::Basic { .. }
            | CredentialForm::Bearer
            | CredentialForm::DangerouslyQuery { .. }
            | CredentialForm::Header { .. }
            | CredentialForm::Placeholder { .. } => None,
        });
        let signing = form.map(|(service, region)| RequestSigning::new(service, region, request, body));
        Ok(signing.transpose()?)
    }

    /// Signs a request that has everything else that it leaves with.
    ///
    /// # Errors
    ///
    /// Refuses a request that cannot be signed.
    pub(crate) fn sign(
        &self,
        signing: &mut RequestSigning,
        request: &mut RequestHeader,
        now: SystemTime,
    ) -> Result<(), Refusal> {
        let keys = self.values.iter().find_map(|value| value.aws_keys());
        let keys = keys.ok_or_else(|| {
            Refusal::from(Reason::CredentialUnavailable).with_detail("its value is not a pair of AWS keys")
        })?;
        Ok(signing.sign(request, keys, now)?)
    }

    /// Adds the credentials to a request that went through the filter.
    ///
    /// # Errors
    ///
    /// Refuses a request in the clear, and one that cannot carry a value.
    pub(crate) fn inject(
        &self,
        request: &mut RequestHeader,
        scheme: UrlScheme,
        placeholders: &FoundPlaceholders,
    ) -> Result<(), Refusal> {
        if let Some(field) = placeholders.misplaced.first() {
            let why = format!("header field `{field}` carries another credential beside a placeholder");
            return Err(Refusal::from(Reason::PlaceholderMisused).with_detail(why));
        }
        if scheme != UrlScheme::Https && !self.values.is_empty() {
            return Err(Reason::CredentialNeedsTls.into());
        }
        for (owner, value) in self.filter.owners.iter().zip(&self.values) {
            form::set(request, &owner.form, value)?;
        }
        for found in &placeholders.replaced {
            let text = self.values.get(found.at).and_then(|value| value.text());
            let text = text.ok_or(Reason::CredentialUnavailable)?;
            form::set_field(request, found.field.as_str(), &found.template.with(text))?;
        }
        Ok(())
    }
}

fn unavailable(name: &CredentialName, why: &str) -> Refusal {
    Refusal::from(Reason::CredentialUnavailable).with_detail(format!("credential `{name}`: {why}"))
}

fn other_account(place: &str) -> Refusal {
    Refusal::from(Reason::OtherAccount)
        .with_detail(format!("{place} carries a credential of another account"))
}

fn shown(name: &str) -> String {
    name.chars().filter(|c| c.is_ascii_graphic()).take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "sbxphabcdefghijklmnopqrstuvwxyz";

    fn filter(pin: PinAccount, forms: &[CredentialForm]) -> AccountFilter {
        let owner = |form: &CredentialForm| Owner { form: form.clone(), code: Some(CODE.to_owned()) };
        AccountFilter { pin, owners: forms.iter().map(owner).collect() }
    }

    fn request(target: &str, fields: &[(&'static str, &str)]) -> RequestHeader {
        let mut request = RequestHeader::build("GET", target.as_bytes(), None).unwrap();
        for (name, value) in fields {
            request.append_header(*name, *value).unwrap();
        }
        request
    }

    fn left(request: &RequestHeader) -> Vec<String> {
        let mut left: Vec<String> = request
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
            .collect();
        left.sort_unstable();
        left
    }

    fn placeholder_form() -> CredentialForm {
        CredentialForm::Placeholder { headers: vec!["authorization".into()], prefix: "sk-".into() }
    }

    #[test]
    fn p11_what_the_form_owns_goes_whatever_the_rule_says_of_other_accounts() {
        let header = CredentialForm::Header { name: "x-api-key".into(), prefix: String::new() };
        for pin in [PinAccount::Off, PinAccount::Remove, PinAccount::Refuse] {
            let mut sent = request(
                "/",
                &[("X-Api-Key", "mine"), ("x_api_key", "mine"), ("x-api-key", "more"), ("A", "b")],
            );
            filter(pin, std::slice::from_ref(&header)).apply(&mut sent).unwrap();
            assert_eq!(left(&sent), ["a: b"], "{pin:?}");
            let mut sent = request("/a?b=1&K%45y=x&key=y&key[]=z", &[]);
            let query = CredentialForm::DangerouslyQuery { name: "key".into() };
            filter(pin, &[query]).apply(&mut sent).unwrap();
            assert_eq!(sent.uri.to_string(), "/a?b=1", "{pin:?}");
        }
    }

    #[test]
    fn p11_other_accounts_are_removed_or_refused_or_pass() {
        let places: [(&str, &[(&'static str, &str)]); 8] = [
            ("/", &[("X-Api-Key", "mine")]),
            ("/", &[("Authorization", "Bearer mine")]),
            ("/", &[("X_Auth_Token", "mine")]),
            ("/", &[("Cookie", "session=mine")]),
            ("/", &[("OpenAI-Organization", "org-mine")]),
            ("/", &[("Sec-WebSocket-Protocol", "openai-insecure-api-key.mine")]),
            ("/?api%5Fkey=mine", &[]),
            ("/?X-Amz-Signature=mine", &[]),
        ];
        for (target, fields) in places {
            let mut sent = request(target, fields);
            filter(PinAccount::Remove, &[]).apply(&mut sent).unwrap();
            assert_eq!((left(&sent), sent.uri.query()), (Vec::new(), None), "{target} {fields:?}");
            let mut sent = request(target, fields);
            let refused = filter(PinAccount::Refuse, &[]).apply(&mut sent).err();
            let refused = refused.unwrap_or_else(|| panic!("{target} {fields:?} passed"));
            assert_eq!(refused.reason, Reason::OtherAccount, "{target} {fields:?}");
            assert!(!refused.detail.unwrap().contains("mine"), "the value is not shown");
            let mut sent = request(target, fields);
            let before = (left(&sent), sent.uri.clone());
            filter(PinAccount::Off, &[]).apply(&mut sent).unwrap();
            assert_eq!((left(&sent), sent.uri.clone()), before, "{target} {fields:?}");
        }
        let honest =
            [("accept", "*/*"), ("anthropic-version", "1"), ("idempotency-key", "k"), ("x-csrf-token", "t")];
        let mut sent = request("/v1?model=m&limit=2", &honest);
        filter(PinAccount::Refuse, &[]).apply(&mut sent).unwrap();
        assert_eq!((sent.headers.len(), sent.uri.query()), (honest.len(), Some("model=m&limit=2")));
        let mut sent = request("/", &[("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.sk, x")]);
        filter(PinAccount::Remove, &[]).apply(&mut sent).unwrap();
        assert_eq!(left(&sent), ["sec-websocket-protocol: realtime, x"]);
        let mut sent = request("/", &[("Cookie", "__cf_bm=1; _cfuvid=2")]);
        filter(PinAccount::Refuse, &[]).apply(&mut sent).unwrap();
        assert!(left(&sent).is_empty(), "what a network set is removed and not refused");
    }

    #[test]
    fn p11_a_placeholder_of_ours_is_no_other_account() {
        let bearer = format!("Bearer sk-{CODE}");
        for (pin, form) in
            [(PinAccount::Refuse, CredentialForm::Bearer), (PinAccount::Remove, CredentialForm::Bearer)]
        {
            let mut sent = request("/", &[("X-Api-Key", &format!("sk-{CODE}")), ("Authorization", &bearer)]);
            filter(pin, &[form]).apply(&mut sent).unwrap();
            assert!(left(&sent).is_empty(), "{pin:?}");
        }
    }

    #[test]
    fn p11_a_placeholder_is_taken_from_its_field_alone() {
        let bearer = format!("Bearer sk-{CODE}");
        let only = filter(PinAccount::Remove, &[placeholder_form()]);
        let mut sent = request("/", &[("Authorization", &bearer), ("X-Other", &bearer)]);
        let found = only.apply(&mut sent).unwrap();
        assert_eq!((found.replaced.len(), found.misplaced.len()), (1, 0));
        let left_over = ["authorization: Bearer".to_owned(), format!("x-other: {bearer}")];
        assert_eq!(left(&sent), left_over, "the rest is for the search to find");
        let value = Arc::new(CredentialValue::parse("sk-0123456789").unwrap());
        let injection = Injection { filter: only.clone(), values: vec![value] };
        let listed = format!("{bearer}, Bearer mine");
        for fields in [
            vec![("Authorization", bearer.as_str()), ("authorization", "Bearer mine")],
            vec![("Authorization", listed.as_str())],
        ] {
            let mut sent = request("/", &fields);
            let before = left(&sent);
            let found = only.apply(&mut sent).unwrap();
            assert_eq!(left(&sent), before, "left for the search to find");
            let refused = injection.inject(&mut sent, UrlScheme::Https, &found).unwrap_err();
            assert_eq!(refused.reason, Reason::PlaceholderMisused);
        }
        let mut sent = request("/", &[("Authorization", "Bearer mine"), ("X-A", "1")]);
        assert!(only.apply(&mut sent).unwrap().replaced.is_empty());
        assert_eq!(left(&sent), ["x-a: 1"], "a credential of the sandbox is one of another account");
    }

    #[test]
    fn p11_values_are_set_over_tls_alone_and_replace_placeholders() {
        let value = Arc::new(CredentialValue::parse("sk-0123456789").unwrap());
        let filter = filter(PinAccount::Remove, &[placeholder_form()]);
        let injection = Injection { filter, values: vec![value] };
        let mut sent = request("/", &[("Authorization", &format!("Bearer sk-{CODE}"))]);
        let found = injection.filter().apply(&mut sent).unwrap();
        let clear = injection.inject(&mut sent.clone(), UrlScheme::Http, &found);
        assert_eq!(clear.unwrap_err().reason, Reason::CredentialNeedsTls);
        injection.inject(&mut sent, UrlScheme::Https, &found).unwrap();
        assert_eq!(left(&sent), ["authorization: Bearer sk-0123456789"]);
        assert!(sent.headers["authorization"].is_sensitive());
        let mut sent = request("/", &[("A", "b")]);
        injection.inject(&mut sent, UrlScheme::Https, &FoundPlaceholders::default()).unwrap();
        assert_eq!(left(&sent), ["a: b"], "without a placeholder it leaves without our key");
    }
}
