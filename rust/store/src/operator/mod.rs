//! What operators do with a store: list, inspect, explain, clear, verify, resize. On a live store
//! the owner answers, in this process or over its socket; a closed directory is read here.

mod answers;
mod closed;
mod resize;
mod verify;

pub(crate) use answers::{Doom, Jobs, Question, Reply};
pub use closed::{CheckpointState, ClosedDrive, ClosedStore};
pub use resize::{Resized, resize};
pub use verify::{BadSlab, Verified, Verify};

use crate::attach::{AttachOptions, Attached};
use crate::machine::{
    BlockFilter, BlockRow, DeleteReport, Explanation, MAX_EXPLAINED, NamespaceRow, Page, SurveyRow,
};
use crate::owner::Owner;
use crate::store::Store;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tiered_kv_types::{BlockKey, Error, ErrorKind, NamespaceId, Result};

/// How often a delete that another process carries out is asked after.
const POLL: Duration = Duration::from_millis(5);
/// Keys of one delete.
const MAX_DELETED: usize = 1024;

/// A store as operators see it.
#[derive(Debug)]
pub struct Operator {
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// A store of this process, which others keep open.
    Owner(Weak<Owner>),
    Attached(Box<Attached>),
    /// A closed store that is only read.
    Closed(Arc<ClosedStore>),
    /// A closed store, opened to be changed.
    Opened(Arc<Store>),
}

impl Store {
    /// The store as operators see it.
    pub fn operator(&self) -> Operator {
        Operator { way: Way::Owner(Arc::downgrade(&self.owner)) }
    }
}

impl Operator {
    /// Attaches to the store that another process has open on a directory, the first of its
    /// `nvme_paths`.
    ///
    /// # Errors
    /// As [`Store::attach`].
    pub fn attach(dir: &Path, options: AttachOptions) -> Result<Self> {
        Ok(Self { way: Way::Attached(Box::new(Attached::open(dir, options)?)) })
    }

    /// Reads a closed store; `dirs` are all its directories. Nothing is written, and no owner can
    /// open it meanwhile.
    ///
    /// # Errors
    /// `NotFound`, `FormatMismatch` where a directory is no store of this version, `InUse` where it
    /// is open; the operating system's.
    pub fn read(dirs: &[PathBuf]) -> Result<Self> {
        Ok(Self { way: Way::Closed(Arc::new(ClosedStore::open(dirs)?)) })
    }

    /// Opens a closed store to delete from it; `dirs` are all its directories.
    ///
    /// # Errors
    /// As [`Operator::read`]; `InvalidArgument` where one of its directories is not named.
    pub fn open(dirs: &[PathBuf]) -> Result<Self> {
        let config = closed::config_of(dirs)?;
        Ok(Self { way: Way::Opened(Store::open(&config)?) })
    }

    /// The closed store, where it is one that is only read.
    pub fn closed(&self) -> Option<&ClosedStore> {
        match &self.way {
            Way::Closed(closed) => Some(closed),
            _ => None,
        }
    }

    /// Ends the work; a store that was opened for it is closed again.
    pub fn close(&self) {
        match &self.way {
            Way::Opened(store) => drop(store.close()),
            Way::Attached(attached) => attached.close(),
            Way::Closed(closed) => closed.close(),
            Way::Owner(_) => {}
        }
    }

    fn ask(&self, question: &Question) -> Result<Reply> {
        let beyond = || Error::new(ErrorKind::Internal, "operator", "a question beyond its bounds");
        match &self.way {
            Way::Owner(owner) => {
                let open = owner.upgrade().filter(|owner| !owner.core.is_closed());
                let owner = open.ok_or_else(|| {
                    Error::new(ErrorKind::Closed, "operator", "the store is closed: open it again")
                })?;
                owner.answer(question).ok_or_else(beyond)
            }
            Way::Opened(store) => store.owner.answer(question).ok_or_else(beyond),
            Way::Attached(attached) => attached.operate(question),
            Way::Closed(closed) => closed.answer(question).ok_or_else(|| {
                let context = "the store was opened to be read only: open it to be changed";
                Error::new(ErrorKind::Unsupported, "operator", context)
            }),
        }
    }

    /// Namespaces from number `from` on; the first page begins at 0.
    ///
    /// # Errors
    /// `Closed`; for an attached store, as [`Store::attach`]. So do all questions.
    pub fn namespaces(&self, from: u32) -> Result<Page<NamespaceRow>> {
        match self.ask(&Question::Namespaces { from })? {
            Reply::Namespaces(page) => Ok(page),
            other => Err(odd(&other)),
        }
    }

    /// What a page of blocks says of their namespaces; pages add up.
    ///
    /// # Errors
    /// As [`Operator::namespaces`].
    pub fn survey(&self, from: u32) -> Result<Page<SurveyRow>> {
        match self.ask(&Question::Survey { from })? {
            Reply::Survey(page) => Ok(page),
            other => Err(odd(&other)),
        }
    }

    /// Blocks from number `from` on. Blocks that come or go meanwhile may be on no page, or on two;
    /// a page may be empty and not be the last.
    ///
    /// # Errors
    /// As [`Operator::namespaces`].
    pub fn blocks(&self, from: u32, filter: BlockFilter) -> Result<Page<BlockRow>> {
        match self.ask(&Question::Blocks { from, filter })? {
            Reply::Blocks(page) => Ok(page),
            other => Err(odd(&other)),
        }
    }

    /// One key, in one namespace or in all.
    ///
    /// # Errors
    /// As [`Operator::namespaces`].
    pub fn inspect(&self, namespace: Option<NamespaceId>, key: BlockKey) -> Result<Vec<BlockRow>> {
        let namespace = namespace.map(|id| id.0);
        match self.ask(&Question::Inspect { namespace, key: key.0 })? {
            Reply::Inspect(rows) => Ok(rows),
            other => Err(odd(&other)),
        }
    }

    /// Why keys of a namespace are where they are, or are nowhere.
    ///
    /// # Errors
    /// As [`Operator::namespaces`].
    pub fn explain(&self, namespace: NamespaceId, keys: &[BlockKey]) -> Result<Explanation> {
        let mut all: Option<Explanation> = None;
        // At least one question, so that it is known how far back the events go.
        for from in (0..keys.len().max(1)).step_by(MAX_EXPLAINED) {
            let part = &keys[from..keys.len().min(from + MAX_EXPLAINED)];
            let keys = part.iter().map(|key| key.0).collect();
            match self.ask(&Question::Explain { namespace: namespace.0, keys })? {
                Reply::Explain(more) => match &mut all {
                    Some(all) => all.keys.extend(more.keys),
                    None => all = Some(more),
                },
                other => return Err(odd(&other)),
            }
        }
        Ok(all.expect("asked at least once"))
    }

    /// Deletes keys of a namespace, durably, in batches.
    ///
    /// # Errors
    /// As [`Operator::namespaces`]; `Unsupported` for a store that is only read.
    pub fn delete_keys(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
        timeout: Duration,
    ) -> Result<DeleteReport> {
        let mut total = DeleteReport { removed: 0, durable: true };
        for keys in keys.chunks(MAX_DELETED) {
            let doom = Doom::Keys(keys.iter().map(|key| key.0).collect());
            let report = self.delete(namespace, doom, timeout)?;
            total.removed += report.removed;
            total.durable &= report.durable;
        }
        Ok(total)
    }

    /// Deletes what was stored in a namespace before a time, in ns since 1970; `None` for
    /// everything.
    ///
    /// # Errors
    /// As [`Operator::delete_keys`].
    pub fn delete_before(
        &self,
        namespace: NamespaceId,
        unix_ns: Option<u64>,
        timeout: Duration,
    ) -> Result<DeleteReport> {
        self.delete(namespace, Doom::StoredBefore(unix_ns.unwrap_or(u64::MAX)), timeout)
    }

    fn delete(&self, ns: NamespaceId, doom: Doom, timeout: Duration) -> Result<DeleteReport> {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let job = match self.ask(&Question::Delete { namespace: ns.0, doom, timeout_ns })? {
            Reply::Deleting(Some(job)) => job,
            // Nobody has ever stored anything there.
            Reply::Deleting(None) => return Ok(DeleteReport { removed: 0, durable: true }),
            other => return Err(odd(&other)),
        };
        // The delete has a deadline of its own, which its report speaks of.
        let until = Instant::now().checked_add(timeout + Duration::from_secs(5));
        loop {
            match self.ask(&Question::Deleted { job })? {
                Reply::Deleted(Some(report)) => return Ok(report),
                Reply::Deleted(None) => {}
                other => return Err(odd(&other)),
            }
            if until.is_some_and(|until| Instant::now() > until) {
                let context = "the owner does not end the delete: see its health";
                return Err(Error::new(ErrorKind::Io, "operator", context));
            }
            std::thread::sleep(POLL);
        }
    }
}

fn odd(reply: &Reply) -> Error {
    let context = match reply {
        Reply::TooMany => "the owner carries out as many deletes as it takes: try again".to_owned(),
        other => format!("the owner answers another question: {other:?}"),
    };
    let kind = if matches!(reply, Reply::TooMany) { ErrorKind::InUse } else { ErrorKind::Internal };
    Error::new(kind, "operator", context)
}
