//! Sizes: integers of bytes, or text such as `"512MiB"`.

use serde::{Deserialize, Deserializer};

/// Parses `"512MiB"`, `"4 GiB"`, `"1TB"` or `"4096"` into bytes.
///
/// # Errors
/// A text that says what is accepted.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(size_help(text)),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| size_help(text));
    }
    match number.parse::<f64>() {
        Ok(value) if value.is_finite() && value * (scale as f64) < 9.0e18 => {
            Ok((value * scale as f64) as u64)
        }
        _ => Err(size_help(text)),
    }
}

fn size_help(text: &str) -> String {
    format!("is not a size: {text:?}; give bytes, or a number with B, KiB, MiB, GiB or TiB")
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SizeText {
    Number(u64),
    Text(String),
}

pub(crate) fn de_size<'de, D: Deserializer<'de>>(de: D) -> std::result::Result<u64, D::Error> {
    match SizeText::deserialize(de) {
        Ok(SizeText::Number(bytes)) => Ok(bytes),
        Ok(SizeText::Text(text)) => parse_size(&text).map_err(serde::de::Error::custom),
        Err(_) => Err(serde::de::Error::custom("is not a size: give bytes >= 0 or \"512MiB\"")),
    }
}

pub(crate) fn de_size_opt<'de, D: Deserializer<'de>>(
    de: D,
) -> std::result::Result<Option<u64>, D::Error> {
    de_size(de).map(Some)
}
