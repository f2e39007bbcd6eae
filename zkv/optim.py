"""Update rules: how a value, its state and one aggregated gradient become the next value.

A rule is a value (`Rule`) and an update is a pure function (`update`) on flat arrays with explicit
state. Every rule works element by element, so a server may cut a value into any blocks: the update
of a slice is the slice of the update, bit for bit. This module must not know keys, shards, versions
of a model, schedules or who computed the gradient.

The formulas are those of PyTorch's `torch.optim` (SGD, Adam, AdamW, Adagrad) in the order of
operations that its documentation gives; the papers are named at each rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zkv.update_pieces import PIECES, Array, Slots

__all__ = [
    "RULES",
    "Rule",
    "clip_factor",
    "init_slots",
    "rule",
    "square_sum",
    "square_sum_of",
    "stays_where_zero",
    "update",
]

PIECE_ELEMENTS = 32 * 1024
"""Elements worked on at a time: the pieces of all arrays of a rule stay in a core's own cache."""

CLIP_EPSILON = 1e-6
"""Added to the norm by `clip_factor`, as PyTorch does."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is fixed for a rule's name: its settings with their defaults, and its state arrays."""

    defaults: Mapping[str, float]
    slots: tuple[str, ...] = ()


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_KINDS: Mapping[str, _Kind] = {
    "assign": _Kind({}),
    "sgd": _Kind({"weight_decay": 0.0}),
    "momentum": _Kind({"momentum": 0.9, "weight_decay": 0.0}, ("momentum",)),
    "nesterov": _Kind({"momentum": 0.9, "weight_decay": 0.0}, ("momentum",)),
    "adam": _Kind(_ADAM, ("mean", "square")),
    "adamw": _Kind(_ADAM | {"weight_decay": 0.01}, ("mean", "square")),
    "adagrad": _Kind(
        {"eps": 1e-10, "initial": 0.0, "lr_decay": 0.0, "weight_decay": 0.0}, ("sum",)
    ),
}

RULES: tuple[str, ...] = tuple(_KINDS)
"""The names of all update rules."""

_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "momentum": (lambda x: 0.0 <= x < 1.0, "0 <= momentum < 1"),
    "beta1": (lambda x: 0.0 <= x < 1.0, "0 <= beta1 < 1"),
    "beta2": (lambda x: 0.0 <= x < 1.0, "0 <= beta2 < 1"),
    "weight_decay": (lambda x: x >= 0.0, "weight_decay >= 0"),
    "lr_decay": (lambda x: x >= 0.0, "lr_decay >= 0"),
    "initial": (lambda x: x >= 0.0, "initial >= 0"),
    # With eps = 0 a gradient that is always zero would divide zero by zero.
    "eps": (lambda x: x > 0.0, "eps > 0"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule with its settings: a value that can be compared, hashed, printed and sent.

    `name` is one of `RULES`; `hyper` holds every setting of that rule, sorted by name. Settings
    that are left out get their defaults, so equal rules are equal values however they were written.
    An unknown name, an unknown or repeated setting, or a number out of its range raises ValueError.
    """

    name: str
    hyper: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise ValueError(f"unknown update rule {self.name!r}; the rules are {', '.join(RULES)}")
        filled = dict(_KINDS[self.name].defaults)
        seen: set[str] = set()
        for setting, number in self.hyper:
            if setting not in filled:
                raise ValueError(_unknown_setting(self.name, setting))
            if setting in seen:
                raise ValueError(f"rule {self.name}: {setting} is given twice; state it once")
            seen.add(setting)
            filled[setting] = _checked(self.name, setting, number)
        object.__setattr__(self, "hyper", tuple(sorted(filled.items())))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays; each has the value's shape and dtype."""
        return _KINDS[self.name].slots

    def with_hyper(self, **changes: float) -> Rule:
        """The same rule with some settings changed; ValueError as in the constructor."""
        for setting in changes:
            if setting not in dict(self.hyper):
                raise ValueError(_unknown_setting(self.name, setting))
        return Rule(self.name, tuple((dict(self.hyper) | changes).items()))

    def __str__(self) -> str:
        """The shortest text that `rule` reads back as this value."""
        defaults = _KINDS[self.name].defaults
        changed = [f"{name}={number!r}" for name, number in self.hyper if number != defaults[name]]
        return f"{self.name}:{','.join(changed)}" if changed else self.name


def rule(text: str) -> Rule:
    """Read a rule: `"sgd"`, `"momentum:momentum=0.95,weight_decay=1e-4"`.

    Raises ValueError that names the part that is wrong and the valid forms.
    """
    name, colon, rest = text.partition(":")
    if colon and not rest.strip():
        raise ValueError(
            f"rule {text!r}: nothing follows the colon; write {name!r} or {name}:name=number"
        )
    pairs = tuple(
        (setting, parse_number(setting, number)) for setting, number in split_settings(rest)
    )
    return Rule(name.strip(), pairs)


def split_settings(text: str) -> list[tuple[str, str]]:
    """Split `"a=1,b=2"` into `[("a", "1"), ("b", "2")]`; empty text gives an empty list.

    A part without `=` belongs to the part before it, because a schedule's milestones contain
    commas. Repeated names are kept, for the caller to refuse. Raises ValueError for a part with no
    name or no value.
    """
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text.strip() else []:
        name, equals, written = (piece.strip() for piece in part.partition("="))
        if not equals and pairs and part.strip():
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part.strip()}")
        elif not (equals and name and written):
            raise ValueError(f"setting {part!r} in {text!r} is not of the form name=number")
        else:
            pairs.append((name, written))
    return pairs


def parse_number(name: str, text: str) -> float:
    """The finite number that `text` spells; ValueError naming the setting otherwise."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number; write for example {name}=0.1") from None
    if not math.isfinite(number):
        raise ValueError(
            f"{name}={text} is not finite; write an ordinary number such as {name}=0.1"
        )
    return number


def init_slots(rule: Rule, value: Array) -> Slots:
    """New state arrays for `value`, in the order of `rule.slots`: zeros, for adagrad `initial`.

    Raises TypeError for a dtype that the rule cannot update.
    """
    _check_dtype(rule, value.dtype)
    initial = dict(rule.hyper).get("initial", 0.0)
    return tuple(np.full(value.shape, initial, value.dtype) for _ in rule.slots)


def update(
    rule: Rule,
    value: Array,
    slots: Slots,
    gradient: Array,
    *,
    lr: float,
    count: int,
    out: tuple[Array, Slots] | None = None,
) -> tuple[Array, Slots]:
    """One update: the next value and the next state.

    `value`, `gradient` and each of `slots` are flat arrays of one length and one dtype, float32 or
    float64 (assign: any dtype). `lr` is the learning rate of this update, finite and >= 0. `count`
    is how many updates the value will have had after this one, 1 for the first (Adam's bias
    correction, Adagrad's decay).

    Without `out` new arrays are returned and no input is touched. `out` gives the arrays to write:
    each is either its own input (in place) or memory that no input uses. The bits are the same in
    every case, and the gradient is only read. Overflow follows IEEE 754 without a warning, as
    guards against NaN stand elsewhere.

    Raises TypeError for a dtype, ValueError for a shape, a count, a rate or an `out` that does not
    fit.
    """
    _check_inputs(rule, value, slots, gradient, lr, count)
    if out is None:
        out = np.empty_like(value), tuple(np.empty_like(slot) for slot in slots)
    else:
        _check_out(value, slots, gradient, *out)
    with np.errstate(all="ignore"):
        piece = PIECES[rule.name](dict(rule.hyper), float(lr), count, value.dtype.type)
        scratch = np.empty((2, min(len(value), PIECE_ELEMENTS)), value.dtype)
        for cut in _cuts(len(value)):
            first, second = scratch[:, : cut.stop - cut.start]
            piece(
                value[cut],
                tuple(slot[cut] for slot in slots),
                gradient[cut],
                out[0][cut],
                tuple(slot[cut] for slot in out[1]),
                first,
                second,
            )
    return out


def stays_where_zero(rule: Rule) -> bool:
    """Whether an element with a gradient of +0.0 keeps its bits and those of its state.

    So it is with sgd and adagrad without weight decay: they add -0.0 to the value, and adagrad 0 to
    its sum. All others decay something, or, as assign does, take the zero for the value.
    """
    hyper = dict(rule.hyper)
    if rule.name not in ("sgd", "adagrad") or hyper["weight_decay"]:
        return False
    # Without eps adagrad divides by the root of a sum that may be 0.
    return rule.name == "sgd" or bool(np.float32(hyper["eps"]) > 0)


def square_sum(gradient: Array) -> float:
    """Sum of the squares of all elements, accumulated in float64.

    The order of the additions depends on the number of elements alone: pieces of `PIECE_ELEMENTS`,
    each summed pairwise, then added from the first to the last. Takes arrays of any shape and real
    dtype; TypeError for complex ones.
    """
    flat = gradient.reshape(-1)
    pieces = (flat[cut].astype(np.float64, casting="same_kind") for cut in _cuts(len(flat)))
    return _squares_of(pieces)


def square_sum_of(positions: Array, values: Array, size: int) -> float:
    """What `square_sum` gives for `size` elements, all 0 but those at `positions`, to the bit.

    `positions` are ascending, those of `values`. One piece at a time is made dense, as the order of
    the additions is that of a dense array.
    """

    def pieces() -> Iterator[Array]:
        for cut in _cuts(size):
            low, high = np.searchsorted(positions, (cut.start, cut.stop))
            piece = np.zeros(cut.stop - cut.start)
            piece[positions[low:high] - cut.start] = values[low:high]
            yield piece

    return _squares_of(pieces())


def _squares_of(pieces: Iterator[Array]) -> float:
    """Sum the squares of float64 arrays, which are overwritten."""
    total = 0.0
    with np.errstate(all="ignore"):
        for piece in pieces:
            total += float(np.add.reduce(np.multiply(piece, piece, out=piece)))
    return total


def clip_factor(total_square: float, norm_max: float) -> float:
    """What to multiply gradients by so that their joint Euclidean norm is at most `norm_max`.

    `total_square` is the sum of `square_sum` over all gradients. The factor is `norm_max / (norm +
    1e-6)`, at most 1, as in `torch.nn.utils.clip_grad_norm_`: NaN for a NaN sum, 0 for an infinite
    one. Raises ValueError for a negative sum or a bound that is not positive and finite.
    """
    if not (norm_max > 0.0 and math.isfinite(norm_max)):
        raise ValueError(f"norm_max={norm_max!r}: the bound of a norm must be positive and finite")
    if total_square < 0.0:
        raise ValueError(f"total_square={total_square!r}: a sum of squares cannot be negative")
    factor = norm_max / (math.sqrt(total_square) + CLIP_EPSILON)
    return 1.0 if factor > 1.0 else factor


def _unknown_setting(name: str, setting: str) -> str:
    known = ", ".join(_KINDS[name].defaults) or "none"
    return f"rule {name} has no setting {setting!r}; its settings are: {known}"


def _checked(name: str, setting: str, number: float) -> float:
    """The setting as a float within its range."""
    valid, text = _RANGES[setting]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"rule {name}: {setting}={number!r} is not a number; needed: {text}")
    if not (math.isfinite(number) and valid(number)):
        raise ValueError(f"rule {name}: {setting}={number!r} is out of range; needed: {text}")
    return float(number) + 0.0  # so that -0.0 and 0.0 are the same text


def _cuts(length: int) -> Iterator[slice]:
    for start in range(0, length, PIECE_ELEMENTS):
        yield slice(start, min(start + PIECE_ELEMENTS, length))


def _check_dtype(rule: Rule, dtype: np.dtype[Any]) -> None:
    if rule.name != "assign" and dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(
            f"rule {rule.name} updates float32 and float64, not {dtype}; "
            "keep a float32 master copy of the value"
        )


def _check_inputs(
    rule: Rule, value: Array, slots: Slots, gradient: Array, lr: float, count: int
) -> None:
    _check_dtype(rule, value.dtype)
    if value.ndim != 1:
        raise ValueError(
            f"value has shape {value.shape}; an update takes flat arrays: use reshape(-1)"
        )
    if len(slots) != len(rule.slots):
        raise ValueError(
            f"rule {rule.name} keeps {len(rule.slots)} state arrays {rule.slots}, "
            f"given {len(slots)}; use init_slots"
        )
    for name, array in (("gradient", gradient), *zip(rule.slots, slots, strict=True)):
        _check_like(name, array, value)
    if not (lr >= 0.0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r}: a learning rate must be finite and not negative")
    if count < 1:
        raise ValueError(
            f"count={count}: it counts this update too, so the first update has count 1"
        )


def _check_out(
    value: Array, slots: Slots, gradient: Array, value_out: Array, slots_out: Slots
) -> None:
    if len(slots_out) != len(slots):
        raise ValueError(f"out has {len(slots_out)} state arrays, expected {len(slots)}")
    inputs = (value, *slots)
    outputs = (value_out, *slots_out)
    for index, written in enumerate(outputs):
        name = f"out[1][{index - 1}]" if index else "out[0]"
        _check_like(name, written, value)
        if not written.flags.writeable:
            raise ValueError(f"{name} is read-only; give an array that may be written")
        others = [array for place, array in enumerate(inputs) if place != index]
        others += [array for place, array in enumerate(outputs) if place != index]
        own = inputs[index]
        # Reading ahead of writing holds only where both walk the same addresses in the same order.
        shifted = np.may_share_memory(written, own) and (
            written.ctypes.data != own.ctypes.data or written.strides != own.strides
        )
        if shifted or any(np.may_share_memory(written, other) for other in (gradient, *others)):
            raise ValueError(
                f"{name} overlaps another array; it may be its own input or separate memory"
            )


def _check_like(name: str, array: Array, value: Array) -> None:
    if array.dtype != value.dtype:
        raise TypeError(f"{name} is {array.dtype}, the value is {value.dtype}; convert it first")
    if array.shape != value.shape:
        raise ValueError(f"{name} has shape {array.shape}, the value has {value.shape}")
