//! The thresholds of the shape detectors, and their defaults.

/// Generates the thresholds and their documentation from one table.
macro_rules! thresholds {
    ($($(#[doc = $doc:literal])+ $name:ident: $default:expr;)*) => {
        /// From which value on each signal is raised.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct ShapeThresholds {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Default for ShapeThresholds {
            fn default() -> Self {
                ShapeThresholds { $($name: $default,)* }
            }
        }

        impl ShapeThresholds {
            /// Every threshold: its key, its default and its meaning.
            pub const ALL: &[(&str, u64, &str)] = &[
                $((stringify!($name), $default, concat!($($doc),+).trim_ascii_start()),)*
            ];
        }
    };
}

thresholds! {
    /// Requests of one kind at one interval, each with something new in it (`beacon`).
    beacon_requests: 20;
    /// By how many percent these intervals may differ (`beacon`).
    beacon_jitter_percent: 10;
    /// Bits that the order of known requests says in a day, beyond routine (`drip`).
    choice_bits_per_day: 6_144;
    /// New bytes in an hour in cookies that the host did not set (`drip`).
    cookie_bytes_per_hour: 768;
    /// The same in a day (`drip`).
    cookie_bytes_per_day: 1_024;
    /// Characters of one run in the alphabet of an encoding (`encoded_run`).
    encoded_run_characters: 384;
    /// The same in credentials and signatures (`encoded_run`).
    token_run_characters: 4_096;
    /// New bytes in an hour in the values of fields that usually repeat theirs (`drip`).
    field_bytes_per_hour: 768;
    /// The same in a day (`drip`).
    field_bytes_per_day: 1_024;
    /// Combinations of fields in an hour that were not used before (`field_novelty`).
    field_lists_per_hour: 48;
    /// Characters of one field name (`field_novelty`).
    field_name_characters: 64;
    /// Characters of new field names in an hour (`field_novelty`).
    field_name_characters_per_hour: 1_024;
    /// New field names in an hour, after the first 16 requests (`field_novelty`).
    field_names_per_hour: 12;
    /// Fields of one request (`many_fields`).
    fields: 48;
    /// New bytes of identifiers, signatures and checksums in an hour (`drip`).
    identifier_bytes_per_hour: 262_144;
    /// Steps of a counter that come with other data (`sequence`).
    sequence_steps: 64;
    /// Credentials in an hour that were not used before, for URLs that were, if they have 768 bytes together
    /// (`encoded_run`).
    tokens_per_hour: 4;
    /// By how many times the share of what is sent exceeds that of the host's past (`upload_ratio`).
    upload_factor: 8;
    /// Bytes sent to a host in an hour before they are compared with its past (`upload_ratio`).
    upload_bytes_per_hour: 64 << 20;
    /// Bytes of bodies of at most 1 KiB that are sent in a day (`drip`).
    small_upload_bytes_per_day: 16 << 20;
    /// New bytes of any kind in URLs in an hour that no answer excuses (`drip`).
    url_bytes_per_hour: 4_096;
    /// The same in a day (`drip`).
    url_bytes_per_day: 16_384;
    /// New bytes in URLs in an hour that look random and no answer excuses (`url_novelty`).
    url_random_bytes_per_hour: 768;
    /// The same in a day (`url_novelty`).
    url_random_bytes_per_day: 1_024;
    /// Bytes of new text in one path segment or query value (`url_novelty`).
    url_text_bytes: 256;
    /// Bytes of new text in an hour in values with at least 48 of them that no answer excuses (`url_novelty`).
    url_text_bytes_per_hour: 1_024;
    /// `User-Agent` values in an hour (`user_agent_changed`).
    user_agents_per_hour: 8;
    /// New bytes of `User-Agent` values in an hour (`user_agent_changed`).
    user_agent_bytes_per_hour: 1_024;
}
