//! Every limit of the data path that `[limits]` can set, in one table: name, default, maximum and meaning (P17).

use schemars::JsonSchema;
use serde::Deserialize;
use std::time::Duration;
use toml::Spanned;

/// Generates the settings, the section of the configuration and the documentation from one table.
macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $name:ident = $usual:literal, at most $most:literal;)*) => {
        /// The limits of one instance.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct TrafficLimits {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Default for TrafficLimits {
            fn default() -> Self {
                TrafficLimits { $($name: $usual,)* }
            }
        }

        /// `[limits]`: limits on connections, requests and buffers.
        #[derive(Debug, Default, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct LimitsDocument {
            $($(#[doc = $doc])+
            #[schemars(with = "Option<u64>")]
            pub(crate) $name: Option<Spanned<u64>>,)*
        }

        impl LimitsDocument {
            /// Returns the limits; calls `reject` with each entry that is out of range and its maximum.
            pub(crate) fn to_limits(&self, mut reject: impl FnMut(&Spanned<u64>, u64)) -> TrafficLimits {
                let mut limits = TrafficLimits::default();
                $(match &self.$name {
                    Some(entry) if (1..=$most).contains(entry.get_ref()) => limits.$name = *entry.get_ref(),
                    Some(entry) => reject(entry, $most),
                    None => {}
                })*
                limits
            }
        }

        impl TrafficLimits {
            /// Name, default, maximum and meaning of each limit, for the documentation.
            pub const TABLE: &[(&str, u64, u64, &str)] =
                &[$((stringify!($name), $usual, $most, concat!($($doc),+).trim_ascii_start()),)*];
        }
    };
}

limits! {
    /// Open connections of all sandboxes.
    connections = 20_000, at most 1_000_000;
    /// Open connections of one sandbox.
    connections_per_sandbox = 4_096, at most 1_000_000;
    /// Seconds until a new connection has sent its TLS ClientHello, CONNECT or request head.
    first_bytes_seconds = 10, at most 120;
    /// Bytes of a TLS ClientHello.
    hello_bytes = 65_536, at most 262_144;
    /// Bytes of a request head; for HTTP/2, of the decoded header list.
    head_bytes = 32_768, at most 262_144;
    /// Header fields of a request.
    head_fields = 100, at most 250;
    /// Seconds from the first byte of a request head to its last; over HTTP/2, to the end of its last CONTINUATION.
    head_seconds = 10, at most 120;
    /// Seconds an HTTP connection may wait for its next request.
    keep_alive_seconds = 75, at most 3_600;
    /// Concurrent HTTP/2 streams on one connection.
    streams = 100, at most 1_000;
    /// HTTP/2 streams of one connection that may be reset or malformed before Sandbar closes it.
    resets = 200, at most 10_000;
    /// Bytes of a response head.
    answer_head_bytes = 65_536, at most 1_048_576;
    /// Header fields of a response.
    answer_head_fields = 200, at most 1_000;
    /// Interim responses (status 1xx) before the response to a request.
    interim_answers = 32, at most 1_000;
    /// Seconds to connect to a host, whichever of its addresses answers, including TLS.
    connect_seconds = 10, at most 120;
    /// Seconds until the first byte of a response.
    first_byte_seconds = 300, at most 3_600;
    /// Least bytes per second of a body, on average over `idle_seconds`: of a request until the response begins, and of a response that announces its length.
    body_bytes_per_second = 100, at most 1_000_000;
    /// Seconds without a byte in either direction of a request or an upgraded connection.
    idle_seconds = 300, at most 86_400;
    /// Seconds without a byte in either direction of a tunnel.
    tunnel_idle_seconds = 3_600, at most 86_400;
    /// Lifetime of any connection, in seconds.
    connection_seconds = 86_400, at most 2_592_000;
    /// Bytes of a request body to a memory service, which Sandbar buffers completely.
    memory_body_bytes = 4_194_304, at most 67_108_864;
    /// Seconds until that body has arrived completely.
    memory_body_seconds = 30, at most 600;
    /// Bytes of a response of a memory service, which Sandbar buffers completely.
    memory_answer_bytes = 16_777_216, at most 268_435_456;
    /// Seconds until that response has arrived completely.
    memory_answer_seconds = 300, at most 3_600;
    /// Idle connections to origin servers in the pool.
    pool_connections = 512, at most 100_000;
    /// Seconds that open connections have to finish at shutdown.
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

/// Returns the table of limits in `proxy/LIMITS.md`.
pub fn markdown_table() -> String {
    let mut text = String::from(
        "# Limits\n\nThe keys of `[limits]` in the configuration. Absent keys have their default.\n\n\
         | name | default | maximum | limits |\n| --- | --- | --- | --- |\n",
    );
    for (name, usual, most, meaning) in TrafficLimits::TABLE {
        text += &format!("| `{name}` | {usual} | {most} | {meaning} |\n");
    }
    text
}
