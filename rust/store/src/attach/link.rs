//! The way from an attached process to the owner.

use super::protocol::{Answer, Ask};
use super::remote::{Fault, Remote};
use crate::answers::{Health, Lookup, LookupMode};
use crate::machine::HoldId;
use crate::namespace::Namespace;
use crate::operator::{Question, Reply};
use crate::owner::Owner;
use crate::registry;
use crate::stats::Stats;
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tiered_kv_io::Running;
use tiered_kv_types::BlockKey;

/// Time to the next try to reach an owner that is gone: after the first failure, and at most.
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(5);

type Result<T> = std::result::Result<T, Fault>;

/// A core of this process, or a connection to another's.
#[derive(Debug, Default)]
enum Way {
    #[default]
    None,
    Local(Weak<Owner>, HashSet<HoldId>),
    Remote(Remote),
}

/// The way to the owner, as long as there is one.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Counts the connections.
    pub(super) number: u64,
    way: Way,
    pub(super) store_id: String,
    /// When to try again, and how long to wait after that.
    retry: Option<(Instant, Duration)>,
}

impl Link {
    pub(super) fn is(&self, number: u64) -> bool {
        self.number == number && !matches!(self.way, Way::None)
    }

    pub(super) fn is_alive(&self) -> bool {
        match &self.way {
            Way::None => false,
            Way::Local(owner, _) => owner.upgrade().is_some_and(|owner| !owner.core.is_closed()),
            Way::Remote(remote) => remote.is_alive(),
        }
    }

    /// Makes sure that there is a way, unless that has failed just now. Whether it is a new one.
    pub(super) fn reach(&mut self, dir: &Path, until: Instant) -> Result<bool> {
        if self.is_alive() {
            return Ok(false);
        }
        self.part();
        let now = Instant::now();
        let absent = || Fault::Absent(io::ErrorKind::NotConnected.into());
        if self.retry.is_some_and(|(at, _)| now < at) {
            return Err(absent());
        }
        match self.connect(dir, until) {
            Ok(()) => {
                self.number += 1;
                self.retry = None;
                Ok(true)
            }
            Err(fault) => {
                let pause = self.retry.map_or(FIRST_RETRY, |(_, pause)| LAST_RETRY.min(2 * pause));
                self.retry = Some((Instant::now() + pause, pause));
                Err(fault)
            }
        }
    }

    fn connect(&mut self, dir: &Path, until: Instant) -> Result<()> {
        if !Running::in_parent() {
            // The registry's lock is in use meanwhile.
            let _running = Running::begin();
            if let Some(owner) = registry::open_on(dir) {
                self.store_id = owner.store_id();
                self.way = Way::Local(Arc::downgrade(&owner), HashSet::new());
                return Ok(());
            }
        }
        let (remote, store_id) = Remote::connect(dir, until)?;
        self.store_id = store_id;
        self.way = Way::Remote(remote);
        Ok(())
    }

    /// Ends the connection, and with it its holds.
    pub(super) fn part(&mut self) {
        if let Way::Local(owner, holds) = std::mem::take(&mut self.way)
            && let Some(owner) = owner.upgrade()
        {
            owner.release_for(holds);
        }
    }

    /// The owner in this process, or the connection to ask.
    fn way(&mut self) -> Result<Here<'_>> {
        match &mut self.way {
            Way::None => Err(Fault::Broken),
            Way::Local(owner, holds) => match owner.upgrade() {
                Some(owner) if !owner.core.is_closed() => Ok(Here::Local(owner, holds)),
                _ => Err(Fault::Broken),
            },
            Way::Remote(remote) => Ok(Here::Remote(remote)),
        }
    }

    pub(super) fn lookup(
        &mut self,
        ns: &Namespace,
        keys: &[BlockKey],
        mode: LookupMode,
        until: Instant,
    ) -> Result<Lookup> {
        let remote = match self.way()? {
            Here::Local(owner, _) => return Ok(owner.lookup_for(&ns.id, keys, mode)),
            Here::Remote(remote) => remote,
        };
        let (packed, prefix) = (BlockKey::pack(keys), mode == LookupMode::Prefix);
        match remote.ask(Ask::Lookup { ns: ns.id.0, prefix, keys: &packed }, until)? {
            Answer::Lookup(found) => found.lookup(keys.len()).ok_or(Fault::Broken),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn present(
        &mut self,
        ns: &Namespace,
        keys: &[BlockKey],
        until: Instant,
    ) -> Result<Vec<bool>> {
        let remote = match self.way()? {
            Here::Local(owner, _) => return Ok(owner.present_for(&ns.id, keys)),
            Here::Remote(remote) => remote,
        };
        match remote.ask(Ask::Present { ns: ns.id.0, keys: &BlockKey::pack(keys) }, until)? {
            Answer::Present(there) if there.len() == keys.len() => Ok(there),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn hold(
        &mut self,
        ns: &Namespace,
        keys: &[BlockKey],
        ttl: Duration,
        until: Instant,
    ) -> Result<(Option<HoldId>, Vec<bool>)> {
        let remote = match self.way()? {
            Here::Local(owner, holds) => {
                let (hold, held) = owner.hold_for(&ns.id, keys.to_vec(), ttl);
                holds.extend(hold);
                return Ok((hold, held));
            }
            Here::Remote(remote) => remote,
        };
        let ttl_ns = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        let ask = Ask::Hold { ns: ns.id.0, ttl_ns, keys: &BlockKey::pack(keys) };
        match remote.ask(ask, until)? {
            Answer::Held { hold, held } if held.len() == keys.len() => Ok((hold.map(HoldId), held)),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn release(&mut self, ids: &[HoldId], until: Instant) -> Result<()> {
        let remote = match self.way()? {
            Here::Local(owner, holds) => {
                owner.release_for(ids.iter().copied().filter(|id| holds.remove(id)));
                return Ok(());
            }
            Here::Remote(remote) => remote,
        };
        let holds = ids.iter().map(|id| id.0).collect();
        match remote.ask(Ask::Release { holds }, until)? {
            Answer::Released => Ok(()),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn stats(&mut self, until: Instant) -> Result<Stats> {
        let remote = match self.way()? {
            Here::Local(owner, _) => return Ok(owner.stats()),
            Here::Remote(remote) => remote,
        };
        match remote.ask(Ask::Stats, until)? {
            Answer::Stats(stats) => Ok(*stats),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn operate(&mut self, question: &Question, until: Instant) -> Result<Reply> {
        let remote = match self.way()? {
            Here::Local(owner, _) => return owner.answer(question).ok_or(Fault::Broken),
            Here::Remote(remote) => remote,
        };
        match remote.ask(Ask::Operate(question.clone()), until)? {
            Answer::Operate(reply) => Ok(*reply),
            _ => Err(Fault::Broken),
        }
    }

    pub(super) fn health(&mut self, until: Instant) -> Result<Health> {
        let remote = match self.way()? {
            Here::Local(owner, _) => return Ok(owner.health()),
            Here::Remote(remote) => remote,
        };
        match remote.ask(Ask::Health, until)? {
            Answer::Health(health) => Ok(*health),
            _ => Err(Fault::Broken),
        }
    }
}

/// A link's way, ready for use.
enum Here<'a> {
    Local(Arc<Owner>, &'a mut HashSet<HoldId>),
    Remote(&'a mut Remote),
}
