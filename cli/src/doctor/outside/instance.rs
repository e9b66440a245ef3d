//! The running instance: whether it is there, and what it may do.

use std::fs;

use rules::compile;
use rules::configuration::ListenerMode;
use serde_json::Value;

use super::{DeploymentState, OutsideProbe};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "instance";
/// The number of CAP_NET_ADMIN (capabilities(7)).
const NET_ADMIN: u32 = 12;
/// Descriptors that one connection can take: its own, its origin's, and a pipe between them each way.
const FDS_PER_CONNECTION: u64 = 2;

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "instance.files",
            "the operator's file and its policies",
            "see `sandbar check`: it says the line",
            probe_files,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.ready",
            "it runs and is ready",
            "start it: `sandbar serve -c sandbar.toml`; it says on stderr why it does not serve",
            probe_ready,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.policy",
            "the policies on disk are those in force",
            "correct the policies: `sandbar check` says the line; until then the last good ones count",
            probe_policy,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.log",
            "the log is written",
            "make room, or correct the permissions of the log's directory: nothing is served unrecorded",
            probe_log,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.privileges",
            "it has the privileges that its listeners need",
            "give it CAP_NET_ADMIN (`AmbientCapabilities=CAP_NET_ADMIN`, `capabilities: add: [NET_ADMIN]`): transparent listeners and marks need it",
            probe_privileges,
        ),
        OutsideProbe::new(
            GROUP,
            "instance.descriptors",
            "it may open as many files as `[limits] connections` needs",
            "raise it (`LimitNOFILE=65536`, `ulimit -n`), or lower `[limits] connections`",
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
                ProbeVerdict::Fine(format!(
                    "{policies} policies, digest {}",
                    rules.digest().short()
                ))
            }
            Err(problems) => {
                ProbeVerdict::Wrong(format!("{} problems in the policies", problems.len()))
            }
        },
    }
}

fn probe_ready(site: &DeploymentState) -> ProbeVerdict {
    if let Err(unknown) = site.files() {
        return unknown;
    }
    match &site.told {
        Err(why) => ProbeVerdict::Wrong(why.clone()),
        Ok(told) if told.get("ready").and_then(Value::as_bool) == Some(true) => {
            let seconds = told.get("uptime_seconds").and_then(Value::as_u64).unwrap_or_default();
            ProbeVerdict::Fine(format!("ready, up {seconds} s"))
        }
        Ok(_) => ProbeVerdict::Wrong("it runs and is not ready".to_owned()),
    }
}

/// What the instance says of itself, or the verdict that nobody says anything.
fn instance_status(site: &DeploymentState) -> Result<&Value, ProbeVerdict> {
    site.told.as_ref().map_err(|_| ProbeVerdict::Unknown("it does not run".to_owned()))
}

fn probe_policy(site: &DeploymentState) -> ProbeVerdict {
    let told = match instance_status(site) {
        Ok(told) => told,
        Err(unknown) => return unknown,
    };
    let generation = told.pointer("/policy/generation").and_then(Value::as_u64);
    match told.pointer("/policy/trouble").and_then(Value::as_str) {
        Some(trouble) => ProbeVerdict::Wrong(trouble.lines().next().unwrap_or_default().to_owned()),
        None => ProbeVerdict::Fine(format!("generation {}", generation.unwrap_or_default())),
    }
}

fn probe_log(site: &DeploymentState) -> ProbeVerdict {
    let told = match instance_status(site) {
        Ok(told) => told,
        Err(unknown) => return unknown,
    };
    let number = |at: &str| told.pointer(at).and_then(Value::as_u64).unwrap_or_default();
    let (lost, refused) = (number("/log/lost"), number("/log/refused"));
    match told.pointer("/log/trouble").and_then(Value::as_str) {
        Some(trouble) => ProbeVerdict::Wrong(trouble.to_owned()),
        None if lost + refused > 0 => ProbeVerdict::Wrong(format!(
            "{lost} records were lost, {refused} attempts refused for want of it"
        )),
        None => {
            ProbeVerdict::Fine(format!("{} records written, none lost", number("/log/written")))
        }
    }
}

fn probe_privileges(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let tproxy =
        files.operator.listeners.iter().any(|listener| listener.mode == ListenerMode::Tproxy);
    if !tproxy && files.operator.upstream.mark.is_none() && !files.identifies_by_mark() {
        return ProbeVerdict::Fine("they need none".to_owned());
    }
    let Some(process) = site.process else {
        return ProbeVerdict::Unknown("it does not run".to_owned());
    };
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
    let held = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    match held.and_then(|held| u64::from_str_radix(held.trim(), 16).ok()) {
        Some(held) if held >> NET_ADMIN & 1 == 1 => {
            ProbeVerdict::Fine("it has CAP_NET_ADMIN".to_owned())
        }
        Some(_) => ProbeVerdict::Wrong("it has no CAP_NET_ADMIN".to_owned()),
        None => ProbeVerdict::Unknown(format!("/proc/{}/status cannot be read", process.pid)),
    }
}

fn probe_descriptors(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(process) = site.process else {
        return ProbeVerdict::Unknown("it does not run".to_owned());
    };
    let limits = fs::read_to_string(format!("/proc/{}/limits", process.pid)).unwrap_or_default();
    let needed = files.operator.limits.connections * FDS_PER_CONNECTION;
    match open_file_limit(&limits) {
        Some(most) if most >= needed => {
            ProbeVerdict::Fine(format!("{most} files, {needed} are needed"))
        }
        Some(most) => ProbeVerdict::Wrong(format!(
            "{most} files, but {} connections need {needed}",
            files.operator.limits.connections
        )),
        None => ProbeVerdict::Unknown(format!("/proc/{}/limits cannot be read", process.pid)),
    }
}

/// The soft limit of open files in a `/proc/PID/limits`.
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
    fn limits_are_read() {
        let text = "Limit Soft Hard Units\nMax open files            1024      4096      files\n";
        assert_eq!(open_file_limit(text), Some(1024));
        assert_eq!(open_file_limit("Max open files   unlimited unlimited files"), Some(u64::MAX));
        assert_eq!(open_file_limit(""), None);
    }
}
