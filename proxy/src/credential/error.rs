//! Why a credential cannot be used: in words, with the file, host or program to look at, and never with a value.

use std::path::PathBuf;
use std::time::Duration;

use crate::credential::secret_file::LENGTH;
use crate::credential::value::SHORTEST;

/// Why a credential cannot be used. Never contains its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    #[error("other users can write its file (mode {mode:03o}): chmod 600 {}", .path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("every user of the machine can read its file (mode {mode:03o}): chmod 600 {}", .path.display())]
    Readable { path: PathBuf, mode: u32 },
    #[error("cannot read the file {}: {why}", .path.display())]
    File { path: PathBuf, why: String },
    #[error("{}: {why}", .path.display())]
    Content { path: PathBuf, why: String },
    #[error("its file {} has not answered for {} s", .path.display(), .silence.as_secs())]
    Silent { path: PathBuf, silence: Duration },
    #[error("the environment variable {0} is not set, or is not text")]
    Variable(String),
    #[error("it is longer than {LENGTH} bytes")]
    Long,
    #[error("it contains characters that a header field cannot carry")]
    Malformed,
    #[error("it is empty")]
    Empty,
    #[error("it is shorter than {SHORTEST} characters")]
    Short,
    #[error("the command {program}: {fault}")]
    Command { program: String, fault: CommandFault },
    #[error("{host}: {fault}")]
    Endpoint { host: String, fault: EndpointFault },
    #[error("its source has not answered within {} s", .0.as_secs())]
    TimedOut(Duration),
    #[error("its source gave a value that ends within {} s", .0.as_secs())]
    EndsAtOnce(Duration),
    #[error("its value has ended, and there is no other yet")]
    Ended,
    #[error("too much waits for its files")]
    Busy,
}

/// What was wrong with a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandFault {
    #[error("cannot be started: {0}")]
    Start(String),
    #[error("prints more than {LENGTH} bytes")]
    Long,
    #[error("its output cannot be read: {0}")]
    Output(String),
    #[error("ended with {status}{}{said}", if said.is_empty() { "" } else { ": " })]
    Status { status: String, said: String },
    #[error("what it prints is not a credential: {0}")]
    Value(Box<CredentialError>),
}

/// What was wrong with a server that was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointFault {
    #[error("cannot be resolved: {0}")]
    Resolve(String),
    #[error("cannot be reached: {0}")]
    Connect(String),
    #[error("its certificate or TLS is not accepted: {0}")]
    Tls(String),
    #[error("no certificate can be verified: {0}")]
    Roots(String),
    #[error("breaks off: {0}")]
    Protocol(String),
    #[error("answers with more than {0} bytes")]
    Long(usize),
    #[error("answers {status}{}{said}", if said.is_empty() { "" } else { ": " })]
    Status { status: u16, said: String },
    #[error("answers what is not understood: {0}")]
    Answer(String),
    #[error("its answer holds no credential: {0}")]
    Value(Box<CredentialError>),
}

/// Longest text of another party in an error.
const SAID: usize = 200;

/// Makes what another party said fit to be shown: printable, on one line, bounded.
pub(super) fn printable(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    let shown =
        line.chars().map(|letter| if letter.is_ascii_graphic() || letter == ' ' { letter } else { '?' });
    shown.take(SAID).collect()
}
