//! The machine: settings of the kernel, clock, resolvers.

use std::fs;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use audit::view::View;
use rules::operator::{Mode, Whose};

use super::{Files, Probe, Site, keep};
use crate::doctor::probe::Verdict;

const GROUP: &str = "machine";
/// Longest wait for a resolver.
const PATIENCE: Duration = Duration::from_secs(3);
/// How far a clock may be behind the newest record: records are written by more than one thread.
const BEHIND: i64 = 5;

pub(super) fn probes() -> Vec<Probe> {
    vec![
        Probe::new(
            GROUP,
            "machine.namespaces",
            "`sandbar run` can make jails here",
            "change the setting that is named",
            namespaces,
        ),
        Probe::new(
            GROUP,
            "machine.fwmark",
            "accepted connections keep their mark (net.ipv4.tcp_fwmark_accept)",
            "sysctl -w net.ipv4.tcp_fwmark_accept=1: a listener that knows sandboxes by mark needs it",
            fwmark,
        ),
        Probe::new(
            GROUP,
            "machine.rp-filter",
            "packets for tproxy are not dropped (net.ipv4.conf.*.rp_filter)",
            "sysctl -w net.ipv4.conf.all.rp_filter=2, and for the interfaces of the sandboxes",
            rp_filter,
        ),
        Probe::new(
            GROUP,
            "machine.spoofing",
            "sandboxes known by their address cannot take another's",
            "know sandboxes by interface, mark or a listener of their own instead of `source-address`",
            spoofing,
        ),
        Probe::new(
            GROUP,
            "machine.ipv6",
            "IPv6 is guarded like IPv4, or not there",
            "let transparent and dns listeners bind `[::]:PORT` too, or switch IPv6 off for the sandboxes",
            six,
        ),
        Probe::new(
            GROUP,
            "machine.clock",
            "the clock is right",
            "set the clock, and have it kept (chrony, systemd-timesyncd): certificates, grants and records count by it",
            clock,
        ),
        Probe::new(
            GROUP,
            "machine.resolvers",
            "the resolvers of `[dns]` answer",
            "correct `[dns] upstreams`, or let this machine reach them: names that are allowed are not resolved otherwise",
            resolvers,
        ),
    ]
}

/// A setting of the kernel.
fn setting(name: &str) -> Option<String> {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn namespaces(_: &Site) -> Verdict {
    match jail::forbidden_by() {
        None => Verdict::Fine("nothing is set that forbids it".to_owned()),
        Some(_) if nix::unistd::Uid::effective().is_root() => {
            Verdict::Fine("root needs no leave for it".to_owned())
        }
        Some(why) => Verdict::Wrong(why),
    }
}

fn fwmark(site: &Site) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if !files.knows_by_mark() {
        return Verdict::Fine("no listener knows sandboxes by mark".to_owned());
    }
    match setting("net.ipv4.tcp_fwmark_accept").as_deref() {
        Some("1") => Verdict::Fine("it is 1".to_owned()),
        Some(other) => Verdict::Wrong(format!("it is {other}")),
        None => Verdict::Unknown("it cannot be read".to_owned()),
    }
}

fn rp_filter(site: &Site) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.operator.listeners.iter().all(|listener| listener.mode != Mode::Tproxy) {
        return Verdict::Fine("no listener is tproxy".to_owned());
    }
    match setting("net.ipv4.conf.all.rp_filter").as_deref() {
        Some("1") => Verdict::Wrong("net.ipv4.conf.all.rp_filter is 1, which is strict".to_owned()),
        Some(other) => Verdict::Fine(format!("net.ipv4.conf.all.rp_filter is {other}")),
        None => Verdict::Unknown("it cannot be read".to_owned()),
    }
}

fn spoofing(site: &Site) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let by_address = |listener: &rules::operator::Listener| listener.whose == Whose::SourceAddress;
    match files.operator.listeners.iter().any(by_address) {
        false => Verdict::Fine("no listener believes addresses".to_owned()),
        true => Verdict::Unknown(
            "a listener believes source addresses: that no sandbox can take another's is to be seen to outside of Sandbar".to_owned(),
        ),
    }
}

fn six(site: &Site) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.transparent().next().is_none() {
        return Verdict::Fine("no listener is transparent: there is nothing to guard".to_owned());
    }
    match setting("net.ipv6.conf.all.disable_ipv6").as_deref() {
        None => return Verdict::Fine("the kernel has no IPv6".to_owned()),
        Some("1") => return Verdict::Fine("IPv6 is switched off".to_owned()),
        Some(_) => {}
    }
    let transparent: Vec<SocketAddr> =
        [Mode::Redirect, Mode::Tproxy].iter().flat_map(|mode| files.addresses(*mode)).collect();
    let given = files.transparent().any(|one| one.bind.iter().any(|bind| bind.address().is_none()));
    match (given, transparent.iter().any(SocketAddr::is_ipv6)) {
        (_, true) => Verdict::Fine("a transparent listener takes IPv6".to_owned()),
        (true, false) => Verdict::Unknown("sockets are passed on: theirs is not known".to_owned()),
        (false, false) => {
            Verdict::Wrong("IPv6 is on, and no transparent listener takes it".to_owned())
        }
    }
}

fn clock(site: &Site) -> Verdict {
    let now = jiff::Timestamp::now().as_second();
    let newest = site.files.as_ref().ok().and_then(newest_record);
    if let Some(newest) = newest.filter(|newest| now + BEHIND < *newest) {
        return Verdict::Wrong(format!("it is {} s behind the newest record", newest - now));
    }
    match sys::clock::is_synchronised() {
        Ok(true) => Verdict::Fine("it is kept by a time service".to_owned()),
        Ok(false) => {
            Verdict::Unknown("no time service keeps it, as far as the kernel knows".to_owned())
        }
        Err(error) => Verdict::Unknown(error.to_string()),
    }
}

/// When the newest record was written, in seconds.
fn newest_record(files: &Files) -> Option<i64> {
    let line = keep::newest_lines(&files.places.log).into_iter().next_back()?;
    let time: jiff::Timestamp = View::parse(&line)?.time_dt.parse().ok()?;
    Some(time.as_second())
}

fn resolvers(site: &Site) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    let Some(dns) = &files.operator.dns else {
        return Verdict::Wrong("there is no `[dns]` with `upstreams`".to_owned());
    };
    let zones = dns.zones.iter().flat_map(|zone| &zone.upstreams);
    let all: Vec<SocketAddr> = dns.upstreams.iter().chain(zones).copied().collect();
    let silent: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = all.iter().map(|to| (to, scope.spawn(|| answers(*to)))).collect();
        let told = asked.into_iter().filter_map(|(to, asked)| match asked.join() {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{to}: {error}")),
            Err(_) => Some(format!("{to}: not asked")),
        });
        told.collect()
    });
    match silent.is_empty() {
        true => Verdict::Fine(format!("{} of {} answer", all.len(), all.len())),
        false => Verdict::Wrong(silent.join("; ")),
    }
}

/// Asks for the servers of the root, which every resolver knows.
fn answers(to: SocketAddr) -> io::Result<()> {
    const QUERY: [u8; 17] = [0x5a, 0x6d, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(&QUERY)?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    match answer.get(..2) {
        Some([0x5a, 0x6d]) if length >= 12 => Ok(()),
        _ => Err(io::Error::other("it gave no answer that is one")),
    }
}
