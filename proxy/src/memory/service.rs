//! As whom Sandbar speaks to a memory service: the shared key and the principal, or a token signed for the
//! sandbox of the path. Nothing here comes from the sandbox.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use arc_swap::ArcSwapOption;
use certs::UnixTime;
use certs::identity::{SigningKey, Subject, TrustDomain};
use certs::service_token::{MAX_LIFE, ServiceClaims, ServiceProfile, ServiceTokens};
use http::HeaderValue;
use http::header::AUTHORIZATION;
use pingora_http::RequestHeader;
use rules::operator::{MemoryService, Operator, Proof};
use rules::principal::PrincipalTemplate;
use rules::word::{BankId, CredentialName};
use rules::{Host, Reason, SandboxRef};
use zeroize::Zeroizing;

use super::profile::Profile;
use crate::refusal::Refusal;

/// Shortest secret that is looked for in answers; a shorter one would be found everywhere.
const MIN_SOUGHT: usize = 8;
/// How often keys, issuers and revocations are looked at.
pub(super) const REFRESH: Duration = Duration::from_secs(1);

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
    Key { credential: CredentialName, key: KeyFile, principal: PrincipalTemplate },
    Principal(PrincipalTemplate),
    Token { tokens: ServiceTokens, domain: TrustDomain },
}

impl Services {
    /// Takes over what the operator says, and reads every key: one that is missing is found at the start.
    pub(super) fn open(operator: &Operator, base: &Path) -> anyhow::Result<Self> {
        let files: HashMap<&CredentialName, &String> =
            operator.credentials.iter().map(|(name, file)| (name, file)).collect();
        let mut services = HashMap::new();
        for service in &operator.memory_services {
            let MemoryService { host, port, audience, proof } = service;
            let voice = Voice::open(proof, &files, base)
                .with_context(|| format!("cannot speak to the memory service {host}:{port}"))?;
            let service = Service { audience: audience.clone(), voice };
            services.insert((host.clone(), *port), service);
        }
        Ok(Services(services))
    }

    pub(super) fn at(&self, host: &Host, port: u16) -> Option<&Service> {
        self.0.get(&(host.clone(), port))
    }

    /// Reads the keys again. One that cannot be read is not used any more, and so nothing is sent there.
    pub(super) fn refresh(&self) {
        for service in self.0.values() {
            if let Voice::Key { credential, key, .. } = &service.voice
                && let Err(error) = key.read()
            {
                tracing::error!(%credential, %error, "the key of a memory service cannot be read");
            }
        }
    }
}

impl Voice {
    fn open(
        proof: &Proof,
        files: &HashMap<&CredentialName, &String>,
        base: &Path,
    ) -> anyhow::Result<Self> {
        match proof {
            Proof::ApiKey { credential, principal } => {
                let file = files.get(credential).context("there is no such credential")?;
                let key = KeyFile { path: base.join(file), value: ArcSwapOption::empty() };
                key.read()?;
                let (credential, principal) = (credential.clone(), principal.clone());
                Ok(Voice::Key { credential, key, principal })
            }
            Proof::Principal(principal) => Ok(Voice::Principal(principal.clone())),
            Proof::Token { key, issuer, trust_domain } => {
                let key = SigningKey::load(&base.join(key))?;
                let tokens = ServiceTokens::new(key, issuer, ServiceProfile::Astrocyte, MAX_LIFE)?;
                Ok(Voice::Token { tokens, domain: TrustDomain::parse(trust_domain)? })
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

    /// Says in a request, from which the sandbox's own word is gone, whose it is.
    pub(super) fn introduce(
        &self,
        request: &mut RequestHeader,
        profile: &Profile,
        sandbox: &SandboxRef,
        banks: &[BankId],
    ) -> Result<(), Refusal> {
        let mut put = |name: &http::HeaderName, value: &str| {
            let mut value =
                HeaderValue::from_str(value).map_err(|_| unavailable("it is no field"))?;
            value.set_sensitive(true);
            request.insert_header(name, value).map_err(|_| unavailable("it is no field"))
        };
        match &self.voice {
            Voice::Key { key, principal, .. } => {
                let key = key.value.load_full();
                let key = key.ok_or_else(|| unavailable("its file cannot be read"))?;
                put(&profile.key_field, &key.0)?;
                put(&profile.principal_field, &whose(principal, sandbox)?)
            }
            Voice::Principal(principal) => {
                put(&profile.principal_field, &whose(principal, sandbox)?)
            }
            Voice::Token { tokens, domain } => {
                let token = token(tokens, domain, &self.audience, sandbox, banks)?;
                put(&AUTHORIZATION, &format!("Bearer {}", token.expose()))
            }
        }
    }

    /// Whether `bytes` repeat the secret that the service was told.
    pub(super) fn is_in(&self, bytes: &[u8]) -> bool {
        match &self.voice {
            Voice::Key { key, .. } => key.value.load().as_ref().is_some_and(|key| {
                key.0.len() >= MIN_SOUGHT && memchr::memmem::find(bytes, key.0.as_bytes()).is_some()
            }),
            Voice::Principal(_) | Voice::Token { .. } => false, // no secret, or one of a minute
        }
    }
}

fn whose(principal: &PrincipalTemplate, sandbox: &SandboxRef) -> Result<String, Refusal> {
    principal.of(sandbox).ok_or_else(|| Reason::IdentityUnset.into())
}

fn token(
    tokens: &ServiceTokens,
    domain: &TrustDomain,
    audience: &str,
    sandbox: &SandboxRef,
    banks: &[BankId],
) -> Result<std::sync::Arc<certs::identity::Token>, Refusal> {
    let (Some(tenant), Some(environment)) = (&sandbox.tenant, &sandbox.environment) else {
        return Err(Reason::IdentityUnset.into());
    };
    let subject = Subject {
        trust_domain: domain.clone(),
        tenant: tenant.clone(),
        environment: environment.clone(),
        sandbox: sandbox.id.clone(),
    };
    let banks: Vec<String> = banks.iter().map(|bank| bank.as_str().to_owned()).collect();
    let claims = ServiceClaims { subject: &subject, audience, banks: &banks, certificate: None };
    tokens.token(&claims, UnixTime::now()).map_err(unavailable)
}

fn unavailable(why: impl ToString) -> Refusal {
    Refusal::from(Reason::CredentialUnavailable).because(why)
}

/// A key in a file, as it was read last.
#[derive(Debug)]
struct KeyFile {
    path: PathBuf,
    value: ArcSwapOption<Secret>,
}

impl KeyFile {
    /// Reads it; what cannot be read is forgotten.
    fn read(&self) -> anyhow::Result<()> {
        let read = certs::files::secret_line(&self.path).map_err(anyhow::Error::from);
        let good = |key: &Zeroizing<String>| {
            !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let read = read.and_then(|key| match good(&key) {
            true => Ok(key),
            false => anyhow::bail!("{} is not one line of printable text", self.path.display()),
        });
        match read {
            Ok(key) => {
                self.value.store(Some(std::sync::Arc::new(Secret(key))));
                Ok(())
            }
            Err(error) => {
                self.value.store(None);
                Err(error)
            }
        }
    }
}

/// A value that nobody gets to see, and that is wiped when it is dropped.
struct Secret(Zeroizing<String>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
