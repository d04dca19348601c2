//! CRC-32C, and copies that compute it in the same pass.

/// The checksum and the copy share a chunk while it is in the first-level cache.
const CHUNK_BYTES: usize = 32 * 1024;
/// Below this a copy should stay in the cache, where its reader will look for it.
const STREAM_MIN_BYTES: usize = 64 * 1024;

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
    if crate::lanes::serve(src.len()) {
        return crate::lanes::copy(dst, src);
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
                130_900..131_200_usize
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
