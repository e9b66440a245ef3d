//! The bounds of credentials, for `proxy/LIMITS.md`.

use crate::credential::cell::{LONGEST_REST, MARGIN, MAX_SILENCE};
use crate::credential::known::{MAX_NAMES, MAX_PREVIOUS, REMEMBERED};
use crate::credential::secret_file::{LENGTH, SOURCE_FILE};
use crate::credential::source::bounds::{ADDRESSES, ANSWER, COMPLAINT, CONNECT};
use crate::credential::store::FIRST_LOOK;

/// Returns each bound with what it limits.
pub(crate) fn bounds() -> Vec<(&'static str, String)> {
    let (seconds, kilobytes) =
        (|time: std::time::Duration| format!("{} s", time.as_secs()), |bytes| format!("{bytes} bytes"));
    vec![
        ("value in a file, or printed by a command", kilobytes(LENGTH)),
        ("private key or key file of a source", kilobytes(SOURCE_FILE)),
        ("answer of a token endpoint, and its head", kilobytes(ANSWER as u64)),
        ("what a command writes to stderr, as far as it is kept", kilobytes(COMPLAINT as u64)),
        ("addresses of a token endpoint that are tried", ADDRESSES.to_string()),
        ("time for one of them to connect", seconds(CONNECT)),
        ("time of one fetch, and of a request that waits for it", "`timeout_seconds`".to_owned()),
        ("fetches of one credential at a time", "1".to_owned()),
        ("rest after failures, which doubles from 1 s", seconds(LONGEST_REST)),
        ("time before its stated end in which a value is not used", seconds(MARGIN)),
        ("time that the last value of a file is used while its mount does not answer", seconds(MAX_SILENCE)),
        ("time that the start or a reload waits for files", seconds(FIRST_LOOK)),
        ("time that a replaced value is recognised", seconds(REMEMBERED)),
        ("replaced values of one credential", MAX_PREVIOUS.to_string()),
        ("credentials whose values are recognised, removed ones included", MAX_NAMES.to_string()),
    ]
}
