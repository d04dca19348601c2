//! What an owner answers to operators. Each answer is one short step under the machine's lock.

use crate::call::{Call, Reply as CallReply};
use crate::machine::{
    BlockFilter, BlockRow, DeleteReport, Doomed, Event, Explanation, MAX_EXPLAINED, Machine,
    NamespaceRow, Outcome, PAGE_NAMESPACES, Page, SurveyRow,
};
use crate::names::Names;
use crate::owner::Owner;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tiered_kv_types::{BlockKey, NamespaceId};

/// Deletes of operators that are in progress, or whose report nobody has fetched.
const MAX_JOBS: usize = 64;
/// Keys that one delete names at most.
const MAX_DOOMED: usize = 4096;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Question {
    Namespaces { from: u32 },
    Survey { from: u32 },
    Blocks { from: u32, filter: BlockFilter },
    Inspect { namespace: Option<[u8; 32]>, key: [u8; 32] },
    Explain { namespace: [u8; 32], keys: Vec<[u8; 32]> },
    Delete { namespace: [u8; 32], doom: Doom, timeout_ns: u64 },
    Deleted { job: u64 },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Doom {
    Keys(Vec<[u8; 32]>),
    StoredBefore(u64),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Namespaces(Page<NamespaceRow>),
    Survey(Page<SurveyRow>),
    Blocks(Page<BlockRow>),
    Inspect(Vec<BlockRow>),
    Explain(Explanation),
    /// The delete's number; `None` where the store has never met the namespace.
    Deleting(Option<u64>),
    /// `None` while it is in progress.
    Deleted(Option<DeleteReport>),
    TooMany,
}

/// Deletes that operators began.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    /// Guards the reports by number.
    state: Mutex<JobState>,
}

#[derive(Debug, Default)]
struct JobState {
    next: u64,
    jobs: BTreeMap<u64, Option<DeleteReport>>,
}

impl Jobs {
    fn begin(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if state.jobs.len() >= MAX_JOBS {
            // Those who asked for these are gone.
            state.jobs.retain(|_, report| report.is_none());
        }
        if state.jobs.len() >= MAX_JOBS {
            return None;
        }
        state.next += 1;
        let job = state.next;
        state.jobs.insert(job, None);
        Some(job)
    }

    fn end(&self, job: u64, report: DeleteReport) {
        if let Some(entry) = self.state.lock().jobs.get_mut(&job) {
            *entry = Some(report);
        }
    }

    /// The report of a delete that has ended; one that is not known has not been durable.
    fn take(&self, job: u64) -> Option<DeleteReport> {
        let mut state = self.state.lock();
        match state.jobs.get(&job).copied() {
            Some(None) => None,
            Some(Some(report)) => {
                state.jobs.remove(&job);
                Some(report)
            }
            None => Some(DeleteReport::default()),
        }
    }
}

fn keys_of(keys: &[[u8; 32]]) -> Vec<BlockKey> {
    keys.iter().map(|key| BlockKey(*key)).collect()
}

/// Answers what only reads; `None` where the question is beyond its bounds, or changes something.
pub(super) fn read<R>(
    with: impl FnOnce(&mut dyn FnMut(&mut Machine)) -> R,
    names: &Names,
    question: &Question,
) -> Option<Reply> {
    let mut reply = None;
    with(&mut |machine| reply = look(machine, question));
    if let Some(Reply::Namespaces(page)) = &mut reply {
        for row in &mut page.rows {
            let fields = names.get(&NamespaceId(row.namespace));
            row.fields = fields.map(|fields| fields.as_ref().clone());
        }
    }
    reply
}

fn look(machine: &mut Machine, question: &Question) -> Option<Reply> {
    Some(match question {
        Question::Namespaces { from } => Reply::Namespaces(machine.namespaces_page(*from)),
        Question::Survey { from } => Reply::Survey(machine.survey_page(*from)),
        Question::Blocks { from, filter } => Reply::Blocks(machine.blocks_page(*from, filter)),
        Question::Inspect { namespace, key } => {
            Reply::Inspect(machine.inspect(namespace.map(NamespaceId), BlockKey(*key)))
        }
        Question::Explain { namespace, keys } if keys.len() <= MAX_EXPLAINED => {
            Reply::Explain(machine.explain(&NamespaceId(*namespace), &keys_of(keys)))
        }
        _ => return None,
    })
}

/// Names of namespaces that the store has never met since its open: they have no blocks, and are
/// told behind all others.
pub(super) fn append_unmet(
    page: &mut Page<NamespaceRow>,
    from: u32,
    met: u32,
    unmet: Vec<NamespaceRow>,
) {
    if page.next.is_some() || unmet.is_empty() {
        return;
    }
    if from < met {
        page.next = Some(met);
        return;
    }
    let at = (from - met) as usize;
    let end = (at + PAGE_NAMESPACES).min(unmet.len());
    page.rows = unmet.get(at..end).unwrap_or_default().to_vec();
    page.next = (end < unmet.len()).then(|| met + u32::try_from(end).expect("few names"));
}

/// The known names that `met` does not know.
pub(super) fn unmet(names: &Names, met: impl Fn(&NamespaceId) -> bool) -> Vec<NamespaceRow> {
    let row = |(id, fields): (NamespaceId, Arc<crate::names::Fields>)| NamespaceRow {
        namespace: id.0,
        fields: Some(fields.as_ref().clone()),
        ..NamespaceRow::default()
    };
    names.all().into_iter().filter(|(id, _)| !met(id)).map(row).collect()
}

impl Owner {
    /// Answers an operator; `None` where the question is beyond its bounds.
    pub(crate) fn answer(&self, question: &Question) -> Option<Reply> {
        match question {
            Question::Delete { namespace, doom, timeout_ns } => {
                self.begin_delete(&NamespaceId(*namespace), doom, *timeout_ns)
            }
            Question::Deleted { job } => Some(Reply::Deleted(self.jobs.take(*job))),
            other => {
                let with = |look: &mut dyn FnMut(&mut Machine)| self.core.with_machine(|m| look(m));
                let mut reply = read(with, &self.names, other)?;
                if let (Reply::Namespaces(page), Question::Namespaces { from }) =
                    (&mut reply, other)
                {
                    let (met, rest) = self.core.with_machine(|m| {
                        let known = |id: &NamespaceId| m.known_namespace(id).is_some();
                        (m.namespaces(), unmet(&self.names, known))
                    });
                    append_unmet(page, *from, met, rest);
                }
                Some(reply)
            }
        }
    }

    fn begin_delete(&self, namespace: &NamespaceId, doom: &Doom, timeout_ns: u64) -> Option<Reply> {
        let doomed = match doom {
            Doom::Keys(keys) if keys.len() > MAX_DOOMED => return None,
            Doom::Keys(keys) => Doomed::Keys(keys_of(keys)),
            Doom::StoredBefore(unix_ns) => Doomed::StoredBefore(*unix_ns),
        };
        let known = self.core.with_machine(|m| m.known_namespace(namespace));
        let Some(ns) = known else { return Some(Reply::Deleting(None)) };
        let Some(job) = self.jobs.begin() else { return Some(Reply::TooMany) };
        let jobs = self.jobs.clone();
        let reply: CallReply = Box::new(move |outcome, _| {
            let Outcome::Deleted(report) = outcome else { unreachable!("a delete ends as one") };
            jobs.end(job, report);
        });
        let deadline = self.core.clock.now().saturating_add(timeout_ns);
        let event = |op| Event::Delete { op, ns, doomed, deadline };
        self.core.submit(Call::plain(reply), event);
        Some(Reply::Deleting(Some(job)))
    }
}
