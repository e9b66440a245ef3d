//! An arithmetic coder: turns choices with weights into bits and back.

const TOP: u64 = 1 << 48;
const HALF: u64 = TOP / 2;
const QUARTER: u64 = TOP / 4;

/// Encodes if it has no input, and decodes its input otherwise.
pub(super) struct Coder {
    low: u64,
    /// One less than the end of the interval.
    high: u64,
    /// Bits that follow the next one, inverted.
    pending: usize,
    output: Vec<bool>,
    input: Option<std::vec::IntoIter<bool>>,
    value: u64,
}

impl Coder {
    pub(super) fn encoder() -> Self {
        Coder { low: 0, high: TOP - 1, pending: 0, output: Vec::new(), input: None, value: 0 }
    }

    pub(super) fn decoder(bits: Vec<bool>) -> Self {
        let mut coder = Coder { input: Some(bits.into_iter()), ..Coder::encoder() };
        for _ in 0..48 {
            coder.shift_in();
        }
        coder
    }

    /// Codes one of several alternatives. The encoder is told which; the decoder finds it. Returns it.
    pub(super) fn choose(&mut self, weights: &[u32], chosen: Option<usize>) -> usize {
        let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
        let range = self.high - self.low + 1;
        let scaled = |sum: u64| (u128::from(range) * u128::from(sum) / u128::from(total)) as u64;
        let mut below = 0;
        for (at, weight) in weights.iter().enumerate() {
            let above = below + u64::from(*weight);
            let (start, end) = (self.low + scaled(below), self.low + scaled(above));
            let found = match chosen {
                Some(chosen) => chosen == at,
                None => (start..end).contains(&self.value),
            };
            if found {
                (self.low, self.high) = (start, end - 1);
                self.normalise();
                return at;
            }
            below = above;
        }
        panic!("no alternative");
    }

    pub(super) fn uniform(&mut self, size: u32, chosen: Option<u32>) -> u32 {
        self.choose(&vec![1; size as usize], chosen.map(|at| at as usize)) as u32
    }

    /// Codes a number in the Elias delta code of its successor.
    pub(super) fn count(&mut self, count: Option<u64>) -> u64 {
        let number = count.map(|count| count + 1);
        let size = number.map(u64::ilog2);
        let sizes = size.map(|size| (size + 1).ilog2());
        let mut length = 0;
        while self.uniform(2, sizes.map(|sizes| u32::from(length < sizes))) == 1 {
            length += 1;
        }
        let size = self.bits(length, size.map(|size| u64::from(size + 1))) as u32 - 1;
        self.bits(size, number) - 1
    }

    /// Codes the bits of a number below its highest, which is bit `length`.
    fn bits(&mut self, length: u32, number: Option<u64>) -> u64 {
        (0..length).rev().fold(1, |found, at| {
            found << 1 | u64::from(self.uniform(2, number.map(|number| (number >> at & 1) as u32)))
        })
    }

    pub(super) fn finish(mut self) -> Vec<bool> {
        self.pending += 1;
        self.emit(self.low >= QUARTER);
        self.output
    }

    fn normalise(&mut self) {
        loop {
            if self.high < HALF {
                self.emit(false);
            } else if self.low >= HALF {
                self.emit(true);
                self.subtract(HALF);
            } else if self.low >= QUARTER && self.high < HALF + QUARTER {
                self.pending += 1;
                self.subtract(QUARTER);
            } else {
                return;
            }
            self.low *= 2;
            self.high = self.high * 2 + 1;
            self.shift_in();
        }
    }

    fn subtract(&mut self, amount: u64) {
        self.low -= amount;
        self.high -= amount;
        self.value = self.value.wrapping_sub(amount);
    }

    fn shift_in(&mut self) {
        if let Some(input) = &mut self.input {
            self.value = self.value << 1 | u64::from(input.next().unwrap_or(false));
        }
    }

    fn emit(&mut self, bit: bool) {
        if self.input.is_none() {
            self.output.push(bit);
            self.output.extend(std::iter::repeat_n(!bit, self.pending));
        }
        self.pending = 0;
    }
}
