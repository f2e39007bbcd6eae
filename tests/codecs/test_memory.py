"""Residuals are placed where kernels write them fastest, and are arrays like any other."""

from __future__ import annotations

import numpy as np
import pytest

from zkv_codecs.backend import NUMPY
from zkv_codecs.feedback import ErrorFeedback
from zkv_codecs.memory import LARGE, PAGE, residual_like
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec


@pytest.mark.parametrize("size", [0, 1, 1000, LARGE // 4 - 1, LARGE // 4, 2**18, 100_003])
def test_a_residual_is_a_new_array_of_that_size_and_large_ones_begin_at_a_page(size: int) -> None:
    values = np.ones(size, np.float32)
    new = residual_like(values, NUMPY)
    assert (new.shape, new.dtype) == (values.shape, values.dtype)
    assert new.flags.c_contiguous
    assert new.flags.writeable
    assert not np.may_share_memory(new, values)
    if values.nbytes >= LARGE:
        assert new.ctypes.data % PAGE == 0
    new[:] = 2
    assert (new == 2).all()


@pytest.mark.parametrize("text", ["int8+ef", "onebit+ef", "ternary+ef", "topk:0.01+ef"])
def test_what_a_codec_keeps_begins_at_a_page(text: str) -> None:
    made = codec(text)
    assert isinstance(made, ErrorFeedback)
    x = np.sin(np.arange(2**18, dtype=np.float32))
    _, state = made.encode(dense(x), made.start(x.shape), 0, NUMPY)
    assert state[0].ctypes.data % PAGE == 0
