//! Tombstones: what was deleted, for as long as an older record could still be found.
//!
//! They lie in pages of 4 KiB in the journal of every drive, drawn in `docs/format.md`. A page is
//! written once and never changed, so that adding tombstones never endangers those before them.

use crate::codec::{Writer, array, triage, u32_at, u64_at, unused};
use crate::key::BlockKey;
use crate::namespace::NamespaceId;
use crate::record::Decoded;

/// Bytes of one page of the journal.
pub const JOURNAL_PAGE_BYTES: usize = 4096;
/// Most tombstones in one page.
pub const TOMBSTONES_PER_PAGE: usize = 31;

const ENTRY_BYTES: usize = 128;
const JOURNAL_MAGIC: &[u8; 8] = b"TKVTMB01";

/// What a tombstone covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buried {
    /// One key.
    Key(BlockKey),
    /// Every key of the namespace that was stored before this time, in ns since 1970.
    StoredBefore(u64),
}

/// Records of the namespace that it covers, at or below its generation, are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The namespace.
    pub namespace: NamespaceId,
    /// What in it.
    pub buried: Buried,
    /// The newest generation that is gone.
    pub generation: u64,
}

impl Tombstone {
    /// Whether a record is gone.
    pub fn covers(
        &self,
        namespace: &NamespaceId,
        key: &BlockKey,
        generation: u64,
        stored_unix_ns: u64,
    ) -> bool {
        let meant = match &self.buried {
            Buried::Key(buried) => buried == key,
            Buried::StoredBefore(unix_ns) => stored_unix_ns < *unix_ns,
        };
        meant && *namespace == self.namespace && generation <= self.generation
    }
}

/// The bytes of one page.
///
/// # Panics
/// Where there are more than [`TOMBSTONES_PER_PAGE`].
pub fn encode_page(store: &[u8; 16], tombstones: &[Tombstone]) -> [u8; JOURNAL_PAGE_BYTES] {
    assert!(tombstones.len() <= TOMBSTONES_PER_PAGE, "a page holds 31 tombstones");
    let mut out = [0; JOURNAL_PAGE_BYTES];
    let mut w = Writer(&mut out);
    w.put(16, store);
    let count = u32::try_from(tombstones.len()).expect("at most 31");
    w.put(32, &count.to_le_bytes());
    for (index, tombstone) in tombstones.iter().enumerate() {
        let at = ENTRY_BYTES * (index + 1);
        w.put(at, &tombstone.namespace.0);
        let (kind, before) = match &tombstone.buried {
            Buried::Key(key) => {
                w.put(at + 32, &key.0);
                (1u8, 0)
            }
            Buried::StoredBefore(unix_ns) => (2, *unix_ns),
        };
        w.put(at + 64, &tombstone.generation.to_le_bytes());
        w.put(at + 72, &before.to_le_bytes());
        w.put(at + 80, &[kind]);
    }
    w.seal(JOURNAL_MAGIC);
    out
}

/// Reads one page; a page of another store is damaged.
pub fn decode_page(store: &[u8; 16], bytes: &[u8]) -> Decoded<Vec<Tombstone>> {
    triage(bytes, JOURNAL_MAGIC, JOURNAL_PAGE_BYTES).then(|()| {
        let count = u32_at(bytes, 32) as usize;
        if &bytes[16..32] != store || count > TOMBSTONES_PER_PAGE {
            return Decoded::Damaged;
        }
        if !unused(bytes, [36..ENTRY_BYTES, ENTRY_BYTES * (count + 1)..JOURNAL_PAGE_BYTES]) {
            return Decoded::Damaged;
        }
        let mut tombstones = Vec::with_capacity(count);
        for index in 0..count {
            let at = ENTRY_BYTES * (index + 1);
            let (buried, other) = match bytes[at + 80] {
                1 => (Buried::Key(BlockKey(array(bytes, at + 32))), at + 72..at + 80),
                2 => (Buried::StoredBefore(u64_at(bytes, at + 72)), at + 32..at + 64),
                _ => return Decoded::Damaged,
            };
            if !unused(bytes, [other, at + 81..at + ENTRY_BYTES]) {
                return Decoded::Damaged;
            }
            let namespace = NamespaceId(array(bytes, at));
            let generation = u64_at(bytes, at + 64);
            tombstones.push(Tombstone { namespace, buried, generation });
        }
        Decoded::Valid(tombstones)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_reads_back_and_covers_what_it_says() {
        let (store, ns) = ([9; 16], NamespaceId([1; 32]));
        let key =
            Tombstone { namespace: ns, buried: Buried::Key(BlockKey([2; 32])), generation: 5 };
        let old = Tombstone { namespace: ns, buried: Buried::StoredBefore(100), generation: 7 };
        let page = encode_page(&store, &[key, old]);
        assert_eq!(decode_page(&store, &page), Decoded::Valid(vec![key, old]));
        assert_eq!(decode_page(&[8; 16], &page), Decoded::Damaged, "another store's");
        assert_eq!(decode_page(&store, &[0; JOURNAL_PAGE_BYTES]), Decoded::Empty);
        let (this, other) = (BlockKey([2; 32]), BlockKey([3; 32]));
        assert!(key.covers(&ns, &this, 5, 1000) && !key.covers(&ns, &this, 6, 1000));
        assert!(!key.covers(&ns, &other, 5, 1000));
        assert!(old.covers(&ns, &other, 7, 99) && !old.covers(&ns, &other, 7, 100));
        assert!(!old.covers(&NamespaceId([2; 32]), &other, 7, 99));
    }

    #[test]
    fn any_changed_byte_of_a_page_is_noticed() {
        let store = [9; 16];
        let old = Tombstone {
            namespace: NamespaceId([1; 32]),
            buried: Buried::StoredBefore(100),
            generation: 7,
        };
        let page = encode_page(&store, &[old; TOMBSTONES_PER_PAGE]);
        for at in 0..JOURNAL_PAGE_BYTES {
            let mut bytes = page;
            bytes[at] ^= 0x10;
            assert!(decode_page(&store, &bytes).valid().is_none(), "byte {at}");
        }
    }
}
