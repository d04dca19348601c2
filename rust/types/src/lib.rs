//! What the other crates agree on: identity, layout, records, configuration and errors. No I/O, no clock.
#![forbid(unsafe_code)]

pub mod error;

pub use error::{Error, ErrorKind, Result, Retry};
