//! Profiles: the API of a memory service, as a TOML file. A route maps method and path to the operation and to every
//! place where the request can name a bank; the guard refuses a request that matches no route.

use std::collections::HashMap;
use std::sync::LazyLock;

use http::HeaderName;
use rules::facts::BankOperation;
use rules::ids::ProfileName;
use serde::Deserialize;

/// The built-in profiles.
static PROFILES: LazyLock<HashMap<String, MemoryProfile>> = LazyLock::new(|| {
    let texts = [include_str!("profiles/astrocyte.toml")];
    // An invalid profile is left out, so its services are refused. Tests parse every one of them.
    let profiles = texts.into_iter().filter_map(|text| MemoryProfile::parse(text).ok());
    profiles.map(|profile| (profile.name.clone(), profile)).collect()
});

/// The API of a memory service.
#[derive(Debug)]
pub(super) struct MemoryProfile {
    pub(super) name: String,
    /// Fields of the sandbox's request that the guard forwards. It drops all others.
    pub(super) pass: Vec<HeaderName>,
    pub(super) key_field: HeaderName,
    pub(super) principal_field: HeaderName,
    routes: Vec<ProfileRoute>,
}

/// One kind of request.
#[derive(Debug)]
pub(super) struct ProfileRoute {
    method: String,
    paths: Vec<Vec<PathSegment>>,
    /// The service's name for it, for the record.
    pub(super) call: String,
    pub(super) operation: BankOperation,
    pub(super) banks: Vec<BankSelector>,
    /// Query parameters it takes, apart from those that name banks.
    pub(super) query: Vec<String>,
    /// Places that must be absent or null in the body.
    pub(super) refused: Vec<JsonPointer>,
    /// Places where the answer names the bank of its content.
    pub(super) answer: Vec<JsonPointer>,
}

#[derive(Debug, PartialEq, Eq)]
enum PathSegment {
    /// Any non-empty segment, with its name.
    Any(String),
    Literal(String),
}

/// Where a request names a bank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BankSelector {
    Body(JsonPointer),
    Path(String),
    Query(String),
}

/// A place in a JSON document: keys, and `*` for every element of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonPointer(pub(super) Vec<PointerStep>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PointerStep {
    Each,
    Key(String),
}

/// The route of a request, and the values of its named path segments.
#[derive(Debug)]
pub(super) struct RouteMatch<'a> {
    pub(super) route: &'a ProfileRoute,
    pub(super) named: Vec<(&'a str, String)>,
}

/// Why a profile is invalid.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProfileError {
    #[error("`{0}` is not a valid header field name")]
    Field(String),
    #[error("`{0}` is not a selector: write `body:/key`, `body:/keys/*`, `path:name` or `query:name`")]
    Selector(String),
    #[error(transparent)]
    Syntax(#[from] toml::de::Error),
    #[error("route `{0}` accesses banks but has no `banks` selector")]
    Unselected(String),
}

impl MemoryProfile {
    /// Finds a built-in profile by name.
    pub(super) fn by_name(name: &ProfileName) -> Option<&'static MemoryProfile> {
        PROFILES.get(name.as_str())
    }

    fn parse(text: &str) -> Result<Self, ProfileError> {
        let document: ProfileDocument = toml::from_str(text)?;
        Ok(MemoryProfile {
            name: document.name,
            pass: document.pass.iter().map(|name| parse_field(name)).collect::<Result<_, _>>()?,
            key_field: parse_field(&document.key_field)?,
            principal_field: parse_field(&document.principal_field)?,
            routes: document.route.into_iter().map(ProfileRoute::new).collect::<Result<_, _>>()?,
        })
    }

    /// Finds the route of a request by its method and canonical path.
    pub(super) fn find_route(&self, method: &str, path: &str) -> Option<RouteMatch<'_>> {
        let segments: Vec<&str> = path.split('/').skip(1).collect();
        self.routes.iter().filter(|route| route.method == method).find_map(|route| {
            let named = route.paths.iter().find_map(|path| match_path(path, &segments))?;
            Some(RouteMatch { route, named })
        })
    }
}

fn match_path<'a>(path: &'a [PathSegment], segments: &[&str]) -> Option<Vec<(&'a str, String)>> {
    if path.len() != segments.len() {
        return None;
    }
    let mut named = Vec::new();
    for (segment, text) in path.iter().zip(segments) {
        match segment {
            PathSegment::Any(_) if text.is_empty() => return None,
            PathSegment::Any(name) => named.push((name.as_str(), (*text).to_owned())),
            PathSegment::Literal(literal) if literal == text => {}
            PathSegment::Literal(_) => return None,
        }
    }
    Some(named)
}

impl ProfileRoute {
    fn new(document: RouteDocument) -> Result<Self, ProfileError> {
        let operation = match document.operation {
            RouteOperation::Admin => BankOperation::Admin,
            RouteOperation::Delete => BankOperation::Delete,
            RouteOperation::None => BankOperation::None,
            RouteOperation::Read => BankOperation::Read,
            RouteOperation::Write => BankOperation::Write,
        };
        let accesses_banks = !matches!(operation, BankOperation::Admin | BankOperation::None);
        if accesses_banks && document.banks.is_empty() {
            return Err(ProfileError::Unselected(document.call));
        }
        let pointers = |list: &[String]| -> Result<Vec<JsonPointer>, ProfileError> {
            let parse =
                |text: &String| JsonPointer::parse(text).ok_or_else(|| ProfileError::Selector(text.clone()));
            list.iter().map(parse).collect()
        };
        Ok(ProfileRoute {
            method: document.method,
            paths: document.paths.iter().map(|path| parse_segments(path)).collect(),
            call: document.call,
            operation,
            banks: document.banks.iter().map(|text| BankSelector::parse(text)).collect::<Result<_, _>>()?,
            query: document.query,
            refused: pointers(&document.refused)?,
            answer: pointers(&document.answer)?,
        })
    }

    /// Whether its requests have a body: those with POST do.
    pub(super) fn has_body(&self) -> bool {
        self.method == "POST"
    }
}

fn parse_segments(path: &str) -> Vec<PathSegment> {
    let segment = |text: &str| match text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
        Some(name) => PathSegment::Any(name.to_owned()),
        None => PathSegment::Literal(text.to_owned()),
    };
    path.split('/').skip(1).map(segment).collect()
}

impl BankSelector {
    fn parse(text: &str) -> Result<Self, ProfileError> {
        let wrong = || ProfileError::Selector(text.to_owned());
        match text.split_once(':') {
            Some(("body", pointer)) => JsonPointer::parse(pointer).map(BankSelector::Body).ok_or_else(wrong),
            Some(("path", name)) => Ok(BankSelector::Path(name.to_owned())),
            Some(("query", name)) => Ok(BankSelector::Query(name.to_owned())),
            _ => Err(wrong()),
        }
    }
}

impl JsonPointer {
    fn parse(text: &str) -> Option<Self> {
        let step = |text: &str| match text {
            "*" => PointerStep::Each,
            key => PointerStep::Key(key.to_owned()),
        };
        text.strip_prefix('/').map(|rest| JsonPointer(rest.split('/').map(step).collect()))
    }
}

fn parse_field(name: &str) -> Result<HeaderName, ProfileError> {
    HeaderName::try_from(name).map_err(|_| ProfileError::Field(name.to_owned()))
}

/// A profile file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileDocument {
    name: String,
    pass: Vec<String>,
    key_field: String,
    principal_field: String,
    route: Vec<RouteDocument>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteDocument {
    method: String,
    paths: Vec<String>,
    call: String,
    operation: RouteOperation,
    #[serde(default)]
    banks: Vec<String>,
    #[serde(default)]
    query: Vec<String>,
    #[serde(default)]
    refused: Vec<String>,
    #[serde(default)]
    answer: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RouteOperation {
    Admin,
    Delete,
    None,
    Read,
    Write,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_may_name_exactly_the_profiles_that_exist() {
        let mut found: Vec<&str> = PROFILES.keys().map(String::as_str).collect();
        found.sort_unstable();
        assert_eq!(found, ProfileName::BUILT_IN);
    }

    // proves: memory.profile
    #[test]
    fn p12_every_route_of_astrocyte_has_its_operation() {
        use BankOperation::{Admin, Delete, None as Harmless, Read, Write};
        let profile = MemoryProfile::parse(include_str!("profiles/astrocyte.toml")).unwrap();
        for (method, path, operation) in [
            ("POST", "/v1/retain", Some(Write)),
            ("POST", "/v1/recall", Some(Read)),
            ("POST", "/v1/debug/recall", Some(Read)),
            ("POST", "/v1/reflect", Some(Read)),
            ("POST", "/v1/history", Some(Read)),
            ("POST", "/v1/audit", Some(Read)),
            ("POST", "/v1/graph/search", Some(Read)),
            ("POST", "/v1/graph/neighbors", Some(Read)),
            ("POST", "/v1/forget", Some(Delete)),
            ("POST", "/v1/observations/invalidate", Some(Delete)),
            ("POST", "/v1/compile", Some(Write)),
            ("POST", "/v1/mental-models", Some(Write)),
            ("GET", "/v1/mental-models", Some(Read)),
            ("GET", "/v1/mental-models/m1", Some(Read)),
            ("POST", "/v1/mental-models/m1/refresh", Some(Write)),
            ("DELETE", "/v1/mental-models/m1", Some(Delete)),
            ("POST", "/v1/dsar/forget_principal", Some(Admin)),
            ("POST", "/v1/export", Some(Admin)),
            ("POST", "/v1/import", Some(Admin)),
            ("POST", "/v1/ingest/webhook/s1", Some(Admin)),
            ("POST", "/v1/admin/lifecycle", Some(Admin)),
            ("GET", "/v1/admin/banks", Some(Admin)),
            ("GET", "/v1/admin/banks/health", Some(Admin)),
            ("GET", "/v1/admin/banks/b/health", Some(Admin)),
            ("POST", "/v1/admin/banks/b/hold", Some(Admin)),
            ("DELETE", "/v1/admin/banks/b/hold/h", Some(Admin)),
            ("GET", "/v1/admin/sources", Some(Admin)),
            ("GET", "/v1/admin/tenants/t/storage", Some(Admin)),
            ("GET", "/live", Some(Harmless)),
            ("GET", "/health", Some(Harmless)),
            ("GET", "/health/live", Some(Harmless)),
            ("GET", "/health/ingest", Some(Harmless)),
            ("GET", "/openapi.json", Some(Admin)),
            ("GET", "/docs", Some(Admin)),
            ("GET", "/v1/recall", None),
            ("HEAD", "/live", None),
            ("POST", "/v1/recall/", None),
            ("POST", "/V1/recall", None),
            ("POST", "/v2/recall", None),
            ("GET", "/v1/mental-models/", None),
            ("GET", "/v1/mental-models/m1/x", None),
            ("GET", "/metrics", None),
            ("GET", "/", None),
        ] {
            let found = profile.find_route(method, path).map(|found| found.route.operation);
            assert_eq!(found, operation, "{method} {path}");
        }
    }

    #[test]
    fn a_route_that_accesses_banks_has_a_selector() {
        let with = |route: &str| {
            let head = "name = \"x\"\npass = []\nkey_field = \"x-k\"\nprincipal_field = \"x-p\"\n";
            MemoryProfile::parse(&format!("{head}[[route]]\n{route}"))
        };
        let route = "method = \"POST\"\npaths = [\"/a\"]\ncall = \"a\"\n";
        for (rest, good) in [
            ("operation = \"read\"\nbanks = [\"body:/a/*\", \"path:x\", \"query:y\"]", true),
            ("operation = \"none\"", true),
            ("operation = \"read\"", false),
            ("operation = \"read\"\nbanks = [\"/a\"]", false),
            ("operation = \"read\"\nbanks = [\"body:a\"]", false),
            ("operation = \"list\"", false),
            ("operation = \"none\"\nbank = [\"body:/a\"]", false),
        ] {
            assert_eq!(with(&format!("{route}{rest}")).is_ok(), good, "{rest}");
        }
    }
}
