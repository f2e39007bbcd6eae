"""The systems that `scripts/bench_peers` compares, and an environment for each.

An environment of its own is made in a cache folder (`ZKV_BENCH_CACHE`, else `zkv/bench` in the
user's cache), unless the running Python has all that a peer needs. System packages are never
installed: the command that would is named.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "peers"
PATIENCE_S = 900
MADE = ".zkv-made"


class Missing(Exception):
    """A peer cannot be run here; the text says why, and what would help."""


@dataclass(frozen=True)
class Peer:
    """One system, in one of its ways of doing the task."""

    program: str
    """A file of `peers/`."""
    transport: str
    system: str = ""
    """Its name in the table, if that is not the peer's."""
    servers: bool = True
    """It has servers, whose number may be chosen."""
    servers_max: int = 99
    workers: tuple[int, int] = (1, 99)
    """With how few and how many workers it is worth running."""
    environment: str = ""
    """A folder's name; empty: the running Python."""
    modules: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    """What pip installs; of alternatives (`a | b`) the first that there is."""
    python: str = ""
    """The only version that it runs on."""
    command: str = ""
    """A program that has to be there."""
    packages: str = ""
    """The system's packages that have it."""

    def known_as(self, name: str) -> str:
        """Return its name in the table."""
        return self.system or name


_TORCH = {
    "environment": "torch",
    "modules": ("torch", "numpy"),
    "requirements": ("torch==2.13.0+cpu | torch>=2.4", "numpy"),
}
_MPI = {
    "program": "with_mpi.py",
    "transport": "memory",
    "servers": False,
    # Four ranks that spin take two cores from one another.
    "workers": (2, 2),
    "environment": "mpi",
    "modules": ("mpi4py", "numpy"),
    "requirements": ("mpi4py", "numpy"),
    "command": "mpirun",
    "packages": "openmpi-bin libopenmpi-dev",
}
PEERS: dict[str, Peer] = {
    "arena": Peer("with_zkv.py", "arena", "zkv"),
    "memory": Peer("with_zkv.py", "memory", "zkv"),
    "tcp": Peer("with_zkv.py", "tcp", "zkv"),
    "broker": Peer("with_zkv.py", "broker", "zkv"),
    "sockets": Peer("with_sockets.py", "tcp"),
    "gloo": Peer("with_gloo.py", "tcp", servers=False, workers=(2, 99), **_TORCH),  # type: ignore[arg-type]
    "gloo-buckets": Peer("with_gloo.py", "tcp", servers=False, workers=(2, 99), **_TORCH),  # type: ignore[arg-type]
    "mpi": Peer(**_MPI),  # type: ignore[arg-type]
    "mpi-flat": Peer(**_MPI),  # type: ignore[arg-type]
    "mxnet": Peer(
        "with_mxnet.py",
        "tcp",
        environment="mxnet",
        modules=("mxnet",),
        # The last numpy in which the names still are that it uses.
        requirements=("mxnet==1.9.1", "numpy==1.23.5"),
        python="3.8",
    ),
    "ray": Peer(
        "with_ray.py",
        "memory",
        environment="ray",
        modules=("ray", "numpy"),
        requirements=("ray>=2.40", "numpy"),
    ),
    "torch-rpc": Peer("with_torch_rpc.py", "memory", **_TORCH),  # type: ignore[arg-type]
    "redis": Peer(
        "with_redis.py",
        "tcp",
        servers_max=1,
        environment="redis",
        modules=("redis", "hiredis", "numpy"),
        requirements=("redis", "hiredis", "numpy"),
        command="redis-server",
        packages="redis-server",
    ),
}


def cache() -> Path:
    """Return the folder in which environments are kept."""
    if own := os.environ.get("ZKV_BENCH_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "zkv" / "bench"


def interpreter(name: str, peer: Peer, *, install: bool = True) -> str:
    """Return the Python that a peer's program runs with, after making its environment if need be.

    Raises:
        Missing: it cannot be run here.
    """
    if name == "arena":
        import zkv

        if not hasattr(zkv.Worker, "buffers"):
            raise Missing("this zkv hands out no shared arrays (worker.buffers)")
    if peer.command and shutil.which(peer.command) is None:
        raise Missing(f"{peer.command} is not installed: apt-get install {peer.packages}")
    ours = peer.python in ("", ".".join(map(str, sys.version_info[:2])))
    if ours and all(importlib.util.find_spec(one) is not None for one in peer.modules):
        return sys.executable
    folder = cache() / peer.environment
    python, made = folder / "bin" / "python", folder / MADE
    wanted = "\n".join(peer.requirements)
    if made.exists() and made.read_text() == wanted and python.exists():
        return str(python)
    if not install:
        raise Missing(f"it has no environment in {folder} yet, and none is made (--no-install)")
    _make(folder, peer)
    made.write_text(wanted)
    return str(python)


def _make(folder: Path, peer: Peer) -> None:
    base = _python(peer.python)
    print(f"installing {', '.join(peer.requirements)} into {folder} (once)", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise Missing(f"{folder} has files in it and is no environment; set ZKV_BENCH_CACHE")
    _must([base, "-m", "venv", "--clear", str(folder)], "make an environment")
    python = str(folder / "bin" / "python")
    wanted = [one.split(" | ") for one in peer.requirements]
    try:
        _must(_pip(python, [one[0] for one in wanted]), "install")
    except Missing:
        if all(len(one) == 1 for one in wanted):
            raise
        _must(_pip(python, [one[-1] for one in wanted]), "install")
    _must([python, "-c", f"import {', '.join(peer.modules)}"], "import it")


def _pip(python: str, what: Sequence[str]) -> list[str]:
    quiet = ("--quiet", "--disable-pip-version-check")
    return [python, "-m", "pip", "install", *quiet, *what]


def _python(version: str) -> str:
    """Return a Python of that version, or the running one.

    Raises:
        Missing: there is none.
    """
    if not version:
        return sys.executable
    own = os.environ.get("ZKV_PYTHON" + version.replace(".", ""), "")
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    found = sorted(str(one) for one in pyenv.glob(f"{version}.*/bin/python"))
    for candidate in [own, f"python{version}", *found]:
        # A version manager's stand-in is on PATH and fails when it is started.
        if candidate and shutil.which(candidate) and _starts(candidate, version):
            return candidate
    name = "ZKV_PYTHON" + version.replace(".", "")
    raise Missing(f"it needs Python {version}, which is not here (or name one: {name})")


def _starts(candidate: str, version: str) -> bool:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() == version


def _must(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"to {what} took over {PATIENCE_S} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"could not {what}: {said[-1] if said else 'no word of why'}")
