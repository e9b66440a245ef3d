//! Responses to probes: Sandbar marks its refusals with header fields that no other server sends.

use std::io::{self, Read};

use super::report::escape_terminal;

/// Maximum length of a response head.
const MAX_HEAD: usize = 16 << 10;
/// Maximum length of a shown first line.
const MAX_SHOWN: usize = 60;

/// The head of a response.
#[derive(Clone, Debug, Default)]
pub(super) struct ProbeResponse {
    head: String,
}

impl ProbeResponse {
    /// Reads to the end of the head, or to the end of the stream.
    pub(super) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 2048];
        loop {
            let count = match stream.read(&mut buffer) {
                Ok(count) => count,
                Err(_) if !bytes.is_empty() => 0,
                Err(error) => return Err(error),
            };
            bytes.extend(buffer.get(..count).unwrap_or_default());
            let is_complete = bytes.windows(4).any(|window| window == b"\r\n\r\n");
            if count == 0 || is_complete || bytes.len() > MAX_HEAD {
                return Ok(ProbeResponse { head: String::from_utf8_lossy(&bytes).into_owned() });
            }
        }
    }

    /// The value of a header field.
    fn field(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().take_while(|line| !line.is_empty());
        let mut fields = lines.filter_map(|line| line.split_once(':'));
        fields.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    /// Id of the record, if Sandbar refused the request.
    pub(super) fn record_id(&self) -> Option<&str> {
        self.field("sandbar-record")
    }

    /// Reason code, if Sandbar refused the request.
    pub(super) fn reason(&self) -> Option<&str> {
        self.field("sandbar-reason")
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// The first line, shortened and escaped.
    pub(super) fn first_line(&self) -> String {
        let line: String = self.head.lines().next().unwrap_or_default().chars().take(MAX_SHOWN).collect();
        escape_terminal(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_header_fields_identify_sandbar() {
        for (text, record) in [
            ("HTTP/1.1 403 Forbidden\r\nsandbar-RECORD: 01J\r\n\r\nbody", Some("01J")),
            ("HTTP/1.1 200 OK\r\nServer: x\r\n\r\nSandbar-Record: 01J\r\n\r\n", None),
            ("", None),
        ] {
            let answer = ProbeResponse::read(&mut text.as_bytes()).unwrap();
            assert_eq!(answer.record_id(), record, "{text}");
        }
    }
}
