//! Sessions: bounded, addressed by a serial number that is never given twice while it is kept.

use super::chain::NONE;
use super::log_gap;
use super::pace::Before;
use super::score::Facts;
use crate::Request;
use std::collections::HashMap;

/// What is kept of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Session {
    /// When its last request came, in seconds.
    pub(crate) last: f64,
    /// Moving average of log2 of its gaps in seconds; meaningless before turn 2.
    pub(crate) gap: f32,
    /// log2 of the last one.
    pub(crate) last_gap: f32,
    /// Seconds from its first request to its last.
    pub(crate) age: f32,
    /// Requests so far.
    pub(crate) turn: u32,
    /// Last block of its last request.
    pub(crate) end: u32,
    /// Tokens of its last prompt and output.
    pub(crate) tokens: u32,
    /// Tokens of its last output.
    pub(crate) output: u32,
    /// Tokens of its last prompt that were new.
    pub(crate) new_tokens: u32,
}

impl Session {
    const NEW: Self = Self {
        last: 0.0,
        gap: 0.0,
        last_gap: 0.0,
        age: 0.0,
        turn: 0,
        end: NONE,
        tokens: 0,
        output: 0,
        new_tokens: 0,
    };

    /// It is asked for again: what the gap was to be expected by, and its log2.
    pub(crate) fn returned(&mut self, now: f64, weight: f32) -> (Before, f32) {
        let before = self.before();
        let since = (now - self.last).max(0.0);
        let gap = log_gap(since);
        let average = if self.turn == 1 { gap } else { self.gap };
        self.gap = average + weight * (gap - average);
        (self.last_gap, self.age) = (gap, self.age + since as f32);
        (before, gap)
    }

    /// Takes a request of it into its books, of which so many blocks are known.
    pub(crate) fn take(&mut self, request: &Request<'_>, known: u32, now: f64) -> Facts {
        let first = self.turn == 0;
        self.turn += 1;
        let new_tokens = request.input_tokens.saturating_sub(self.tokens).max(1);
        let facts = Facts {
            turn: self.turn,
            new_tokens: if first { request.input_tokens } else { new_tokens },
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            gap: (now - self.last).max(0.0),
            kind: request.kind.index(),
            known,
            last_output: self.output,
            last_new: self.new_tokens,
            average: self.gap,
            age: self.age,
        };
        self.tokens = request.input_tokens.saturating_add(request.output_tokens);
        (self.output, self.new_tokens) = (request.output_tokens, facts.new_tokens);
        self.last = now;
        facts
    }

    /// Its last request has ended: with it came so much of an answer.
    pub(crate) fn answered(&mut self, output_tokens: u32) {
        let asked = self.tokens.saturating_sub(self.output);
        self.tokens = asked.saturating_add(output_tokens);
        self.output = output_tokens;
    }

    /// What its next gap is expected by.
    pub(crate) fn before(&self) -> Before {
        Before {
            gaps: (self.turn > 1).then_some((self.gap, self.last_gap)),
            output_tokens: self.output,
            input_tokens: self.tokens.saturating_sub(self.output),
            new_tokens: self.new_tokens,
        }
    }
}

/// The sessions that are remembered: the newest `limit` of them.
#[derive(Debug)]
pub(crate) struct Sessions {
    slots: Vec<(u32, Option<u64>, Session)>,
    by_label: HashMap<u64, u32>,
    next: u32,
    limit: u32,
}

impl Sessions {
    pub(crate) fn new(limit: u32) -> Self {
        Self { slots: Vec::new(), by_label: HashMap::new(), next: 0, limit }
    }

    /// Bytes of memory that they have, near enough.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<(u32, Option<u64>, Session)>()
            + self.by_label.capacity() * size_of::<(u64, u64)>()
    }

    pub(crate) fn by_label(&self, label: u64) -> Option<u32> {
        self.by_label.get(&label).copied()
    }

    pub(crate) fn get(&mut self, serial: u32) -> Option<&mut Session> {
        let (held, _, session) = self.slots.get_mut((serial % self.limit) as usize)?;
        (*held == serial).then_some(session)
    }

    /// A new session in place of the oldest, if there is no room.
    pub(crate) fn start(&mut self, label: Option<u64>) -> u32 {
        let serial = self.next;
        self.next = if serial + 1 == NONE { 0 } else { serial + 1 };
        let session = Session::NEW;
        let place = (serial % self.limit) as usize;
        match self.slots.get_mut(place) {
            Some(slot) => {
                if let Some(old) = slot.1.take()
                    && self.by_label.get(&old) == Some(&slot.0)
                {
                    self.by_label.remove(&old);
                }
                *slot = (serial, label, session);
            }
            None => self.slots.push((serial, label, session)),
        }
        if let Some(label) = label {
            self.by_label.insert(label, serial);
        }
        serial
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_session_makes_room() {
        let mut sessions = Sessions::new(2);
        let first = sessions.start(Some(10));
        let second = sessions.start(None);
        assert!(sessions.get(first).is_some() && sessions.get(second).is_some());
        let third = sessions.start(Some(30));
        assert!(sessions.get(first).is_none());
        assert_eq!((sessions.by_label(10), sessions.by_label(30)), (None, Some(third)));
    }
}
