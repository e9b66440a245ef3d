//! What new text and choices cost. All prices are in millionths of a bit and rounded up, so that the sum over any set
//! of alternatives of 2^-price stays at most 1.

/// Millionths of a bit in one bit.
pub(crate) const BIT: u64 = 1_000_000;

/// The alphabets, from the smallest: what one symbol costs in each. A literal names its class with 3 bits.
pub(super) const CLASSES: [AlphabetClass; 8] = [
    AlphabetClass { contains: |byte| byte.is_ascii_digit(), size: 10, symbol: 3_321_929 },
    AlphabetClass { contains: |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'), size: 16, symbol: 4 * BIT },
    AlphabetClass { contains: |byte| matches!(byte, b'0'..=b'9' | b'A'..=b'F'), size: 16, symbol: 4 * BIT },
    AlphabetClass {
        contains: |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'-' | b'_' | b'.'),
        size: 39,
        symbol: 5_285_403,
    },
    AlphabetClass {
        contains: |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'),
        size: 65,
        symbol: 6_022_368,
    },
    AlphabetClass {
        contains: |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'='),
        size: 67,
        symbol: 6_066_090,
    },
    AlphabetClass { contains: |byte| matches!(byte, 0x20..=0x7e), size: 95, symbol: 6_569_856 },
    AlphabetClass { contains: |_| true, size: 256, symbol: 8 * BIT },
];

/// What the index of a class costs.
const CLASS: u64 = 3 * BIT;

/// A fixed set of bytes, and what one of them costs: log2 of its size, rounded up.
pub(crate) struct AlphabetClass {
    pub(crate) contains: fn(u8) -> bool,
    #[cfg_attr(not(test), expect(dead_code, reason = "tests check `symbol` by it"))]
    pub(crate) size: u32,
    symbol: u64,
}

/// For each byte, the classes that contain it, one bit each.
static MEMBERSHIP: std::sync::LazyLock<[u8; 256]> = std::sync::LazyLock::new(|| {
    std::array::from_fn(|byte| {
        CLASSES
            .iter()
            .enumerate()
            .filter(|(_, class)| (class.contains)(byte as u8))
            .fold(0, |set, (at, _)| set | 1 << at)
    })
});

/// Returns the index of the smallest class that contains all of `text`, and the class.
pub(crate) fn smallest_class(text: &[u8]) -> (usize, &'static AlphabetClass) {
    let membership = &*MEMBERSHIP;
    let common = text.iter().fold(u8::MAX, |set, byte| set & membership[usize::from(*byte)]);
    let at = common.trailing_zeros() as usize;
    // The last class contains every byte, so some bit is set.
    CLASSES.get(at).map_or((CLASSES.len() - 1, &CLASSES[CLASSES.len() - 1]), |class| (at, class))
}

/// Returns the price of `text` as a literal: its class, its length and its symbols.
pub(crate) fn literal_price(text: &[u8]) -> u64 {
    let length = text.len() as u64;
    CLASS + count_price(length) + length.saturating_mul(smallest_class(text).1.symbol)
}

/// Returns the price of a number of things: the length of the Elias delta code of `count + 1`.
pub(crate) fn count_price(count: u64) -> u64 {
    let size = u64::from(count.saturating_add(1).ilog2());
    (size + 2 * u64::from((size + 1).ilog2()) + 1) * BIT
}

/// Returns the price of an alternative with `weight` of `total`: log2(total / weight).
pub(crate) fn choice_price(weight: u32, total: u32) -> u64 {
    if weight >= total {
        return 0;
    }
    // The error of `log2` is far below the thousandth of a unit that is added before rounding up.
    ((f64::from(total) / f64::from(weight.max(1))).log2() * BIT as f64 + 0.001).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cost_at_least_the_logarithm_of_their_size() {
        for (at, class) in CLASSES.iter().enumerate() {
            let members = (0..=255).filter(|byte| (class.contains)(*byte)).count();
            assert_eq!(members, class.size as usize, "class {at}");
            let exact = f64::from(class.size).log2() * BIT as f64;
            assert!((exact - 0.001..exact + 1.0).contains(&(class.symbol as f64)), "class {at}: {exact}");
            assert!(at == 0 || CLASSES[at - 1].size <= class.size, "class {at} is out of order");
        }
        assert!(CLASSES.len() <= 8);
    }

    #[test]
    fn text_is_priced_in_its_smallest_class() {
        for (text, class) in [
            (&b""[..], 0),
            (b"2024", 0),
            (b"deadbeef01", 1),
            (b"DEADBEEF01", 2),
            (b"serde_json-1.0.2", 3),
            (b"Serde.tar", 4),
            (b"QUJD/+==", 5),
            (b"text/html, */*;q=0.8", 6),
            (b"\x00\xff", 7),
            ("\u{e4}".as_bytes(), 7),
        ] {
            assert_eq!(smallest_class(text).0, class, "{text:?}");
        }
    }

    #[test]
    fn p19_counts_are_a_prefix_code() {
        let sum: f64 = (0..1 << 20).map(|count| (-(count_price(count) as f64) / BIT as f64).exp2()).sum();
        assert!(sum <= 1.0, "{sum}");
        assert_eq!([0, 1, 2, 3, 7].map(|count| count_price(count) / BIT), [1, 4, 4, 5, 8]);
        assert!(count_price(u64::MAX) > 0);
    }

    #[test]
    fn choices_are_rounded_up() {
        for (weight, total, least, most) in [
            (1, 1, 0, 0),
            (1, 2, BIT, BIT + 1),
            (2, 3, 584_962, 584_964),
            (1, u32::MAX, 31_999_999, 32_000_001),
        ] {
            let price = choice_price(weight, total);
            assert!((least..=most).contains(&price), "{weight} of {total}: {price}");
        }
    }
}
