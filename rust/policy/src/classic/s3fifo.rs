//! S3-FIFO: a small queue that most blocks do not survive, a main one, and a memory of the former.

use super::list::{Links, Queue, entry};
use super::{Access, BlockCache};

/// Uses are counted up to this.
const MAX_USES: u8 = 3;
/// Uses in the small queue that promote.
const PROMOTE: u8 = 2;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Place {
    #[default]
    Out,
    Small,
    Main,
    Ghost,
}

/// Three static queues: small is a tenth, and the ghosts are as many as main holds.
#[derive(Debug)]
pub struct S3Fifo {
    small_size: usize,
    main_size: usize,
    links: Links,
    small: Queue,
    main: Queue,
    ghosts: Queue,
    state: Vec<(Place, u8)>,
}

impl S3Fifo {
    /// An empty cache of `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let small_size = (capacity / 10).max(1);
        let links = Links::default();
        let (small, main, ghosts) = Default::default();
        let main_size = capacity.saturating_sub(small_size);
        Self { small_size, main_size, links, small, main, ghosts, state: Vec::new() }
    }

    fn make_room(&mut self) {
        while self.residents() >= self.small_size + self.main_size {
            if self.small.len() >= self.small_size || self.main.len() == 0 {
                self.shorten_small();
            } else {
                self.shorten_main();
            }
        }
    }

    /// Lets blocks leave the small queue until one has gone out of the cache.
    fn shorten_small(&mut self) {
        while let Some(block) = self.small.pop(&mut self.links) {
            if self.state[block as usize].1 >= PROMOTE && self.main_size > 0 {
                self.state[block as usize] = (Place::Main, 0);
                self.main.push(&mut self.links, block);
                if self.main.len() > self.main_size {
                    self.shorten_main();
                    return;
                }
                continue;
            }
            self.state[block as usize] = (Place::Ghost, 0);
            self.ghosts.push(&mut self.links, block);
            if self.ghosts.len() > self.main_size
                && let Some(old) = self.ghosts.pop(&mut self.links)
            {
                self.state[old as usize] = (Place::Out, 0);
            }
            return;
        }
    }

    fn shorten_main(&mut self) {
        while let Some(block) = self.main.pop(&mut self.links) {
            let (_, uses) = &mut self.state[block as usize];
            if *uses > 0 {
                *uses -= 1;
                self.main.push(&mut self.links, block);
                continue;
            }
            self.state[block as usize] = (Place::Out, 0);
            return;
        }
    }
}

impl BlockCache for S3Fifo {
    fn name(&self) -> &'static str {
        "s3-fifo"
    }

    fn access(&mut self, access: &Access) {
        let block = access.block;
        let (place, uses) = entry(&mut self.state, block);
        match place {
            Place::Small | Place::Main => {
                *uses = (*uses + 1).min(MAX_USES);
                return;
            }
            Place::Ghost => {
                self.ghosts.remove(&mut self.links, block);
                self.state[block as usize] = (Place::Main, 0);
            }
            Place::Out => self.state[block as usize] = (Place::Small, 0),
        }
        let to_main = self.state[block as usize].0 == Place::Main && self.main_size > 0;
        self.make_room();
        if to_main {
            self.main.push(&mut self.links, block);
            self.state[block as usize] = (Place::Main, 0);
        } else {
            self.small.push(&mut self.links, block);
            self.state[block as usize] = (Place::Small, 0);
        }
    }

    fn contains(&self, block: u32) -> bool {
        let state = self.state.get(block as usize);
        state.is_some_and(|(place, _)| matches!(place, Place::Small | Place::Main))
    }

    fn residents(&self) -> usize {
        self.small.len() + self.main.len()
    }
}
