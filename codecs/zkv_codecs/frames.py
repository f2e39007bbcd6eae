"""Between what a codec sends and one payload of bytes: sections, positions, and every check.

A payload is up to three sections back to back, those of larger elements first, so that each is
aligned and can be read in place: the values (or codes), the scales, and the coded positions. Their
lengths follow from the codec, the block and `Form`; so a payload has exactly one right length.

Everything that a peer may have got wrong is found here, before a kernel runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zkv.data_messages import Form
from zkv.dtypes import Array
from zkv.errors import ProtocolError
from zkv_codecs import indices as coding
from zkv_codecs import spec
from zkv_codecs.backend import NUMPY, Backend
from zkv_codecs.chain import Chain
from zkv_codecs.feedback import Encoded
from zkv_codecs.packed import Packed, Sizes, Stage

SEED_MAX = 2**63 - 1
WARM_SIZES = (1000, 20_000)
ALIGNMENT = 8
"""Bytes: any dtype can be viewed at a multiple of them."""


def aligned(payload: Array) -> Array:
    """Return the bytes at an address that any dtype can be viewed at.

    Received frames below about 8 KiB start at any address (libzmq packs them into one buffer).
    """
    if payload.ctypes.data % ALIGNMENT == 0:
        return payload
    return np.array(payload, copy=True)


def to_payload(encoded: Encoded, backend: Backend = NUMPY) -> tuple[Form, Array]:
    """Return the form and the payload: a flat uint8 array (a view if there is one section).

    It lies where the arrays do: on a device for CUDA's kernels.
    """
    packed = encoded.packed
    sections = [packed.values]
    if packed.scales is not None:
        sections.append(packed.scales)
    name, coded = "", 0
    if packed.indices is not None:
        name, positions = coding.encode_best(packed.indices, packed.size, backend)
        sections.append(positions)
        coded = positions.size
    count = packed.count if encoded.chain.sparse else packed.size
    form = Form(count, name, coded, packed.seed)
    if len(sections) == 1:
        return form, packed.values.view(np.uint8)
    sections.sort(key=lambda one: -one.itemsize)
    payload: Array = backend.xp.concatenate([one.view(np.uint8) for one in sections])
    return form, payload


def from_payload(
    codec: str,
    form: Form,
    payload: Array,
    shape: tuple[int, ...],
    backend: Backend = NUMPY,
) -> Encoded:
    """Return what was sent, as views into the payload (flat uint8, at an address of 8 bytes).

    `shape` is the dense array's, as the receiver knows it. A lossless stage is undone here, so that
    decoding the rest cannot fail.

    Raises:
        ProtocolError: no such codec, or a count, length, position or scale that cannot be; expected
            and given are named.
    """
    try:
        chain = spec.chain(codec)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    packed = Packed(payload, shape, seed=form.seed)
    _check_count(chain, form, packed.size)
    first = chain.stages[0] if chain.sparse else None
    told = first is not None and first.positions_travel
    if form.coded > payload.size or (not told and (form.coded or form.coding)):
        raise ProtocolError(
            f"codec {codec}: {form.coded} bytes of positions in {form.coding!r}, in a payload of "
            f"{payload.size}; it {'has to send them' if told else 'sends none'}"
        )
    cut = payload.size - form.coded
    stages = chain.stages[1:] if first is not None else chain.stages
    before, sizes = _expected(stages, form.count, shape)
    values, scales = _sections(codec, sizes, payload[:cut])
    if not np.isfinite(scales).all():
        raise ProtocolError(f"codec {codec}: a scale is NaN or infinite")
    packed = replace(packed, values=values, scales=scales, before=before)
    if first is not None:
        packed = replace(packed, kept=form.count)
    elif stages and stages[0].kind == "lowrank":
        packed = replace(packed, kept=stages[0].sizes_after(_dense(form.count), shape).values)
    coders = [stage for stage in chain.stages if stage.kind != "lossless"]
    if before is None and coders and not coders[-1].finite(values):
        raise ProtocolError(f"codec {codec}: a value is NaN or infinite")
    if told:
        indices = coding.decode(form.coding, payload[cut:], form.count, packed.size, backend)
        packed = replace(packed, indices=indices)
    if before is not None:
        packed = chain.stages[-1].decode(packed, backend)
        chain = Chain(chain.stages[:-1])
        if chain.stages and not chain.stages[-1].finite(packed.values):
            raise ProtocolError(f"codec {codec}: a value is NaN or infinite")
    return Encoded(chain, packed)


def warm(chain: Chain, backend: Backend) -> None:
    """Do once all that a chain will do, so that no kernel is compiled during a push.

    On read-only arrays and others, and on a short one and a long one, as kernels differ there.
    """
    if backend.name != "numba":
        return
    for size in WARM_SIZES:
        values: Array = np.sin(np.arange(size, dtype=np.float32))
        frozen = values.copy()
        frozen.flags.writeable = False
        for one in (values, frozen):
            given, state = Packed(one, (size,)), chain.start((size,))
            sent, _, _ = chain.encode_residual(given, one, state, 1, backend)
            sent, _ = chain.encode(given, state, 1, backend)
            form, payload = to_payload(Encoded(chain, sent), backend)
            received = payload.copy()
            received.flags.writeable = one.flags.writeable
            arrived = from_payload(chain.text, form, received, (size,), backend)
            for weight in (1.0, 3.0):
                arrived.chain.add(arrived.packed, weight, np.zeros(size, np.float32), backend)
            arrived.chain.decode(arrived.packed, backend)
            if sent.indices is not None:
                for name in coding.CODINGS:
                    data = coding.encode(name, sent.indices, size, backend)
                    coding.decode(name, data, sent.count, size, backend)


def _check_count(chain: Chain, form: Form, size: int) -> None:
    """Check how many values the first stage is said to have left."""
    if chain.sparse:
        sizes = chain.stages[0].sizes(size)
        if form.count > sizes.values or (form.count < sizes.values and not sizes.at_most):
            raise ProtocolError(
                f"codec {chain.text}: {form.count} values of {size}, {sizes.values} "
                f"{'at most ' if sizes.at_most else ''}expected"
            )
    elif form.count != size:
        raise ProtocolError(f"codec {chain.text}: {form.count} values, {size} expected")
    if form.seed > SEED_MAX:
        raise ProtocolError(f"codec {chain.text}: seed {form.seed} is above 2**63 - 1")


def _dense(count: int) -> Sizes:
    return Sizes(np.dtype(np.float32), count)


def _expected(
    stages: tuple[Stage, ...], count: int, shape: tuple[int, ...]
) -> tuple[Sizes | None, Sizes]:
    """Return what goes into the lossless stage, if there is one, and what comes out at the end."""
    given = _dense(count)
    if stages and stages[-1].kind == "lossless":
        before = Chain(stages[:-1]).sizes_after(given, shape)
        return before, replace(stages[-1].sizes_after(before, shape), scales=before.scales)
    return None, Chain(stages).sizes_after(given, shape)


def _sections(codec: str, sizes: Sizes, payload: Array) -> tuple[Array, Array]:
    """Cut a payload into values and scales."""
    scale_bytes = 4 * sizes.scales
    value_bytes = sizes.values * sizes.dtype.itemsize
    if sizes.at_most:
        value_bytes = min(value_bytes, max(0, payload.size - scale_bytes))
    if payload.size != value_bytes + scale_bytes:
        raise ProtocolError(
            f"codec {codec}: {payload.size} bytes, {value_bytes + scale_bytes} expected"
        )
    # The larger elements stand first; of equal ones, the values.
    cut = value_bytes if sizes.dtype.itemsize >= 4 else scale_bytes
    one, two = payload[:cut], payload[cut:]
    values, scales = (one, two) if sizes.dtype.itemsize >= 4 else (two, one)
    return values.view(sizes.dtype), scales.view(np.float32)
