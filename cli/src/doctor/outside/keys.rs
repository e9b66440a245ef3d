//! Keys, certificates, and who may read what.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use certs::bundle::BUNDLE_FILE;
use certs::{CertificateAuthority, UnixTime, variables};
use rules::configuration::{ListenerMode, ServiceAuthSettings};

use super::{ConfigFiles, DeploymentState, OutsideProbe};
use crate::ca::{EXPIRY_WARNING, trust_dir};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "keys";
/// Of a file's mode: read, written or run by anybody but its owner.
const OTHERS_MODE: u32 = 0o077;
/// Of a file's mode: written by anybody but its owner and its group.
const WORLD_WRITABLE: u32 = 0o002;
/// Programs by the variable through which they find the authority.
const TOOLS: [(&str, &str); 12] = [
    ("aws", "AWS_CA_BUNDLE"),
    ("cargo", "CARGO_HTTP_CAINFO"),
    ("curl", "CURL_CA_BUNDLE"),
    ("deno", "DENO_CERT"),
    ("git", "GIT_SSL_CAINFO"),
    ("go", "SSL_CERT_FILE"),
    ("java", "JAVA_TOOL_OPTIONS"),
    ("node", "NODE_EXTRA_CA_CERTS"),
    ("php", "PHP_INI_SCAN_DIR"),
    ("pip", "PIP_CERT"),
    ("python3", "REQUESTS_CA_BUNDLE"),
    ("wget", "WGETRC"),
];

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "keys.authority",
            "the certificate authority is valid",
            "make a new one (`sandbar ca init --dir DIR`), write its bundle (`sandbar ca bundle`), and restart",
            probe_authority,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.bundle",
            "sandboxes can trust it: the bundle is written and current",
            "write it: `sandbar ca bundle --dir DIR --force`, mount it into the sandboxes, and set what `sandbar ca env --dir DIR` says",
            probe_bundle,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.tools",
            "programs find it, by `sandbar ca env`",
            "write the bundle: `sandbar ca bundle --dir DIR --force`",
            probe_tools,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.private",
            "keys and credentials are their owner's alone",
            "chmod 600 FILE",
            probe_private_files,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.policies",
            "only their owner writes policies and settings",
            "chmod o-w FILE",
            probe_writable_policies,
        ),
    ]
}

fn needs_authority(files: &ConfigFiles) -> bool {
    files.operator.listeners.iter().any(|listener| listener.mode != ListenerMode::Dns)
}

/// The authority of an instance that has one.
fn open_authority(
    site: &DeploymentState,
) -> Result<(&ConfigFiles, CertificateAuthority), ProbeVerdict> {
    let files = site.files()?;
    if !needs_authority(files) {
        return Err(ProbeVerdict::Fine("no listener needs one".to_owned()));
    }
    let dir = &files.places.ca;
    if !dir.exists() {
        return Err(ProbeVerdict::Unknown(format!("{} is made at the first start", dir.display())));
    }
    let opened = CertificateAuthority::open(dir, UnixTime::now());
    opened
        .map(|authority| (files, authority))
        .map_err(|error| ProbeVerdict::Wrong(error.to_string()))
}

fn probe_authority(site: &DeploymentState) -> ProbeVerdict {
    let (_, authority) = match open_authority(site) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let found = authority.describe();
    let left = found.valid_to_unix.saturating_sub(UnixTime::now().as_secs());
    let days = left / Duration::from_secs(86_400).as_secs();
    match left < EXPIRY_WARNING.as_secs() {
        true => ProbeVerdict::Wrong(format!("it ends in {days} days, at {}", found.valid_to)),
        false => ProbeVerdict::Fine(format!("valid to {}, for {days} days", found.valid_to)),
    }
}

/// The same for what makes no sense without it; that it is not good is said once.
fn usable_authority(
    site: &DeploymentState,
) -> Result<(&ConfigFiles, CertificateAuthority), ProbeVerdict> {
    open_authority(site).map_err(|verdict| match verdict.is_bad() {
        true => ProbeVerdict::Unknown("the authority cannot be opened".to_owned()),
        false => verdict,
    })
}

fn probe_bundle(site: &DeploymentState) -> ProbeVerdict {
    let (files, authority) = match usable_authority(site) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let path = match trust_dir(&files.places.ca) {
        Ok(dir) => dir.join(BUNDLE_FILE),
        Err(error) => return ProbeVerdict::Unknown(format!("{error:#}")),
    };
    let shown = path.display();
    match fs::read_to_string(&path) {
        Err(error) => {
            ProbeVerdict::Unknown(format!("{shown}: {error}; it may have been written elsewhere"))
        }
        Ok(text)
            if !strip_whitespace(&text).contains(&strip_whitespace(&authority.anchor_pem())) =>
        {
            ProbeVerdict::Wrong(format!("{shown} is of another authority"))
        }
        Ok(_) => ProbeVerdict::Fine(format!("{shown} has it")),
    }
}

/// PEM without line ends, which writers set as they like.
fn strip_whitespace(text: &str) -> String {
    text.split_whitespace().collect()
}

/// For every program here that reads one of our variables, whether what it names is there.
fn probe_tools(site: &DeploymentState) -> ProbeVerdict {
    let (files, _) = match usable_authority(site) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let named = trust_dir(&files.places.ca).map(|dir| variables::variables(&dir));
    let Ok(Ok(named)) = named else {
        return ProbeVerdict::Wrong(format!(
            "{} is a path that tools misread",
            files.places.ca.display()
        ));
    };
    let here: Vec<&(&str, &str)> = TOOLS.iter().filter(|(tool, _)| is_installed(tool)).collect();
    let lost: Vec<&str> = here
        .iter()
        .filter(|(_, variable)| {
            let value = named.iter().find(|(name, _)| name == variable).map(|(_, value)| value);
            !value.is_some_and(|value| names_a_file(value))
        })
        .map(|(tool, _)| *tool)
        .collect();
    let all = here.iter().map(|(tool, _)| *tool).collect::<Vec<_>>().join(", ");
    match lost.is_empty() {
        true => ProbeVerdict::Fine(format!("{all} do")),
        false => {
            ProbeVerdict::Unknown(format!("{} would not: the files are not there", lost.join(", ")))
        }
    }
}

fn is_installed(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

/// Whether the first path in the value of a variable is there.
fn names_a_file(value: &str) -> bool {
    let from = value.find('/').unwrap_or_default();
    let path = value.get(from..).and_then(|rest| rest.split_whitespace().next());
    path.is_some_and(|path| Path::new(path).exists())
}

fn probe_private_files(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let credentials = files.operator.credentials.iter().map(|one| files.resolve(&one.file));
    let services = files.operator.memory_services.iter().filter_map(|one| match &one.proof {
        ServiceAuthSettings::Token { key, .. } => Some(files.resolve(key)),
        ServiceAuthSettings::ApiKey { .. } | ServiceAuthSettings::Principal(_) => None,
    });
    let own = [files.places.ca.join("ca.key"), files.places.socket.clone()];
    judge_modes(own.into_iter().chain(credentials).chain(services), OTHERS_MODE, "others may use")
}

fn probe_writable_policies(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let named = files.sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = files.sources.lists.keys().map(PathBuf::from);
    let places = [files.config.clone(), files.places.log.clone(), files.places.ca.clone()];
    let all: Vec<PathBuf> = places.into_iter().chain(named).chain(lists).collect();
    // Whoever may write a directory may put another file in place of the one there.
    let dirs = all.iter().filter_map(|path| path.parent()).map(Path::to_owned);
    let dirs = dirs.map(|dir| if dir.as_os_str().is_empty() { ".".into() } else { dir });
    judge_modes(all.clone().into_iter().chain(dirs), WORLD_WRITABLE, "others may write")
}

fn judge_modes(paths: impl Iterator<Item = PathBuf>, mask: u32, may: &str) -> ProbeVerdict {
    let mut looked_at = 0;
    let mut loose = Vec::new();
    for path in paths {
        let Ok(found) = fs::metadata(&path) else { continue };
        looked_at += 1;
        // A directory in which only owners may remove, as /tmp is, lets nobody replace a file.
        let sticky = found.is_dir() && found.permissions().mode() & 0o1000 != 0;
        if found.permissions().mode() & mask != 0 && !sticky {
            let mode = found.permissions().mode() & 0o777;
            loose.push(format!("{may} {} (mode {mode:o})", path.display()));
        }
    }
    loose.dedup();
    match loose.is_empty() {
        true => ProbeVerdict::Fine(format!("{looked_at} looked at")),
        false => ProbeVerdict::Wrong(loose.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_variable_names_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("bundle.pem");
        fs::write(&file, "").unwrap();
        let shown = file.display();
        for (value, there) in [
            (format!("{shown}"), true),
            (format!("-Djavax.net.ssl.trustStore={shown} -Dx=PKCS12"), true),
            (format!(":{}", dir.path().display()), true),
            (format!("{shown}.none"), false),
            (String::new(), false),
        ] {
            assert_eq!(names_a_file(&value), there, "{value}");
        }
    }
}
