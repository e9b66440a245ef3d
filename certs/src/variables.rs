//! The environment variables that point the tools in a sandbox to the authority.
//!
//! Each was tested with the tool itself where possible; variables that a tool ignores are not set.

use std::path::{Path, PathBuf};

use crate::bundle::{BUNDLE_FILE, CA_FILE, PHP_DIR, STORE_FILE, WGETRC_FILE};
use crate::pkcs12;

/// A path that some tool would misread.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: the path must be absolute and contain only letters, digits, `/`, `.`, `-` and `_`, because tools split it at other characters", .0.display())]
pub struct BundlePathError(PathBuf);

/// The file that a variable points at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VariableTarget {
    /// For tools that add to their own store.
    AuthorityOnly,
    /// For tools that replace their own store.
    Everything,
    Java,
    Php,
    Wget,
}

/// The variable, its target, and the tools that read it.
const VARIABLES: [(&str, VariableTarget, &str); 23] = [
    ("AWS_CA_BUNDLE", VariableTarget::Everything, "AWS command line, botocore"),
    ("BUNDLE_SSL_CA_CERT", VariableTarget::Everything, "Ruby's Bundler"),
    ("CARGO_HTTP_CAINFO", VariableTarget::Everything, "cargo"),
    ("CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE", VariableTarget::Everything, "Google Cloud command line"),
    ("COMPOSER_CAFILE", VariableTarget::Everything, "PHP's Composer"),
    ("CURL_CA_BUNDLE", VariableTarget::Everything, "curl, Python requests"),
    ("DENO_CERT", VariableTarget::AuthorityOnly, "Deno"),
    ("GIT_SSL_CAINFO", VariableTarget::Everything, "git"),
    ("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", VariableTarget::Everything, "gRPC (C core: Python, Ruby, PHP)"),
    ("HEX_CACERTS_PATH", VariableTarget::Everything, "Elixir's Hex"),
    ("HTTPLIB2_CA_CERTS", VariableTarget::Everything, "Python httplib2"),
    ("JAVA_TOOL_OPTIONS", VariableTarget::Java, "Java, Maven, Gradle"),
    ("JULIA_SSL_CA_ROOTS_PATH", VariableTarget::Everything, "Julia"),
    ("NIX_SSL_CERT_FILE", VariableTarget::Everything, "Nix"),
    ("NODE_EXTRA_CA_CERTS", VariableTarget::AuthorityOnly, "Node, npm, Yarn, Bun"),
    ("npm_config_cafile", VariableTarget::Everything, "npm, where its settings name a `cafile`"),
    ("PERL_LWP_SSL_CA_FILE", VariableTarget::Everything, "Perl's LWP"),
    ("PHP_INI_SCAN_DIR", VariableTarget::Php, "PHP"),
    ("PIP_CERT", VariableTarget::Everything, "pip"),
    ("REQUESTS_CA_BUNDLE", VariableTarget::Everything, "Python requests, pip, conda, Poetry"),
    ("SSL_CERT_FILE", VariableTarget::Everything, "OpenSSL, Go, Rust, Ruby, Python ssl and httpx, uv"),
    ("WGETRC", VariableTarget::Wget, "GNU Wget, also where it is built with GnuTLS"),
    ("YARN_HTTPS_CA_FILE_PATH", VariableTarget::Everything, "Yarn 2 and newer"),
];

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VariableFormat {
    /// Lines for `docker run --env-file`, which takes quotes literally.
    Docker,
    /// Lines for a `.env` file.
    Dotenv,
    /// The `env` list of a container.
    Kubernetes,
    /// Lines for `eval` in any POSIX shell.
    Shell,
}

/// Returns every variable and its value, for a sandbox that sees the bundle in `dir`.
pub fn variables(dir: &Path) -> Result<Vec<(&'static str, String)>, BundlePathError> {
    let dir = check_path(dir)?;
    Ok(VARIABLES.iter().map(|(name, target, _)| (*name, target.value(dir))).collect())
}

/// Returns the tools that read the variable `name`.
pub fn variable_readers(name: &str) -> Option<&'static str> {
    VARIABLES.iter().find(|(known, _, _)| *known == name).map(|(_, _, readers)| *readers)
}

/// Renders `variables` as text.
pub fn render(variables: &[(&'static str, String)], format: VariableFormat) -> String {
    variables.iter().map(|(name, value)| format_line(name, value, format)).collect()
}

impl VariableTarget {
    fn value(self, dir: &str) -> String {
        match self {
            Self::AuthorityOnly => format!("{dir}/{CA_FILE}"),
            Self::Everything => format!("{dir}/{BUNDLE_FILE}"),
            Self::Java => format!(
                "-Djavax.net.ssl.trustStore={dir}/{STORE_FILE} -Djavax.net.ssl.trustStoreType=PKCS12 \
                 -Djavax.net.ssl.trustStorePassword={}",
                pkcs12::PASSWORD
            ),
            // The empty entry keeps PHP's own directory in the list.
            Self::Php => format!(":{dir}/{PHP_DIR}"),
            Self::Wget => format!("{dir}/{WGETRC_FILE}"),
        }
    }
}

/// Formats one variable. Values need no escaping: paths contain no quote, dollar sign or newline.
fn format_line(name: &str, value: &str, format: VariableFormat) -> String {
    match format {
        VariableFormat::Docker => format!("{name}={value}\n"),
        VariableFormat::Dotenv => format!("{name}=\"{value}\"\n"),
        VariableFormat::Kubernetes => format!("- name: {name}\n  value: \"{value}\"\n"),
        VariableFormat::Shell => format!("export {name}='{value}'\n"),
    }
}

/// Returns `path` as text that no tool splits or expands.
pub(crate) fn check_path(path: &Path) -> Result<&str, BundlePathError> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"/.-_".contains(&b);
    let text = path.to_str().filter(|text| text.starts_with('/') && text.bytes().all(allowed));
    text.map(|text| text.trim_end_matches('/')).ok_or_else(|| BundlePathError(path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_sorted_and_unique() {
        let names: Vec<String> = VARIABLES.iter().map(|(name, _, _)| name.to_ascii_uppercase()).collect();
        let mut sorted = names.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(names, sorted);
    }

    #[test]
    fn paths_that_a_tool_would_misread_are_refused() {
        for (path, good) in [
            ("/etc/sandbar/trust", true),
            ("/etc/sandbar/trust/", true),
            ("relative", false),
            ("/with space", false),
            ("/with:colon", false),
            ("/with'quote", false),
            ("/with\"quote", false),
            ("/with$dollar", false),
            ("/with\nnewline", false),
            ("/mit/Ümlaut", false),
            ("", false),
        ] {
            assert_eq!(variables(Path::new(path)).is_ok(), good, "{path:?}");
        }
    }

    #[test]
    fn every_form_is_what_its_reader_takes() {
        let one = [("PIP_CERT", "/t/bundle.pem".to_owned())];
        for (format, text) in [
            (VariableFormat::Docker, "PIP_CERT=/t/bundle.pem\n"),
            (VariableFormat::Dotenv, "PIP_CERT=\"/t/bundle.pem\"\n"),
            (VariableFormat::Kubernetes, "- name: PIP_CERT\n  value: \"/t/bundle.pem\"\n"),
            (VariableFormat::Shell, "export PIP_CERT='/t/bundle.pem'\n"),
        ] {
            assert_eq!(render(&one, format), text, "{format:?}");
        }
    }
}
