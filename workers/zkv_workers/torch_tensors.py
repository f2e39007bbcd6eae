"""Between PyTorch's tensors and the arrays that travel. Knows no batches beyond their values.

Only modules whose name begins with `torch` import PyTorch.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from zkv.dtypes import DTYPES, Array, dtype_of, stored_view, user_view
from zkv.errors import KeyMismatch
from zkv_workers import lanes

EXACT = 2**53
"""Below it float64 holds every integer."""


def view_of(tensor: Any) -> Array | None:
    """Return a tensor's own memory as an array; None if NumPy cannot see it (it is on a device).

    Raises:
        TypeError: bfloat16, and ml_dtypes is not installed.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return None
    if tensor.dtype is torch.bfloat16:
        return user_view(tensor.view(torch.uint16).numpy(), DTYPES["bfloat16"])
    array: Array = tensor.numpy()
    return array


def tensor_of(array: Array) -> Any:
    """Return an array's memory as a tensor on the CPU."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    bits = stored_view(array, dtype_of(array)).reshape(array.shape)
    return torch.from_numpy(bits).view(torch.bfloat16)


def clone_of(tensor: Any) -> Array | None:
    """Return what `view_of` does of a contiguous copy, which PyTorch makes with all its threads."""
    return view_of(tensor.detach().clone(memory_format=torch.contiguous_format))


def copy_of(tensor: Any) -> Array:
    """Return a tensor's values as a contiguous array, apart from its memory."""
    view = view_of(tensor.detach().cpu())
    return np.array(view, order="C")


def gradient_of(grad: Any, factor: float | None) -> Any:
    """Return a gradient as `batch.push` takes it, times `factor`.

    A sparse one becomes dense. One on a device stays there if CuPy can read it; push it inside of
    `in_order_of`.
    """
    grad = grad.detach()
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if factor is not None:
        grad = grad * factor
    return grad if _readable(grad) else view_of(grad.cpu())


def _readable(grad: Any) -> bool:
    """Return whether CuPy can read a tensor where it is."""
    # In this order: to look for CuPy takes longer than all the rest of a small gradient's push.
    return (
        grad.device.type == "cuda"
        and grad.dtype is not torch.bfloat16
        and importlib.util.find_spec("cupy") is not None
    )


def in_order_of(grad: Any) -> AbstractContextManager[None]:
    """Make PyTorch's current stream of a gradient's device CuPy's inside, so that what is pushed is
    read in its order: no sooner than it is there, and before what comes next is written to it."""
    if not _readable(grad):
        return nullcontext()
    stream = torch.cuda.current_stream(grad.device)
    return lanes.following(grad.device.index, stream.cuda_stream)


def receive(batch: Any, key: str, parameter: Any) -> None:
    """Write a key's values into its parameter, and tell autograd that it was changed.

    They go straight into the parameter's memory if that is contiguous and on the CPU.

    Raises:
        Cancelled: the batch no longer counts.
        KeyMismatch: the parameter has another shape or dtype now.
    """
    out = view_of(parameter)
    if out is not None and out.flags.c_contiguous:
        batch.read_into(key, out)
        torch.autograd.graph.increment_version(parameter)
    else:
        write(key, batch[key], parameter)


def write(key: str, array: Array, tensor: Any) -> None:
    """Copy an array's values into a tensor (numbers for one of bool or integers are rounded).

    Raises:
        KeyMismatch: the tensor has another shape.
    """
    if tuple(array.shape) != tuple(tensor.shape):
        raise KeyMismatch(
            f"key {key!r}: shape {tuple(array.shape)} expected, given {tuple(tensor.shape)}; "
            "was the model changed after attach?"
        )
    with torch.no_grad():
        values = tensor_of(array)
        if values.is_floating_point() and not tensor.is_floating_point():
            values = values.round()
        tensor.copy_(values)


def buffer_array(key: str, buffer: Any) -> Array:
    """Return a buffer as it travels: of integers and bools as float64, in which they can be
    averaged by weight.

    Raises:
        ValueError: an integer that float64 does not hold.
        TypeError: a dtype that does not travel (complex, ...).
    """
    if buffer.is_floating_point():
        return copy_of(buffer)
    if buffer.is_complex():
        raise TypeError(
            f"buffer {key!r}: {buffer.dtype} does not travel; register it with persistent=False"
        )
    wide = buffer.detach().cpu().to(torch.int64)
    if wide.numel() and int(wide.abs().max()) > EXACT:
        raise ValueError(f"buffer {key!r} has an integer above 2**53, which float64 does not hold")
    return copy_of(wide.to(torch.float64))
