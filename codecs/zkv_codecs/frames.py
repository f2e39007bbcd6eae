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
from zkv_codecs.chain import Chain
from zkv_codecs.feedback import Encoded
from zkv_codecs.packed import Packed

SEED_MAX = 2**63 - 1
NO_SCALES: Array = np.empty(0, np.float32)


def to_payload(encoded: Encoded) -> tuple[Form, Array]:
    """Return the form and the payload: a flat uint8 array (a view if there is one section)."""
    packed = encoded.packed
    sections = [packed.values]
    if packed.scales is not None:
        sections.append(packed.scales)
    name = ""
    if packed.indices is not None:
        name = coding.best(packed.indices, packed.size)
        sections.append(coding.encode(name, packed.indices, packed.size))
    form = Form(packed.count, name, packed.seed)
    if len(sections) == 1:
        return form, packed.values.view(np.uint8)
    sections.sort(key=lambda one: -one.itemsize)
    return form, np.concatenate([one.view(np.uint8) for one in sections])


def from_payload(codec: str, form: Form, payload: Array, shape: tuple[int, ...]) -> Encoded:
    """Return what was sent, as views into the payload (flat uint8, at an address of 8 bytes).

    `shape` is the dense array's, as the receiver knows it.

    Raises:
        ProtocolError: no such codec, or a count, length, position or scale that cannot be; expected
            and given are named.
    """
    try:
        chain = spec.chain(codec)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    packed = Packed(payload, shape, seed=form.seed)
    size = packed.size
    _check_count(chain, form, size)
    values, scales, rest = _sections(chain, form, payload)
    if not np.isfinite(scales).all():
        raise ProtocolError(f"codec {codec}: a scale is NaN or infinite")
    indices = None
    if chain.sparse and chain.stages[0].positions_travel:
        indices = coding.decode(form.coding, rest, form.count, size)
    elif form.coding or rest.size:
        raise ProtocolError(f"codec {codec}: {rest.size} bytes of positions where it sends none")
    kept = form.count if chain.sparse else None
    packed = replace(packed, values=values, scales=scales, indices=indices, kept=kept)
    return Encoded(chain, packed)


def _check_count(chain: Chain, form: Form, size: int) -> None:
    """Check how many values the first stage is said to have left."""
    most = size
    if chain.sparse:
        most = chain.stages[0].sizes(size).values
        if form.count > most:
            raise ProtocolError(
                f"codec {chain.text}: {form.count} values of {size}, {most} at most expected"
            )
    elif form.count != size:
        raise ProtocolError(f"codec {chain.text}: {form.count} values, {size} expected")
    if form.seed > SEED_MAX:
        raise ProtocolError(f"codec {chain.text}: seed {form.seed} is above 2**63 - 1")


def _sections(chain: Chain, form: Form, payload: Array) -> tuple[Array, Array, Array]:
    """Cut a payload into values, scales and coded positions."""
    own = Chain(chain.stages[1:]) if chain.sparse else chain
    sizes = own.sizes(form.count)
    parts = [(sizes.dtype, sizes.values)]
    if sizes.scales:
        parts.append((np.dtype(np.float32), sizes.scales))
    found: dict[int, Array] = {}
    at = 0
    for number, (dtype, count) in sorted(enumerate(parts), key=lambda one: -one[1][0].itemsize):
        stop = at + count * dtype.itemsize
        if stop > payload.size:
            raise ProtocolError(
                f"codec {chain.text}: {payload.size} bytes, {stop} at least expected"
            )
        found[number] = payload[at:stop].view(dtype)
        at = stop
    return found[0], found.get(1, NO_SCALES), payload[at:]
