"""Statistics for Prometheus: what is scraped, from whom, and who may."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import api
import test_api_attach as attach
from tiered_kv import ConfigError, UnsupportedError, cli, metrics
from tiered_kv.blocking import BlockingStore
from tiered_kv.cli.exits import ExitCode
from tiered_kv.metrics import server as server_module
from tiered_kv.metrics.names import COUNTERS, GAUGES, LATENCIES
from tiered_kv.metrics.render import PREFIX

BROUGHT = "0123456789abcdef-token"
DOCS = Path(__file__).resolve().parents[1] / "docs"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockingStore]:
    """Six blocks that were stored, of which four are in memory and durable, and some traffic."""
    with BlockingStore.open(**api.config(tmp_path / "kv")) as opened:
        ns = opened.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(6))
        opened.put(ns, keys[:128], api.blocks(4))
        with opened.get(ns, keys) as leases:
            assert leases.hits == 4
        assert opened.flush().all_durable
        yield opened


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{BROUGHT}\n")
    return path


def scrape(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """Status, type and text of an answer."""
    connection = HTTPConnection(address, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.name == PREFIX + name and sample.labels == labels
    ]
    return float(found)


def talk(address: str, request: bytes) -> bytes:
    """What is answered to bytes."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as peer:
        peer.sendall(request)
        got = b""
        while more := peer.recv(4096):
            got += more
    return got


def test_a_scrape_has_what_the_store_counts(store: BlockingStore, tmp_path: Path) -> None:
    with metrics.serve(store, "127.0.0.1:0") as served:
        status, kind, text = scrape(served.address)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert value(text, "hits_total", tier="dram") == 4
    assert value(text, "hit_bytes_total", tier="dram") == 4 * api.BLOCK_BYTES
    assert value(text, "misses_total", reason="absent") == 2
    assert value(text, "transferred_bytes_total", tier="dram", direction="in") == 20_000
    assert value(text, "transferred_bytes_total", tier="nvme", direction="in") == 20_000
    assert value(text, "transferred_bytes_total", tier="nvme", direction="out") == 0
    assert value(text, "resident_blocks", tier="nvme") == 4
    assert value(text, "capacity_bytes", tier="dram") == 1 << 20
    assert value(text, "corrupt_slabs_total", tier="nvme") == 0
    assert value(text, "commit_seconds_count") == value(text, "events_total", event="groups") > 0
    assert value(text, "commit_seconds_bucket", le="+Inf") == value(text, "commit_seconds_count")
    assert value(text, "commit_seconds_sum") > 0
    assert value(text, "drive_load_seconds_count") == 0
    drive = str(tmp_path / "kv")
    assert value(text, "drive_state", drive=drive, state="working") == 1
    assert value(text, "drive_state", drive=drive, state="circuit_open") == 0
    predicted = families(text)[f"{PREFIX}predicted_reuses"].samples
    assert len(predicted) == 16, "all pairs of a block type and a transition"
    assert {"ahead_loaded", "ahead_used", "ahead_wasted"} <= {
        sample.labels["event"] for sample in families(text)[f"{PREFIX}events"].samples
    }


def test_each_reason_of_an_eviction_counts(tmp_path: Path) -> None:
    with BlockingStore.open(**api.config(tmp_path, dram_capacity="64KiB")) as store:
        ns, other = store.namespace(api.spec()), store.namespace(api.spec(weights="others"))
        assert store.set_quota(other, dram_bytes=2 * 8192)
        for space, count in ((other, 4), (ns, 12)):
            keys = space.keys_from_tokens(api.tokens(count))
            for at in range(count):
                key = keys[32 * at : 32 * at + 32]
                store.put(space, key, api.blocks(1), chain=False, wait=10)
                assert store.flush().all_durable
        text = metrics.render(store.stats())
        evicted = store.stats()["counters"]["evicted_dram"]
    reasons = {
        sample.labels["reason"]: sample.value
        for sample in families(text)[f"{PREFIX}evictions"].samples
        if sample.labels["tier"] == "dram"
    }
    assert reasons["quota"] == 2
    assert reasons["room"] > 2
    assert reasons["room"] + reasons["quota"] + reasons["class"] == evicted


def test_a_load_from_a_drive_has_its_time(tmp_path: Path) -> None:
    config = api.config(tmp_path, dram_capacity="64KiB")
    with BlockingStore.open(**config) as store:
        ns = store.namespace(api.spec())
        keys = ns.keys_from_tokens(api.tokens(4))
        store.put(ns, keys, api.blocks(4))
    with BlockingStore.open(**config) as store:
        ns = store.namespace(api.spec())
        with store.get(ns, keys) as leases:
            assert leases.hits == 4
        text = metrics.render(store.stats(), store.health())
    assert value(text, "drive_load_seconds_count") == 1
    assert value(text, "transferred_bytes_total", tier="nvme", direction="out") == 20_000


def test_what_is_predicted_is_beside_what_came() -> None:
    with BlockingStore.open(**api.config()) as store:
        ns = store.namespace(api.spec())
        chains = [ns.keys_from_tokens(api.tokens(1, start)) for start in range(0, 400, 4)]
        for keys in chains:
            store.put(ns, keys, api.blocks(1))
        for keys in 3 * chains:
            with store.get(ns, keys) as leases:
                assert leases.hits == 1
            assert store.predictor() is not None  # takes in what the get has told
        text = metrics.render(store.stats())
    by_pair = families(text)[f"{PREFIX}reuses"].samples
    by_chance = families(text)[f"{PREFIX}reuses_by_chance"].samples
    assert sum(one.value for one in by_pair) == sum(one.value for one in by_chance) > 0
    predicted = families(text)[f"{PREFIX}predicted_reuses"].samples
    assert sum(one.value for one in predicted) > 0
    # Without a predictor there is nothing to compare.
    with BlockingStore.open(**api.config(policy="lru")) as store:
        bare = families(metrics.render(store.stats()))
    assert bare[f"{PREFIX}reuses"].samples == []
    assert f"{PREFIX}drive_state" not in bare


def test_names_keep_the_conventions_and_none_is_left_out(store: BlockingStore) -> None:
    text = metrics.render(store.stats(), store.health())
    found = families(text)
    own = {"build_info", "drive_state", "drive_load_bytes_per_second"}
    assert set(found) == {PREFIX + name for name in {*COUNTERS, *GAUGES, *LATENCIES} | own}
    units = {"counter": (), "gauge": (), "histogram": ("_seconds",)}
    for name, family in found.items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
        assert family.documentation.endswith("."), name
        assert family.type in units, f"{name} has no TYPE"
        assert name.endswith(units[family.type] or name), name
        for bad in ("_total", "_ms", "_us", "_ns", "_mib", "_kib", "_percent", "_count"):
            assert not name.endswith(bad), name
        if "bytes" in name:
            assert re.search(r"_bytes(_per_second)?$", name) or name == f"{PREFIX}event_bytes"
        for sample in family.samples:
            plain = sample.name == name + ("_total" if family.type == "counter" else "")
            assert plain or family.type == "histogram", sample
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels), sample
    assert text.count("# HELP") == text.count("# TYPE") == len(found)


def test_what_is_shown_in_grafana_and_on_the_page_is_there() -> None:
    own = {"build_info", "drive_state", "drive_load_bytes_per_second"}
    made = {*COUNTERS, *GAUGES, *LATENCIES} | own
    for page, needed in (("operations.md", made), ("dashboard.json", made - {"build_info"})):
        text = (DOCS / page).read_text("utf-8")
        told = {
            re.sub("_(total|bucket)$", "", name)
            for name in re.findall(r"\btiered_kv_([a-z_]+)", text)
        }
        assert told == needed, page


def test_openmetrics_is_given_to_those_who_ask(store: BlockingStore) -> None:
    with metrics.serve(store, "[::1]:0") as served:
        status, kind, text = scrape(served.address, Accept=OPEN_METRICS)
        assert served.address.startswith("[::1]:")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_without_the_token_nothing_is_told(store: BlockingStore, token_file: Path) -> None:
    with metrics.serve(store, "0.0.0.0:0", token_file) as served:
        address = f"127.0.0.1:{served.address.rpartition(':')[2]}"
        for path in ("/metrics", "/other"):
            for header in (
                "",
                "Bearer",
                f"Basic {BROUGHT}",
                f"Bearer {BROUGHT}x",
                f"Bearer {BROUGHT[:-1]}",
            ):
                status, _, text = scrape(address, path, Authorization=header)
                assert status == 401, header
                assert text == "give the token: `Authorization: Bearer TOKEN`\n"
        status, _, text = scrape(address, Authorization=f"Bearer {BROUGHT}")
        assert (status, value(text, "hits_total", tier="dram")) == (200, 4)
        refused = talk(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"WWW-Authenticate: Bearer\r\n" in refused


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:9400", "[2001:db8::1]:1"])
def test_what_others_reach_needs_a_token(store: BlockingStore, address: str) -> None:
    with pytest.raises(ConfigError, match=r"`address` .* give a `token_file`, or a loopback"):
        metrics.serve(store, address)


@pytest.mark.parametrize(
    "address",
    ["", "9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "x:1", "::1:x"],
)
def test_what_is_no_address_is_named(store: BlockingStore, address: str) -> None:
    with pytest.raises(ConfigError, match=r"`address` is .*: give an IP address and a port"):
        metrics.serve(store, address)


def test_an_address_in_use_is_named(store: BlockingStore) -> None:
    with metrics.serve(store, "localhost:0") as served:
        assert served.address.startswith("127.0.0.1:")
        with pytest.raises(ConfigError, match=r"`address` .* give another address or port"):
            metrics.serve(store, served.address)


@pytest.mark.parametrize(
    ("text", "mode", "remedy"),
    [
        (BROUGHT, 0o640, "chmod 600"),
        (BROUGHT, 0o604, "chmod 600"),
        ("short", 0o600, "write 16 to 1024"),
        ("", 0o600, "write 16 to 1024"),
        ("two words that are no token", 0o600, "write 16 to 1024"),
        ("x" * 1025, 0o600, "write 16 to 1024"),
        (None, 0o600, "give a file"),
    ],
)
def test_a_token_file_is_private_and_has_a_token(
    store: BlockingStore, tmp_path: Path, text: str | None, mode: int, remedy: str
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"`token_file` is .*{remedy}"):
        metrics.serve(store, "127.0.0.1:0", path)
    with pytest.raises(ConfigError, match=r"`token_file` is .*give a file"):
        metrics.serve(store, "127.0.0.1:0", tmp_path)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics?name[]=x HTTP/1.1\r\n\r\n", b"200"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n folded: x\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_scrape_is_refused(
    store: BlockingStore, request_bytes: bytes, status: bytes
) -> None:
    with metrics.serve(store, "127.0.0.1:0") as served:
        head, _, body = talk(served.address, request_bytes).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        assert b"Connection: close" in head
        if request_bytes.startswith(b"HEAD"):
            assert body == b""
        elif status != b"200":
            assert body.count(b"\n") == 1
        assert scrape(served.address)[0] == 200, "others are served as before"


def test_a_request_and_a_connection_have_their_bounds(
    store: BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TIMEOUT_S", 0.5)
    with metrics.serve(store, "127.0.0.1:0") as served:
        host, port = served.address.split(":")
        long = b"GET /metrics HTTP/1.1\r\nx: " + b"y" * server_module.MOST_REQUEST_BYTES
        assert b" 413 " in talk(served.address, long)
        assert b" 408 " in talk(served.address, b"GET /metrics HT"), "half a request"
        monkeypatch.setattr(server_module, "TIMEOUT_S", 60.0)
        silent = [
            socket.create_connection((host, int(port)))
            for _ in range(server_module.MOST_CONNECTIONS)
        ]
        refused = b""
        while b" 503 " not in refused:  # the last of them may not have been taken yet
            refused = talk(served.address, b"")
        assert b"too many connections" in refused
        for peer in silent:
            peer.close()
        while scrape(served.address)[0] != 200:
            time.sleep(0.01)


def test_what_fails_is_said_and_ends_nothing() -> None:
    class Broken:
        def stats(self) -> dict[str, Any]:
            raise RuntimeError

        def health(self) -> dict[str, Any]:
            return {}

    with metrics.serve(Broken(), "127.0.0.1:0") as served:
        assert scrape(served.address)[0] == 500
        assert scrape(served.address)[0] == 500, "and goes on"
    served.close()


def test_without_the_package_the_remedy_is_said(
    store: BlockingStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for call in (lambda: metrics.serve(store), lambda: metrics.render(store.stats())):
        with pytest.raises(UnsupportedError, match=r"pip install 'tiered-kv\[metrics\]'"):
            call()
    assert cli.main(["metrics", "--dir", "/nowhere"]) == ExitCode.ENVIRONMENT
    assert "pip install 'tiered-kv[metrics]'" in capsys.readouterr().err


def test_the_exporter_reads_a_store_of_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(
        r"^tiered-kv (metrics .*)$", (DOCS / "operations.md").read_text(), re.MULTILINE
    )
    assert len(shown) == 2, "the commands of the page"
    args = [one.replace("/mnt/nvme0/kv", str(tmp_path)).replace(":9400", ":0") for one in shown]
    with attach.other(attach.OWNER, tmp_path):
        assert cli.main(shlex.split(args[1])) == ExitCode.OK
        text = capsys.readouterr().out
        assert value(text, "events_total", event="put_stored") == 4
        assert len(families(text)[f"{PREFIX}predicted_reuses"].samples) == 16
        assert cli.main(["metrics", "--dir", str(tmp_path), "--json"]) == ExitCode.OK
        found = json.loads(capsys.readouterr().out)
        assert found["stats"]["counters"]["put_stored"] == 4
        assert found["health"]["drives"][0]["state"] == "working"
        command = [sys.executable, "-m", "tiered_kv", *shlex.split(args[0])]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as exporter:
            assert exporter.stderr is not None
            said = exporter.stderr.readline()
            listens = re.fullmatch(r"metrics of (\S+) at http://(\S+)/metrics\n", said)
            assert listens is not None, said
            assert listens[1] == str(tmp_path)
            status, _, text = scrape(listens[2])
            assert (status, value(text, "events_total", event="put_stored")) == (200, 4)
            exporter.send_signal(signal.SIGINT)
            assert exporter.wait(20) == ExitCode.INTERRUPTED


def test_an_exporter_without_a_store_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["metrics", "--dir", str(tmp_path), "--once"]) == ExitCode.STORE
    assert str(tmp_path) in capsys.readouterr().err
    with (
        attach.other(attach.OWNER, tmp_path) as owner,
        BlockingStore.attach(tmp_path, timeout=60) as attached,
        metrics.serve(attached, "127.0.0.1:0") as served,
    ):
        assert scrape(served.address)[0] == 200
        owner.kill()
        owner.wait()
        status, _, text = scrape(served.address)
        assert status == 503
        assert text.startswith("the store does not answer: ")
        assert text.count("\n") == 1


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with attach.other(attach.OWNER, tmp_path):
        args = ["metrics", "--dir", str(tmp_path), "--listen", "0.0.0.0:0"]
        assert cli.main(args) == ExitCode.USAGE
        assert "token_file" in capsys.readouterr().err
