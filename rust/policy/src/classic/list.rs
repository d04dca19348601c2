//! Queues through tables: a block is in at most one of the queues that share a [`Links`].

/// No block.
const NONE: u32 = u32::MAX;

/// Neighbours of every block in its queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    next: Vec<u32>,
    prev: Vec<u32>,
}

/// One queue: in at the front, out at the back.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    front: u32,
    back: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Self { front: NONE, back: NONE, len: 0 }
    }
}

/// The entry of a block in a table that grows as blocks are seen.
pub(super) fn entry<T: Clone + Default>(table: &mut Vec<T>, block: u32) -> &mut T {
    let at = block as usize;
    if table.len() <= at {
        table.resize((at + 1).next_power_of_two(), T::default());
    }
    &mut table[at]
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn back(&self) -> Option<u32> {
        (self.back != NONE).then_some(self.back)
    }

    pub(super) fn push(&mut self, links: &mut Links, block: u32) {
        *entry(&mut links.next, block) = self.front;
        *entry(&mut links.prev, block) = NONE;
        match self.front {
            NONE => self.back = block,
            front => links.prev[front as usize] = block,
        }
        self.front = block;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, links: &mut Links, block: u32) {
        let (next, prev) = (links.next[block as usize], links.prev[block as usize]);
        match prev {
            NONE => self.front = next,
            prev => links.next[prev as usize] = next,
        }
        match next {
            NONE => self.back = prev,
            next => links.prev[next as usize] = prev,
        }
        self.len -= 1;
    }

    /// The block in front of `block`, towards the newest.
    pub(super) fn newer(&self, links: &Links, block: u32) -> Option<u32> {
        let newer = links.prev[block as usize];
        (newer != NONE).then_some(newer)
    }

    pub(super) fn pop(&mut self, links: &mut Links) -> Option<u32> {
        let block = self.back()?;
        self.remove(links, block);
        Some(block)
    }

    pub(super) fn move_to_front(&mut self, links: &mut Links, block: u32) {
        if self.front != block {
            self.remove(links, block);
            self.push(links, block);
        }
    }
}
