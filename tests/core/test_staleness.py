"""What happens to stale gradients: the rules' own numbers, their text, and a single process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zkv.staleness import FORMS, Staleness, staleness

values = st.builds(
    Staleness,
    st.booleans(),
    st.one_of(st.just(0.0), st.floats(1e-6, 1e6)),
    st.one_of(st.none(), st.integers(0, 1000)),
)


@given(values)
def test_the_text_means_the_same_value(value: Staleness) -> None:
    assert staleness(str(value)) == value


@pytest.mark.parametrize(("age", "factor"), [(0, 1.0), (1, 0.5), (3, 0.25), (4, 0.2), (5, 1 / 6)])
def test_scale_is_one_over_one_plus_the_age(age: int, factor: float) -> None:
    """A gradient of version 1 at version 4 is 3 updates old; of version 12 at 17 it is 5."""
    assert staleness("scale").factor(age) == factor
    assert staleness("none").factor(age) == 1.0


def test_a_gradient_beyond_the_bound_is_dropped_and_says_so() -> None:
    rule = staleness("drop:3")
    assert [rule.refuses(age) == "" for age in (0, 3, 4)] == [True, True, False]
    assert rule.refuses(4) == "late: 4 updates old, and more than 3 are dropped"
    assert staleness("drop:0").refuses(1)
    assert not staleness("scale").refuses(1000)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_delay_compensation_adds_the_square_times_the_move(dtype: str) -> None:
    gradient = np.array([2.0, -1.0, 0.0], dtype)
    now, then = np.array([1.5, 0.0, 9.0], dtype), np.array([1.0, 2.0, 1.0], dtype)
    result = staleness("dc:0.5").compensated(gradient, now, then)
    assert result.dtype == np.dtype(dtype)
    # g + 0.5 * g * g * (now - then)
    assert result.tolist() == [2.0 + 0.5 * 4 * 0.5, -1.0 + 0.5 * 1 * -2.0, 0.0]
    assert gradient.tolist() == [2.0, -1.0, 0.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 10))
def test_nothing_is_compensated_where_nothing_has_moved(numbers: list[float], rate: float) -> None:
    gradient = np.array(numbers)
    here = np.ones_like(gradient)
    assert (Staleness(compensation=rate).compensated(gradient, here, here) == gradient).all()


@pytest.mark.parametrize(
    "text",
    [
        *("", "half", "scale:2", "scale+scale", "scale,dc:1"),
        *("dc", "dc:0", "dc:-1", "dc:nan", "dc:x"),
        *("drop", "drop:-1", "drop:1.5", "drop:1+drop:2"),
    ],
)
def test_what_is_no_rule_names_the_valid_forms(text: str) -> None:
    with pytest.raises(ValueError, match="staleness") as caught:
        staleness(text)
    told = str(caught.value)
    assert FORMS in told or "needs a" in told
