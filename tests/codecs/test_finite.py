"""A peer's payload whose codes stand for NaN or Inf is refused before it is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY
from zkv_codecs.feedback import Encoded
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec

WORDS = {
    "fp16": (np.uint16, [0x7C00, 0xFC00, 0x7E01]),
    "sfp16": (np.uint16, [0x7C00, 0xFC01]),
    "bf16": (np.uint16, [0x7F80, 0xFF80, 0x7FC1]),
    "fp8_e4m3": (np.uint8, [0x7F, 0xFF]),
    "fp8_e5m2": (np.uint8, [0x7C, 0xFC, 0x7F]),
    "topk:0.5": (np.uint32, [0x7F800000, 0xFF800000, 0x7FC00000]),
    "powersgd:1": (np.uint32, [0x7F800000, 0x7FC00000]),
}


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("packed", ["", "+lz4"])
def test_codes_that_are_not_finite_are_refused(text: str, packed: str) -> None:
    one = codec(text + packed)
    dtype, words = WORDS[text]
    shape = (30, 20)
    gradient = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for word in words:
        encoded, _ = codec(text).encode(dense(gradient), one.start(shape), 0)
        sent = encoded.packed
        codes = sent.values.view(dtype).copy()
        codes[3] = word
        sent = replace(sent, values=codes.view(sent.values.dtype))
        if packed:
            sent, _ = one.chain.stages[-1].encode(sent, (), 0, NUMPY)
        form, payload = to_payload(Encoded(one.chain, sent))
        with pytest.raises(ProtocolError, match="NaN or infinite"):
            from_payload(one.chain.text, form, payload, shape)
