//! Neighbouring ranges of a file, read or written by one call of the operating system.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};

use rustix::io::{Errno, preadv, pwritev};

use crate::disk::{Alignment, usable};

/// Fills all of `bufs`, one after the other, from `offset`.
pub(crate) fn read_all(
    file: &File,
    unit: Alignment,
    mut offset: u64,
    mut bufs: &mut [IoSliceMut<'_>],
) -> io::Result<()> {
    let mut wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    while wanted > 0 {
        let done = match preadv(file, bufs, offset) {
            Err(Errno::INTR) => continue,
            done => usable(unit, done?, wanted),
        };
        if done == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        IoSliceMut::advance_slices(&mut bufs, done);
        offset += done as u64;
        wanted -= done;
    }
    Ok(())
}

/// Writes all of `bufs`, one after the other, at `offset`.
pub(crate) fn write_all(
    file: &File,
    unit: Alignment,
    mut offset: u64,
    mut bufs: &mut [IoSlice<'_>],
) -> io::Result<()> {
    let mut wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
    while wanted > 0 {
        let done = match pwritev(file, bufs, offset) {
            Err(Errno::INTR) => continue,
            done => usable(unit, done?, wanted),
        };
        if done == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut bufs, done);
        offset += done as u64;
        wanted -= done;
    }
    Ok(())
}
