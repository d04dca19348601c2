//! Drives that fail or stall: a drive that does not answer is not asked until it does again.
//!
//! A circuit opens after reads that failed in a row, or when reads wait and none was answered for
//! some time. While it is open, what is on the drive misses at once and writing to it pauses. Any
//! read that the drive answers after all closes it, and so does a probe: one page of the journal,
//! read again and again.

use super::get::Waiting;
use super::{BlockId, Command, DriveId, LoadFault, Machine};
use tiered_kv_io::Nanos;
use tiered_kv_types::MissReason;

/// Failed reads in a row that open the circuit.
const FAULTS: u32 = 3;

/// Why a drive is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Reads waited and none was answered for so long.
    Stalled(Nanos),
    /// So many reads in a row failed.
    Failed(u32),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stalled(ns) => write!(f, "no read was answered for {} s", *ns as f64 / 1e9),
            Self::Failed(reads) => write!(f, "{reads} reads in a row failed"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    /// Not asked until then.
    Open(Fault, Nanos),
    /// Not asked but for a probe, which is under way.
    Probing(Fault),
}

/// The circuit of one drive.
#[derive(Debug)]
pub(super) struct Circuit {
    state: State,
    /// Reads under way.
    reads: u32,
    /// When the drive last answered one, or had none to answer.
    answered: Nanos,
    /// Failed reads in a row.
    faults: u32,
    stall: Nanos,
    retry: Nanos,
}

/// What became of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The drive read, whatever its bytes are worth.
    Read,
    Failed,
    /// It was dropped before the drive had it.
    None,
}

impl Circuit {
    pub(super) fn new(stall: Nanos, retry: Nanos) -> Self {
        Self { state: State::Closed, reads: 0, answered: 0, faults: 0, stall, retry }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    pub(super) fn fault(&self) -> Option<Fault> {
        match self.state {
            State::Closed => None,
            State::Open(fault, _) | State::Probing(fault) => Some(fault),
        }
    }

    fn begun(&mut self, now: Nanos) {
        if self.reads == 0 {
            self.answered = now;
        }
        self.reads += 1;
    }

    /// Takes in how a read ended. Says whether that opened or closed the circuit.
    fn ended(&mut self, now: Nanos, answer: Answer) -> bool {
        self.reads -= 1;
        self.judge(now, answer)
    }

    fn judge(&mut self, now: Nanos, answer: Answer) -> bool {
        if answer != Answer::None {
            self.answered = now;
        }
        match answer {
            Answer::None => return false,
            Answer::Read => self.faults = 0,
            Answer::Failed => self.faults += 1,
        }
        match (answer, self.state) {
            (Answer::Read, State::Open(..) | State::Probing(_)) => self.state = State::Closed,
            (Answer::Failed, State::Closed) if self.faults >= FAULTS => {
                self.state = State::Open(Fault::Failed(self.faults), now + self.retry);
            }
            _ => return false,
        }
        true
    }

    fn stalls_at(&self) -> Option<Nanos> {
        let waits = self.is_closed() && self.reads > 0;
        waits.then(|| self.answered.saturating_add(self.stall))
    }

    fn is_stalled(&self, now: Nanos) -> bool {
        self.stalls_at().is_some_and(|at| at <= now)
    }

    fn next(&self) -> Option<Nanos> {
        match self.state {
            State::Open(_, until) => Some(until),
            _ => self.stalls_at(),
        }
    }
}

fn answer<T>(result: &Result<T, LoadFault>) -> Answer {
    match result {
        Ok(_) | Err(LoadFault::Corrupt) => Answer::Read,
        Err(LoadFault::Io) => Answer::Failed,
        Err(LoadFault::Cancelled | LoadFault::NoMemory) => Answer::None,
    }
}

impl Machine {
    /// A read of so many bytes on a drive begins.
    pub(super) fn read_begun(&mut self, home: DriveId, bytes: u64) {
        let now = self.now.mono;
        let drive = &mut self.drives[usize::from(home)];
        drive.circuit.begun(now);
        drive.pace.begun(now, bytes);
    }

    /// A read on a drive has ended.
    pub(super) fn read_ended<T>(
        &mut self,
        home: DriveId,
        bytes: u64,
        result: &Result<T, LoadFault>,
        out: &mut Vec<Command>,
    ) {
        let (now, answer) = (self.now.mono, answer(result));
        let drive = &mut self.drives[usize::from(home)];
        drive.pace.ended(now, bytes, answer == Answer::Read);
        if drive.circuit.ended(now, answer) {
            self.circuit_changed(home, out);
        }
    }

    /// A scrub's read has ended. It counts for nothing while it waits: everything goes before it.
    pub(super) fn scrub_answered(
        &mut self,
        home: DriveId,
        result: &Result<(), LoadFault>,
        out: &mut Vec<Command>,
    ) {
        let now = self.now.mono;
        if self.drives[usize::from(home)].circuit.judge(now, answer(result)) {
            self.circuit_changed(home, out);
        }
    }

    /// A probe of a drive has ended.
    pub(super) fn probed(&mut self, home: DriveId, ok: bool, out: &mut Vec<Command>) {
        let (now, circuit) = (self.now.mono, &mut self.drives[usize::from(home)].circuit);
        if let State::Probing(fault) = circuit.state
            && !ok
        {
            circuit.state = State::Open(fault, now + circuit.retry);
        }
        let answer = if ok { Answer::Read } else { Answer::Failed };
        if circuit.judge(now, answer) {
            self.circuit_changed(home, out);
        }
    }

    /// Whether a block on a drive may be read.
    pub(super) fn is_asked(&self, id: BlockId) -> bool {
        let block = self.table.get(id).expect("the caller holds a live block");
        self.drives[usize::from(block.home)].circuit.is_closed()
    }

    /// Opens the circuits of drives that have stalled, and probes those whose time has come.
    pub(super) fn watch_drives(&mut self, out: &mut Vec<Command>) {
        if self.closed {
            return;
        }
        let now = self.now.mono;
        for home in 0..self.drives.len() {
            let home = DriveId::try_from(home).expect("few drives");
            let circuit = &mut self.drives[usize::from(home)].circuit;
            if circuit.is_stalled(now) {
                circuit.state = State::Open(Fault::Stalled(circuit.stall), now + circuit.retry);
                self.circuit_changed(home, out);
            } else if let State::Open(fault, until) = circuit.state
                && until <= now
            {
                circuit.state = State::Probing(fault);
                self.counters.probes += 1;
                out.push(Command::Probe { drive: home });
            }
        }
    }

    fn circuit_changed(&mut self, home: DriveId, out: &mut Vec<Command>) {
        let fault = self.drives[usize::from(home)].circuit.fault();
        self.index.shut_drive(home, fault.is_some());
        let Some(fault) = fault else {
            tracing::info!(home, "a drive answers again");
            self.counters.circuits_closed += 1;
            return;
        };
        tracing::error!(home, %fault, "a drive is not asked until it answers again");
        self.counters.circuits_opened += 1;
        for Waiting { op, item, id, key } in self.waiting_gets() {
            if self.table.get(id).is_some_and(|b| b.home == home && b.load.is_some()) {
                self.stop_waiting(&key, op);
                self.load_settled(op, item, super::get::State::Miss(MissReason::CircuitOpen), out);
            }
        }
    }

    /// When a circuit is to be looked at.
    pub(super) fn next_watch(&self) -> Option<Nanos> {
        self.drives.iter().filter_map(|drive| drive.circuit.next()).min()
    }
}
