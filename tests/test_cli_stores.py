"""The operators' commands on real directories: closed, live in another process, damaged, wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import api
import test_api_attach as attach
from tiered_kv import RequestContext, _core, cli
from tiered_kv.blocking import BlockingStore
from tiered_kv.cli.exits import ExitCode

OTHER: dict[str, Any] = {"weights": "others", "salt": "secret"}
OWNER = """
from tiered_kv import RequestContext
with BlockingStore.open(**api.config(path)) as store:
    ns = store.namespace(api.spec())
    other = store.namespace(api.spec(weights="others", salt="secret"))
    req = store.begin_request(RequestContext(tenant="acme"))
    store.put(ns, ns.keys_from_tokens(api.tokens(4)), api.blocks(4))
    store.put(other, other.keys_from_tokens(api.tokens(6)), api.blocks(6), req=req)
    assert store.flush().all_durable
    store.delete(ns, ns.keys_from_tokens(api.tokens(4))[96:])
    store.set_quota(other, nvme_bytes=1 << 20)
    print("ready", flush=True)
    input()
"""


def fill(path: Path) -> tuple[bytes, bytes]:
    """A closed store as `OWNER` leaves it, but for its deletes; keys of both namespaces."""
    with BlockingStore.open(**api.config(path)) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(**OTHER))
        req = store.begin_request(RequestContext(tenant="acme"))
        keys, others = (space.keys_from_tokens(api.tokens(6)) for space in (ns, other))
        store.put(ns, keys[:128], api.blocks(4))
        store.put(other, others, api.blocks(6), req=req)
        assert store.flush().all_durable
        return keys[:128], others


def run(*args: object, expect: int = ExitCode.OK) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiered_kv", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == expect, (args, done.stdout, done.stderr)
    return done


def answer(capsys: pytest.CaptureFixture[str], *args: object, expect: int = ExitCode.OK) -> Any:
    """One document of a command, which runs in this process."""
    assert cli.main([*map(str, args), "--json"]) == expect, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def error(capsys: pytest.CaptureFixture[str], *args: object, expect: int = ExitCode.USAGE) -> str:
    """The one line of a command that fails."""
    assert cli.main([*map(str, args)]) == expect
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def snapshot(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}


def identity(**fields: Any) -> str:
    return _core.describe_spec(api.spec(**fields).canonical())[0].hex()


def test_a_closed_store_is_listed_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, _ = fill(tmp_path)
    before = snapshot(tmp_path)
    found = answer(capsys, "ls", "--dir", tmp_path)
    assert (found["live"], found["missing_drives"]) == (False, [])
    assert found["drives"][0]["checkpoint"] == "sound"
    rows = {row["namespace"]: row for row in found["namespaces"]}
    other = rows[identity(**OTHER)]
    assert (other["blocks"], other["bytes"]) == (6, 6 * api.BLOCK_BYTES)
    assert (other["nvme_bytes"], other["dram_bytes"]) == (6 * 8192, 0)
    assert other["fields"]["weights"] == "others"
    assert "secret" not in json.dumps(found)
    assert other["tenants"] == [_core.tenant_digest("acme").hex()]
    assert rows[identity()]["tenants"] == [None]
    assert other["oldest_unix_ns"] == other["newest_unix_ns"] > 0
    blocks = answer(capsys, "ls", "--blocks", "--dir", tmp_path, "--tenant", "acme")
    assert sorted(row["depth"] for row in blocks["blocks"]) == list(range(6))
    short = identity()[:8]
    some = answer(capsys, "ls", "--blocks", "--dir", tmp_path, "--namespace", short, "--limit", 3)
    assert (len(some["blocks"]), some["truncated"]) == (3, True)
    one = answer(capsys, "inspect", keys[:32].hex()[:12], "--dir", tmp_path)
    assert [row["key"] for row in one["blocks"]] == [keys[:32].hex()]
    assert one["blocks"][0]["slabs"][0]["bytes"] == api.BLOCK_BYTES
    assert answer(capsys, "inspect", "00" * 32, "--dir", tmp_path, expect=1)["blocks"] == []
    assert snapshot(tmp_path) == before


def test_people_see_tables_with_nothing_cut_off(tmp_path: Path) -> None:
    keys, _ = fill(tmp_path)
    listed = run("ls", "--dir", tmp_path).stdout
    for text in (identity()[:16], identity(**OTHER)[:16], "48.0 KiB", "closed", "model"):
        assert text in listed
    assert "…" not in listed
    assert keys[:32].hex()[:16] in run("ls", "--blocks", "--dir", tmp_path).stdout
    shown = run("inspect", keys[:32].hex(), "--dir", tmp_path).stdout
    for text in (keys[:32].hex(), "durable", "crc32c", "segment 0 slot"):
        assert text in shown
    assert "everything is sound" in run("verify", "--dir", tmp_path).stdout


def test_a_live_store_answers_through_its_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with attach.other(OWNER, tmp_path):
        found = answer(capsys, "ls", "--dir", tmp_path)
        assert (found["live"], found["drives"]) == (True, [])
        rows = {row["namespace"]: row for row in found["namespaces"]}
        other = rows[identity(**OTHER)]
        assert (other["dram_blocks"], other["nvme_blocks"]) == (6, 6)
        assert other["nvme_quota_bytes"] == 1 << 20
        assert rows[identity()]["blocks"] == 3
        for command in ("verify", "resize"):
            args = ["1GiB"] if command == "resize" else []
            text = error(capsys, command, *args, "--dir", tmp_path, expect=ExitCode.STORE)
            assert "close that store first" in text
        prompt = tmp_path / "prompt.txt"
        prompt.write_text(" ".join(map(str, api.tokens(4))))
        asked = ("explain", "--dir", tmp_path, "--namespace", identity(), "--tokens", prompt)
        told = answer(capsys, *asked, expect=ExitCode.FAILED)
        assert (told["hits"], told["keys"][3]["cause"]) == (3, "deleted")
        assert told["complete"]
        gone = answer(capsys, "clear", "--tenant", "acme", "--dir", tmp_path, "--yes")
        assert (gone["live"], gone["removed"], gone["durable"]) == (True, 6, True)
        left = answer(capsys, "ls", "--blocks", "--dir", tmp_path)["blocks"]
        assert {row["namespace"] for row in left} == {identity()}
        gone = answer(capsys, "clear", "--older-than", "0s", "--dir", tmp_path, "--yes")
        assert (gone["removed"], gone["durable"]) == (3, True)
    # Killed: what was cleared does not come back.
    assert answer(capsys, "ls", "--blocks", "--dir", tmp_path)["blocks"] == []


@pytest.mark.parametrize(
    ("criteria", "left"),
    [
        (["--namespace", identity()], [0, 6]),
        (["--tenant", "acme"], [4, 0]),
        (["--tenant", "nobody"], [4, 6]),
        (["--older-than", "1h"], [4, 6]),
        (["--older-than", "0s", "--namespace", identity(**OTHER)], [4, 0]),
        (["--all"], [0, 0]),
    ],
)
def test_a_closed_store_is_cleared_of_what_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], criteria: list[str], left: list[int]
) -> None:
    keys, others = fill(tmp_path)
    before = snapshot(tmp_path)
    meant = 10 - sum(left)
    would = answer(capsys, "clear", *criteria, "--dir", tmp_path, "--dry-run")
    assert (would["meant"], would["removed"]) == (meant, 0)
    assert snapshot(tmp_path) == before
    if meant:
        assert "give --yes" in error(capsys, "clear", *criteria, "--dir", tmp_path)
        assert snapshot(tmp_path) == before
    done = answer(capsys, "clear", *criteria, "--dir", tmp_path, "--yes")
    assert (done["removed"], done["durable"], done["live"]) == (meant, True, False)
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(**OTHER))
        assert [store.lookup(ns, keys).hits, store.lookup(other, others).hits] == left


def test_verify_finds_a_flipped_byte_and_quarantine_makes_it_a_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, _ = fill(tmp_path)
    segment = tmp_path / "segment-000000.tkv"
    content = bytearray(segment.read_bytes())
    at = content.index(api.blocks(4)[3])
    content[at + 100] ^= 1
    segment.write_bytes(content)
    damaged = snapshot(tmp_path)
    found = answer(capsys, "verify", "--dir", tmp_path, expect=ExitCode.FAILED)
    assert not found["sound"]
    assert {slab["what"] for slab in found["bad"]} == {"corrupt"}
    assert found["slabs"] == 10
    assert snapshot(tmp_path) == damaged, "reported, not repaired"
    text = run("verify", "--dir", tmp_path, expect=ExitCode.FAILED).stdout
    assert "NOT everything is sound" in text
    names = {slab["key"] for slab in found["bad"]}
    assert all(name in text for name in names)
    found = answer(capsys, "verify", "--quarantine", "--dir", tmp_path, expect=ExitCode.FAILED)
    assert found["quarantined"] == len(names)
    assert answer(capsys, "verify", "--dir", tmp_path)["sound"]
    with BlockingStore.open(**api.config(tmp_path)) as store:
        ns = store.namespace(api.spec())
        there = [store.contains(ns, key) for key in api.split(keys)]
        assert there == [key.hex() not in names for key in api.split(keys)]


def test_verify_of_a_store_that_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with attach.other(OWNER, tmp_path):
        pass
    found = answer(capsys, "verify", "--dir", tmp_path)
    assert (found["sound"], found["drives"][0]["checkpoint"]) == (True, "absent")
    assert found["drives"][0]["tombstones"] == 1
    (tmp_path / "checkpoint.tkv").write_bytes(b"nonsense")
    found = answer(capsys, "verify", "--dir", tmp_path, expect=ExitCode.FAILED)
    assert found["damaged_checkpoints"] == [str(tmp_path)]


def test_resize_says_first_and_keeps_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, others = fill(tmp_path)
    grown = answer(capsys, "resize", "64MiB", "--dir", tmp_path)
    assert grown["directories"][0]["lost_blocks"] == 0
    assert "512 KiB or more" in error(capsys, "resize", "128KiB", "--dir", tmp_path)
    text = run("resize", "1MiB", "--dir", tmp_path, "--dry-run").stdout
    assert "nothing was changed" in text
    assert "not a size" in error(capsys, "resize", "much", "--dir", tmp_path)
    config = api.config(tmp_path) | {"nvme_capacity": "64MiB"}
    with BlockingStore.open(**config) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(**OTHER))
        assert [store.lookup(ns, keys).hits, store.lookup(other, others).hits] == [4, 6]


def write_spec(path: Path, **fields: Any) -> Path:
    spec = {"model": "model", "weights": "weights", "kv_dtype": "float32"} | fields
    lines = [f"{name} = {json.dumps(value)}" for name, value in spec.items()]
    layout = f"[layout]\ntokens_per_block = {api.TOKENS}\nblock_bytes = {api.BLOCK_BYTES}\n"
    path.write_text("\n".join(lines) + "\n" + layout)
    return path


def test_explain_names_the_field_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "kv"
    keys, _ = fill(store)
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(api.tokens(6)))
    spec = write_spec(tmp_path / "spec.toml", weights="newer")
    asked = ("explain", "--dir", store, "--spec", spec, "--tokens", prompt)
    told = answer(capsys, *asked, expect=ExitCode.FAILED)
    assert (told["hits"], told["known"]) == (0, False)
    first = told["elsewhere"][0]
    assert (first["namespace"], first["hits"]) == (identity(**OTHER), 6)
    assert set(first["differs"]) == {"weights", "salt"}
    nearest = told["elsewhere"][1]
    assert (nearest["hits"], nearest["differs"]) == (4, {"weights": ["newer", "weights"]})
    assert "`weights` (asked for 'newer', stored with 'others')" in told["verdict"]
    shown = run(*asked, expect=ExitCode.FAILED).stdout
    assert told["verdict"] in shown
    assert "secret" not in shown
    args = ("explain", "--dir", store, "--namespace", identity()[:12])
    every = [part for key in api.split(keys) for part in ("--keys", key.hex())]
    assert answer(capsys, *args, *every)["verdict"] == "all 4 blocks are there"
    told = answer(capsys, *args, "--keys", "ab" * 32, expect=ExitCode.FAILED)
    assert "a closed store has no event log" in told["verdict"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["inspect", "xyz"], "hexadecimal digits"),
        (["inspect", "ab"], "4 to 64"),
        (["inspect", "a" * 65], "4 to 64"),
        (["ls", "--namespace", "ffffffff"], "no namespace ffffffff"),
        (["clear"], "nothing is meant"),
        (["clear", "--all", "--tenant", "a"], "give it alone"),
        (["clear", "--older-than", "soon"], "give an age"),
        (["clear", "--namespace", "ffffffff", "--yes"], "no namespace"),
        (["explain"], "--spec or --namespace"),
        (["explain", "--namespace", "ffff"], "--tokens or --keys"),
        (["explain", "--namespace", "ffff", "--keys", "abcd"], "no namespace"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    fill(tmp_path)
    before = snapshot(tmp_path)
    assert words in error(capsys, *args, "--dir", tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "args",
    [["ls"], ["inspect", "ab" * 32], ["verify"], ["clear", "--all", "--yes"], ["resize", "1GiB"]],
)
def test_a_directory_that_is_no_store_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    before = snapshot(tmp_path)
    assert "is no store" in error(capsys, *args, "--dir", tmp_path)
    assert snapshot(tmp_path) == before
    missing = tmp_path / "none"
    error(capsys, *args, "--dir", missing, expect=ExitCode.STORE)
    assert not missing.exists()


def test_specifications_and_prompts_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "kv")
    good, bad = write_spec(tmp_path / "good.toml"), tmp_path / "bad.toml"
    tokens = tmp_path / "tokens"
    tokens.write_text("1 2 three")
    for text in ("model = ", 'model = "m"', "layout = 3", "[layout]\ntokens_per_block = 4"):
        bad.write_text(text)
        error(capsys, "explain", "--spec", bad, "--tokens", tokens, "--dir", tmp_path / "kv")
    args = ("explain", "--spec", good, "--tokens", tokens, "--dir", tmp_path / "kv")
    assert "no token ids" in error(capsys, *args)
    tokens.write_bytes(b"\xff\xfe")
    assert "no text" in error(capsys, *args)


def test_the_directories_come_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIERED_KV_NVME_PATHS", raising=False)
    assert "no store is named" in error(capsys, "ls")
    fill(tmp_path)
    monkeypatch.setenv("TIERED_KV_NVME_PATHS", str(tmp_path))
    monkeypatch.setenv("TIERED_KV_NVME_CAPACITY", "1GiB")
    assert len(answer(capsys, "ls")["namespaces"]) == 2


def test_names_are_private_and_never_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, _ = fill(tmp_path)
    names = tmp_path / "namespaces.json"
    assert names.stat().st_mode & 0o777 == 0o600
    names.write_text("{")
    rows = answer(capsys, "ls", "--dir", tmp_path)["namespaces"]
    assert [row["fields"] for row in rows] == [None, None]
    assert "not known" in run("ls", "--dir", tmp_path).stdout
    with BlockingStore.open(**api.config(tmp_path)) as store:
        assert store.lookup(store.namespace(api.spec()), keys).hits == 4
    rows = answer(capsys, "ls", "--dir", tmp_path)["namespaces"]
    assert [row["fields"] is None for row in rows] == [True, False], "named when it is opened"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_may_neither_read_nor_attach(tmp_path: Path) -> None:
    def stranger(expect: int) -> str:
        # First as it is, so that everything is imported while it may be read.
        code = (
            "import os, sys; from tiered_kv.cli import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "ls", "--dir", str(store)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == expect, done.stderr
        return done.stderr

    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and parent.owner() == "root" and "pytest" in parent.name:
            parent.chmod(0o755)
    store = tmp_path / "kv"
    fill(store)
    assert "as the user who opened the store" in stranger(ExitCode.STORE)
    with attach.other(OWNER, store):
        assert "as the user who opened the store" in stranger(ExitCode.STORE)
