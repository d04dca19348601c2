"""What an engine was asked, as a trace that `tiered-kv replay` reads."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from tiered_kv._core import KEY_BYTES
from tiered_kv.errors import ConfigError
from tiered_kv.spec import RequestContext

# Lines are in the order of arrival: so many wait for one that goes on and on.
_MOST_WAITING = 4096
_MOST_QUEUED = 1 << 16
_MOST_BYTES = 16 << 30
_MOST_LABEL = 512  # the reader takes no longer ones
_CLOSE_S = 5.0
_ID_MASK = (1 << 63) - 1


@dataclasses.dataclass
class _Entry:
    """A request.

    Attributes:
        at_s: When it came, a Unix time.
        context: What is known of it.
        input_length: Tokens of its prompt.
        keys: Packed keys of its full blocks, those of the prompt first.
        prompt_blocks: How many of them are the prompt's.
        output_length: Tokens of its answer.
        ended: Whether nothing more comes.
    """

    at_s: float
    context: RequestContext
    input_length: int
    keys: bytes
    prompt_blocks: int
    output_length: int = 0
    ended: bool = False


class Recorder:
    """Writes the requests of one engine to a new file, in the order in which they came.

    A line is written when its request has ended, and all that came before it. A caller never waits
    for the drive: a thread writes, and where it cannot follow, requests are left out and counted. A
    block's number is a part of its key, so that it is the same in files of other runs.

    Args:
        directory: Where the file is made; made itself where it is missing.
        name: What the file's name begins with.
        block_tokens: Tokens of a block.

    Attributes:
        path: The file, for its owner alone to read: sessions are named as clients name them.
        lost: Requests that were left out.
        fault: Why no more is written, None while all is well.

    Raises:
        ConfigError: The file cannot be made.
    """

    def __init__(self, directory: Path, name: str, block_tokens: int) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = directory / f"{name}-{stamp}-{os.getpid()}.jsonl"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            message = f"`record` is {str(directory)!r}, where no file can be made: {error}"
            raise ConfigError(message, op="record") from error
        self._tokens = block_tokens
        # A clock that is set back must not turn the order round.
        self._start_s = time.time() - time.monotonic()
        self._entries: dict[str, _Entry] = {}
        self._queue: queue.Queue[_Entry | None] = queue.Queue(_MOST_QUEUED)
        self.lost = 0
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._write, name="tiered-kv-record", daemon=True)
        self._thread.start()

    def begin(
        self, request_id: str, context: RequestContext, prompt_tokens: int, keys: bytes
    ) -> None:
        """Notes a request that has come; nothing where it is known.

        Args:
            request_id: Its name.
            context: What is known of it.
            prompt_tokens: Tokens of its prompt.
            keys: Packed keys of the prompt's full blocks.
        """
        if request_id not in self._entries:
            at_s = self._start_s + time.monotonic()
            blocks = len(keys) // KEY_BYTES
            self._entries[request_id] = _Entry(at_s, context, prompt_tokens, keys, blocks)

    def end(self, request_id: str, tokens: int, keys: bytes) -> None:
        """Notes that a request has ended; nothing where it is not known.

        Args:
            request_id: Its name.
            tokens: Tokens of prompt and answer.
            keys: Packed keys of all full blocks, those of the prompt first.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.output_length = max(0, tokens - entry.input_length)
        entry.keys = max(entry.keys, keys, key=len)
        entry.ended = True
        self._hand_over(_MOST_WAITING)

    def close(self) -> None:
        """Writes all that has ended, and of the rest the prompts."""
        self._hand_over(0)
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return  # the drive does not answer, and the thread ends with the process
        self._thread.join(_CLOSE_S)

    def _hand_over(self, most_waiting: int) -> None:
        """Gives the first requests to the thread, up to one that has not ended."""
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if not entry.ended and len(self._entries) <= most_waiting:
                return
            del self._entries[name]
            try:
                self._queue.put_nowait(entry)
            except queue.Full:
                self.lost += 1

    def _write(self) -> None:
        written = 0
        while (entry := self._queue.get()) is not None:
            if self.fault is not None:
                self.lost += 1
                continue
            line = json.dumps(self._line(entry), separators=(",", ":")).encode() + b"\n"
            self.fault = self._append(line, written)
            if self.fault is None:
                written += len(line)
            else:
                self.lost += 1
        os.close(self._file)

    def _append(self, line: bytes, at: int) -> str | None:
        """Writes a line, or nothing of it; returns why nothing, else None."""
        if at + len(line) > _MOST_BYTES:
            return f"the file has {_MOST_BYTES} bytes"
        try:
            done = os.write(self._file, line)
            if done == len(line):
                return None
            os.ftruncate(self._file, at)
        except OSError as error:
            return str(error)
        return "the drive is full"

    def _line(self, entry: _Entry) -> dict[str, Any]:
        keys = entry.keys
        ids = [
            int.from_bytes(keys[at : at + 8], "little") & _ID_MASK
            for at in range(0, len(keys), KEY_BYTES)
        ]
        told = {"session_id": entry.context.session, "type": entry.context.kind}
        return {
            "timestamp": round(entry.at_s, 6),
            **{name: one for name, one in told.items() if 0 < len(one.encode()) <= _MOST_LABEL},
            "input_length": entry.input_length,
            "output_length": entry.output_length,
            "block_size": self._tokens,
            "hash_runs": [[number, 1] for number in ids[: entry.prompt_blocks]],
            "out_hash_runs": [[number, 1] for number in ids[entry.prompt_blocks :]],
        }
