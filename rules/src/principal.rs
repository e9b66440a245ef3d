//! Principals: whom a memory service is told it serves, made of what the operator says of a sandbox and of
//! nothing the sandbox says itself.

use crate::sandbox::Sandbox;

/// Longest template.
pub const MAX_TEMPLATE: usize = 255;

/// A text with `{agent_card}`, `{environment}`, `{sandbox}` and `{tenant}` in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrincipalTemplate(Vec<PrincipalPart>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum PrincipalPart {
    AgentCard,
    Environment,
    Literal(String),
    Sandbox,
    Tenant,
}

/// The text is no template of a principal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a principal is plain text with `{{sandbox}}` in it, and `{{agent_card}}`, `{{environment}}` or `{{tenant}}` where wanted"
)]
pub struct TemplateError;

impl PrincipalTemplate {
    /// What is used where the operator says nothing.
    pub const DEFAULT: &str = "agent:{sandbox}";

    /// Parses a template.
    ///
    /// # Errors
    ///
    /// Returns [`TemplateError`] for one without `{sandbox}` too: sandboxes would share a principal.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
        if text.len() > MAX_TEMPLATE || !printable {
            return Err(TemplateError);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((literal, from)) = rest.split_once('{') {
            let (name, after) = from.split_once('}').ok_or(TemplateError)?;
            parts.push(PrincipalPart::Literal(literal.to_owned()));
            parts.push(PrincipalPart::from_name(name).ok_or(TemplateError)?);
            rest = after;
        }
        parts.push(PrincipalPart::Literal(rest.to_owned()));
        let stray = |part: &PrincipalPart| matches!(part, PrincipalPart::Literal(text) if text.contains('}'));
        if parts.iter().any(stray) || !parts.contains(&PrincipalPart::Sandbox) {
            return Err(TemplateError);
        }
        Ok(PrincipalTemplate(parts))
    }

    /// The principal of `sandbox`; none while the sandbox lacks something the template names.
    pub fn render(&self, sandbox: &Sandbox) -> Option<String> {
        self.0.iter().map(|part| part.render(sandbox)).collect()
    }
}

impl PrincipalPart {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "agent_card" => Some(PrincipalPart::AgentCard),
            "environment" => Some(PrincipalPart::Environment),
            "sandbox" => Some(PrincipalPart::Sandbox),
            "tenant" => Some(PrincipalPart::Tenant),
            _ => None,
        }
    }

    fn render<'a>(&'a self, sandbox: &'a Sandbox) -> Option<&'a str> {
        match self {
            PrincipalPart::AgentCard => sandbox.agent_card.as_ref().map(|card| card.as_str()),
            PrincipalPart::Environment => sandbox.environment.as_ref().map(|name| name.as_str()),
            PrincipalPart::Literal(text) => Some(text),
            PrincipalPart::Sandbox => Some(sandbox.id.as_str()),
            PrincipalPart::Tenant => sandbox.tenant.as_ref().map(|tenant| tenant.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Environment, SandboxId, Tenant};

    #[test]
    fn a_principal_names_its_sandbox() {
        let sandbox = Sandbox {
            id: SandboxId::parse("build-7").unwrap(),
            tenant: Some(Tenant::parse("acme").unwrap()),
            environment: Some(Environment::parse("staging").unwrap()),
            agent_card: None,
            generation: None,
        };
        for (template, principal) in [
            ("agent:{sandbox}", Some(Some("agent:build-7"))),
            ("{tenant}/{environment}/{sandbox}", Some(Some("acme/staging/build-7"))),
            ("{sandbox}", Some(Some("build-7"))),
            ("{agent_card}:{sandbox}", Some(None)),
            ("agent:all", None),
            ("agent:{tenant}", None),
            ("agent:{sandbox}{user}", None),
            ("agent:{sandbox", None),
            ("agent:{sandbox}}", None),
            ("agent:{{sandbox}}", None),
            ("agent {sandbox}", None),
            ("agent:\r\n{sandbox}", None),
            ("", None),
        ] {
            let parsed = PrincipalTemplate::parse(template).ok();
            let found = parsed.map(|parsed| parsed.render(&sandbox));
            assert_eq!(found, principal.map(|one| one.map(str::to_owned)), "{template:?}");
        }
    }
}
