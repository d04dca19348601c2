//! Results as JSON and as a table.

use crate::bench::{Options, Outcome};
use crate::prefetch::Prefetched;
use crate::trace::Trace;
use serde::Serialize;
use std::fmt::Write;

/// All results of a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the trace.
    pub trace: String,
    /// Tokens of a block.
    pub block_size: u32,
    /// Requests of the trace.
    pub requests: usize,
    /// Accesses to blocks of prompts.
    pub block_accesses: u64,
    /// Different blocks of prompts.
    pub unique_blocks: usize,
    /// Percent of hits if nothing ever leaves.
    pub ceiling_pct: f64,
    /// One entry a run.
    pub results: Vec<Outcome>,
    /// What prefetching between two tiers did, one entry a window.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefetch: Vec<Prefetched>,
}

impl Report {
    /// The report on these results.
    pub fn new(trace: &Trace, options: Options, results: Vec<Outcome>) -> Self {
        Self {
            trace: trace.name.clone(),
            block_size: trace.block_tokens,
            requests: trace.entries().len(),
            block_accesses: trace.block_accesses,
            unique_blocks: trace.unique_blocks,
            ceiling_pct: trace.ceiling_pct(options.outputs),
            results,
            prefetch: Vec::new(),
        }
    }
}

/// Mean hits in percent by policy and capacity, as text; the ceiling stands in the heading.
pub fn table(report: &Report) -> String {
    let mut capacities: Vec<f64> = report.results.iter().map(|r| r.capacity_pct).collect();
    capacities.sort_by(f64::total_cmp);
    capacities.dedup();
    let mut policies: Vec<&str> = Vec::new();
    for outcome in &report.results {
        if !policies.contains(&outcome.policy) {
            policies.push(outcome.policy);
        }
    }
    let mut text = format!(
        "{}: {} requests, {} accesses to {} blocks of {} tokens, ceiling {:.1} %\n\n| hit % |",
        report.trace,
        report.requests,
        report.block_accesses,
        report.unique_blocks,
        report.block_size,
        report.ceiling_pct,
    );
    for capacity in &capacities {
        let _ = write!(text, " {capacity} % |");
    }
    text.push_str(" ns/block |\n|---|");
    text.push_str(&"---|".repeat(capacities.len() + 1));
    text.push('\n');
    for policy in policies {
        let _ = write!(text, "| {policy} |");
        let of = |wanted: Option<f64>, value: fn(&Outcome) -> f64| {
            let all = report.results.iter().filter(|r| r.policy == policy);
            let values: Vec<f64> = all
                .filter(|r| wanted.is_none_or(|capacity| r.capacity_pct == capacity))
                .map(value)
                .collect();
            values.iter().sum::<f64>() / values.len().max(1) as f64
        };
        for capacity in &capacities {
            let _ = write!(text, " {:.2} |", of(Some(*capacity), |r| r.hit_pct));
        }
        let _ = writeln!(text, " {:.0} |", of(None, |r| r.ns_per_block));
    }
    text
}

/// What prefetching did, one row a window, as text.
pub fn prefetch_table(rows: &[Prefetched]) -> String {
    let mut text = "| prefetch | fast | slow | hits fast % | hits slow % | covered % | moved | \
                    waste % |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for row in rows {
        let window = match row.budget_pct {
            Some(budget) => format!("budget {budget} %, in the end {}", row.window),
            None => format!("window {}", row.window),
        };
        let _ = writeln!(
            text,
            "| {window} | {} % | {} % | {:.1} | {:.1} | {:.1} | {} | {:.1} |",
            row.fast_pct,
            row.slow_pct,
            row.fast_hit_pct,
            row.slow_hit_pct,
            row.covered_pct,
            row.moved_blocks,
            row.waste_pct
        );
    }
    text
}
