"""The simulated cluster on links of one speed: what the protocol makes of them, without any CPU.

Each machine has one card, which sends and receives so many bytes a second at a time, in order; the
broker shares the first server's. A batch computes layer by layer, as in `scripts/bench_overlap`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from simcluster import Options, Program, Sim, SimWorker

from zkv.data_messages import encode_data
from zkv.dtypes import Array
from zkv_brokers import node as n
from zkv_brokers import router as r
from zkv_workers import signals as s
from zkv_workers.model import BatchState, specs_of

LAYERS, ENTRIES = 20, 131_072
"""512 KiB of float32 in each layer."""
RATE = 48e6
"""Bytes per second: what 400 Mbit/s leave."""
TRIPS_S = (0.6e-4, 1e-4, 1.4e-4)
"""One way, in each of a few runs: pace settles where it does, so that one run says little."""
FORWARD = 1 / 3
"""Of the time to compute."""
WARM, BATCHES = 4, 12
HEADER_BYTES = 60


class SlowLinks(Sim):
    """Two workers that train for `compute_s` a batch on two servers; `serial`: one thing after the
    other. `begun` are the times at which batches began, by rank."""

    def __init__(
        self, compute_s: float, *, trip_s: float = 1e-4, serial: bool = False, **options: Any
    ) -> None:
        self.compute_of_s, self.trip_s, self.serial = compute_s, trip_s, serial
        self.begun: dict[int, list[float]] = {}
        self._out: dict[str, float] = {}
        self._in: dict[str, float] = {}
        options = {"workers": 2, "servers": 2, "optimizer": "sgd:lr=0.1", **options}
        super().__init__(1, Options(window_bytes=64 << 20, measures=True, **options))

    # --- links -------------------------------------------------------------------------------

    def send(self, source: str, target: str, nbytes: int, action: Callable[[], None]) -> None:
        """Deliver a message from one machine to another once their cards are free."""
        if source == target:
            self.later(1e-5, action)
            return
        takes_s = (nbytes + HEADER_BYTES) / RATE
        leaves = max(self.now, self._out.get(source, 0.0))
        self._out[source] = leaves + takes_s
        comes = max(leaves + self.trip_s, self._in.get(target, 0.0))
        self._in[target] = max(comes, leaves + self.trip_s) + takes_s
        self.later(self._in[target] - self.now, action)

    def _machine(self, route: bytes) -> str:
        return route.decode().partition(".")[0]

    def to_router(self, route: bytes, frame: bytes) -> None:
        said = r.Received(route, frame)
        self.send(
            self._machine(route),
            "s0",
            len(frame),
            lambda: self._do_router(self.router.handle(said, self.now)),
        )

    def _do_router(self, actions: list[r.Action]) -> None:
        for action in actions:
            if isinstance(action, r.Send):
                self.send(
                    "s0",
                    self._machine(action.route),
                    len(action.frame),
                    lambda a=action: self._from_router(a.route, a.frame),
                )

    def _do_node(self, index: int, actions: list[n.Action]) -> None:
        for action in actions:
            if isinstance(action, n.ToWorker):
                route = self.routes[action.incarnation]
                header, bits = encode_data(action.message), _bits(action.payload)
                nbytes = len(header) + (0 if bits is None else bits.nbytes)
                self.send(
                    f"s{index}",
                    self._machine(route),
                    nbytes,
                    lambda h=header, p=bits, t=route: self._to_worker(t, h, p),
                )
            else:
                super()._do_node(index, [action])

    def _do_worker(self, route: bytes, worker: SimWorker, actions: list[s.Output]) -> None:
        for action in actions:
            if isinstance(action, s.SendData):
                header, bits = encode_data(action.message), _bits(action.payload)
                nbytes = len(header) + (0 if bits is None else bits.nbytes)
                index = worker.servers[action.server]
                self.send(
                    self._machine(route),
                    f"s{index}",
                    nbytes,
                    lambda i=index, h=header, p=bits: self._to_node(route, i, h, p),
                )
            else:
                super()._do_worker(route, worker, [action])

    # --- training ----------------------------------------------------------------------------

    def _program(self, rank: int, worker: SimWorker) -> Program:
        keys = [f"layer{at:02}" for at in range(LAYERS)]
        yield s.Join
        specs, values = specs_of({key: np.zeros(ENTRIES, np.float32) for key in keys})
        yield lambda token: s.Initialise(token, tuple(specs), values, False)
        route = next(where for where, one in self.workers.items() if one is worker)
        begun = self.begun.setdefault(rank, [])
        for _ in range(BATCHES):
            grant = yield s.Begin
            begun.append(self.now)
            worker.encoder.use(grant.codec, grant.codec_down, grant.chosen)
            state = worker.running.add(BatchState(grant, 1.0, worker.encoder))
            fate = yield from self._batch(route, worker, state, keys)
            if self.serial:
                yield fate
        yield s.Leave

    def _batch(
        self, route: bytes, worker: SimWorker, state: BatchState, keys: list[str]
    ) -> Generator[Any, Any, Any]:
        forward_s = self.compute_of_s * FORWARD / LAYERS
        backward_s = self.compute_of_s * (1 - FORWARD) / LAYERS
        if self.serial and (missing := state.missing()):
            yield lambda token: s.Await(token, state.number, missing)
        for key in keys:
            if missing := state.missing((key,)):
                yield lambda token, kids=missing: s.Await(token, state.number, kids)
            yield forward_s
        pushed: list[str] = []
        for key in reversed(keys):
            yield backward_s
            pushed.append(key)
            if not self.serial:
                self._push_key(route, worker, state, key)
        for key in pushed if self.serial else ():
            self._push_key(route, worker, state, key)
        finish = self._finish(worker, state, None)
        if not self.serial:
            self.feed(route, worker, finish)
            return None
        return lambda token: s.Finish(token, state.number, 1.0, ())

    def _push_key(self, route: bytes, worker: SimWorker, state: BatchState, key: str) -> None:
        for full in state.packer.add(key, np.ones(ENTRIES, np.float32)):
            sealed = state.packer.seal(full)
            self.feed(route, worker, s.SendBlock(state.number, full.bid, sealed, 1.0))


def _bits(payload: Array | None) -> Array | None:
    return None if payload is None else payload.view(np.uint8).copy()


def batch_s(compute_s: float, **options: Any) -> float:
    """Return the mean seconds of a batch, once the links are known, over links of all trips."""
    means = []
    for trip_s in TRIPS_S:
        sim = SlowLinks(compute_s, trip_s=trip_s, **options)
        sim.run()
        times = [b - a for a, b in itertools.pairwise(sim.begun[0])][WARM:]
        means.append(sum(times) / len(times))
    return sum(means) / len(means)
