//! The configuration: TOML text, and sizes.

use tiered_kv_types::StoreConfig;
use tiered_kv_types::config::parse_size;

/// A configuration that is taken is sound, and the same after it was written out and read again;
/// one that is not says why in a line or with a picture of the place.
pub(crate) fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(bytes) = parse_size(&text) {
        assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
    }
    // The first line also as an environment variable that overrides a field.
    let env = text.lines().next().and_then(|line| line.split_once('='));
    let env = env.map(|(name, value)| {
        (format!("TIERED_KV_{}", name.trim().to_ascii_uppercase()), value.trim().to_owned())
    });
    for env in [None, env] {
        match StoreConfig::from_toml(&text, env) {
            Ok(config) => {
                config.check().expect("what was read was checked");
                // Bytes over 2^63 cannot be written as TOML.
                let Ok(table) = config.to_table() else { continue };
                let written = toml::to_string(&table).expect("a table is text");
                let again = StoreConfig::from_toml(&written, []).expect("it was just written");
                assert_eq!(again, config);
            }
            Err(err) => assert!(!err.to_string().is_empty()),
        }
    }
}
