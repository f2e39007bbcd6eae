"""What can be a key, and what to say of one that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable

from zkv.wire import KEY_BYTES_MAX


def unknown_key(key: str | int, known: Iterable[str | int]) -> str:
    """Return what to say when `key` is none of `known`."""
    names = list(known)
    twin: str | int | None = (
        str(key) if isinstance(key, int) else (int(key) if key.isdecimal() else None)
    )
    if twin is not None and twin in names:
        kinds = f"{type(key).__name__} and {type(twin).__name__} keys differ"
        return f"unknown key {key!r}; there is a key {twin!r}, but {kinds}"
    some = ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return f"unknown key {key!r}; " + (
        f"initialised are {some}" if names else "nothing was initialised yet: call init first"
    )


def check_key(key: object) -> str | int:
    """Return the key if it can be one.

    Raises:
        TypeError: neither str nor int.
        ValueError: a string that is empty, not UTF-8 or of more than 255 bytes; an integer outside
            [0, 2**63).
    """
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(f"a key is a str or an int, not {type(key).__name__} ({key!r})")
    if isinstance(key, int):
        if not 0 <= key < 2**63:
            raise ValueError(f"key {key} is outside of 0 … 2**63-1")
        return key
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key!r} is not valid Unicode: {error.reason}") from error
    if not 1 <= length <= KEY_BYTES_MAX:
        raise ValueError(
            f"key {key[:40]!r} has {length} bytes in UTF-8; allowed are 1 to {KEY_BYTES_MAX}"
        )
    return key
