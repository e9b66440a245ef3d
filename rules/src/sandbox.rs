//! Sandboxes, and how the channels of a connection identify one. Nothing that a sandbox can choose or copy
//! counts (P2): Sandbar refuses unknown channels, and channels that disagree.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::ids::{AgentCard, Environment, SandboxId, Tenant};
use crate::reason::Reason;

/// Where a connection arrived, as reported by the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A listener or jail of a single sandbox.
    Dedicated(SandboxId),
    /// The interface the packet arrived on.
    Interface(String),
    /// The firewall mark.
    Mark(u32),
    /// The peer's address; used only with `dangerously_trust_source_address`.
    SourceAddress(IpAddr),
    /// The peer's uid on a unix socket.
    UnixUser(u32),
}

/// A sandbox with its identity. Tenant and environment may be unset while it waits in a warm pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    pub id: SandboxId,
    pub tenant: Option<Tenant>,
    pub environment: Option<Environment>,
    pub agent_card: Option<AgentCard>,
    /// How many times a sandbox with this id was created; tokens of earlier generations are refused.
    pub generation: Option<u64>,
}

/// An identity for a sandbox that was declared without one; assigned once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityAssignment {
    pub sandbox: SandboxId,
    pub tenant: Tenant,
    pub environment: Environment,
    pub agent_card: Option<AgentCard>,
}

/// An identified sandbox, with the channels that identified it. It holds no rules, so it outlives a reload; every
/// decision identifies it again ([`Sandboxes::identify_again`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxRef {
    sandbox: Arc<Sandbox>,
    /// None if its id identified it, or the channels of one message, which is decided at once.
    channels: Option<Arc<[Channel]>>,
}

/// All sandboxes and their channels.
#[derive(Clone, Debug, Default)]
pub struct Sandboxes {
    by_id: BTreeMap<SandboxId, SandboxRef>,
    by_channel: HashMap<Channel, SandboxId>,
    /// By first address. Ranges never overlap, so the last range that starts at or before an address is the only
    /// candidate.
    by_source: BTreeMap<IpAddr, (IpNet, SandboxId)>,
}

impl Sandboxes {
    /// Identifies the sandbox of a connection, which may live for many generations: the reference keeps the channels,
    /// so that its holder is identified again at every decision.
    ///
    /// # Errors
    ///
    /// As [`Sandboxes::identify`].
    pub fn identify_connection(&self, channels: &Arc<[Channel]>) -> Result<SandboxRef, Reason> {
        let found = self.identify(channels)?;
        Ok(SandboxRef { channels: Some(channels.clone()), ..found })
    }

    /// Returns the sandbox that the channels of `before` belong to now, which may be another one.
    ///
    /// # Errors
    ///
    /// As [`Sandboxes::identify`], and [`Reason::UnknownSandbox`] if the configuration has the sandbox no longer.
    pub fn identify_again(&self, before: &SandboxRef) -> Result<SandboxRef, Reason> {
        let Some(channels) = &before.channels else {
            return self.get(&before.id).cloned().ok_or(Reason::UnknownSandbox);
        };
        self.identify_connection(channels).map_err(|reason| match self.get(&before.id) {
            Some(_) => reason,
            None => Reason::UnknownSandbox,
        })
    }

    /// Returns the sandbox that every channel in `seen` belongs to.
    ///
    /// # Errors
    ///
    /// Returns [`Reason::UnknownChannel`] if `seen` is empty or a channel belongs to no sandbox, and
    /// [`Reason::ChannelsDisagree`] if they belong to two.
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
            Channel::Interface(_) | Channel::Mark(_) | Channel::UnixUser(_) => self.by_channel.get(channel),
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
        self.by_id.insert(sandbox.id.clone(), SandboxRef::new(sandbox));
    }

    /// Binds a channel to a sandbox; returns the other sandbox that already had it.
    pub(crate) fn bind_channel(&mut self, channel: Channel, id: &SandboxId) -> Option<SandboxId> {
        self.by_channel.insert(channel, id.clone()).filter(|other| other != id)
    }

    /// Binds a source range to a sandbox; returns a sandbox with an overlapping range.
    pub(crate) fn bind_source(&mut self, net: IpNet, id: &SandboxId) -> Option<SandboxId> {
        let before = self.by_source.range(..=net.network()).next_back();
        let inside = self.by_source.range(net.network()..=net.broadcast()).next();
        let overlaps = |(_, (other, id)): (&IpAddr, &(IpNet, SandboxId))| {
            (other.contains(&net) || net.contains(other)).then(|| id.clone())
        };
        let other = before.and_then(overlaps).or_else(|| inside.and_then(overlaps));
        self.by_source.insert(net.network(), (net, id.clone()));
        other
    }
}

impl Sandboxes {
    /// Assigns an identity to a sandbox without one; returns false if it is unknown or already has one.
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
        SandboxRef { sandbox: Arc::new(sandbox), channels: None }
    }

    /// Returns whether `now` is this sandbox with the same identity. One that was assigned only since is the same: in a
    /// warm pool, connections exist before the identity does.
    pub(crate) fn keeps_identity(&self, now: &Sandbox) -> bool {
        fn keeps<T: PartialEq>(before: Option<&T>, now: Option<&T>) -> bool {
            before.is_none() || before == now
        }
        self.id == now.id
            && keeps(self.tenant.as_ref(), now.tenant.as_ref())
            && keeps(self.environment.as_ref(), now.environment.as_ref())
            && keeps(self.generation.as_ref(), now.generation.as_ref())
    }
}

impl std::ops::Deref for SandboxRef {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
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
    fn an_identity_is_assigned_once() {
        let mut all = two_sandboxes();
        let given = |tenant: &str| IdentityAssignment {
            sandbox: id("a"),
            tenant: Tenant::parse(tenant).unwrap(),
            environment: Environment::parse("staging").unwrap(),
            agent_card: None,
        };
        assert!(all.assign_identity(&given("acme")));
        assert!(!all.assign_identity(&given("other")), "an identity never changes");
        assert_eq!(all.get(&id("a")).unwrap().tenant.as_ref().unwrap().as_str(), "acme");
        assert!(!all.assign_identity(&IdentityAssignment { sandbox: id("unknown"), ..given("acme") }));
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
