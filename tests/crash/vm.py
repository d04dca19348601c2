"""The guest of the power cut: what it needs, its image, and the emulator that runs it."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from importlib.util import cache_from_source
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
KERNELS = TESTS.parent / "build" / "vm"
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "cpio": "cpio",
    "mke2fs": "e2fsprogs",
    "strip": "binutils",
    "ldconfig": "libc-bin",
}
"""Programs, and the Debian packages that have them."""
SBIN = "/usr/sbin:/sbin"
DISK_BYTES = 64 << 20
SHARED = "/mnt/home"


def missing() -> str | None:
    """Why no guest can run here, if none can."""
    path = os.pathsep.join((os.environ.get("PATH", ""), SBIN))
    absent = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)]
    if absent:
        return f"no guest can run here: apt-get install {' '.join(absent)}"
    if unbuilt() and not shutil.which("apt-get"):
        return "no guest can run here: its kernel comes from apt-get, which is not there"
    return None


def unbuilt() -> str | None:
    """Why a guest must not run in a test: it would download its kernel."""
    return (
        None if (KERNELS / "kernel-version").exists() else "make crash-power has not run here yet"
    )


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a program and returns what it wrote.

    Raises:
        RuntimeError: it failed.
    """
    env = os.environ | {"PATH": os.pathsep.join((os.environ["PATH"], SBIN))}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def build(into: Path) -> Path:
    """Makes the initial file system in a directory, with this interpreter and this core.

    Raises:
        RuntimeError: the kernel cannot be had, or a tool failed.
    """
    root = into / "root"
    _run("bash", TESTS / "vm" / "build.sh", KERNELS, root)
    for name in json.loads(_run(sys.executable, "-m", "crash.guest", "--files", cwd=TESTS)):
        source = Path(name)
        target = root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        if source.suffix == ".py":
            # Compiling is slow in the guest, and nothing may be written beside these sources.
            py_compile.compile(str(target), cache_from_source(str(target)), name, doraise=True)
    for core in root.rglob("_core.abi3.so"):
        _run("strip", "--strip-debug", core)
    interpreter = Path(sys.executable).resolve()
    shutil.copy2(interpreter, root / str(interpreter).lstrip("/"))
    libraries = Path("usr/lib/x86_64-linux-gnu")
    _run("ldconfig", "-r", root, "-n", f"/{libraries}")
    (root / "lib64").symlink_to(libraries)
    _run("bash", "-euo", "pipefail", "-c", "find . | cpio --quiet -o -H newc >../initrd", cwd=root)
    shutil.rmtree(root)
    return into / "initrd"


def command(drives: int) -> str:
    """The script that the guest runs."""
    interpreter = Path(sys.executable).resolve()
    modules = f"{TESTS}:{TESTS.parent / 'python'}"
    binds = [f"mount --bind /mnt/disk/drive{n} {SHARED}/drive{n}" for n in range(drives)]
    return "\n".join(
        [*binds, f"PYTHONPATH={modules} exec {interpreter} -S -B -m crash.guest {SHARED}", ""]
    )


def make_disk(drives: int) -> bytes:
    """An ext4 file system with an empty directory for each drive."""
    with tempfile.TemporaryDirectory() as scratch:
        top, image = Path(scratch, "top"), Path(scratch, "image")
        top.mkdir()
        for number in range(drives):
            (top / f"drive{number}").mkdir(mode=0o700)
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _run("mke2fs", "-q", "-t", "ext4", "-b", "4096", "-d", top, image)
        return image.read_bytes()


def start(home: Path, initrd: Path, disk: Path, accelerator: str) -> subprocess.Popen[bytes]:
    """Starts a guest on the disk behind a socket; `home` is shared with it.

    With `cache=writeback` the guest sees a volatile write cache; the emulator passes on writes at
    once, and flushes as flushes. Not its NVMe: that takes writes with forced unit access, on which
    ext4 relies for its commits, for plain ones.
    """
    console = home.with_suffix(".console")
    processor = "max" if accelerator == "tcg" else "host"
    options = {
        "machine": "q35",
        "accel": "tcg,thread=multi" if accelerator == "tcg" else accelerator,
        "cpu": processor,
        "smp": "2",
        "m": "768",
        "kernel": KERNELS / "vmlinuz",
        "initrd": initrd,
        "append": "console=ttyS0 quiet mitigations=off no_timer_check panic=-1",
        "display": "none",
        "monitor": "none",
        "nic": "none",
        "serial": f"file:{console}",
        "drive": f"file=nbd:unix:{disk},if=none,id=disk,format=raw,cache=writeback",
        "fsdev": f"local,path={home},id=home,security_model=none,multidevs=remap",
    }
    arguments = [text for key, value in options.items() for text in (f"-{key}", str(value))]
    devices = ["virtio-blk-pci,drive=disk", "virtio-9p-pci,fsdev=home,mount_tag=home"]
    arguments += [text for device in devices for text in ("-device", device)]
    with home.with_suffix(".emulator").open("ab") as complaints:
        return subprocess.Popen(
            ["qemu-system-x86_64", "-nodefaults", "-no-reboot", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
        )


def told(home: Path) -> str:
    """The end of what guest and emulator said."""
    paths = (home.with_suffix(".console"), home.with_suffix(".emulator"))
    return "".join(path.read_text(errors="replace")[-2000:] for path in paths if path.exists())
