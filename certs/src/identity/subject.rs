//! SPIFFE IDs: the subject of a token, in the one form that its issuer may use.

use std::fmt;

use rules::ids::{Environment, IdError, SandboxId, Tenant};

/// Longest subject, the limit of OpenID Connect.
pub(crate) const MAX_SUBJECT: usize = 255;

/// Why a text is not a subject, a part of one or a template for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    #[error("a SPIFFE ID is at most 255 characters long")]
    Long,
    #[error("a path segment may contain only letters, digits, `.`, `-` and `_`, and not be `.` or `..`")]
    Segment,
    #[error("the subject does not have the form `{}`", SubjectTemplate::OURS)]
    Shape,
    #[error(
        "a template must contain {{tenant}}, {{environment}} and {{sandbox}} once each, except those that are fixed"
    )]
    Template,
    #[error("a trust domain may contain only lower-case letters, digits, `.`, `-` and `_`")]
    TrustDomain,
    #[error("invalid tenant, environment or sandbox: {0}")]
    Word(#[from] IdError),
}

/// The authority part of a SPIFFE ID, such as `staging.acme.example`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustDomain(String);

impl TrustDomain {
    pub fn parse(text: &str) -> Result<Self, SubjectError> {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-_".contains(&b);
        let good = (1..=MAX_SUBJECT).contains(&text.len()) && text.bytes().all(allowed);
        good.then(|| Self(text.to_owned())).ok_or(SubjectError::TrustDomain)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Checks that `text` can be one segment of a SPIFFE path.
fn parse_segment(text: &str) -> Result<&str, SubjectError> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
    let good = !matches!(text, "" | "." | "..") && text.bytes().all(allowed);
    good.then_some(text).ok_or(SubjectError::Segment)
}

/// The sandbox that a token is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    pub trust_domain: TrustDomain,
    pub tenant: Tenant,
    pub environment: Environment,
    pub sandbox: SandboxId,
}

impl Subject {
    /// Parses the four parts, as given on a command line or by a channel.
    pub fn new(
        trust_domain: &str,
        tenant: &str,
        environment: &str,
        sandbox: &str,
    ) -> Result<Self, SubjectError> {
        let subject = Self {
            trust_domain: TrustDomain::parse(trust_domain)?,
            tenant: Tenant::parse(tenant)?,
            environment: Environment::parse(environment)?,
            sandbox: SandboxId::parse(sandbox)?,
        };
        if subject.to_string().len() > MAX_SUBJECT { Err(SubjectError::Long) } else { Ok(subject) }
    }
}

/// Formats the SPIFFE ID in our own form.
impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trust_domain, tenant, environment, sandbox } = self;
        let domain = trust_domain.as_str();
        write!(formatter, "spiffe://{domain}/tenant/{tenant}/env/{environment}/sandbox/{sandbox}")
    }
}

/// The form of an issuer's subjects: a path that contains `{tenant}`, `{environment}` and `{sandbox}`.
///
/// The operator sets fixed values for parts that the path lacks (a cluster's SPIRE may have no tenants).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectTemplate {
    parts: Vec<TemplatePart>,
    tenant: Option<Tenant>,
    environment: Option<Environment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Environment,
    Literal(String),
    Sandbox,
    Tenant,
}

impl SubjectTemplate {
    /// The form that our own issuer uses.
    pub const OURS: &str = "/tenant/{tenant}/env/{environment}/sandbox/{sandbox}";

    /// Parses a path. A `tenant` or `environment` given here is fixed and must not be in the path.
    pub fn parse(
        path: &str,
        tenant: Option<Tenant>,
        environment: Option<Environment>,
    ) -> Result<Self, SubjectError> {
        let path = path.strip_prefix('/').ok_or(SubjectError::Template)?;
        let parts = path.split('/').map(TemplatePart::parse).collect::<Result<Vec<_>, _>>()?;
        let template = Self { parts, tenant, environment };
        let named = |part: TemplatePart, fixed: bool| {
            template.parts.iter().filter(|found| **found == part).count() == usize::from(!fixed)
        };
        let good = named(TemplatePart::Sandbox, false)
            && named(TemplatePart::Tenant, template.tenant.is_some())
            && named(TemplatePart::Environment, template.environment.is_some());
        if good { Ok(template) } else { Err(SubjectError::Template) }
    }

    /// Parses a subject.
    pub fn parse_subject(&self, text: &str) -> Result<Subject, SubjectError> {
        if text.len() > MAX_SUBJECT {
            return Err(SubjectError::Long);
        }
        let rest = text.strip_prefix("spiffe://").ok_or(SubjectError::Shape)?;
        let (domain, path) = rest.split_once('/').ok_or(SubjectError::Shape)?;
        let segments = path.split('/').map(parse_segment).collect::<Result<Vec<_>, _>>()?;
        let literals_agree = self.parts.iter().zip(&segments).all(|(part, found)| part.matches(found));
        if segments.len() != self.parts.len() || !literals_agree {
            return Err(SubjectError::Shape);
        }
        let segment_of = |part: TemplatePart| {
            let position = self.parts.iter().position(|found| *found == part)?;
            segments.get(position).copied()
        };
        let required = |part: TemplatePart| segment_of(part).ok_or(SubjectError::Shape);
        Ok(Subject {
            trust_domain: TrustDomain::parse(domain)?,
            tenant: match &self.tenant {
                Some(fixed) => fixed.clone(),
                None => Tenant::parse(required(TemplatePart::Tenant)?)?,
            },
            environment: match &self.environment {
                Some(fixed) => fixed.clone(),
                None => Environment::parse(required(TemplatePart::Environment)?)?,
            },
            sandbox: SandboxId::parse(required(TemplatePart::Sandbox)?)?,
        })
    }
}

impl Default for SubjectTemplate {
    fn default() -> Self {
        let literal = |text: &str| TemplatePart::Literal(text.to_owned());
        let parts = vec![
            literal("tenant"),
            TemplatePart::Tenant,
            literal("env"),
            TemplatePart::Environment,
            literal("sandbox"),
            TemplatePart::Sandbox,
        ];
        Self { parts, tenant: None, environment: None }
    }
}

impl TemplatePart {
    fn parse(text: &str) -> Result<Self, SubjectError> {
        match text {
            "{environment}" => Ok(Self::Environment),
            "{sandbox}" => Ok(Self::Sandbox),
            "{tenant}" => Ok(Self::Tenant),
            literal => parse_segment(literal)
                .map(|text| Self::Literal(text.to_owned()))
                .map_err(|_| SubjectError::Template),
        }
    }

    fn matches(&self, found: &str) -> bool {
        match self {
            Self::Literal(literal) => literal == found,
            Self::Environment | Self::Sandbox | Self::Tenant => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn p12_only_the_one_form_names_a_sandbox() {
        let template = SubjectTemplate::default();
        assert_eq!(SubjectTemplate::parse(SubjectTemplate::OURS, None, None).as_ref(), Ok(&template));
        for (text, named) in [
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7", true),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/Build-7", true),
            ("spiffe://ACME.example/tenant/acme/env/staging/sandbox/build-7", false),
            ("SPIFFE://acme.example/tenant/acme/env/staging/sandbox/build-7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7/", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/", false),
            ("spiffe://acme.example//tenant/acme/env/staging/sandbox/build-7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/..", false),
            ("spiffe://acme.example/tenant/acme/env/../sandbox/build-7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/build%2d7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/-7", false),
            ("spiffe://acme.example/tenant/.acme/env/staging/sandbox/build-7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7\u{a0}", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/ｂuild-7", false),
            ("spiffe://acme.example/tenant/acme/env/staging/sandbox/build-7 ", false),
            ("spiffe://acme.example/tenant/acme/sandbox/build-7", false),
            ("spiffe://acme.example/env/staging/tenant/acme/sandbox/build-7", false),
            ("spiffe://acme.example:443/tenant/acme/env/staging/sandbox/build-7", false),
            ("spiffe://user@acme.example/tenant/acme/env/staging/sandbox/build-7", false),
            ("spiffe:///tenant/acme/env/staging/sandbox/build-7", false),
            ("https://acme.example/tenant/acme/env/staging/sandbox/build-7", false),
            ("", false),
        ] {
            assert_eq!(template.parse_subject(text).is_ok(), named, "{text:?}");
        }
        let long = format!("spiffe://acme.example/tenant/acme/env/staging/sandbox/{}", "a".repeat(250));
        assert_eq!(template.parse_subject(&long), Err(SubjectError::Long));
    }

    #[test]
    fn a_template_says_each_thing_once() {
        let tenant = |text: &str| Some(Tenant::parse(text).unwrap());
        let environment = |text: &str| Some(Environment::parse(text).unwrap());
        for (path, tenant, environment, good) in [
            ("/ns/{tenant}/env/{environment}/sa/{sandbox}", None, None, true),
            ("/ns/{tenant}/sa/{sandbox}", None, environment("staging"), true),
            ("/sa/{sandbox}", tenant("acme"), environment("staging"), true),
            ("/ns/{tenant}/sa/{sandbox}", None, None, false),
            ("/ns/{tenant}/env/{environment}", None, None, false),
            ("/ns/{tenant}/{tenant}/env/{environment}/{sandbox}", None, None, false),
            ("/ns/{tenant}/sa/{sandbox}", tenant("acme"), environment("staging"), false),
            ("ns/{tenant}/{environment}/{sandbox}", None, None, false),
            ("/{tenant}/{environment}/{sandbox}/../x", None, None, false),
            ("/{tenant}/{env}/{sandbox}", None, None, false),
            ("", None, None, false),
        ] {
            assert_eq!(SubjectTemplate::parse(path, tenant, environment).is_ok(), good, "{path}");
        }
        let fixed =
            SubjectTemplate::parse("/ns/{tenant}/sa/{sandbox}", None, environment("staging")).unwrap();
        let found = fixed.parse_subject("spiffe://prod.example/ns/acme/sa/build-7").unwrap();
        assert_eq!(found, Subject::new("prod.example", "acme", "staging", "build-7").unwrap());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            tenant in "[a-zA-Z0-9_-]{1,20}",
            environment in "[a-z]{1,10}",
            sandbox in "[a-zA-Z0-9._-]{1,40}",
        ) {
            if let Ok(subject) = Subject::new("acme.example", &tenant, &environment, &sandbox) {
                prop_assert_eq!(SubjectTemplate::default().parse_subject(&subject.to_string()), Ok(subject));
            }
        }
    }
}
