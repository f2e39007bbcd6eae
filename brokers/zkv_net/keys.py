"""Keys on disk: a process's own pair, the broker's public key, and at a broker, who is let in.

A keys folder has ``secret.key`` (own pair, only for its owner to read), ``broker.key`` (the public
key of the broker that this machine trusts; not on the broker's own), and ``authorized/``, one file
for each key that the broker lets in, named by the key's digits and nothing that anybody chose.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from zkv.errors import ConfigError
from zkv.roles import KEYS_MAX, ROLES, Holder, check_key, check_name, check_roles

VARIABLE = "ZKV_KEYS"
INSECURE = "ZKV_INSECURE"
SECRET, BROKER, AUTHORIZED = "secret.key", "broker.key", "authorized"
FILE_BYTES_MAX = 4096
_SENSELESS = (KeyError, TypeError, ValueError, RecursionError)
"""What a text leads to that is no file of ours."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class Own:
    """A process's own pair; `roles` is what it was made for: ("broker",) or names of roles."""

    public: str
    secret: str = field(repr=False)
    name: str
    roles: tuple[str, ...]

    @property
    def add_command(self) -> str:
        """What to type at the broker, so that it lets this key in."""
        roles = ",".join(role for role in self.roles if role in ROLES) or "worker"
        return f"zkv keys add {roles} {self.name} {self.public}"


def default_folder() -> Path:
    """Return the folder that is used where none is named."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "zkv" / "keys"


def named_folder() -> Path | None:
    """Return the folder that ZKV_KEYS names (`--keys` sets it); None: none is named."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def check_curve() -> None:
    """Check that this ZeroMQ can encrypt.

    Raises:
        ConfigError: it was built without CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"this libzmq ({zmq.zmq_version()}) was built without CURVE, so nothing can be "
            "encrypted: install pyzmq's wheel (pip install --force-reinstall --only-binary :all: "
            "pyzmq), or say --insecure if everybody in the network is trusted"
        )


def new_pair() -> tuple[str, str]:
    """Return a new public and secret key, in hexadecimal digits."""
    check_curve()
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


def printable(key: str) -> bytes:
    """Return a key as ZeroMQ's options take it."""
    return bytes(z85.encode(bytes.fromhex(key)))


class KeyFolder:
    """One keys folder. Every method reads what is there now."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or named_folder() or default_folder()

    @property
    def exists(self) -> bool:
        """Whether there is an own pair."""
        return (self.path / SECRET).exists()

    def own(self) -> Own:
        """Return the own pair.

        Raises:
            ConfigError: there is none, it is damaged, or others can read it; what to type is named.
        """
        path = self.path / SECRET
        try:
            text = _read(path, private=True)
        except FileNotFoundError:
            raise ConfigError(f"there are no keys in {self.path}: {_MAKE}") from None
        try:
            plain = tomllib.loads(text)
            roles = tuple(str(role) for role in plain["roles"])
            made = Own(check_key(plain["public"]), check_key(plain["secret"]), plain["name"], roles)
            check_name(made.name)
        except (*_SENSELESS, AttributeError) as error:
            raise ConfigError(f"{path}: no key file ({error}); make it anew: {_MAKE}") from error
        derived = z85.decode(zmq.curve_public(printable(made.secret))).hex()
        if derived != made.public:
            raise ConfigError(f"{path}: its two keys are no pair; make it anew: {_MAKE}")
        return made

    def make(self, name: str, roles: tuple[str, ...]) -> Own:
        """Make the own pair; the secret is written once, for its owner alone.

        Raises:
            ConfigError: there is one already.
            OSError: it cannot be written.
        """
        public, secret = new_pair()
        made = Own(public, secret, check_name(name), roles)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = (
            "# zkv: the secret key of this machine. It never leaves it.\n"
            f"name = {json.dumps(name)}\nroles = {json.dumps(list(roles))}\n"
            f'public = "{public}"\nsecret = "{secret}"\n'
        )
        try:
            _write(self.path / SECRET, text, 0o600, os.O_EXCL)
        except FileExistsError:
            raise ConfigError(
                f"{self.path / SECRET} is there already; name another folder with --keys, or "
                "remove it if no process needs it any more"
            ) from None
        return made

    def broker(self) -> str:
        """Return the public key of the broker: the one that was told, or the own of a broker.

        Raises:
            ConfigError: none is known; what to type is named.
        """
        path = self.path / BROKER
        try:
            return check_key(_read(path))
        except FileNotFoundError:
            own = self.own()
            if "broker" in own.roles:
                return own.public
            raise ConfigError(
                f"{path}: the broker's key is not known here; on the broker's machine "
                f"`zkv keys list` prints it, then here: zkv keys new {','.join(own.roles)} "
                "--broker-key KEY (the own key stays)"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def trust(self, key: str) -> None:
        """Remember the broker's public key."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self.path / BROKER, check_key(key) + "\n", 0o644, os.O_TRUNC)

    # --- who is let in -----------------------------------------------------------------------

    def add(self, holder: Holder) -> None:
        """Let a key in, or give it other roles.

        Raises:
            ConfigError: another key has this name, or there are too many.
        """
        held = {one.key: one for one in self.holders()}
        same = next(
            (o for o in held.values() if o.name == holder.name and o.key != holder.key), None
        )
        if same is not None:
            raise ConfigError(
                f"another key has the name {holder.name!r} ({same}); choose another name, or "
                f"first: zkv keys revoke {holder.name}"
            )
        if holder.key not in held and len(held) >= KEYS_MAX:
            raise ConfigError(f"{len(held)} keys are let in, the most that there can be")
        folder = self.path / AUTHORIZED
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = f"name = {json.dumps(holder.name)}\nroles = {json.dumps(sorted(holder.roles))}\n"
        # Whole or not at all: a broker may be reading.
        beside = folder / f".{holder.key}.{os.getpid()}"
        _write(beside, text, 0o600, os.O_TRUNC)
        beside.replace(folder / holder.key)

    def revoke(self, which: str) -> Holder:
        """Let a key in no more, by its name or its digits.

        Raises:
            ConfigError: no such key is let in; those that are are named.
        """
        held = list(self.holders())
        for holder in held:
            if which in (holder.name, holder.key):
                (self.path / AUTHORIZED / holder.key).unlink()
                return holder
        there = ", ".join(one.name for one in held) or "none"
        raise ConfigError(f"no key {which[:80]!r} is let in at {self.path}; there are: {there}")

    def holders(self) -> Iterator[Holder]:
        """Yield who is let in, by name.

        Raises:
            ConfigError: a file is none of ours, or others may write to the folder.
        """
        found, wrong = self.scan()
        if wrong:
            raise ConfigError("; ".join(wrong))
        yield from sorted(found, key=lambda one: one.name)

    def scan(self) -> tuple[list[Holder], list[str]]:
        """Return who is let in, and what is wrong with the files of others (who are not).

        Raises:
            OSError: the folder or a file cannot be read at present.
        """
        folder = self.path / AUTHORIZED
        try:
            _check_writers(folder)
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            return [], []
        except ConfigError as error:
            return [], [str(error)]
        found, wrong = [], []
        for name in names:
            if name.startswith("."):
                continue
            try:
                plain = tomllib.loads(_read(folder / check_key(name)))
                roles = check_roles(",".join(plain["roles"]))
                found.append(Holder(check_key(name), check_name(plain["name"]), roles))
            except FileNotFoundError:
                continue
            except (ConfigError, *_SENSELESS) as error:
                wrong.append(f"{folder / name[:80]}: not a key that is let in: {error}")
        if len(found) > KEYS_MAX:
            wrong.append(f"{folder}: {len(found)} keys; only the first {KEYS_MAX} are let in")
        return found[:KEYS_MAX], wrong

    def changed(self) -> Any:
        """Return a value that differs when `scan` may give something else."""
        folder = self.path / AUTHORIZED
        try:
            with os.scandir(folder) as entries:
                seen = sorted((e.name, e.stat(follow_symlinks=False).st_mtime_ns) for e in entries)
            return os.stat(folder).st_mode, tuple(seen)
        except FileNotFoundError:
            return None


_MAKE = (
    "`zkv keys new broker` on the broker's machine, then `zkv keys new server` or "
    "`zkv keys new worker` on the others; or say --insecure if everybody in the network is trusted"
)


def _read(path: Path, *, private: bool = False) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link, and those are not followed") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is no file")
        if private and sys.platform != "win32" and mode & 0o077:
            raise ConfigError(
                f"{path} is a secret, and others can read it (mode {mode & 0o777:04o}): "
                f"chmod 600 {path}"
            )
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes: no file of ours")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text: {error}") from error


def _write(path: Path, text: str, mode: int, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | _NO_LINK, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_writers(folder: Path) -> None:
    mode = folder.stat().st_mode
    if sys.platform != "win32" and mode & 0o022:
        raise ConfigError(
            f"{folder}: others may write there (mode {mode & 0o777:04o}), so they could let "
            f"anybody in: chmod 700 {folder}"
        )
