"""What a worker's grants send: blocks on their way here, and the calls that wait for some of them.

Part of the session. A batch may begin as soon as it is granted: a call waits for the blocks of the
keys that it names, and for no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zkv import control as c
from zkv import data_messages as d
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv.layout import Layout
from zkv.link import Link
from zkv.wire import MODEL, PULLS
from zkv_workers import signals as s
from zkv_workers.contributions import Contributions
from zkv_workers.pulls import Pulls
from zkv_workers.transfers import Assembly, Downloads


@dataclass(slots=True)
class _Wait:
    """A call that waits for blocks of the batch with this number."""

    token: int
    batch: int
    missing: set[int]


class Incoming:
    """Grants and their blocks. `answer` ends a call."""

    def __init__(
        self,
        layout: Layout,
        link: Link,
        made: Contributions,
        pulls: Pulls,
        *,
        ask_s: float,
        answer: Callable[[int, object], None],
    ) -> None:
        self.downloads = Downloads(layout, ask_s=ask_s)
        self._layout = layout
        self._link = link
        self._made = made
        self._pulls = pulls
        self._answer = answer
        self._waits: list[_Wait] = []

    def granted(self, message: c.Granted, now: float) -> None:
        """The broker grants a batch, a pull or a plain push; what follows comes from servers."""
        made = self._made
        made.index = max(made.index, message.index)
        if message.group == PULLS:
            blocks = self._layout.blocks_for(message.kids)
            self._arrived(self.downloads.expect(message, blocks, now))
        elif message.group == MODEL:
            assembly = self.downloads.held(message.version)
            if message.bytes_follow:
                blocks = self._layout.blocks_in(MODEL)
                assembly = self.downloads.expect(message, blocks, now)
            if assembly is None:
                raise ProtocolError(
                    f"the broker grants version {message.version} as one that this worker holds, "
                    "which it does not"
                )
            made.cycle.granted(message, assembly.blocks)
            if message.bytes_follow:
                self._arrived(assembly)
            made.answer_begin()
        else:
            made.plain.granted(message.group, message.grant)
            made.next_plain(message.group)

    def take(self, message: d.Block, payload: Array, now: float) -> None:
        """A server sends a block."""
        self._arrived(self.downloads.take(message, payload, now))
        if message.group == MODEL and self._made.cycle.token:
            self._made.answer_begin()

    def drop(self, group: int, grant: int, batch: int | None) -> None:
        """A grant is taken back, and with it the batch that is being computed under it, if any.

        Who waits for values of that batch looks at it again, and sees that it is cancelled.
        """
        self.downloads.drop(group, grant)
        for wait in [wait for wait in self._waits if wait.batch == batch]:
            self._waits.remove(wait)
            self._answer(wait.token, None)

    # --- waiting -----------------------------------------------------------------------------

    def wait(self, event: s.Await) -> None:
        """Answer when the blocks of these keys are here, or their batch does not count."""
        cycle = self._made.cycle
        if cycle.grant_of(event.batch) is None:
            self._answer(event.token, None)
            return
        blocks = self._layout.blocks_for(event.kids)
        missing = {block.bid for block in blocks} - cycle.blocks.keys()
        self._waits.append(_Wait(event.token, event.batch, missing))
        self._serve()

    def give_up(self, token: int) -> None:
        """Nobody waits for this call's answer any more."""
        self._waits = [wait for wait in self._waits if wait.token != token]

    def _serve(self) -> None:
        here = self._made.cycle.blocks.keys()
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.missing -= here
            if wait.missing:
                self._waits.append(wait)
            else:
                self._answer(wait.token, None)

    def _arrived(self, assembly: Assembly | None) -> None:
        if assembly is None:
            return
        granted = assembly.granted
        if self._waits and granted.group == MODEL:
            self._serve()
        if not assembly.complete:
            return
        if granted.group == PULLS:
            self._pulls.done(granted.token)
            values = s.Values(
                granted.version,
                tuple(granted.kids),
                assembly.blocks,
                assembly.parts,
                self._layout.snapshot(),
            )
            self._answer(granted.token, values)
            return
        self._link.send(c.Received(granted.group, granted.grant))
