//! The files of a store directory on real file systems.

mod common;

use std::fs;
use std::io::{ErrorKind as Os, IoSlice, IoSliceMut};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;

use tempfile::TempDir;
use tiered_kv_io::{AlignedBuf, Disk, PosixDisk};
use tiered_kv_types::ErrorKind;

fn open(dir: &Path) -> PosixDisk {
    PosixDisk::open(dir).expect("a writable directory")
}

/// The modes of the directory and all that is in it.
fn modes(dir: &Path) -> Vec<u32> {
    let files = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("entry").path());
    let mode = |path| fs::metadata(path).expect("exists").permissions().mode() & 0o7777;
    std::iter::once(dir.to_path_buf()).chain(files).map(mode).collect()
}

fn exercise(disk: &dyn Disk) {
    let len = 3 << 20;
    let (file, bytes) = {
        let file = disk.create("segment", len).expect("3 MiB");
        let (again, bytes) = disk.open("segment").expect("just made");
        assert_eq!(file, again);
        (file, bytes)
    };
    assert_eq!(bytes, len);
    let mut aligned = AlignedBuf::new(len as usize).expect("3 MiB");
    disk.read_at(file, 0, aligned.as_mut_slice()).expect("allocated files read as zeros");
    assert!(aligned.as_slice().iter().all(|&byte| byte == 0));
    let data = common::noise(len as usize, 1);
    aligned.as_mut_slice().copy_from_slice(&data);
    disk.write_at(file, 0, aligned.as_slice()).expect("aligned");
    disk.sync(file).expect("a healthy device");
    // Memory off the alignment goes through a copy, over several pieces.
    let mut shifted = vec![0; len as usize + 1];
    disk.read_at(file, 0, &mut shifted[1..]).expect("unaligned memory");
    assert!(shifted[1..] == data);
    let other = common::noise((2 << 20) + 4_096 + 1, 2);
    disk.write_at(file, 4_096, &other[1..]).expect("unaligned memory");
    disk.read_at(file, 0, aligned.as_mut_slice()).expect("whole");
    assert!(aligned.as_slice()[..4_096] == data[..4_096]);
    assert!(aligned.as_slice()[4_096..][..other.len() - 1] == other[1..]);
    assert!(aligned.as_slice()[4_096 + other.len() - 1..] == data[4_096 + other.len() - 1..]);
}

#[test]
fn several_ranges_are_read_and_written_as_one() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let file = disk.create("segment", 64 << 10).expect("64 KiB");
    let data = common::noise(40 << 10, 3);
    let mut bufs = [4_096, 12_288, 24_576].map(|len| AlignedBuf::new(len).expect("memory"));
    let mut at = 0;
    for buf in &mut bufs {
        let len = buf.as_slice().len();
        buf.as_mut_slice().copy_from_slice(&data[at..at + len]);
        at += len;
    }
    let mut parts = bufs.each_ref().map(|buf| IoSlice::new(buf.as_slice()));
    disk.write_vectored_at(file, 8_192, &mut parts).expect("within the file");
    let mut whole = AlignedBuf::new(64 << 10).expect("memory");
    disk.read_at(file, 0, whole.as_mut_slice()).expect("whole");
    assert!(whole.as_slice()[8_192..][..data.len()] == data);
    assert!(whole.as_slice()[8_192 + data.len()..].iter().all(|byte| *byte == 0));
    bufs.iter_mut().for_each(|buf| buf.as_mut_slice().fill(0));
    let mut parts = bufs.each_mut().map(|buf| IoSliceMut::new(buf.as_mut_slice()));
    disk.read_vectored_at(file, 8_192, &mut parts).expect("within the file");
    assert!(bufs.iter().flat_map(|buf| buf.as_slice()).eq(&data));

    let mut parts = bufs.each_ref().map(|buf| IoSlice::new(buf.as_slice()));
    let grows = disk.write_vectored_at(file, 32 << 10, &mut parts).expect_err("beyond the end");
    assert_eq!(grows.kind(), Os::UnexpectedEof);
    assert_eq!(fs::metadata(dir.path().join("segment")).expect("exists").len(), 64 << 10);
    let mut parts = bufs.each_mut().map(|buf| IoSliceMut::new(buf.as_mut_slice()));
    let short = disk.read_vectored_at(file, 32 << 10, &mut parts).expect_err("beyond the end");
    assert_eq!(short.kind(), Os::UnexpectedEof);
    let mut part = [IoSlice::new(&data[..100])];
    let off = disk.write_vectored_at(file, 0, &mut part);
    assert_eq!(off.is_err(), disk.is_direct(), "a length off the alignment");
}

#[test]
fn data_survives_aligned_and_unaligned_memory() {
    let dir = common::disk_dir();
    exercise(&open(dir.path()));
}

#[test]
fn beyond_the_end_and_after_removal_operations_fail() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let file = disk.create("segment", 8_192).expect("two pages");
    let mut buf = AlignedBuf::new(8_192).expect("two pages");
    let read = disk.read_at(file, 4_096, buf.as_mut_slice()).expect_err("one page is there");
    assert_eq!(read.kind(), Os::UnexpectedEof);
    let write = disk.write_at(file, 4_096, buf.as_slice()).expect_err("it would grow");
    assert_eq!(write.kind(), Os::UnexpectedEof);
    assert_eq!(fs::metadata(dir.path().join("segment")).expect("exists").len(), 8_192);
    disk.remove("segment").expect("exists");
    let gone = disk.read_at(file, 0, buf.as_mut_slice()).expect_err("removed");
    assert_eq!(gone.kind(), Os::NotFound);
    assert_eq!(disk.remove("segment").expect_err("removed").kind(), ErrorKind::NotFound);
    assert_eq!(disk.open("segment").expect_err("removed").kind(), ErrorKind::NotFound);
    let next = disk.create("segment", 4_096).expect("the name is free");
    assert_ne!(next, file, "an id is never used twice");
}

#[test]
fn case_9_a_truncated_file_is_an_error_not_a_short_read() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let file = disk.create("segment", 16_384).expect("four pages");
    let outside = fs::OpenOptions::new().write(true).open(dir.path().join("segment"));
    let mut buf = AlignedBuf::new(16_384).expect("four pages");
    for len in [8_192, 5_000] {
        outside.as_ref().expect("exists").set_len(len).expect("shrinks");
        let err = disk.read_at(file, 0, buf.as_mut_slice()).expect_err("half is there");
        assert_eq!(err.kind(), Os::UnexpectedEof, "{len}");
    }
}

/// Whether a descriptor of this process on `name` has O_DIRECT.
fn opened_direct(name: &Path) -> bool {
    const O_DIRECT: u32 = 0o40000;
    let fds = fs::read_dir("/proc/self/fd").expect("Linux");
    let fds = fds.map(|entry| entry.expect("entry").path());
    let fd = fds.into_iter().find(|fd| fs::read_link(fd).is_ok_and(|target| target == name));
    let number = fd.expect("the file is open").file_name().expect("a number").to_owned();
    let info = fs::read_to_string(Path::new("/proc/self/fdinfo").join(number)).expect("open");
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
    u32::from_str_radix(flags.trim(), 8).expect("octal") & O_DIRECT != 0
}

#[test]
fn what_is_said_of_direct_io_is_what_is_done() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let file = disk.create("segment", 8_192).expect("two pages");
    let path = dir.path().canonicalize().expect("exists").join("segment");
    assert_eq!(opened_direct(&path), disk.is_direct(), "{}", disk.direct_reason());
    assert_eq!(disk.direct_reason().starts_with("O_DIRECT"), disk.is_direct());
    let unit = disk.alignment().offset as usize;
    assert_eq!(unit > 1, disk.is_direct());
    if disk.is_direct() {
        let mut buf = vec![0; 4_096];
        let off = disk.read_at(file, unit as u64 / 2, &mut buf).expect_err("offset");
        assert_eq!(off.kind(), Os::InvalidInput);
        let off = disk.write_at(file, 0, &buf[..unit / 2]).expect_err("length");
        assert_eq!(off.kind(), Os::InvalidInput);
        disk.write_at(file, unit as u64, &buf[..unit]).expect("on the device's own alignment");
    }
}

#[test]
fn on_tmpfs_files_are_buffered_and_the_reason_is_given() {
    let dir = TempDir::new_in("/dev/shm").expect("Linux has /dev/shm");
    let disk = open(dir.path());
    assert!(!disk.is_direct());
    assert!(disk.direct_reason().contains("tmpfs"), "{}", disk.direct_reason());
    exercise(&disk);
    disk.write_file("small", b"x").expect("space");
    disk.remove("small").expect("exists");
    assert!(!opened_direct(&dir.path().join("segment")));
}

#[test]
fn small_files_are_replaced_whole() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    assert_eq!(disk.read_file("state", 10).expect("no file is no error"), None);
    disk.write_file("state", b"first").expect("space");
    disk.write_file("state", b"second").expect("space");
    assert_eq!(disk.read_file("state", 6).expect("fits").as_deref(), Some(&b"second"[..]));
    let err = disk.read_file("state", 5).expect_err("over the bound");
    assert_eq!(err.kind(), ErrorKind::FormatMismatch);
    assert!(err.context().contains("state"), "{err}");
    disk.write_file("state", b"").expect("space");
    assert_eq!(disk.read_file("state", 0).expect("fits").as_deref(), Some(&b""[..]));
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1, "scratch files stay");
}

#[test]
fn the_list_has_the_bytes_that_files_occupy() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    disk.create("b", 1 << 20).expect("1 MiB");
    disk.write_file("a", b"x").expect("space");
    fs::create_dir(dir.path().join("sub")).expect("a directory");
    symlink("a", dir.path().join("link")).expect("a link");
    let blocks = |name| fs::metadata(dir.path().join(name)).expect("exists").blocks() * 512;
    let list = disk.list().expect("readable");
    assert_eq!(list, [("a".to_owned(), blocks("a")), ("b".to_owned(), blocks("b"))]);
    assert!(list[1].1 >= 1 << 20, "a created file is allocated: {list:?}");
}

#[test]
fn files_are_private_and_so_is_the_directory() {
    let dir = common::disk_dir();
    let store = dir.path().join("store");
    let disk = open(&store);
    disk.create("segment", 4_096).expect("a page");
    disk.write_file("state", b"x").expect("space");
    assert_eq!(modes(&store), [0o700, 0o600, 0o600]);
}

#[test]
fn links_and_pipes_in_the_place_of_files_are_refused() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let outside = common::disk_dir();
    fs::write(outside.path().join("victim"), b"secret").expect("space");
    symlink(outside.path().join("victim"), dir.path().join("link")).expect("a link");
    let made = std::process::Command::new("mkfifo").arg(dir.path().join("pipe")).status();
    assert!(made.expect("coreutils").success());
    for name in ["link", "pipe"] {
        disk.read_file(name, 100).expect_err(name);
        disk.open(name).expect_err(name);
        disk.create(name, 4_096).expect_err(name);
    }
    disk.write_file("link", b"x").expect("replaces the link, not its target");
    assert_eq!(fs::read(outside.path().join("victim")).expect("exists"), b"secret");
    for name in ["../victim", ".hidden", ""] {
        let err = disk.write_file(name, b"x").expect_err(name);
        assert_eq!(err.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_file_that_does_not_fit_leaves_nothing() {
    let dir = common::disk_dir();
    let disk = open(dir.path());
    let err = disk.create("segment", 1 << 60).expect_err("no device is that large");
    assert_eq!(err.kind(), ErrorKind::NoSpace);
    assert!(err.context().contains("nvme_capacity"), "{err}");
    assert_eq!(disk.list().expect("readable"), []);
    disk.create("segment", 4_096).expect("the name is free");
    let err = disk.create("segment", 4_096).expect_err("it exists");
    assert_eq!(err.kind(), ErrorKind::Io);
    assert_eq!(disk.list().expect("readable").len(), 1, "the old file must stay");
}

#[test]
fn an_allocation_that_fails_half_way_leaves_nothing() {
    let test = "an_allocation_that_fails_half_way_leaves_nothing";
    if let Some(path) = common::child_path() {
        let disk = open(&path);
        let err = disk.create("segment", 64 << 20).expect_err("over the limit of the shell");
        assert_eq!(err.kind(), ErrorKind::NoSpace);
        assert_eq!(disk.list().expect("readable"), []);
        return;
    }
    let dir = common::disk_dir();
    let own = common::child(test, dir.path());
    // The limit of a file's size makes the system refuse what the free space would allow.
    let output = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 16384; exec \"$@\"", "sh"])
        .arg(own.get_program())
        .args(own.get_args())
        .envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .output()
        .expect("a shell");
    common::assert_child_passed(&output);
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
}

#[test]
fn scratch_files_of_a_crash_are_deleted_at_open() {
    let dir = common::disk_dir();
    fs::write(dir.path().join(".tmp-state"), b"half").expect("space");
    fs::write(dir.path().join("state"), b"whole").expect("space");
    let disk = open(dir.path());
    assert!(!dir.path().join(".tmp-state").exists());
    assert_eq!(disk.read_file("state", 9).expect("fits").as_deref(), Some(&b"whole"[..]));
}

#[test]
fn paths_that_are_no_directory_are_refused_by_field() {
    let dir = common::disk_dir();
    let file = dir.path().join("file");
    fs::write(&file, b"x").expect("space");
    for (path, kind, remedy) in [
        (file.clone(), ErrorKind::Config, "name a directory"),
        (file.join("below"), ErrorKind::Config, "name a directory"),
        (dir.path().join("absent/store"), ErrorKind::NotFound, "create its parent"),
    ] {
        let err = PosixDisk::open(&path).err().expect("not a directory");
        assert_eq!(err.kind(), kind, "{err}");
        assert!(err.context().starts_with("nvme_paths: "), "{err}");
        assert!(err.context().contains(remedy), "{err}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_refused_by_field() {
    const NOBODY: u32 = 65_534;
    let test = "a_directory_that_cannot_be_written_is_refused_by_field";
    if let Some(path) = common::child_path() {
        let err = PosixDisk::open(&path).err().expect("read-only");
        assert_eq!(err.kind(), ErrorKind::Permission, "{err}");
        assert!(
            err.context().contains("nvme_paths") && err.context().contains("writable"),
            "{err}"
        );
        return;
    }
    // Root may write anywhere, so the check runs as nobody, from where nobody can read it.
    let dir = TempDir::new().expect("a temporary directory");
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("own file");
    };
    mode(dir.path(), 0o755);
    let store = dir.path().join("store");
    fs::create_dir(&store).expect("space");
    mode(&store, 0o555);
    let program = dir.path().join("test");
    let own = common::child(test, &store);
    fs::copy(own.get_program(), &program).expect("space");
    mode(&program, 0o755);
    let mut child = std::process::Command::new(&program);
    child.args(own.get_args()).current_dir("/");
    child.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if fs::metadata("/proc/self").expect("Linux").uid() == 0 {
        child.uid(NOBODY).gid(NOBODY);
    }
    let output = child.output().expect("the child starts");
    common::assert_child_passed(&output);
}
