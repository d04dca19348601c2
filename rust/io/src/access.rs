//! How the files of a directory can be read and written, found out by trying.

use std::fs::File;
use std::io;

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};

use crate::PAGE_BYTES;
use crate::disk::Alignment;
use crate::posix::{SCRATCH_PREFIX, bounce_buffer, write_whole};

/// How data files are read and written.
pub(crate) struct Access {
    pub(crate) direct: bool,
    pub(crate) alignment: Alignment,
    pub(crate) reason: String,
}

/// Finds out whether files here can be written, and whether past the page cache.
pub(crate) fn probe(dir: &File) -> io::Result<Access> {
    let scratch = scratch_file(dir, OFlags::empty())?;
    let buffered = |reason: String| {
        Ok(Access { direct: false, alignment: Alignment { memory: 1, offset: 1 }, reason })
    };
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    let kind = rustix::fs::fstatfs(dir)?.f_type as u64;
    if kind == TMPFS || kind == RAMFS {
        return buffered("the directory is in memory (tmpfs), where there is no device".into());
    }
    let mask = StatxFlags::DIOALIGN;
    let (alignment, source) = match rustix::fs::statx(&scratch, "", AtFlags::EMPTY_PATH, mask) {
        Ok(stat) if stat.stx_mask & mask.bits() != 0 => match reported(&stat) {
            Some(alignment) => (alignment, "reported by the file system"),
            None => return buffered("the file system reports that it has no direct I/O".into()),
        },
        _ => (Alignment { memory: 4096, offset: 4096 }, "assumed, the file system reports none"),
    };
    let Alignment { memory, offset } = alignment;
    let page = PAGE_BYTES as u32;
    if !page.is_multiple_of(memory) || !page.is_multiple_of(offset) {
        return buffered(format!("direct I/O here needs an alignment of {memory}/{offset} bytes"));
    }
    let tried = scratch_file(dir, OFlags::DIRECT)
        .and_then(|file| write_whole(&file, alignment, 0, bounce_buffer(1)?.as_slice()));
    match tried {
        Ok(()) => {
            let reason = format!("O_DIRECT, alignment {memory}/{offset} bytes, {source}");
            Ok(Access { direct: true, alignment, reason })
        }
        Err(err) if err.kind() == io::ErrorKind::StorageFull => Err(err),
        Err(err) => buffered(format!("the file system refuses O_DIRECT ({err})")),
    }
}

/// The alignment that the file system reports; `None` where it reports that there is none.
fn reported(stat: &Statx) -> Option<Alignment> {
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    (memory > 0 && offset > 0).then_some(Alignment { memory, offset })
}

/// A file without a name, for the probe.
fn scratch_file(dir: &File, extra: OFlags) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = extra | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::openat(dir, ".", flags | OFlags::TMPFILE, mode) {
        return Ok(fd.into());
    }
    // Some file systems have no nameless files.
    let name = format!("{SCRATCH_PREFIX}probe");
    let fd = rustix::fs::openat(dir, &name, flags | OFlags::CREATE | OFlags::EXCL, mode);
    // O_DIRECT may be refused after the file has been made.
    let _ = rustix::fs::unlinkat(dir, &name, AtFlags::empty());
    Ok(fd?.into())
}
