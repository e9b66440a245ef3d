//! The running instance: whether it runs, and with which privileges and limits.

use std::fs;

use rules::compile;
use rules::configuration::ListenerMode;
use serde_json::Value;

use super::{DeploymentState, OutsideProbe};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "instance";
/// The number of CAP_NET_ADMIN (capabilities(7)).
const NET_ADMIN: u32 = 12;
/// File descriptors of a connection: the client's and the upstream's. A tunnel takes a pipe only while bytes flow, and
/// copies if it gets none.
const FDS_PER_CONNECTION: u64 = 2;

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "instance.files",
            "the configuration and its policies are valid",
            "run `sandbar check`, which names the line",
            probe_files,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.ready",
            "the instance runs and is ready",
            "start it with `sandbar serve -c sandbar.toml`, and read the reason on stderr if it fails",
            probe_ready,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.policy",
            "the policies on disk are those in force",
            "correct the policies (`sandbar check` names the line); until then the last valid ones stay in force",
            probe_policy,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.log",
            "the log is being written",
            "free disk space, or correct the permissions of the log directory: Sandbar refuses what it cannot record",
            probe_log,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.privileges",
            "the instance has the privileges that its listeners need",
            "grant CAP_NET_ADMIN (`AmbientCapabilities=CAP_NET_ADMIN`, `capabilities: add: [NET_ADMIN]`): transparent listeners and marks need it",
            probe_privileges,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.descriptors",
            "the open file limit covers `[limits] connections`",
            "raise the limit (`LimitNOFILE=65536`, `ulimit -n`), or lower `[limits] connections`",
            probe_descriptors,
        ),
    ]
}

fn probe_files(site: &DeploymentState) -> ProbeVerdict {
    match &site.files {
        Err(why) => ProbeVerdict::Wrong(why.clone()),
        Ok(files) => match compile(&files.sources, &[]) {
            Ok(rules) => {
                let policies = rules.policies().count();
                ProbeVerdict::Fine(format!("{policies} policies, digest {}", rules.digest().short()))
            }
            Err(problems) => ProbeVerdict::Wrong(format!("{} problems in the policies", problems.len())),
        },
    }
}

fn probe_ready(site: &DeploymentState) -> ProbeVerdict {
    if let Err(unknown) = site.files() {
        return unknown;
    }
    match &site.status {
        Err(why) => ProbeVerdict::Wrong(why.clone()),
        Ok(status) if status.get("ready").and_then(Value::as_bool) == Some(true) => {
            let seconds = status.get("uptime_seconds").and_then(Value::as_u64).unwrap_or_default();
            ProbeVerdict::Fine(format!("ready, up {seconds} s"))
        }
        Ok(_) => ProbeVerdict::Wrong("running, but not ready".to_owned()),
    }
}

/// Returns the status of the instance, or `Unknown` if it is not running.
fn instance_status(site: &DeploymentState) -> Result<&Value, ProbeVerdict> {
    site.status.as_ref().map_err(|_| ProbeVerdict::Unknown("not running".to_owned()))
}

fn probe_policy(site: &DeploymentState) -> ProbeVerdict {
    let status = match instance_status(site) {
        Ok(status) => status,
        Err(unknown) => return unknown,
    };
    let generation = status.pointer("/policy/generation").and_then(Value::as_u64);
    match status.pointer("/policy/trouble").and_then(Value::as_str) {
        Some(trouble) => ProbeVerdict::Wrong(trouble.lines().next().unwrap_or_default().to_owned()),
        None => ProbeVerdict::Fine(format!("generation {}", generation.unwrap_or_default())),
    }
}

fn probe_log(site: &DeploymentState) -> ProbeVerdict {
    let status = match instance_status(site) {
        Ok(status) => status,
        Err(unknown) => return unknown,
    };
    let number = |at: &str| status.pointer(at).and_then(Value::as_u64).unwrap_or_default();
    let (lost, refused) = (number("/log/lost"), number("/log/refused"));
    match status.pointer("/log/trouble").and_then(Value::as_str) {
        Some(trouble) => ProbeVerdict::Wrong(trouble.to_owned()),
        None if lost + refused > 0 => ProbeVerdict::Wrong(format!(
            "{lost} records lost, {refused} attempts refused because the log was unavailable"
        )),
        None => ProbeVerdict::Fine(format!("{} records written, none lost", number("/log/written"))),
    }
}

fn probe_privileges(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let tproxy = files.configuration.listeners.iter().any(|listener| listener.mode == ListenerMode::Tproxy);
    if !tproxy && files.configuration.upstream.mark.is_none() && !files.identifies_by_mark() {
        return ProbeVerdict::Fine("no listener needs any".to_owned());
    }
    let Some(process) = site.process else {
        return ProbeVerdict::Unknown("not running".to_owned());
    };
    let proc_status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
    let held = proc_status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    match held.and_then(|held| u64::from_str_radix(held.trim(), 16).ok()) {
        Some(held) if held >> NET_ADMIN & 1 == 1 => {
            ProbeVerdict::Fine("CAP_NET_ADMIN is effective".to_owned())
        }
        Some(_) => ProbeVerdict::Wrong("CAP_NET_ADMIN is missing".to_owned()),
        None => ProbeVerdict::Unknown(format!("cannot read /proc/{}/status", process.pid)),
    }
}

fn probe_descriptors(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(process) = site.process else {
        return ProbeVerdict::Unknown("not running".to_owned());
    };
    let limits = fs::read_to_string(format!("/proc/{}/limits", process.pid)).unwrap_or_default();
    let needed = files.configuration.limits.connections * FDS_PER_CONNECTION;
    match open_file_limit(&limits) {
        Some(max) if max >= needed => ProbeVerdict::Fine(format!("{max} files, {needed} needed")),
        Some(max) => ProbeVerdict::Wrong(format!(
            "{max} files, but {} connections need {needed}",
            files.configuration.limits.connections
        )),
        None => ProbeVerdict::Unknown(format!("cannot read /proc/{}/limits", process.pid)),
    }
}

/// Parses the soft limit of open files in `/proc/PID/limits`.
fn open_file_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed() {
        let text = "Limit Soft Hard Units\nMax open files            1024      4096      files\n";
        assert_eq!(open_file_limit(text), Some(1024));
        assert_eq!(open_file_limit("Max open files   unlimited unlimited files"), Some(u64::MAX));
        assert_eq!(open_file_limit(""), None);
    }
}
