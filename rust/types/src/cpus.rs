//! Processors: a list of numbers, or text such as `"0-3,8"`.

use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Numbers of processors, ascending, each once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct CpuList(Vec<u16>);

#[derive(Deserialize)]
#[serde(untagged)]
enum Given {
    One(u16),
    Many(Vec<u16>),
    Text(String),
}

impl CpuList {
    /// One more than the largest number.
    pub const LIMIT: u16 = 1024;

    /// The list of some numbers.
    ///
    /// # Errors
    /// A text that says what is accepted, where there is none or one is 1024 or more.
    pub fn new(numbers: impl IntoIterator<Item = u16>) -> std::result::Result<Self, String> {
        let numbers: BTreeSet<u16> = numbers.into_iter().collect();
        match numbers.last() {
            Some(last) if *last < Self::LIMIT => Ok(Self(numbers.into_iter().collect())),
            _ => Err(help()),
        }
    }

    /// The numbers.
    pub fn numbers(&self) -> &[u16] {
        &self.0
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        let mut numbers = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
                (Ok(first), Ok(last)) if first <= last && last < Self::LIMIT => {
                    numbers.extend(first..=last);
                }
                _ => return Err(help()),
            }
        }
        Self::new(numbers)
    }

    pub(crate) fn read_opt<'de, D: Deserializer<'de>>(
        de: D,
    ) -> std::result::Result<Option<Self>, D::Error> {
        let list = match Given::deserialize(de) {
            Ok(Given::One(number)) => Self::new([number]),
            Ok(Given::Many(numbers)) => Self::new(numbers),
            Ok(Given::Text(text)) => Self::parse(&text),
            Err(_) => Err(help()),
        };
        list.map(Some).map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, run) in self.0.chunk_by(|one, next| one + 1 == *next).enumerate() {
            f.write_str(if at == 0 { "" } else { "," })?;
            match run {
                [one] => write!(f, "{one}")?,
                [first, .., last] => write!(f, "{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

fn help() -> String {
    let limit = CpuList::LIMIT;
    format!("is no list of processors: give numbers below {limit}, or a text such as \"0-3,8\"")
}
