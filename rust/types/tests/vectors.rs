//! The shared key vectors, which Python checks with the core and without it.
#![allow(clippy::unwrap_used, reason = "a vector that does not read as one fails the test")]

use serde_json::Value;
use std::collections::BTreeMap;
use tiered_kv_types::{BlockKey, KvLayout, NamespaceSpec, hex, key};

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn unhex(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn spec(fields: &Value) -> NamespaceSpec {
    let layout = &fields["layout"];
    let number = |name: &str| layout[name].as_u64().unwrap();
    let slabs = layout["slab_bytes"].as_array().unwrap();
    let layout = KvLayout::grid(
        number("tokens_per_block") as u32,
        number("layer_groups") as u16,
        number("head_groups") as u16,
        slabs.iter().map(|bytes| bytes.as_u64().unwrap()).collect(),
    );
    let rope = fields["rope"].as_object().unwrap();
    NamespaceSpec {
        model: text(&fields["model"]),
        weights: text(&fields["weights"]),
        kv_dtype: text(&fields["kv_dtype"]),
        layout: layout.unwrap(),
        rope: rope.iter().map(|(k, v)| (k.clone(), text(v))).collect::<BTreeMap<_, _>>(),
        lora: text(&fields["lora"]),
        salt: text(&fields["salt"]),
        parallel: text(&fields["parallel"]),
        engine: text(&fields["engine"]),
    }
}

#[test]
fn the_vectors_hold() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/keys.json");
    let all: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    for case in cases {
        let spec = spec(&case["spec"]);
        let id = spec.id().unwrap();
        assert_eq!(hex(&id.0), text(&case["id"]));
        for sequence in case["sequences"].as_array().unwrap() {
            let tokens = sequence["tokens"].as_array().unwrap();
            let tokens: Vec<u32> = tokens.iter().map(|t| t.as_u64().unwrap() as u32).collect();
            let parent = sequence["parent"].as_str();
            let parent = parent.map(|_| BlockKey(unhex(&sequence["parent"]).try_into().unwrap()));
            let tail = sequence["tail"].as_bool().unwrap();
            let per_block = spec.layout.tokens_per_block();
            let keys = key::keys_from_tokens(&id, parent, &tokens, per_block, tail);
            let expected: Vec<String> =
                sequence["keys"].as_array().unwrap().iter().map(text).collect();
            assert_eq!(keys.iter().map(|k| hex(&k.0)).collect::<Vec<_>>(), expected);
        }
        for entry in case["opaque"].as_array().unwrap() {
            let key = key::key_from_opaque(&id, &unhex(&entry["opaque"])).unwrap();
            assert_eq!(hex(&key.0), text(&entry["key"]));
        }
    }
}
