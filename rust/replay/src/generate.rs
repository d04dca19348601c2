//! Traces made up: what users do, and what a policy that learns could trip over.

use crate::trace::{Builder, Entry, Trace};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tiered_kv_policy::{RequestKind, Rng};

/// Tokens of a block.
const BLOCK: u32 = 16;

/// What [`generate`] makes: names, and what each is about.
pub const KINDS: &[(&str, &str)] = &[
    ("chat", "people who come back after a minute or so, with a few shared system prompts"),
    ("agents", "sessions of many quick steps, with pauses now and then"),
    ("zipf", "documents asked for independently, by popularity"),
    ("drift", "as zipf, but what is popular moves on"),
    ("loop", "documents asked for in turn, more than fit"),
    ("scan", "as zipf, with long prompts in between that never come back"),
    ("clock", "as chat, but from the middle on all times are a hundred times as long"),
    ("flip", "who comes back tells by the length of the first prompt, the other way after half"),
];

struct Maker {
    rng: Rng,
    builder: Builder,
    next_block: u64,
    now: f64,
}

/// One request to be added.
struct Ask<'a> {
    session: Option<u32>,
    kind: RequestKind,
    prompt: &'a [(u64, u32)],
    output: u32,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), builder: Builder::new(BLOCK), next_block: 0, now: 0.0 }
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.rng.unit()).ln() * mean
    }

    /// So many blocks that no request had before.
    fn fresh(&mut self, blocks: u32) -> (u64, u32) {
        let first = self.next_block;
        self.next_block += u64::from(blocks);
        (first, blocks)
    }

    fn between(&mut self, from: u32, to: u32) -> u32 {
        from + self.rng.below((to - from + 1) as usize) as u32
    }

    /// Adds a request at `now`; the output's blocks are returned, for what comes behind them.
    fn ask(&mut self, ask: &Ask<'_>) -> (u64, u32) {
        let output = self.fresh(ask.output);
        let blocks: u32 = ask.prompt.iter().map(|run| run.1).sum();
        let tokens = (blocks * BLOCK, ask.output * BLOCK);
        let entry = Entry::new((self.now * 1e9) as u64, ask.session, ask.kind, tokens);
        let added = self.builder.add(entry, ask.prompt, &[output]);
        added.expect("fresh blocks and times that go forward make a request");
        output
    }
}

/// A session that will ask again.
struct Session {
    number: u32,
    prompt: Vec<(u64, u32)>,
    left: u32,
}

/// How sessions of a class behave.
#[derive(Clone, Copy)]
struct Habit {
    kind: RequestKind,
    /// Blocks of the first prompt, from and to.
    first: (u32, u32),
    /// Chance to go on after each turn, and the most turns.
    go_on: f64,
    turns: u32,
    /// Mean seconds to the next turn; how often it is a pause, and how long one is.
    think: f64,
    pause: (f64, f64),
    /// Blocks that each turn adds, from and to, and blocks of an output.
    more: (u32, u32),
    output: (u32, u32),
}

const CHAT: Habit = Habit {
    kind: RequestKind::Chat,
    first: (1, 40),
    go_on: 0.72,
    turns: 40,
    think: 60.0,
    pause: (0.05, 1800.0),
    more: (1, 12),
    output: (1, 30),
};

const AGENT: Habit = Habit {
    kind: RequestKind::Agent,
    first: (200, 600),
    go_on: 0.97,
    turns: 150,
    think: 8.0,
    pause: (0.03, 900.0),
    more: (4, 60),
    output: (2, 12),
};

/// Sessions of one or more habits; `mix` gives a new session's by the progress of the trace, and
/// `clock` how fast time passes.
fn sessions(
    maker: &mut Maker,
    requests: usize,
    apart: f64,
    mix: impl Fn(&mut Rng, f64) -> Habit,
    clock: impl Fn(f64) -> f64,
) {
    let systems: Vec<(u64, u32)> = (0..6).map(|i| maker.fresh(1 + i % 4)).collect();
    let mut due: BinaryHeap<Reverse<(u64, u32)>> = BinaryHeap::new();
    let mut open: Vec<Option<(Session, Habit)>> = Vec::new();
    let mut next_start = 0u64;
    let mut time = 0u64;
    for number in 0..requests {
        let progress = number as f64 / requests as f64;
        let returning = due.peek().is_some_and(|Reverse((at, _))| *at <= next_start);
        let returns = if returning { due.pop() } else { None };
        let (at, (mut session, habit)) = match returns {
            Some(Reverse((at, id))) => {
                (at, open[id as usize].take().expect("a session that is due is open"))
            }
            None => {
                let at = next_start;
                next_start += (maker.exponential(apart) * 1e6) as u64;
                let habit = mix(&mut maker.rng, progress);
                let own = maker.between(habit.first.0, habit.first.1);
                let system = systems[(maker.rng.unit().powi(2) * 6.0) as usize];
                let prompt = vec![system, maker.fresh(own)];
                open.push(None);
                let number = open.len() as u32 - 1;
                (at, (Session { number, prompt, left: habit.turns }, habit))
            }
        };
        maker.now += (at.saturating_sub(time)) as f64 * 1e-6 * clock(progress);
        time = time.max(at);
        let output = maker.between(habit.output.0, habit.output.1);
        let ask = Ask {
            session: Some(session.number),
            kind: habit.kind,
            prompt: &session.prompt,
            output,
        };
        let output = maker.ask(&ask);
        if session.left > 1 && maker.rng.unit() < habit.go_on {
            session.left -= 1;
            let (often, long) = habit.pause;
            let mean = if maker.rng.unit() < often { long } else { habit.think };
            let wait = (maker.exponential(mean) * 1e6) as u64;
            let more = maker.between(habit.more.0, habit.more.1);
            session.prompt.push(output);
            session.prompt.push(maker.fresh(more));
            let id = session.number;
            open[id as usize] = Some((session, habit));
            due.push(Reverse((at + wait, id)));
        }
    }
}

/// How documents are chosen: the rank of one of so many, given the request's number.
type Choice = fn(&mut Rng, usize, usize) -> usize;

/// A rank by Zipf's law with an exponent near one.
fn zipf(rng: &mut Rng, _number: usize, documents: usize) -> usize {
    let rank = (documents as f64).powf(rng.unit());
    (rank as usize - 1).min(documents - 1)
}

/// As [`zipf`], but ranks go round once in 10,000 requests.
fn drifting(rng: &mut Rng, number: usize, documents: usize) -> usize {
    (zipf(rng, number, documents) + number * documents / 10_000) % documents
}

fn in_turn(_rng: &mut Rng, number: usize, documents: usize) -> usize {
    number % documents
}

/// Requests for documents, each with a question of its own behind it; a part `scans` of them has a
/// long prompt that nobody has had or will have.
fn documents(maker: &mut Maker, requests: usize, count: usize, choice: Choice, scans: f64) {
    let all: Vec<(u64, u32)> = (0..count)
        .map(|_| {
            let blocks = maker.between(4, 40);
            maker.fresh(blocks)
        })
        .collect();
    for number in 0..requests {
        maker.now += maker.exponential(1.0);
        let blocks = maker.between(1, 4);
        let prompt = if maker.rng.unit() < scans {
            vec![maker.fresh(100 + blocks * 50)]
        } else {
            let document = all[choice(&mut maker.rng, number, count)];
            vec![document, maker.fresh(blocks)]
        };
        let ask = Ask { session: None, kind: RequestKind::Synthetic, prompt: &prompt, output: 2 };
        maker.ask(&ask);
    }
}

/// A trace of one of [`KINDS`] with so many requests; `None` if there is no such kind. Equal
/// arguments make equal traces.
pub fn generate(kind: &str, requests: usize, seed: u64) -> Option<Trace> {
    let mut maker = Maker::new(seed);
    let of_chat = |_: &mut Rng, _: f64| CHAT;
    match kind {
        "chat" => sessions(&mut maker, requests, 1.0, of_chat, |_| 1.0),
        "agents" => sessions(&mut maker, requests, 30.0, |_, _| AGENT, |_| 1.0),
        "clock" => {
            let clock = |progress| if progress < 0.5 { 1.0 } else { 100.0 };
            sessions(&mut maker, requests, 1.0, of_chat, clock);
        }
        "flip" => {
            let mix = |rng: &mut Rng, progress: f64| {
                let short = rng.below(2) == 0;
                let first = if short { (1, 8) } else { (20, 60) };
                let stays = short == (progress < 0.5);
                Habit { first, go_on: if stays { 0.85 } else { 0.05 }, ..CHAT }
            };
            sessions(&mut maker, requests, 1.0, mix, |_| 1.0);
        }
        "zipf" => documents(&mut maker, requests, 5000, zipf, 0.0),
        "drift" => documents(&mut maker, requests, 5000, drifting, 0.0),
        "loop" => documents(&mut maker, requests, 400, in_turn, 0.0),
        "scan" => documents(&mut maker, requests, 5000, zipf, 0.1),
        _ => return None,
    }
    Some(maker.builder.finish(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_makes_what_it_says() {
        for (kind, _) in KINDS {
            let trace = generate(kind, 3000, 1).unwrap();
            assert_eq!((trace.entries().len(), trace.unchained), (3000, 0), "{kind}");
            let again = generate(kind, 3000, 1).unwrap();
            assert_eq!(trace.block_accesses, again.block_accesses, "{kind}");
            let ceiling = trace.ceiling_pct(false);
            assert!((10.0..99.0).contains(&ceiling), "{kind}: ceiling {ceiling}");
        }
        assert!(generate("other", 10, 1).is_none());
    }

    #[test]
    fn the_clock_slows_down_in_the_middle() {
        let trace = generate("clock", 2000, 1).unwrap();
        let at = |number: usize| trace.entries()[number].now as f64 * 1e-9;
        let (before, after) = (at(999) - at(0), at(1999) - at(1000));
        assert!(after > 50.0 * before, "{before} s, then {after} s");
    }
}
