"""Payloads that no honest worker sends: each is decoded to numbers, or is a named error.

`python tests/fuzzing.py COUNT [SEED]` tries COUNT of them (`scripts/fuzz` does that), a test fewer.
A crash of the interpreter ends the run with a signal; anything else that is wrong is printed with
what is needed to see it again.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from codec_texts import PLAIN, REMEMBERING

from zkv.data_messages import Form
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs.backend import NUMPY, Backend, fastest
from zkv_codecs.frames import from_payload, to_payload
from zkv_codecs.packed import dense
from zkv_codecs.spec import codec

SHAPES = ((), (0,), (1,), (5,), (256,), (300,), (20, 15), (1000,))
NUMBERS = (0, 1, 2, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)


def honest(chance: np.random.Generator, texts: tuple[str, ...]) -> tuple[str, Form, bytes, Any]:
    """Return what an honest worker might send, and the shape of the array."""
    text = texts[chance.integers(len(texts))]
    shape = SHAPES[chance.integers(len(SHAPES))]
    one = codec(text)
    gradient = chance.standard_normal(shape).astype(np.float32)
    encoded, _ = one.encode(dense(np.asarray(gradient)), one.start(shape), int(chance.integers(99)))
    form, payload = to_payload(encoded)
    return encoded.chain.text, form, payload.tobytes(), shape


def spoiled(
    chance: np.random.Generator, text: str, form: Form, payload: bytes, texts: tuple[str, ...]
) -> tuple[str, Form, bytes]:
    """Change one to three things about it."""
    raw = bytearray(payload)
    fields: list[Any] = [form.count, form.coding, form.coded, form.seed]
    for _ in range(chance.integers(1, 4)):
        match chance.integers(7):
            case 0 if raw:
                raw[chance.integers(len(raw))] = int(chance.integers(256))
            case 1:
                del raw[chance.integers(len(raw) + 1) :]
            case 2:
                raw += chance.bytes(int(chance.integers(1, 20)))
            case 3:
                raw = bytearray(chance.bytes(len(raw)))
            case 4:
                at = (0, 2, 3)[chance.integers(3)]
                fields[at] = int(chance.integers(max(2, 2 * len(raw))))
            case 5:
                at = (0, 2, 3)[chance.integers(3)]
                fields[at] = NUMBERS[chance.integers(len(NUMBERS))]
            case _:
                other = codec(texts[chance.integers(len(texts))])
                text = other.chain.text
    return text, Form(*fields), bytes(raw)


def decoded(
    text: str, form: Form, payload: Array, shape: Any, backend: Backend
) -> tuple[Array, Array] | None:
    """Return what one backend's kernels make of it, alone and in a sum; None: it is refused."""
    try:
        arrived = from_payload(text, form, payload, shape, backend)
    except ProtocolError:
        return None
    values = arrived.chain.decode(arrived.packed, backend).values
    total = np.zeros(values.size, np.float32)
    arrived.chain.add(arrived.packed, 2.0, total, backend)
    return values, total


def try_one(number: int, seed: int, backend: Backend) -> bool:
    """Decode one; return whether it was refused.

    Raises:
        AssertionError: neither numbers nor a ProtocolError, or others than NumPy's kernels give.
    """
    chance = np.random.default_rng([seed, number])
    texts = PLAIN + REMEMBERING
    text, form, payload, shape = honest(chance, texts)
    text, form, payload = spoiled(chance, text, form, payload, texts)
    size = int(np.prod(shape, dtype=np.int64))
    where = f"number {number} of seed {seed}: {text} {form} {shape} {payload.hex()[:200]}"
    raw = np.frombuffer(payload, np.uint8)
    try:
        ours, reference = (decoded(text, form, raw, shape, one) for one in (backend, NUMPY))
    except Exception as error:
        raise AssertionError(where) from error
    assert (ours is None) == (reference is None), where
    for found, expected in zip(ours or (), reference or (), strict=True):
        assert found.dtype == np.float32, where
        assert found.size == size, where
        assert found.tobytes() == expected.tobytes(), where
    return ours is None


def run(count: int, seed: int) -> int:
    """Try numbers 0 to `count`; return how many were refused."""
    backend = fastest()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        return sum(try_one(number, seed, backend) for number in range(count))


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    refused = run(asked, seed)
    print(f"{asked} payloads of seed {seed}: {refused} refused, {asked - refused} decoded")
