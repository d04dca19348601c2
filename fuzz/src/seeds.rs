//! What the corpus begins with: what a store has written.

use crate::directory::{Image, base};
use tiered_kv::fuzzing::message_seeds;
use tiered_kv_types::StoreConfig;

/// The identity of the store that the corpus is of.
pub const STORE: [u8; 16] = [0x5a; 16];

const CONFIGS: [&str; 4] = [
    "dram_capacity = \"512MiB\"\nnvme_paths = [\"/a\", \"/b\"]\nnvme_capacity = \"4 GiB\"\n",
    "load_threads = 3\nio_backend = \"io_uring\"\non_format_mismatch = \"reset\"\nhuge_pages=true",
    "dram_capacity = 0\nnvme_paths = \"x\"\nnvme_capacity = 1048576\nsegment_bytes = \"64k\"",
    "1.5GiB",
];

const TRACES: [&str; 4] = [
    "{\"timestamp\":1.5,\"session_id\":\"a\",\"type\":\"agent\",\"input_length\":70,\
     \"output_length\":20,\"block_size\":16,\"hash_runs\":[[100,2],[7,2]],\
     \"out_hash_runs\":[[50,1]]}\n{\"timestamp\":2,\"session_id\":\"a\",\"type\":\"mine\",\
     \"block_size\":16,\"hash_runs\":[[100,2],[7,2],[50,1]]}\n",
    "{\"timestamp\":0,\"input_length\":1000,\"output_length\":5,\"hash_ids\":[0,1]}\n\
     {\"timestamp\":3000,\"input_length\":600,\"output_length\":5,\"hash_ids\":[0,2]}\n",
    "{\"chat_id\":1,\"parent_chat_id\":-1,\"timestamp\":0.5,\"type\":\"text\",\
     \"hash_ids\":[1,2]}\n{\"chat_id\":2,\"parent_chat_id\":1,\"timestamp\":1.5,\
     \"type\":\"text\",\"hash_ids\":[1,2,3]}\n",
    "{\"timestamp\":1.5,\"request_id\":\"a\",\"model_name\":\"m\",\"chunk_size\":128,\
     \"seq_len\":300,\"chunk_hashes\":[\"0xaa\",\"0xbb\"]}\n\
     {\"timestamp\":2,\"lookup_id\":\"b\",\"chunk_size\":128,\"chunk_hashes\":[\"0xaa\"]}\n",
];

/// The inputs that a target's corpus begins with.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let image = base();
    let segment = || image.file("segment-000000.tkv");
    let first = |bytes: &[u8], len: usize| bytes[..len.min(bytes.len())].to_vec();
    match target {
        "record" => {
            let table = &segment()[4096..];
            table.chunks_exact(512).filter(|r| r.iter().any(|b| *b != 0)).map(Vec::from).collect()
        }
        "segment" => vec![first(segment(), 4096)],
        "superblock" => vec![image.file("superblock.tkv").to_vec()],
        "checkpoint" => vec![image.file("checkpoint.tkv").to_vec()],
        "journal" => vec![first(image.file("journal.tkv"), 4096)],
        "config" => {
            let full = StoreConfig { dram_capacity: Some(1 << 20), ..StoreConfig::default() };
            let table = full.to_table().expect("the defaults are representable");
            let text = toml::to_string(&table).expect("a table is text");
            CONFIGS.iter().map(|text| text.as_bytes().to_vec()).chain([text.into()]).collect()
        }
        "keys" => vec![vec![7; 64], (0..99).collect(), [&[8, 0, 1][..], &[5; 64]].concat()],
        "messages" => message_seeds(),
        "socket" => vec![message_seeds().iter().flat_map(|message| framed(message)).collect()],
        "directory" => edits(&image),
        "trace" => TRACES.iter().map(|text| text.as_bytes().to_vec()).collect(),
        _ => Vec::new(),
    }
}

/// A message as it goes over the wire.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let len = u32::try_from(message.len()).expect("short").to_le_bytes();
    [&len[..], message].concat()
}

/// Scripts of a change to each of the files.
fn edits(image: &Image) -> Vec<Vec<u8>> {
    (0..image.files.len() as u8)
        .flat_map(|file| [vec![0, file, 16, 0, 0, 0, 4, 1, 2, 3, 4], vec![1, file, 0, 8, 0, 0]])
        .collect()
}
