//! Takes credentials out of the environment, past the fork of the jail, and back into the proxy alone.
//!
//! The keeper and init are forks of this process, so what is in its memory at that time is in theirs. The values that
//! the proxy needs wait in an anonymous file that both close; all others are overwritten.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use anyhow::Context;
use nix::sys::memfd::{MFdFlags, memfd_create};
use sys::environment;
use zeroize::Zeroizing;

/// Shortest value that is looked for in other variables: a shorter one would occur by chance.
const SHORTEST: usize = 8;

/// Variables that are not in the memory of this process until they are restored.
pub(super) struct SealedVariables {
    /// Names, and how many bytes of the file each value has, in its order.
    stored: Vec<(OsString, usize)>,
    file: File,
}

impl SealedVariables {
    /// Removes all variables with credentials from the environment, except those that the command is to `keep`.
    /// Stores those that the proxy is `wanted` to have.
    ///
    /// Whatever its name, a variable goes too if it contains a wanted value.
    pub(super) fn take(wanted: &BTreeSet<String>, keep: &[String]) -> anyhow::Result<Self> {
        let file = memfd_create(c"credentials", MFdFlags::MFD_CLOEXEC).context("cannot keep credentials")?;
        let mut sealed = SealedVariables { stored: Vec::new(), file: File::from(file) };
        let all = read_all();
        for (name, value, treatment) in classify(&all, wanted, keep) {
            if treatment == Treatment::Store {
                sealed.file.write_all(value).context("cannot keep credentials")?;
                sealed.stored.push((name.clone(), value.len()));
            }
            environment::erase(name).with_context(|| format!("cannot remove {}", name.to_string_lossy()))?;
        }
        Ok(sealed)
    }

    /// Puts the stored variables back into the environment, for the proxy. Call it after the fork.
    pub(super) fn restore(mut self) -> anyhow::Result<()> {
        self.file.rewind()?;
        for (name, length) in &self.stored {
            let mut value = Zeroizing::new(vec![0; *length]);
            self.file.read_exact(&mut value)?;
            environment::set(name, OsStr::from_bytes(&value))?;
        }
        Ok(())
    }
}

/// Returns the names of the variables that [`SealedVariables::take`] would remove, sorted.
pub(super) fn removed_variables(wanted: &BTreeSet<String>, keep: &[String]) -> Vec<String> {
    let all = read_all();
    let names = classify(&all, wanted, keep).map(|(name, ..)| name.to_string_lossy().into_owned());
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns whether a variable is set and not empty.
pub(super) fn is_set(name: &str) -> bool {
    let value = std::env::var_os(name).map(|value| Zeroizing::new(value.into_vec()));
    value.is_some_and(|value| !value.is_empty())
}

type Variable = (OsString, Zeroizing<Vec<u8>>);

/// What becomes of a variable that the command does not get.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Treatment {
    Erase,
    Store,
}

fn read_all() -> Vec<Variable> {
    std::env::vars_os().map(|(name, value)| (name, Zeroizing::new(value.into_vec()))).collect()
}

/// Returns the variables that the command does not get, with their values.
fn classify<'a>(
    all: &'a [Variable],
    wanted: &BTreeSet<String>,
    keep: &[String],
) -> impl Iterator<Item = (&'a OsString, &'a [u8], Treatment)> {
    let is_kept = |name: &OsString| keep.iter().any(|one| **one == **name);
    let is_stored = |name: &OsString| wanted.iter().any(|one| **one == **name) && !is_kept(name);
    let values: Vec<&[u8]> =
        all.iter().filter(|(name, _)| is_stored(name)).map(|(_, value)| value.as_slice()).collect();
    let treat = |(name, value): &'a Variable| {
        let treatment = if is_stored(name) {
            Treatment::Store
        } else if !is_kept(name)
            && (jail::is_credential_variable(&name.to_string_lossy()) || contains_any(value, &values))
        {
            Treatment::Erase
        } else {
            return None;
        };
        Some((name, value.as_slice(), treatment))
    };
    all.iter().filter_map(treat).collect::<Vec<_>>().into_iter()
}

fn contains_any(text: &[u8], values: &[&[u8]]) -> bool {
    let long = values.iter().filter(|value| value.len() >= SHORTEST);
    long.copied().any(|value| text.windows(value.len()).any(|part| part == value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_and_what_contains_them_do_not_reach_the_command() {
        let given = [
            ("ANTHROPIC_API_KEY", "sk-0123456789"),
            ("COPY", "x sk-0123456789 y"),
            ("GITHUB_TOKEN", "ghp-1"),
            ("HOME", "/home/ann"),
            ("KEPT_TOKEN", "token"),
            ("SHORT_TOKEN", "a"),
        ];
        let all: Vec<Variable> = given
            .iter()
            .map(|(name, value)| (name.into(), Zeroizing::new(value.as_bytes().to_vec())))
            .collect();
        let wanted = ["ANTHROPIC_API_KEY", "SHORT_TOKEN"].map(str::to_owned).into_iter().collect();
        let removed = classify(&all, &wanted, &["KEPT_TOKEN".to_owned()]);
        let removed: Vec<_> =
            removed.map(|(name, _, how)| (name.to_str().unwrap(), how == Treatment::Store)).collect();
        let expected =
            [("ANTHROPIC_API_KEY", true), ("COPY", false), ("GITHUB_TOKEN", false), ("SHORT_TOKEN", true)];
        assert_eq!(removed, expected);
    }
}
