//! The firewall that brings connections to transparent listeners, as `nft` tells it.

use std::collections::BTreeSet;
use std::process::Command;

use rules::operator::{Listener, Mode};
use serde_json::Value;

use super::{Files, Probe, Site};
use crate::doctor::probe::Verdict;

const GROUP: &str = "firewall";

pub(super) fn probes() -> Vec<Probe> {
    vec![
        Probe::new(
            GROUP,
            "firewall.streams",
            "TCP is brought to the listeners, IPv4 and IPv6",
            "load rules that redirect all TCP of the sandboxes to the port of a transparent listener, in a table of family inet: `meta l4proto tcp redirect to :PORT` on the prerouting hook",
            |site| {
                with_rules(site, |rules, files| {
                    brought(rules, &Files::ports(files.transparent()), "TCP")
                })
            },
        ),
        Probe::new(
            GROUP,
            "firewall.names",
            "DNS is brought to the listener, IPv4 and IPv6",
            "load rules that redirect UDP and TCP port 53 of the sandboxes to the port of a `dns` listener, in a table of family inet",
            |site| {
                with_rules(site, |rules, files| {
                    let is_dns = |listener: &&Listener| listener.mode == Mode::Dns;
                    let listeners = files.operator.listeners.iter().filter(is_dns);
                    brought(rules, &Files::ports(listeners), "DNS")
                })
            },
        ),
        Probe::new(
            GROUP,
            "firewall.rest",
            "what is not brought to a listener is rejected",
            "add a chain on the forward hook with `policy drop` (on the output hook where the sandbox shares the network): UDP, ICMP and other protocols leave otherwise",
            |site| with_rules(site, |rules, _| rest(rules)),
        ),
        Probe::new(
            GROUP,
            "firewall.exempt",
            "no user is exempt whom a sandbox could be",
            "exempt Sandbar's own connections by a mark (`[upstream] mark`) or by a uid that no sandbox has",
            |site| {
                with_rules(site, |rules, _| exempt(rules, site.process.map(|process| process.uid)))
            },
        ),
    ]
}

/// Looks at the rules, if a listener needs any and they can be read.
fn with_rules(site: &Site, look: impl Fn(&Rules, &Files) -> Verdict) -> Verdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.transparent().next().is_none() {
        return Verdict::Fine("no listener is transparent: no rules are needed here".to_owned());
    }
    match read() {
        Ok(rules) => look(&rules, files),
        Err(why) => Verdict::Unknown(why),
    }
}

/// The rules in force, as `nft -j list ruleset` has them.
struct Rules(Vec<Value>);

fn read() -> Result<Rules, String> {
    let listed = Command::new("nft").args(["-j", "list", "ruleset"]).output();
    let listed = listed.map_err(|error| format!("nft cannot be run: {error}"))?;
    if !listed.status.success() {
        let said = String::from_utf8_lossy(&listed.stderr);
        return Err(format!("nft: {}", said.lines().next().unwrap_or_default()));
    }
    Rules::parse(&listed.stdout).ok_or_else(|| "nft gives no JSON".to_owned())
}

impl Rules {
    fn parse(text: &[u8]) -> Option<Self> {
        let listed: Value = serde_json::from_slice(text).ok()?;
        Some(Rules(listed.get("nftables")?.as_array()?.clone()))
    }

    /// The steps of every rule, with the family of its table.
    fn steps(&self) -> impl Iterator<Item = (&str, &Vec<Value>)> {
        self.0.iter().filter_map(|one| {
            let rule = one.get("rule")?;
            Some((rule.get("family")?.as_str()?, rule.get("expr")?.as_array()?))
        })
    }
}

/// Whether both versions of the protocol are brought to one of these ports.
fn brought(rules: &Rules, ports: &[u16], what: &str) -> Verdict {
    if ports.is_empty() {
        return Verdict::Unknown("its sockets are passed on: their ports are not known".to_owned());
    }
    let to_us = |steps: &[Value]| {
        steps.iter().any(|step| {
            let places = ["/redirect/port", "/tproxy/port", "/dnat/port"];
            let port = places.iter().find_map(|place| step.pointer(place)?.as_u64());
            port.is_some_and(|port| ports.iter().any(|known| u64::from(*known) == port))
        })
    };
    let mut versions = BTreeSet::new();
    for (family, steps) in rules.steps().filter(|(_, steps)| to_us(steps)) {
        match family {
            "inet" => versions.extend(of_inet(steps)),
            "ip" => drop(versions.insert("IPv4")),
            "ip6" => drop(versions.insert("IPv6")),
            _ => {}
        }
    }
    match (versions.contains("IPv4"), versions.contains("IPv6")) {
        (true, true) => Verdict::Fine(format!("{what} is, by IPv4 and IPv6")),
        (true, false) => Verdict::Wrong(format!("{what} is by IPv4 only")),
        (false, true) => Verdict::Wrong(format!("{what} is by IPv6 only")),
        (false, false) => Verdict::Wrong(format!("no rule brings {what} to port {ports:?}")),
    }
}

/// The versions that a rule of an inet table is about: both, unless it says which.
fn of_inet(steps: &[Value]) -> Vec<&'static str> {
    let said = steps.iter().find_map(|step| {
        let about = step.pointer("/match/left/meta/key")?.as_str()? == "nfproto";
        about.then(|| step.pointer("/match/right")?.as_str()).flatten()
    });
    let family = steps.iter().find_map(|step| step.pointer("/tproxy/family")?.as_str());
    match said.or(family) {
        Some("ipv4" | "ip") => vec!["IPv4"],
        Some("ipv6" | "ip6") => vec!["IPv6"],
        _ => vec!["IPv4", "IPv6"],
    }
}

/// Whether a chain that packets pass on their way out drops what no rule lets pass.
fn rest(rules: &Rules) -> Verdict {
    let text = |chain: &Value, key: &str| chain.get(key)?.as_str().map(str::to_owned);
    let closed = rules.0.iter().filter_map(|one| one.get("chain")).find(|chain| {
        let hook = text(chain, "hook").unwrap_or_default();
        let dropped = text(chain, "policy").as_deref() == Some("drop");
        dropped && ["forward", "output", "ingress"].contains(&hook.as_str())
    });
    match closed {
        Some(chain) => {
            let name = text(chain, "name").unwrap_or_default();
            Verdict::Fine(format!("chain `{name}` drops what no rule lets pass"))
        }
        None => {
            Verdict::Wrong("no chain on the forward or output hook has `policy drop`".to_owned())
        }
    }
}

/// Rules that let a user's packets pass: that user must be Sandbar's own, and not one of a sandbox.
fn exempt(rules: &Rules, own: Option<u32>) -> Verdict {
    let users: BTreeSet<String> = rules
        .steps()
        .flat_map(|(_, steps)| steps)
        .filter(|step| {
            step.pointer("/match/left/meta/key").and_then(Value::as_str) == Some("skuid")
        })
        .filter_map(|step| step.pointer("/match/right"))
        .map(|user| user.as_str().map_or_else(|| user.to_string(), str::to_owned))
        .collect();
    let ours = |user: &String| own.is_some_and(|own| *user == own.to_string());
    if users.is_empty() {
        return Verdict::Fine("none is exempt by uid".to_owned());
    }
    if users.iter().any(|user| user == "0" || user == "root") {
        return Verdict::Wrong("root is exempt: whoever is root in a sandbox is too".to_owned());
    }
    match users.iter().find(|user| !ours(user)) {
        None => Verdict::Fine("only Sandbar's own user is".to_owned()),
        Some(user) if own.is_some() => {
            Verdict::Wrong(format!("user {user} is exempt and is not Sandbar's"))
        }
        Some(user) => Verdict::Unknown(format!("user {user} is exempt: is it Sandbar's?")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(list: &Value) -> Rules {
        Rules::parse(json!({ "nftables": list }).to_string().as_bytes()).unwrap()
    }

    fn rule(family: &str, steps: &Value) -> Value {
        json!({ "rule": { "family": family, "table": "t", "chain": "c", "expr": steps } })
    }

    #[test]
    fn both_versions_must_be_brought() {
        let to = |port: u16| json!([{ "redirect": { "port": port } }]);
        let only = |version: &str| {
            json!([
                { "match": { "op": "==", "left": { "meta": { "key": "nfproto" } }, "right": version } },
                { "tproxy": { "port": 15001 } }
            ])
        };
        for (list, good) in [
            (json!([rule("inet", &to(15001))]), true),
            (json!([rule("ip", &to(15001)), rule("ip6", &to(15001))]), true),
            (json!([rule("inet", &only("ipv4")), rule("inet", &only("ipv6"))]), true),
            (json!([rule("inet", &only("ipv4"))]), false),
            (json!([rule("ip", &to(15001))]), false),
            (json!([rule("inet", &to(9))]), false),
            (json!([]), false),
        ] {
            let verdict = brought(&rules(&list), &[15001], "TCP");
            assert_eq!(matches!(verdict, Verdict::Fine(_)), good, "{list}: {verdict:?}");
        }
    }

    #[test]
    fn an_open_chain_and_an_exempt_user_are_found() {
        let chain = |hook: &str, policy: &str| json!([{ "chain": { "family": "inet", "name": "x", "hook": hook, "policy": policy } }]);
        assert!(!rest(&rules(&chain("forward", "drop"))).is_bad());
        assert!(rest(&rules(&chain("forward", "accept"))).is_bad());
        assert!(rest(&rules(&chain("input", "drop"))).is_bad());
        let user = |uid: &Value| {
            let left = json!({ "meta": { "key": "skuid" } });
            json!([rule("inet", &json!([{ "match": { "left": left, "right": uid } }]))])
        };
        for (uid, own, bad) in [
            (json!(990), Some(990), false),
            (json!(990), Some(991), true),
            (json!(990), None, false),
            (json!(0), Some(0), true),
            (json!("root"), None, true),
        ] {
            assert_eq!(exempt(&rules(&user(&uid)), own).is_bad(), bad, "{uid} {own:?}");
        }
        assert!(!exempt(&rules(&json!([])), None).is_bad());
    }
}
