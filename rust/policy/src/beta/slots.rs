//! Which slots are free: blocks that come together get neighbouring slots where there are any.

/// Slots in a word of the map.
const WORD: usize = u64::BITS as usize;

/// A map of free slots, and a cursor that goes round it.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// One bit a slot, set where it is free.
    free: Vec<u64>,
    count: usize,
    cursor: usize,
}

impl Slots {
    /// A free slot, the next one after the last that was taken. `None` where only a few are free:
    /// to go on among them would scatter chains.
    pub(crate) fn take(&mut self, slots: usize) -> Option<u32> {
        if self.count == 0 || self.count * 8 < slots {
            return None;
        }
        let mut word = self.cursor / WORD % self.free.len();
        let mut bits = self.free[word] & (u64::MAX << (self.cursor % WORD));
        while bits == 0 {
            word = (word + 1) % self.free.len();
            bits = self.free[word];
        }
        let slot = word * WORD + bits.trailing_zeros() as usize;
        self.free[word] &= !(1 << (slot % WORD));
        self.count -= 1;
        self.cursor = slot + 1;
        Some(slot as u32)
    }

    /// How many are free.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Bytes of memory that the map has.
    pub(crate) fn bytes(&self) -> usize {
        self.free.capacity() * size_of::<u64>()
    }

    /// Gives a slot back.
    pub(crate) fn give(&mut self, slot: u32) {
        let slot = slot as usize;
        if self.free.len() <= slot / WORD {
            self.free.resize(slot / WORD + 1, 0);
        }
        debug_assert!(self.free[slot / WORD] >> (slot % WORD) & 1 == 0, "a slot is given once");
        self.free[slot / WORD] |= 1 << (slot % WORD);
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_were_given_come_in_order() {
        let mut slots = Slots::default();
        assert_eq!(slots.take(100), None);
        for slot in [70, 3, 2, 199] {
            slots.give(slot);
        }
        assert_eq!(slots.take(200), None, "too few to begin with");
        let taken: Vec<_> = (0..5).map(|_| slots.take(0)).collect();
        assert_eq!(taken, [Some(2), Some(3), Some(70), Some(199), None]);
        slots.give(1);
        assert_eq!(slots.take(0), Some(1), "round the end");
    }
}
