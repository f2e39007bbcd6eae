"""One worker's encoder: which key gets which codec, and what becomes of what is cut off."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from single_blocks import SIZE, layout, received, spec

from zkv.errors import PushRefused
from zkv_codecs.backend import NUMPY
from zkv_codecs.plan import Plan, plan
from zkv_workers.encoding import Encoder
from zkv_workers.packing import Packer

Array = np.ndarray[Any, Any]


def encoder(text: str) -> Encoder:
    made = Encoder(seed=3, backend=NUMPY)
    made.use(text)
    return made


def gradients(seed: int, count: int) -> Array:
    return np.random.default_rng(seed).standard_normal((count, SIZE)).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "codecs"),
    [
        ("none", ["none"] * 6),
        ("int8", ["none", "none", "none", "none", "none", "int8"]),
        ("int8;small=2000", ["int8", "none", "none", "int8", "int8", "int8"]),
        ("int8;small=0", ["int8", "int8", "none", "int8", "int8", "int8"]),
        ("none;w=int8+ef;7=int8", ["int8+ef", "none", "none", "int8", "none", "none"]),
        ("int8+ef;*=none", ["none"] * 6),
        (
            "int8;h*=powersgd:1;small=100",
            ["int8", "none", "none", "int8", "powersgd:1", "int8"],
        ),
    ],
)
def test_the_plan_chooses_by_pattern_and_size(text: str, codecs: list[str]) -> None:
    keys = [spec("w", 2000), spec("b", 10), spec("n", 2000, "int32"), spec(7, 2000)]
    # 64 KiB of float32: the first that is not small if nothing is said.
    keys += [spec("h", 2000, "float16"), spec("l", 16_384)]
    made, one = layout(*keys), plan(text)
    chosen = [one.for_block(made, made.blocks[bid]).text for bid in range(6)]
    assert chosen == codecs


def test_a_bucket_has_a_codec_if_all_its_keys_have_it_and_it_chooses_no_elements() -> None:
    made = layout(spec("w", 2000), spec("b", 2000), bucket=True)
    for text, chosen in (
        ("int8+ef;small=0", "int8+ef"),
        ("int8;b=none;small=0", "none"),
        ("powersgd:2+ef;small=0", "none"),
    ):
        assert plan(text).for_block(made, made.blocks[0]).text == chosen


@given(
    st.lists(st.sampled_from(["int8+ef", "none", "int8", "powersgd:1+ef"]), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_whatever_codecs_follow_each_other_and_whatever_is_cancelled_nothing_is_lost(
    plans: list[str], seed: int, data: st.DataObject
) -> None:
    """What counted, as received, is what was given, once a codec that cuts nothing has flushed."""
    made, one = layout(spec("w", SIZE)), Encoder(seed=1, backend=NUMPY)
    block = made.blocks[0]
    given_, got = np.zeros(SIZE), np.zeros(SIZE)
    lossy_alone = 0.0
    waiting: list[tuple[int, Array, Array]] = []
    everything = gradients(seed, len(plans) + 1)
    for batch, text in enumerate([*plans, "none"]):
        one.use(f"{text};small=0")
        gradient = everything[batch]
        sealed = one.encode(made, block, gradient, batch)
        sent = received(sealed)
        sent = sent.view(np.float32) if sealed.form is None else sent
        if text == "int8":
            lossy_alone += np.abs(gradient).max() / 100
        waiting.append((batch, gradient, sent))
        last = text == "none" and batch == len(plans)
        while waiting and (last or data.draw(st.booleans())):
            number, flat, arrived = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            counted = data.draw(st.booleans()) or last
            one.settled(number, counted=counted)
            if counted:
                given_ += flat
                got += arrived
    # One more: whatever is owed comes now.
    sealed = one.encode(made, block, np.zeros(SIZE, np.float32), 99)
    got += received(sealed).view(np.float32)
    np.testing.assert_allclose(got, given_, atol=1e-4 + lossy_alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e37])
def test_what_a_codec_cannot_send_is_refused_with_key_and_element(bad: float) -> None:
    """D17: and nothing of it is remembered."""
    made, one = layout(spec("w", SIZE)), encoder("int8+ef;small=0")
    gradient = np.ones(SIZE, np.float32)
    gradient[17] = bad
    with pytest.raises(
        PushRefused,
        match=rf"key 'w': element 17 of the gradient is {re.escape(f'{bad:g}')}",
    ):
        one.admit(made, 0, gradient)
    clean = np.ones(SIZE, np.float32)
    assert one.admit(made, 0, clean) is clean
    np.testing.assert_allclose(received(one.encode(made, made.blocks[0], clean, 1)), 1, rtol=1e-6)


def test_what_is_not_finite_is_skipped_or_zero_on_request() -> None:
    made = layout(spec("w", SIZE))
    gradient = np.ones(SIZE, np.float32)
    gradient[[3, 5]] = np.nan, np.inf
    assert encoder("int8;small=0;nonfinite=skip").admit(made, 0, gradient) is None
    admitted = encoder("int8;small=0;nonfinite=zero").admit(made, 0, gradient)
    assert admitted is not None
    assert np.flatnonzero(admitted != 1).tolist() == [3, 5]
    assert admitted[3] == admitted[5] == 0
    # Without a codec the server's guard looks, and allow_nan may allow it.
    assert encoder("none").admit(made, 0, gradient) is gradient


def test_the_report_names_what_was_saved_and_what_is_remembered() -> None:
    made, one = layout(spec("w", SIZE), spec("b", 10)), encoder("int8+ef;b=none;small=0")
    for batch, gradient in enumerate(gradients(0, 3)):
        one.encode(made, made.blocks[0], gradient, batch)
        one.encode(made, made.blocks[1], gradient[:10], batch)
    (key, row), *others = one.accounts.report(made).items()
    assert (key, others) == ("w", [])
    assert row["codec"] == "int8+ef"
    assert row["bytes_before"] == 3 * 4 * SIZE
    assert row["bytes_after"] == 3 * (SIZE + 4 * 3)
    assert float(row["residual_norm"]) > 0
    assert float(row["encode_s"]) > 0


def test_the_codec_of_a_bucket_is_found_once_however_many_keys_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [spec(f"k{number}", 3) for number in range(200)]
    made, one = layout(*keys, bucket=True), encoder("int8;small=0")
    looked: list[int] = []
    find = Plan.for_block
    monkeypatch.setattr(
        Plan, "for_block", lambda self, *given: (looked.append(1), find(self, *given))[1]
    )
    gradient = np.ones(3, np.float32)
    for batch in range(3):
        packer = Packer(made, made.kids_in(0), one, batch)
        for key in keys:
            packer.add(key.key, gradient)
    assert len(looked) == 1
    one.use("none")
    assert one.admit(made, 0, gradient) is gradient
    assert len(looked) == 2
