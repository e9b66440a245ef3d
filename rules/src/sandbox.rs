//! Sandboxes, and how the path a connection came by names one. Nothing a sandbox can choose or copy
//! does (P2): unknown paths are refused, and so are paths that name two.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::ids::{AgentCard, Environment, SandboxId, Tenant};
use crate::reason::Reason;

/// One thing the kernel says of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A listener or a jail that belongs to one sandbox alone.
    Dedicated(SandboxId),
    /// The interface the packet came in by.
    Interface(String),
    /// The firewall mark.
    Mark(u32),
    /// The peer's address; believed only where the operator dangerously trusts it.
    SourceAddress(IpAddr),
    /// The uid at the other end of a unix socket.
    UnixUser(u32),
}

/// Who a sandbox is. Tenant and environment may be unset while it waits in a warm pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    pub id: SandboxId,
    pub tenant: Option<Tenant>,
    pub environment: Option<Environment>,
    pub agent_card: Option<AgentCard>,
    /// Counts how often a sandbox of this id was made; older tokens are refused.
    pub generation: Option<u64>,
}

/// The identity of a sandbox that was declared without one, given to it once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityAssignment {
    pub sandbox: SandboxId,
    pub tenant: Tenant,
    pub environment: Environment,
    pub agent_card: Option<AgentCard>,
}

/// A sandbox that was recognised. It names the sandbox and holds none of its rules, so it stays good over a reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxRef(Arc<Sandbox>);

/// All sandboxes, and the channels that name them.
#[derive(Clone, Debug, Default)]
pub struct Sandboxes {
    by_id: BTreeMap<SandboxId, SandboxRef>,
    by_channel: HashMap<Channel, SandboxId>,
    /// By first address; ranges never overlap, so the one that begins last before an address is the only candidate.
    by_source: BTreeMap<IpAddr, (IpNet, SandboxId)>,
}

impl Sandboxes {
    /// The sandbox that every channel in `seen` names.
    ///
    /// # Errors
    ///
    /// Returns [`Reason::UnknownChannel`] if any of them names none, or there is none, and
    /// [`Reason::ChannelsDisagree`] if they name two.
    pub fn identify(&self, seen: &[Channel]) -> Result<SandboxRef, Reason> {
        let mut found: Option<&SandboxId> = None;
        for channel in seen {
            let named = self.sandbox_by_channel(channel).ok_or(Reason::UnknownChannel)?;
            if found.is_some_and(|other| other != named) {
                return Err(Reason::ChannelsDisagree);
            }
            found = Some(named);
        }
        found.and_then(|id| self.get(id)).cloned().ok_or(Reason::UnknownChannel)
    }

    fn sandbox_by_channel<'a>(&'a self, channel: &'a Channel) -> Option<&'a SandboxId> {
        match channel {
            Channel::Dedicated(id) => Some(id),
            Channel::SourceAddress(address) => self.sandbox_by_address(address.to_canonical()),
            Channel::Interface(_) | Channel::Mark(_) | Channel::UnixUser(_) => {
                self.by_channel.get(channel)
            }
        }
    }

    fn sandbox_by_address(&self, address: IpAddr) -> Option<&SandboxId> {
        let (_, (net, id)) = self.by_source.range(..=address).next_back()?;
        net.contains(&address).then_some(id)
    }

    pub fn get(&self, id: &SandboxId) -> Option<&SandboxRef> {
        self.by_id.get(id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &SandboxRef> {
        self.by_id.values()
    }

    pub(crate) fn insert(&mut self, sandbox: Sandbox) {
        self.by_id.insert(sandbox.id.clone(), SandboxRef(Arc::new(sandbox)));
    }

    /// Gives a channel to a sandbox; answers with the one that already has it.
    pub(crate) fn bind_channel(&mut self, channel: Channel, id: &SandboxId) -> Option<SandboxId> {
        self.by_channel.insert(channel, id.clone()).filter(|other| other != id)
    }

    /// Gives a source range to a sandbox; answers with one whose range it touches.
    pub(crate) fn bind_source(&mut self, net: IpNet, id: &SandboxId) -> Option<SandboxId> {
        let before = self.by_source.range(..=net.network()).next_back();
        let inside = self.by_source.range(net.network()..=net.broadcast()).next();
        let touches = |(_, (other, id)): (&IpAddr, &(IpNet, SandboxId))| {
            (other.contains(&net) || net.contains(other)).then(|| id.clone())
        };
        let other = before.and_then(touches).or_else(|| inside.and_then(touches));
        self.by_source.insert(net.network(), (net, id.clone()));
        other
    }
}

impl Sandboxes {
    /// Gives a waiting sandbox its identity; false if it is unknown or has one already.
    pub(crate) fn assign_identity(&mut self, given: &IdentityAssignment) -> bool {
        let Some(waiting) = self.by_id.get(&given.sandbox) else { return false };
        if waiting.tenant.is_some() || waiting.environment.is_some() {
            return false;
        }
        let agent_card = given.agent_card.clone().or_else(|| waiting.agent_card.clone());
        let (tenant, environment) = (Some(given.tenant.clone()), Some(given.environment.clone()));
        let sandbox = Sandbox { tenant, environment, agent_card, ..(**waiting).clone() };
        self.insert(sandbox);
        true
    }
}

impl SandboxRef {
    pub(crate) fn new(sandbox: Sandbox) -> Self {
        SandboxRef(Arc::new(sandbox))
    }
}

impl std::ops::Deref for SandboxRef {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.0
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Channel::Dedicated(id) => write!(f, "dedicated to {id}"),
            Channel::Interface(name) => write!(f, "interface {name}"),
            Channel::Mark(mark) => write!(f, "mark {mark:#x}"),
            Channel::SourceAddress(address) => write!(f, "source address {address}"),
            Channel::UnixUser(uid) => write!(f, "unix uid {uid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SandboxId {
        SandboxId::parse(text).unwrap()
    }

    fn two_sandboxes() -> Sandboxes {
        let mut all = Sandboxes::default();
        for (name, mark) in [("a", 0xa1), ("b", 0xb2)] {
            all.insert(Sandbox {
                id: id(name),
                tenant: None,
                environment: None,
                agent_card: None,
                generation: None,
            });
            assert_eq!(all.bind_channel(Channel::Mark(mark), &id(name)), None);
        }
        all.bind_channel(Channel::Interface("veth-a".to_owned()), &id("a"));
        all.bind_source("10.0.0.2/32".parse().unwrap(), &id("b"));
        all
    }

    #[test]
    fn p2_every_channel_must_name_the_same_sandbox() {
        let interface = |name: &str| Channel::Interface(name.to_owned());
        let source = |text: &str| Channel::SourceAddress(text.parse().unwrap());
        for (seen, found) in [
            (vec![Channel::Mark(0xa1)], Ok("a")),
            (vec![Channel::Mark(0xa1), interface("veth-a")], Ok("a")),
            (vec![Channel::Dedicated(id("b"))], Ok("b")),
            (vec![source("10.0.0.2")], Ok("b")),
            (vec![source("::ffff:10.0.0.2")], Ok("b")),
            (vec![], Err(Reason::UnknownChannel)),
            (vec![Channel::Mark(0)], Err(Reason::UnknownChannel)),
            (vec![Channel::UnixUser(0xa1)], Err(Reason::UnknownChannel)),
            (vec![Channel::Mark(0xa1), interface("veth-x")], Err(Reason::UnknownChannel)),
            (vec![Channel::Dedicated(id("c"))], Err(Reason::UnknownChannel)),
            (vec![source("10.0.0.3")], Err(Reason::UnknownChannel)),
            (vec![Channel::Mark(0xa1), Channel::Mark(0xb2)], Err(Reason::ChannelsDisagree)),
            (vec![interface("veth-a"), source("10.0.0.2")], Err(Reason::ChannelsDisagree)),
        ] {
            let named = two_sandboxes().identify(&seen).map(|sandbox| sandbox.id.to_string());
            assert_eq!(named.as_deref(), found.as_ref().copied(), "{seen:?}");
        }
    }

    #[test]
    fn an_identity_is_given_once() {
        let mut all = two_sandboxes();
        let given = |tenant: &str| IdentityAssignment {
            sandbox: id("a"),
            tenant: Tenant::parse(tenant).unwrap(),
            environment: Environment::parse("staging").unwrap(),
            agent_card: None,
        };
        assert!(all.assign_identity(&given("acme")));
        assert!(!all.assign_identity(&given("other")), "it is fixed from then on");
        assert_eq!(all.get(&id("a")).unwrap().tenant.as_ref().unwrap().as_str(), "acme");
        assert!(
            !all.assign_identity(&IdentityAssignment { sandbox: id("nobody"), ..given("acme") })
        );
        let seen = all.identify(&[Channel::Mark(0xa1)]).unwrap();
        assert_eq!(seen.tenant.as_ref().unwrap().as_str(), "acme");
    }

    #[test]
    fn p2_a_channel_belongs_to_one_sandbox() {
        let mut all = two_sandboxes();
        assert_eq!(all.bind_channel(Channel::Mark(0xa1), &id("b")), Some(id("a")));
        assert_eq!(all.bind_source("10.0.0.0/24".parse().unwrap(), &id("a")), Some(id("b")));
    }
}
