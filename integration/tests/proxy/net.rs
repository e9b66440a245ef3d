//! Namespaces joined by cables: sandboxes, their gateway, and a world that has every address there is, so
//! that whatever leaves the gateway arrives there and is seen.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

/// The gateway's address towards a sandbox, and the sandbox's own.
pub(crate) fn sandbox_addresses(sandbox: usize) -> [String; 4] {
    [
        format!("10.77.{sandbox}.1"),
        format!("10.77.{sandbox}.2"),
        format!("fd77:{sandbox}::1"),
        format!("fd77:{sandbox}::2"),
    ]
}

/// The gateway's interface towards a sandbox.
pub(crate) fn interface_name(sandbox: usize) -> String {
    format!("sandbox{sandbox}")
}

/// How the gateway's firewall brings connections to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirewallMode {
    Redirect,
    Tproxy,
}

/// A namespace, removed with everything in it when this is dropped.
#[derive(Debug)]
pub(crate) struct NetNamespace {
    pub(crate) name: String,
}

impl NetNamespace {
    fn new(name: String) -> Self {
        run_ip(&["netns", "add", &name], "");
        let namespace = NetNamespace { name };
        namespace.ip("link set lo up\n");
        namespace
    }

    /// Runs `ip` commands inside, one a line.
    pub(crate) fn ip(&self, lines: &str) {
        run_ip(&["-n", &self.name, "-batch", "-"], lines);
    }

    /// The same for what has no address in it to tell the version by.
    pub(crate) fn ip6(&self, lines: &str) {
        run_ip(&["-6", "-n", &self.name, "-batch", "-"], lines);
    }

    /// A thread's work inside; what it opens stays inside.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.name);
        let inside = move || {
            enter_namespace(&File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}")));
            work()
        };
        std::thread::scope(|scope| {
            scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A program inside.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]).stdin(Stdio::null());
        command
    }

    /// Sets a kernel setting of this namespace alone.
    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        let set = self.enter(|| fs::write(&path, value));
        set.unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// Loads firewall rules.
    pub(crate) fn nft(&self, rules: &str) {
        run_with_input(self.command("nft").args(["-f", "-"]), rules);
    }
}

impl Drop for NetNamespace {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["netns", "del", &self.name]).status());
    }
}

fn enter_namespace(namespace: &File) {
    let moved = nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET);
    moved.expect("cannot enter a namespace");
}

fn run_ip(args: &[&str], lines: &str) {
    run_with_input(Command::new("ip").args(args), lines);
}

fn run_with_input(command: &mut Command, input: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "network namespaces need root: {command:?}\n{input}\n{said}");
    output
}

/// What was sent to the world: protocol, address, port.
pub(crate) type SentPacket = (String, IpAddr, u16);

/// The whole network.
#[derive(Debug)]
pub(crate) struct TestNetwork {
    pub(crate) gateway: NetNamespace,
    pub(crate) sandboxes: Vec<NetNamespace>,
    pub(crate) world: NetNamespace,
}

impl TestNetwork {
    pub(crate) fn new(sandboxes: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let namespace = |what: &str| NetNamespace::new(format!("sandbar-{id}-{what}"));
        let (gateway, world) = (namespace("gateway"), namespace("world"));
        let sandboxes: Vec<_> = (0..sandboxes).map(|at| namespace(&format!("s{at}"))).collect();
        let net = TestNetwork { gateway, sandboxes, world };
        net.connect_namespaces();
        net.watch_world();
        net
    }

    fn connect_namespaces(&self) {
        let (gateway, world) = (&self.gateway, &self.world);
        let cable = |one: (&str, &str), other: (&str, &str)| {
            let (name, at) = one;
            let (peer, there) = other;
            let line = format!("link add {name} netns {at} type veth peer name {peer} netns {there}");
            run_ip(&line.split(' ').collect::<Vec<_>>(), "");
        };
        cable(("world", &gateway.name), ("gateway", &world.name));
        gateway.sysctl("net.ipv4.ip_forward", "1");
        gateway.sysctl("net.ipv6.conf.all.forwarding", "1");
        gateway
            .ip("addr add 10.78.0.1/24 dev world\naddr add fd78::1/64 dev world nodad\nlink set world up\n\
             route add default via 10.78.0.2\nroute add ::/0 via fd78::2\n");
        // Every address is the world's own but those on the cable, by which answers go back.
        world.ip(
            "addr add 10.78.0.2/24 dev gateway\naddr add fd78::2/64 dev gateway nodad\nlink set gateway up\n\
             route add 10.78.0.0/24 dev gateway table local\nroute add local 0.0.0.0/0 dev lo table local\n",
        );
        world.ip6("rule add iif gateway lookup 100\nroute add local default dev lo table 100\n");
        for (at, sandbox) in self.sandboxes.iter().enumerate() {
            let [theirs, own, theirs6, own6] = sandbox_addresses(at);
            let name = interface_name(at);
            cable((&name, &gateway.name), ("eth0", &sandbox.name));
            gateway.ip(&format!(
                "addr add {theirs}/24 dev {name}\naddr add {theirs6}/64 dev {name} nodad\nlink set {name} up\n"
            ));
            sandbox.ip(&format!(
                "addr add {own}/24 dev eth0\naddr add {own6}/64 dev eth0 nodad\nlink set eth0 up\n\
                 route add default via {theirs}\nroute add ::/0 via {theirs6}\n"
            ));
            fs::create_dir_all(self.etc_dir(at)).unwrap();
            fs::write(self.etc_dir(at).join("resolv.conf"), format!("nameserver {theirs}\n")).unwrap();
        }
    }

    /// What `ip netns exec` lays over `/etc` for a sandbox.
    fn etc_dir(&self, sandbox: usize) -> PathBuf {
        PathBuf::from("/etc/netns").join(&self.sandboxes[sandbox].name)
    }

    /// Every SYN and every datagram that arrives in the world is remembered there.
    fn watch_world(&self) {
        self.world.nft(
            "table inet watch {\n\
             set four { type inet_proto . ipv4_addr . inet_service; flags dynamic; size 65535; }\n\
             set six { type inet_proto . ipv6_addr . inet_service; flags dynamic; size 65535; }\n\
             chain arriving { type filter hook prerouting priority -300;\n\
             iifname != \"gateway\" accept\n\
             tcp flags & (syn | ack) != syn accept\n\
             meta l4proto { tcp, udp } add @four { meta l4proto . ip daddr . th dport }\n\
             meta l4proto { tcp, udp } add @six { meta l4proto . ip6 daddr . th dport }\n\
             }\n}\n",
        );
    }

    /// Whereto the gateway sent something, except to the resolver.
    pub(crate) fn arrivals(&self) -> BTreeSet<SentPacket> {
        let mut nft = self.world.command("nft");
        let listed = nft.args(["-j", "list", "table", "inet", "watch"]).output().unwrap();
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        let sets = listed["nftables"].as_array().unwrap().iter().filter_map(|one| one.get("set"));
        let elements = sets.filter_map(|set| set["elem"].as_array()).flatten();
        let sent = elements.map(|element| {
            let parts = &element.get("elem").map_or(element, |element| &element["val"])["concat"];
            let port = parts[2].as_u64().unwrap_or_else(|| panic!("{element}"));
            let address = parts[1].as_str().unwrap().parse().unwrap();
            (parts[0].as_str().unwrap().to_owned(), address, u16::try_from(port).unwrap())
        });
        sent.filter(|(_, _, port)| *port != 53).collect()
    }

    /// Brings the sandboxes' connections to the program, and lets nothing else through.
    pub(crate) fn set_firewall(&self, kind: FirewallMode) {
        let names: Vec<_> =
            (0..self.sandboxes.len()).map(|at| format!("\"{}\"", interface_name(at))).collect();
        let from = format!("iifname {{ {} }}", names.join(", "));
        let dns = format!(
            "chain names {{ type nat hook prerouting priority dstnat;\n\
             {from} udp dport 53 redirect to :53\n{from} tcp dport 53 redirect to :53\n"
        );
        let own = format!("{from} fib daddr type local tcp dport 3128 accept\n");
        let body = match kind {
            FirewallMode::Redirect => {
                format!("{dns}{own}{from} meta l4proto tcp redirect to :15001\n}}")
            }
            FirewallMode::Tproxy => format!(
                "{dns}}}\nchain divert {{ type filter hook prerouting priority mangle;\n{own}\
                 {from} tcp dport 53 accept\n\
                 {from} meta l4proto tcp socket transparent 1 meta mark set 0x1000 accept\n\
                 {from} meta nfproto ipv4 meta l4proto tcp tproxy ip to :15002 meta mark set 0x1000 accept\n\
                 {from} meta nfproto ipv6 meta l4proto tcp tproxy ip6 to :15002 meta mark set 0x1000 accept\n}}"
            ),
        };
        self.gateway.nft(&format!(
            "table inet gate\ndelete table inet gate\ntable inet gate {{\n{body}\n\
             chain passing {{ type filter hook forward priority 0; policy drop; }}\n}}\n"
        ));
        if kind == FirewallMode::Tproxy {
            let lines = "rule add fwmark 0x1000 lookup 100\nroute replace local default dev lo table 100\n";
            self.gateway.ip(lines);
            self.gateway.ip6(lines);
        }
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        for at in 0..self.sandboxes.len() {
            drop(fs::remove_dir_all(self.etc_dir(at)));
        }
    }
}
