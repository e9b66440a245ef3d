//! The environment of the command: the caller's, without variables that lead out of the jail or hold credentials.

use std::ffi::OsString;

/// Environment variables that name sockets, or proxies that are unreachable from inside.
const DROPPED_VARIABLES: &[&str] = &[
    "ALL_PROXY",
    "CONTAINERD_ADDRESS",
    "CONTAINER_HOST",
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "DISPLAY",
    "DOCKER_HOST",
    "FTP_PROXY",
    "GNOME_KEYRING_CONTROL",
    "GPG_AGENT_INFO",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "I3SOCK",
    "KITTY_LISTEN_ON",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "NO_PROXY",
    "PULSE_SERVER",
    "SSH_AGENT_PID",
    "SSH_AUTH_SOCK",
    "STY",
    "SWAYSOCK",
    "TMPDIR",
    "TMUX",
    "TMUX_PANE",
    "VSCODE_GIT_IPC_HANDLE",
    "VSCODE_IPC_HOOK_CLI",
    "WAYLAND_DISPLAY",
    "WAYLAND_SOCKET",
    "XAUTHORITY",
];
/// Variables that hold credentials, besides those that end as in [`CREDENTIAL_ENDINGS`].
const CREDENTIAL_VARIABLES: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_BEARER_TOKEN_BEDROCK",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "BUNDLE_GITHUB__COM",
    "BW_SESSION",
    "CI_JOB_JWT",
    "COMPOSER_AUTH",
    "DOCKER_AUTH_CONFIG",
    "GIT_ASKPASS",
    "GIT_CONFIG_PARAMETERS",
    "KUBECONFIG",
    "MYSQL_PWD",
    "NETRC",
    "OPENCODE_AUTH_CONTENT",
    "PGPASSFILE",
    "PGPASSWORD",
    "RCLONE_CONFIG_PASS",
    "REDISCLI_AUTH",
    "RESTIC_PASSWORD_FILE",
    "SLACK_WEBHOOK_URL",
    "SSHPASS",
    "SSH_ASKPASS",
    "SUDO_ASKPASS",
];
/// How names of variables with credentials end.
const CREDENTIAL_ENDINGS: &[&str] = &[
    "_ACCESS_KEY",
    "_API_KEY",
    "_APIKEY",
    "_APP_KEY",
    "_AUTHTOKEN",
    "_AUTH_KEY",
    "_CREDENTIALS",
    "_PASSPHRASE",
    "_PASSWD",
    "_PASSWORD",
    "_PAT",
    "_PRIVATE_KEY",
    "_SECRET",
    "_SECRET_KEY",
    "_SERVICE_KEY",
    "_SIGNING_KEY",
    "_TOKEN",
];

/// Returns whether a variable holds or leads to a credential, by its name.
pub fn is_credential_variable(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    CREDENTIAL_VARIABLES.contains(&name.as_str())
        || CREDENTIAL_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns the environment of the command: `given` without variables that lead out of the jail, and `added`.
pub fn command_environment(
    given: impl Iterator<Item = (OsString, OsString)>,
    added: Vec<(String, String)>,
) -> Vec<(OsString, OsString)> {
    let leads_out = |name: &OsString| {
        let name = name.to_string_lossy().to_ascii_uppercase();
        DROPPED_VARIABLES.contains(&name.as_str()) || name.starts_with("SANDBAR")
    };
    let mut environment: Vec<_> = given.filter(|(name, _)| !leads_out(name)).collect();
    for (name, value) in added {
        environment.retain(|(known, _)| *known != *name);
        environment.push((name.into(), value.into()));
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_lead_out_are_dropped() {
        let given = [("PATH", "/bin"), ("SSH_AUTH_SOCK", "/x"), ("https_proxy", "http://p"), ("A", "1")];
        let given = given.iter().map(|(name, value)| (name.into(), value.into()));
        let environment = command_environment(given, vec![("A".to_owned(), "2".to_owned())]);
        let wanted: Vec<(OsString, OsString)> =
            vec![("PATH".into(), "/bin".into()), ("A".into(), "2".into())];
        assert_eq!(environment, wanted);
    }

    #[test]
    fn variables_of_credentials_are_known_by_their_names() {
        for (name, wanted) in [
            ("ANTHROPIC_API_KEY", true),
            ("AWS_SECRET_ACCESS_KEY", true),
            ("AWS_REGION", false),
            ("CLAUDE_CODE_OAUTH_TOKEN", true),
            ("GITHUB_TOKEN", true),
            ("GITHUB_ACTIONS", false),
            ("HOME", false),
            ("KEY", false),
            ("MAX_TOKENS", false),
            ("PATH", false),
            ("npm_config__authtoken", true),
            ("openai_api_key", true),
            ("PGPASSWORD", true),
        ] {
            assert_eq!(is_credential_variable(name), wanted, "{name}");
        }
    }

    #[test]
    fn lists_are_sorted_without_duplicates() {
        let redundant = |name: &&&str| CREDENTIAL_ENDINGS.iter().any(|ending| name.ends_with(ending));
        assert_eq!(CREDENTIAL_VARIABLES.iter().find(redundant), None);
        for list in [DROPPED_VARIABLES, CREDENTIAL_VARIABLES] {
            assert!(list.is_sorted_by(|one, other| one < other), "{list:?}");
        }
    }
}
