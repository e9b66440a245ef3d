//! How Sandbar authenticates to a memory service: with the shared key and a principal, or with a token that it signs
//! for the sandbox of the channel. None of it comes from the sandbox.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use certs::UnixTime;
use certs::identity::{SignedToken, SigningKey, Subject, TrustDomain};
use certs::service_token::{MAX_LIFE, ServiceClaims, ServiceProfile, ServiceTokens};
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use pingora_http::RequestHeader;
use rules::configuration::{Configuration, MemoryService, ServiceAuthSettings};
use rules::ids::{BankId, CredentialName};
use rules::principal::PrincipalTemplate;
use rules::{Host, Reason, SandboxRef};
use serde_json::{Value, json};

use super::profile::MemoryProfile;
use crate::credential::scrub::EchoPatterns;
use crate::credential::{CredentialStore, CredentialValue};
use crate::report::refusal::Refusal;

/// Detail of the refusal when a key, principal or token does not fit into a header field.
const INVALID_VALUE: &str = "it is not a valid header field value";

/// The memory services of the configuration.
#[derive(Debug)]
pub(super) struct MemoryServices(HashMap<(Host, u16), ServiceEndpoint>);

/// One memory service.
#[derive(Debug)]
pub(super) struct ServiceEndpoint {
    pub(super) audience: String,
    auth: ServiceAuth,
}

/// How Sandbar authenticates to a service.
#[derive(Debug)]
enum ServiceAuth {
    Key { credential: CredentialName, principal: PrincipalTemplate },
    Principal(PrincipalTemplate),
    Token { tokens: Box<ServiceTokens>, domain: TrustDomain },
}

impl MemoryServices {
    /// Loads every signing key, so that a missing one fails the start and not a request.
    pub(super) fn open(configuration: &Configuration, base: &Path) -> anyhow::Result<Self> {
        let mut services = HashMap::new();
        for service in &configuration.memory_services {
            let MemoryService { host, port, audience, proof } = service;
            let auth = ServiceAuth::open(proof, base)
                .with_context(|| format!("cannot authenticate to the memory service {host}:{port}"))?;
            let service = ServiceEndpoint { audience: audience.clone(), auth };
            services.insert((host.clone(), *port), service);
        }
        Ok(MemoryServices(services))
    }

    pub(super) fn find(&self, host: &Host, port: u16) -> Option<&ServiceEndpoint> {
        self.0.get(&(host.clone(), port))
    }

    /// The JWK Set with which services verify our tokens: every public key, each once.
    pub(super) fn jwks(&self, now: UnixTime) -> Value {
        let mut keys: Vec<Value> = Vec::new();
        for service in self.0.values() {
            let ServiceAuth::Token { tokens, .. } = &service.auth else { continue };
            let mut set = tokens.jwks(now);
            let set = set.get_mut("keys").and_then(Value::as_array_mut);
            keys.extend(set.map(std::mem::take).unwrap_or_default());
        }
        keys.sort_by_key(|key| key.get("kid").map(ToString::to_string));
        keys.dedup();
        json!({ "keys": keys })
    }
}

impl ServiceAuth {
    fn open(proof: &ServiceAuthSettings, base: &Path) -> anyhow::Result<Self> {
        match proof {
            ServiceAuthSettings::ApiKey { credential, principal } => {
                let (credential, principal) = (credential.clone(), principal.clone());
                Ok(ServiceAuth::Key { credential, principal })
            }
            ServiceAuthSettings::Principal(principal) => Ok(ServiceAuth::Principal(principal.clone())),
            ServiceAuthSettings::Token { key, issuer, trust_domain } => {
                let key = SigningKey::load(&base.join(key))?;
                let tokens = ServiceTokens::new(key, issuer, ServiceProfile::Astrocyte, MAX_LIFE)?;
                let (tokens, domain) = (Box::new(tokens), TrustDomain::parse(trust_domain)?);
                Ok(ServiceAuth::Token { tokens, domain })
            }
        }
    }
}

impl ServiceEndpoint {
    /// The credential in its requests, for the record.
    pub(super) fn credential(&self) -> Option<&CredentialName> {
        match &self.auth {
            ServiceAuth::Key { credential, .. } => Some(credential),
            ServiceAuth::Principal(_) | ServiceAuth::Token { .. } => None,
        }
    }

    /// The current value of the key, or none if the service needs none.
    pub(super) async fn current_key(
        &self,
        credentials: &CredentialStore,
        host: &Host,
        port: u16,
    ) -> Result<Option<Arc<CredentialValue>>, Refusal> {
        match self.credential() {
            Some(name) => credentials.value(name, host, port).await.map(Some),
            None => Ok(None),
        }
    }

    /// Adds the key, and the principal or token, to a canonical request.
    pub(super) fn add_identity(
        &self,
        request: &mut RequestHeader,
        profile: &MemoryProfile,
        subject: &CallSubject<'_>,
    ) -> Result<(), Refusal> {
        let mut insert = |name: &HeaderName, value: HeaderValue| {
            request.insert_header(name, value).map_err(|_| credential_refusal(INVALID_VALUE))
        };
        if let Some(key) = subject.key {
            insert(&profile.key_field, key.header_value()?)?;
        }
        match &self.auth {
            ServiceAuth::Key { principal, .. } | ServiceAuth::Principal(principal) => {
                let name = principal.render(subject.sandbox).ok_or(Reason::IdentityUnset)?;
                insert(&profile.principal_field, sensitive_value(&name)?)
            }
            ServiceAuth::Token { tokens, domain } => {
                let token = sign_token(tokens, domain, &self.audience, subject)?;
                insert(&AUTHORIZATION, sensitive_value(&format!("Bearer {}", token.expose()))?)
            }
        }
    }
}

/// The sandbox on behalf of which Sandbar calls a service.
pub(super) struct CallSubject<'a> {
    pub(super) sandbox: &'a SandboxRef,
    pub(super) banks: &'a [BankId],
    pub(super) key: Option<&'a CredentialValue>,
}

/// The secrets of a request that its answer must not contain: the service's key and the signature of the token.
/// Without its signature the rest of a token is harmless.
pub(super) fn secret_patterns(head: &RequestHeader, key: Option<&CredentialValue>) -> EchoPatterns {
    let token = head.headers.get(AUTHORIZATION).and_then(|bearer| bearer.to_str().ok());
    let signature =
        token.and_then(|token| token.rsplit('.').next()).map(|signature| ("the token", signature));
    let keys = key.into_iter().flat_map(CredentialValue::secrets).map(|key| ("the key", key));
    EchoPatterns::new(keys.chain(signature))
}

fn sensitive_value(text: &str) -> Result<HeaderValue, Refusal> {
    let mut value = HeaderValue::from_str(text).map_err(|_| credential_refusal(INVALID_VALUE))?;
    value.set_sensitive(true);
    Ok(value)
}

fn sign_token(
    tokens: &ServiceTokens,
    domain: &TrustDomain,
    audience: &str,
    call: &CallSubject<'_>,
) -> Result<Arc<SignedToken>, Refusal> {
    let (Some(tenant), Some(environment)) = (&call.sandbox.tenant, &call.sandbox.environment) else {
        return Err(Reason::IdentityUnset.into());
    };
    let subject = Subject {
        trust_domain: domain.clone(),
        tenant: tenant.clone(),
        environment: environment.clone(),
        sandbox: call.sandbox.id.clone(),
    };
    let banks: Vec<String> = call.banks.iter().map(|bank| bank.as_str().to_owned()).collect();
    let claims = ServiceClaims { subject: &subject, audience, banks: &banks, certificate: None };
    tokens.token(&claims, UnixTime::now()).map_err(credential_refusal)
}

fn credential_refusal(why: impl ToString) -> Refusal {
    Refusal::from(Reason::CredentialUnavailable).with_detail(why)
}
