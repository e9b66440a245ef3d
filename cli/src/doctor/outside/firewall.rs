//! The firewall that redirects connections to transparent listeners, as listed by `nft`.

use std::collections::BTreeSet;
use std::process::Command;

use rules::configuration::{ListenerMode, ListenerSettings};
use serde_json::Value;

use super::{ConfigFiles, DeploymentState, OutsideProbe};
use crate::doctor::probe::ProbeVerdict;

const GROUP: &str = "firewall";

pub(super) fn probes() -> Vec<OutsideProbe> {
    vec![
        OutsideProbe::new(
            GROUP,
            "firewall.streams",
            "TCP is redirected to the listeners, IPv4 and IPv6",
            "load rules that redirect all TCP of the sandboxes to the port of a transparent listener, in a table of family inet: `meta l4proto tcp redirect to :PORT` on the prerouting hook",
            |site| {
                with_rules(site, |rules, files| {
                    judge_redirect(rules, &ConfigFiles::ports(files.transparent_listeners()), "TCP")
                })
            },
        ),
        OutsideProbe::new(
            GROUP,
            "firewall.names",
            "DNS is redirected to the listener, IPv4 and IPv6",
            "load rules that redirect UDP and TCP port 53 of the sandboxes to the port of a `dns` listener, in a table of family inet",
            |site| {
                with_rules(site, |rules, files| {
                    let is_dns = |listener: &&ListenerSettings| listener.mode == ListenerMode::Dns;
                    let listeners = files.configuration.listeners.iter().filter(is_dns);
                    judge_redirect(rules, &ConfigFiles::ports(listeners), "DNS")
                })
            },
        ),
        OutsideProbe::new(
            GROUP,
            "firewall.rest",
            "everything else is dropped",
            "add a chain on the forward hook with `policy drop` (on the output hook if the sandbox shares the network namespace): otherwise UDP, ICMP and other protocols get out",
            |site| with_rules(site, |rules, _| judge_default_drop(rules)),
        ),
        OutsideProbe::new(
            GROUP,
            "firewall.exempt",
            "no user is exempt that a sandbox could run as",
            "exempt Sandbar's own connections by a mark (`[upstream] mark`) or by a uid that no sandbox has",
            |site| {
                with_rules(site, |rules, _| judge_exemptions(rules, site.process.map(|process| process.uid)))
            },
        ),
    ]
}

/// Runs `check` on the rules, if a listener needs any and they can be read.
fn with_rules(
    site: &DeploymentState,
    check: impl Fn(&NftRuleset, &ConfigFiles) -> ProbeVerdict,
) -> ProbeVerdict {
    let files = match site.files() {
        Ok(files) => files,
        Err(unknown) => return unknown,
    };
    if files.transparent_listeners().next().is_none() {
        return ProbeVerdict::Fine("no transparent listener, so no rules are needed".to_owned());
    }
    match read_ruleset() {
        Ok(rules) => check(&rules, files),
        Err(why) => ProbeVerdict::Unknown(why),
    }
}

/// The rules in force, from `nft -j list ruleset`.
struct NftRuleset(Vec<Value>);

fn read_ruleset() -> Result<NftRuleset, String> {
    let listed = Command::new("nft").args(["-j", "list", "ruleset"]).output();
    let listed = listed.map_err(|error| format!("cannot run nft: {error}"))?;
    if !listed.status.success() {
        let stderr = String::from_utf8_lossy(&listed.stderr);
        return Err(format!("nft: {}", stderr.lines().next().unwrap_or_default()));
    }
    NftRuleset::parse(&listed.stdout).ok_or_else(|| "nft printed no valid JSON".to_owned())
}

impl NftRuleset {
    fn parse(text: &[u8]) -> Option<Self> {
        let listed: Value = serde_json::from_slice(text).ok()?;
        Some(NftRuleset(listed.get("nftables")?.as_array()?.clone()))
    }

    /// The expressions of every rule, with the family of its table.
    fn rule_steps(&self) -> impl Iterator<Item = (&str, &Vec<Value>)> {
        self.0.iter().filter_map(|one| {
            let rule = one.get("rule")?;
            Some((rule.get("family")?.as_str()?, rule.get("expr")?.as_array()?))
        })
    }
}

/// Both IP versions must be redirected to one of these ports.
fn judge_redirect(rules: &NftRuleset, ports: &[u16], what: &str) -> ProbeVerdict {
    if ports.is_empty() {
        return ProbeVerdict::Unknown("its sockets are inherited, so their ports are unknown".to_owned());
    }
    let to_us = |steps: &[Value]| {
        steps.iter().any(|step| {
            let places = ["/redirect/port", "/tproxy/port", "/dnat/port"];
            let port = places.iter().find_map(|place| step.pointer(place)?.as_u64());
            port.is_some_and(|port| ports.iter().any(|known| u64::from(*known) == port))
        })
    };
    let mut versions = BTreeSet::new();
    for (family, steps) in rules.rule_steps().filter(|(_, steps)| to_us(steps)) {
        match family {
            "inet" => versions.extend(inet_versions(steps)),
            "ip" => drop(versions.insert("IPv4")),
            "ip6" => drop(versions.insert("IPv6")),
            _ => {}
        }
    }
    match (versions.contains("IPv4"), versions.contains("IPv6")) {
        (true, true) => ProbeVerdict::Fine(format!("{what} is redirected over IPv4 and IPv6")),
        (true, false) => ProbeVerdict::Wrong(format!("{what} is redirected over IPv4 only")),
        (false, true) => ProbeVerdict::Wrong(format!("{what} is redirected over IPv6 only")),
        (false, false) => ProbeVerdict::Wrong(format!("no rule redirects {what} to port {ports:?}")),
    }
}

/// The IP versions that a rule of an inet table matches: both, unless it names one.
fn inet_versions(steps: &[Value]) -> Vec<&'static str> {
    let nfproto = steps.iter().find_map(|step| {
        let is_nfproto = step.pointer("/match/left/meta/key")?.as_str()? == "nfproto";
        is_nfproto.then(|| step.pointer("/match/right")?.as_str()).flatten()
    });
    let family = steps.iter().find_map(|step| step.pointer("/tproxy/family")?.as_str());
    match nfproto.or(family) {
        Some("ipv4" | "ip") => vec!["IPv4"],
        Some("ipv6" | "ip6") => vec!["IPv6"],
        _ => vec!["IPv4", "IPv6"],
    }
}

/// A chain on the way out must drop by default.
fn judge_default_drop(rules: &NftRuleset) -> ProbeVerdict {
    let text = |chain: &Value, key: &str| chain.get(key)?.as_str().map(str::to_owned);
    let closed = rules.0.iter().filter_map(|one| one.get("chain")).find(|chain| {
        let hook = text(chain, "hook").unwrap_or_default();
        let dropped = text(chain, "policy").as_deref() == Some("drop");
        dropped && ["forward", "output", "ingress"].contains(&hook.as_str())
    });
    match closed {
        Some(chain) => {
            let name = text(chain, "name").unwrap_or_default();
            ProbeVerdict::Fine(format!("chain `{name}` drops by default"))
        }
        None => ProbeVerdict::Wrong("no chain on the forward or output hook has `policy drop`".to_owned()),
    }
}

/// A user exempt from the rules must be Sandbar's own, not one that a sandbox runs as.
fn judge_exemptions(rules: &NftRuleset, own_uid: Option<u32>) -> ProbeVerdict {
    let users: BTreeSet<String> = rules
        .rule_steps()
        .flat_map(|(_, steps)| steps)
        .filter(|step| step.pointer("/match/left/meta/key").and_then(Value::as_str) == Some("skuid"))
        .filter_map(|step| step.pointer("/match/right"))
        .map(|user| user.as_str().map_or_else(|| user.to_string(), str::to_owned))
        .collect();
    let ours = |user: &String| own_uid.is_some_and(|own| *user == own.to_string());
    if users.is_empty() {
        return ProbeVerdict::Fine("no user is exempt".to_owned());
    }
    if users.iter().any(|user| user == "0" || user == "root") {
        return ProbeVerdict::Wrong("root is exempt, and so is root in a sandbox".to_owned());
    }
    match users.iter().find(|user| !ours(user)) {
        None => ProbeVerdict::Fine("only Sandbar's own user is exempt".to_owned()),
        Some(user) if own_uid.is_some() => {
            ProbeVerdict::Wrong(format!("user {user} is exempt, and Sandbar runs as another"))
        }
        Some(user) => {
            ProbeVerdict::Unknown(format!("user {user} is exempt; unknown whether it is Sandbar's"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(list: &Value) -> NftRuleset {
        NftRuleset::parse(json!({ "nftables": list }).to_string().as_bytes()).unwrap()
    }

    fn rule(family: &str, steps: &Value) -> Value {
        json!({ "rule": { "family": family, "table": "t", "chain": "c", "expr": steps } })
    }

    #[test]
    fn both_ip_versions_must_be_redirected() {
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
            let verdict = judge_redirect(&rules(&list), &[15001], "TCP");
            assert_eq!(matches!(verdict, ProbeVerdict::Fine(_)), good, "{list}: {verdict:?}");
        }
    }

    #[test]
    fn an_open_chain_and_an_exempt_user_are_found() {
        let chain = |hook: &str, policy: &str| json!([{ "chain": { "family": "inet", "name": "x", "hook": hook, "policy": policy } }]);
        assert!(!judge_default_drop(&rules(&chain("forward", "drop"))).is_bad());
        assert!(judge_default_drop(&rules(&chain("forward", "accept"))).is_bad());
        assert!(judge_default_drop(&rules(&chain("input", "drop"))).is_bad());
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
            assert_eq!(judge_exemptions(&rules(&user(&uid)), own).is_bad(), bad, "{uid} {own:?}");
        }
        assert!(!judge_exemptions(&rules(&json!([])), None).is_bad());
    }
}
