"""Codecs as text: stages joined by +, then `ef` or `dgc:M`, as in `topk:0.01+int8+ef`.

The text is a codec's plain form too: it stands in settings, in the handshake and in every frame,
and reads back as an equal value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from zkv_codecs.chain import Chain
from zkv_codecs.feedback import Codec, Dgc, ErrorFeedback
from zkv_codecs.floats import Bf16, Fp8E4M3, Fp8E5M2, Fp16, ScaledFp16
from zkv_codecs.ints import Int4, Int8, UInt8
from zkv_codecs.lossless import Lz4, Zstd
from zkv_codecs.lowrank import PowerSgd
from zkv_codecs.packed import Stage
from zkv_codecs.signs import BLOCK, MXNET_THRESHOLD, Majority, MxOneBit, MxTwoBit, OneBit, TwoMeans
from zkv_codecs.sparse import RandomK, Threshold, TopK, TopKSampled
from zkv_codecs.stochastic import TERNARY_BLOCK, Natural, Qsgd, Ternary

TEXT_MAX = 200
"""Characters: more than any codec needs, and little enough to be read from a stranger."""

_Make = Callable[[str, str], Stage]


def _plain(make: Callable[[], Stage]) -> _Make:
    def read(name: str, given: str) -> Stage:
        if given:
            raise ValueError(f"codec {name} takes no parameter, given {given!r}")
        return make()

    return read


def _whole(make: Callable[[int], Stage], default: int | None = None) -> _Make:
    def read(name: str, given: str) -> Stage:
        if not given and default is not None:
            return make(default)
        if not (given.isascii() and given.isdigit() and len(given) <= 9):
            raise ValueError(f"codec {name}:{given}: give a whole number, as in {name}:4")
        return make(int(given))

    return read


def _number(make: Callable[[float], Stage], example: str, default: float | None = None) -> _Make:
    def read(name: str, given: str) -> Stage:
        if not given and default is not None:
            return make(default)
        return make(number(f"codec {name}:{given}".rstrip(":"), given, f"{name}:{example}"))

    return read


def _qsgd(name: str, given: str) -> Stage:
    levels, colon, block = given.partition(":")
    alone = _whole(Qsgd)(name, levels)
    if not colon:
        return alone
    assert isinstance(alone, Qsgd)
    return _whole(lambda size: Qsgd(alone.levels, size))(f"{name}:{levels}", block)


def number(where: str, text: str, example: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none; the text names where it stands and gives an example.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ValueError(f"{where}: give a number, as in {example}")
    return value


STAGES: dict[str, _Make] = {
    "fp16": _plain(Fp16),
    "sfp16": _whole(ScaledFp16, ScaledFp16.block_default),
    "bf16": _plain(Bf16),
    "fp8_e4m3": _whole(Fp8E4M3, Fp8E4M3.block_default),
    "fp8_e5m2": _whole(Fp8E5M2, Fp8E5M2.block_default),
    "int8": _whole(Int8, Int8.block_default),
    "int4": _whole(Int4, Int4.block_default),
    "uint8": _whole(UInt8, UInt8.block_default),
    "topk": _number(TopK, "0.01"),
    "topk_sampled": _number(TopKSampled, "0.01"),
    "randomk": _number(RandomK, "0.01"),
    "threshold": _number(Threshold, "0.001"),
    "qsgd": _qsgd,
    "natural": _plain(Natural),
    "ternary": _whole(Ternary, TERNARY_BLOCK),
    "onebit": _whole(OneBit, BLOCK),
    "twomeans": _whole(TwoMeans, BLOCK),
    "majority": _plain(Majority),
    "mx1bit": _number(MxOneBit, "0.5", MXNET_THRESHOLD),
    "mx2bit": _number(MxTwoBit, "0.5"),
    "powersgd": _whole(PowerSgd),
    "zstd": _whole(Zstd, 1),
    "lz4": _plain(Lz4),
}
"""How to read each stage, by name."""

FORMS = f"none, {', '.join(STAGES)}; joined by +, then +ef or +dgc:M"


def stage(text: str) -> Stage:
    """Return the stage that this text names.

    Raises:
        ValueError: there is none, or its parameter is wrong; valid forms are listed.
    """
    name, colon, given = text.partition(":")
    read = STAGES.get(name)
    if read is None:
        raise ValueError(f"no codec is called {name!r}; there are: {FORMS}")
    if colon and not given:
        raise ValueError(f"codec {text}: a parameter is missing behind the colon")
    return read(name, given)


@lru_cache(maxsize=256)
def chain(text: str) -> Chain:
    """Return the chain of this text: stages only, as a frame names them.

    Raises:
        ValueError: no chain; the text says what is wrong.
    """
    if len(text) > TEXT_MAX:
        raise ValueError(f"a codec of {len(text)} characters; {TEXT_MAX} at most")
    if text == "none":
        return Chain()
    return Chain(tuple(stage(part) for part in text.split("+")))


@lru_cache(maxsize=256)
def codec(text: str) -> Codec:
    """Return the codec of this text: a chain and what it remembers.

    Raises:
        ValueError: none, or a contradictory one; the text says what is wrong.
    """
    parts = text.strip().split("+")
    last, _, given = parts[-1].partition(":")
    if last == "ef":
        if given:
            raise ValueError(f"codec {text}: ef takes no parameter")
        return ErrorFeedback(chain("+".join(parts[:-1]) or "none"))
    if last == "dgc":
        momentum, _, warmup = given.partition(",")
        name, _, steps = warmup.partition("=")
        if warmup and (name != "warmup" or not (steps.isascii() and steps.isdigit())):
            raise ValueError(f"codec {text}: write dgc:0.9 or dgc:0.9,warmup=1000")
        return Dgc(
            chain("+".join(parts[:-1]) or "none"),
            number(f"codec {text}", momentum or "0.9", "dgc:0.9"),
            int(steps or 0),
        )
    for one in parts:
        if one.partition(":")[0] in ("ef", "dgc"):
            raise ValueError(f"codec {text}: {one} remembers what all the rest does; write it last")
    return Codec(chain(text.strip()))
