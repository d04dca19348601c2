//! What is fuzzed: one function a target, each with the invariants of what it parses.
//!
//! A target panics where an invariant is broken; bytes that do not parse are none of its business.

mod config;
mod directory;
mod keys;
pub mod mutate;
mod records;
pub mod seeds;
mod socket;
mod traces;

/// A target: its name, and what is done with the bytes.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 11] = [
    ("record", records::record),
    ("segment", records::segment),
    ("superblock", records::superblock),
    ("checkpoint", records::checkpoint),
    ("journal", records::journal),
    ("config", config::config),
    ("keys", keys::keys),
    ("messages", tiered_kv::fuzzing::messages),
    ("socket", socket::socket),
    ("directory", directory::directory),
    ("trace", traces::trace),
];

/// The target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.0 == name)
}
