//! The owner's socket: bytes from a peer end at most that peer's connection.

use crate::seeds::framed;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tempfile::TempDir;
use tiered_kv::fuzzing::message_seeds;
use tiered_kv::io_seams::SOCKET_NAME;
use tiered_kv::{Store, StoreConfig};

struct Listening {
    store: Arc<Store>,
    path: PathBuf,
    _dir: TempDir,
}

fn listening() -> &'static Listening {
    static LISTENING: OnceLock<Listening> = OnceLock::new();
    LISTENING.get_or_init(|| {
        let dir = TempDir::new().expect("a directory");
        let path = dir.path().join("kv");
        let config = StoreConfig {
            dram_capacity: Some(1 << 20),
            nvme_paths: vec![path.clone()],
            nvme_capacity: 1 << 20,
            huge_pages: false,
            ..StoreConfig::default()
        };
        Listening { store: Store::open(&config).expect("opens"), path, _dir: dir }
    })
}

/// The bytes as one peer sends them, behind a sound greeting where their first is odd.
pub(crate) fn socket(data: &[u8]) {
    let Listening { store, path, .. } = listening();
    let mut peer = connect(path);
    if data.first().is_some_and(|first| first % 2 == 1) {
        // The owner may have gone away from a peer like this, here and below.
        let _ = greet(&mut peer);
    }
    let _ = peer.write_all(data);
    let _ = peer.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match peer.read_to_end(&mut answers) {
        Err(err) if err.kind() == ErrorKind::WouldBlock => {
            panic!("the owner keeps a peer that will say no more");
        }
        _ => {}
    }
    if data.len().is_multiple_of(8) {
        let mut other = connect(path);
        greet(&mut other).expect("the owner listens");
        let mut welcome = [0; 5];
        other.read_exact(&mut welcome).expect("others are served");
    }
    assert!(!store.is_closed());
}

fn connect(dir: &Path) -> UnixStream {
    let peer = UnixStream::connect(dir.join(SOCKET_NAME)).expect("somebody listens");
    peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    peer
}

fn greet(peer: &mut UnixStream) -> std::io::Result<()> {
    peer.write_all(&framed(&message_seeds()[0]))
}
