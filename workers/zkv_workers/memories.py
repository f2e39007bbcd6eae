"""What one worker's codecs remember of each block, and what a batch that does not count takes back.

Fates are heard on another thread than the one that encodes: they are noted, and taken in before
the next block is encoded (rule 13). Knows no plans and no wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zkv.dtypes import Array
from zkv_codecs.feedback import Codec
from zkv_codecs.packed import State
from zkv_workers import devices


@dataclass(slots=True)
class Memory:
    """What is remembered for one block, and by which codec."""

    codec: Codec
    state: State
    owed: Array | None = None
    """What an earlier codec kept back: added to the next block."""
    home: int = devices.HOST
    """Where all of it lies, and what its steps keep: where the last block was given."""

    def owe(self, more: Array | None) -> None:
        """Add to what is owed."""
        if more is not None:
            self.owed = more if self.owed is None else self.owed + more

    def square(self) -> float:
        """Return the square of the norm of what the codec keeps back."""
        carried = self.codec.carried(self.state)
        return 0.0 if carried is None else devices.square(carried)


@dataclass(frozen=True, slots=True)
class Step:
    """One encoding, so that it can be taken back."""

    bid: int
    codec: Codec
    old: State
    new: State
    owed: Array | None

    def moved(self, move: devices.Move) -> Step:
        """Return the same step in another place."""
        old, new = tuple(map(move, self.old)), tuple(map(move, self.new))
        return replace(self, old=old, new=new, owed=move(self.owed))


@dataclass(slots=True)
class Memories:
    """All of one worker's, by block."""

    by_block: dict[int, Memory] = field(default_factory=dict)
    _steps: dict[int, list[Step]] = field(default_factory=dict)
    """By batch."""
    _fates: deque[tuple[int, bool]] = field(default_factory=deque)

    def nbytes(self) -> int:
        """Return what is remembered between batches, in bytes."""
        return sum(
            part.nbytes
            for memory in list(self.by_block.values())
            for part in (*memory.state, memory.owed)
            if part is not None
        )

    def clear(self) -> None:
        """Forget everything: the run has gone back."""
        self.by_block.clear()
        self._steps.clear()
        self._fates.clear()

    def settled(self, batch: int, *, counted: bool) -> None:
        """Say what became of a batch; may be called from any thread."""
        self._fates.append((batch, counted))

    def hear(self) -> None:
        """Take in what became of batches."""
        while self._fates:
            batch, counted = self._fates.popleft()
            for step in () if counted else reversed(self._steps.get(batch, ())):
                memory = self.by_block[step.bid]
                with devices.working(memory.home):
                    _take_back(memory, step)
            self._steps.pop(batch, None)

    def ready(self, bid: int, codec: Codec, shape: Sequence[int], where: int) -> Memory:
        """Return a block's memory for the next encoding by this codec, at this home.

        What another codec has kept back is owed from now on.
        """
        memory = self.by_block.get(bid)
        if memory is None:
            memory = self.by_block[bid] = Memory(codec, codec.start(shape))
        self._bring(bid, memory, where)
        if memory.codec != codec:
            memory.owe(memory.codec.carried(memory.state))
            memory.codec, memory.state = codec, devices.started(codec, shape, where)
        return memory

    def keep(self, batch: int, step: Step) -> None:
        """Note an encoding until its batch is settled."""
        self._steps.setdefault(batch, []).append(step)

    def _bring(self, bid: int, memory: Memory, where: int) -> None:
        """Bring all that is remembered for a block to where the block is now."""
        if memory.home == where:
            return
        move, memory.home = devices.Move(where), where
        memory.state, memory.owed = tuple(map(move, memory.state)), move(memory.owed)
        for steps in self._steps.values():
            steps[:] = [step.moved(move) if step.bid == bid else step for step in steps]


def _take_back(memory: Memory, step: Step) -> None:
    memory.owe(step.owed)
    if memory.codec == step.codec:
        memory.state = memory.codec.restore(memory.state, step.old, step.new)
        return
    before, after = step.codec.carried(step.old), step.codec.carried(step.new)
    if before is not None and after is not None:
        memory.owe(before - after)
