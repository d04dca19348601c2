//! Blind mutations, reproducible from a seed.

/// A small generator of numbers (xorshift64*).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// One that always gives the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`, which is over 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.draw() % end as u64) as usize
    }
}

/// Numbers at which code goes wrong.
const NUMBERS: [u64; 16] = [
    0,
    1,
    7,
    31,
    32,
    63,
    64,
    127,
    255,
    4095,
    4096,
    65_535,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    u64::MAX,
];

/// Longest input.
const MAX_BYTES: usize = 8192;

/// An input made of one or two of `corpus` by a few changes.
pub fn mutated(corpus: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = match corpus.len() {
        0 => Vec::new(),
        n => corpus[rng.below(n)].clone(),
    };
    for _ in 0..1 + rng.below(6) {
        change(&mut bytes, corpus, rng);
    }
    bytes.truncate(MAX_BYTES);
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut Rng) {
    let at = rng.below(bytes.len() + 1);
    let len = 1 + rng.below(16);
    let end = (at + len).min(bytes.len());
    match rng.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
        1 if at < bytes.len() => bytes[at] = rng.draw() as u8,
        2 | 3 => {
            let number = NUMBERS[rng.below(NUMBERS.len())].wrapping_add(rng.draw() & 1);
            let width = [1, 2, 4, 8][rng.below(4)];
            let bytes = &mut bytes[at.min(at)..];
            let width = width.min(bytes.len());
            bytes[..width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
        4 => {
            let new: Vec<u8> = (0..len).map(|_| rng.draw() as u8).collect();
            bytes.splice(at..at, new);
        }
        5 => _ = bytes.drain(at..end),
        6 => {
            let copy = bytes[at..end].to_vec();
            let to = rng.below(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        7 => bytes.truncate(at),
        _ if !corpus.is_empty() => {
            let other = &corpus[rng.below(corpus.len())];
            let from = rng.below(other.len() + 1);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {}
    }
}
