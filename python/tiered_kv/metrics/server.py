"""The endpoint that Prometheus scrapes: one path, a few connections, each with a deadline."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
import threading
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self

from tiered_kv.errors import ConfigError, TieredKvError
from tiered_kv.metrics.render import Source, client, encoded

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:9400"

MOST_CONNECTIONS = 8
MOST_REQUEST_BYTES = 16 << 10
TIMEOUT_S = 5.0
"""Seconds that a connection may take, from its first byte to the last of its answer."""

_BACKLOG = 16
_PLAIN = "text/plain; charset=utf-8"
_TOKEN = re.compile(rb"[!-~]{16,1024}")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class _Refused(Exception):  # noqa: N818 - an answer, not an error of this program
    """A request that is answered with a status and one line."""

    def __init__(self, status: int, text: str, header: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.header = header


class _Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of an address to listen on.

    Args:
        address: As in "127.0.0.1:9400" or "[::1]:9400"; "localhost" is 127.0.0.1.

    Returns:
        An IP address and a port, 0 for any that is free.

    Raises:
        ConfigError: It is none.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ip = ipaddress.ip_address(host)
        number = int(port) if port.isascii() and port.isdecimal() else -1
        if not 0 <= number < 1 << 16:
            raise ValueError
    except ValueError as error:
        message = f"`address` is {address!r:.100}: give an IP address and a port, as in "
        message += f"{DEFAULT_ADDRESS} or [::1]:9400"
        raise ConfigError(message, op="metrics") from error
    return str(ip), number


def read_token(path: str | os.PathLike[str]) -> bytes:
    """The token that scrapes have to bring.

    Args:
        path: A file of this user's that nobody else may read: the token and nothing else.

    Returns:
        The token.

    Raises:
        ConfigError: The file is not there, others may read it, or it holds no token.
    """

    def wrong(text: str) -> ConfigError:
        return ConfigError(f"`token_file` is {os.fspath(path)!r}, {text}", op="metrics")

    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        reason = f"which cannot be read ({error.strerror}): give a file with a token"
        raise wrong(reason) from error
    try:
        about = os.fstat(file)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise wrong("which is no file: give a file with a token")
        if mode & 0o077:
            raise wrong(f"which others may read (mode {mode:04o}): `chmod 600` it")
        if about.st_uid not in (os.geteuid(), 0):
            raise wrong("which is another user's: make it your own")
        token = os.read(file, 4096).strip()
    finally:
        os.close(file)
    if not _TOKEN.fullmatch(token):
        raise wrong("which has no token: write 16 to 1024 printable characters without spaces")
    return token


def serve(
    store: Source,
    address: str = DEFAULT_ADDRESS,
    token_file: str | os.PathLike[str] | None = None,
) -> MetricsServer:
    """Serves a store's statistics to Prometheus, until it is closed.

    Args:
        store: The store, one that is attached to, or what else has `stats()` and `health()`.
        address: Where to listen: IP address and port, 0 for any that is free.
        token_file: A file, mode 0600, with a token; scrapes must then bring it as
            `Authorization: Bearer TOKEN`. Must be given where the address is not a loopback one.

    Returns:
        The endpoint; close it before the store.

    Raises:
        ConfigError: The address or the token is wrong, or the address cannot be listened on.
        UnsupportedError: prometheus-client is not installed.
    """
    return MetricsServer(store, address, token_file)


class MetricsServer:
    """An endpoint; made by `serve`. Also a context manager.

    Args:
        store: What is asked at each scrape.
        address: Where to listen.
        token_file: A file with the token that scrapes must bring, or None.
    """

    def __init__(
        self, store: Source, address: str, token_file: str | os.PathLike[str] | None = None
    ) -> None:
        client()
        host, port = parse_address(address)
        self._token = None if token_file is None else read_token(token_file)
        if self._token is None and not ipaddress.ip_address(host).is_loopback:
            message = f"`address` is {address!r}, which other machines reach: give a `token_file`, "
            message += "or a loopback address such as 127.0.0.1"
            raise ConfigError(message, op="metrics")
        self._store = store
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            message = f"`address` is {address!r}, where nothing can listen ({error.strerror}): "
            message += "give another address or port"
            raise ConfigError(message, op="metrics") from error
        self._thread = threading.Thread(target=self._run, name="tiered-kv-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, with the port that it was given."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def wait(self) -> None:
        """Waits until it is closed, from another thread."""
        self._closed.wait()

    def close(self) -> None:
        """Stops listening, and returns when the store is asked no more."""
        if self._closed.is_set():
            return
        self._closed.set()
        # Wakes the thread that waits for a connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for _ in range(MOST_CONNECTIONS):
            self._free.acquire()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                # Out of descriptors, or closed: there is nothing to do but to try again.
                self._closed.wait(0.1)
                continue
            if self._closed.is_set() or not self._free.acquire(blocking=False):
                with contextlib.suppress(OSError), peer:
                    peer.setblocking(False)
                    peer.send(_answer(503, b"too many connections\n", _PLAIN))
                continue
            name = "tiered-kv-scrape"
            try:
                threading.Thread(target=self._talk, args=(peer,), name=name, daemon=True).start()
            except RuntimeError:  # the system has no more threads
                peer.close()
                self._free.release()

    def _talk(self, peer: socket.socket) -> None:
        until = monotonic() + TIMEOUT_S
        try:
            with contextlib.suppress(OSError), peer:
                answer = self._answer_to(peer, until)
                # For all of it together, however slowly it is taken.
                peer.settimeout(max(0.001, until - monotonic()))
                peer.sendall(answer)
                peer.shutdown(socket.SHUT_WR)
        finally:
            self._free.release()

    def _answer_to(self, peer: socket.socket, until: float) -> bytes:
        try:
            request = _parse(_receive(peer, until))
            self._check(request)
            text, kind = encoded(
                self._store.stats(), self._store.health(), request.headers.get("accept", "")
            )
        except _Refused as refused:
            return _answer(refused.status, f"{refused.text}\n".encode(), _PLAIN, refused.header)
        except TieredKvError as error:
            return _answer(503, f"the store does not answer: {error}\n".encode(), _PLAIN)
        except OSError:
            raise
        except Exception:
            logger.exception("tiered-kv: metrics could not be made")
            return _answer(500, b"metrics could not be made: see the log\n", _PLAIN)
        return _answer(200, text, kind, head=request.method == "HEAD")

    def _check(self, request: _Request) -> None:
        # First, so that nobody without the token learns anything.
        if self._token is not None:
            kind, _, brought = request.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(brought.strip().encode("latin-1"), self._token)
            if kind.lower() != "bearer" or not same:
                text = "give the token: `Authorization: Bearer TOKEN`"
                raise _Refused(401, text, "WWW-Authenticate: Bearer\r\n")
        if request.method not in ("GET", "HEAD"):
            raise _Refused(405, "only GET is answered", "Allow: GET, HEAD\r\n")
        if request.path.partition("?")[0] != "/metrics":
            raise _Refused(404, "the metrics are at /metrics")


def _receive(peer: socket.socket, until: float) -> bytes:
    """A request's lines, up to the empty one."""
    got = bytearray()
    while b"\r\n\r\n" not in got:
        left = until - monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            peer.settimeout(left)
            more = peer.recv(4096)
        except TimeoutError:
            raise _Refused(408, f"no whole request within {TIMEOUT_S:g} s") from None
        if not more:
            raise _Refused(400, "no whole request came")
        got += more
        if len(got) > MOST_REQUEST_BYTES:
            raise _Refused(413, f"a request has at most {MOST_REQUEST_BYTES} bytes")
    return bytes(got)


def _parse(request: bytes) -> _Request:
    head = request.partition(b"\r\n\r\n")[0].decode("latin-1")
    first, *lines = head.split("\r\n")
    match first.split(" "):
        case [method, path, version] if version in ("HTTP/1.0", "HTTP/1.1"):
            pass
        case _:
            raise _Refused(400, "this is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise _Refused(400, "a header has no name")
        headers[name.lower()] = value.strip()
    return _Request(method, path, headers)


def _answer(status: int, body: bytes, kind: str, header: str = "", *, head: bool = False) -> bytes:
    lines = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
    lines += f"Content-Length: {len(body)}\r\nConnection: close\r\n{header}\r\n"
    return lines.encode() + (b"" if head else body)
