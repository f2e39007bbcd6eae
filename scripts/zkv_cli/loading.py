"""What commands begin with: their settings, and the broker that they ask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from zkv_cli import options as o

Timeout = Annotated[
    float, typer.Option("--timeout", min=0.001, help="How long to wait for an answer, in seconds.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(flags: o.Flags, config: Path | None) -> Any:
    """Return the settings that these flags and this file give; from here on, log as they say.

    Raises:
        ConfigError: one or more mistakes; each is listed with its place.
    """
    from zkv_cli import logs, settings

    loaded = settings.load(flags, config)
    logs.set_up(loaded.log.format, loaded.log.level)
    # Whatever this command starts finds them there, as a worker's own program does.
    if loaded.join.keys_folder:
        os.environ["ZKV_KEYS"] = os.path.abspath(loaded.join.keys_folder)
    if loaded.join.insecure or loaded.broker.insecure:
        os.environ["ZKV_INSECURE"] = "1"
    return loaded


def broker_named(settings: Any) -> str:
    """Return the address of the broker that is named.

    Raises:
        ConfigError: none is.
    """
    from zkv.errors import ConfigError

    if settings.join.broker is None:
        raise ConfigError(
            "no broker is named: give --broker tcp://HOST:PORT, set ZKV_BROKER, "
            "or write broker under [join] of zkv.toml"
        )
    return str(settings.join.broker)


def broker_asked(settings: Any) -> str:
    """Return the broker named, else the one that `zkv up` starts here with the same settings.

    Raises:
        ConfigError: none is, and its port is not known.
    """
    from zkv_net.sockets import join_address, split_address

    host, port = split_address(settings.broker.bind)
    if settings.join.broker is not None or port in ("0", "*"):
        return broker_named(settings)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
