//! Principals: the user that Sandbar names to a memory service. Built only from the configuration of a
//! sandbox, never from what the sandbox sends.

use crate::sandbox::Sandbox;

/// Longest template.
pub const MAX_TEMPLATE: usize = 255;

/// A template with the placeholders `{agent_card}`, `{environment}`, `{sandbox}` and `{tenant}`.
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

/// Error for a text that is not a principal template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a principal must contain `{{sandbox}}`, and may contain printable text, `{{agent_card}}`, `{{environment}}` and `{{tenant}}`"
)]
pub struct TemplateError;

impl PrincipalTemplate {
    /// The default template.
    pub const DEFAULT: &str = "agent:{sandbox}";

    /// Parses a template.
    ///
    /// # Errors
    ///
    /// Returns [`TemplateError`], also without `{sandbox}`: sandboxes would share a principal.
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

    /// Returns the principal of `sandbox`; `None` while the sandbox lacks a value of the template.
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
