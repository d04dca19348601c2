//! `tiered-kv-replay TRACE`: hits of policies at capacities, as a table and as JSON.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program's output is its purpose")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tiered_kv_replay::{ABLATION, ALL, KINDS, Options, Progress, Report, STEPS, TRIED};
use tiered_kv_replay::{
    Trace, generate, jobs, known, nodes_json, prefetch_rows, prefetch_table, read_path, run, table,
};

const USAGE: &str = "usage: tiered-kv-replay TRACE | generate:KIND[:REQUESTS[:SEED]]
    [--capacity 0.5,1,2,3,5,10,20] [--policies all|ablation|steps|tried|NAME,...]
    [--prefetch FAST:SLOW] [--nodes FILE] [--outputs] [--no-labels] [--seeds 5] [--threads N]
    [--json FILE] [--quiet]";

struct Arguments {
    trace: PathBuf,
    capacities: Vec<f64>,
    policies: Vec<&'static str>,
    options: Options,
    seeds: u64,
    threads: usize,
    json: Option<PathBuf>,
    /// Capacities of two tiers, in percent.
    prefetch: Option<(f64, f64)>,
    /// A file with a JSON array of descriptions of nodes.
    nodes: Option<PathBuf>,
    quiet: bool,
}

fn policies(text: &str) -> Result<Vec<&'static str>, String> {
    let mut found = Vec::new();
    for name in text.split(',') {
        match name {
            "all" => found.extend(ALL),
            "ablation" => found.extend(ABLATION),
            "steps" => found.extend(STEPS),
            "tried" => found.extend(TRIED),
            name => {
                let unknown = || tiered_kv_replay::Unknown(name.to_owned()).to_string();
                found.push(known(name).ok_or_else(unknown)?);
            }
        }
    }
    Ok(found)
}

fn capacities(text: &str) -> Result<Vec<f64>, String> {
    let parse = |part: &str| match part.parse::<f64>() {
        Ok(pct) if pct > 0.0 && pct <= 100.0 => Ok(pct),
        _ => Err(format!("--capacity: `{part}` is no percentage from 0 to 100")),
    };
    text.split(',').map(parse).collect()
}

fn tiers(text: &str) -> Result<(f64, f64), String> {
    match capacities(&text.replace(':', ","))?.as_slice() {
        [fast, slow] if fast <= slow => Ok((*fast, *slow)),
        _ => Err(format!("--prefetch: `{text}` is no FAST:SLOW, the smaller percentage first")),
    }
}

fn arguments() -> Result<Arguments, String> {
    let mut trace = None;
    let mut parsed = Arguments {
        trace: PathBuf::new(),
        capacities: capacities("0.5,1,2,3,5,10,20")?,
        policies: policies("all")?,
        options: Options::default(),
        seeds: 1,
        threads: std::thread::available_parallelism().map_or(1, Into::into),
        json: None,
        prefetch: None,
        nodes: None,
        quiet: false,
    };
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("{argument}: a value is wanted"));
        let number = |text: String| {
            text.parse::<u64>().map_err(|_| format!("{argument}: `{text}` is no number"))
        };
        match argument.as_str() {
            "--capacity" => parsed.capacities = capacities(&value()?)?,
            "--policies" => parsed.policies = policies(&value()?)?,
            "--seeds" => parsed.seeds = number(value()?)?,
            "--threads" => parsed.threads = number(value()?)? as usize,
            "--json" => parsed.json = Some(value()?.into()),
            "--prefetch" => parsed.prefetch = Some(tiers(&value()?)?),
            "--nodes" => parsed.nodes = Some(value()?.into()),
            "--outputs" => parsed.options.outputs = true,
            "--no-labels" => parsed.options.no_labels = true,
            "--quiet" => parsed.quiet = true,
            path if !path.starts_with('-') && trace.is_none() => trace = Some(path.into()),
            other => return Err(format!("{other}: unknown\n{USAGE}")),
        }
    }
    parsed.trace = trace.ok_or(USAGE)?;
    Ok(parsed)
}

/// The trace that `KIND[:REQUESTS[:SEED]]` describes.
fn generated(spec: &str) -> Result<Trace, String> {
    let mut parts = spec.split(':');
    let kind = parts.next().unwrap_or_default();
    let mut number = |default: u64| match parts.next() {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| format!("generate: `{text}` is no number")),
    };
    let (requests, seed) = (number(30_000)?.min(10_000_000), number(0)?);
    generate(kind, requests as usize, seed).ok_or_else(|| {
        let kinds: Vec<String> = KINDS.iter().map(|(k, about)| format!("  {k}: {about}")).collect();
        format!("generate: `{kind}` is no kind; there are\n{}", kinds.join("\n"))
    })
}

/// Replays two tiers instead, with windows of each width and one that adapts.
fn prefetched(arguments: &Arguments, trace: &Trace, tiers: (f64, f64)) -> Result<(), String> {
    let rows = prefetch_rows(trace, arguments.options, tiers, &Progress::default());
    let mut report = Report::new(trace, arguments.options, Vec::new());
    report.prefetch = rows.expect("nobody told it to stop");
    write_json(arguments, &report)?;
    print!("{}: prefetch\n\n{}", trace.name, prefetch_table(&report.prefetch));
    Ok(())
}

/// Replays over the tiers of nodes instead; what was found is JSON.
fn over_nodes(arguments: &Arguments, trace: &Trace, path: &Path) -> Result<(), String> {
    let fault = |what: String| format!("--nodes {}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|e| fault(e.to_string()))?;
    let (options, threads) = (arguments.options, arguments.threads);
    let found = nodes_json(trace, options, &text, threads, &Progress::default()).map_err(fault)?;
    println!("{}", found.expect("nobody told it to stop"));
    Ok(())
}

fn write_json(arguments: &Arguments, report: &Report) -> Result<(), String> {
    let Some(path) = &arguments.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(report).map_err(|e| e.to_string())?;
    std::fs::write(path, text).map_err(|e| format!("--json {}: {e}", path.display()))
}

fn main_with_errors() -> Result<(), String> {
    let arguments = arguments()?;
    let trace = match arguments.trace.to_str().and_then(|t| t.strip_prefix("generate:")) {
        Some(spec) => generated(spec)?,
        None => read_path(&arguments.trace).map_err(|e| e.to_string())?,
    };
    if trace.unchained > 0 {
        eprintln!("warning: {} blocks came behind another one than before", trace.unchained);
    }
    if let Some(path) = &arguments.nodes {
        return over_nodes(&arguments, &trace, path);
    }
    if let Some(tiers) = arguments.prefetch {
        return prefetched(&arguments, &trace, tiers);
    }
    let jobs = jobs(&arguments.capacities, &arguments.policies, arguments.seeds);
    let progress = Progress::default();
    let results = run(&trace, arguments.options, &jobs, arguments.threads, &progress, |outcome| {
        if !arguments.quiet {
            eprintln!(
                "{} {} % seed {}: {:.2} %, {:.0} ns/block",
                outcome.policy,
                outcome.capacity_pct,
                outcome.seed,
                outcome.hit_pct,
                outcome.ns_per_block
            );
        }
    });
    let results = results.expect("nobody told it to stop");
    let report = Report::new(&trace, arguments.options, results);
    write_json(&arguments, &report)?;
    print!("{}", table(&report));
    Ok(())
}

fn main() -> ExitCode {
    match main_with_errors() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}
