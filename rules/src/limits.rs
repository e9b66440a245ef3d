//! Every bound of the data path that an operator can set, in one table: its name, its default, the most it
//! can be, and what it bounds (P17).

use schemars::JsonSchema;
use serde::Deserialize;
use std::time::Duration;
use toml::Spanned;

/// Makes the settings, the file's section and the documentation from one table.
macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $name:ident = $usual:literal, at most $most:literal;)*) => {
        /// The bounds of one instance.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct TrafficLimits {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Default for TrafficLimits {
            fn default() -> Self {
                TrafficLimits { $($name: $usual,)* }
            }
        }

        /// `[limits]`: what connections may take.
        #[derive(Debug, Default, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct LimitsDocument {
            $($(#[doc = $doc])+
            #[schemars(with = "Option<u64>")]
            pub(crate) $name: Option<Spanned<u64>>,)*
        }

        impl LimitsDocument {
            /// The limits it sets; `complain` hears of each entry that is 0 or more than can be.
            pub(crate) fn to_limits(&self, mut complain: impl FnMut(&Spanned<u64>, u64)) -> TrafficLimits {
                let mut limits = TrafficLimits::default();
                $(match &self.$name {
                    Some(entry) if (1..=$most).contains(entry.get_ref()) => limits.$name = *entry.get_ref(),
                    Some(entry) => complain(entry, $most),
                    None => {}
                })*
                limits
            }
        }

        impl TrafficLimits {
            /// Name, default, greatest value and meaning of each, for the documentation.
            pub const TABLE: &[(&str, u64, u64, &str)] =
                &[$((stringify!($name), $usual, $most, concat!($($doc),+).trim_ascii_start()),)*];
        }
    };
}

limits! {
    /// Open connections in all.
    connections = 20_000, at most 1_000_000;
    /// Open connections of one sandbox.
    connections_per_sandbox = 4_096, at most 1_000_000;
    /// Seconds until a new connection has said what it wants: TLS hello, CONNECT or request head.
    first_bytes_seconds = 10, at most 120;
    /// Bytes of a TLS hello.
    hello_bytes = 65_536, at most 262_144;
    /// Bytes of a request head; for HTTP/2 of the decoded header list.
    head_bytes = 32_768, at most 262_144;
    /// Header fields of a request.
    head_fields = 100, at most 250;
    /// Seconds from the first byte of a request head to its last.
    head_seconds = 10, at most 120;
    /// Seconds an HTTP connection may wait for its next request.
    keep_alive_seconds = 75, at most 3_600;
    /// HTTP/2 streams open at once on one connection.
    streams = 100, at most 1_000;
    /// HTTP/2 streams of one connection that may be reset or malformed before the connection ends.
    resets = 200, at most 10_000;
    /// Seconds to connect to one address of a host, TLS included.
    connect_seconds = 10, at most 120;
    /// Seconds until the first byte of an answer.
    first_byte_seconds = 300, at most 3_600;
    /// Seconds without a byte in either direction of a request or an upgraded connection.
    idle_seconds = 300, at most 86_400;
    /// Seconds without a byte in either direction of a tunnel.
    tunnel_idle_seconds = 3_600, at most 86_400;
    /// Seconds any connection may live.
    connection_seconds = 86_400, at most 2_592_000;
    /// Bytes of a request body towards a host whose rule says `inspect`.
    inspected_body_bytes = 10_485_760, at most 1_073_741_824;
    /// Bytes of a request body towards a memory service, which is read whole.
    memory_body_bytes = 4_194_304, at most 67_108_864;
    /// Seconds until all of that body has arrived.
    memory_body_seconds = 30, at most 600;
    /// Bytes of an answer of a memory service, which is read whole.
    memory_answer_bytes = 16_777_216, at most 268_435_456;
    /// Seconds until all of that answer has arrived.
    memory_answer_seconds = 300, at most 3_600;
    /// Idle connections kept towards origins.
    pool_connections = 512, at most 100_000;
    /// Seconds that open connections are given to finish at a stop.
    drain_seconds = 20, at most 600;
}

impl TrafficLimits {
    pub fn first_bytes(&self) -> Duration {
        Duration::from_secs(self.first_bytes_seconds)
    }

    pub fn head(&self) -> Duration {
        Duration::from_secs(self.head_seconds)
    }

    pub fn keep_alive(&self) -> Duration {
        Duration::from_secs(self.keep_alive_seconds)
    }

    pub fn connect(&self) -> Duration {
        Duration::from_secs(self.connect_seconds)
    }

    pub fn first_byte(&self) -> Duration {
        Duration::from_secs(self.first_byte_seconds)
    }

    pub fn idle(&self) -> Duration {
        Duration::from_secs(self.idle_seconds)
    }

    pub fn tunnel_idle(&self) -> Duration {
        Duration::from_secs(self.tunnel_idle_seconds)
    }

    pub fn connection(&self) -> Duration {
        Duration::from_secs(self.connection_seconds)
    }

    pub fn memory_body(&self) -> Duration {
        Duration::from_secs(self.memory_body_seconds)
    }

    pub fn memory_answer(&self) -> Duration {
        Duration::from_secs(self.memory_answer_seconds)
    }

    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.drain_seconds)
    }
}

/// The documentation of every bound, as it stands in `proxy/LIMITS.md`.
pub fn markdown_table() -> String {
    let mut text = String::from(
        "# Limits\n\nWhat `[limits]` of the operator's file can set. What is not written has its default.\n\n\
         | name | default | most | bounds |\n| --- | --- | --- | --- |\n",
    );
    for (name, usual, most, meaning) in TrafficLimits::TABLE {
        text += &format!("| `{name}` | {usual} | {most} | {meaning} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn p17_the_documented_table_is_the_code() {
        assert_eq!(
            include_str!("../../proxy/LIMITS.md"),
            super::markdown_table(),
            "write proxy/LIMITS.md anew: cargo run -p cli -- limits --markdown"
        );
    }
}
