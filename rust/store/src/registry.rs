//! The stores that this process has open, by the identity of their directories.
//!
//! A second open of the same directories, however they are spelled, gets the same core. What is
//! being opened or closed is waited for.

use crate::owner::Owner;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiered_kv_types::{Error, ErrorKind, Result, StoreConfig};

/// Fields that are each handle's own, or that mean nothing to a store that is open.
const OWN_FIELDS: [&str; 6] = [
    "nvme_paths",
    "load_timeout_s",
    "put_timeout_s",
    "reservation_ttl_s",
    "close_timeout_s",
    "on_format_mismatch",
];

/// A directory: the file that it is where it exists, else its path.
#[derive(Clone, Debug)]
struct Dir {
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

impl Dir {
    fn of(path: &Path) -> Self {
        let inode = fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
        let whole = fs::canonicalize(path).ok();
        // One that is yet to be made has a parent at least.
        let made = || {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let parent = fs::canonicalize(parent.unwrap_or(Path::new("."))).ok()?;
            Some(parent.join(path.file_name()?))
        };
        Self { path: whole.or_else(made).unwrap_or_else(|| path.to_path_buf()), inode }
    }

    fn is(&self, other: &Self) -> bool {
        match (self.inode, other.inode) {
            (Some(one), Some(other)) => one == other,
            _ => self.path == other.path,
        }
    }
}

enum State {
    Opening,
    Open { owner: Arc<Owner>, handles: usize },
    Closing,
}

struct Entry {
    number: u64,
    dirs: Vec<Dir>,
    state: State,
}

impl Entry {
    fn has(&self, dir: &Dir) -> bool {
        self.dirs.iter().any(|own| own.is(dir))
    }

    /// The same directories, in any order.
    fn has_just(&self, dirs: &[Dir]) -> bool {
        self.dirs.len() == dirs.len() && dirs.iter().all(|dir| self.has(dir))
    }
}

struct Registry {
    entries: Vec<Entry>,
    next: u64,
}

/// Guards the entries; never held while anything is opened, closed or waited for.
static REGISTRY: Mutex<Registry> = Mutex::new(Registry { entries: Vec::new(), next: 1 });
/// Told when an entry has changed.
static CHANGED: Condvar = Condvar::new();

/// What a claim on directories has given.
pub(crate) enum Claimed {
    /// Nobody has them: they are the caller's to open.
    New(Claim),
    /// One more handle on what is open.
    Shared(Arc<Owner>),
}

/// The right to open directories; dropping it without having opened them gives it back.
pub(crate) struct Claim {
    number: u64,
    opened: bool,
}

impl Claim {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The directories are open, with one handle.
    pub(crate) fn opened(mut self, owner: &Arc<Owner>) {
        self.opened = true;
        let dirs = owner.config.nvme_paths.iter().map(|path| Dir::of(path)).collect();
        change(self.number, |entry| {
            entry.dirs = dirs;
            entry.state = State::Open { owner: owner.clone(), handles: 1 };
        });
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.opened {
            remove(self.number);
        }
    }
}

/// A close in progress; the directories are free when it is dropped.
pub(crate) struct Leaving {
    number: u64,
}

impl Leaving {
    pub(crate) fn new(number: u64) -> Self {
        Self { number }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        remove(self.number);
    }
}

fn change<R>(number: u64, how: impl FnOnce(&mut Entry) -> R) -> R {
    let mut registry = REGISTRY.lock();
    let entry = registry.entries.iter_mut().find(|entry| entry.number == number);
    let result = how(entry.expect("an entry lives until its owner has closed"));
    drop(registry);
    CHANGED.notify_all();
    result
}

fn remove(number: u64) {
    REGISTRY.lock().entries.retain(|entry| entry.number != number);
    CHANGED.notify_all();
}

/// Claims the configuration's directories, or one more handle on the store that has them open.
/// Waits for one that is being opened or closed, for at most `close_timeout_s`.
///
/// # Errors
/// `Config` where the configuration contradicts the open one; `InUse` where the wait was in vain.
pub(crate) fn claim(config: &StoreConfig) -> Result<Claimed> {
    let until = Instant::now() + Duration::from_secs_f64(config.close_timeout_s);
    let dirs: Vec<Dir> = config.nvme_paths.iter().map(|path| Dir::of(path)).collect();
    let mut registry = REGISTRY.lock();
    loop {
        let found = registry.entries.iter_mut().find(|e| dirs.iter().any(|dir| e.has(dir)));
        match found {
            None => {
                let number = registry.next;
                registry.next += 1;
                let state = State::Opening;
                registry.entries.push(Entry { number, dirs, state });
                return Ok(Claimed::New(Claim { number, opened: false }));
            }
            Some(entry) => {
                let same = entry.has_just(&dirs);
                if let State::Open { owner, handles } = &mut entry.state {
                    agree(owner, config, same)?;
                    *handles += 1;
                    return Ok(Claimed::Shared(owner.clone()));
                }
            }
        }
        wait(&mut registry, until, config)?;
    }
}

fn wait(
    registry: &mut MutexGuard<'_, Registry>,
    until: Instant,
    config: &StoreConfig,
) -> Result<()> {
    if !CHANGED.wait_until(registry, until).timed_out() {
        return Ok(());
    }
    let context = format!(
        "nvme_paths: {} is being opened or closed by this process, and has been for {} s: try \
         again, or give a longer `close_timeout_s`",
        shown(config),
        config.close_timeout_s
    );
    Err(Error::new(ErrorKind::InUse, "open", context))
}

fn shown(config: &StoreConfig) -> String {
    let paths: Vec<_> = config.nvme_paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

/// Refuses a configuration that contradicts the open one. What it leaves to the default or to
/// `auto` contradicts nothing.
fn agree(owner: &Owner, asked: &StoreConfig, same_dirs: bool) -> Result<()> {
    let refused = |field: &str, asked_for: String, open: String| {
        let context = format!(
            "`{field}` is {asked_for}, but {open} in the store that this process has open on {}: \
             open it with the same value, or close that store first",
            shown(&owner.config)
        );
        Err(Error::new(ErrorKind::Config, "open", context))
    };
    if !same_dirs {
        return refused("nvme_paths", shown(asked), shown(&owner.config));
    }
    let mut open = owner.config.clone();
    open.dram_capacity = Some(owner.dram_bytes());
    open.segment_bytes = owner.drives.first().map(|drive| drive.geometry.segment_bytes);
    let backend = owner.core.io.first().map_or("none", |io| io.backend());
    // Compared above; and their text need not be UTF-8.
    open.nvme_paths.clear();
    let table = StoreConfig { nvme_paths: Vec::new(), ..asked.clone() }.to_table()?;
    let open = open.to_table()?;
    for (field, value) in table.iter().filter(|(field, _)| !OWN_FIELDS.contains(&field.as_str())) {
        let given = open.get(field);
        let text = |value: &dyn std::fmt::Display| value.to_string();
        if given == Some(value) || value.as_str() == Some("auto") {
            continue;
        }
        if field == "io_backend" && given.and_then(|g| g.as_str()) == Some("auto") {
            if value.as_str() == Some(backend) {
                continue;
            }
            return refused(field, text(value), format!("\"{backend}\""));
        }
        let open = given.map_or_else(|| "absent".to_owned(), |given| given.to_string());
        return refused(field, text(value), open);
    }
    Ok(())
}

/// Takes a handle off the store of this number. True for the last one, whose close is then waited
/// for by the next open.
pub(crate) fn leave(number: u64) -> bool {
    change(number, |entry| {
        let State::Open { handles, .. } = &mut entry.state else {
            unreachable!("a handle closes once, before the store does");
        };
        *handles -= 1;
        let last = *handles == 0;
        if last {
            entry.state = State::Closing;
        }
        last
    })
}

/// The store that this process has open on a directory.
pub(crate) fn open_on(path: &Path) -> Option<Arc<Owner>> {
    let dir = Dir::of(path);
    let registry = REGISTRY.lock();
    registry.entries.iter().filter(|entry| entry.has(&dir)).find_map(|entry| match &entry.state {
        State::Open { owner, .. } => Some(owner.clone()),
        State::Opening | State::Closing => None,
    })
}
