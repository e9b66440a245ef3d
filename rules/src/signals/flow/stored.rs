//! A table as bytes, so that text recalled before a restart is recognised after it.
//!
//! Layout, in big-endian: `SFLW`, version (1 byte), check of the key (8), number of banks (2), number of entries (4);
//! then per bank its length (1) and name; then per entry hash (8), time (4) and index of the bank (2).

use super::table::{FlowLimits, FlowTable, seconds};
use super::window::FlowKey;
use super::{MAX_BANKS, MAX_FINGERPRINTS};
use crate::ids::{BankId, IdError};

const MAGIC: &[u8; 4] = b"SFLW";
const VERSION: u8 = 1;

/// Why stored fingerprints were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowTableError {
    #[error("bank {at} has an invalid name")]
    Bank { at: usize, source: IdError },
    #[error("entry {at} is invalid")]
    Entry { at: usize },
    #[error("the fingerprints were made with another key")]
    Key,
    #[error("the length does not match the content")]
    Length,
    #[error("this is not a table of fingerprints")]
    Magic,
    #[error("{found} {what} are more than {most}")]
    TooMany { what: &'static str, found: usize, most: usize },
    #[error("version {found} is not known; this build reads version {VERSION}")]
    Version { found: u8 },
}

impl FlowTable {
    /// Returns the table as bytes. They contain no text, only hashes and the names of banks.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (banks, entries) = self.entries();
        let mut bytes = Vec::with_capacity(32 + self.len() * 14);
        bytes.extend_from_slice(MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.key().check().to_be_bytes());
        bytes.extend_from_slice(&(banks.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&(self.len() as u32).to_be_bytes());
        for bank in banks {
            bytes.push(bank.as_str().len() as u8);
            bytes.extend_from_slice(bank.as_str().as_bytes());
        }
        for entry in entries {
            bytes.extend_from_slice(&entry.hash.to_be_bytes());
            bytes.extend_from_slice(&entry.time.to_be_bytes());
            bytes.extend_from_slice(&entry.bank.to_be_bytes());
        }
        bytes
    }

    /// Reads what [`FlowTable::to_bytes`] returned. Times after `now` count as `now`.
    ///
    /// # Errors
    ///
    /// Returns [`FlowTableError`] if the bytes are damaged or belong to another key or version.
    pub fn from_bytes(
        key: &FlowKey,
        limits: FlowLimits,
        bytes: &[u8],
        now: u64,
    ) -> Result<Self, FlowTableError> {
        let mut rest = bytes;
        if take(&mut rest).ok_or(FlowTableError::Magic)? != *MAGIC {
            return Err(FlowTableError::Magic);
        }
        let [version] = take(&mut rest).ok_or(FlowTableError::Length)?;
        if version != VERSION {
            return Err(FlowTableError::Version { found: version });
        }
        if u64::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?) != key.check() {
            return Err(FlowTableError::Key);
        }
        let bank_count = usize::from(u16::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?));
        let entry_count = u32::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?) as usize;
        for (what, found, most) in
            [("banks", bank_count, MAX_BANKS), ("fingerprints", entry_count, MAX_FINGERPRINTS)]
        {
            if found > most {
                return Err(FlowTableError::TooMany { what, found, most });
            }
        }
        let banks = (0..bank_count).map(|at| read_bank(&mut rest, at)).collect::<Result<Vec<_>, _>>()?;
        if rest.len() != entry_count * 14 {
            return Err(FlowTableError::Length);
        }
        let mut table = FlowTable::new(key, limits);
        for at in 0..entry_count {
            let hash = u64::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?);
            let time = u32::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?);
            let bank = u16::from_be_bytes(take(&mut rest).ok_or(FlowTableError::Length)?);
            let bank = banks.get(usize::from(bank)).filter(|_| hash != 0);
            let bank = bank.ok_or(FlowTableError::Entry { at })?;
            table.insert(bank, hash, time.min(seconds(now)));
        }
        table.expire(now);
        Ok(table)
    }
}

fn read_bank(rest: &mut &[u8], at: usize) -> Result<BankId, FlowTableError> {
    let [length] = take(rest).ok_or(FlowTableError::Length)?;
    let (name, after) = rest.split_at_checked(usize::from(length)).ok_or(FlowTableError::Length)?;
    *rest = after;
    let name = str::from_utf8(name).map_err(|_| IdError::Character);
    name.and_then(BankId::parse).map_err(|source| FlowTableError::Bank { at, source })
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*taken)
}
