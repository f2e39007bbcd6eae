"""Settings of the `zkv` command: a TOML file, the environment, and flags, the later the stronger.

All mistakes are found at once and named with their places. A value is checked by the same pure
function that reads it later. This module starts nothing and must not know sockets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from zkv.errors import ConfigError
from zkv.heartbeat import BEAT_S, beat
from zkv.limits import CONNECTIONS_MAX, KEYS_MAX, MEMBERS_MAX, MESSAGES_PER_S
from zkv.optimizer_spec import optimizer
from zkv.placement import BLOCK_BYTES_LEAST
from zkv.placements import placement
from zkv.policy import policy
from zkv.sizes import size as size
from zkv.snapshot import every
from zkv.staleness import staleness
from zkv.topology import topology
from zkv.wire import IO_THREADS_MAX, PAYLOAD_BYTES_MAX, SHARED_BYTES, SOCKET_BYTES_MAX
from zkv_cli.setting_places import PREFIX, Flags, Places, read_file
from zkv_codecs.deltas import down_plan
from zkv_codecs.plan import plan
from zkv_net.sockets import split_address

FILE = Path("zkv.toml")


def seconds(value: float) -> float:
    """Return a time in seconds.

    Raises:
        ValueError: not above 0, or not finite.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{value} s: a time must be above 0 and finite")
    return value


def _address(text: str) -> str:
    split_address(text)
    return text


def _dialled(text: str) -> str:
    _, port = split_address(text)
    if port == "*" or int(port) == 0:
        raise ValueError(
            f"address {text!r}: nothing can be reached at port {port}; give the real one"
        )
    return text


def _policy(text: str) -> str:
    return str(policy(text))


def _optimizer(text: str) -> str:
    optimizer(text)
    return text


def _rate(text: str) -> str:
    if not 0 <= float(text) < math.inf:
        raise ValueError("a learning rate is finite and not negative")
    return text


def _norm(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{value}: a norm is finite and not negative (0: no limit)")
    return value


def _staleness(text: str) -> str:
    return str(staleness(text))


def _codec(text: str) -> str:
    return plan(text).text


def _codec_down(text: str) -> str:
    return down_plan(text).text


def _blocks(value: int) -> int:
    if value and not BLOCK_BYTES_LEAST <= value <= PAYLOAD_BYTES_MAX:
        raise ValueError(
            f"blocks of {value} bytes: from {BLOCK_BYTES_LEAST} to {PAYLOAD_BYTES_MAX}, or 0: by "
            "the link's measured speed"
        )
    return value


def _buffer(value: int) -> int:
    if value > SOCKET_BYTES_MAX:
        raise ValueError(
            f"socket buffers of {value} bytes: at most {SOCKET_BYTES_MAX}, or 0: as the system "
            "likes"
        )
    return value


def _placement(text: str, info: ValidationInfo) -> str:
    value = placement(text)
    if "servers" in info.data:
        value.check(info.data["servers"])
    return value.text


def _beat(value: float, info: ValidationInfo) -> float:
    for name in ("worker_lost_s", "server_lost_s"):
        if (lost_s := info.data.get(name, math.inf)) <= value:
            raise ValueError(
                f"{value:g} s between heartbeats: everybody would be lost, after {lost_s:g} s of "
                f"silence ({name}); give that more than the time between heartbeats"
            )
    return value


def _topology(text: str) -> str:
    return str(topology(text))


LIVE: Mapping[str, Callable[[str], str]] = {
    "lr": _rate,
    "policy": _policy,
    "staleness": _staleness,
    "codec": _codec,
    "codec_down": _codec_down,
}
"""What can be changed while a cluster runs, and how it is checked."""


Address = Annotated[str, AfterValidator(_address)]
Dialled = Annotated[str, AfterValidator(_dialled)]
Seconds = Annotated[float, AfterValidator(seconds)]
Beat = Annotated[float, BeforeValidator(beat), AfterValidator(_beat)]
Count = Annotated[int, Field(ge=1, le=65_535)]
IoThreads = Annotated[int, Field(ge=1, le=IO_THREADS_MAX)]
SocketBuffer = Annotated[int, BeforeValidator(size), AfterValidator(_buffer)]
Connections = Annotated[int, Field(ge=1)]
Rate = Annotated[int, Field(ge=1)]
Loop = Literal["auto", "asyncio", "uvloop"]


class Section(BaseModel):
    """One table of the file. Keys that it does not have are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        # Else it is found where it is used: no path has a NUL, and nothing else travels as text.
        if isinstance(value, str):
            value.encode()
            if "\0" in value:
                raise ValueError("a text has no NUL in it")
        return value


class BrokerSection(Section):
    """`[broker]`: what a broker decides and where it listens. Times in seconds."""

    bind: Address = "tcp://127.0.0.1:5555"
    data_bind: Address | None = None
    advertise: str | None = None
    servers: Count = 1
    workers: Count = 1
    policy: Annotated[str, AfterValidator(_policy)] = "bsp"
    min_workers: Annotated[int, Field(ge=0, le=65_535)] = 0
    on_short: Literal["wait", "fail"] = "wait"
    optimizer: Annotated[str, AfterValidator(_optimizer)] | None = None
    staleness: Annotated[str, AfterValidator(_staleness)] = "none"
    codec: Annotated[str, AfterValidator(_codec)] = "none"
    codec_down: Annotated[str, AfterValidator(_codec_down)] = "none"
    block_bytes: Annotated[int, BeforeValidator(size), AfterValidator(_blocks)] = 0
    placement: Annotated[str, AfterValidator(_placement)] = "by_size"
    replicas: Annotated[int, Field(ge=0, le=1)] = 0
    topology: Annotated[str, AfterValidator(_topology)] = "servers"
    snapshot_dir: str = ""
    snapshot_every: Annotated[str, AfterValidator(lambda text: str(every(text)))] = ""
    restore: str = ""
    restore_whole: bool = False
    journal: str = "auto"
    record: str = ""
    insecure: bool = False
    worker_lost_s: Seconds = 10.0
    server_lost_s: Seconds = 20.0
    beat_s: Beat = BEAT_S
    server_back_s: Seconds = 30.0
    norm_limit: Annotated[float, AfterValidator(_norm)] = 0.0
    norm_action: Literal["refuse", "clip", "quarantine"] = "refuse"
    max_members: Annotated[int, Field(ge=1, le=MEMBERS_MAX * 16)] = MEMBERS_MAX
    max_keys: Annotated[int, Field(ge=1)] = KEYS_MAX
    max_connections: Connections = CONNECTIONS_MAX
    max_rate: Rate = MESSAGES_PER_S
    io_threads: IoThreads = 1
    socket_buffer: SocketBuffer = 0
    loop: Loop = "auto"


class ServerSection(Section):
    """`[server]`: one server. `budget` is for contributions that wait; 0: no limit. `shared` is
    memory through which payloads go to workers of its machine; 0: through sockets."""

    bind: Address = "tcp://127.0.0.1:0"
    advertise: str | None = None
    name: Annotated[str, Field(max_length=200)] = ""
    budget: Annotated[int, BeforeValidator(size)] = 0
    shared: Annotated[int, BeforeValidator(size)] = SHARED_BYTES
    connect_timeout_s: Seconds = 60.0
    broker_lost_s: Seconds = 10.0
    record: str = ""
    insecure: bool = False
    max_connections: Connections = CONNECTIONS_MAX
    max_rate: Rate = MESSAGES_PER_S
    io_threads: IoThreads = 1
    socket_buffer: SocketBuffer = 0
    loop: Loop = "auto"


class JoinSection(Section):
    """`[join]`: the broker to join, for all commands that need one that runs; the folder of keys,
    for all commands ("": the default one, where keys are needed); and whether a broker on another
    machine may be joined without keys."""

    broker: Dialled | None = None
    keys_folder: str = ""
    insecure: bool = False


class RunSection(Section):
    """`[run]`: what `zkv run` tells its workers. Times in seconds; None: the workers' default.

    `grace_s` is how long workers may go on once one of them has failed. `io_threads` and
    `socket_buffer` are the workers'; their cluster has its own.
    """

    grace_s: Seconds = 2.0
    narrate_after_s: Seconds | None = None
    stall_timeout_s: Seconds | None = None
    io_threads: IoThreads | None = None
    socket_buffer: SocketBuffer | None = None


class LogSection(Section):
    """`[log]`: how the processes log, to standard error."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class _Nested(EnvSettingsSource):
    """The environment, but only names with `__`: ZKV_BROKER is an address, not a section."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, True


class Settings(BaseSettings):
    """All settings, checked."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )
    broker: BrokerSection = BrokerSection()
    server: ServerSection = ServerSection()
    join: JoinSection = JoinSection()
    run: RunSection = RunSection()
    log: LogSection = LogSection()


def load(flags: Flags | None = None, file: Path | None = None) -> Settings:
    """Return the settings: `flags`, then ZKV_SECTION__KEY variables, then the file, then defaults.

    The file is `file`, or `zkv.toml` in the working directory if that is there.

    Raises:
        ConfigError: one or more mistakes; each is listed with its place.
    """
    path = file or (FILE if FILE.is_file() else None)
    given = {place: value for place, value in (flags or {}).items() if value is not None}
    if ("join", "broker") not in given and os.environ.get("ZKV_BROKER"):
        given["join", "broker"] = os.environ["ZKV_BROKER"]
    in_file = read_file(path) if path is not None else {}

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del env_settings, dotenv_settings, file_secret_settings
            return init_settings, _Nested(cls), InitSettingsSource(cls, in_file)

    nested: dict[str, Any] = {}
    for (section, key), value in given.items():
        nested.setdefault(section, {})[key] = value
    strangers = _strangers()
    try:
        settings = Layered(**nested)
    except ValidationError as error:
        places = Places(flags or {}, path)
        found = [f"{places.of(e['loc'])}: {_words(e)}" for e in error.errors()] + strangers
        # An option of several sections is one mistake.
        raise ConfigError(_listed(list(dict.fromkeys(found)))) from None
    if strangers:
        raise ConfigError(_listed(strangers))
    return settings


def live_changes(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (setting, value) pairs of texts such as "lr=0.01" and "policy=ssp:2".

    Raises:
        ConfigError: one or more mistakes; each is listed.
    """
    pairs, found = [], []
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not equals or name not in LIVE:
                raise ValueError(f"valid are {', '.join(LIVE)}, as in lr=0.01")
            LIVE[name](value)
            pairs.append((name, value))
        except ValueError as error:
            found.append(f"{text!r}: {error}")
    if found:
        raise ConfigError(_listed(found))
    return pairs


def _strangers() -> list[str]:
    """The variables that look like settings of a section that does not exist."""
    sections = tuple(f"{PREFIX}{name.upper()}__" for name in Settings.model_fields)
    return [
        f"environment variable {name}: there is no such section; there are: "
        f"{', '.join(Settings.model_fields)}"
        for name in sorted(os.environ)
        if name.upper().startswith(PREFIX)
        and "__" in name
        and not name.upper().startswith(sections)
    ]


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def _listed(found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    return f"{len(found)} mistakes in the configuration:" + "".join(f"\n  {one}" for one in found)


def _words(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        *sections, _ = error["loc"]
        model: Any = Settings
        for name in sections:
            model = Settings.model_fields[str(name)].annotation
        what = "setting" if sections else "section"
        return f"there is no such {what}; there are: {', '.join(model.model_fields)}"
    text = str(error["msg"]).removeprefix("Value error, ")
    shown = _shown(error["input"])
    return text if shown in text or len(shown) > 60 else f"{text} (given: {shown})"
