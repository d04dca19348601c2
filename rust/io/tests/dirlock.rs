//! One owner a directory, and the second one is told who the first is.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use tiered_kv_io::DirLock;
use tiered_kv_types::{ErrorKind, Retry};

#[test]
fn a_second_lock_in_this_process_is_refused() {
    let dir = common::disk_dir();
    let lock = DirLock::acquire(dir.path()).expect("nobody has it");
    let err = DirLock::acquire(dir.path()).expect_err("this process has it");
    assert_eq!((err.kind(), err.retry()), (ErrorKind::InUse, Retry::Later));
    assert!(err.context().contains("this process (pid "), "{err}");
    assert!(err.context().contains("close that store"), "{err}");
    drop(lock);
    DirLock::acquire(dir.path()).expect("dropping it unlocks");
}

#[test]
fn the_directory_and_the_lock_are_private() {
    let dir = common::disk_dir();
    let store = dir.path().join("store");
    let _lock = DirLock::acquire(&store).expect("makes the directory");
    let mode = |path| std::fs::metadata(path).expect("exists").permissions().mode() & 0o7777;
    assert_eq!(mode(store.clone()), 0o700);
    assert_eq!(mode(store.join("LOCK")), 0o600);
}

#[test]
fn the_owner_is_named_to_another_process_and_its_death_unlocks() {
    let test = "the_owner_is_named_to_another_process_and_its_death_unlocks";
    if let Some(path) = common::child_path() {
        let _lock = DirLock::acquire(&path).expect("nobody has it");
        std::io::stdout().write_all(b"locked\n").expect("the parent reads");
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let dir = common::disk_dir();
    let mut owner = common::child(test, dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the child starts");
    let output = BufReader::new(owner.stdout.take().expect("piped"));
    let locked = output.lines().any(|line| line.expect("text").ends_with("locked"));
    assert!(locked, "the child has no lock");
    let err = DirLock::acquire(dir.path()).expect_err("the child has it");
    assert_eq!(err.kind(), ErrorKind::InUse);
    let pid = format!("another process (pid {}, ", owner.id());
    assert!(err.context().contains(&pid), "{err}");
    let command = std::env::current_exe().expect("a path");
    let command = command.file_stem().expect("a name").to_string_lossy().into_owned();
    let shown = err.context();
    assert!(shown.contains(&command[..7]) && shown.contains(", since 20"), "{shown}");
    owner.kill().expect("it runs");
    owner.wait().expect("it was killed");
    DirLock::acquire(dir.path()).expect("the kernel unlocks when the owner dies");
}

#[test]
fn a_hostile_lock_file_is_quoted_safely() {
    let dir = common::disk_dir();
    let _lock = DirLock::acquire(dir.path()).expect("nobody has it");
    let mut file = std::fs::File::create(dir.path().join("LOCK")).expect("the owner may");
    file.write_all(&b"pid 1\x1b[31m, evil\n".repeat(4_000)).expect("space");
    let err = DirLock::acquire(dir.path()).expect_err("locked");
    assert_eq!(err.kind(), ErrorKind::InUse);
    assert!(err.context().len() < 1_500 && !err.context().contains('\x1b'), "{err}");
}

#[test]
fn a_directory_without_parent_is_refused_with_the_field() {
    let dir = common::disk_dir();
    let err = DirLock::acquire(&dir.path().join("a/b")).expect_err("no parent");
    assert_eq!(err.kind(), ErrorKind::NotFound);
    assert!(err.context().contains("nvme_paths") && err.context().contains("create"), "{err}");
}
