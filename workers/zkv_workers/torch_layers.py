"""Layers whose values come just in time: before their forward, and again before their backward.

A layer is a module that owns parameters. During its forward what autograd saves of its parameters
is their keys (`torch.autograd.graph.saved_tensors_hooks`), so a backward pass finds out that it
needs values at the moment when it needs them, whatever the modules do: used twice, tied, computed
again by a checkpoint. Other saved tensors are left to whoever has hooks outside, as a checkpoint
has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zkv_workers.torch_memory import Fill, Memory
from zkv_workers.torch_survey import Owner

top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Tells which hooks on saved tensors are in force; None: this PyTorch is too old to tell."""

BACK = "backward"
"""Why a key is held that a backward pass has asked for: until its gradient is through."""
USED = "used"
"""Why a key is held that was used outside of its layers: until the batch is over."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What autograd saves instead of a parameter, or of a view of one."""

    key: str
    pass_number: int
    like: tuple[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Another saved tensor, and its version then: a change in place is an error in PyTorch too."""

    tensor: Any
    version: int


@dataclass(frozen=True, slots=True)
class _Theirs:
    """What hooks outside have made of a saved tensor."""

    packed: Any
    unpack: Callable[[Any], Any]


@dataclass(slots=True)
class _Running:
    """A layer whose forward is running."""

    place: int
    why: tuple[str, int]
    hooks: Any


@dataclass(slots=True)
class Layers:
    """All layers of a model. `fill` fetches values, `want` says what will be needed soon, and
    `forget` that something of that will not be."""

    owners: tuple[Owner, ...]
    memory: Memory
    ahead: int
    fill: Fill
    want: Callable[[list[str]], None]
    forget: Callable[[list[str]], None]
    pass_number: int = 0
    """Counts batches: what an earlier one has saved is of other values."""
    _running: list[_Running] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)
    """The places of the layers in the order in which the last whole batch has used them."""
    _ran: list[int] = field(default_factory=list)
    _saved: dict[int, set[str]] = field(default_factory=dict)
    """By place, the keys that its backward pass will ask for."""
    _wanted: list[str] = field(default_factory=list)
    _task: int = -1
    """The backward pass (of autograd's) whose end will be told."""

    def __post_init__(self) -> None:
        """Begin with the order in which the model has its modules."""
        self._order = list(range(len(self.owners)))

    # --- forward -----------------------------------------------------------------------------

    def enter(self, place: int) -> None:
        """The forward of a layer (-1: of the model itself, which owns nothing) begins.

        Raises:
            Whatever `fill` raises.
        """
        inside = torch._C._current_graph_task_id() != -1
        keys = self.owners[place].keys if place >= 0 else ()
        why = ("forward", len(self._running))
        self._hold(keys, why)
        hooks = None
        if keys:
            if inside:
                # Computed again: the backward pass of it comes at once.
                self._hold(keys, BACK)
                self._listen()
            elif torch.is_grad_enabled() and place not in self._saved:
                self._ran.append(place)
                self._saved[place] = set()
            hooks = torch.autograd.graph.saved_tensors_hooks(*self._packing(place))
            hooks.__enter__()
        self._running.append(_Running(place, why, hooks))
        if keys and not inside:
            self._look_ahead(self._after(place))

    def leave(self, place: int, output: Any) -> None:
        """The forward of a layer has ended, by an exception or with an output."""
        if not self._running or self._running[-1].place != place:
            return  # Its values did not come, so it did not begin.
        one = self._running.pop()
        if one.hooks is not None:
            one.hooks.__exit__()
            shown = {self.memory.key_of(tensor) for tensor in _tensors(output)} - {None}
            self._hold([key for key in shown if key is not None], USED)
        self.memory.drop(self.owners[place].keys if place >= 0 else (), one.why)

    @property
    def running(self) -> bool:
        """Whether the forward of any layer, or of the model, is running."""
        return bool(self._running)

    def use(self, key: str) -> None:
        """A key is used outside of its layers."""
        self._hold([key], USED)

    def _hold(self, keys: Iterable[str], why: Any) -> None:
        self.memory.hold(list(keys), why, self.fill)

    # --- what autograd saves -----------------------------------------------------------------

    def _packing(self, place: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        assert top_hooks is not None
        outside = top_hooks(True)
        saved = self._saved.get(place, set())

        def pack(tensor: Any) -> Any:
            key = self.memory.key_of(tensor)
            if key is not None:
                saved.add(key)
                like = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
                return _Saved(key, self.pass_number, like)
            if outside is not None:
                return _Theirs(outside[0](tensor), outside[1])
            # As it is would be a cycle, if it is the output of what saves it.
            return _Kept(tensor.detach(), tensor._version)

        return pack, self._unpack

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, _Theirs):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {tuple(packed.tensor.shape)}, version "
                    f"{packed.version} expected, {packed.tensor._version} found"
                )
            return packed.tensor
        if packed.pass_number != self.pass_number:
            raise RuntimeError(
                f"key {packed.key!r}: a backward pass over a graph of an earlier batch, whose "
                "values are not here any more; call backward() before the batch is finished"
            )
        self._listen()
        self._hold([packed.key], BACK)
        self._look_ahead(self._before(packed.key))
        return self.memory.view(packed.key, packed.like)

    # --- backward ----------------------------------------------------------------------------

    def sent(self, key: str) -> None:
        """The gradient of a key is through."""
        self.memory.drop([key], BACK)

    def _listen(self) -> None:
        """Be called when the backward pass that is running has come to its end."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """What has had no gradient gets none in this pass."""
        self.memory.drop(self.memory.held_for(BACK), BACK)

    # --- what comes next ---------------------------------------------------------------------

    def _after(self, place: int) -> list[str]:
        """Return the keys of the layers behind one; behind the last one the backward pass begins
        with the last."""
        at = self._order.index(place) + 1 if place in self._order else len(self._order)
        following = [self.owners[one].keys for one in self._order[at : at + self.ahead]]
        keys = [key for one in following for key in one]
        if torch.is_grad_enabled():
            for one in list(reversed(self._ran))[: self.ahead - len(following)]:
                keys += sorted(self._saved[one])
        return keys

    def _before(self, key: str) -> list[str]:
        """Return the keys that a backward pass asks for after this one."""
        at = max((n for n, one in enumerate(self._ran) if key in self._saved[one]), default=0)
        found = self._ran[max(0, at - self.ahead) : at]
        return [other for one in reversed(found) for other in sorted(self._saved[one])]

    def _look_ahead(self, keys: Iterable[str]) -> None:
        """Have these keys sent, and no others that were to be needed next."""
        wanted = [key for key in dict.fromkeys(keys) if not self.memory.is_held(key)]
        before, self._wanted = self._wanted, wanted
        stale = [key for key in before if key not in wanted and not self.memory.is_held(key)]
        if stale:
            self.forget(stale)
        fresh = [key for key in wanted if key not in before]
        if fresh:
            self.want(fresh)

    # --- batches -----------------------------------------------------------------------------

    def over(self, *, whole: bool = False) -> None:
        """A batch is over (`whole`: it was finished): nothing of it is needed any more."""
        if whole and self._ran:
            self._order = self._ran
        self._ran, self._saved, self._wanted = [], {}, []
        self.pass_number += 1
        self._task = -1
        while self._running:
            hooks = self._running.pop().hooks
            if hooks is not None:
                hooks.__exit__()
        self.memory.clear()


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in an output of tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _tensors(getattr(value, one.name))
