//! Runs the corpus of each target, and blind mutations of it, for a time. Whatever breaks an
//! invariant is kept in the corpus, so that it is tried first from then on.
//!
//! `tiered-kv-fuzz [--target NAME] [--seconds N] [--seed N] [--corpus DIR] [--seed-corpus]`

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tiered_kv_fuzz::mutate::{Rng, mutated};
use tiered_kv_fuzz::{TARGETS, Target, seeds};

struct Options {
    target: Option<String>,
    seconds: f64,
    seed: u64,
    corpus: PathBuf,
    seed_corpus: bool,
}

fn options() -> Result<Options, String> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut options = Options { target: None, seconds: 10.0, seed: 1, corpus, seed_corpus: false };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let mut value = || args.next().ok_or(format!("{name}: give a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text}: give a number"));
        match name.as_str() {
            "--target" => options.target = Some(value()?),
            "--seconds" => options.seconds = number(value()?)?,
            "--seed" => options.seed = number(value()?)? as u64,
            "--corpus" => options.corpus = value()?.into(),
            "--seed-corpus" => options.seed_corpus = true,
            _ => return Err(format!("{name}: there is no such option")),
        }
    }
    Ok(options)
}

fn read_corpus(dir: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.into_iter().filter_map(|path| fs::read(path).ok()).collect()
}

/// Whether the target is content with the bytes; what it panics with is on stderr.
fn holds(target: &Target, bytes: &[u8]) -> bool {
    catch_unwind(AssertUnwindSafe(|| (target.1)(bytes))).is_ok()
}

fn keep(dir: &Path, kind: &str, bytes: &[u8]) -> std::io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let path = dir.join(format!("{kind}-{:08x}.bin", crc32c::crc32c(bytes)));
    fs::write(&path, bytes)?;
    Ok(path)
}

/// Runs one target; whether it held.
fn run(target: &Target, options: &Options) -> std::io::Result<bool> {
    let dir = options.corpus.join(target.0);
    if options.seed_corpus {
        for seed in seeds::seeds(target.0) {
            keep(&dir, "seed", &seed)?;
        }
        return Ok(true);
    }
    let corpus = read_corpus(&dir);
    if corpus.is_empty() {
        println!("{}: there is no corpus in {}", target.0, dir.display());
        return Ok(false);
    }
    let mut rng = Rng::new(options.seed);
    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
    let mut runs = corpus.len() as u64;
    let broken = corpus.iter().find(|bytes| !holds(target, bytes)).cloned().or_else(|| {
        while Instant::now() < until {
            runs += 1;
            let bytes = mutated(&corpus, &mut rng);
            if !holds(target, &bytes) {
                return Some(bytes);
            }
        }
        None
    });
    match &broken {
        Some(bytes) => {
            let path = keep(&dir, "crash", bytes)?;
            println!("{}: an invariant is broken by {}", target.0, path.display());
        }
        None => println!("{}: {runs} inputs, seed {}", target.0, options.seed),
    }
    Ok(broken.is_none())
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    let wanted = |name: &str| options.target.as_deref().is_none_or(|wanted| wanted == name);
    let mut targets = TARGETS.iter().filter(|target| wanted(target.0)).peekable();
    if targets.peek().is_none() {
        let names: Vec<_> = TARGETS.iter().map(|target| target.0).collect();
        eprintln!("--target: give one of {}", names.join(", "));
        return ExitCode::from(2);
    }
    let mut held = true;
    for target in targets {
        match run(target, &options) {
            Ok(one) => held &= one,
            Err(err) => {
                eprintln!("{}: {err}", target.0);
                held = false;
            }
        }
    }
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
