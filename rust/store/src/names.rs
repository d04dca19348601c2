//! What the namespaces of a store stand for: a small file beside the segments, since records hold
//! digests only.
//!
//! For people, never needed for correctness: what is damaged, too long or missing is not known.

use crate::seams::Seams;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tiered_kv_io::{Disk, Threads};
use tiered_kv_types::{NamespaceId, NamespaceSpec, hex};

/// The file's name.
pub(crate) const NAMES: &str = "namespaces.json";
/// Bytes of the file: a 4096th of the capacity within these bounds.
const MIN_BYTES: u64 = 16 << 10;
const MAX_BYTES: u64 = 256 << 10;
/// A specification of more bytes is not kept.
const MAX_ENTRY_BYTES: usize = 8 << 10;
const VERSION: u32 = 1;

/// The fields of a specification by name.
pub(crate) type Fields = BTreeMap<String, String>;

/// Most bytes of the file on a drive of `capacity` bytes.
pub(crate) fn file_bytes(capacity: u64) -> u64 {
    (capacity / 4096).clamp(MIN_BYTES, MAX_BYTES)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    id: String,
    fields: Fields,
}

/// The file as it is written.
#[derive(Debug, Default, Serialize, Deserialize)]
struct NamesFile {
    version: u32,
    /// Identities of the drives of the store, in their order.
    drives: Vec<String>,
    /// The namespace that was opened first comes first.
    namespaces: Vec<Entry>,
}

fn read(disk: &dyn Disk) -> Option<NamesFile> {
    let bytes = match disk.read_file(NAMES, MAX_BYTES) {
        Ok(bytes) => bytes?,
        Err(err) => {
            tracing::warn!(%err, "the names of namespaces cannot be read");
            return None;
        }
    };
    let file: NamesFile = serde_json::from_slice(&bytes).ok()?;
    (file.version == VERSION).then_some(file)
}

fn id_of(text: &str) -> Option<NamespaceId> {
    let mut id = [0; 32];
    if !text.is_ascii() || text.len() != 64 {
        return None;
    }
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(NamespaceId(id))
}

#[derive(Default)]
struct State {
    /// In the order in which they were first opened.
    known: Vec<(NamespaceId, Arc<Fields>)>,
    changed: bool,
    writing: bool,
}

struct Inner {
    /// Where the file is written; nowhere where the store has no directory.
    disks: Vec<Arc<dyn Disk>>,
    drives: Vec<String>,
    max_bytes: u64,
    /// Guards the names; not held while they are written.
    state: Mutex<State>,
    idle: Condvar,
}

/// The names that a store knows.
pub(crate) struct Names {
    inner: Arc<Inner>,
    threads: Arc<dyn Threads>,
}

impl Names {
    /// The names that the drives have kept; they are written to `disks` when another comes.
    pub(crate) fn load(
        disks: Vec<Arc<dyn Disk>>,
        drives: Vec<String>,
        capacity: u64,
        seams: &Seams,
    ) -> Self {
        let mut known: Vec<(NamespaceId, Arc<Fields>)> = Vec::new();
        for file in disks.iter().filter_map(|disk| read(disk.as_ref())) {
            for Entry { id, fields } in file.namespaces {
                if let Some(id) = id_of(&id)
                    && known.iter().all(|(old, _)| *old != id)
                {
                    known.push((id, Arc::new(fields)));
                }
            }
        }
        let state = Mutex::new(State { known, ..State::default() });
        let max_bytes = file_bytes(capacity);
        let idle = Condvar::new();
        let inner = Arc::new(Inner { disks, drives, max_bytes, state, idle });
        Self { inner, threads: seams.threads.clone() }
    }

    /// The identities of a store's drives, as one of them remembers them.
    pub(crate) fn drives_of(disk: &dyn Disk) -> Vec<String> {
        read(disk).map(|file| file.drives).unwrap_or_default()
    }

    pub(crate) fn get(&self, id: &NamespaceId) -> Option<Arc<Fields>> {
        let state = self.inner.state.lock();
        state.known.iter().find(|(known, _)| known == id).map(|(_, fields)| fields.clone())
    }

    pub(crate) fn all(&self) -> Vec<(NamespaceId, Arc<Fields>)> {
        self.inner.state.lock().known.clone()
    }

    /// Keeps what a namespace stands for. It is written by a thread of its own: opening a namespace
    /// waits for no device.
    pub(crate) fn opened(&self, id: NamespaceId, spec: &NamespaceSpec) {
        let mut state = self.inner.state.lock();
        if state.known.iter().any(|(known, _)| *known == id) {
            return;
        }
        let fields = spec.fields();
        let bytes: usize = fields.iter().map(|(k, v)| k.len() + v.len() + 8).sum();
        if bytes > MAX_ENTRY_BYTES {
            return;
        }
        state.known.push((id, Arc::new(fields)));
        // No more than the file could hold: the oldest names go.
        let most = usize::try_from(self.inner.max_bytes / 128).expect("at most 256 KiB");
        let beyond = state.known.len().saturating_sub(most);
        state.known.drain(..beyond);
        if self.inner.disks.is_empty() {
            return;
        }
        state.changed = true;
        if std::mem::replace(&mut state.writing, true) {
            return;
        }
        drop(state);
        let inner = self.inner.clone();
        let write = Box::new(move || inner.write());
        if let Err(err) = self.threads.spawn("tkv-names".into(), write) {
            tracing::warn!(%err, "the names of namespaces are not kept");
            self.inner.state.lock().writing = false;
        }
    }

    /// Waits until what is known is written, or could not be.
    pub(crate) fn finish(&self) {
        let mut state = self.inner.state.lock();
        while state.writing {
            self.inner.idle.wait(&mut state);
        }
    }
}

impl Inner {
    fn write(&self) {
        let mut state = self.state.lock();
        while std::mem::take(&mut state.changed) {
            let known = state.known.clone();
            drop(state);
            let bytes = self.encode(&known);
            for disk in &self.disks {
                if let Err(err) = disk.write_file(NAMES, &bytes) {
                    tracing::warn!(%err, "the names of namespaces are not kept");
                }
            }
            state = self.state.lock();
        }
        state.writing = false;
        self.idle.notify_all();
    }

    /// The newest names that fit.
    fn encode(&self, known: &[(NamespaceId, Arc<Fields>)]) -> Vec<u8> {
        let drives = self.drives.clone();
        let mut file = NamesFile { version: VERSION, drives, namespaces: Vec::new() };
        let text = |file: &NamesFile| serde_json::to_vec(file).expect("text can be written");
        let mut left = self.max_bytes.saturating_sub(text(&file).len() as u64);
        for (id, fields) in known.iter().rev() {
            let entry = Entry { id: hex(&id.0), fields: fields.as_ref().clone() };
            let bytes = serde_json::to_vec(&entry).expect("text can be written").len() as u64 + 1;
            if bytes > left {
                break;
            }
            left -= bytes;
            file.namespaces.push(entry);
        }
        file.namespaces.reverse();
        text(&file)
    }
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Names").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod names_tests {
    use super::*;
    use tiered_kv_io::MemDisk;
    use tiered_kv_types::KvLayout;

    fn spec(model: &str) -> NamespaceSpec {
        let layout = KvLayout::uniform(4, 4096).expect("valid");
        NamespaceSpec { salt: "secret".into(), ..NamespaceSpec::new(model, "w", "f", layout) }
    }

    fn names(disk: &Arc<MemDisk>) -> Names {
        let disks = vec![disk.clone() as Arc<dyn Disk>];
        Names::load(disks, vec!["one".into(), "two".into()], 0, &Seams::default())
    }

    #[test]
    fn names_are_kept_without_the_salt_and_the_oldest_go_first() {
        let disk = Arc::new(MemDisk::new());
        let known = names(&disk);
        let long = "x".repeat(3000);
        for n in 0..20 {
            let spec = spec(&format!("{n}{long}"));
            known.opened(spec.id().expect("valid"), &spec);
        }
        let huge = NamespaceSpec { lora: "y".repeat(4096), ..spec(&"z".repeat(4096)) };
        known.opened(huge.id().expect("valid"), &huge);
        known.finish();
        let bytes = disk.read_file(NAMES, MAX_BYTES).expect("reads").expect("written");
        assert!(bytes.len() as u64 <= MIN_BYTES, "{}", bytes.len());
        assert!(!String::from_utf8(bytes).expect("text").contains("secret"));
        assert_eq!(Names::drives_of(disk.as_ref()), ["one", "two"]);
        let again = names(&disk);
        let of = |n: usize| again.get(&spec(&format!("{n}{long}")).id().expect("valid"));
        assert!(of(0).is_none() && of(19).is_some() && again.get(&huge.id().unwrap()).is_none());
        assert_eq!(of(19).expect("kept")["layout.tokens_per_block"], "4");
    }

    #[test]
    fn a_file_that_is_damaged_or_too_long_names_nothing() {
        let long = vec![b' '; MAX_BYTES as usize + 1];
        for bytes in [&b"{"[..], b"[]", b"{\"version\":2,\"drives\":[],\"namespaces\":[]}", &long] {
            let disk = Arc::new(MemDisk::new());
            disk.write_file(NAMES, bytes).expect("writes");
            assert!(names(&disk).all().is_empty());
        }
        let disk = Arc::new(MemDisk::new());
        let odd = br#"{"version":1,"drives":[],"namespaces":[{"id":"zz","fields":{}}]}"#;
        disk.write_file(NAMES, odd).expect("writes");
        assert!(names(&disk).all().is_empty());
    }
}
