//! Parses a query and builds its answer, in wire form. The work is bounded by the length of the packet, never by a
//! count field, and the answer repeats the question octet by octet. `server::udp` says why hickory's server is not
//! used.

use rules::DomainName;
use rules::Reason;
use rules::facts::QueryType;
use rules::name::NameError;

use crate::limits::{UDP_MAX, UDP_PLAIN};

const HEADER: usize = 12;
/// RFC 1035, 2.3.4.
const NAME_MAX: usize = 255;
const LABEL_MAX: u8 = 63;
const OPT: u16 = 41;
const CLASS_IN: u16 = 1;
/// Code of the extended error option (RFC 8914).
const OPTION_EDE: u16 = 15;

/// A response code (RFC 1035, 4.1.1 and RFC 6891, 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rcode(pub u16);

impl Rcode {
    pub const NOERROR: Rcode = Rcode(0);
    pub const FORMERR: Rcode = Rcode(1);
    pub const SERVFAIL: Rcode = Rcode(2);
    pub const NXDOMAIN: Rcode = Rcode(3);
    pub const NOTIMP: Rcode = Rcode(4);
    pub const REFUSED: Rcode = Rcode(5);
    pub const BADVERS: Rcode = Rcode(16);

    /// Returns the mnemonic, such as `NXDOMAIN`.
    pub fn name(self) -> String {
        match self.0 {
            0 => "NOERROR".to_owned(),
            1 => "FORMERR".to_owned(),
            2 => "SERVFAIL".to_owned(),
            3 => "NXDOMAIN".to_owned(),
            4 => "NOTIMP".to_owned(),
            5 => "REFUSED".to_owned(),
            16 => "BADVERS".to_owned(),
            other => format!("RCODE{other}"),
        }
    }
}

/// An extended DNS error (RFC 8914).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ede {
    pub code: u16,
    /// The reason; its code is the text of the option.
    pub reason: Reason,
}

impl Ede {
    pub const BLOCKED: u16 = 15;
    pub const FILTERED: u16 = 17;
    pub const PROHIBITED: u16 = 18;
    pub const UNREACHABLE: u16 = 22;
    pub const NETWORK: u16 = 23;
    pub const OTHER: u16 = 0;
}

/// A parsed query, which borrows the packet.
#[derive(Clone, Copy, Debug)]
pub struct DnsQuery<'a> {
    head: QueryHeader,
    /// Name, type and class, as sent.
    question: &'a [u8],
    pub kind: QueryType,
    class: u16,
}

/// The part of a query that an answer needs, even if the question cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryHeader {
    id: u16,
    opcode: u8,
    recursion: bool,
    edns: Option<QueryEdns>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueryEdns {
    payload: u16,
    version: u8,
}

/// Why a packet is not a valid query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryError {
    /// No answer: the header is incomplete, or the packet is itself an answer, which could start a loop.
    Drop,
    /// Answered with a header and response code only.
    Malformed(QueryHeader, Rcode),
    /// An opcode other than QUERY.
    Operation(QueryHeader, Rcode),
}

/// The transport of a query and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsTransport {
    Tcp,
    Udp,
}

impl<'a> DnsQuery<'a> {
    /// Parses a packet.
    ///
    /// # Errors
    ///
    /// Returns [`QueryError`] for everything except one well-formed question with at most one OPT record.
    pub fn parse(packet: &'a [u8]) -> Result<Self, QueryError> {
        let mut reader = WireReader { bytes: packet, at: 0 };
        let (id, flags) = (reader.u16(), reader.u16());
        let (Some(id), Some(flags)) = (id, flags) else { return Err(QueryError::Drop) };
        let counts = [(); 4].map(|()| reader.u16());
        let [Some(questions), Some(answers), Some(authority), Some(additional)] = counts else {
            return Err(QueryError::Drop);
        };
        if flags & 0x8000 != 0 {
            return Err(QueryError::Drop);
        }
        let opcode = (flags >> 11 & 0xf) as u8;
        let mut head = QueryHeader { id, opcode, recursion: flags & 0x0100 != 0, edns: None };
        match opcode {
            0 => {}
            5 => return Err(QueryError::Operation(head, Rcode::REFUSED)), // RFC 2136: UPDATE
            _ => return Err(QueryError::Operation(head, Rcode::NOTIMP)),
        }
        let malformed = QueryError::Malformed(head, Rcode::FORMERR);
        if questions != 1 {
            return Err(malformed); // RFC 9619
        }
        let (question, kind, class) = reader.read_question().ok_or(malformed)?;
        let others = u32::from(answers) + u32::from(authority);
        head.edns = reader.find_edns(others, u32::from(additional)).ok_or(malformed)?;
        if head.edns.is_some_and(|edns| edns.version != 0) {
            return Err(QueryError::Malformed(head, Rcode::BADVERS));
        }
        Ok(DnsQuery { head, question, kind: QueryType(kind), class })
    }

    pub fn id(&self) -> u16 {
        self.head.id
    }

    /// Returns name, type and class as sent.
    pub fn question(&self) -> &'a [u8] {
        self.question
    }

    pub fn is_internet(&self) -> bool {
        self.class == CLASS_IN
    }

    /// Returns the labels of the name, without the root.
    pub fn labels(&self) -> impl Iterator<Item = &'a [u8]> {
        labels(self.question)
    }

    /// Returns the name in its normal form.
    ///
    /// # Errors
    ///
    /// Returns [`NameError`] for the root, and for octets that a host name cannot have, UTF-8 included.
    pub fn name(&self) -> Result<DomainName, NameError> {
        let plain = |label: &[u8]| label.is_ascii();
        match self.labels().all(plain) {
            true => DomainName::from_labels(self.labels()),
            false => Err(NameError::Character(char::REPLACEMENT_CHARACTER)),
        }
    }

    /// Returns the name as sent, for the record, with octets other than printable ASCII escaped.
    pub fn display_name(&self) -> String {
        display_labels(self.labels())
    }

    /// Writes the cache key, name in lower case and type in wire form, into `buffer`.
    pub fn wire_key<'b>(&self, buffer: &'b mut [u8; NAME_MAX + 2]) -> &'b [u8] {
        let length = self.question.len().saturating_sub(2).min(buffer.len());
        let key = buffer.get_mut(..length).unwrap_or_default();
        if let Some(asked) = self.question.get(..length) {
            key.copy_from_slice(asked);
            key.make_ascii_lowercase(); // length octets are at most 63, below every letter
        }
        key
    }

    /// Builds the answer, with the TTLs of `section` reduced by `age` seconds.
    pub fn build_answer(
        &self,
        rcode: Rcode,
        section: &AnswerSection,
        age: u32,
        ede: Option<Ede>,
        carrier: DnsTransport,
    ) -> Vec<u8> {
        let mut packet = Vec::with_capacity(HEADER + self.question.len() + section.len() + 48);
        self.head.write_header(&mut packet, rcode, 1, section.count());
        packet.extend_from_slice(self.question);
        section.write_to(&mut packet, age);
        self.head.write_opt(&mut packet, rcode, ede);
        match carrier {
            DnsTransport::Udp if packet.len() > self.head.max_payload() => self.build_truncated(rcode),
            DnsTransport::Tcp | DnsTransport::Udp => packet,
        }
    }

    /// Builds a truncated answer without any records, so that the client retries over TCP (RFC 2181, 9).
    fn build_truncated(&self, rcode: Rcode) -> Vec<u8> {
        let mut packet = Vec::with_capacity(HEADER + self.question.len() + 16);
        self.head.write_header(&mut packet, rcode, 1, 0);
        if let Some(flags) = packet.get_mut(2) {
            *flags |= 0x02;
        }
        packet.extend_from_slice(self.question);
        self.head.write_opt(&mut packet, rcode, None);
        packet
    }
}

impl QueryHeader {
    /// Builds an answer without a question, for a packet whose question could not be parsed.
    pub fn bare_answer(&self, rcode: Rcode) -> Vec<u8> {
        let mut packet = Vec::with_capacity(HEADER + 16);
        self.write_header(&mut packet, rcode, 0, 0);
        self.write_opt(&mut packet, rcode, None);
        packet
    }

    fn write_header(&self, packet: &mut Vec<u8>, rcode: Rcode, questions: u16, answers: u16) {
        // QR and RA are set, RD is copied, AD and CD are never set.
        let flags = 0x8080 | u16::from(self.opcode) << 11 | u16::from(self.recursion) << 8 | rcode.0 & 0xf;
        let additional = u16::from(self.edns.is_some());
        for field in [self.id, flags, questions, answers, 0, additional] {
            packet.extend_from_slice(&field.to_be_bytes());
        }
    }

    fn write_opt(&self, packet: &mut Vec<u8>, rcode: Rcode, ede: Option<Ede>) {
        if self.edns.is_none() {
            return;
        }
        let text = ede.map_or(&[][..], |ede| ede.reason.code().as_bytes());
        let option = if ede.is_some() { 6 + text.len() as u16 } else { 0 };
        packet.push(0);
        packet.extend_from_slice(&OPT.to_be_bytes());
        packet.extend_from_slice(&(UDP_MAX as u16).to_be_bytes());
        packet.extend_from_slice(&[(rcode.0 >> 4) as u8, 0, 0, 0]);
        packet.extend_from_slice(&option.to_be_bytes());
        if let Some(ede) = ede {
            for field in [OPTION_EDE, 2 + text.len() as u16, ede.code] {
                packet.extend_from_slice(&field.to_be_bytes());
            }
            packet.extend_from_slice(text);
        }
    }

    fn max_payload(&self) -> usize {
        match self.edns {
            None => UDP_PLAIN,
            Some(edns) => usize::from(edns.payload).clamp(UDP_PLAIN, UDP_MAX),
        }
    }
}

/// The answer section in wire form. The owner of every record is a compression pointer to the question's name, so the
/// octets fit any question for that name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerSection {
    bytes: Vec<u8>,
    /// Offsets of the TTLs.
    ttls: Vec<u16>,
}

impl AnswerSection {
    /// Adds a record, unless it does not fit into a message.
    pub fn push(&mut self, kind: QueryType, ttl: u32, data: &[u8]) {
        let Ok(length) = u16::try_from(data.len()) else { return };
        let Ok(at) = u16::try_from(self.bytes.len() + 6) else { return };
        if self.bytes.len() + data.len() > usize::from(u16::MAX) - 1024 {
            return;
        }
        self.ttls.push(at);
        for field in [0xc00c, kind.0, CLASS_IN] {
            self.bytes.extend_from_slice(&u16::to_be_bytes(field));
        }
        self.bytes.extend_from_slice(&ttl.to_be_bytes());
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(data);
    }

    pub fn count(&self) -> u16 {
        self.ttls.len() as u16
    }

    pub fn is_empty(&self) -> bool {
        self.ttls.is_empty()
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    fn write_to(&self, packet: &mut Vec<u8>, age: u32) {
        let start = packet.len();
        packet.extend_from_slice(&self.bytes);
        for at in self.ttls.iter().filter(|_| age > 0) {
            let at = start + usize::from(*at);
            let Some(field) = packet.get_mut(at..at + 4) else { continue };
            let ttl = field.iter().fold(0u32, |ttl, octet| ttl << 8 | u32::from(*octet));
            field.copy_from_slice(&ttl.saturating_sub(age).to_be_bytes());
        }
    }
}

struct WireReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> WireReader<'a> {
    fn read_bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.read_bytes(1).and_then(|bytes| bytes.first().copied())
    }

    fn u16(&mut self) -> Option<u16> {
        self.read_bytes(2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_be_bytes)
    }

    /// Reads name, type and class. Compression pointers are refused: a question has nothing to point at.
    fn read_question(&mut self) -> Option<(&'a [u8], u16, u16)> {
        let start = self.at;
        loop {
            match self.u8()? {
                0 => break,
                length @ 1..=LABEL_MAX => self.read_bytes(usize::from(length))?,
                _ => return None,
            };
        }
        if self.at - start > NAME_MAX {
            return None;
        }
        let (kind, class) = (self.u16()?, self.u16()?);
        Some((self.bytes.get(start..self.at)?, kind, class))
    }

    /// Skips all other records and returns the EDNS parameters, if there are any.
    fn find_edns(&mut self, others: u32, additional: u32) -> Option<Option<QueryEdns>> {
        for _ in 0..others {
            self.skip_record()?;
        }
        let mut opt = None;
        for _ in 0..additional {
            let (kind, edns, root) = self.skip_record()?;
            match kind {
                OPT if opt.is_some() || !root => return None, // RFC 6891, 6.1.1
                OPT => opt = Some(edns),
                _ => {}
            }
        }
        Some(opt)
    }

    fn skip_record(&mut self) -> Option<(u16, QueryEdns, bool)> {
        let start = self.at;
        loop {
            match self.u8()? {
                0 => break,
                length @ 1..=LABEL_MAX => {
                    self.read_bytes(usize::from(length))?;
                }
                0xc0.. => {
                    self.u8()?; // not followed: the name is not used
                    break;
                }
                _ => return None,
            }
        }
        let root = self.at == start + 1;
        let (kind, payload) = (self.u16()?, self.u16()?);
        let (_, version, _) = (self.u8()?, self.u8()?, self.u16()?);
        let length = self.u16()?;
        self.read_bytes(usize::from(length))?;
        Some((kind, QueryEdns { payload, version }, root))
    }
}

/// Splits the labels of a name from `rest`, without the root.
fn labels(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, after) = rest.split_first()?;
        let (label, after) = after.split_at_checked(usize::from(*length))?;
        rest = after;
        (1..=LABEL_MAX).contains(length).then_some(label)
    })
}

/// Joins labels, with octets other than printable ASCII escaped.
fn display_labels<'a>(labels: impl Iterator<Item = &'a [u8]>) -> String {
    let labels: Vec<String> = labels.map(|label| label.escape_ascii().to_string()).collect();
    if labels.is_empty() { ".".to_owned() } else { labels.join(".") }
}

/// Returns the first name of a packet that is not a valid query, as far as it can be read, for the record of its
/// refusal.
pub fn display_question(packet: &[u8]) -> Option<String> {
    let name = packet.get(HEADER..).filter(|rest| rest.len() > 1)?;
    Some(display_labels(labels(name).take(NAME_MAX / 2))).filter(|name| name != ".")
}

/// Returns the cache key of a name and type, the same as [`DnsQuery::wire_key`].
pub fn wire_key(name: &DomainName, kind: QueryType) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.as_str().len() + 4);
    for label in name.as_str().split('.') {
        key.push(label.len() as u8);
        key.extend_from_slice(label.as_bytes());
    }
    key.push(0);
    key.extend_from_slice(&kind.0.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(flags: u16, counts: [u16; 4], rest: &[u8]) -> Vec<u8> {
        let mut packet = vec![0xab, 0xcd];
        for field in [flags].into_iter().chain(counts) {
            packet.extend_from_slice(&field.to_be_bytes());
        }
        packet.extend_from_slice(rest);
        packet
    }

    #[test]
    fn only_one_well_formed_question_is_read() {
        let question: &[u8] = b"\x01A\x02Bc\x00\x00\x01\x00\x01";
        let opt: &[u8] = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00";
        let pointed: &[u8] = b"\xc0\x0c\x00\x01\x00\x01";
        let both = [question, opt].concat();
        let twice = [question, opt, opt].concat();
        let versioned = [question, b"\x00\x00\x29\x04\xd0\x00\x01\x00\x00\x00\x00"].concat();
        let owned = [question, b"\x01x\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"].concat();
        for (what, flags, counts, rest, good) in [
            ("plain", 0x0100, [1, 0, 0, 0], question, true),
            ("with EDNS", 0x0100, [1, 0, 0, 1], &both[..], true),
            ("every free flag", 0x07f0 & 0x07ff, [1, 0, 0, 0], question, true),
            ("answer", 0x8100, [1, 0, 0, 0], question, false),
            ("update", 0x2800, [1, 0, 0, 0], question, false),
            ("no question", 0x0100, [0, 0, 0, 0], b"", false),
            ("two questions", 0x0100, [2, 0, 0, 0], question, false),
            ("counts without bytes", 0x0100, [1, 65535, 65535, 65535], question, false),
            ("two OPT", 0x0100, [1, 0, 0, 2], &twice[..], false),
            ("OPT of a name", 0x0100, [1, 0, 0, 1], &owned[..], false),
            ("EDNS 1", 0x0100, [1, 0, 0, 1], &versioned[..], false),
            ("pointer", 0x0100, [1, 0, 0, 0], pointed, false),
            ("cut", 0x0100, [1, 0, 0, 0], &question[..7], false),
        ] {
            let packet = packet(flags, counts, rest);
            assert_eq!(DnsQuery::parse(&packet).is_ok(), good, "{what}");
        }
        for length in 0..12 {
            assert_eq!(DnsQuery::parse(&vec![0; length]).err(), Some(QueryError::Drop), "{length}");
        }
    }

    #[test]
    fn the_question_goes_back_as_it_came_and_the_key_is_lower_case() {
        let question: &[u8] = b"\x01A\x02Bc\x00\x00\x01\x00\x01";
        let packet = packet(0x0100, [1, 0, 0, 0], question);
        let query = DnsQuery::parse(&packet).unwrap();
        let mut section = AnswerSection::default();
        section.push(QueryType::A, 100, &[1, 2, 3, 4]);
        let answer = query.build_answer(Rcode::NOERROR, &section, 40, None, DnsTransport::Udp);
        assert_eq!(&answer[12..12 + question.len()], question);
        assert_eq!(answer[..4], [0xab, 0xcd, 0x81, 0x80]);
        let record = &answer[12 + question.len()..];
        assert_eq!(record, b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x01\x02\x03\x04");
        let mut buffer = [0; 257];
        assert_eq!(query.wire_key(&mut buffer), b"\x01a\x02bc\x00\x00\x01");
        assert_eq!(wire_key(&DomainName::parse("a.bc").unwrap(), QueryType::A), query.wire_key(&mut buffer));
    }
}
