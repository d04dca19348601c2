//! A copy fused with its CRC-32C, for x86-64: each line of the cache is read once.

use std::arch::asm;
use std::sync::LazyLock;

/// A line of the cache.
const LINE: usize = 64;
/// An odd number of lines, so that the lanes do not meet at the same place of their pages.
const LANE: usize = 341 * LINE;
/// Three lanes, side by side: the processor has three checksums under way at a time, each of which
/// waits for its last.
const STRIPE: usize = 3 * LANE;

/// What a lane behind it makes of each byte of a checksum.
static BEHIND_A_LANE: LazyLock<[[u32; 256]; 4]> = LazyLock::new(|| {
    let of = |place: u32, byte: u32| crc32c::crc32c_combine(byte << (8 * place), 0, LANE);
    [0, 1, 2, 3].map(|place| std::array::from_fn(|byte| of(place, byte as u32)))
});

/// Whether a copy of so many bytes can and should go this way.
pub(crate) fn serve(len: usize) -> bool {
    len >= STRIPE + LINE
        && std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

/// Copies `src` to `dst`, past the cache, and returns the checksum of `src`.
///
/// # Panics
/// If the lengths differ, or `serve` says no.
pub(crate) fn copy(dst: &mut [u8], src: &[u8]) -> u32 {
    assert!(dst.len() == src.len() && serve(src.len()), "the caller has asked");
    let head = dst.as_ptr().align_offset(LINE).min(dst.len());
    let (first_to, dst) = dst.split_at_mut(head);
    let (first, src) = src.split_at(head);
    first_to.copy_from_slice(first);
    let mut crc = crc32c::crc32c(first);
    let mut to = dst.chunks_exact_mut(STRIPE);
    let mut from = src.chunks_exact(STRIPE);
    for (to, from) in (&mut to).zip(&mut from) {
        // SAFETY: `serve` has seen that the processor has both.
        for lane in unsafe { copy_stripe(to, from) } {
            crc = behind_a_lane(crc) ^ lane;
        }
    }
    to.into_remainder().copy_from_slice(from.remainder());
    // SAFETY: every x86-64 processor has SSE.
    unsafe { std::arch::x86_64::_mm_sfence() };
    crc32c::crc32c_append(crc, from.remainder())
}

fn behind_a_lane(crc: u32) -> u32 {
    let tables = BEHIND_A_LANE.iter().zip(crc.to_le_bytes());
    tables.fold(0, |sum, (table, byte)| sum ^ table[usize::from(byte)])
}

/// Copies a stripe to the begin of a line, and returns the checksum of each lane.
#[target_feature(enable = "avx2,sse4.2")]
fn copy_stripe(dst: &mut [u8], src: &[u8]) -> [u32; 3] {
    assert!(dst.len() == STRIPE && src.len() == STRIPE);
    assert!(dst.as_ptr().addr().is_multiple_of(LINE), "streaming stores need it");
    let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
    let mut crcs = [u64::from(u32::MAX); 3];
    for at in (0..LANE).step_by(LINE) {
        for (lane, crc) in crcs.iter_mut().enumerate() {
            let at = lane * LANE + at;
            // SAFETY: `at + LINE <= STRIPE`, so that the line lies in both slices, which do not
            // overlap, one being unique; `at` is a multiple of a line, so that `to + at` is at the
            // begin of one. A prefetch may name any address.
            unsafe { copy_line(to.wrapping_add(at), from.wrapping_add(at), crc) };
        }
    }
    crcs.map(|crc| !(crc as u32))
}

/// Copies a line, and adds it to `crc`.
///
/// In assembly, so that it is as fast where the compiler checks every use of a pointer.
///
/// # Safety
/// `LINE` bytes can be read from `from`, and written to `to`, the begin of a line.
#[inline]
#[target_feature(enable = "avx2,sse4.2")]
unsafe fn copy_line(to: *mut u8, from: *const u8, crc: &mut u64) {
    // SAFETY: it touches nothing but what the caller has promised.
    unsafe {
        asm!(
            "prefetcht0 [{from} + 2048]",
            "vmovdqu {low}, [{from}]",
            "vmovdqu {high}, [{from} + 32]",
            "vmovntdq [{to}], {low}",
            "vmovntdq [{to} + 32], {high}",
            "crc32 {crc}, qword ptr [{from}]",
            "crc32 {crc}, qword ptr [{from} + 8]",
            "crc32 {crc}, qword ptr [{from} + 16]",
            "crc32 {crc}, qword ptr [{from} + 24]",
            "crc32 {crc}, qword ptr [{from} + 32]",
            "crc32 {crc}, qword ptr [{from} + 40]",
            "crc32 {crc}, qword ptr [{from} + 48]",
            "crc32 {crc}, qword ptr [{from} + 56]",
            from = in(reg) from,
            to = in(reg) to,
            crc = inout(reg) *crc,
            low = out(ymm_reg) _,
            high = out(ymm_reg) _,
            options(nostack, preserves_flags),
        );
    }
}
