//! The arena of the models: its pages are loom's cells, so that an access which is not ordered
//! after the last owner's is an error. Which pages are owned says the shipped bitmap.

use crate::bitmap::PageBitmap;
use loom::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

/// As in the store.
pub(crate) type Nanos = u64;

/// As in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

const PAGE: usize = 4096;

/// Models do not fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin;

impl Origin {
    pub(crate) fn here() -> Self {
        Self
    }

    pub(crate) fn is_forked(self) -> bool {
        false
    }
}

/// Costs speed only.
pub(crate) fn prefer_huge_pages<T>(_: &mut [std::mem::MaybeUninit<T>]) {}

struct Pages {
    owned: PageBitmap,
    cells: Vec<UnsafeCell<[u8; PAGE]>>,
}

// SAFETY: that only a page's owner touches it is what the models check: loom fails where it is not
// so, in the schedule in which it happens.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

/// Pages of which each has one owner at a time. A handle.
#[derive(Clone)]
pub(crate) struct Arena(Arc<Pages>);

impl Arena {
    pub(crate) fn new(pages: usize) -> Self {
        let cells = (0..pages).map(|_| UnsafeCell::new([0; PAGE])).collect();
        Self(Arc::new(Pages { owned: PageBitmap::new(pages as u64), cells }))
    }

    pub(crate) fn take(&self, offset: u64, len: u64) -> Option<SlotMut> {
        assert_eq!(len, PAGE as u64, "the models' slots are pages");
        let page = offset / PAGE as u64;
        let taken = self.0.owned.try_take(page, 1);
        taken.then(|| SlotMut { page: OwnedPage { arena: self.clone(), page } })
    }

    pub(crate) fn taken_bytes(&self) -> u64 {
        self.0.owned.taken_pages() * PAGE as u64
    }
}

struct OwnedPage {
    arena: Arena,
    page: u64,
}

impl OwnedPage {
    fn cell(&self) -> &UnsafeCell<[u8; PAGE]> {
        &self.arena.0.cells[self.page as usize]
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: loom has checked in `with` that the access comes after the last write.
        self.cell().with(|page| unsafe { (&*page).as_slice() })
    }
}

impl Drop for OwnedPage {
    fn drop(&mut self) {
        self.arena.0.owned.release(self.page, 1);
    }
}

pub(crate) struct SlotMut {
    page: OwnedPage,
}

impl SlotMut {
    pub(crate) fn len(&self) -> usize {
        PAGE
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: loom has checked in `with_mut` that the access comes after all others.
        self.page.cell().with_mut(|page| unsafe { (&mut *page).as_mut_slice() })
    }

    pub(crate) fn freeze(self) -> Slot {
        Slot { page: self.page }
    }
}

pub(crate) struct Slot {
    page: OwnedPage,
}

impl Slot {
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.page.bytes()
    }
}

macro_rules! shown {
    ($($name:ident),*) => {
        $(impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        })*
    };
}

shown!(Arena, Slot, SlotMut);

pub(crate) trait ReadBuf {
    fn as_slice(&self) -> &[u8];
}

/// Any function of the bytes will do: nothing here is damaged.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(1, |sum: u32, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)))
}

pub(crate) fn copy_checked(to: &mut [u8], from: &[u8]) -> u32 {
    to.copy_from_slice(from);
    crc32c(from)
}
