//! How much memory and how many files this process may have, so that asking for more is an error
//! at open, not a kill or a fault later.

use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use rustix::mm::Advice;

use crate::mapping::HUGE_BYTES;
use crate::parallel::{in_parallel, recovery_threads};

/// The piece in which a table's memory is touched; what fits in one is left to its first use.
const PIECE_BYTES: usize = 16 << 20;

/// The memory of the machine or of the control group, whichever is less, in bytes.
pub fn memory_limit_bytes() -> Option<u64> {
    let machine = meminfo("MemTotal:");
    groups().iter().filter_map(|group| group.limit_bytes).chain(machine).min()
}

/// The memory that could be had now without swapping, in bytes; `None` where nobody says.
pub fn available_memory_bytes() -> Option<u64> {
    let machine = meminfo("MemAvailable:");
    groups().iter().filter_map(Group::available_bytes).chain(machine).min()
}

/// How many files this process may have open at once; `None` without a limit.
pub fn open_files_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Makes a large table's spare capacity ready, which it is about to fill: touching fresh memory
/// costs more than filling it, so several threads do it. Small pages first, since the huge ones
/// that are free may be such as a virtual machine has given back to its host, and cost many times
/// as much; the kernel makes huge ones of them later. A refusal costs speed only.
pub fn prefer_huge_pages<T>(spare: &mut [MaybeUninit<T>]) {
    let range = spare.as_mut_ptr_range();
    let begin = (range.start as usize).next_multiple_of(HUGE_BYTES);
    let end = range.end as usize / HUGE_BYTES * HUGE_BYTES;
    let len = end.saturating_sub(begin);
    let pieces = len.div_ceil(PIECE_BYTES);
    if pieces > 1 {
        let touch = |piece: usize| {
            let at = begin + piece * PIECE_BYTES;
            // SAFETY: these pages lie within memory that the caller has allocated and lends.
            let touched =
                unsafe { advise(at, PIECE_BYTES.min(end - at), Advice::LinuxPopulateWrite) };
            // Kernels before 5.14 do not know it: the table's first use then does the same.
            _ = touched;
        };
        in_parallel(pieces, recovery_threads(), touch, || {});
    }
    if len > 0 {
        // SAFETY: as above.
        let asked = unsafe { advise(begin, len, Advice::LinuxHugepage) };
        if let Err(err) = asked {
            tracing::debug!(%err, "no huge pages for a table");
        }
    }
}

/// Advises the kernel of pages to come.
///
/// # Safety
/// The pages lie within memory that is allocated and lent to the caller.
unsafe fn advise(at: usize, len: usize, advice: Advice) -> rustix::io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: neither piece of advice in use changes what a page holds or what may be done with it.
    unsafe { rustix::mm::madvise(start, len, advice) }
}

fn meminfo(field: &str) -> Option<u64> {
    parse_field(&fs::read_to_string("/proc/meminfo").ok()?, field).map(|kib| kib * 1024)
}

struct Group {
    limit_bytes: Option<u64>,
    used_bytes: u64,
    reclaimable_bytes: u64,
}

impl Group {
    fn read(dir: &Path, limit: &str, used: &str) -> Self {
        let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok();
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let field = |name| parse_field(&stat, name).unwrap_or(0);
        // Cached files give way to an arena; shared memory, counted among them, does not.
        let reclaimable_bytes = field("file").saturating_sub(field("shmem"));
        let used_bytes = number(used).unwrap_or(0);
        Self { limit_bytes: number(limit), used_bytes, reclaimable_bytes }
    }

    fn available_bytes(&self) -> Option<u64> {
        let used = self.used_bytes.saturating_sub(self.reclaimable_bytes);
        Some(self.limit_bytes?.saturating_sub(used))
    }
}

/// This process' control groups: the whole chain, since each level may have a limit.
fn groups() -> Vec<Group> {
    let root = Path::new("/sys/fs/cgroup");
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        let (limit, used) = ("memory.limit_in_bytes", "memory.usage_in_bytes");
        return vec![Group::read(&root.join("memory"), limit, used)];
    };
    let leaf: PathBuf = root.join(path);
    leaf.ancestors()
        .take_while(|dir| dir.starts_with(root))
        .map(|dir| Group::read(dir, "memory.max", "memory.current"))
        .collect()
}

/// The number after `field` at the start of a line.
fn parse_field(text: &str, field: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(field)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "file_mapped 7\nfile 12\nMemTotal:  100 kB\n";
        assert_eq!(parse_field(text, "file"), Some(12));
        assert_eq!(parse_field(text, "MemTotal:"), Some(100));
        assert_eq!(parse_field(text, "shmem"), None);
    }

    #[test]
    fn a_group_counts_cached_files_as_available_but_not_shared_memory() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("write");
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\nfile 600\nshmem 250\n");
        let group = Group::read(dir.path(), "memory.max", "memory.current");
        assert_eq!(group.available_bytes(), Some(650));
        write("memory.max", "max\n");
        let group = Group::read(dir.path(), "memory.max", "memory.current");
        assert_eq!(group.available_bytes(), None);
    }

    #[test]
    fn huge_pages_change_nothing_in_a_table() {
        let mut table: Vec<u64> = Vec::new();
        prefer_huge_pages(table.spare_capacity_mut());
        table.push(7);
        table.reserve(3 * PIECE_BYTES / 8);
        prefer_huge_pages(table.spare_capacity_mut());
        table.extend(0..table.capacity() as u64 - 1);
        assert!(table[0] == 7 && table[1..].iter().zip(0..).all(|(value, at)| *value == at));
    }

    #[test]
    fn this_machine_says_what_it_has() {
        let limit = memory_limit_bytes().expect("Linux has /proc/meminfo");
        let available = available_memory_bytes().expect("Linux has /proc/meminfo");
        assert!(available > 0 && available <= limit, "{available} of {limit}");
    }
}
