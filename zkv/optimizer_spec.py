"""The optimizer as one value: rule, learning rate, schedule, clipping, exceptions for some keys.

A broker is started with it, and the control log carries it. It has a text form for command lines
and a plain form (dicts, lists, numbers, text) for messages and snapshots; both read back as an
equal value. This module must not know arrays, servers or the log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from zkv.optim import Rule, parse_number, split_settings
from zkv.schedule import Schedule, factor, schedule

__all__ = ["LR_DEFAULTS", "KeyOverride", "OptimizerSpec", "optimizer"]

LR_DEFAULTS: Mapping[str, float] = {
    "assign": 1.0,
    "sgd": 0.01,
    "momentum": 0.01,
    "nesterov": 0.01,
    "adam": 0.001,
    "adamw": 0.001,
    "adagrad": 0.01,
}
"""The learning rate where none is given, by rule. Assign does not use one."""

FORMS = (
    "rule[:name=number,...][;pattern:weight_decay=number,lr=FACTORx]..., for example "
    "'momentum:lr=0.1,momentum=0.9,schedule=warmup:5+cosine:1000,clip_global_norm=1.0;*.bias:weight_decay=0'"
)
"""The valid text form, for messages."""


@dataclass(frozen=True, slots=True)
class KeyOverride:
    """An exception for the keys that match `pattern`.

    `pattern` is matched case-sensitively against str(key) with the wildcards *, ? and [set] (write
    [[] for a bracket of the key's own); so the integer key 7 is matched by "7", exactly as the text
    key "7" is. It must not be empty, begin or end with blanks, or contain a semicolon.
    `weight_decay` replaces the rule's, `lr_factor` multiplies the base rate (so a schedule and a
    change of rate reach all keys); None leaves the rule's own. Both are finite and >= 0, and at
    least one is given; otherwise ValueError.
    """

    pattern: str
    weight_decay: float | None = None
    lr_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.pattern or self.pattern != self.pattern.strip() or ";" in self.pattern:
            raise ValueError(
                f"pattern {self.pattern!r}: it must not be empty, begin or end with blanks "
                "or contain ';'"
            )
        if self.weight_decay is None and self.lr_factor is None:
            raise ValueError(
                f"pattern {self.pattern!r} changes nothing; state weight_decay or lr_factor"
            )
        for name in ("weight_decay", "lr_factor"):
            number = getattr(self, name)
            if number is not None:
                where = f"{name} of pattern {self.pattern!r}"
                object.__setattr__(self, name, _not_negative(where, number))

    def __str__(self) -> str:
        decay = [] if self.weight_decay is None else [f"weight_decay={self.weight_decay!r}"]
        rate = [] if self.lr_factor is None else [f"lr={self.lr_factor!r}x"]
        return f"{self.pattern}:{','.join(decay + rate)}"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """How a model is updated: one rule for all keys, with exceptions.

    `lr` is the base learning rate, finite and >= 0 (assign ignores it); `schedule` multiplies it by
    version; `clip_global_norm` bounds the Euclidean norm of the aggregated gradient of the whole
    model (None: no bound); `overrides` are the exceptions, later ones stronger. Raises ValueError
    for a number out of its range, and for clipping or weight decay with assign, whose input is
    values and not gradients.
    """

    rule: Rule
    lr: float
    schedule: Schedule = field(default_factory=Schedule)
    clip_global_norm: float | None = None
    overrides: tuple[KeyOverride, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", _not_negative("lr", self.lr))
        if self.clip_global_norm is not None:
            bound = _not_negative("clip_global_norm", self.clip_global_norm)
            if bound == 0.0:
                raise ValueError(
                    "clip_global_norm=0 would stop all learning; it must be > 0, or left out"
                )
            if self.rule.name == "assign":
                raise ValueError(
                    "rule assign stores values, which clip_global_norm would scale; leave it out"
                )
            object.__setattr__(self, "clip_global_norm", bound)
        for override in self.overrides:
            if override.weight_decay is not None and "weight_decay" not in dict(self.rule.hyper):
                raise ValueError(
                    f"pattern {override.pattern!r} sets weight_decay, "
                    f"which rule {self.rule.name} does not have"
                )

    def lr_at(self, version: int) -> float:
        """The rate of the update applied to `version` (0 for the first), before a key's factor."""
        return self.lr * factor(self.schedule, version)

    def for_key(self, key: str | int) -> tuple[Rule, float]:
        """The rule for `key`, and the factor on `lr_at` for it (1.0 where no pattern matches).

        Weight decay and factor are looked up separately: for each, the last matching override that
        states it wins.
        """
        rule, lr_factor = self.rule, 1.0
        for override in self.overrides:
            if fnmatchcase(str(key), override.pattern):
                if override.weight_decay is not None:
                    rule = rule.with_hyper(weight_decay=override.weight_decay)
                if override.lr_factor is not None:
                    lr_factor = override.lr_factor
        return rule, lr_factor

    def with_lr(self, lr: float) -> OptimizerSpec:
        """The same optimizer with another base rate; ValueError if it is negative or not finite."""
        return replace(self, lr=lr)

    def to_plain(self) -> dict[str, Any]:
        """This value as dicts, lists, text, numbers and None, for MessagePack or JSON."""
        return {
            "rule": self.rule.name,
            "hyper": dict(self.rule.hyper),
            "lr": self.lr,
            "schedule": str(self.schedule),
            "clip_global_norm": self.clip_global_norm,
            "overrides": [
                {"pattern": o.pattern, "weight_decay": o.weight_decay, "lr_factor": o.lr_factor}
                for o in self.overrides
            ],
        }

    @staticmethod
    def from_plain(plain: object) -> OptimizerSpec:
        """The value that `to_plain` gave; ValueError names the field that does not fit."""
        fields = _fields("optimizer", plain, _SPEC_FIELDS)
        overrides = fields["overrides"]
        if not isinstance(overrides, (list, tuple)):
            raise ValueError(f"optimizer: overrides is {type(overrides).__name__}, expected a list")
        return OptimizerSpec(
            Rule(fields["rule"], tuple(fields["hyper"].items())),
            fields["lr"],
            schedule(fields["schedule"]),
            fields["clip_global_norm"],
            tuple(KeyOverride(**_fields("override", one, _OVERRIDE_FIELDS)) for one in overrides),
        )

    def __str__(self) -> str:
        """The text that `optimizer` reads back as this value."""
        name, _, hyper = str(self.rule).partition(":")
        settings = [f"lr={self.lr!r}"] + ([hyper] if hyper else [])
        if self.schedule != Schedule():
            settings.append(f"schedule={self.schedule}")
        if self.clip_global_norm is not None:
            settings.append(f"clip_global_norm={self.clip_global_norm!r}")
        return ";".join([f"{name}:{','.join(settings)}", *map(str, self.overrides)])


def optimizer(text: str) -> OptimizerSpec:
    """Read an optimizer: `"sgd:lr=0.1"`, `"adam:lr=0.001;*.bias:weight_decay=0;head.*:lr=10x"`.

    The first part names the rule and gives its settings, `lr` (default: `LR_DEFAULTS`), `schedule`
    and `clip_global_norm`. Each further part, after a semicolon, is a pattern of keys (up to the
    last colon) with `weight_decay=number` and `lr=10x`, a factor on the base rate, also written
    `lr_factor=10`.

    Raises ValueError that names the part that is wrong and the valid form.
    """
    try:
        head, *rest = text.split(";")
        name, colon, written = head.partition(":")
        if colon and not written.strip():
            raise ValueError(f"nothing follows the colon of {head!r}")
        settings = _once(head, split_settings(written))
        lr, shape, clip = (
            settings.pop(own, None) for own in ("lr", "schedule", "clip_global_norm")
        )
        rule = _rule(name.strip(), settings)
        return OptimizerSpec(
            rule,
            LR_DEFAULTS[rule.name] if lr is None else parse_number("lr", lr),
            Schedule() if shape is None else schedule(shape),
            None if clip is None else parse_number("clip_global_norm", clip),
            tuple(_override(part.strip()) for part in rest),
        )
    except ValueError as error:
        raise ValueError(f"optimizer {text!r}: {error}; the form is {FORMS}") from None


def _rule(name: str, settings: Mapping[str, str]) -> Rule:
    bare = Rule(name)
    known = dict(bare.hyper)
    for setting in settings:
        if setting not in known:
            valid = ", ".join([*known, "lr", "schedule", "clip_global_norm"])
            raise ValueError(f"{name} has no setting {setting!r}; valid here: {valid}")
    return bare.with_hyper(**{setting: parse_number(setting, n) for setting, n in settings.items()})


def _override(part: str) -> KeyOverride:
    """One part after a semicolon: `pattern:weight_decay=0,lr=10x`."""
    pattern, colon, written = part.rpartition(":")
    if not colon or not written.strip():
        raise ValueError(
            f"override {part!r} is not of the form pattern:weight_decay=number,lr=FACTORx"
        )
    numbers: dict[str, float] = {}
    for name, number in _once(part, split_settings(written)).items():
        if name == "lr" and not number.endswith("x"):
            raise ValueError(
                f"override {part!r}: lr is a factor on the base rate here; write lr=10x"
            )
        if name not in ("lr", "lr_factor", "weight_decay"):
            raise ValueError(
                f"override {part!r} has no setting {name!r}; valid here: weight_decay, lr"
            )
        target = "lr_factor" if name == "lr" else name
        if target in numbers:
            raise ValueError(f"override {part!r} gives the factor twice; state it once")
        numbers[target] = parse_number(name, number.removesuffix("x") if name == "lr" else number)
    return KeyOverride(pattern.strip(), **numbers)


def _once(part: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name, written in pairs:
        if name in settings:
            raise ValueError(f"{name} is given twice in {part!r}; state it once")
        settings[name] = written
    return settings


def _not_negative(name: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{name}={number!r} is not a number")
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}={number!r} must be finite and not negative")
    return float(number) + 0.0  # so that -0.0 and 0.0 are the same text


_NUMBER = (int, float)
_SPEC_FIELDS: Mapping[str, tuple[type, ...]] = {
    "rule": (str,),
    "hyper": (dict,),
    "lr": _NUMBER,
    "schedule": (str,),
    "clip_global_norm": (*_NUMBER, type(None)),
    "overrides": (list, tuple),
}
_OVERRIDE_FIELDS: Mapping[str, tuple[type, ...]] = {
    "pattern": (str,),
    "weight_decay": (*_NUMBER, type(None)),
    "lr_factor": (*_NUMBER, type(None)),
}


def _fields(what: str, plain: object, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The dict `plain` with exactly the fields of `types`, each of a type named there."""
    if not isinstance(plain, dict):
        raise ValueError(
            f"{what} is {type(plain).__name__}, expected a dict with {', '.join(types)}"
        )
    odd = [repr(name) for name in plain if name not in types] + [n for n in types if n not in plain]
    if odd:
        raise ValueError(
            f"{what}: unknown or missing fields {', '.join(odd)}; it has {', '.join(types)}"
        )
    for name, valid in types.items():
        if not isinstance(plain[name], valid):
            expected = " or ".join(one.__name__ for one in valid)
            raise ValueError(f"{what}: {name} is {type(plain[name]).__name__}, expected {expected}")
    return plain
