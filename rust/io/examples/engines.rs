//! Compares the I/O engines on a directory: 1 MiB operations, 32 at once, interleaved rounds.
//!
//! `cargo run --release -p tiered-kv-io --example engines -- DIRECTORY [ROUNDS]`

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use tiered_kv_io::{
    Arena, ArenaConfig, BlockingEngine, Disk, FileId, IoDone, IoEngine, IoOp, IoRequest, OnDone,
    OsThreads, PosixDisk, Priority, SlotMut, UringConfig, UringEngine,
};

const UNIT: u64 = 1 << 20;
const DEPTH: u64 = 32;
const OPS: u64 = 1024;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().ok_or("name a directory on the device")?);
    let rounds: usize = args.next().map_or(Ok(5), |text| text.parse())?;
    let disk: Arc<dyn Disk> = Arc::new(PosixDisk::open(&dir)?);
    let arena = Arena::new(ArenaConfig::new(DEPTH * UNIT))?;
    let file = disk.create("engines-example", OPS * UNIT)?;
    println!("{}; huge pages for {} bytes", disk.direct_reason(), arena.report().huge_bytes);
    let mut rates: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    for round in 0..=rounds {
        for name in ["io_uring", "blocking, 32 threads", "blocking, 2 threads"] {
            let (engine, done) = make(name, &disk, &arena)?;
            if round == 0 {
                println!("{name}: {}", engine.describe());
            }
            for kind in ["write", "read"] {
                let rate = run(&*engine, &done, file, &arena, kind == "read")?;
                // The first round writes to fresh blocks.
                if round > 0 {
                    rates.entry((kind, name)).or_default().push(rate);
                }
            }
        }
    }
    disk.remove("engines-example")?;
    for ((kind, name), mut rates) in rates {
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        println!("{kind:5} {name:22} median {median:.2} GB/s of {rates:.2?}");
    }
    Ok(())
}

type Running = (Box<dyn IoEngine>, Receiver<IoDone>);

fn make(name: &str, disk: &Arc<dyn Disk>, arena: &Arc<Arena>) -> Outcome<Running> {
    let (sender, done) = channel();
    let on_done: OnDone = Arc::new(move |done| _ = sender.send(done));
    let depth = DEPTH as usize;
    let ring = UringConfig { depth: 2 * depth, store_depth: depth, ..UringConfig::default() };
    let blocking =
        |threads| BlockingEngine::new(disk.clone(), &OsThreads, threads, threads, on_done.clone());
    let engine: Box<dyn IoEngine> = match name {
        "io_uring" => {
            Box::new(UringEngine::new(disk.clone(), arena, &OsThreads, ring, on_done.clone())?)
        }
        "blocking, 2 threads" => Box::new(blocking(2)?),
        _ => Box::new(blocking(depth)?),
    };
    Ok((engine, done))
}

fn take(arena: &Arc<Arena>, place: u64) -> Outcome<SlotMut> {
    Ok(arena.take(place * UNIT, UNIT).ok_or("the place is free once its operation has ended")?)
}

/// Keeps `DEPTH` operations under way until all are done; returns 10^9 bytes a second.
fn run(
    engine: &dyn IoEngine,
    done: &Receiver<IoDone>,
    file: FileId,
    arena: &Arc<Arena>,
    read: bool,
) -> Outcome<f64> {
    let request = |place: u64, number: u64| -> Outcome<IoRequest> {
        // A stride that visits every part of the file once, in no order that a device expects.
        let offset = number * 389 % OPS * UNIT;
        let slot = take(arena, place)?;
        let (priority, op) = if read {
            (Priority::Load, IoOp::Read { file, offset, buf: slot.into() })
        } else {
            (Priority::Store, IoOp::Write { file, offset, buf: Arc::new(slot.freeze()) })
        };
        Ok(IoRequest { token: place, priority, op, cancel: None })
    };
    let begin = Instant::now();
    engine.submit((0..DEPTH).map(|number| request(number, number)).collect::<Outcome<_>>()?);
    let mut next = DEPTH;
    for _ in 0..OPS {
        let ended = done.recv()?;
        ended.result?;
        drop(ended.op);
        if next < OPS {
            engine.submit(vec![request(ended.token, next)?]);
            next += 1;
        }
    }
    Ok((OPS * UNIT) as f64 / begin.elapsed().as_secs_f64() / 1e9)
}
