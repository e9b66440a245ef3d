//! `[quota]`: how much of the gateway's resources all sandboxes and each of them may use (P16, P17, P20).
//!
//! Totals come from the machine unless the configuration sets them. Each total is divided by [`crate::share`].

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;
use toml::Spanned;

use crate::limits::TrafficLimits;
use crate::share::{ShareTerms, SharesExceedTotal};

/// Generates the resources, the section of the configuration and the documentation from one table.
macro_rules! resources {
    ($($(#[doc = $doc:literal])+ $name:ident $key:ident $noun:literal, from $source:literal;)*) => {
        /// A resource of the gateway that sandboxes share.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Resource {
            $($(#[doc = $doc])+ $name,)*
        }

        impl Resource {
            /// Every resource, sorted by key.
            pub const ALL: &[Resource] = &[$(Resource::$name,)*];

            /// Returns its key under `[quota]`.
            pub const fn key(self) -> &'static str {
                match self { $(Resource::$name => stringify!($key),)* }
            }

            /// Returns what is counted, for messages.
            pub const fn noun(self) -> &'static str {
                match self { $(Resource::$name => $noun,)* }
            }

            /// Returns where the total comes from if the configuration does not set it.
            pub const fn source(self) -> &'static str {
                match self { $(Resource::$name => $source,)* }
            }

            /// Returns the meaning, for the documentation.
            pub const fn meaning(self) -> &'static str {
                match self { $(Resource::$name => concat!($($doc),+).trim_ascii_start(),)* }
            }
        }

        /// `[quota]`: what all sandboxes, and each of them, may use of the gateway's resources.
        #[derive(Debug, Default, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct QuotaDocument {
            $($(#[doc = $doc])+ pub(crate) $key: Option<QuotaEntryDocument>,)*
        }

        impl QuotaDocument {
            fn entry(&self, resource: Resource) -> Option<&QuotaEntryDocument> {
                match resource { $(Resource::$name => self.$key.as_ref(),)* }
            }
        }
    };
}

resources! {
    /// Bytes that requests and connections hold in memory.
    Buffers buffers "bytes of buffers", from "3/8 of the memory";
    /// Open connections of sandboxes. Unless set here, one may have `connections_per_sandbox` under `[limits]`.
    Connections connections "connections", from "`connections` under `[limits]`";
    /// File descriptors for connections, dialled connections and pipes.
    Descriptors descriptors "file descriptors", from "the descriptor limit, less a reserve";
    /// Bytes that the inspection remembers of earlier requests and of recalled text.
    Inspection inspection "bytes that the inspection remembers", from "1/8 of the memory";
    /// Source ports towards one address and port.
    Ports ports "source ports towards one address", from "the kernel's range of local ports";
    /// Open requests, HTTP/2 streams and tunnels.
    Requests requests "open requests and tunnels", from "50,000";
    /// Bytes that wait in the kernel for a side of a tunnel that does not read.
    Stalled stalled "bytes stalled in tunnels", from "1/8 of the memory, or 1/4 of the kernel's TCP memory";
}

/// One resource under `[quota]`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct QuotaEntryDocument {
    /// What all sandboxes may use together; by default what the machine has.
    #[schemars(with = "Option<u64>")]
    total: Option<Spanned<u64>>,
    /// What one sandbox may use at most; by default the total.
    #[schemars(with = "Option<u64>")]
    per_sandbox: Option<Spanned<u64>>,
    /// What is kept for each sandbox; by default half of the total, divided by the number of sandboxes.
    #[schemars(with = "Option<u64>")]
    share: Option<Spanned<u64>>,
}

/// The settings of one resource; absent ones come from the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaEntry {
    pub total: Option<u64>,
    pub per_sandbox: Option<u64>,
    pub share: Option<u64>,
}

/// `[quota]`, by resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaSettings([QuotaEntry; Resource::ALL.len()]);

/// What the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineLimits {
    /// Bytes of memory: the cgroup's limit, or the machine's.
    pub memory: u64,
    /// The limit on open file descriptors.
    pub descriptors: u64,
    /// Local ports that the kernel chooses from.
    pub ports: u64,
    /// Bytes of TCP memory at which the kernel starts to squeeze every connection (`tcp_mem`).
    pub tcp_memory: u64,
}

/// Error for a quota that cannot hold. It shows the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    #[error("`[quota] {}`: `total` {total} is above the {most} that this machine has ({from}); lower it", .resource.key())]
    AboveMachine { resource: Resource, total: u64, most: u64, from: MachineSource },
    #[error("`[quota] {}`: {source}; lower `share` or raise `total`", .resource.key())]
    Shares { resource: Resource, source: SharesExceedTotal },
    #[error("`[quota] {}`: `per_sandbox` {cap} is above the total of {total}; lower it or raise `total`", .resource.key())]
    CapAboveTotal { resource: Resource, cap: u64, total: u64 },
    #[error("`[quota] {}`: `share` {share} is above `per_sandbox` {cap}; lower one or raise the other", .resource.key())]
    ShareAboveCap { resource: Resource, share: u64, cap: u64 },
}

/// The limit of the machine that a total exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineSource(&'static str);

impl fmt::Display for MachineSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Default total of open requests and tunnels.
const REQUESTS: u64 = 50_000;
/// Descriptors that Sandbar needs itself: log, listeners, resolvers, admin, files, idle pipes.
const DESCRIPTOR_RESERVE: u64 = 256;

impl MachineLimits {
    /// Returns the total of a resource that the configuration does not set.
    fn total(&self, resource: Resource, limits: &TrafficLimits) -> u64 {
        match resource {
            Resource::Buffers => self.memory / 8 * 3,
            Resource::Connections => limits.connections,
            Resource::Descriptors => {
                self.descriptors.saturating_sub(DESCRIPTOR_RESERVE.min(self.descriptors / 4))
            }
            Resource::Inspection => self.memory / 8,
            Resource::Ports => self.ports,
            Resource::Requests => REQUESTS,
            Resource::Stalled => (self.memory / 8).min(self.tcp_memory / 4),
        }
    }

    /// Returns the largest total of a resource that can hold, and where that comes from.
    fn most(&self, resource: Resource) -> (u64, &'static str) {
        match resource {
            Resource::Buffers => (self.memory / 4 * 3, "3/4 of its memory"),
            Resource::Inspection | Resource::Stalled => (self.memory / 2, "half of its memory"),
            Resource::Descriptors => (self.descriptors, "its descriptor limit, `ulimit -n`"),
            Resource::Ports => (self.ports, "`net.ipv4.ip_local_port_range`"),
            Resource::Connections | Resource::Requests => (u64::MAX, ""),
        }
    }
}

impl QuotaSettings {
    pub fn get(&self, resource: Resource) -> QuotaEntry {
        self.0.get(resource as usize).copied().unwrap_or_default()
    }

    pub fn set(&mut self, resource: Resource, entry: QuotaEntry) {
        if let Some(slot) = self.0.get_mut(resource as usize) {
            *slot = entry;
        }
    }

    /// Works out how a resource is divided among `sandboxes`.
    ///
    /// # Errors
    ///
    /// Returns [`QuotaError`] for a total above the machine's, or shares and caps that do not fit.
    pub fn terms(
        &self,
        resource: Resource,
        machine: &MachineLimits,
        limits: &TrafficLimits,
        sandboxes: u64,
    ) -> Result<ShareTerms, QuotaError> {
        let entry = self.get(resource);
        let (most, from) = machine.most(resource);
        let total = entry.total.unwrap_or_else(|| machine.total(resource, limits));
        if total > most {
            return Err(QuotaError::AboveMachine { resource, total, most, from: MachineSource(from) });
        }
        let usual_cap = match resource {
            Resource::Connections => limits.connections_per_sandbox.min(total),
            Resource::Buffers
            | Resource::Descriptors
            | Resource::Inspection
            | Resource::Ports
            | Resource::Requests
            | Resource::Stalled => total,
        };
        let cap = entry.per_sandbox.unwrap_or(usual_cap);
        let terms = match entry.share {
            Some(share) => ShareTerms { total, cap, share },
            None => ShareTerms::halved(total, cap, sandboxes),
        };
        check(resource, &terms, sandboxes)?;
        Ok(terms)
    }
}

fn check(resource: Resource, terms: &ShareTerms, sandboxes: u64) -> Result<(), QuotaError> {
    let ShareTerms { total, cap, share } = *terms;
    if cap > total {
        return Err(QuotaError::CapAboveTotal { resource, cap, total });
    }
    if share > cap {
        return Err(QuotaError::ShareAboveCap { resource, share, cap });
    }
    terms.check(sandboxes).map_err(|source| QuotaError::Shares { resource, source })
}

impl QuotaDocument {
    /// Returns the settings. Calls `reject` with each entry that contradicts another, whatever the machine has.
    pub(crate) fn to_settings(
        &self,
        sandboxes: u64,
        limits: &TrafficLimits,
        mut reject: impl FnMut(&Spanned<u64>, QuotaError),
    ) -> QuotaSettings {
        let mut settings = QuotaSettings::default();
        for (slot, resource) in settings.0.iter_mut().zip(Resource::ALL) {
            let Some(entry) = self.entry(*resource) else { continue };
            let value = |entry: &Option<Spanned<u64>>| entry.as_ref().map(|entry| *entry.get_ref());
            *slot = QuotaEntry {
                total: value(&entry.total),
                per_sandbox: value(&entry.per_sandbox),
                share: value(&entry.share),
            };
            let usual = match resource {
                Resource::Connections => limits.connections,
                Resource::Requests => REQUESTS,
                // Only the machine can tell.
                Resource::Buffers
                | Resource::Descriptors
                | Resource::Inspection
                | Resource::Ports
                | Resource::Stalled => u64::MAX,
            };
            let total = slot.total.unwrap_or(usual);
            let cap = slot.per_sandbox.unwrap_or(total);
            let terms = ShareTerms { total, cap, share: slot.share.unwrap_or_default() };
            let written = entry.share.as_ref().or(entry.per_sandbox.as_ref());
            if let (Err(error), Some(written)) = (check(*resource, &terms, sandboxes), written) {
                let at = match error {
                    QuotaError::CapAboveTotal { .. } => entry.per_sandbox.as_ref().unwrap_or(written),
                    QuotaError::AboveMachine { .. }
                    | QuotaError::ShareAboveCap { .. }
                    | QuotaError::Shares { .. } => written,
                };
                reject(at, error);
            }
        }
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MachineLimits =
        MachineLimits { memory: 512 << 20, descriptors: 1024, ports: 28_232, tcp_memory: 1 << 30 };

    fn settings(resource: Resource, entry: QuotaEntry) -> QuotaSettings {
        let mut settings = QuotaSettings::default();
        settings.set(resource, entry);
        settings
    }

    #[test]
    fn p17_totals_come_from_the_machine() {
        let limits = TrafficLimits::default();
        let terms = |resource| QuotaSettings::default().terms(resource, &MACHINE, &limits, 4).unwrap();
        for (resource, total, cap, share) in [
            (Resource::Buffers, 192 << 20, 192 << 20, 24 << 20),
            (Resource::Connections, 20_000, 4_096, 2_500),
            (Resource::Descriptors, 768, 768, 96),
            (Resource::Inspection, 64 << 20, 64 << 20, 8 << 20),
            (Resource::Ports, 28_232, 28_232, 3_529),
            (Resource::Requests, 50_000, 50_000, 6_250),
            (Resource::Stalled, 64 << 20, 64 << 20, 8 << 20),
        ] {
            assert_eq!(terms(resource), ShareTerms { total, cap, share }, "{resource:?}");
        }
    }

    #[test]
    fn p17_a_quota_that_cannot_hold_shows_its_arithmetic() {
        let entry = |total, per_sandbox, share| QuotaEntry { total, per_sandbox, share };
        for (resource, entry, message) in [
            (
                Resource::Descriptors,
                entry(Some(2000), None, None),
                "`[quota] descriptors`: `total` 2000 is above the 1024 that this machine has (its descriptor limit, \
                 `ulimit -n`); lower it",
            ),
            (
                Resource::Requests,
                entry(Some(100), None, Some(30)),
                "`[quota] requests`: 4 sandboxes x 30 = 120, but the total is 100; lower `share` or raise `total`",
            ),
            (
                Resource::Requests,
                entry(Some(100), Some(200), None),
                "`[quota] requests`: `per_sandbox` 200 is above the total of 100; lower it or raise `total`",
            ),
            (
                Resource::Requests,
                entry(Some(100), Some(10), Some(20)),
                "`[quota] requests`: `share` 20 is above `per_sandbox` 10; lower one or raise the other",
            ),
        ] {
            let limits = TrafficLimits::default();
            let error = settings(resource, entry).terms(resource, &MACHINE, &limits, 4).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
