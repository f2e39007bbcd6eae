"""The worker's own copy of the model in local rounds: where it begins, and what of it is sent.

`Whole` begins each round on the granted version, and contributes all that has changed. `Divided`
keeps its own values from round to round: a round contributes one fragment, and takes over what
updates have made of those of earlier rounds. Knows no faces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zkv.dtypes import Array
from zkv.errors import ConfigError
from zkv_workers.batch import AnyBatch
from zkv_workers.faces import Key
from zkv_workers.fragments import Fragments, count_of, divided
from zkv_workers.model import BatchState


class Whole:
    """A copy that begins anew with each round."""

    def __init__(self) -> None:
        self._start: dict[Key, Array] = {}

    def begin(self, batch: AnyBatch) -> None:
        """A round begins on a batch.

        Raises:
            Cancelled: the batch no longer counts.
        """
        self._start = {key: value.copy() for key, value in batch.params.items()}

    def params(self, batch: AnyBatch) -> dict[Key, Array]:
        """Return the values, to be changed in place.

        Raises:
            Cancelled: the batch no longer counts.
        """
        return batch.params

    def contribute(self, batch: AnyBatch, weight: float) -> None:
        """Push start − end of every trained key; `weight` is that of all local batches.

        Raises:
            Cancelled: the batch no longer counts.
        """
        batch.set_weight(weight)
        _push(batch, self._start, batch.params)


@dataclass(slots=True)
class _Kept:
    """What a copy was before a round, if that comes not to count."""

    own: dict[Key, Array]
    start: dict[Key, Array]
    version: int
    weights: list[float]


@dataclass(slots=True)
class Divided:
    """A copy of which a round contributes one fragment.

    Which one is told by the version that was granted: contributions to one update are all of the
    same fragment, so that its other keys are left alone. What comes of it replaces the worker's own
    values of that fragment, as soon as a round begins on a version that has it; the others go on
    from what they are. `mixing` is the worker's own part of the values where they are replaced.
    """

    fragments: Fragments
    mixing: float = 0.0
    _parts: list[list[Key]] = field(default_factory=list)
    _own: dict[Key, Array] = field(default_factory=dict)
    _start: dict[Key, Array] = field(default_factory=dict)
    """What the worker has received last of each trained key: its change is what its own value
    differs by."""
    _version: int = -1
    """The model's, up to which updates were taken over."""
    _weights: list[float] = field(default_factory=list)
    """Of the local batches that have changed each fragment since then."""
    _state: BatchState | None = None
    """That of the open round; None: it has none that counts."""
    _kept: _Kept | None = None
    _last: list[tuple[AnyBatch, int]] = field(default_factory=list)
    """The batches whose outcome is not known, and what each was granted; the newest is last."""

    def begin(self, batch: AnyBatch) -> None:
        """A round begins on a batch: take over what the updates since have made.

        Raises:
            Cancelled: the batch no longer counts.
            ConfigError: the model cannot be divided like that, or the policy does not fit.
        """
        self._look_back()
        state = batch.settle()
        if list(self._own) != state.keys():
            # What is new here may be of a version that never comes to be: nothing of it is kept.
            self._own = {}
        self._kept = _Kept(
            _copied(self._own), dict(self._start), self._version, list(self._weights)
        )
        self._last.append((batch, state.granted))
        if self._own:
            self._merge(state)
        else:
            self._renew(state)
        self._state = state

    def _look_back(self) -> None:
        """See what became of earlier rounds: one that did not count leaves nothing here."""
        if self._last and self._kept is not None:
            last, _ = self._last[-1]
            if last.cancelled or last.outcome in ("cancelled", "withdrawn"):
                kept = self._kept
                self._own, self._start = kept.own, kept.start
                self._version, self._weights = kept.version, kept.weights
                self._last.pop()
        # If the next batch is cancelled before its round has begun, there is nothing to undo.
        self._state = self._kept = None
        for one, granted in self._last:
            if one.outcome == "discarded":
                # A guard has refused it, mostly for NaN: that is in all that was computed since.
                self._own = {}
            elif one.outcome == "committed" and one.update != granted + 1:
                raise ConfigError(
                    f"a fragment that was granted at version {granted} is in the update to "
                    f"{one.update}: the policy was changed to one under which contributions to "
                    "one update are of different fragments; use bsp or k-bsp:K"
                )
        self._last = [one for one in self._last if one[0].outcome in ("open", "pending")]

    def _renew(self, state: BatchState) -> None:
        """Begin with the values of a batch, as a worker does that has just joined."""
        names = state.names()
        parts = divided(state.layout, self.fragments)
        self._parts = [[names[kid] for kid in some] for some in parts]
        self._own = state.params()
        self._start = {key: self._own[key].copy() for some in self._parts for key in some}
        self._version, self._weights = state.version, [0.0] * len(parts)

    def _merge(self, state: BatchState) -> None:
        count = len(self._parts)
        updates = range(self._version, state.version)[-count:]
        for at in {version % count for version in updates}:
            for key in self._parts[at]:
                own, received = self._own[key], state.value(key)
                mine = own * self.mixing + received * (1 - self.mixing) if self.mixing else received
                own[...] = mine
                self._start[key] = received
            self._weights[at] = 0.0
        self._version = state.version

    def params(self, batch: AnyBatch) -> dict[Key, Array]:
        """Return the worker's own values, to be changed in place; the same arrays in each round.

        Raises:
            Cancelled: the batch no longer counts.
        """
        (self._state or batch.settle()).check()
        return self._own

    def contribute(self, batch: AnyBatch, weight: float) -> None:
        """Push start − end of this round's fragment.

        `weight` is that of the round's local batches; the contribution's is that of all which the
        fragment has gone through since its start.

        Raises:
            Cancelled: the batch no longer counts.
        """
        state = self._state or batch.settle()
        state.check()
        self._weights = [before + weight for before in self._weights]
        at = state.granted % len(self._parts)
        batch.set_weight(self._weights[at])
        _push(batch, self._start, {key: self._own[key] for key in self._parts[at]})


def _copied(arrays: Mapping[Key, Array]) -> dict[Key, Array]:
    """Return copies; names of one array are names of one copy."""
    made: dict[int, Array] = {}
    return {key: made.setdefault(id(value), value.copy()) for key, value in arrays.items()}


def _push(batch: AnyBatch, start: Mapping[Key, Array], ends: Mapping[Key, Array]) -> None:
    pushed: set[int] = set()
    for key, end in ends.items():
        if end.dtype.kind in "iu" or id(end) in pushed:
            continue
        pushed.add(id(end))
        batch.push(key, (start[key] - end).astype(end.dtype, copy=False))


Copy = Whole | Divided


def copy_for(fragments: Fragments, mixing: float) -> Copy:
    """Return the copy that rounds of so many fragments need.

    Raises:
        ValueError: `mixing` is not from 0 up to below 1, or has nothing to mix.
    """
    if not 0.0 <= mixing < 1.0:
        raise ValueError(
            f"mixing={mixing!r}: it is the part of a worker's own values, from 0 (none) to below 1"
        )
    if count_of(fragments) > 1:
        return Divided(fragments, float(mixing))
    if mixing:
        raise ValueError(f"mixing={mixing!r} is for fragments; a whole round keeps nothing to mix")
    return Whole()
