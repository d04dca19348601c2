//! `make sim`: plays many seeds of the simulation, or one of them with every step shown.
//!
//! One seed is one run, exactly. The first seed that fails ends the search, and the command that
//! plays it again is printed; the exit status is 1 then. With many seeds every kind of fault has to
//! have occurred.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a tool on the command line")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tiered_kv::sim::{self, Report};

const USAGE: &str = "tiered-kv-sim [--seeds N] [--first N] [--seed N] [--steps N] [--threads N]
  --seeds N    play N seeds (1000)
  --first N    from this one on (0)
  --seed N     play this one only, and show every step
  --steps N    steps of a run (400)
  --threads N  seeds played at once (2)";

/// With so many seeds each kind of fault occurs, or the simulation does not do what it says.
const ENOUGH: u64 = 100;

thread_local! {
    /// What the last panic of this thread said.
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

struct Asked {
    seeds: u64,
    first: u64,
    seed: Option<u64>,
    steps: usize,
    threads: u64,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked { seeds: 1000, first: 0, seed: None, steps: sim::STEPS, threads: 2 };
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("`{name}` needs a number after it"))?;
        let number: u64 =
            value.parse().map_err(|_| format!("`{name}` is {value:?}: give a whole number"))?;
        match name.as_str() {
            "--seeds" => asked.seeds = number,
            "--first" => asked.first = number,
            "--seed" => asked.seed = Some(number),
            "--steps" => asked.steps = usize::try_from(number).unwrap_or(usize::MAX),
            "--threads" => asked.threads = number.clamp(1, 64),
            _ => return Err(format!("`{name}` is no option")),
        }
    }
    Ok(asked)
}

fn play(seed: u64, steps: usize, say: Option<sim::Say>) -> Result<Report, String> {
    let run = std::panic::AssertUnwindSafe(|| sim::run(seed, steps, say));
    std::panic::catch_unwind(run).map_err(|_| SAID.take())
}

fn show(figures: &BTreeMap<&'static str, u64>) {
    for (name, n) in figures {
        println!("{name:>24} {n}");
    }
}

fn replay(seed: u64, steps: usize) -> ExitCode {
    let say = Box::new(|line: &str| println!("{line}"));
    match play(seed, steps, Some(say)) {
        Ok(report) => {
            show(&report.figures.iter().copied().collect());
            println!("seed {seed}: nothing wrong; trace {:016x}", report.trace);
            ExitCode::SUCCESS
        }
        Err(said) => {
            println!("seed {seed} failed: {said}");
            ExitCode::FAILURE
        }
    }
}

/// The lowest seed that failed, and what all runs exercised.
struct Found {
    failed: Option<(u64, String)>,
    played: u64,
    figures: BTreeMap<&'static str, u64>,
}

fn search(asked: &Asked) -> Found {
    let (begin, next) = (Instant::now(), AtomicU64::new(0));
    let found = Mutex::new(Found { failed: None, played: 0, figures: BTreeMap::new() });
    let lock = || found.lock().expect("no thread panics with the lock");
    let work = || {
        while lock().failed.is_none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= asked.seeds {
                return;
            }
            let seed = asked.first + number;
            let played = play(seed, asked.steps, None);
            let mut found = lock();
            found.played += 1;
            match played {
                Ok(report) => {
                    for (name, n) in report.figures {
                        *found.figures.entry(name).or_default() += n;
                    }
                }
                Err(said) if found.failed.as_ref().is_none_or(|(other, _)| seed < *other) => {
                    found.failed = Some((seed, said));
                }
                Err(_) => {}
            }
            if std::io::stderr().is_terminal() && found.played.is_multiple_of(10) {
                let seconds = begin.elapsed().as_secs();
                eprint!("\r{} of {} seeds, {seconds} s ", found.played, asked.seeds);
                std::io::stderr().flush().ok();
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..asked.threads {
            scope.spawn(work);
        }
    });
    if std::io::stderr().is_terminal() {
        eprintln!();
    }
    found.into_inner().expect("no thread panics with the lock")
}

fn main() -> ExitCode {
    let asked = match parse(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(what) => {
            eprintln!("{what}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    std::panic::set_hook(Box::new(|info| SAID.set(info.to_string())));
    if let Some(seed) = asked.seed {
        return replay(seed, asked.steps);
    }
    let begin = Instant::now();
    let found = search(&asked);
    let seconds = begin.elapsed().as_secs_f64();
    if let Some((seed, said)) = found.failed {
        println!("seed {seed} failed, after {} seeds and {seconds:.1} s: {said}", found.played);
        println!("play it again: make sim SEED={seed} STEPS={}", asked.steps);
        return ExitCode::FAILURE;
    }
    show(&found.figures);
    println!("{} seeds, {seconds:.1} s: nothing wrong", found.played);
    let figure = |name: &str| found.figures.get(name).copied().unwrap_or(0);
    let missing: Vec<&str> = sim::fault_names().filter(|name| figure(name) == 0).collect();
    if asked.seeds >= ENOUGH && !missing.is_empty() {
        println!("faults that never occurred: {}", missing.join(", "));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
