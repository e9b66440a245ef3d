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

/// Public addresses that answer everybody: TCP 53, 80, 443 and 853, UDP 53 and 443, ICMP.
const WITNESS: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);
const WITNESS6: Ipv6Addr = Ipv6Addr::new(0x2606, 0x4700, 0x4700, 0, 0, 0, 0, 0x1111);
/// A resolver that answers everybody, and on port 9953 too.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);
const RESOLVER6: Ipv6Addr = Ipv6Addr::new(0x2620, 0xfe, 0, 0, 0, 0, 0, 0xfe);

type InsideProbe = probe::DoctorProbe<ProbeTargets>;

/// Whereto ways around are tried.
pub(super) struct ProbeTargets {
    /// A host that the policy allows, if one is known.
    allowed: Option<String>,
    /// A host that it does not.
    denied: String,
    /// Somebody outside who answers.
    four: Ipv4Addr,
    six: Ipv6Addr,
    resolver: Ipv4Addr,
    resolver6: Ipv6Addr,
    /// What must be neither read nor written.
    hidden: Vec<PathBuf>,
    /// What must not be written.
    kept: Vec<PathBuf>,
    home: Option<PathBuf>,
    /// A jail of `sandbar run`, whose files are the caller's own.
    jail: bool,
}

impl ProbeTargets {
    fn from_args(args: &DoctorArgs) -> Self {
        let four = args.witness.iter().find_map(|address| match address {
            IpAddr::V4(four) => Some(*four),
            IpAddr::V6(_) => None,
        });
        let six = args.witness.iter().find_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(six) => Some(*six),
        });
        ProbeTargets {
            allowed: args.allowed.clone(),
            denied: args.denied.clone(),
            four: four.unwrap_or(WITNESS),
            six: six.unwrap_or(WITNESS6),
            resolver: four.unwrap_or(RESOLVER),
            resolver6: six.unwrap_or(RESOLVER6),
            hidden: args.path.clone(),
            kept: args.policy.clone(),
            home: std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
            jail: is_in_jail(),
        }
    }
}

/// Everything that is tried, in the order in which it is told.
fn probes(ground: &ProbeTargets) -> Vec<InsideProbe> {
    [
        tcp::probes(ground),
        tls::probes(ground),
        dns::probes(),
        udp::probes(ground),
        protocols::probes(),
        network_config::probes(),
        namespaces::probes(),
        unix_sockets::probes(),
        files::probes(ground),
        processes::probes(),
        machine::probes(),
        host_mismatch::probes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Tries everything.
pub(super) fn examine(args: &DoctorArgs) -> anyhow::Result<DoctorReport> {
    let started = Instant::now();
    let ground = ProbeTargets::from_args(args);
    let findings = probe::run_isolated(&probes(&ground))?;
    let evidence = evidence::collect(&ground);
    Ok(DoctorReport { side: "inside", findings, evidence, took: started.elapsed() })
}

/// Tries one thing, and says what it came to as JSON.
pub(super) fn run_probe(args: &DoctorArgs, name: &str) -> anyhow::Result<ExitCode> {
    let ground = ProbeTargets::from_args(args);
    let probes = probes(&ground);
    let Some(probe) = probes.iter().find(|probe| probe.name == name) else {
        bail!(UsageError(format!("there is no probe `{name}`")));
    };
    let verdict = (probe.run)(&ground);
    anstream::println!("{}", serde_json::to_string(&verdict)?);
    Ok(ExitCode::SUCCESS)
}

/// Whether it is sure that somebody is there, and would answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerPresence {
    /// Silence means that nothing arrived.
    Answers,
    /// Silence may mean that nobody is there.
    Perhaps,
}

impl PeerPresence {
    /// What it means that a send or a connect failed.
    fn judge_failure(self, error: &std::io::Error) -> ProbeVerdict {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        let silent =
            matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock);
        match self {
            PeerPresence::Perhaps if refused => ProbeVerdict::Unknown(
                "it was refused, by a firewall or by whoever is there".to_owned(),
            ),
            PeerPresence::Perhaps if silent => {
                ProbeVerdict::Unknown("nothing came back: it may have left all the same".to_owned())
            }
            PeerPresence::Answers if silent => {
                ProbeVerdict::Blocked("nothing came back from one who answers everybody".to_owned())
            }
            PeerPresence::Answers | PeerPresence::Perhaps => {
                ProbeVerdict::Blocked(error.to_string())
            }
        }
    }
}

/// The verdict on something that only a privilege allows: refused for want of it, or not.
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
            _ => ProbeVerdict::Escaped(format!("{gained} (the kernel minded only: {error})")),
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
        assert_eq!(names.len(), count, "a name stands twice");
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
            assert_eq!(
                blocked(&PeerPresence::Answers.judge_failure(&of(error))),
                answers,
                "{error}"
            );
            assert_eq!(
                blocked(&PeerPresence::Perhaps.judge_failure(&of(error))),
                perhaps,
                "{error}"
            );
        }
    }
}
