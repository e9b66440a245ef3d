//! Where people keep credentials: the files and directories that the jail hides.
//!
//! What is hidden reads as empty, and the command can write there: both are in memory and end with the jail, so
//! programs that refresh a cache or a login there keep working.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Credentials in a home directory. A `*` is any one directory.
pub const HOME_CREDENTIALS: &[&str] = &[
    ".1password",
    ".aider.conf.yml",
    ".ansible/galaxy_token",
    ".aws",
    ".azure",
    ".bash_history",
    ".bash_sessions",
    ".bitcoin",
    ".boto",
    ".bundle/config",
    ".cache/chromium",
    ".cache/git/credential",
    ".cache/google-chrome",
    ".cache/huggingface/stored_tokens",
    ".cache/huggingface/token",
    ".cache/mozilla",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".cassandra/cqlshrc",
    ".cassandra/credentials",
    ".chef",
    ".circleci/cli.yml",
    ".claude.json",
    ".claude.json.backup",
    ".claude/.credentials.json",
    ".codeium/config.json",
    ".codex/.credentials.json",
    ".codex/auth.json",
    ".composer/auth.json",
    ".conda/aau_token",
    ".config/1Password",
    ".config/Bitwarden",
    ".config/Bitwarden CLI",
    ".config/BraveSoftware",
    ".config/JetBrains/*/c.kdbx",
    ".config/Microsoft",
    ".config/Mullvad VPN",
    ".config/NuGet/NuGet.Config",
    ".config/Signal",
    ".config/Slack",
    ".config/argocd",
    ".config/atlassian",
    ".config/chromium",
    ".config/composer/auth.json",
    ".config/configstore",
    ".config/containers/auth.json",
    ".config/cursor/auth.json",
    ".config/discord",
    ".config/doctl",
    ".config/flyctl",
    ".config/gcloud",
    ".config/gh",
    ".config/git/credentials",
    ".config/github-copilot",
    ".config/glab-cli",
    ".config/google-chrome",
    ".config/google-chrome-beta",
    ".config/google-chrome-unstable",
    ".config/goose/secrets.yaml",
    ".config/hcloud",
    ".config/helm/registry",
    ".config/helm/repositories.yaml",
    ".config/heroku",
    ".config/hub",
    ".config/huggingface",
    ".config/io.datasette.llm/keys.json",
    ".config/linode-cli",
    ".config/llm/keys.json",
    ".config/msmtp",
    ".config/neomutt",
    ".config/netlify",
    ".config/ngrok",
    ".config/op",
    ".config/openai",
    ".config/opera",
    ".config/pip/pip.conf",
    ".config/pulumi",
    ".config/pypoetry/auth.toml",
    ".config/rbw",
    ".config/rclone",
    ".config/scw",
    ".config/solana",
    ".config/sops",
    ".config/stripe",
    ".config/tea",
    ".config/vercel",
    ".config/vivaldi",
    ".config/yandex-browser",
    ".continue/.env",
    ".continue/config.json",
    ".continue/config.yaml",
    ".copilot/config.json",
    ".cursor/auth.json",
    ".cursor/mcp.json",
    ".databrickscfg",
    ".dbt/profiles.yml",
    ".digitalocean",
    ".docker",
    ".dockercfg",
    ".electrum",
    ".env",
    ".ethereum",
    ".fly/config.yml",
    ".gem/credentials",
    ".gemini/.env",
    ".gemini/google_accounts.json",
    ".gemini/mcp-oauth-tokens.json",
    ".gemini/oauth_creds.json",
    ".git-credentials",
    ".gnupg",
    ".gradle/gradle.properties",
    ".gsutil",
    ".helm/repository",
    ".heroku/credentials",
    ".histfile",
    ".huggingface/token",
    ".ivy2/.credentials",
    ".jira.d",
    ".julia/servers",
    ".jupyter/jupyter_server_config.json",
    ".kaggle/kaggle.json",
    ".kube",
    ".local/share/TelegramDesktop",
    ".local/share/atuin",
    ".local/share/com.vercel.cli",
    ".local/share/fish/fish_history",
    ".local/share/keyrings",
    ".local/share/kwalletd",
    ".local/share/opencode/auth.json",
    ".local/share/opencode/mcp-auth.json",
    ".local/share/pypoetry/auth.toml",
    ".local/share/rbw",
    ".local/share/uv/credentials",
    ".local/share/zed/credentials",
    ".m2/settings-security.xml",
    ".m2/settings.xml",
    ".mc/config.json",
    ".minikube/profiles",
    ".minio/certs",
    ".mozilla",
    ".msmtprc",
    ".muttrc",
    ".my.cnf",
    ".mylogin.cnf",
    ".mysql_history",
    ".netlify/config.json",
    ".netrc",
    ".ngrok2/ngrok.yml",
    ".node_repl_history",
    ".npmrc",
    ".nuget/NuGet/NuGet.Config",
    ".oci",
    ".ollama/id_ed25519",
    ".openai",
    ".passwd-s3fs",
    ".password-store",
    ".pgpass",
    ".pip/pip.conf",
    ".pki",
    ".psql_history",
    ".pulumi/credentials.json",
    ".pypirc",
    ".python_history",
    ".qwen/oauth_creds.json",
    ".rclone.conf",
    ".rediscli_history",
    ".s3cfg",
    ".sbt/.credentials",
    ".sentryclirc",
    ".snowflake",
    ".snowsql",
    ".solana/id.json",
    ".sqlite_history",
    ".ssh",
    ".step/secrets",
    ".streamlit/secrets.toml",
    ".subversion/auth",
    ".terraform.d/credentials.tfrc.json",
    ".terraformrc",
    ".thunderbird",
    ".var/app/*/.mozilla",
    ".var/app/*/config/chromium",
    ".var/app/*/config/google-chrome",
    ".vault-token",
    ".viminfo",
    ".wakatime.cfg",
    ".yarnrc.yml",
    ".zhistory",
    ".zsh_history",
    ".zsh_sessions",
    "snap/chromium/common/chromium",
    "snap/firefox/common/.mozilla",
];
/// Credentials of the machine, which root could read.
pub const SYSTEM_CREDENTIALS: &[&str] = &[
    "/etc/NetworkManager/system-connections",
    "/etc/docker/certs.d",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/krb5.keytab",
    "/etc/kubernetes",
    "/etc/letsencrypt",
    "/etc/mysql/debian.cnf",
    "/etc/openvpn",
    "/etc/ppp/chap-secrets",
    "/etc/ppp/pap-secrets",
    "/etc/rancher",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/ssl/private",
    "/etc/wireguard",
    "/var/lib/kubelet",
];
/// Variables that name another place for credentials, and what is below it.
const RELOCATIONS: &[(&str, &str)] = &[
    ("AWS_CONFIG_FILE", ""),
    ("AWS_SHARED_CREDENTIALS_FILE", ""),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", ""),
    ("AZURE_CONFIG_DIR", ""),
    ("CARGO_HOME", "credentials"),
    ("CARGO_HOME", "credentials.toml"),
    ("CLAUDE_CONFIG_DIR", ".claude.json"),
    ("CLAUDE_CONFIG_DIR", ".credentials.json"),
    ("CLOUDSDK_CONFIG", ""),
    ("CODEX_HOME", ".credentials.json"),
    ("CODEX_HOME", "auth.json"),
    ("DOCKER_CONFIG", ""),
    ("GH_CONFIG_DIR", ""),
    ("GNUPGHOME", ""),
    ("GOOGLE_APPLICATION_CREDENTIALS", ""),
    ("HF_HOME", "stored_tokens"),
    ("HF_HOME", "token"),
    ("HF_TOKEN_PATH", ""),
    ("HISTFILE", ""),
    ("NETRC", ""),
    ("NPM_CONFIG_USERCONFIG", ""),
    ("PASSWORD_STORE_DIR", ""),
    ("PGPASSFILE", ""),
    ("PIP_CONFIG_FILE", ""),
    ("RCLONE_CONFIG", ""),
    ("TF_CLI_CONFIG_FILE", ""),
    ("npm_config_userconfig", ""),
];
/// Variables that name another place for a directory of the home directory.
const XDG_DIRS: &[(&str, &str)] =
    &[("XDG_CACHE_HOME", ".cache/"), ("XDG_CONFIG_HOME", ".config/"), ("XDG_DATA_HOME", ".local/share/")];
/// Most directories that one `*` stands for.
const MAX_EXPANDED: usize = 256;

/// Returns the paths of [`HOME_CREDENTIALS`] in a home directory. They need not exist.
pub fn home_credentials(home: &Path) -> Vec<PathBuf> {
    HOME_CREDENTIALS.iter().flat_map(|name| expand(home, name)).collect()
}

/// Returns the paths of [`SYSTEM_CREDENTIALS`]. They need not exist.
pub(super) fn system_credentials() -> impl Iterator<Item = PathBuf> {
    SYSTEM_CREDENTIALS.iter().map(PathBuf::from)
}

/// Returns the paths of credentials to which variables of the caller lead.
pub fn relocated_credentials(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let dir = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let named = RELOCATIONS.iter().filter_map(|(name, below)| {
        let dir = dir(name)?;
        Some(if below.is_empty() { dir } else { dir.join(below) })
    });
    // KUBECONFIG is a list, as PATH is.
    let lists = variable("KUBECONFIG").map(|list| std::env::split_paths(&list).collect::<Vec<_>>());
    let in_xdg = XDG_DIRS.iter().filter_map(|(name, prefix)| Some((dir(name)?, *prefix)));
    let in_xdg = in_xdg.flat_map(|(dir, prefix)| {
        let names = HOME_CREDENTIALS.iter().filter_map(move |name| name.strip_prefix(prefix));
        names.flat_map(move |name| expand(&dir, name))
    });
    let all = named.chain(lists.into_iter().flatten()).chain(in_xdg);
    // A whole home directory or more is not a place of credentials, whatever a variable says.
    let sensible = |path: &PathBuf| path.is_absolute() && path.components().count() > 3;
    all.filter(sensible).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the paths that a name with `*` stands for in a directory.
fn expand(dir: &Path, name: &str) -> Vec<PathBuf> {
    let Some((before, after)) = name.split_once("*/") else { return vec![dir.join(name)] };
    let entries = fs::read_dir(dir.join(before)).into_iter().flatten().flatten().take(MAX_EXPANDED);
    entries.map(|entry| entry.path().join(after)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_without_duplicates_and_no_entry_is_below_another() {
        for list in [HOME_CREDENTIALS, SYSTEM_CREDENTIALS] {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
            for entry in list {
                let below = |other: &&&str| Path::new(other).starts_with(entry) && *other != entry;
                assert_eq!(list.iter().find(below), None, "below {entry}");
            }
        }
        assert!(RELOCATIONS.is_sorted_by(|one, other| one < other));
        assert!(HOME_CREDENTIALS.len() >= 120, "{}", HOME_CREDENTIALS.len());
    }

    #[test]
    fn a_star_is_any_one_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(".config/JetBrains/Idea")).unwrap();
        let found = expand(dir.path(), ".config/JetBrains/*/c.kdbx");
        assert_eq!(found, [dir.path().join(".config/JetBrains/Idea/c.kdbx")]);
        assert_eq!(expand(dir.path(), "none/*/x"), Vec::<PathBuf>::new());
        assert_eq!(expand(dir.path(), ".ssh"), [dir.path().join(".ssh")]);
    }

    #[test]
    fn variables_that_move_credentials_are_followed() {
        let given = |name: &str| -> Option<OsString> {
            Some(match name {
                "CARGO_HOME" => "/srv/ann/cargo".into(),
                "KUBECONFIG" => "/srv/ann/one:/srv/ann/two".into(),
                "NETRC" => "relative".into(),
                "DOCKER_CONFIG" => "/home/ann".into(),
                "XDG_CONFIG_HOME" => "/srv/ann/etc".into(),
                _ => return None,
            })
        };
        let found = relocated_credentials(given);
        for (path, wanted) in [
            ("/srv/ann/cargo/credentials.toml", true),
            ("/srv/ann/one", true),
            ("/srv/ann/two", true),
            ("/srv/ann/etc/gh", true),
            ("/srv/ann/etc/git/credentials", true),
            ("/srv/ann/etc/git/config", false),
            ("relative", false),
            ("/home/ann", false),
        ] {
            assert_eq!(found.contains(&PathBuf::from(path)), wanted, "{path}");
        }
    }
}
