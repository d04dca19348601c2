"""Fork under load: the child's calls raise, its drops do nothing, and the parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = textwrap.dedent(
    """
    import os, sys, threading
    from tiered_kv import ClosedError, KvLayout, NamespaceSpec, StoreConfig
    from tiered_kv.blocking import TieredStore

    BLOCK = 65536
    config = StoreConfig(dram_capacity="16MiB", nvme_paths=[sys.argv[1]], nvme_capacity="64MiB")
    spec = NamespaceSpec(model="m", weights="w", kv_dtype="uint8",
                         layout=KvLayout(tokens_per_block=4, block_bytes=BLOCK))
    store = TieredStore.open(config)
    ns = store.namespace(spec)
    stop = threading.Event()
    failures = []

    def load(path):
        turn = 0
        while not stop.is_set():
            turn += 1
            keys = ns.keys_from_tokens(range(path * 1000 + turn % 7 * 100, path * 1000 + turn % 7 * 100 + 16))
            store.put(ns, keys, bytes([path]) * (4 * BLOCK))
            with store.get(ns, keys) as leases:
                for view in leases:
                    if view is not None and bytes(view[:64]) != bytes([path]) * 64:
                        failures.append(path)

    threads = [threading.Thread(target=load, args=(path,)) for path in (1, 2)]
    for thread in threads:
        thread.start()
    keys = ns.keys_from_tokens(range(9000, 9016))
    store.put(ns, keys, b"k" * (4 * BLOCK))
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                for call in (
                    lambda: store.get(ns, keys),
                    lambda: store.put(ns, keys, b"c" * (4 * BLOCK)),
                    lambda: store.flush(),
                    lambda: store.namespace(spec),
                ):
                    try:
                        call()
                    except ClosedError:
                        continue
                    os._exit(3)
                store.close()
                del store
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(4)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print("child", status, file=sys.stderr, flush=True)
            os._exit(5)
    stop.set()
    for thread in threads:
        thread.join()
    with store.get(ns, keys) as leases:
        assert leases.hits == 4, leases.reasons
    assert not failures, failures
    assert store.audit()["faults"] == []
    store.close()
    again = TieredStore.open(config)
    assert again.lookup(again.namespace(spec), keys).hits in (0, 4)
    again.close()
    print("parent went on")
    """
)


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "forker.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "parent went on" in done.stdout
