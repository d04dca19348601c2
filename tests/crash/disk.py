"""A disk with a volatile write cache, served over NBD on a Unix socket, whose power can be cut.

What a write brings lies in the cache until a flush. A cut keeps any part of the cache, as a drive
may that was writing it back in an order of its own: each write is kept, lost or torn between
sectors. Some writes are answered late, and a flush covers only what was answered before it came:
a program that syncs before its writes have ended loses them here as it would on a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512

_MAGIC, _OPTION_MAGIC, _REPLY_MAGIC = b"NBDMAGIC", b"IHAVEOPT", 0x3E889045565A9
_REQUEST_MAGIC, _RESPONSE_MAGIC = 0x25609513, 0x67446698
_OPT_ABORT, _OPT_INFO, _OPT_GO = 2, 6, 7
_REP_ACK, _REP_INFO, _REP_UNSUPPORTED = 1, 3, 0x80000001
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FUA = 1
_EINVAL = 22
_EXPORT_FLAGS = 1 | 1 << 2 | 1 << 3
"""Flags are there; flushes and writes through the cache are supported."""
_LONGEST = 32 << 20

LATE_SHARE = 0.2
LATE_S = 0.02


@dataclass(frozen=True, eq=False)
class Write:
    """A write, which may be lost unless it went through the cache."""

    offset: int
    data: bytes
    through: bool = False


@dataclass(frozen=True)
class Cut:
    """What a power cut did."""

    unflushed: int
    lost: int
    torn: int


class Disk:
    """The bytes of the disk and of its cache. Used by one thread at a time.

    Args:
        image: what is on the disk.
    """

    def __init__(self, image: bytes) -> None:
        self.now = bytearray(image)
        self.kept = bytearray(image)
        self._cache: list[Write] = []
        self._late: dict[Write, None] = {}

    def begin(self, offset: int, data: bytes, through: bool = False) -> Write:
        """A write arrives; it is not in the cache before `end`."""
        write = Write(offset, data, through)
        self._late[write] = None
        return write

    def end(self, write: Write) -> None:
        """A write is done and may be answered."""
        self._late.pop(write)
        self.now[write.offset : write.offset + len(write.data)] = write.data
        self._cache.append(write)
        if write.through:
            self._keep(write)

    def flush(self) -> None:
        """Everything that was done is kept from now on."""
        for write in self._cache:
            self._keep(write)
        self._cache.clear()

    @property
    def unflushed(self) -> int:
        """Writes that a cut could take."""
        return len(self._cache) + len(self._late)

    def cut(self, rng: random.Random) -> Cut:
        """The power goes: what was not flushed is kept in part, and the cache is empty."""
        keep = rng.choice((0.0, 0.2, 0.5, 0.8))
        lost = torn = 0
        # A write under way is as good as one in the cache, even if it was to go through.
        unflushed = [*self._cache, *self._late]
        for write in unflushed:
            sure = write.through and write not in self._late
            if sure or rng.random() < keep:
                self._keep(write)
            elif rng.random() < 0.2 and len(write.data) > SECTOR_BYTES:
                self._tear(write, rng)
                torn += 1
            else:
                lost += 1
        self.now[:] = self.kept
        self._cache.clear()
        self._late.clear()
        return Cut(len(unflushed), lost, torn)

    def _keep(self, write: Write) -> None:
        self.kept[write.offset : write.offset + len(write.data)] = write.data

    def _tear(self, write: Write, rng: random.Random) -> None:
        """Keeps some sectors, and never all of them."""
        sectors = range(0, len(write.data), SECTOR_BYTES)
        for at in rng.sample(sectors, rng.randrange(len(sectors))):
            part = write.data[at : at + SECTOR_BYTES]
            self._keep(Write(write.offset + at, part))


class Server:
    """Serves a disk to one client after the other, from a thread of its own.

    Args:
        disk: what is served; it belongs to the server until `settle` has returned.
        path: of the socket.
        seed: of which answers come late.
    """

    def __init__(self, disk: Disk, path: Path, seed: int) -> None:
        self.disk = disk
        self.fault: Exception | None = None
        self.dead = threading.Event()
        self.dies_at: int | None = None
        self._rng = random.Random(seed)
        self._idle = threading.Event()
        self._idle.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.start_unix_server(self._serve, path)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10.0)

    def die(self, unflushed: int, within_s: float) -> bool:
        """Answers nothing more from the moment at which that many writes are not flushed; 0 is now.

        Returns whether that moment came within the time. A client is served again after `settle`.
        """
        self.dies_at = unflushed
        return self.dead.wait(within_s)

    def settle(self) -> None:
        """Waits until the client, which has ended, is no longer served.

        Raises:
            RuntimeError: the client is still there, or its requests were not understood.
        """
        if not self._idle.wait(30.0):
            raise RuntimeError("the disk's client is still connected")
        if self.fault is not None:
            raise RuntimeError("the disk's server failed") from self.fault
        self.dies_at = None
        self.dead.clear()

    def close(self) -> None:
        """Takes no more clients and ends the thread."""
        self._loop.call_soon_threadsafe(self._listener.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._idle.clear()
        session = _Session(self, reader, writer, self._rng)
        try:
            if await session.negotiate():
                await session.serve()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client was killed
        except Exception as fault:  # noqa: BLE001  settle() tells of it
            self.fault = fault
        finally:
            session.end()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._idle.set()


class _Session:
    """One connection: the fixed newstyle handshake, then simple replies."""

    def __init__(
        self,
        server: Server,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
    ) -> None:
        self.server = server
        self.disk = server.disk
        self.reader = reader
        self.writer = writer
        self.rng = rng
        self.late: dict[int, asyncio.TimerHandle] = {}

    async def negotiate(self) -> bool:
        """Whether the client goes on to the disk."""
        self.writer.write(_MAGIC + _OPTION_MAGIC + struct.pack(">H", 1))
        await self.reader.readexactly(4)
        while True:
            head = await self.reader.readexactly(16)
            option, length = struct.unpack(">II", head[8:])
            if head[:8] != _OPTION_MAGIC or length > _LONGEST:
                raise ValueError(f"not an option: {head!r}")
            await self.reader.readexactly(length)
            if option in (_OPT_INFO, _OPT_GO):
                export = struct.pack(">HQH", 0, len(self.disk.now), _EXPORT_FLAGS)
                self._answer_option(option, _REP_INFO, export)
                self._answer_option(option, _REP_ACK)
                if option == _OPT_GO:
                    return True
            elif option == _OPT_ABORT:
                self._answer_option(option, _REP_ACK)
                return False
            else:
                self._answer_option(option, _REP_UNSUPPORTED)

    def _answer_option(self, option: int, kind: int, data: bytes = b"") -> None:
        head = struct.pack(">QIII", _REPLY_MAGIC, option, kind, len(data))
        self.writer.write(head + data)

    async def serve(self) -> None:
        """Serves requests until the client disconnects."""
        while True:
            head = await self.reader.readexactly(28)
            magic, flags, kind, handle, offset, length = struct.unpack(">IHHQQI", head)
            if magic != _REQUEST_MAGIC or length > _LONGEST:
                raise ValueError(f"not a request: {head!r}")
            data = await self.reader.readexactly(length) if kind == _WRITE else b""
            if self.server.dies_at == 0:
                await self._play_dead()
                return
            if kind == _DISCONNECT:
                return
            if kind == _FLUSH:
                self.disk.flush()
                self._answer(handle)
            elif kind not in (_READ, _WRITE) or offset + length > len(self.disk.now):
                self._answer(handle, error=_EINVAL)
            elif kind == _READ:
                self._answer(handle, bytes(self.disk.now[offset : offset + length]))
            else:
                self._write(handle, self.disk.begin(offset, data, bool(flags & _FUA)))
                if self._dies():
                    await self._play_dead()
                    return
            await self.writer.drain()

    def _dies(self) -> bool:
        limit = self.server.dies_at
        return limit is not None and self.disk.unflushed >= limit

    async def _play_dead(self) -> None:
        """Neither does nor answers anything until the client has gone."""
        self.end()
        self.server.dead.set()
        while await self.reader.read(1 << 16):
            pass

    def _write(self, handle: int, write: Write) -> None:
        def done() -> None:
            self.late.pop(handle, None)
            self.disk.end(write)
            self._answer(handle)

        if self.rng.random() < LATE_SHARE:
            delay = self.rng.uniform(0.0, LATE_S)
            self.late[handle] = asyncio.get_running_loop().call_later(delay, done)
        else:
            done()

    def _answer(self, handle: int, data: bytes = b"", error: int = 0) -> None:
        if not self.writer.is_closing():
            self.writer.write(struct.pack(">IIQ", _RESPONSE_MAGIC, error, handle) + data)

    def end(self) -> None:
        """Nothing is answered any more; what was under way stays so."""
        for timer in self.late.values():
            timer.cancel()
        self.late.clear()
