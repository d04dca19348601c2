"""Runs Python under a seccomp filter that refuses io_uring, as container runtimes do.

`python seccomp.py ARGUMENTS` replaces itself by `python ARGUMENTS`, which inherits the filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
IO_URING_SETUP = 425
"""Its number on every architecture."""

# struct sock_filter: code, jump if true, jump if false, constant.
LOAD_NUMBER = (0x20, 0, 0, 0)
SKIP_UNLESS_SETUP = (0x15, 0, 1, IO_URING_SETUP)
REFUSE = (0x06, 0, 0, 0x0005_0000 | errno.EPERM)
ALLOW = (0x06, 0, 0, 0x7FFF_0000)


def deny_io_uring() -> None:
    """Lets `io_uring_setup` fail with EPERM for this thread and its children.

    Raises:
        OSError: The kernel takes no filter.
    """
    steps = (LOAD_NUMBER, SKIP_UNLESS_SETUP, REFUSE, ALLOW)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for args in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)):
        if libc.prctl(*args, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "prctl")


if __name__ == "__main__":
    deny_io_uring()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606 - no shell is wanted
