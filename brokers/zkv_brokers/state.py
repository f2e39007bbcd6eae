"""A machine's whole state as bytes, and back, without running any code of it.

What a router decides from is a graph of objects that refer to each other. `packed` writes that
graph down as plain data, `unpacked` makes it again: every object once, however many refer to it.
Only classes and functions of the packages named here are made or referred to, so the bytes cannot
name any other code. What travels (`zkv.wire.Frozen`), or goes into a manifest, is written as it is
written there. Equal states give equal bytes, whatever Python's hash seed is, so two of them can be
compared.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import msgspec

from zkv.errors import ProtocolError
from zkv.wire import Frozen

PACKAGES = ("zkv", "zkv_brokers", "zkv_codecs")
BUILTINS: dict[str, Any] = {
    one.__name__: one for one in (str, tuple, frozenset, int, float, dict, list, set)
}
INT_MIN, INT_MAX = -(2**63), 2**64 - 1

_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError)
"""What bytes lead to that are no state."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def packed(machine: object) -> bytes:
    """Return an object, and all that it refers to, as bytes.

    Raises:
        TypeError: something in it is none of what can be written; its class is named.
    """
    return _encode(_Writer().plain(machine))


def unpacked(content: bytes) -> Any:
    """Return the object that `packed` wrote.

    Raises:
        ProtocolError: the bytes are none of that.
    """
    try:
        return _Reader().value(_decode(content))
    except (msgspec.MsgspecError, *_SENSELESS) as error:
        raise ProtocolError(f"no state of a machine: {error}") from error


_names: dict[Any, str] = {}


class _Writer:
    """Numbers objects as it meets them; what it has met is written as its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []
        """Or the number of an object that is gone would be taken for another's."""

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            return value if INT_MIN <= value <= INT_MAX else ["int", str(value)]
        if isinstance(value, msgspec.Struct) and _travels(kind):
            return ["sent", name_of(kind), _encode(value)]
        if kind is tuple:
            return ["tuple", [self.plain(one) for one in value]]
        if kind is frozenset:
            return ["frozenset", self._sorted(value)]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if isinstance(value, type | FunctionType):
            return ["named", name_of(value)]
        if isinstance(value, Enum):
            return ["enum", name_of(kind), value.name]
        if kind is partial:
            parts = (value.func, value.args, value.keywords)
            return ["partial", [self.plain(one) for one in parts]]
        if kind is MethodType:
            return ["method", self.plain(value.__self__), value.__func__.__name__]
        if _is_value(kind):
            return ["value", name_of(kind), self._fields(kind, value)]
        if (number := self._numbers.get(id(value))) is not None:
            return ["seen", number]
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return self._fresh(kind, value)

    def _sorted(self, values: Any) -> list[Any]:
        numbers = len(self._numbers)
        found = sorted((self.plain(one) for one in values), key=_encode)
        if len(self._numbers) != numbers:
            # They would be made in another order than they are numbered in.
            raise TypeError("a set of objects that others may refer to has no place in a state")
        return found

    def _fresh(self, kind: type, value: Any) -> Any:
        if kind is list:
            return ["list", [self.plain(one) for one in value]]
        if kind is set:
            return ["set", self._sorted(value)]
        if kind is deque:
            return ["deque", value.maxlen, [self.plain(one) for one in value]]
        if kind in (dict, Counter):
            return [kind.__name__, self._pairs(value)]
        if kind is defaultdict:
            return ["defaultdict", self.plain(value.default_factory), self._pairs(value)]
        return ["object", name_of(kind), self._fields(kind, value)]

    def _fields(self, kind: type, value: Any) -> dict[str, Any]:
        fields = _fields(kind)
        found = {name: getattr(value, name) for name in fields if hasattr(value, name)}
        found |= getattr(value, "__dict__", {})
        return {name: self.plain(one) for name, one in found.items()}

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        return [self.plain(one) for pair in value.items() for one in pair]


def name_of(named: Any) -> str:
    """Return how a class or a function is written down.

    Raises:
        TypeError: it is not one of ours, or has no name.
    """
    found = _names.get(named)
    if found is None:
        found = _names[named] = _name(named)
    return found


def _name(named: Any) -> str:
    module, name = named.__module__, named.__qualname__
    if BUILTINS.get(name) is named:
        return str(name)
    if module.partition(".")[0] not in PACKAGES or "<" in name:
        raise TypeError(f"{module}.{name} has no place in a state")
    return f"{module}:{name}"


@cache
def _named(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not colon:
        return BUILTINS[name]
    if module.partition(".")[0] not in PACKAGES:
        raise ValueError(f"{name!r} has no place in a state")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type | FunctionType):
        raise ValueError(f"{name!r} is neither a class nor a function")
    return found


@cache
def _class(name: str) -> type:
    found = _named(name)
    if not isinstance(found, type) or ":" not in name:
        raise ValueError(f"{name!r} is no class of a state's objects")
    return found


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of what a class's objects hold beside their `__dict__`."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    found = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _is_value(kind: type) -> bool:
    """Return whether a class's objects never change, so that it does not matter which one it is."""
    about = vars(kind).get("__dataclass_params__")
    return about is not None and bool(about.frozen)


def _travels(kind: type) -> bool:
    """Return whether a class's objects have a form of their own as bytes, and never change."""
    if issubclass(kind, Frozen):
        return True
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen


@cache
def _decoder(name: str) -> Callable[[bytes], Any]:
    kind = _class(name)
    if not _travels(kind):
        raise ValueError(f"{name!r} does not travel")
    return msgspec.msgpack.Decoder(kind).decode


def _made(name: str) -> Any:
    """Return an object of a class that holds nothing yet."""
    kind = _class(name)
    return kind.__new__(kind)  # type: ignore[call-overload]


class _Reader:
    """Makes objects in the order in which they were numbered."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def value(self, plain: Any) -> Any:
        if type(plain) is not list:
            return plain
        match plain:
            case ["seen", number]:
                return self._made[number]
            case ["sent", name, content]:
                return _decoder(name)(content)
            case ["tuple", values]:
                return tuple(self.value(one) for one in values)
            case ["frozenset", values]:
                return frozenset(self.value(one) for one in values)
            case ["int", text]:
                return int(text)
            case ["named", name]:
                return _named(name)
            case ["enum", name, member]:
                return _class(name)[member]  # type: ignore[index]
            case ["range", start, stop, step]:
                return range(start, stop, step)
            case ["partial", [func, args, keywords]]:
                return partial(self.value(func), *self.value(args), **self.value(keywords))
            case ["method", owner, name]:
                return self._method(self.value(owner), name)
            case ["value", name, fields]:
                return self._with(_made(name), fields)
        return self._fresh(plain)

    def _method(self, owner: Any, name: str) -> MethodType:
        kind = type(owner)
        found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if not isinstance(found, FunctionType) or ":" not in name_of(kind):
            raise ValueError(f"{kind.__qualname__} has no method {name!r}")
        return MethodType(found, owner)

    def _fresh(self, plain: list[Any]) -> Any:
        """Make an object that others may refer to: first it alone, then what it holds."""
        made: Any
        match plain:
            case ["list", values]:
                made = self._note([])
                made.extend(self.value(one) for one in values)
            case ["set", values]:
                made = self._note(set())
                made.update(self.value(one) for one in values)
            case ["deque", limit, values]:
                made = self._note(deque(maxlen=limit))
                made.extend(self.value(one) for one in values)
            case ["dict", pairs]:
                made = self._filled(self._note({}), pairs)
            case ["Counter", pairs]:
                made = self._filled(self._note(Counter()), pairs)
            case ["defaultdict", factory, pairs]:
                made = self._note(defaultdict(None))
                made.default_factory = self.value(factory)
                self._filled(made, pairs)
            case ["object", name, fields]:
                made = self._with(self._note(_made(name)), fields)
            case _:
                raise ValueError(f"no such kind: {plain[:1]!r}")
        return made

    def _note(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def _with(self, made: Any, fields: dict[str, Any]) -> Any:
        for field, one in fields.items():
            object.__setattr__(made, field, self.value(one))
        return made

    def _filled(self, made: Any, pairs: list[Any]) -> Any:
        for at in range(0, len(pairs), 2):
            key = self.value(pairs[at])
            made[key] = self.value(pairs[at + 1])
        return made
