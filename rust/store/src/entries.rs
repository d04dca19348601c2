//! A table of entries by key, made for looking up many keys at once.
//!
//! One cache line an entry and linear probing: a lookup reads one line, mostly, and nothing that
//! the lookup of the next key depends on, so that the processor has several under way.

use crate::index::{FullKey, head};
use crate::machine::DriveId;
use crate::resident::Resident;
use crate::sync::Arc;
use tiered_kv_types::{BlockInfo, BlockKey};

/// What is known of one key. One of which nothing is known is a free place of a table.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Entry {
    key: FullKey,
    pub(crate) resident: Option<Arc<Resident>>,
    pub(crate) info: BlockInfo,
    pub(crate) writing: u32,
    /// One more than the number of the drive that it is on; 0 for none.
    drive: u16,
    pub(crate) loading: bool,
}

/// A model's references are larger.
const IS_MODEL: bool = size_of::<Arc<Resident>>() > size_of::<usize>();
const _: () = assert!(IS_MODEL || size_of::<Entry>() == 64, "an entry fills one cache line");

impl Entry {
    /// The drive it is on.
    pub(crate) fn on_nvme(&self) -> Option<DriveId> {
        self.drive.checked_sub(1)
    }

    pub(crate) fn set_on_nvme(&mut self, drive: Option<DriveId>) {
        self.drive = drive.map_or(0, |drive| drive + 1);
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.resident.is_none() && self.drive == 0 && !self.loading && self.writing == 0
    }
}

/// Places of the smallest table that holds anything.
const MIN_PLACES: usize = 8;

#[derive(Debug)]
pub(crate) struct Entries {
    /// A power of two of places, or none; a free one ends every search.
    places: Vec<Entry>,
    used: usize,
    seed: u64,
}

impl Entries {
    pub(crate) fn new(seed: u64) -> Self {
        Self { places: Vec::new(), used: 0, seed }
    }

    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// The place where a search for `key` begins, in a table of `places`.
    #[inline]
    fn home(&self, ns: u32, key: &BlockKey, places: usize) -> usize {
        // A key is a digest, so that eight bytes of it spread evenly; the rest is for keys that
        // are none.
        let mixed = (head(ns, key) ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 32) as usize & (places - 1)
    }

    fn home_of(&self, key: &FullKey) -> usize {
        self.home(key.ns, &key.key, self.places.len())
    }

    /// The entry of a key. One that says nothing stands for none.
    #[inline]
    pub(crate) fn get(&self, ns: u32, key: &BlockKey) -> Option<&Entry> {
        let places = &self.places[..];
        if places.is_empty() {
            return None;
        }
        let mut at = self.home(ns, key, places.len());
        loop {
            let entry = &places[at];
            // First what is so nearly always.
            if entry.key.key == *key && entry.key.ns == ns {
                return Some(entry);
            }
            if entry.is_empty() {
                return None;
            }
            at = (at + 1) & (places.len() - 1);
        }
    }

    pub(crate) fn get_mut(&mut self, key: &FullKey) -> Option<&mut Entry> {
        let at = self.find(key)?;
        Some(&mut self.places[at])
    }

    fn find(&self, key: &FullKey) -> Option<usize> {
        let there = !self.places.is_empty();
        there.then(|| self.search(key)).filter(|at| !self.places[*at].is_empty())
    }

    /// Where `key` is, or the free place where it would be. There is a free one.
    fn search(&self, key: &FullKey) -> usize {
        let mut at = self.home_of(key);
        while !self.places[at].is_empty() && self.places[at].key != *key {
            at = (at + 1) & (self.places.len() - 1);
        }
        at
    }

    /// The entry of `key`, a new one where it has none. Whoever leaves it empty removes it.
    pub(crate) fn entry(&mut self, key: &FullKey) -> &mut Entry {
        self.reserve(1);
        let at = self.search(key);
        let entry = &mut self.places[at];
        if entry.is_empty() {
            entry.key = *key;
            self.used += 1;
        }
        entry
    }

    /// Removes an entry that [`Entries::entry`] or `get_mut` gave, and that was left empty.
    pub(crate) fn remove_empty(&mut self, key: &FullKey) {
        let mask = self.places.len() - 1;
        let mut hole = self.home_of(key);
        while self.places[hole].key != *key {
            hole = (hole + 1) & mask;
        }
        debug_assert!(self.places[hole].is_empty(), "only what is empty is removed");
        self.used -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            if self.places[at].is_empty() {
                break;
            }
            // An entry is found from its home on, without a free place on the way.
            let home = self.home_of(&self.places[at].key);
            let (from_home, from_hole) = (at.wrapping_sub(home), at.wrapping_sub(hole));
            if from_home & mask >= from_hole & mask {
                self.places.swap(hole, at);
                hole = at;
            }
        }
        self.places[hole] = Entry::default();
    }

    /// Makes room for so many more entries.
    pub(crate) fn reserve(&mut self, more: usize) {
        let wanted = self.used + more;
        // At most five of eight places are in use, so that searches stay short.
        if wanted * 8 <= self.places.len() * 5 {
            return;
        }
        let places = (wanted * 8 / 5 + 1).next_power_of_two().max(MIN_PLACES);
        let fresh = (0..places).map(|_| Entry::default()).collect();
        for entry in std::mem::replace(&mut self.places, fresh) {
            if !entry.is_empty() {
                let at = self.search(&entry.key);
                self.places[at] = entry;
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.seed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Keys that differ where the hash does not look crowd.
    fn key(number: u8) -> FullKey {
        let mut bytes = [0; 32];
        (bytes[0], bytes[31]) = (number % 4, number);
        FullKey { ns: u32::from(number) % 3, key: BlockKey(bytes) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn entries_are_a_map(
            seed: u64,
            steps in prop::collection::vec((any::<u8>(), 0u32..3), 0..400),
        ) {
            let (mut entries, mut map) = (Entries::new(seed), HashMap::new());
            for (number, writing) in steps {
                entries.entry(&key(number)).writing = writing;
                map.insert(number, writing);
                if writing == 0 {
                    entries.remove_empty(&key(number));
                    map.remove(&number);
                }
                prop_assert_eq!(entries.len(), map.len());
                for number in 0..=u8::MAX {
                    let FullKey { ns, key: block } = key(number);
                    let found = entries.get(ns, &block).filter(|entry| !entry.is_empty());
                    let found = found.map(|entry| entry.writing);
                    prop_assert_eq!(found, map.get(&number).copied());
                    let found = entries.get_mut(&key(number)).map(|entry| entry.writing);
                    prop_assert_eq!(found, map.get(&number).copied());
                }
            }
        }
    }
}
