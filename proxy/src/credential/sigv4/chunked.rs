//! Bodies in the coding `aws-chunked`: the client's chunks are taken apart, and Sandbar's put around the same bytes.

use bytes::{BufMut, Bytes, BytesMut};

use super::SigningFault;
use super::signature::SigningKey;

/// Bytes of a chunk that leaves. S3 demands 8 KiB at least, of all but the last.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;
/// Longest line of the client's chunks, which is that of a size or of a trailer.
const MAX_LINE: usize = 256;
/// Digits of the largest size of a chunk.
const MAX_SIZE_DIGITS: usize = 13;
const SIGNATURE_DIGITS: usize = 64;
const CHUNK_SIGNATURE: &str = ";chunk-signature=";
const TRAILER_SIGNATURE: &str = "x-amz-trailer-signature";

/// What is around the bytes of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkForm {
    Signed,
    SignedWithTrailers,
    UnsignedWithTrailers,
}

impl ChunkForm {
    /// Parses what stands in place of the digest of the body.
    pub(super) fn parse(declared: &str) -> Option<Self> {
        let all = [ChunkForm::Signed, ChunkForm::SignedWithTrailers, ChunkForm::UnsignedWithTrailers];
        all.into_iter().find(|form| form.as_str() == declared)
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            ChunkForm::Signed => "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            ChunkForm::SignedWithTrailers => "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            ChunkForm::UnsignedWithTrailers => "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        }
    }

    fn is_signed(self) -> bool {
        match self {
            ChunkForm::Signed | ChunkForm::SignedWithTrailers => true,
            ChunkForm::UnsignedWithTrailers => false,
        }
    }

    pub(super) fn has_trailers(self) -> bool {
        match self {
            ChunkForm::Signed => false,
            ChunkForm::SignedWithTrailers | ChunkForm::UnsignedWithTrailers => true,
        }
    }
}

/// A checksum that follows a body. S3 takes no other trailers, and the length of each is known, so that of the body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    name: &'static str,
    /// Characters of its value, in base64.
    length: usize,
}

/// Every trailer there is.
const TRAILERS: [Trailer; 10] = [
    Trailer { name: "x-amz-checksum-crc32", length: 8 },
    Trailer { name: "x-amz-checksum-crc32c", length: 8 },
    Trailer { name: "x-amz-checksum-crc64nvme", length: 12 },
    Trailer { name: "x-amz-checksum-md5", length: 24 },
    Trailer { name: "x-amz-checksum-sha1", length: 28 },
    Trailer { name: "x-amz-checksum-sha256", length: 44 },
    Trailer { name: "x-amz-checksum-sha512", length: 88 },
    Trailer { name: "x-amz-checksum-xxhash128", length: 24 },
    Trailer { name: "x-amz-checksum-xxhash3", length: 12 },
    Trailer { name: "x-amz-checksum-xxhash64", length: 12 },
];

impl Trailer {
    pub(super) fn parse(name: &str) -> Option<Self> {
        TRAILERS.into_iter().find(|trailer| trailer.name.eq_ignore_ascii_case(name))
    }

    fn takes(self, value: &str) -> bool {
        let base64 = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
        value.len() == self.length && value.bytes().all(base64)
    }
}

/// Takes the client's chunks apart.
#[derive(Debug)]
pub(super) struct ChunkDecoder {
    form: ChunkForm,
    /// Bytes without chunks that must come, if the client said.
    length: Option<u64>,
    state: DecoderState,
    /// The line so far.
    line: Vec<u8>,
    /// Bytes of the chunk that are still to come.
    left: u64,
    /// Bytes without chunks so far.
    taken: u64,
    /// The trailers that are still to come.
    missing: Vec<Trailer>,
    /// Whether a signature of the trailers is still to come.
    is_signature_missing: bool,
    /// The lines of those that came, as they leave.
    trailers: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecoderState {
    Size,
    Data,
    /// After the data, before the end of the line.
    DataEnd,
    Trailer,
    /// After a trailer that ends with LF alone, as some clients write it: the next line is empty.
    TrailerEnd,
    /// Before the empty line at the end.
    End,
    Done,
}

impl ChunkDecoder {
    pub(super) fn new(form: ChunkForm, length: Option<u64>, trailers: &[Trailer]) -> Self {
        ChunkDecoder {
            form,
            length,
            state: DecoderState::Size,
            line: Vec::new(),
            left: 0,
            taken: 0,
            missing: trailers.to_vec(),
            is_signature_missing: form == ChunkForm::SignedWithTrailers,
            trailers: Vec::new(),
        }
    }

    /// Takes the next bytes, and returns those of the body in them.
    pub(super) fn decode(&mut self, mut bytes: &[u8]) -> Result<Bytes, SigningFault> {
        let mut content = BytesMut::new();
        while let [first, rest @ ..] = bytes {
            match self.state {
                DecoderState::Data => {
                    let taken = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
                    let (data, rest) = bytes.split_at_checked(taken).unwrap_or((bytes, &[]));
                    content.extend_from_slice(data);
                    self.left -= data.len() as u64;
                    if self.left == 0 {
                        self.state = DecoderState::DataEnd;
                    }
                    bytes = rest;
                }
                DecoderState::Done => return Err(SigningFault::Chunks("bytes follow its end")),
                DecoderState::Size
                | DecoderState::DataEnd
                | DecoderState::Trailer
                | DecoderState::TrailerEnd
                | DecoderState::End => {
                    bytes = rest;
                    self.line.push(*first);
                    if self.line.len() > MAX_LINE {
                        return Err(SigningFault::Chunks("a line of it is too long"));
                    }
                    if *first == b'\n' {
                        let line = std::mem::take(&mut self.line);
                        self.state = self.read_line(&line)?;
                    }
                }
            }
        }
        Ok(content.freeze())
    }

    /// Checks that the body is complete, and returns its trailers, one in a line.
    pub(super) fn finish(&self) -> Result<&[String], SigningFault> {
        match self.state {
            DecoderState::Done => Ok(&self.trailers),
            DecoderState::Size
            | DecoderState::Data
            | DecoderState::DataEnd
            | DecoderState::Trailer
            | DecoderState::TrailerEnd
            | DecoderState::End => Err(SigningFault::NO_END),
        }
    }

    fn read_line(&mut self, line: &[u8]) -> Result<DecoderState, SigningFault> {
        let text =
            std::str::from_utf8(line).map_err(|_| SigningFault::Chunks("a line of it is not ASCII"))?;
        let ended = text.strip_suffix("\r\n");
        match (self.state, ended) {
            (DecoderState::Trailer, None) => {
                self.read_trailer(text.strip_suffix('\n').unwrap_or(text))?;
                Ok(DecoderState::TrailerEnd)
            }
            (DecoderState::Trailer, Some(text)) => self.read_trailer(text).map(|()| self.after_trailer()),
            (DecoderState::TrailerEnd, Some("")) => Ok(self.after_trailer()),
            (DecoderState::DataEnd, Some("")) => Ok(DecoderState::Size),
            (DecoderState::End, Some("")) => Ok(DecoderState::Done),
            (DecoderState::Size, Some(text)) => self.read_size(text),
            (
                DecoderState::Size
                | DecoderState::Data
                | DecoderState::DataEnd
                | DecoderState::TrailerEnd
                | DecoderState::End
                | DecoderState::Done,
                _,
            ) => Err(SigningFault::Chunks("a line of it does not end where it should")),
        }
    }

    fn read_size(&mut self, line: &str) -> Result<DecoderState, SigningFault> {
        let malformed = SigningFault::Chunks("the size of a chunk is malformed");
        let size = match line.split_once(CHUNK_SIGNATURE) {
            Some((size, signature)) if self.form.is_signed() && is_signature(signature) => size,
            None if !self.form.is_signed() => line,
            Some(_) | None => return Err(malformed),
        };
        let is_hex = size.bytes().all(|byte| byte.is_ascii_hexdigit());
        if size.is_empty() || size.len() > MAX_SIZE_DIGITS || !is_hex {
            return Err(malformed);
        }
        self.left = u64::from_str_radix(size, 16).map_err(|_| malformed)?;
        self.taken = self.taken.saturating_add(self.left);
        if self.length.is_some_and(|length| self.taken > length) {
            return Err(SigningFault::DecodedLength);
        }
        match (self.left, self.form.has_trailers()) {
            (1.., _) => Ok(DecoderState::Data),
            (0, _) if self.length.is_some_and(|length| self.taken != length) => {
                Err(SigningFault::DecodedLength)
            }
            (0, true) => Ok(DecoderState::Trailer),
            (0, false) => Ok(DecoderState::End),
        }
    }

    fn read_trailer(&mut self, line: &str) -> Result<(), SigningFault> {
        let (name, value) = line.split_once(':').ok_or(SigningFault::Trailer)?;
        let value = value.trim_matches(' ');
        let Some(at) = self.missing.iter().position(|trailer| trailer.name.eq_ignore_ascii_case(name)) else {
            return self.read_trailer_signature(name, value);
        };
        let trailer = self.missing.swap_remove(at);
        if !trailer.takes(value) {
            return Err(SigningFault::Trailer);
        }
        self.trailers.push(format!("{}:{value}", trailer.name));
        Ok(())
    }

    fn read_trailer_signature(&mut self, name: &str, value: &str) -> Result<(), SigningFault> {
        let is_expected = self.missing.is_empty() && std::mem::take(&mut self.is_signature_missing);
        let is_named = name.eq_ignore_ascii_case(TRAILER_SIGNATURE);
        match is_expected && is_named && is_signature(value) {
            true => Ok(()),
            false => Err(SigningFault::Trailer),
        }
    }

    /// What follows a trailer: another, the signature of all of them, or the end.
    fn after_trailer(&self) -> DecoderState {
        match self.missing.is_empty() && !self.is_signature_missing {
            true => DecoderState::End,
            false => DecoderState::Trailer,
        }
    }
}

fn is_signature(text: &str) -> bool {
    text.len() == SIGNATURE_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Puts chunks around a body.
pub(super) struct ChunkEncoder {
    form: ChunkForm,
    /// What has not filled a chunk.
    pending: BytesMut,
    key: SigningKey,
    /// The signature of the chunk before, or of the request.
    previous: String,
}

impl ChunkEncoder {
    pub(super) fn new(form: ChunkForm, key: SigningKey, request_signature: String) -> Self {
        ChunkEncoder { form, pending: BytesMut::new(), key, previous: request_signature }
    }

    /// Returns the chunks that are full.
    pub(super) fn encode(&mut self, mut content: &[u8]) -> Bytes {
        let mut out = BytesMut::new();
        while self.pending.len() + content.len() >= CHUNK_BYTES {
            let (data, rest) =
                content.split_at_checked(CHUNK_BYTES - self.pending.len()).unwrap_or((content, &[]));
            content = rest;
            if self.pending.is_empty() {
                self.put_chunk(data, &mut out);
            } else {
                self.pending.extend_from_slice(data);
                self.put_pending(&mut out);
            }
        }
        self.pending.extend_from_slice(content);
        out.freeze()
    }

    /// Returns the last chunks and the trailers.
    pub(super) fn finish(&mut self, trailers: &[String]) -> Bytes {
        let mut out = BytesMut::new();
        if !self.pending.is_empty() {
            self.put_pending(&mut out);
        }
        self.put_size(&[], &mut out);
        let mut trailers = trailers.to_vec();
        trailers.sort_unstable();
        for line in &trailers {
            out.put_slice(line.as_bytes());
            out.put_slice(b"\r\n");
        }
        if self.form.is_signed() && self.form.has_trailers() {
            let lines: String = trailers.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
            let signature = self.key.sign_trailers(&self.previous, &lines);
            out.put_slice(format!("{TRAILER_SIGNATURE}:{signature}\r\n").as_bytes());
        }
        out.put_slice(b"\r\n");
        out.freeze()
    }

    fn put_pending(&mut self, out: &mut BytesMut) {
        let mut pending = std::mem::take(&mut self.pending);
        self.put_chunk(&pending, out);
        pending.clear(); // keeps the memory
        self.pending = pending;
    }

    fn put_chunk(&mut self, content: &[u8], out: &mut BytesMut) {
        self.put_size(content, out);
        out.put_slice(content);
        out.put_slice(b"\r\n");
    }

    fn put_size(&mut self, content: &[u8], out: &mut BytesMut) {
        out.reserve(content.len() + MAX_LINE);
        out.put_slice(format!("{:x}", content.len()).as_bytes());
        if self.form.is_signed() {
            self.previous = self.key.sign_chunk(&self.previous, content);
            out.put_slice(CHUNK_SIGNATURE.as_bytes());
            out.put_slice(self.previous.as_bytes());
        }
        out.put_slice(b"\r\n");
    }
}

/// Returns how many bytes leave for a body of `length` bytes without chunks.
pub(super) fn encoded_length(form: ChunkForm, length: u64, trailers: &[Trailer]) -> u64 {
    let signature = if form.is_signed() { CHUNK_SIGNATURE.len() + SIGNATURE_DIGITS } else { 0 };
    let around = |size: u64| match size {
        0 => 0,
        _ => (format!("{size:x}").len() + signature + "\r\n\r\n".len()) as u64 + size,
    };
    let chunk = CHUNK_BYTES as u64;
    let lines = trailers.iter().map(|trailer| trailer.name.len() + 1 + trailer.length + "\r\n".len());
    let lines: usize = lines.sum();
    let signed_trailers = match form {
        ChunkForm::Signed | ChunkForm::UnsignedWithTrailers => 0,
        ChunkForm::SignedWithTrailers => TRAILER_SIGNATURE.len() + 1 + SIGNATURE_DIGITS + "\r\n".len(),
    };
    let end = "0".len() + signature + "\r\n".len() + lines + signed_trailers + "\r\n".len();
    length / chunk * around(chunk) + around(length % chunk) + end as u64
}

#[cfg(test)]
mod tests {
    use super::super::tests::{documented_key, documented_time};
    use super::*;

    const SHA: [u8; SIGNATURE_DIGITS] = [b'a'; SIGNATURE_DIGITS];

    fn crc32() -> Vec<Trailer> {
        vec![Trailer::parse("x-amz-checksum-crc32").unwrap()]
    }

    fn decode(
        form: ChunkForm,
        length: Option<u64>,
        pieces: impl Iterator<Item = Vec<u8>>,
    ) -> Result<(Vec<u8>, Vec<String>), SigningFault> {
        let trailers = if form.has_trailers() { crc32() } else { Vec::new() };
        let mut decoder = ChunkDecoder::new(form, length, &trailers);
        let mut content = Vec::new();
        for piece in pieces {
            content.extend_from_slice(&decoder.decode(&piece)?);
        }
        decoder.finish().map(|trailers| (content, trailers.to_vec()))
    }

    #[test]
    fn chunks_have_one_reading_however_they_are_split() {
        let sha = std::str::from_utf8(&SHA).unwrap();
        let (unsigned, signed) = (ChunkForm::UnsignedWithTrailers, ChunkForm::Signed);
        let long = format!("{}\r\n", "0".repeat(MAX_LINE));
        let (line, both) = (format!("3;chunk-signature={sha}"), ChunkForm::SignedWithTrailers);
        let end = format!("0;chunk-signature={sha}\r\n");
        let trailer = "x-amz-checksum-crc32:AAAAAA==";
        let chunks = SigningFault::Chunks;
        let size = || Err(chunks("the size of a chunk is malformed"));
        let line_end = || Err(chunks("a line of it does not end where it should"));
        let no_end = || Err(SigningFault::NO_END);
        for (form, length, text, expected) in [
            (unsigned, Some(3), format!("3\r\nabc\r\n0\r\n{trailer}\r\n\r\n"), Ok((3, 1))),
            (unsigned, None, format!("2\r\nab\r\n00001\r\nc\r\n0\r\n{trailer}\r\n\r\n"), Ok((3, 1))),
            (unsigned, Some(0), format!("0\r\n{trailer}\n\r\n\r\n"), Ok((0, 1))),
            (signed, Some(3), format!("{line}\r\nabc\r\n{end}\r\n"), Ok((3, 0))),
            (
                both,
                Some(3),
                format!("{line}\r\nabc\r\n{end}{trailer}\r\nx-amz-trailer-signature:{sha}\r\n\r\n"),
                Ok((3, 1)),
            ),
            (both, Some(0), format!("{end}{trailer}\n\r\nX-Amz-Trailer-Signature:{sha}\r\n\r\n"), Ok((0, 1))),
            // Lies about sizes.
            (unsigned, Some(3), "4\r\nabcd\r\n".into(), Err(SigningFault::DecodedLength)),
            (
                unsigned,
                Some(3),
                format!("2\r\nab\r\n0\r\n{trailer}\r\n\r\n"),
                Err(SigningFault::DecodedLength),
            ),
            (unsigned, Some(3), "fffffffffffff\r\n".into(), Err(SigningFault::DecodedLength)),
            (unsigned, None, "10000000000000\r\n".into(), size()),
            (unsigned, None, "2\r\nabc\r\n".into(), line_end()),
            (unsigned, None, "-1\r\n".into(), size()),
            (unsigned, None, "+1\r\n".into(), size()),
            (unsigned, None, "0x1\r\n".into(), size()),
            (unsigned, None, " 1\r\n".into(), size()),
            (unsigned, None, "\r\n".into(), size()),
            (unsigned, None, "1\na".into(), line_end()),
            (unsigned, None, format!("{line}\r\n"), size()),
            (unsigned, None, "1;x=y\r\n".into(), size()),
            (unsigned, None, long, Err(chunks("a line of it is too long"))),
            (signed, None, "3\r\nabc\r\n".into(), size()),
            (signed, None, "3;chunk-signature=abc\r\n".into(), size()),
            (signed, None, format!("{line};a=b\r\n"), size()),
            // Ends that are missing, and what follows them.
            (unsigned, None, "3\r\nab".into(), no_end()),
            (unsigned, None, "3\r\nabc\r\n".into(), no_end()),
            (unsigned, None, format!("0\r\n{trailer}\r\n"), no_end()),
            (unsigned, None, String::new(), no_end()),
            (signed, None, end.clone(), no_end()),
            (unsigned, None, format!("0\r\n{trailer}\r\n\r\nGET /"), Err(chunks("bytes follow its end"))),
            (signed, None, format!("{end}\r\n\r\n"), Err(chunks("bytes follow its end"))),
            // Trailers that were not announced.
            (unsigned, None, "0\r\n\r\n".into(), Err(SigningFault::Trailer)),
            (unsigned, None, "0\r\nx-amz-checksum-crc32:AAAA\r\n".into(), Err(SigningFault::Trailer)),
            (unsigned, None, "0\r\nx-amz-checksum-crc32:AAAAAA,=\r\n".into(), Err(SigningFault::Trailer)),
            (unsigned, None, "0\r\nx-amz-checksum-sha1:AAAAAA==\r\n".into(), Err(SigningFault::Trailer)),
            (unsigned, None, format!("0\r\n{trailer}\n{trailer}\r\n"), line_end()),
            (unsigned, None, format!("0\r\n{trailer}\r\n{trailer}\r\n\r\n"), line_end()),
            (signed, None, format!("{end}{trailer}\r\n\r\n"), line_end()),
            (both, None, format!("{end}{trailer}\r\n\r\n"), Err(SigningFault::Trailer)),
            (both, None, format!("{end}x-amz-trailer-signature:{sha}\r\n"), Err(SigningFault::Trailer)),
            (
                both,
                None,
                format!("{end}{trailer}\r\nx-amz-trailer-signature:00\r\n"),
                Err(SigningFault::Trailer),
            ),
        ] {
            let expected =
                expected.map(|(bytes, trailers): (usize, usize)| (b"abc".repeat(bytes / 3), trailers));
            let whole = decode(form, length, std::iter::once(text.clone().into_bytes()));
            let single = decode(form, length, text.bytes().map(|byte| vec![byte]));
            let counted = |(content, trailers): (Vec<u8>, Vec<String>)| (content, trailers.len());
            assert_eq!(whole.map(counted), expected, "{text:?}");
            assert_eq!(single.map(counted), expected, "by byte: {text:?}");
        }
    }

    /// The example of the documentation of S3: 65 KiB in two chunks.
    #[test]
    fn chunks_are_signed_as_documented() {
        let content = vec![b'a'; 65 << 10];
        for (form, request_signature, signatures, trailers, trailer_signature) in [
            (
                ChunkForm::Signed,
                "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
                [
                    "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
                    "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
                    "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
                ],
                vec![],
                None,
            ),
            (
                ChunkForm::SignedWithTrailers,
                "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
                [
                    "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
                    "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
                    "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
                ],
                vec!["x-amz-checksum-crc32c:sOO8/Q==".to_owned()],
                Some("d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435"),
            ),
        ] {
            let mut expected = Vec::new();
            for (size, signature) in ["10000", "400", "0"].into_iter().zip(signatures) {
                let length = usize::from_str_radix(size, 16).unwrap();
                expected.extend_from_slice(format!("{size};chunk-signature={signature}\r\n").as_bytes());
                expected.extend_from_slice(&content[..length]);
                expected.extend_from_slice(if length > 0 { b"\r\n" } else { b"" });
            }
            for line in &trailers {
                expected.extend_from_slice(format!("{line}\r\n").as_bytes());
            }
            if let Some(signature) = trailer_signature {
                expected.extend_from_slice(format!("x-amz-trailer-signature:{signature}\r\n").as_bytes());
            }
            expected.extend_from_slice(b"\r\n");
            for piece in [1 << 20, 64 << 10, 1000, 7] {
                let key =
                    SigningKey::derive(&documented_key(), "s3", "us-east-1", documented_time()).unwrap();
                let mut encoder = ChunkEncoder::new(form, key, request_signature.to_owned());
                let mut sent: Vec<u8> =
                    content.chunks(piece).flat_map(|piece| encoder.encode(piece).to_vec()).collect();
                sent.extend_from_slice(&encoder.finish(&trailers));
                assert!(sent == expected, "{form:?} by {piece}");
            }
        }
    }

    #[test]
    fn the_announced_length_is_exact() {
        for form in [ChunkForm::Signed, ChunkForm::SignedWithTrailers, ChunkForm::UnsignedWithTrailers] {
            let trailers = if form.has_trailers() { TRAILERS.to_vec() } else { Vec::new() };
            let line = |trailer: &Trailer| format!("{}:{}", trailer.name, "A".repeat(trailer.length));
            let lines: Vec<String> = trailers.iter().map(line).collect();
            for length in [0, 1, 15, 16, 65_535, 65_536, 65_537, 131_072, 200_000] {
                let key =
                    SigningKey::derive(&documented_key(), "s3", "us-east-1", documented_time()).unwrap();
                let mut encoder = ChunkEncoder::new(form, key, String::new());
                let sent = encoder.encode(&vec![0; length]).len() + encoder.finish(&lines).len();
                assert_eq!(sent as u64, encoded_length(form, length as u64, &trailers), "{form:?} {length}");
            }
        }
        assert_eq!(encoded_length(ChunkForm::Signed, 66_560, &[]), 66_824, "as documented");
    }
}
