//! What the sizes of blocks say, in which a body without a length leaves.
//!
//! Such a body leaves in blocks of one size. A shorter block at its end says no more than its length, which is part of
//! the body and not priced. A shorter block before that is a choice: when its bytes were ready is up to the sandbox. It
//! is an event of its own in the code of requests, with the mark of 8 bits, and says to which of the open bodies it
//! belongs, how many full blocks that body had since its last shorter one, and its own length. Full blocks are free.
//!
//! A length that a request announces says nothing if the body comes: it is the body's. Of a body that is broken off, the
//! announced length and the place where it breaks are choices, and the event has a mark of its own.

use super::literal::{BIT, choice_price, count_price};

/// The mark of a partial block; see [`super`].
const PARTIAL: u64 = 8 * BIT;
/// The mark of a body that is broken off.
const BROKEN: u64 = 8 * BIT;

/// A block in the middle of a body that is shorter than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialBlock {
    /// Bytes in it.
    pub length: u64,
    /// Full blocks of the same body before it, since its beginning or its last partial block.
    pub full_blocks: u64,
    /// Bodies of the sandbox that leave in blocks at this time, this one among them.
    pub open_bodies: u32,
}

/// Returns what the boundary of a partial block says, in bits, rounded up. Charge it before the block leaves.
#[must_use = "a price is charged before the block leaves"]
pub fn partial_block_price(block: &PartialBlock) -> u64 {
    let PartialBlock { length, full_blocks, open_bodies } = *block;
    let price = PARTIAL + choice_price(1, open_bodies) + count_price(full_blocks) + count_price(length);
    price.div_ceil(BIT)
}

/// Returns what a body of an announced `length` says at most if it is broken off, in bits, rounded up: which of the open
/// bodies it is, its length, and how much of it came. Charge it before the length leaves, and give it back when all of the
/// body has left.
#[must_use = "a price is charged before the length leaves"]
pub fn broken_body_price(length: u64, open_bodies: u32) -> u64 {
    (BROKEN + choice_price(1, open_bodies) + 2 * count_price(length)).div_ceil(BIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: u64 = 16 << 10;

    #[test]
    fn p19_partial_blocks_have_no_more_than_the_share_of_their_mark() {
        for open_bodies in [1, 2, 3, 7, 100] {
            let share = |full_blocks, length| {
                let price = partial_block_price(&PartialBlock { length, full_blocks, open_bodies });
                (-(price as f64)).exp2()
            };
            let lengths = |full_blocks| (0..LONGEST).map(move |length| share(full_blocks, length));
            let sum: f64 = (0..200).flat_map(lengths).sum::<f64>() * f64::from(open_bodies);
            assert!(sum <= 1.0 / 256.0, "{open_bodies} bodies: {sum}");
            assert!(sum > 0.4 / 256.0 || open_bodies > 2, "the blocks are dearer than they need be: {sum}");
        }
    }

    #[test]
    fn p19_broken_bodies_have_no_more_than_the_share_of_their_mark() {
        for open_bodies in [1, 2, 3, 100] {
            let share = |length| (-(broken_body_price(length, open_bodies) as f64)).exp2();
            // One event for each length, and each place up to it.
            let sum = (0..1_u64 << 16).map(|length| share(length) * (length + 1) as f64).sum::<f64>();
            let sum = sum * f64::from(open_bodies);
            assert!(sum <= 1.0 / 256.0, "{open_bodies} bodies: {sum}");
        }
        assert!((30..60).contains(&broken_body_price(2_000, 1)), "{}", broken_body_price(2_000, 1));
        assert!(broken_body_price(u64::MAX, 1) >= 128);
    }

    #[test]
    fn partial_blocks_cost_about_the_logarithms_of_their_numbers() {
        for (length, full_blocks, open_bodies, bits) in [
            (1, 0, 1, 8 + 1 + 4),
            (50, 0, 1, 8 + 1 + 10),
            (LONGEST - 1, 0, 1, 8 + 1 + 21),
            (50, 640, 1, 8 + 16 + 10),
            (50, 0, 5, 8 + 3 + 1 + 10),
            (u64::MAX, u64::MAX, u32::MAX, 8 + 76 + 33 + 76),
            (0, 0, 0, 8 + 1 + 1),
        ] {
            let price = partial_block_price(&PartialBlock { length, full_blocks, open_bodies });
            assert_eq!(price, bits, "{length} bytes after {full_blocks} of {open_bodies}");
        }
    }
}
