//! Keys, certificates and file permissions.

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
/// Mode bits of group and others.
const OTHERS_MODE: u32 = 0o077;
/// Mode bit that lets others write.
const WORLD_WRITABLE: u32 = 0o002;
/// Programs, and the variable through which each finds the CA certificate.
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
            "create a new one (`sandbar ca init --dir DIR`), write its bundle (`sandbar ca bundle`), and restart",
            probe_authority,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.bundle",
            "the trust bundle exists and is current",
            "write it with `sandbar ca bundle --dir DIR --force`, mount it into the sandboxes, and set the variables of `sandbar ca env --dir DIR`",
            probe_bundle,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.tools",
            "the files that installed tools read (`sandbar ca env`) exist",
            "write the bundle with `sandbar ca bundle --dir DIR --force`",
            probe_tools,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.private",
            "only the owner can access keys and credentials",
            "chmod 600 FILE",
            probe_private_files,
        ),
        OutsideProbe::new(
            GROUP,
            "keys.policies",
            "others cannot write policies and configuration",
            "chmod o-w FILE",
            probe_writable_policies,
        ),
    ]
}

fn needs_authority(files: &ConfigFiles) -> bool {
    files.configuration.listeners.iter().any(|listener| listener.mode != ListenerMode::Dns)
}

/// Opens the authority of an instance that has one.
fn open_authority(site: &DeploymentState) -> Result<(&ConfigFiles, CertificateAuthority), ProbeVerdict> {
    let files = site.files()?;
    if !needs_authority(files) {
        return Err(ProbeVerdict::Fine("no listener needs one".to_owned()));
    }
    let dir = &files.paths.ca;
    if !dir.exists() {
        return Err(ProbeVerdict::Unknown(format!("{} is created at the first start", dir.display())));
    }
    let opened = CertificateAuthority::open(dir, UnixTime::now());
    opened.map(|authority| (files, authority)).map_err(|error| ProbeVerdict::Wrong(error.to_string()))
}

fn probe_authority(site: &DeploymentState) -> ProbeVerdict {
    let (_, authority) = match open_authority(site) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let info = authority.describe();
    let left = info.valid_to_unix.saturating_sub(UnixTime::now().as_secs());
    let days = left / Duration::from_secs(86_400).as_secs();
    match left < EXPIRY_WARNING.as_secs() {
        true => ProbeVerdict::Wrong(format!("it expires in {days} days, at {}", info.valid_to)),
        false => ProbeVerdict::Fine(format!("valid to {}, for {days} days", info.valid_to)),
    }
}

/// Like `open_authority`, for checks that need it: an error is `Unknown`, since `keys.authority` reports it.
fn usable_authority(site: &DeploymentState) -> Result<(&ConfigFiles, CertificateAuthority), ProbeVerdict> {
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
    let path = match trust_dir(&files.paths.ca) {
        Ok(dir) => dir.join(BUNDLE_FILE),
        Err(error) => return ProbeVerdict::Unknown(format!("{error:#}")),
    };
    let shown = path.display();
    match fs::read_to_string(&path) {
        Err(error) => ProbeVerdict::Unknown(format!("{shown}: {error}; the bundle may be elsewhere")),
        Ok(text) if !strip_whitespace(&text).contains(&strip_whitespace(&authority.anchor_pem())) => {
            ProbeVerdict::Wrong(format!("{shown} belongs to another authority"))
        }
        Ok(_) => ProbeVerdict::Fine(format!("{shown} contains the CA certificate")),
    }
}

/// PEM without white space, since writers break lines differently.
fn strip_whitespace(text: &str) -> String {
    text.split_whitespace().collect()
}

/// For every installed program that reads one of the variables, the named file must exist.
fn probe_tools(site: &DeploymentState) -> ProbeVerdict {
    let (files, _) = match usable_authority(site) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let named = trust_dir(&files.paths.ca).map(|dir| variables::variables(&dir));
    let Ok(Ok(named)) = named else {
        return ProbeVerdict::Wrong(format!("tools misread the path {}", files.paths.ca.display()));
    };
    let installed: Vec<&(&str, &str)> = TOOLS.iter().filter(|(tool, _)| is_installed(tool)).collect();
    let missing: Vec<&str> = installed
        .iter()
        .filter(|(_, variable)| {
            let value = named.iter().find(|(name, _)| name == variable).map(|(_, value)| value);
            !value.is_some_and(|value| names_a_file(value))
        })
        .map(|(tool, _)| *tool)
        .collect();
    let all = installed.iter().map(|(tool, _)| *tool).collect::<Vec<_>>().join(", ");
    match missing.is_empty() {
        true => ProbeVerdict::Fine(format!("found by {all}")),
        false => ProbeVerdict::Unknown(format!("missing for {}", missing.join(", "))),
    }
}

fn is_installed(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

/// Whether the first path in the value of a variable exists.
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
    let credentials = files.configuration.credentials.iter().flat_map(|one| one.source.files());
    let credentials = credentials.map(|file| files.resolve(file));
    let services = files.configuration.memory_services.iter().filter_map(|one| match &one.proof {
        ServiceAuthSettings::Token { key, .. } => Some(files.resolve(key)),
        ServiceAuthSettings::ApiKey { .. } | ServiceAuthSettings::Principal(_) => None,
    });
    let secrets = [files.paths.ca.join("ca.key"), files.paths.socket.clone()];
    judge_modes(secrets.into_iter().chain(credentials).chain(services), OTHERS_MODE, "others can access")
}

fn probe_writable_policies(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let named = files.sources.policies.iter().map(|file| PathBuf::from(&file.path));
    let lists = files.sources.lists.keys().map(PathBuf::from);
    let places = [files.config.clone(), files.paths.log.clone(), files.paths.ca.clone()];
    let all: Vec<PathBuf> = places.into_iter().chain(named).chain(lists).collect();
    // Write access to a directory is enough to replace the files in it.
    let dirs = all.iter().filter_map(|path| path.parent()).map(Path::to_owned);
    let dirs = dirs.map(|dir| if dir.as_os_str().is_empty() { ".".into() } else { dir });
    judge_modes(all.clone().into_iter().chain(dirs), WORLD_WRITABLE, "others can write")
}

fn judge_modes(paths: impl Iterator<Item = PathBuf>, mask: u32, finding: &str) -> ProbeVerdict {
    let mut checked = 0;
    let mut loose = Vec::new();
    for path in paths {
        let Ok(metadata) = fs::metadata(&path) else { continue };
        checked += 1;
        // In a sticky directory such as /tmp, only the owner of a file can replace it.
        let sticky = metadata.is_dir() && metadata.permissions().mode() & 0o1000 != 0;
        if metadata.permissions().mode() & mask != 0 && !sticky {
            let mode = metadata.permissions().mode() & 0o777;
            loose.push(format!("{finding} {} (mode {mode:o})", path.display()));
        }
    }
    loose.dedup();
    match loose.is_empty() {
        true => ProbeVerdict::Fine(format!("{checked} checked")),
        false => ProbeVerdict::Wrong(loose.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_named_by_variables_are_found() {
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
