//! The machine: kernel settings, clock, resolvers.

use std::fs;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use audit::view::RecordView;
use rules::configuration::{Attribution, ListenerMode};

use super::{ConfigFiles, DeploymentState, OutsideProbe, storage};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "machine";
/// Longest wait for a resolver.
const RESOLVER_TIMEOUT: Duration = Duration::from_secs(3);
/// Seconds the clock may be behind the newest record, since several threads write records.
const CLOCK_TOLERANCE: i64 = 5;

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "machine.namespaces",
            "`sandbar run` can create jails here",
            "change the named setting",
            probe_namespaces,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.fwmark",
            "accepted connections keep their mark (net.ipv4.tcp_fwmark_accept)",
            "sysctl -w net.ipv4.tcp_fwmark_accept=1: a listener that identifies sandboxes by mark needs it",
            probe_fwmark,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.rp-filter",
            "packets for tproxy are not dropped (net.ipv4.conf.*.rp_filter)",
            "sysctl -w net.ipv4.conf.all.rp_filter=2, and the same for the sandboxes' interfaces",
            probe_rp_filter,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.spoofing",
            "sandboxes identified by source address cannot spoof it",
            "identify sandboxes by interface, mark or dedicated listener instead of `source-address`",
            probe_spoofing,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.ipv6",
            "IPv6 is redirected like IPv4, or disabled",
            "bind transparent and dns listeners to `[::]:PORT` too, or disable IPv6 for the sandboxes",
            probe_ipv6,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.clock",
            "the clock is right",
            "set the clock and synchronise it (chrony, systemd-timesyncd): certificates, grants and records depend on it",
            probe_clock,
        ),
        OutsideProbe::new(
            GROUP,
            "machine.resolvers",
            "the resolvers of `[dns]` answer",
            "correct `[dns] upstreams`, or let this machine reach them: otherwise allowed names do not resolve",
            probe_resolvers,
        ),
    ]
}

/// Reads a sysctl.
fn read_sysctl(name: &str) -> Option<String> {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn probe_namespaces(_: &DeploymentState) -> ProbeVerdict {
    match jail::blocking_setting() {
        None => ProbeVerdict::Fine("no setting forbids it".to_owned()),
        Some(_) if nix::unistd::Uid::effective().is_root() => {
            ProbeVerdict::Fine("root does not need the setting".to_owned())
        }
        Some(why) => ProbeVerdict::Wrong(why),
    }
}

fn probe_fwmark(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if !files.identifies_by_mark() {
        return ProbeVerdict::Fine("no listener identifies sandboxes by mark".to_owned());
    }
    match read_sysctl("net.ipv4.tcp_fwmark_accept").as_deref() {
        Some("1") => ProbeVerdict::Fine("it is 1".to_owned()),
        Some(other) => ProbeVerdict::Wrong(format!("it is {other}")),
        None => ProbeVerdict::Unknown("the sysctl cannot be read".to_owned()),
    }
}

fn probe_rp_filter(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.configuration.listeners.iter().all(|listener| listener.mode != ListenerMode::Tproxy) {
        return ProbeVerdict::Fine("no listener is tproxy".to_owned());
    }
    match read_sysctl("net.ipv4.conf.all.rp_filter").as_deref() {
        Some("1") => ProbeVerdict::Wrong("net.ipv4.conf.all.rp_filter is 1 (strict)".to_owned()),
        Some(other) => ProbeVerdict::Fine(format!("net.ipv4.conf.all.rp_filter is {other}")),
        None => ProbeVerdict::Unknown("the sysctl cannot be read".to_owned()),
    }
}

fn probe_spoofing(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let by_address = |listener: &rules::configuration::ListenerSettings| {
        listener.attribution == Attribution::SourceAddress
    };
    match files.configuration.listeners.iter().any(by_address) {
        false => ProbeVerdict::Fine("no listener trusts source addresses".to_owned()),
        true => ProbeVerdict::Unknown(
            "a listener trusts source addresses; Sandbar cannot check that the network prevents spoofing"
                .to_owned(),
        ),
    }
}

fn probe_ipv6(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.transparent_listeners().next().is_none() {
        return ProbeVerdict::Fine("no transparent listener, so nothing is needed".to_owned());
    }
    match read_sysctl("net.ipv6.conf.all.disable_ipv6").as_deref() {
        None => return ProbeVerdict::Fine("the kernel has no IPv6".to_owned()),
        Some("1") => return ProbeVerdict::Fine("IPv6 is disabled".to_owned()),
        Some(_) => {}
    }
    let transparent: Vec<SocketAddr> = [ListenerMode::Redirect, ListenerMode::Tproxy]
        .iter()
        .flat_map(|mode| files.addresses(*mode))
        .collect();
    let inherited =
        files.transparent_listeners().any(|one| one.bind.iter().any(|bind| bind.address().is_none()));
    match (inherited, transparent.iter().any(SocketAddr::is_ipv6)) {
        (_, true) => ProbeVerdict::Fine("a transparent listener accepts IPv6".to_owned()),
        (true, false) => {
            ProbeVerdict::Unknown("sockets are inherited, so their addresses are unknown".to_owned())
        }
        (false, false) => {
            ProbeVerdict::Wrong("IPv6 is enabled, but no transparent listener accepts it".to_owned())
        }
    }
}

fn probe_clock(site: &DeploymentState) -> ProbeVerdict {
    let now = jiff::Timestamp::now().as_second();
    let newest = site.files.as_ref().ok().and_then(newest_record_time);
    if let Some(newest) = newest.filter(|newest| now + CLOCK_TOLERANCE < *newest) {
        return ProbeVerdict::Wrong(format!("the clock is {} s behind the newest record", newest - now));
    }
    match sys::clock::is_synchronised() {
        Ok(true) => ProbeVerdict::Fine("synchronised by a time service".to_owned()),
        Ok(false) => ProbeVerdict::Unknown("not synchronised, according to the kernel".to_owned()),
        Err(error) => ProbeVerdict::Unknown(error.to_string()),
    }
}

/// Time of the newest record, in seconds since 1970.
fn newest_record_time(files: &ConfigFiles) -> Option<i64> {
    let line = storage::newest_lines(&files.paths.log).into_iter().next_back()?;
    let time: jiff::Timestamp = RecordView::parse(&line)?.time_dt.parse().ok()?;
    Some(time.as_second())
}

fn probe_resolvers(site: &DeploymentState) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(dns) = &files.configuration.dns else {
        return ProbeVerdict::Wrong("`[dns] upstreams` is missing".to_owned());
    };
    let zones = dns.zones.iter().flat_map(|zone| &zone.upstreams);
    let all: Vec<SocketAddr> = dns.upstreams.iter().chain(zones).copied().collect();
    let silent: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = all.iter().map(|to| (to, scope.spawn(|| query_root(*to)))).collect();
        let failures = asked.into_iter().filter_map(|(to, asked)| match asked.join() {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{to}: {error}")),
            Err(_) => Some(format!("{to}: the query panicked")),
        });
        failures.collect()
    });
    match silent.is_empty() {
        true => ProbeVerdict::Fine(format!("{} of {} answer", all.len(), all.len())),
        false => ProbeVerdict::Wrong(silent.join("; ")),
    }
}

/// Queries the root name servers, which every resolver knows.
fn query_root(to: SocketAddr) -> io::Result<()> {
    const QUERY: [u8; 17] = [0x5a, 0x6d, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(RESOLVER_TIMEOUT))?;
    socket.send(&QUERY)?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    match answer.get(..2) {
        Some([0x5a, 0x6d]) if length >= 12 => Ok(()),
        _ => Err(io::Error::other("invalid response")),
    }
}
