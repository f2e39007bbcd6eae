"""A model of twenty layers: what leaves when, by the trace and by a counter, and the same bits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_models import nn, seeded, torch
from worker_threads import trained

from zkv.data_messages import Ack, Block
from zkv.spans import NETWORK
from zkv.torch import attach
from zkv_workers import signals as s

pytestmark = pytest.mark.torch

LAYERS, WIDE, BATCHES = 20, 160, 4
"""Each weight is more than 64 KiB: a block of its own."""
WAYS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "early": False},
    {"just_in_time": True},
]


def twenty() -> Any:
    with seeded(0):
        parts = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS)]
        return nn.Sequential(*parts)


def loss_of(model: Any, number: int) -> Any:
    x = torch.from_numpy(np.random.default_rng(number).standard_normal((4, WIDE), np.float32))
    return model(x).square().mean()


def test_overlapped_or_not_the_bits_are_the_same() -> None:
    found = []
    for way in WAYS:

        def body(worker: Any, way: Any = way) -> Any:
            optimizer = attach(model := twenty(), worker, **way)
            losses = []
            for number in range(BATCHES):
                optimizer.zero_grad()
                loss = loss_of(model, 2 * number + worker.rank)
                loss.backward()
                assert optimizer.step() == "pending"
                losses.append(loss.item())
            assert optimizer.last.wait() == "committed"
            return losses, worker.evaluate().params

        found += trained(body, body, servers=2, optimizer="adam:lr=0.01")
    for losses, params in found:
        # Each worker has samples of its own.
        assert losses in (found[0][0], found[1][0])
        for key, value in params.items():
            assert value.tobytes() == found[0][1][key].tobytes(), key
    assert len(params) == 2 * LAYERS


def test_bytes_leave_before_the_backward_pass_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The counter says so inside the backward pass, and the run's spans say so afterwards."""
    monkeypatch.setenv("ZKV_TRACE", str(tmp_path))

    def body(worker: Any) -> None:
        model, acknowledged = twenty(), threading.Event()
        session = worker._driver.session
        take, counted, met = session.take, 0, []

        def heard(event: Any, now: float) -> None:
            take(event, now)
            if isinstance(event, s.FromServer) and isinstance(event.message, Ack):
                acknowledged.set()

        def first_layer(_: Any) -> None:
            # The last but one of all gradients: it is ready, and not handed over yet.
            here = acknowledged.wait(10)
            met.append((here, worker.stats()["bytes_up"] - counted, len(optimizer._step.sent)))

        model[0][0].weight.register_post_accumulate_grad_hook(first_layer)
        optimizer = attach(model, worker)
        session.take = heard
        for number in range(2):
            optimizer.zero_grad()
            optimizer._begin(worker.batch(), explicit=False)
            counted = worker.stats()["bytes_up"]
            acknowledged.clear()
            loss_of(model, number).backward()
            optimizer.step()
            assert optimizer.last.wait() == "committed"
        assert len(met) == 2
        for here, nbytes, sent in met:
            assert here
            assert nbytes >= 4 * WIDE * WIDE
            assert LAYERS < sent < 2 * LAYERS
        spans = list(worker._ledger.spans.kept)
        for batch in (1, 2):
            (backward,) = [
                one for one in spans if one.name == "backward" and one.about["batch"] == batch
            ]
            inside = [
                one
                for one in spans
                if one.track == NETWORK
                and backward.start_s < one.start_s
                and one.end_s < backward.end_s
            ]
            # Both sent and acknowledged meanwhile.
            assert "send" in {one.name.split()[0] for one in inside}

    trained(body, optimizer="sgd:lr=0.01")


def test_the_first_layer_is_computed_before_the_last_values_have_arrived() -> None:
    """What a server sends of the last layer is held back until the first one was computed."""

    def body(worker: Any) -> None:
        model = twenty()
        optimizer = attach(model, worker)
        session, layout = worker._driver.session, worker._driver.session.layout
        (last,) = layout.blocks_with(layout.kid(f"{LAYERS - 1}.0.weight"))
        take, kept, computed = session.take, [], threading.Event()

        def heard(event: Any, now: float) -> None:
            message = event.message if isinstance(event, s.FromServer) else None
            # They may come before the update is in the log, inside the first backward pass.
            values = isinstance(message, Block) and (message.bid, message.version) == (last.bid, 1)
            if values and not computed.is_set():
                kept.append(event)
            else:
                take(event, now)

        def release() -> None:
            for event in kept:
                worker._driver.feed(event)

        def after(*_: Any) -> None:
            order.append(f"{LAYERS - 1}.0.weight" in optimizer._step.pending)
            if optimizer.last.version == 1:
                computed.set()
                worker._loop.call_soon_threadsafe(release)

        order: list[bool] = []
        session.take = heard
        model[0][0].register_forward_hook(after)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        # The first batch waits for all, as it has to show which modules' hooks are run.
        assert order == [False, True]
        assert optimizer.last.wait() == "committed"

    trained(body, optimizer="sgd:lr=0.01")
