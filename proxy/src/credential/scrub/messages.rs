//! gRPC message boundaries. An echo lies within one message, so the scrubber holds nothing back at the end of one
//! and has nothing left over when the trailers arrive.

/// Length of the prefix of each message: a flag and the message length.
const PREFIX_LENGTH: usize = 5;

/// The position in a stream of messages.
#[derive(Debug, Default)]
pub(super) struct GrpcFraming {
    prefix: Vec<u8>,
    /// Octets of the current message still to come.
    left: usize,
}

impl GrpcFraming {
    /// Consumes `bytes`; returns whether a message ends with them.
    pub(super) fn advance(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let of_message = self.left.min(bytes.len());
            self.left -= of_message;
            bytes = bytes.get(of_message..).unwrap_or_default();
            let of_prefix = (PREFIX_LENGTH - self.prefix.len()).min(bytes.len());
            let (prefix, rest) = bytes.split_at(of_prefix);
            self.prefix.extend_from_slice(prefix);
            bytes = rest;
            if let [_, a, b, c, d] = self.prefix[..] {
                self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                self.prefix.clear();
            }
        }
        self.left == 0 && self.prefix.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_ends_where_its_length_says() {
        let stream = b"\0\0\0\0\x03abc\0\0\0\0\0\x01\0\0\0\x01z";
        let mut messages = GrpcFraming::default();
        let ends: Vec<bool> = stream.iter().map(|octet| messages.advance(&[*octet])).collect();
        let ended: Vec<usize> = (0..ends.len()).filter(|at| ends[*at]).collect();
        assert_eq!(ended, [7, 12, 18]);
        assert!(GrpcFraming::default().advance(stream));
    }
}
