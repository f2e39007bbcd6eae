"""One whole model version as a safetensors file, read by an observer, who takes part in nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zkv import __version__
from zkv.dtypes import Array
from zkv.errors import UnknownKey
from zkv.wire import MODEL
from zkv_cli.ask import ask_status
from zkv_cli.exits import CommandFailed
from zkv_net import loop as net
from zkv_workers import signals as s
from zkv_workers.driver import Driver
from zkv_workers.faces import pulled
from zkv_workers.model import session_config

INTEGER, TEXT = "int:", "str:"


def name_of(key: str | int) -> str:
    """Return the name of a key in the file: text, "int:7" for an integer.

    A text key that begins with "int:" or "str:" gets "str:" in front, so that no two keys share a
    name; so does "__metadata__", which the format has for itself.

    >>> name_of("layer.weight"), name_of(7), name_of("int:7")
    ('layer.weight', 'int:7', 'str:int:7')
    """
    if isinstance(key, int):
        return f"{INTEGER}{key}"
    return f"{TEXT}{key}" if key.startswith((INTEGER, TEXT)) or key == "__metadata__" else key


def key_of(name: str) -> str | int:
    """Return the key that `name_of` gave this name."""
    if name.startswith(INTEGER):
        return int(name.removeprefix(INTEGER))
    return name.removeprefix(TEXT)


def write_model(address: str, file: Path, timeout_s: float) -> tuple[int, int, int]:
    """Write the model of a cluster; return its version, the number of arrays and the file's bytes.

    Of a table "emb" the file has the numbers of all rows that updates have changed, "emb.ids"
    (uint64, ascending), and their values, "emb.rows".

    Raises:
        UnknownKey: nothing was initialised yet.
        CommandFailed: bfloat16 values, and no ml_dtypes to read them.
        ClusterNotReady: no broker, or not all servers, within `timeout_s`.
        OSError: the file cannot be written.
    """
    status = ask_status(address, timeout_s)
    if not status["keys"] and not status["tables"]:
        # A worker's pull would wait for whoever initialises the model.
        raise UnknownKey(f"the cluster at {address} has no model yet: no worker has called init")
    version, arrays = net.run(lambda: _read(address, timeout_s))
    write_file(file, arrays, {"zkv_version": __version__, "model_version": str(version)})
    return version, len(arrays), file.stat().st_size


async def _read(address: str, timeout_s: float) -> tuple[int, dict[str | int, Array]]:
    config, route = session_config(
        address,
        name=f"export-{net.instance_number():x}",
        observer=True,
        connect_timeout_s=timeout_s,
        wait_timeout_s=timeout_s,
    )
    driver = Driver(config, route=route)
    try:
        await driver.call(s.Join)
        version, arrays = await _version(driver)
        await driver.call(s.Leave)
        return version, arrays
    finally:
        driver.close()


async def _version(driver: Driver) -> tuple[int, dict[str | int, Array]]:
    """Return one version of all keys, and of the rows of all tables."""
    there: s.Values = await driver.call(lambda token: s.Pull(token, (), rows=True))
    driver.feed(s.ReleaseRows(there.pull))
    layout = there.layout
    names = [key for key, kid in layout.kid_of.items() if layout.group_of.get(kid) == MODEL]
    values: s.Values = await driver.call(lambda token: s.Pull(token, tuple(names), rows=True))
    try:
        arrays: dict[str | int, Array] = {}
        if names:
            arrays = pulled(values, tuple(names))
        for entry in layout.tables.entries.values():
            ids, rows = await driver.call(
                lambda token, kid=entry.kid: s.AskRows(token, kid, None, 0, values.pull)  # type: ignore[misc]
            )
            for part, array in (("ids", ids), ("rows", rows)):
                name = f"{entry.spec.key}.{part}"
                if name in arrays:
                    raise CommandFailed(f"key {name!r} is in the way of table {entry.spec.key!r}")
                arrays[name] = array
    except TypeError as error:
        raise CommandFailed(str(error)) from error
    return values.version, arrays


def write_file(file: Path, arrays: Mapping[str | int, Array], metadata: dict[str, str]) -> None:
    """Write arrays of any shape as safetensors: the whole file, or none under this name.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    from safetensors.numpy import save_file

    plain = {name_of(key): np.ascontiguousarray(a).reshape(a.shape) for key, a in arrays.items()}
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(plain, temporary, metadata=metadata)
        # mkstemp lets nobody else read; a model is an ordinary file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
