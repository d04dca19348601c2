//! One schema: text, environment and defaults; bad input names the field and the remedy.

use tiered_kv_types::config::parse_size;
use tiered_kv_types::{CpuList, ErrorKind, IoBackend, StoreConfig};

fn parse(text: &str) -> tiered_kv_types::Result<StoreConfig> {
    StoreConfig::from_toml(text, [])
}

#[test]
fn sizes_read_as_people_write_them() {
    for (text, bytes) in [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("4 GiB", 4 << 30),
        ("1.5KiB", 1536),
        ("1TB", 1_000_000_000_000),
        ("2g", 2 << 30),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
    for text in ["", "MiB", "-1", "1 XB", "1e400", "99999999999999999999", "18446744073709551615K"]
    {
        assert!(parse_size(text).is_err(), "{text}");
    }
}

#[test]
fn text_and_environment_make_one_configuration() {
    let text = "dram_capacity = \"64MiB\"\nnvme_paths = \"kv\"\nnvme_capacity = \"1GiB\"";
    let env = [
        ("TIERED_KV_NVME_CAPACITY".to_owned(), "2GiB".to_owned()),
        ("TIERED_KV_LOAD_TIMEOUT_S".to_owned(), "2.5".to_owned()),
        ("TIERED_KV_TRACEBACK".to_owned(), "1".to_owned()),
        ("HOME".to_owned(), "/".to_owned()),
    ];
    let config = StoreConfig::from_toml(text, env).expect("valid");
    assert_eq!(config.dram_capacity, Some(64 << 20));
    assert_eq!(config.nvme_paths, [std::path::PathBuf::from("kv")]);
    assert_eq!(config.nvme_capacity, 2 << 30, "the environment wins");
    assert!((config.load_timeout_s - 2.5).abs() < 1e-9);
}

#[test]
fn bad_input_names_the_field() {
    for (text, field) in [
        ("dram_capcity = 1", "dram_capcity"),
        ("dram_capacity = \"lots\"", "dram_capacity"),
        ("dram_capacity = -5", "dram_capacity"),
        ("dram_capacity = 0", "dram_capacity"),
        ("dram_capacity = 0\nnvme_capacity = 0", "nvme_capacity"),
        (
            "dram_capacity = 0\nstaging_capacity = 5\nnvme_paths = \"a\"\nnvme_capacity = \"1GiB\"",
            "staging_capacity",
        ),
        ("nvme_capacity = \"1GiB\"", "nvme_paths"),
        ("nvme_paths = [\"a\"]", "nvme_capacity"),
        ("nvme_paths = [\"a\", \"a\"]\nnvme_capacity = \"1GiB\"", "nvme_paths"),
        ("nvme_paths = \"a\"\nnvme_capacity = 5", "nvme_capacity"),
        ("dram_capacity = 4096", "dram_capacity"),
        ("max_leased_fraction = 0.0", "max_leased_fraction"),
        ("dirty_high_fraction = 1.5", "dirty_high_fraction"),
        ("load_timeout_s = nan", "load_timeout_s"),
        ("close_timeout_s = -1.0", "close_timeout_s"),
        ("load_threads = 0", "load_threads"),
        ("segment_bytes = 5000", "segment_bytes"),
        ("on_format_mismatch = \"ignore\"", "on_format_mismatch"),
        ("cpus = []", "cpus"),
        ("cpus = [1024]", "cpus"),
        ("cpus = -1", "cpus"),
        ("cpus = \"4-2\"", "cpus"),
    ] {
        let error = parse(text).expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Config, "{text}");
        assert!(error.to_string().contains(field), "{text}: {error}");
    }
}

#[test]
fn segments_are_an_eighth_of_the_capacity_up_to_256_mib() {
    let config = StoreConfig::default();
    assert_eq!(config.segment_bytes_for(1 << 30), 128 << 20);
    assert_eq!(config.segment_bytes_for(1 << 40), 256 << 20);
    assert_eq!(config.segment_bytes_for(512 << 10), 64 << 10);
}

#[test]
fn the_io_backend_is_found_out_unless_one_is_named() {
    assert_eq!(StoreConfig::default().io_backend, IoBackend::Auto);
    const BASE: &str = "dram_capacity = \"64MiB\"\n";
    for (text, backend) in [
        ("auto", IoBackend::Auto),
        ("io_uring", IoBackend::IoUring),
        ("blocking", IoBackend::Blocking),
    ] {
        let text = format!("{BASE}io_backend = {text:?}");
        assert_eq!(parse(&text).expect(&text).io_backend, backend);
    }
    let env = [("TIERED_KV_IO_BACKEND".to_owned(), "blocking".to_owned())];
    let config = StoreConfig::from_toml(BASE, env).expect("valid");
    assert_eq!(config.io_backend, IoBackend::Blocking);
    let err = parse(&format!("{BASE}io_backend = \"uring\"")).expect_err("no such backend");
    assert_eq!(err.kind(), ErrorKind::Config);
    for part in ["io_backend", "auto", "io_uring", "blocking"] {
        assert!(err.context().contains(part), "{err}");
    }
}

#[test]
fn processors_are_written_as_they_are_read() {
    for (numbers, text) in
        [(&[4_u16][..], "4"), (&[2, 0, 1, 2], "0-2"), (&[9, 3, 5, 4, 1023], "3-5,9,1023")]
    {
        let list = CpuList::new(numbers.iter().copied()).expect("valid");
        assert_eq!(list.to_string(), text);
        let read = parse(&format!("cpus = {text:?}")).expect(text);
        assert_eq!(read.cpus, Some(list));
        let table = read.to_table().expect("representable");
        assert_eq!(StoreConfig::from_table(table, []).expect("valid").cpus, read.cpus);
    }
    assert!(CpuList::new([]).is_err() && CpuList::new([1024]).is_err());
}
