//! CRC-32C, and copies that compute it in the same pass.

/// The checksum and the copy share a chunk while it is in the first-level cache.
const CHUNK_BYTES: usize = 32 * 1024;
/// Below this a copy should stay in the cache, where its reader will look for it.
const STREAM_MIN_BYTES: usize = 64 * 1024;
/// From here on a checked copy goes in three lanes at once.
#[cfg(target_arch = "x86_64")]
const LANES_MIN_BYTES: usize = 256 * 1024;
/// A line of the cache, which lanes copy as a whole.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// The CRC-32C (Castagnoli) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// Copies `src` to `dst` and returns the CRC-32C of `src`, reading memory once.
///
/// # Panics
/// If the lengths differ.
pub fn copy_checked(dst: &mut [u8], src: &[u8]) -> u32 {
    assert_eq!(dst.len(), src.len(), "a copy needs as many bytes as it is given");
    #[cfg(target_arch = "x86_64")]
    if src.len() >= LANES_MIN_BYTES
        && std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("sse4.2")
    {
        return copy_in_lanes(dst, src);
    }
    let streamer = Streamer::for_len(src.len());
    let mut crc = 0;
    for (to, from) in dst.chunks_mut(CHUNK_BYTES).zip(src.chunks(CHUNK_BYTES)) {
        crc = crc32c::crc32c_append(crc, from);
        streamer.copy(to, from);
    }
    streamer.finish();
    crc
}

/// Copies `src` to `dst`, past the cache where that is faster.
///
/// # Panics
/// If the lengths differ.
pub fn copy(dst: &mut [u8], src: &[u8]) {
    assert_eq!(dst.len(), src.len(), "a copy needs as many bytes as it is given");
    let streamer = Streamer::for_len(src.len());
    streamer.copy(dst, src);
    streamer.finish();
}

/// How a copy is made, decided once for it.
#[derive(Clone, Copy)]
struct Streamer {
    streams: bool,
}

impl Streamer {
    fn for_len(len: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        let able = std::arch::is_x86_feature_detected!("avx2");
        #[cfg(not(target_arch = "x86_64"))]
        let able = false;
        Self { streams: able && len >= STREAM_MIN_BYTES }
    }

    /// Copies slices of equal length. Until `finish` no other thread may be told of the bytes.
    fn copy(self, dst: &mut [u8], src: &[u8]) {
        #[cfg(target_arch = "x86_64")]
        if self.streams {
            // SAFETY: `for_len` has seen that the processor has AVX2.
            unsafe { stream_avx2(dst, src) };
            return;
        }
        dst.copy_from_slice(src);
    }

    /// Orders streamed bytes before everything that follows.
    fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self.streams {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn stream_avx2(dst: &mut [u8], src: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    const LANE: usize = 32;
    const ROUND: usize = 4 * LANE;
    assert_eq!(dst.len(), src.len());
    // Streaming stores need an aligned destination; loads do not.
    let head = dst.as_ptr().align_offset(LANE).min(dst.len());
    let body = (dst.len() - head) / ROUND * ROUND;
    dst[..head].copy_from_slice(&src[..head]);
    let to = dst[head..head + body].as_mut_ptr();
    let from = src[head..head + body].as_ptr();
    for at in (0..body).step_by(ROUND) {
        // SAFETY: `at + ROUND <= body`, so all four lanes lie in both slices; `to` is aligned to a
        // lane and `at` is a multiple of it; the slices do not overlap, one being unique.
        unsafe {
            let from = from.add(at).cast::<__m256i>();
            let to = to.add(at).cast::<__m256i>();
            let lanes = [0, 1, 2, 3].map(|lane| _mm256_loadu_si256(from.add(lane)));
            _mm256_stream_si256(to, lanes[0]);
            _mm256_stream_si256(to.add(1), lanes[1]);
            _mm256_stream_si256(to.add(2), lanes[2]);
            _mm256_stream_si256(to.add(3), lanes[3]);
        }
    }
    dst[head + body..].copy_from_slice(&src[head + body..]);
}

/// Copies in three lanes that are read and written line by line in turn, and computes the checksum
/// of each from the lines at hand: memory is never idle, and the processor's three checksums under
/// way hide that each waits for its last.
#[cfg(target_arch = "x86_64")]
fn copy_in_lanes(dst: &mut [u8], src: &[u8]) -> u32 {
    let head = dst.as_ptr().align_offset(LINE).min(dst.len());
    // An odd number of lines, so that the lanes do not meet at the same place of their pages.
    let lines = ((src.len() - head) / (3 * LINE)).saturating_sub(1) | 1;
    let lane = lines * LINE;
    let body = 3 * lane;
    dst[..head].copy_from_slice(&src[..head]);
    let mut crc = crc32c::crc32c(&src[..head]);
    // SAFETY: the caller has seen that the processor has both.
    let lanes = unsafe { stream_lanes(&mut dst[head..head + body], &src[head..head + body]) };
    for of_lane in lanes {
        crc = Shift::with(lane, |shift| shift.apply(crc)) ^ of_lane;
    }
    let (rest_to, rest) = (&mut dst[head + body..], &src[head + body..]);
    rest_to.copy_from_slice(rest);
    crc = crc32c::crc32c_append(crc, rest);
    // SAFETY: every x86-64 processor has SSE.
    unsafe { std::arch::x86_64::_mm_sfence() };
    crc
}

/// Copies three lanes of whole lines, `dst` beginning at one, and returns the checksum of each.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,sse4.2")]
fn stream_lanes(dst: &mut [u8], src: &[u8]) -> [u32; 3] {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_crc32_u64, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256,
    };
    /// How far ahead lines are asked for.
    const AHEAD: usize = 32 * LINE;
    let lane = src.len() / 3;
    assert!(dst.len() == src.len() && src.len() == 3 * lane && lane.is_multiple_of(LINE));
    assert!(dst.as_ptr().addr().is_multiple_of(LINE), "streaming stores need it");
    let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
    let mut crcs = [u64::from(u32::MAX); 3];
    for at in (0..lane).step_by(LINE) {
        for (number, crc) in crcs.iter_mut().enumerate() {
            let at = number * lane + at;
            // SAFETY: `at + LINE <= 3 * lane`, the length of both; `to + at` is at a line's begin;
            // the slices do not overlap, one being unique. A prefetch may name any address.
            unsafe {
                let (from, to) = (from.add(at), to.add(at));
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                let halves =
                    [0, 1].map(|half| _mm256_loadu_si256(from.cast::<__m256i>().add(half)));
                _mm256_stream_si256(to.cast(), halves[0]);
                _mm256_stream_si256(to.cast::<__m256i>().add(1), halves[1]);
                for word in 0..LINE / 8 {
                    *crc = _mm_crc32_u64(*crc, from.cast::<u64>().add(word).read_unaligned());
                }
            }
        }
    }
    crcs.map(|crc| !(crc as u32))
}

/// What so many bytes behind it make of a checksum.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Shift {
    bytes: usize,
    /// What becomes of each bit.
    bits: [u32; 32],
}

#[cfg(target_arch = "x86_64")]
impl Shift {
    /// The last one made is kept for each thread: a store's blocks are mostly of one size.
    fn with<R>(bytes: usize, f: impl FnOnce(&Self) -> R) -> R {
        thread_local! {
            static LAST: std::cell::Cell<Shift> =
                const { std::cell::Cell::new(Shift { bytes: 0, bits: [0; 32] }) };
        }
        let mut shift = LAST.get();
        if shift.bytes != bytes {
            let bit = |n: usize| crc32c::crc32c_combine(1 << n, 0, bytes);
            shift = Self { bytes, bits: std::array::from_fn(bit) };
            LAST.set(shift);
        }
        f(&shift)
    }

    fn apply(&self, crc: u32) -> u32 {
        let set = |(n, bits): (usize, &u32)| if crc >> n & 1 == 1 { *bits } else { 0 };
        self.bits.iter().enumerate().map(set).fold(0, |sum, bits| sum ^ bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn crc_has_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    #[should_panic(expected = "as many bytes")]
    fn unequal_lengths_are_refused() {
        copy_checked(&mut [0; 4], &[0; 5]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn copies_equal_memcpy_and_touch_nothing_else(
            len in prop_oneof![
                0..300_usize, 32_700..32_900_usize, 65_000..66_000_usize, 90_000..300_000_usize,
                262_000..263_000_usize, 1_048_400..1_048_800_usize
            ],
            dst_shift in 0..70_usize,
            src_shift in 0..70_usize,
            seed in any::<u64>(),
        ) {
            let src = noise(src_shift + len, seed);
            let src = &src[src_shift..];
            let mut checked = vec![0xa5_u8; dst_shift + len + 64];
            let mut plain = checked.clone();
            let crc = copy_checked(&mut checked[dst_shift..dst_shift + len], src);
            copy(&mut plain[dst_shift..dst_shift + len], src);
            prop_assert_eq!(crc, crc32c(src));
            for dst in [&checked, &plain] {
                prop_assert!(dst[dst_shift..dst_shift + len] == *src);
                prop_assert!(dst[..dst_shift].iter().all(|&byte| byte == 0xa5));
                prop_assert!(dst[dst_shift + len..].iter().all(|&byte| byte == 0xa5));
            }
        }
    }
}
