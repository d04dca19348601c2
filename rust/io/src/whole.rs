//! Reading a large file whole, in several threads.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::mem::MaybeUninit;

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::parallel::{in_parallel, recovery_threads};

/// What one thread reads before it looks for more; less is read by the caller's thread alone.
const PIECE_BYTES: usize = 4 << 20;

/// The bytes of a file of about `len` bytes, at most `most` of them.
///
/// # Errors
/// Those of the calls that read it.
pub(crate) fn read_file_whole(mut file: File, len: usize, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // A byte more, so that the end is seen without growing; a refusal is the read's to report.
    if bytes.try_reserve_exact(len + 1).is_ok() && len > PIECE_BYTES {
        let spare = &mut bytes.spare_capacity_mut()[..len];
        if read_pieces(&file, spare)? {
            // SAFETY: all of these bytes were read, by as many calls as it took.
            unsafe { bytes.set_len(len) };
            file.seek(SeekFrom::Start(len as u64))?;
        }
    }
    let left = most.saturating_sub(bytes.len() as u64);
    file.take(left).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Fills `spare` from the file's beginning; false where that has fewer bytes.
fn read_pieces(file: &File, spare: &mut [MaybeUninit<u8>]) -> io::Result<bool> {
    let pieces: Vec<Mutex<&mut [MaybeUninit<u8>]>> =
        spare.chunks_mut(PIECE_BYTES).map(Mutex::new).collect();
    let read = |at: usize| read_piece(file, &mut pieces[at].lock(), (at * PIECE_BYTES) as u64);
    let done = in_parallel(pieces.len(), recovery_threads(), read, || {});
    done.into_iter().try_fold(true, |all, piece| piece.map(|whole| all && whole))
}

fn read_piece(file: &File, piece: &mut [MaybeUninit<u8>], at: u64) -> io::Result<bool> {
    let mut done = 0;
    while done < piece.len() {
        match rustix::io::pread(file, &mut piece[done..], at + done as u64) {
            Ok(([], _)) => return Ok(false),
            Ok((read, _)) => done += read.len(),
            Err(Errno::INTR) => {}
            Err(err) => return Err(err.into()),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn file(len: usize) -> (File, Vec<u8>) {
        let bytes: Vec<u8> = (0..len).map(|at| (at / 3 % 251) as u8).collect();
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&bytes, 0).expect("written");
        (file, bytes)
    }

    #[test]
    fn a_file_is_read_whole_whatever_its_length_was_said_to_be() {
        for len in [0, 5, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7] {
            let (file, bytes) = file(len);
            for said in [len, len / 2, len + PIECE_BYTES] {
                let copy = file.try_clone().expect("another descriptor");
                (&copy).rewind().expect("a file");
                let read = read_file_whole(copy, said, u64::MAX).expect("read");
                assert!(read == bytes, "{len} bytes, said to be {said}");
            }
        }
    }

    #[test]
    fn no_more_is_read_than_may_be() {
        let (mut file, bytes) = file(2 * PIECE_BYTES);
        file.rewind().expect("a file");
        let most = PIECE_BYTES + 9;
        let read = read_file_whole(file, most, most as u64).expect("read");
        assert!(read == bytes[..most]);
    }
}
