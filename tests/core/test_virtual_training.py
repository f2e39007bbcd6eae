"""Training under a virtual clock: what is sent and learned is real, and seconds add up."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import bench_adaptive
import bench_quality
from training_tasks import ADAM, Digits
from virtual_training import LOOPBACK, MBIT, Costs, Link, Training
from zkv.optim import init_slots, update
from zkv.optimizer_spec import optimizer
from zkv.sums import weighted_mean
from zkv_codecs.backend import NUMPY
from zkv_codecs.bits import Observation
from zkv_codecs.bits_learned import Learned
from zkv_codecs.packed import dense
from zkv_codecs.plan import plan

STEPS = 6
SLOW = Link(10 * MBIT, 1e-3)
DENSE = 4 * (64 * 512 + 512 + 512 * 10 + 10)
SENT_DENSE = 4 * (512 + 10)
"""The small keys."""
CODED = 64 * 512 + 512 * 10
BLOCKS = 2
"""Blocks with a codec: that of each of the large keys."""
LARGE = ";small=1024"
"""For a codec on both."""


class Known(Costs):
    """A table that needs no measuring: a microsecond to encode with a codec, two to decode."""

    def of(self, text: str, shape: tuple[int, ...]) -> tuple[float, float]:
        return (0.0, 0.0) if text == "none" else (1e-6, 2e-6)


def costs() -> Costs:
    return Known(NUMPY)


def trained(text: str, links: list[Link] | None = None, **more: Any) -> Training:
    run = Training(Digits(1), text, links or [SLOW] * 3, costs(), **more)
    for _ in range(STEPS):
        run.step()
    return run


@pytest.mark.parametrize(
    ("text", "up"),
    [
        ("none", DENSE),
        ("fp16", 2 * CODED + SENT_DENSE),
        ("int8+ef", CODED + 4 * CODED // 256 + SENT_DENSE),
    ],
)
def test_a_step_is_the_model_down_then_computing_then_encoding_sending_and_decoding(
    text: str, up: int
) -> None:
    run = trained(text + LARGE, compute_s=0.5)
    coded = BLOCKS * (text != "none")
    step = 1e-3 + DENSE / SLOW.bytes_per_s + 0.5 + 1e-6 * coded
    step += 1e-3 + up / SLOW.bytes_per_s + 3 * 2e-6 * coded
    assert run.bytes_up == STEPS * 3 * up
    assert run.now_s == pytest.approx(STEPS * step)
    assert run.now_s == pytest.approx(sum(one.seconds(run.links) for one in run.spent))


def test_the_slowest_link_decides() -> None:
    one = trained("none", [LOOPBACK, SLOW, LOOPBACK])
    assert one.now_s == pytest.approx(trained("none").now_s)
    assert one.spent[0].seconds([LOOPBACK] * 3) < one.spent[0].seconds([SLOW] * 3)


@pytest.mark.parametrize("text", ["none", "fp16", "int8", "int8+ef", "onebit+ef", "topk:0.01+ef"])
def test_a_fixed_codec_learns_what_a_plain_loop_over_keys_learns(text: str) -> None:
    """To the bit: with each key in a block of its own, and codecs that need no chance."""
    run = trained(text + LARGE, plain=True)
    task, rule, chosen = Digits(1), optimizer(ADAM), plan(text + LARGE)
    params = {key: value.copy() for key, value in task.initial().items()}
    slots = {key: init_slots(rule.rule, value.reshape(-1)) for key, value in params.items()}
    states: dict[tuple[int, str], Any] = {}
    for step in range(STEPS):
        given = [task.gradients(params, worker, step)[0] for worker in range(3)]
        for key, value in params.items():
            codec = chosen.for_key(key, value.size)
            means = []
            for worker, one in enumerate(given):
                packed = dense(one[key])
                state = states.get((worker, key)) or codec.start(packed.shape)
                encoded, states[worker, key] = codec.encode(packed, state, 0, NUMPY)
                means.append(encoded.chain.decode(encoded.packed, NUMPY).values)
            mean = weighted_mean(means, [1.0] * 3)
            lr = rule.lr_at(step)
            flat, slots[key] = update(
                rule.rule, value.reshape(-1), slots[key], mean, lr=lr, count=step + 1
            )
            params[key] = flat.reshape(value.shape)
    for key, value in params.items():
        np.testing.assert_array_equal(run.params[key], value)


def test_auto_reads_the_table_and_the_virtual_clock_so_two_runs_are_equal() -> None:
    one, other = (trained("auto") for _ in range(2))
    assert (one.now_s, one.codecs) == (other.now_s, other.codecs)
    assert one.granted == "auto:late=0.5"
    assert one.codecs[-1][0] != "none"
    assert set(trained("auto", [Link(1e15, 1e-3)] * 3).codecs[-1].values()) == {"none"}


def test_widths_are_those_of_the_brokers_controller() -> None:
    run = trained("bits:schedule=8@0,4@3")
    # The first update has none before it, so it says nothing of how long a step takes.
    assert [one[0] for one in run.codecs] == ["int8+ef"] * 4 + ["int4+ef"] * 2
    assert {one[1] for one in run.codecs} == {"none"}


def test_a_shuffled_controller_is_told_of_steps_that_were() -> None:
    inner = Learned(every=1)
    told = []
    one = bench_adaptive.Shuffled(inner, 1)
    state = one.start()
    for at in range(1, 30):
        before = state
        state, _ = one.observe(before, Observation(float(at), 1.0, 1.0))
        told.append(
            next(
                was
                for was in range(1, at + 1)
                if inner.observe(before, Observation(float(was), 1.0, 1.0))[0] == state
            )
        )
    assert len(set(told)) < len(told)
    assert told != sorted(told)


def ended(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    monkeypatch.setattr(module, "Costs", costs)
    with pytest.raises(SystemExit) as caught:
        module.main()
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_bench_quality_says_which_targets_are_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--task", "digits", "--seeds", "1", "--codec", "none", "--codec", "topk:0.01")
    assert ended(monkeypatch, bench_quality, *tiny, "--steps", "8") == 1
    assert ": MISSED" in capsys.readouterr().out
    assert ended(monkeypatch, bench_quality, *tiny[:-1], "int8", "--steps", "8") == 0
    assert "points of dense, 0.5 allowed: ok" in capsys.readouterr().out
    assert ended(monkeypatch, bench_quality, "--codec", "int7") == 2
    assert ended(monkeypatch, bench_quality, "--mbit", "0") == 2


def test_bench_adaptive_ends_with_the_verdict_on_its_claims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--task", "digits", "--seeds", "1", "--steps", "30", "--links", "100,loopback")
    code = ended(monkeypatch, bench_adaptive, *tiny, "--what", "auto")
    said = capsys.readouterr().out
    assert code == int("MISSED" in said)
    assert said.count("\n") == 5
    monkeypatch.setattr(bench_adaptive, "WITHIN", 0.5)
    assert ended(monkeypatch, bench_adaptive, *tiny, "--what", "auto") == 1
    assert ended(monkeypatch, bench_adaptive, "--steps", "3") == 2
    for wrong in ("--links=fast", "--links=0", "--links=inf", "--seeds=-1", "--seeds=two"):
        assert ended(monkeypatch, bench_adaptive, wrong) == 2
