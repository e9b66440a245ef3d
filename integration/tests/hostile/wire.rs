//! The client's side: raw bytes out, one strict answer at a time back in.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Nothing here takes as long on a machine that is merely busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// Anything that carries bytes both ways.
pub(crate) trait ByteStream: Read + Write + Send {}

impl<T: Read + Write + Send> ByteStream for T {}

/// A connection and what came on it that nobody has looked at.
pub(crate) struct RawConnection {
    stream: Box<dyn ByteStream>,
    ahead: Vec<u8>,
}

/// One answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawResponse {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) fields: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// The statuses of the interim answers before it.
    pub(crate) interim: Vec<u16>,
    /// All of it, as it came.
    pub(crate) raw: Vec<u8>,
}

impl RawResponse {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl RawConnection {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        stream.set_nodelay(true).unwrap();
        RawConnection::from_stream(Box::new(stream))
    }

    pub(crate) fn from_stream(stream: Box<dyn ByteStream>) -> Self {
        RawConnection { stream, ahead: Vec::new() }
    }

    /// The carrier again; nothing may have been read ahead.
    pub(crate) fn into_stream(self) -> Box<dyn ByteStream> {
        assert!(self.ahead.is_empty(), "more than the answer has come");
        self.stream
    }

    /// Sends; a peer that has closed already is none of our business here, its answer is.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        drop(self.stream.write_all(bytes.as_ref()).and_then(|()| self.stream.flush()));
    }

    /// Sends; false where nobody takes it any more.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).and_then(|()| self.stream.flush()).is_ok()
    }

    /// One answer to a request of `method`; none where the connection ended before it was whole.
    pub(crate) fn read_response(&mut self, method: &str) -> Option<RawResponse> {
        let mut answer = RawResponse::default();
        loop {
            let head = self.read_until(b"\r\n\r\n")?;
            answer.raw.extend_from_slice(&head);
            let (status, fields) = self.parse_head(&head);
            if (100..200).contains(&status) && status != 101 {
                answer.interim.push(status);
                continue;
            }
            (answer.status, answer.fields) = (status, fields);
            break;
        }
        let bodiless = method == "HEAD" || matches!(answer.status, 101 | 204 | 304);
        let body = match (answer.field("transfer-encoding"), answer.field("content-length")) {
            _ if bodiless => Vec::new(),
            (Some(coding), None) => {
                assert_eq!(coding, "chunked", "{answer:?}");
                self.read_chunks(&mut answer.raw)?
            }
            (None, Some(length)) => self.read_exact(length.parse().unwrap())?,
            (None, None) => self.read_to_end(),
            (Some(_), Some(_)) => panic!("two lengths in {answer:?}"),
        };
        answer.raw.extend_from_slice(&body);
        answer.body = body;
        Some(answer)
    }

    fn parse_head(&self, head: &[u8]) -> (u16, Vec<(String, String)>) {
        let text = String::from_utf8_lossy(head);
        let text = text.strip_suffix("\r\n\r\n").unwrap();
        assert!(!text.replace("\r\n", "").contains(['\r', '\n', '\0']), "{text:?}");
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap();
        let status = first.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5));
        let status = status.and_then(|status| status.parse().ok());
        let fields = lines.map(|line| {
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("field {line:?}"));
            (name.to_ascii_lowercase(), value.trim().to_owned())
        });
        (status.unwrap_or_else(|| panic!("status line {first:?}")), fields.collect())
    }

    fn read_chunks(&mut self, raw: &mut Vec<u8>) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.read_until(b"\r\n")?;
            raw.extend_from_slice(&line);
            let size = str::from_utf8(&line[..line.len() - 2]).unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            let data = self.read_exact(size + 2)?;
            assert!(data.ends_with(b"\r\n"), "a chunk is longer than it says");
            body.extend_from_slice(&data[..size]);
            if size == 0 {
                return Some(body);
            }
        }
    }

    /// Everything up to and including `end`; none where the connection ends first.
    pub(crate) fn read_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            let found = self.ahead.windows(end.len()).position(|window| window == end);
            if let Some(at) = found {
                return Some(self.ahead.drain(..at + end.len()).collect());
            }
            if self.fill() == 0 {
                return None;
            }
        }
    }

    pub(crate) fn read_exact(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.ahead.len() < count {
            if self.fill() == 0 {
                return None;
            }
        }
        Some(self.ahead.drain(..count).collect())
    }

    /// Everything until the connection ends.
    pub(crate) fn read_to_end(&mut self) -> Vec<u8> {
        while self.fill() > 0 {}
        std::mem::take(&mut self.ahead)
    }

    /// Waits for more bytes; 0 at the end, however it came.
    fn fill(&mut self) -> usize {
        let mut buffer = [0; 16 << 10];
        let read = match self.stream.read(&mut buffer) {
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("neither an answer nor an end; so far {:?}", String::from_utf8_lossy(&self.ahead))
            }
            Err(_) => 0, // reset, or TLS ended without a goodbye
        };
        self.ahead.extend_from_slice(&buffer[..read]);
        read
    }
}
