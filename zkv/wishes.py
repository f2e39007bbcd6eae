"""What a placement says of single keys: where they are pinned, and which stay together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zkv.errors import ConfigError
from zkv.hash_ring import Ring, name_of
from zkv.placements import ByHash, ByLoad, Placement, server_number


class Wishes:
    """A placement, read for these keys on `servers` servers, whose names may be given.

    Raises:
        ConfigError: a pin names no server, or keys that are to stay together are pinned apart.
    """

    def __init__(
        self,
        placement: Placement,
        servers: int,
        keys: Iterable[str | int],
        names: Sequence[str] = (),
    ) -> None:
        self.placement = placement
        self.ring: Ring | None = None
        if isinstance(placement.rule, ByHash):
            self.ring = Ring(range(servers), placement.rule.virtual)
        self._pin: dict[str | int, int] = {}
        self._group: dict[str | int, int] = {}
        self._joined = list(range(len(placement.together)))
        if placement.pins or placement.together:
            for pattern, server in placement.pins:
                server_number(placement, pattern, server, servers, names)
            self._read(list(keys), servers, names)

    @property
    def loaded(self) -> bool:
        """Whether servers are compared by load, not by bytes."""
        return isinstance(self.placement.rule, ByLoad)

    def pin(self, key: str | int) -> int | None:
        """Return the server that a key, or one that stays with it, is pinned to; None if none."""
        return self._pin.get(key)

    def group(self, key: str | int) -> int | None:
        """Return the number of the group that a key is in; None if it is in none."""
        return self._group.get(key)

    def apart(self, key: str | int) -> object:
        """Return what sets a key apart: keys of which this differs can share no block."""
        pin, group = self.pin(key), self.group(key)
        if self.ring is None or pin is not None or group is not None:
            return pin, group
        return None, None, self.ring.owner(name_of(key))

    def group_name(self, group: int) -> bytes:
        """Return what stands for a group on a ring."""
        return b"together " + "|".join(self.placement.together[group]).encode()

    def _read(self, keys: Sequence[str | int], servers: int, names: Sequence[str]) -> None:
        placement = self.placement
        members: dict[str | int, list[int]] = {}
        for key in keys:
            found = placement.groups_of(key)
            if found:
                members[key] = found
                for second in found[1:]:
                    self._join(found[0], second)
        self._group = {key: self._root(found[0]) for key, found in members.items()}
        by_group: dict[int, tuple[str | int, int]] = {}
        for key in keys:
            pinned = placement.pinned(key)
            if pinned is None:
                continue
            server = self._pin[key] = server_number(placement, *pinned, servers, names)
            if key not in self._group:
                continue
            other, where = by_group.setdefault(self._group[key], (key, server))
            if where != server:
                raise ConfigError(
                    f"{placement.named}: key {key!r} is pinned to server {server} and key "
                    f"{other!r} to server {where}, but they are to stay together; pin both to one, "
                    "or take one out of together="
                )
        for key, group in self._group.items():
            if group in by_group:
                self._pin[key] = by_group[group][1]

    def _root(self, group: int) -> int:
        while self._joined[group] != group:
            group = self._joined[group]
        return group

    def _join(self, one: int, other: int) -> None:
        low, high = sorted((self._root(one), self._root(other)))
        self._joined[high] = low
