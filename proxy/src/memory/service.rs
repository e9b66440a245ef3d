//! As whom Sandbar speaks to a memory service: the shared key and the principal, or a token signed for the
//! sandbox of the path. Nothing here comes from the sandbox.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use certs::UnixTime;
use certs::identity::{SigningKey, Subject, Token, TrustDomain};
use certs::service_token::{MAX_LIFE, ServiceClaims, ServiceProfile, ServiceTokens};
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use pingora_http::RequestHeader;
use rules::operator::{MemoryService, Operator, Proof};
use rules::principal::PrincipalTemplate;
use rules::word::{BankId, CredentialName};
use rules::{Host, Reason, SandboxRef};
use serde_json::{Value, json};

use super::profile::Profile;
use crate::credential::scrub::Echoes;
use crate::credential::{Credential, Credentials};
use crate::report::refusal::Refusal;

/// The services of the operator's file.
#[derive(Debug)]
pub(super) struct Services(HashMap<(Host, u16), Service>);

/// One memory service.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) audience: String,
    voice: Voice,
}

/// What it is told.
#[derive(Debug)]
enum Voice {
    Key { credential: CredentialName, principal: PrincipalTemplate },
    Principal(PrincipalTemplate),
    Token { tokens: Box<ServiceTokens>, domain: TrustDomain },
}

impl Services {
    /// Takes over what the operator says, and looks at every key: one that is missing is found at the start.
    pub(super) fn open(
        operator: &Operator,
        credentials: &Credentials,
        base: &Path,
    ) -> anyhow::Result<Self> {
        let mut services = HashMap::new();
        for service in &operator.memory_services {
            let MemoryService { host, port, audience, proof } = service;
            let voice = Voice::open(proof, credentials, base)
                .with_context(|| format!("cannot speak to the memory service {host}:{port}"))?;
            let service = Service { audience: audience.clone(), voice };
            services.insert((host.clone(), *port), service);
        }
        Ok(Services(services))
    }

    pub(super) fn at(&self, host: &Host, port: u16) -> Option<&Service> {
        self.0.get(&(host.clone(), port))
    }

    /// The JWK Set by which services check the tokens that are signed for them: every public key, each once.
    pub(super) fn jwks(&self, now: UnixTime) -> Value {
        let mut keys: Vec<Value> = Vec::new();
        for service in self.0.values() {
            let Voice::Token { tokens, .. } = &service.voice else { continue };
            let mut set = tokens.jwks(now);
            let own = set.get_mut("keys").and_then(Value::as_array_mut);
            keys.extend(own.map(std::mem::take).unwrap_or_default());
        }
        keys.sort_by_key(|key| key.get("kid").map(ToString::to_string));
        keys.dedup();
        json!({ "keys": keys })
    }
}

impl Voice {
    fn open(proof: &Proof, credentials: &Credentials, base: &Path) -> anyhow::Result<Self> {
        match proof {
            Proof::ApiKey { credential, principal } => {
                let missing =
                    |refusal: Refusal| anyhow::anyhow!(refusal.detail.unwrap_or_default());
                credentials.current(credential).map_err(missing)?;
                let (credential, principal) = (credential.clone(), principal.clone());
                Ok(Voice::Key { credential, principal })
            }
            Proof::Principal(principal) => Ok(Voice::Principal(principal.clone())),
            Proof::Token { key, issuer, trust_domain } => {
                let key = SigningKey::load(&base.join(key))?;
                let tokens = ServiceTokens::new(key, issuer, ServiceProfile::Astrocyte, MAX_LIFE)?;
                let (tokens, domain) = (Box::new(tokens), TrustDomain::parse(trust_domain)?);
                Ok(Voice::Token { tokens, domain })
            }
        }
    }
}

impl Service {
    /// The credential that goes with its requests, for the record.
    pub(super) fn credential(&self) -> Option<&CredentialName> {
        match &self.voice {
            Voice::Key { credential, .. } => Some(credential),
            Voice::Principal(_) | Voice::Token { .. } => None,
        }
    }

    /// The key as it stands now; none where none is needed.
    pub(super) fn key(&self, all: &Credentials) -> Result<Option<Arc<Credential>>, Refusal> {
        self.credential().map(|name| all.current(name)).transpose()
    }

    /// Says in a request, from which the sandbox's own word is gone, whose it is.
    pub(super) fn introduce(
        &self,
        request: &mut RequestHeader,
        profile: &Profile,
        whom: &Whom<'_>,
    ) -> Result<(), Refusal> {
        let mut put = |name: &HeaderName, value: HeaderValue| {
            request.insert_header(name, value).map_err(|_| unavailable("it is no field"))
        };
        if let Some(key) = whom.key {
            put(&profile.key_field, key.field()?)?;
        }
        match &self.voice {
            Voice::Key { principal, .. } | Voice::Principal(principal) => {
                let name = principal.of(whom.sandbox).ok_or(Reason::IdentityUnset)?;
                put(&profile.principal_field, field(&name)?)
            }
            Voice::Token { tokens, domain } => {
                let token = token(tokens, domain, &self.audience, whom)?;
                put(&AUTHORIZATION, field(&format!("Bearer {}", token.expose()))?)
            }
        }
    }
}

/// For whom a service is spoken to.
pub(super) struct Whom<'a> {
    pub(super) sandbox: &'a SandboxRef,
    pub(super) banks: &'a [BankId],
    pub(super) key: Option<&'a Credential>,
}

/// What of a request must not come back: the key of the service, and the signature of a token for it, without
/// which the rest is no token.
pub(super) fn secrets(head: &RequestHeader, key: Option<&Credential>) -> Vec<Arc<Echoes>> {
    let token = head.headers.get(AUTHORIZATION).and_then(|bearer| bearer.to_str().ok());
    let signature = token.and_then(|token| token.rsplit('.').next());
    let signature = signature.map(|signature| Arc::new(Echoes::of(signature)));
    key.map(Credential::echoes).into_iter().chain(signature).collect()
}

fn field(text: &str) -> Result<HeaderValue, Refusal> {
    let mut value = HeaderValue::from_str(text).map_err(|_| unavailable("it is no field"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn token(
    tokens: &ServiceTokens,
    domain: &TrustDomain,
    audience: &str,
    whom: &Whom<'_>,
) -> Result<Arc<Token>, Refusal> {
    let (Some(tenant), Some(environment)) = (&whom.sandbox.tenant, &whom.sandbox.environment)
    else {
        return Err(Reason::IdentityUnset.into());
    };
    let subject = Subject {
        trust_domain: domain.clone(),
        tenant: tenant.clone(),
        environment: environment.clone(),
        sandbox: whom.sandbox.id.clone(),
    };
    let banks: Vec<String> = whom.banks.iter().map(|bank| bank.as_str().to_owned()).collect();
    let claims = ServiceClaims { subject: &subject, audience, banks: &banks, certificate: None };
    tokens.token(&claims, UnixTime::now()).map_err(unavailable)
}

fn unavailable(why: impl ToString) -> Refusal {
    Refusal::from(Reason::CredentialUnavailable).because(why)
}
