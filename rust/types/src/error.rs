//! The one error type of the project.
//!
//! A miss, "throttled" and "recompute" are values, never errors. An error says what kind it is,
//! whether a retry can help, in which operation it arose, which field or file it concerns and what
//! to do.

use std::error::Error as StdError;
use std::fmt;

/// What went wrong, coarse enough to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The configuration is unusable: a field is missing, unknown, out of range or contradictory.
    Config,
    /// An argument of a call is wrong: size, count, dtype, key width.
    InvalidArgument,
    /// The store is closed, or closing.
    Closed,
    /// The directory is open elsewhere.
    InUse,
    /// The directory was written by another format version, or is not a store.
    FormatMismatch,
    /// The operating system refused access.
    Permission,
    /// A directory or file that must exist does not.
    NotFound,
    /// Memory or device space could not be had.
    NoSpace,
    /// Something asked for is not supported here.
    Unsupported,
    /// The operating system or the device reported a fault.
    Io,
    /// The operation was cancelled.
    Cancelled,
    /// A defect in this library: please report it.
    Internal,
}

impl ErrorKind {
    /// A stable lower-case name, used in messages and as the Python subclass' key.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::InvalidArgument => "invalid argument",
            Self::Closed => "closed",
            Self::InUse => "in use",
            Self::FormatMismatch => "format mismatch",
            Self::Permission => "permission",
            Self::NotFound => "not found",
            Self::NoSpace => "no space",
            Self::Unsupported => "unsupported",
            Self::Io => "i/o",
            Self::Cancelled => "cancelled",
            Self::Internal => "internal",
        }
    }
}

/// Whether the same call may succeed later without a change by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The call will fail again until something is changed.
    Never,
    /// The call may succeed later as it is.
    Later,
}

/// The error of every fallible call.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    retry: Retry,
    op: &'static str,
    context: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of every fallible call.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` in operation `op`; `context` names the field or file and the remedy.
    pub fn new(kind: ErrorKind, op: &'static str, context: impl Into<String>) -> Self {
        let retry = match kind {
            ErrorKind::InUse | ErrorKind::NoSpace | ErrorKind::Io => Retry::Later,
            _ => Retry::Never,
        };
        Self { kind, retry, op, context: one_line(context.into()), source: None }
    }

    /// The same error with its cause attached.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// An error from the operating system; its kind follows from the code.
    pub fn from_io(op: &'static str, context: impl Into<String>, err: std::io::Error) -> Self {
        use std::io::ErrorKind as Os;
        let kind = match err.kind() {
            Os::PermissionDenied | Os::ReadOnlyFilesystem => ErrorKind::Permission,
            Os::NotFound => ErrorKind::NotFound,
            Os::StorageFull | Os::QuotaExceeded | Os::OutOfMemory => ErrorKind::NoSpace,
            Os::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Self::new(kind, op, context).with_source(err)
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether a retry can help.
    pub fn retry(&self) -> Retry {
        self.retry
    }

    /// The operation in which it arose.
    pub fn op(&self) -> &'static str {
        self.op
    }

    /// The field or file concerned, and the remedy.
    pub fn context(&self) -> &str {
        &self.context
    }
}

/// `text` with its control characters escaped: names and paths in it are somebody else's, and must
/// neither break a line of a log nor drive a terminal.
fn one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.op, self.context)?;
        if let Some(source) = &self.source {
            write!(f, " ({})", one_line(source.to_string()))?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|s| s.as_ref() as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_causes_from_outside_stay_on_one_line() {
        let cause = std::io::Error::other("two\nlines");
        let error = Error::new(ErrorKind::Config, "open", "`a\n\u{1b}[2Jb` is unknown");
        let text = error.with_source(cause).to_string();
        assert_eq!(text, "open: `a\\n\\u{1b}[2Jb` is unknown (two\\nlines)");
    }
}
