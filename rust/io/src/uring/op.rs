//! One operation that the ring has: its buffers, and how far it is.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use io_uring::squeue::{Entry, Flags};
use io_uring::{opcode, types};

use super::tables::BufferTable;
use crate::disk::{Alignment, DataFile, Disk, check_range, usable};
use crate::engine::{IoDone, IoOp, IoRequest, Priority};
use crate::pool::panic_text;
use crate::region::ReadInto;

/// What one entry transfers at most, in bytes: the kernel's own limit is 2 GiB less a page.
const MAX_TRANSFER: usize = 1 << 30;
/// How often an operation for which the kernel lacks resources is tried.
const MAX_TRIES: u32 = 64;

/// An operation in the ring, with everything that the kernel uses for it.
pub(super) struct RingOp {
    token: u64,
    pub(super) priority: Priority,
    /// Owns the memory behind `address`.
    op: IoOp,
    /// Keeps the descriptor open and, in the ring's table, in its place.
    pub(super) file: Arc<DataFile>,
    /// Its place in the ring's table of files.
    pub(super) file_index: Option<u32>,
    /// Its place in the ring's table of buffers.
    buffer_index: Option<u16>,
    address: usize,
    len: usize,
    offset: u64,
    done: usize,
    tries: u32,
}

/// What becomes of a request.
pub(super) enum Prepared {
    /// It goes into the ring.
    Ring(RingOp),
    /// A thread that blocks has to do it.
    Helper(IoRequest),
    /// It has failed already.
    Ended(IoDone),
}

/// What becomes of an operation after a completion.
pub(super) enum Next {
    /// It is submitted once more, for what is left.
    Again,
    /// It has ended.
    Ended(io::Result<()>),
}

/// Where a request's bytes are.
struct Memory {
    address: usize,
    len: usize,
    offset: u64,
}

/// Checks a request as the disk would and finds out where its bytes are.
pub(super) fn prepare(mut request: IoRequest, disk: &dyn Disk, buffers: &BufferTable) -> Prepared {
    let unit = disk.alignment();
    let file = match &request.op {
        IoOp::Read { file, .. } | IoOp::Write { file, .. } | IoOp::Sync { file } => *file,
        IoOp::Create { .. } => return Prepared::Helper(request),
    };
    // A buffer is foreign code, and its panic must not end the ring.
    let found = catch_unwind(AssertUnwindSafe(|| memory_of(&mut request.op)));
    let found = found.unwrap_or_else(|panic| {
        Err(io::Error::other(format!("the buffer has panicked: {}", panic_text(&*panic))))
    });
    let checked = found.and_then(|memory| {
        let descriptors = disk.descriptors().expect("checked when the engine was made");
        let data = descriptors.data_file(file)?;
        check_range(unit, memory.offset, memory.len)?;
        if matches!(request.op, IoOp::Write { .. }) {
            data.check_write(memory.offset, memory.len)?;
        }
        Ok((memory, data))
    });
    let (memory, file) = match checked {
        Ok(checked) => checked,
        Err(err) => return Prepared::Ended(ended(request, Err(err))),
    };
    let is_sync = matches!(request.op, IoOp::Sync { .. });
    let off_grid = !memory.address.is_multiple_of(unit.memory as usize);
    if !is_sync && (memory.len == 0 || off_grid) {
        return Prepared::Helper(request);
    }
    let (buffer_index, address) = match &request.op {
        IoOp::Read { buf: ReadInto::Region(part), .. } => {
            (buffers.find_in(part.region(), memory.address, memory.len), memory.address)
        }
        _ => buffers.find(memory.address, memory.len),
    };
    let IoRequest { token, priority, op, .. } = request;
    let Memory { len, offset, .. } = memory;
    let (file_index, done, tries) = (None, 0, 0);
    Prepared::Ring(RingOp {
        token,
        priority,
        op,
        file,
        file_index,
        buffer_index,
        address,
        len,
        offset,
        done,
        tries,
    })
}

fn memory_of(op: &mut IoOp) -> io::Result<Memory> {
    Ok(match op {
        IoOp::Read { offset, buf, .. } => {
            let bytes = buf.as_mut_slice();
            Memory { address: bytes.as_mut_ptr() as usize, len: bytes.len(), offset: *offset }
        }
        IoOp::Write { offset, buf, .. } => {
            let bytes = buf.as_slice();
            Memory { address: bytes.as_ptr() as usize, len: bytes.len(), offset: *offset }
        }
        IoOp::Sync { .. } | IoOp::Create { .. } => Memory { address: 0, len: 0, offset: 0 },
    })
}

/// The answer to a request.
pub(super) fn ended(request: IoRequest, result: io::Result<()>) -> IoDone {
    IoDone::new(request.token, request.op, result)
}

impl RingOp {
    /// The entry for what is left of the operation. The kernel uses its memory until the entry's
    /// completion.
    pub(super) fn entry(&self, user_data: u64) -> Entry {
        // A place in the table goes where a descriptor would, with a flag that says so.
        let (fd, mut flags) = match self.file_index {
            Some(index) => (index as i32, Flags::FIXED_FILE),
            None => (self.file.as_fd().as_raw_fd(), Flags::empty()),
        };
        if self.tries > 0 {
            // A thread of the kernel that may block does not lack what was lacking.
            flags |= Flags::ASYNC;
        }
        let fd = types::Fd(fd);
        let address = (self.address + self.done) as *mut u8;
        let len = (self.len - self.done).min(MAX_TRANSFER) as u32;
        let offset = self.offset + self.done as u64;
        let entry = match (&self.op, self.buffer_index) {
            (IoOp::Read { .. }, Some(index)) => {
                opcode::ReadFixed::new(fd, address, len, index).offset(offset).build()
            }
            (IoOp::Read { .. }, None) => opcode::Read::new(fd, address, len).offset(offset).build(),
            (IoOp::Write { .. }, Some(index)) => {
                opcode::WriteFixed::new(fd, address, len, index).offset(offset).build()
            }
            (IoOp::Write { .. }, None) => {
                opcode::Write::new(fd, address, len).offset(offset).build()
            }
            (IoOp::Sync { .. } | IoOp::Create { .. }, _) => {
                opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
            }
        };
        entry.flags(flags).user_data(user_data)
    }

    /// Its bytes, those done included.
    pub(super) fn bytes(&self) -> usize {
        self.len
    }

    /// Takes a completion's result.
    pub(super) fn advance(&mut self, result: i32, unit: Alignment) -> Next {
        match result {
            0.. => self.transferred(result as usize, unit),
            _ if -result == libc::EINTR => Next::Again,
            _ if -result == libc::EAGAIN && self.tries < MAX_TRIES => {
                self.tries += 1;
                Next::Again
            }
            _ => Next::Ended(Err(io::Error::from_raw_os_error(-result))),
        }
    }

    fn transferred(&mut self, bytes: usize, unit: Alignment) -> Next {
        let wanted = self.len - self.done;
        let bytes = usable(unit, bytes.min(wanted), wanted);
        self.done += bytes;
        self.tries = 0;
        if self.done == self.len {
            return Next::Ended(Ok(()));
        }
        if bytes > 0 {
            return Next::Again;
        }
        let is_read = matches!(self.op, IoOp::Read { .. });
        let kind = if is_read { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WriteZero };
        Next::Ended(Err(kind.into()))
    }

    /// Gives the buffers back. Only after the kernel's last completion.
    pub(super) fn end(self, result: io::Result<()>) -> IoDone {
        IoDone::new(self.token, self.op, result)
    }
}
