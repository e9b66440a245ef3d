//! Keyed digests: what the memory of earlier requests holds in place of their content.
//!
//! SipHash-2-4 with 128 bits of output, under a key that the sandbox does not know. A value that was never seen is
//! taken for a known one with a probability of at most `VALUES` / 2^128 = 2^-118, so over 2^54 components the bound of
//! the bit account fails with a probability below 2^-64.

use serde::{Deserialize, Serialize};

/// Secret key of the digests. The caller keeps it as long as the state that was made with it.
#[derive(Clone, Copy)]
pub struct DigestKey([u64; 2]);

/// Keyed digest of one value, or of a list of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Digest(pub(crate) u64, pub(crate) u64);

/// Digest of a sequence of digests.
#[derive(Clone, Copy)]
pub(crate) struct ListDigest {
    state: State,
    words: u64,
}

#[derive(Clone, Copy)]
struct State([u64; 4]);

impl DigestKey {
    /// Makes a key of 16 random bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        let number = u128::from_le_bytes(bytes);
        DigestKey([number as u64, (number >> 64) as u64])
    }

    pub(crate) fn digest(&self, bytes: &[u8]) -> Digest {
        let mut state = State::new(self);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            state.absorb(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        // The last word holds the rest and, in its highest byte, the length.
        state.absorb(u64::from_le_bytes(last) | (bytes.len() as u64) << 56);
        state.finish()
    }

    pub(crate) fn list(&self) -> ListDigest {
        ListDigest { state: State::new(self), words: 0 }
    }
}

impl std::fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DigestKey")
    }
}

impl ListDigest {
    pub(crate) fn add(&mut self, digest: Digest) {
        self.state.absorb(digest.0);
        self.state.absorb(digest.1);
        self.words += 2;
    }

    pub(crate) fn finish(mut self) -> Digest {
        self.state.absorb((self.words * 8) << 56);
        self.state.finish()
    }
}

impl State {
    fn new(key: &DigestKey) -> Self {
        let [k0, k1] = key.0;
        // The constants of SipHash; 0xee selects 128 bits of output.
        State([
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ])
    }

    #[inline]
    fn round(&mut self) {
        let [v0, v1, v2, v3] = &mut self.0;
        *v0 = v0.wrapping_add(*v1);
        *v1 = v1.rotate_left(13) ^ *v0;
        *v0 = v0.rotate_left(32);
        *v2 = v2.wrapping_add(*v3);
        *v3 = v3.rotate_left(16) ^ *v2;
        *v0 = v0.wrapping_add(*v3);
        *v3 = v3.rotate_left(21) ^ *v0;
        *v2 = v2.wrapping_add(*v1);
        *v1 = v1.rotate_left(17) ^ *v2;
        *v2 = v2.rotate_left(32);
    }

    #[inline]
    fn absorb(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.round();
        self.0[0] ^= word;
    }

    fn finish(mut self) -> Digest {
        self.0[2] ^= 0xee;
        let low = self.squeeze();
        self.0[1] ^= 0xdd;
        Digest(low, self.squeeze())
    }

    fn squeeze(&mut self) -> u64 {
        for _ in 0..4 {
            self.round();
        }
        self.0[0] ^ self.0[1] ^ self.0[2] ^ self.0[3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_reference() {
        let key = DigestKey::new(std::array::from_fn(|at| at as u8));
        let input: Vec<u8> = (0..64).collect();
        // Outputs of the reference implementation for the inputs of 0, 1 and 63 bytes.
        for (length, expected) in [
            (0, "a3817f04ba25a8e66df67214c7550293"),
            (1, "da87c1d86b99af44347659119b22fc45"),
            (63, "5150d1772f50834a503e069a973fbd7c"),
        ] {
            let Digest(low, high) = key.digest(&input[..length]);
            let text: String = [low, high]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .map(|byte| format!("{byte:02x}"))
                .collect();
            assert_eq!(text, expected, "{length} bytes");
        }
    }

    #[test]
    fn lists_of_other_order_or_length_differ() {
        let key = DigestKey::new([7; 16]);
        let of = |digests: &[Digest]| {
            let mut list = key.list();
            digests.iter().for_each(|digest| list.add(*digest));
            list.finish()
        };
        let (a, b) = (key.digest(b"a"), key.digest(b"b"));
        let all = [of(&[]), of(&[a]), of(&[a, b]), of(&[b, a]), of(&[a, a])];
        for (at, left) in all.iter().enumerate() {
            assert!(all.iter().skip(at + 1).all(|right| right != left));
        }
        assert_eq!(of(&[a, b]), of(&[a, b]));
    }
}
