//! Where gRPC's messages end. An echo stays within one of them, so nothing needs to be held back between two, and
//! nothing is left over when the trailers come.

/// Flag and length before each message.
const PREFIX_LENGTH: usize = 5;

/// How far a stream of messages has been read.
#[derive(Debug, Default)]
pub(super) struct GrpcFraming {
    prefix: Vec<u8>,
    /// Octets of the present message that have not come.
    left: usize,
}

impl GrpcFraming {
    /// Reads on; whether a message ends with `bytes`.
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
