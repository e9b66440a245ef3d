//! SPIFFE IDs: who a token is about, in the one form its issuer may use.

use std::fmt;

/// Longest subject, the limit of OpenID Connect.
pub(crate) const MAX_SUBJECT: usize = 255;

/// Why a text is not a subject, a part of one or a template of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    #[error("a SPIFFE ID is at most 255 characters long")]
    Long,
    #[error("a path segment has letters, digits, `.`, `-` and `_` only, and is not `.` or `..`")]
    Segment,
    #[error("the subject is not of the form `{}`", SubjectTemplate::OURS)]
    Shape,
    #[error(
        "a template names {{tenant}}, {{environment}} and {{sandbox}} once each, where they are not fixed"
    )]
    Template,
    #[error("a trust domain has lower-case letters, digits, `.`, `-` and `_` only")]
    TrustDomain,
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

/// One segment of a SPIFFE path: a tenant, an environment, a sandbox. Compared byte by byte.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Segment(String);

impl Segment {
    pub fn parse(text: &str) -> Result<Self, SubjectError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
        let good = !matches!(text, "" | "." | "..") && text.bytes().all(allowed);
        (good && text.len() <= MAX_SUBJECT)
            .then(|| Self(text.to_owned()))
            .ok_or(SubjectError::Segment)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The sandbox a token is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    pub trust_domain: TrustDomain,
    pub tenant: Segment,
    pub environment: Segment,
    pub sandbox: Segment,
}

impl Subject {
    /// Parses the four parts, as a command line or a channel names them.
    pub fn new(
        trust_domain: &str,
        tenant: &str,
        environment: &str,
        sandbox: &str,
    ) -> Result<Self, SubjectError> {
        let subject = Self {
            trust_domain: TrustDomain::parse(trust_domain)?,
            tenant: Segment::parse(tenant)?,
            environment: Segment::parse(environment)?,
            sandbox: Segment::parse(sandbox)?,
        };
        if subject.to_string().len() > MAX_SUBJECT { Err(SubjectError::Long) } else { Ok(subject) }
    }
}

/// The SPIFFE ID, in our own form.
impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trust_domain, tenant, environment, sandbox } = self;
        let domain = trust_domain.as_str();
        write!(formatter, "spiffe://{domain}/tenant/{tenant}/env/{environment}/sandbox/{sandbox}")
    }
}

/// How an issuer writes a subject: a path with `{tenant}`, `{environment}` and `{sandbox}` in it.
///
/// What its path does not say (a cluster's SPIRE may know no tenants) is fixed by the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectTemplate {
    parts: Vec<Part>,
    tenant: Option<Segment>,
    environment: Option<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Environment,
    Literal(Segment),
    Sandbox,
    Tenant,
}

impl SubjectTemplate {
    /// The form that our own issuer uses.
    pub const OURS: &str = "/tenant/{tenant}/env/{environment}/sandbox/{sandbox}";

    /// Parses a path; `tenant` and `environment` are fixed when given, and then not in the path.
    pub fn parse(
        path: &str,
        tenant: Option<Segment>,
        environment: Option<Segment>,
    ) -> Result<Self, SubjectError> {
        let path = path.strip_prefix('/').ok_or(SubjectError::Template)?;
        let parts = path.split('/').map(Part::parse).collect::<Result<Vec<_>, _>>()?;
        let template = Self { parts, tenant, environment };
        let named = |part: Part, fixed: bool| {
            template.parts.iter().filter(|found| **found == part).count() == usize::from(!fixed)
        };
        let good = named(Part::Sandbox, false)
            && named(Part::Tenant, template.tenant.is_some())
            && named(Part::Environment, template.environment.is_some());
        if good { Ok(template) } else { Err(SubjectError::Template) }
    }

    /// Whom `text` names.
    pub fn read(&self, text: &str) -> Result<Subject, SubjectError> {
        if text.len() > MAX_SUBJECT {
            return Err(SubjectError::Long);
        }
        let rest = text.strip_prefix("spiffe://").ok_or(SubjectError::Shape)?;
        let (domain, path) = rest.split_once('/').ok_or(SubjectError::Shape)?;
        let segments = path.split('/').map(Segment::parse).collect::<Result<Vec<_>, _>>()?;
        let literals_agree =
            self.parts.iter().zip(&segments).all(|(part, found)| part.admits(found));
        if segments.len() != self.parts.len() || !literals_agree {
            return Err(SubjectError::Shape);
        }
        let of = |part: Part| {
            let position = self.parts.iter().position(|found| *found == part)?;
            segments.get(position).cloned()
        };
        Ok(Subject {
            trust_domain: TrustDomain::parse(domain)?,
            tenant: self.tenant.clone().or_else(|| of(Part::Tenant)).ok_or(SubjectError::Shape)?,
            environment: self
                .environment
                .clone()
                .or_else(|| of(Part::Environment))
                .ok_or(SubjectError::Shape)?,
            sandbox: of(Part::Sandbox).ok_or(SubjectError::Shape)?,
        })
    }
}

impl Default for SubjectTemplate {
    fn default() -> Self {
        let literal = |text: &str| Part::Literal(Segment(text.to_owned()));
        let parts = vec![
            literal("tenant"),
            Part::Tenant,
            literal("env"),
            Part::Environment,
            literal("sandbox"),
            Part::Sandbox,
        ];
        Self { parts, tenant: None, environment: None }
    }
}

impl Part {
    fn parse(text: &str) -> Result<Self, SubjectError> {
        match text {
            "{environment}" => Ok(Self::Environment),
            "{sandbox}" => Ok(Self::Sandbox),
            "{tenant}" => Ok(Self::Tenant),
            literal => {
                Segment::parse(literal).map(Self::Literal).map_err(|_| SubjectError::Template)
            }
        }
    }

    fn admits(&self, found: &Segment) -> bool {
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
    fn only_the_one_form_names_a_sandbox() {
        let template = SubjectTemplate::default();
        assert_eq!(
            SubjectTemplate::parse(SubjectTemplate::OURS, None, None).as_ref(),
            Ok(&template)
        );
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
            assert_eq!(template.read(text).is_ok(), named, "{text:?}");
        }
        let long =
            format!("spiffe://acme.example/tenant/acme/env/staging/sandbox/{}", "a".repeat(250));
        assert_eq!(template.read(&long), Err(SubjectError::Long));
    }

    #[test]
    fn a_template_says_each_thing_once() {
        let segment = |text: &str| Some(Segment::parse(text).unwrap());
        for (path, tenant, environment, good) in [
            ("/ns/{tenant}/env/{environment}/sa/{sandbox}", None, None, true),
            ("/ns/{tenant}/sa/{sandbox}", None, segment("staging"), true),
            ("/sa/{sandbox}", segment("acme"), segment("staging"), true),
            ("/ns/{tenant}/sa/{sandbox}", None, None, false),
            ("/ns/{tenant}/env/{environment}", None, None, false),
            ("/ns/{tenant}/{tenant}/env/{environment}/{sandbox}", None, None, false),
            ("/ns/{tenant}/sa/{sandbox}", segment("acme"), segment("staging"), false),
            ("ns/{tenant}/{environment}/{sandbox}", None, None, false),
            ("/{tenant}/{environment}/{sandbox}/../x", None, None, false),
            ("/{tenant}/{env}/{sandbox}", None, None, false),
            ("", None, None, false),
        ] {
            assert_eq!(SubjectTemplate::parse(path, tenant, environment).is_ok(), good, "{path}");
        }
        let fixed =
            SubjectTemplate::parse("/ns/{tenant}/sa/{sandbox}", None, segment("staging")).unwrap();
        let found = fixed.read("spiffe://prod.example/ns/acme/sa/build-7").unwrap();
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
                prop_assert_eq!(SubjectTemplate::default().read(&subject.to_string()), Ok(subject));
            }
        }
    }
}
