//! Inside a sandbox: every way around Sandbar that a process can try by itself.

mod dns;
mod evidence;
mod files;
mod host_mismatch;
mod machine;
mod namespaces;
mod network_config;
mod processes;
mod protocols;
mod tcp;
mod tls;
mod udp;
mod unix_sockets;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;

use super::probe::{self, ProbeVerdict};
use super::report::DoctorReport;
use super::{DoctorArgs, UsageError, is_in_jail};

/// Public addresses that answer everyone: TCP 53, 80, 443 and 853, UDP 53 and 443, ICMP.
const WITNESS: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);
const WITNESS6: Ipv6Addr = Ipv6Addr::new(0x2606, 0x4700, 0x4700, 0, 0, 0, 0, 0x1111);
/// A resolver that answers everyone, also on port 9953.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);
const RESOLVER6: Ipv6Addr = Ipv6Addr::new(0x2620, 0xfe, 0, 0, 0, 0, 0, 0xfe);

type InsideProbe = probe::DoctorProbe<ProbeTargets>;

/// The targets of the attempts.
pub(super) struct ProbeTargets {
    /// A host that the policy allows, if one is known.
    allowed: Option<String>,
    /// A host that the policy denies.
    denied: String,
    /// Addresses outside that answer.
    ipv4: Ipv4Addr,
    ipv6: Ipv6Addr,
    resolver: Ipv4Addr,
    resolver6: Ipv6Addr,
    /// Paths that must be neither readable nor writable.
    hidden: Vec<PathBuf>,
    /// Paths that must not be writable.
    read_only: Vec<PathBuf>,
    home: Option<PathBuf>,
    /// Whether this is a jail of `sandbar run`, whose files are the caller's.
    jail: bool,
}

impl ProbeTargets {
    fn from_args(args: &DoctorArgs) -> Self {
        let ipv4 = args.witness.iter().find_map(|witness| match witness {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        });
        let ipv6 = args.witness.iter().find_map(|witness| match witness {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(*address),
        });
        ProbeTargets {
            allowed: args.allowed.clone(),
            denied: args.denied.clone(),
            ipv4: ipv4.unwrap_or(WITNESS),
            ipv6: ipv6.unwrap_or(WITNESS6),
            resolver: ipv4.unwrap_or(RESOLVER),
            resolver6: ipv6.unwrap_or(RESOLVER6),
            hidden: args.path.clone(),
            read_only: args.policy.clone(),
            home: std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
            jail: is_in_jail(),
        }
    }
}

/// All probes, in the order of the report.
fn probes(targets: &ProbeTargets) -> Vec<InsideProbe> {
    [
        tcp::probes(targets),
        tls::probes(targets),
        dns::probes(),
        udp::probes(targets),
        protocols::probes(),
        network_config::probes(),
        namespaces::probes(),
        unix_sockets::probes(),
        files::probes(targets),
        processes::probes(),
        machine::probes(),
        host_mismatch::probes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Runs all probes and collects the evidence.
pub(super) fn examine(args: &DoctorArgs) -> anyhow::Result<DoctorReport> {
    let started = Instant::now();
    let targets = ProbeTargets::from_args(args);
    let findings = probe::run_isolated(&probes(&targets))?;
    let evidence = evidence::collect(&targets);
    Ok(DoctorReport { side: "inside", findings, evidence, took: started.elapsed() })
}

/// Runs one probe and prints its verdict as JSON.
pub(super) fn run_probe(args: &DoctorArgs, name: &str) -> anyhow::Result<ExitCode> {
    let targets = ProbeTargets::from_args(args);
    let probes = probes(&targets);
    let Some(probe) = probes.iter().find(|probe| probe.name == name) else {
        bail!(UsageError(format!("unknown probe `{name}`")));
    };
    let verdict = (probe.run)(&targets);
    anstream::println!("{}", serde_json::to_string(&verdict)?);
    Ok(ExitCode::SUCCESS)
}

/// Whether the target is known to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerPresence {
    /// It answers everyone: silence means that nothing arrived.
    Answers,
    /// It may not exist: silence proves nothing.
    Perhaps,
}

impl PeerPresence {
    /// The verdict on a failed send or connect.
    fn judge_failure(self, error: &std::io::Error) -> ProbeVerdict {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        let silent = matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock);
        match self {
            PeerPresence::Perhaps if refused => {
                ProbeVerdict::Unknown("refused, by a firewall or by the target".to_owned())
            }
            PeerPresence::Perhaps if silent => {
                ProbeVerdict::Unknown("no answer: it may have left the sandbox all the same".to_owned())
            }
            PeerPresence::Answers if silent => {
                ProbeVerdict::Blocked("no answer from a target that answers everyone".to_owned())
            }
            PeerPresence::Answers | PeerPresence::Perhaps => ProbeVerdict::Blocked(error.to_string()),
        }
    }
}

/// The verdict on a privileged operation: blocked if the error is a missing privilege, escaped otherwise.
fn judge_privileged(result: std::io::Result<impl Sized>, gained: &str) -> ProbeVerdict {
    match result {
        Ok(_) => ProbeVerdict::Escaped(gained.to_owned()),
        Err(error) => match error.raw_os_error() {
            Some(
                libc::EPERM
                | libc::EACCES
                | libc::ENOSYS
                | libc::EAFNOSUPPORT
                | libc::EOPNOTSUPP
                | libc::EPROTONOSUPPORT,
            ) => ProbeVerdict::Blocked(error.to_string()),
            _ => ProbeVerdict::Escaped(format!(
                "{gained} (the kernel objected only to the arguments: {error})"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_probe_has_a_fix() {
        let args = DoctorArgs {
            inside: true,
            outside: false,
            config: None,
            allowed: None,
            denied: "denied.example".to_owned(),
            witness: Vec::new(),
            path: Vec::new(),
            policy: Vec::new(),
            probe: None,
        };
        let probes = probes(&ProbeTargets::from_args(&args));
        let mut names: Vec<&str> = probes.iter().map(|probe| probe.name.as_str()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name occurs twice");
        assert!(probes.iter().all(|probe| !probe.fix.is_empty() && !probe.what.is_empty()));
    }

    #[test]
    fn a_failure_is_blocked_only_where_it_must_be() {
        let of = std::io::Error::from_raw_os_error;
        let blocked = |verdict: &ProbeVerdict| matches!(verdict, ProbeVerdict::Blocked(_));
        for (error, answers, perhaps) in [
            (libc::EPERM, true, true),
            (libc::ENETUNREACH, true, true),
            (libc::ECONNREFUSED, true, false),
            (libc::ETIMEDOUT, true, false),
            (libc::EAGAIN, true, false),
        ] {
            assert_eq!(blocked(&PeerPresence::Answers.judge_failure(&of(error))), answers, "{error}");
            assert_eq!(blocked(&PeerPresence::Perhaps.judge_failure(&of(error))), perhaps, "{error}");
        }
    }
}
