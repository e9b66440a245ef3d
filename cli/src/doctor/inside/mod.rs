//! Inside a sandbox: every way around Sandbar that a process can try by itself.

mod agreement;
mod control;
mod datagrams;
mod evidence;
mod files;
mod machine;
mod names;
mod namespaces;
mod processes;
mod protocols;
mod sockets;
mod streams;
mod tls;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;

use super::probe::{self, Verdict};
use super::report::Report;
use super::{DoctorArgs, UsageError, in_jail};

/// Public addresses that answer everybody: TCP 53, 80, 443 and 853, UDP 53 and 443, ICMP.
const WITNESS: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);
const WITNESS6: Ipv6Addr = Ipv6Addr::new(0x2606, 0x4700, 0x4700, 0, 0, 0, 0, 0x1111);
/// A resolver that answers everybody, and on port 9953 too.
const RESOLVER: Ipv4Addr = Ipv4Addr::new(9, 9, 9, 9);
const RESOLVER6: Ipv6Addr = Ipv6Addr::new(0x2620, 0xfe, 0, 0, 0, 0, 0, 0xfe);

type Probe = probe::Probe<Ground>;

/// Whereto ways around are tried.
pub(super) struct Ground {
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

impl Ground {
    fn of(args: &DoctorArgs) -> Self {
        let four = args.witness.iter().find_map(|address| match address {
            IpAddr::V4(four) => Some(*four),
            IpAddr::V6(_) => None,
        });
        let six = args.witness.iter().find_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(six) => Some(*six),
        });
        Ground {
            allowed: args.allowed.clone(),
            denied: args.denied.clone(),
            four: four.unwrap_or(WITNESS),
            six: six.unwrap_or(WITNESS6),
            resolver: four.unwrap_or(RESOLVER),
            resolver6: six.unwrap_or(RESOLVER6),
            hidden: args.path.clone(),
            kept: args.policy.clone(),
            home: std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
            jail: in_jail(),
        }
    }
}

/// Everything that is tried, in the order in which it is told.
fn probes(ground: &Ground) -> Vec<Probe> {
    [
        streams::probes(ground),
        tls::probes(ground),
        names::probes(),
        datagrams::probes(ground),
        protocols::probes(),
        control::probes(),
        namespaces::probes(),
        sockets::probes(),
        files::probes(ground),
        processes::probes(),
        machine::probes(),
        agreement::probes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Tries everything.
pub(super) fn examine(args: &DoctorArgs) -> anyhow::Result<Report> {
    let started = Instant::now();
    let ground = Ground::of(args);
    let findings = probe::try_apart(&probes(&ground))?;
    let evidence = evidence::collect(&ground);
    Ok(Report { side: "inside", findings, evidence, took: started.elapsed() })
}

/// Tries one thing, and says what it came to as JSON.
pub(super) fn one(args: &DoctorArgs, name: &str) -> anyhow::Result<ExitCode> {
    let ground = Ground::of(args);
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
enum Presence {
    /// Silence means that nothing arrived.
    Answers,
    /// Silence may mean that nobody is there.
    Perhaps,
}

impl Presence {
    /// What it means that a send or a connect failed.
    fn failed(self, error: &std::io::Error) -> Verdict {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        let silent =
            matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock);
        match self {
            Presence::Perhaps if refused => {
                Verdict::Unknown("it was refused, by a firewall or by whoever is there".to_owned())
            }
            Presence::Perhaps if silent => {
                Verdict::Unknown("nothing came back: it may have left all the same".to_owned())
            }
            Presence::Answers if silent => {
                Verdict::Blocked("nothing came back from one who answers everybody".to_owned())
            }
            Presence::Answers | Presence::Perhaps => Verdict::Blocked(error.to_string()),
        }
    }
}

/// The verdict on something that only a privilege allows: refused for want of it, or not.
fn privileged(result: std::io::Result<impl Sized>, gained: &str) -> Verdict {
    match result {
        Ok(_) => Verdict::Escaped(gained.to_owned()),
        Err(error) => match error.raw_os_error() {
            Some(
                libc::EPERM
                | libc::EACCES
                | libc::ENOSYS
                | libc::EAFNOSUPPORT
                | libc::EOPNOTSUPP
                | libc::EPROTONOSUPPORT,
            ) => Verdict::Blocked(error.to_string()),
            _ => Verdict::Escaped(format!("{gained} (the kernel minded only: {error})")),
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
        let probes = probes(&Ground::of(&args));
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
        let blocked = |verdict: &Verdict| matches!(verdict, Verdict::Blocked(_));
        for (error, answers, perhaps) in [
            (libc::EPERM, true, true),
            (libc::ENETUNREACH, true, true),
            (libc::ECONNREFUSED, true, false),
            (libc::ETIMEDOUT, true, false),
            (libc::EAGAIN, true, false),
        ] {
            assert_eq!(blocked(&Presence::Answers.failed(&of(error))), answers, "{error}");
            assert_eq!(blocked(&Presence::Perhaps.failed(&of(error))), perhaps, "{error}");
        }
    }
}
