"""`zkv keys`: make a machine's own keys, and say at the broker whose keys are let in."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zkv_cli.exits import EPILOG, reporting, say

if TYPE_CHECKING:
    from zkv_net.keys import KeyFolder, Own

app = typer.Typer(
    name="keys",
    help="Make keys, and say whose keys a broker lets in (docs/security.md).",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Folder = Annotated[
    Path | None,
    typer.Option("--keys", help="The keys folder (default: ZKV_KEYS, else ~/.config/zkv/keys)."),
]
Roles = Annotated[
    str, typer.Argument(help="worker, server, follower or admin; several as server,worker.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _folder(named: Path | None) -> KeyFolder:
    from zkv_net.keys import KeyFolder

    return KeyFolder(named)


def _checked(check: Any, text: str) -> Any:
    from zkv.errors import ConfigError

    try:
        return check(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _here() -> str:
    """This machine's name, as far as a key may be called so."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64] or "machine"


@app.command(epilog=EPILOG)
def new(
    roles: Annotated[
        str, typer.Argument(help="broker, or worker, server, follower, admin; or server,worker.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="What to call the key (default: this machine).")
    ] = None,
    broker_key: Annotated[
        str | None,
        typer.Option("--broker-key", help="The broker's public key, as zkv keys list prints it."),
    ] = None,
    keys: Folder = None,
) -> None:
    """Make this machine's own keys; the secret one never leaves it.

    Prints the command that lets it in, to be typed on the broker's machine. Where there are keys
    already, `--broker-key` only says which broker to trust.
    """
    with reporting("keys new"):
        from zkv.roles import check_key, check_name, check_roles

        folder = _folder(keys)
        trusted = None if broker_key is None else _checked(check_key, broker_key)
        broker = roles == "broker"
        wanted = ("broker",) if broker else tuple(sorted(_checked(check_roles, roles)))
        if trusted is None or not folder.exists:
            called = _checked(check_name, name or ("broker" if broker else _here()))
            own = folder.make(called, wanted)
        else:
            own = folder.own()
        if trusted is not None:
            folder.trust(trusted)
        for line in _told(folder, own, trusted):
            say(line)


def _told(folder: KeyFolder, own: Own, trusted: str | None) -> list[str]:
    lines = [f"{folder.path}: key {own.name!r} ({', '.join(own.roles)}), public {own.public}"]
    if "broker" in own.roles:
        return [
            *lines,
            f"on the other machines:  zkv keys new worker --broker-key {own.public}",
            "(or server, follower, admin; or server,worker), and here what that prints",
        ]
    lines.append(f"on the broker's machine:  {own.add_command}")
    if trusted is None and not (folder.path / "broker.key").exists():
        roles = ",".join(own.roles)
        lines.append(
            "the broker's key is not known here yet; `zkv keys list` prints it on its machine, "
            f"then here:  zkv keys new {roles} --broker-key KEY"
        )
    return lines


@app.command(epilog=EPILOG)
def add(
    roles: Roles,
    name: Annotated[str, typer.Argument(help="What to call the key, in messages too.")],
    key: Annotated[str, typer.Argument(help="The public key, as zkv keys new printed it.")],
    keys: Folder = None,
) -> None:
    """At the broker: let a key in, or give it other roles. A broker that runs notices."""
    with reporting("keys add"):
        from zkv.errors import ConfigError
        from zkv.roles import Holder, check_key, check_name, check_roles

        folder = _folder(keys)
        if "broker" not in folder.own().roles:
            raise ConfigError(
                f"{folder.path} has no broker's keys: who is let in is said on the broker's "
                "machine (zkv keys new broker makes its keys)"
            )
        holder = Holder(
            *(_checked(check_key, key), _checked(check_name, name), _checked(check_roles, roles))
        )
        if holder.key == folder.own().public:
            raise ConfigError("that is the broker's own key, which may be everything")
        folder.add(holder)
        say(f"{holder} is let in")


@app.command(epilog=EPILOG)
def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|KEY", help="Its name, or the public key.")],
    keys: Folder = None,
) -> None:
    """At the broker: let a key in no more. A broker that runs cuts its links within a second."""
    with reporting("keys revoke"):
        say(f"{_folder(keys).revoke(which)} is let in no more")


@app.command(name="list", epilog=EPILOG)
def list_(as_json: Json = False, keys: Folder = None) -> None:
    """Say which keys this machine has, which broker it trusts, and (at a broker) who is let in."""
    with reporting("keys list"):
        folder = _folder(keys)
        plain = _plain(folder)
        if as_json:
            say(json.dumps(plain, ensure_ascii=False, indent=2))
            return
        own = plain["own"]
        say(f"{folder.path}: key {own['name']!r} ({', '.join(own['roles'])}), public {own['key']}")
        say(f"broker: {plain['broker'] or 'not known here (zkv keys new ROLE --broker-key KEY)'}")
        if "broker" in own["roles"]:
            say(f"{len(plain['authorized'])} let in" + ":" * bool(plain["authorized"]))
        for one in plain["authorized"]:
            say(f"  {one['name']:<20} {','.join(one['roles']):<24} {one['key']}")


def _plain(folder: KeyFolder) -> dict[str, Any]:
    from zkv.errors import ConfigError

    own = folder.own()
    try:
        broker = folder.broker()
    except ConfigError:
        broker = ""
    return {
        "folder": str(folder.path),
        "own": {"name": own.name, "roles": list(own.roles), "key": own.public},
        "broker": broker,
        "authorized": [
            {"name": one.name, "roles": sorted(one.roles), "key": one.key}
            for one in folder.holders()
        ],
    }
