//! Sessions: bounded, addressed by a serial number that is never given twice while it is kept.

use super::chain::NONE;
use std::collections::HashMap;

/// What is kept of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Session {
    /// When its last request came, in seconds.
    pub(crate) last: f64,
    /// Moving average of log2 of its gaps in seconds; meaningless before turn 2.
    pub(crate) gap: f32,
    /// Requests so far.
    pub(crate) turn: u32,
    /// Last block of its last request.
    pub(crate) end: u32,
    /// Tokens of its last prompt and output.
    pub(crate) tokens: u32,
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
        let session = Session { last: 0.0, gap: 0.0, turn: 0, end: NONE, tokens: 0 };
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
