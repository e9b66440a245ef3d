//! The thresholds of the shape detectors, as `[signals.thresholds]` sets them: name, default, maximum and meaning.

use schemars::JsonSchema;
use serde::Deserialize;
use toml::Spanned;

/// Generates the thresholds, their part of a policy and their documentation from one table.
macro_rules! thresholds {
    ($($(#[doc = $doc:literal])+ $name:ident = $usual:literal, at most $most:literal;)*) => {
        /// Beyond which value each signal is raised.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct ShapeThresholds {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Default for ShapeThresholds {
            fn default() -> Self {
                ShapeThresholds { $($name: $usual,)* }
            }
        }

        impl ShapeThresholds {
            /// Name, default, maximum and meaning of each threshold, for the documentation.
            pub const TABLE: &[(&str, u64, u64, &str)] =
                &[$((stringify!($name), $usual, $most, concat!($($doc),+).trim_ascii_start()),)*];

            /// Returns the values, in the order of [`ShapeThresholds::TABLE`].
            pub fn values(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The thresholds that one policy or rule sets.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct ThresholdSettings {
            $($name: Option<u64>,)*
        }

        impl ThresholdSettings {
            /// Combines what two set, one by one.
            pub(crate) fn merge(
                &self,
                other: &Self,
                choose: impl Fn(Option<u64>, Option<u64>) -> Option<u64>,
            ) -> Self {
                ThresholdSettings { $($name: choose(self.$name, other.$name),)* }
            }

            pub(crate) fn in_force(&self) -> ShapeThresholds {
                let usual = ShapeThresholds::default();
                ShapeThresholds { $($name: self.$name.unwrap_or(usual.$name),)* }
            }

            /// Returns what is set.
            pub(crate) fn set(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter().filter_map(|(name, set)| Some((name, set?)))
            }
        }

        /// `thresholds` of `[signals]`: beyond which value a signal is raised. Layers: the smaller counts.
        #[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct ThresholdsDocument {
            $($(#[doc = $doc])+
            #[schemars(with = "Option<u64>", range(min = 1, max = $most))]
            $name: Option<Spanned<u64>>,)*
        }

        impl ThresholdsDocument {
            /// Returns the settings; calls `reject` with each entry that is out of range and its maximum.
            pub(crate) fn to_settings(&self, mut reject: impl FnMut(&Spanned<u64>, u64)) -> ThresholdSettings {
                let mut settings = ThresholdSettings::default();
                $(match &self.$name {
                    Some(entry) if (1..=$most).contains(entry.get_ref()) => settings.$name = Some(*entry.get_ref()),
                    Some(entry) => reject(entry, $most),
                    None => {}
                })*
                settings
            }
        }
    };
}

thresholds! {
    /// Requests of one kind at one interval, each with something new in it (`beacon`).
    beacon_requests = 20, at most 100_000;
    /// Bits that the order of known requests to a host says in a day, beyond routine (`drip`).
    choice_bits_per_day = 6_144, at most 16_777_216;
    /// Bytes of new credentials for a host in an hour that no answer or body excuses (`encoded_run`).
    credential_bytes_per_hour = 1_024, at most 16_777_216;
    /// Characters of one run in the alphabet of an encoding, outside credentials, identifiers and cookies (`encoded_run`).
    encoded_run_characters = 384, at most 65_536;
    /// New field names for a host in an hour, after the first 16 requests (`field_novelty`).
    field_names_per_hour = 12, at most 10_000;
    /// Fields of one request (`many_fields`).
    fields_per_request = 48, at most 250;
    /// Bits that a sandbox says outside bodies in an hour (`header_bits`); `[budget]` bounds them instead.
    header_bits_per_hour = 1_048_576, at most 1_073_741_824;
    /// Bytes of new identifiers and signatures for a host in an hour that no answer or body excuses (`drip`).
    identifier_bytes_per_hour = 32_768, at most 16_777_216;
    /// New bytes for a host in a day in fields and cookies, and in URLs as far as no answer or body excuses them (`drip`, `url_novelty`).
    new_bytes_per_day = 896, at most 16_777_216;
    /// Steps of a counter that come with other data (`sequence`).
    sequence_steps = 64, at most 100_000;
    /// Bytes sent to a host in an hour before they are compared with its past (`upload_ratio`).
    upload_bytes_per_hour = 67_108_864, at most 1_073_741_824;
    /// `User-Agent` values for a host in an hour (`user_agent_changed`).
    user_agents_per_hour = 8, at most 31;
}
