"""A parameter without memory: what may be asked of it, and what needs its values first.

PyTorch reads the memory of a tensor without looking whether there is some. So while a parameter has
none it is of a class of its own, through which all functions that it is given to pass: those that
only ask for its shape, say, are answered, and all others wait until its values are here.
"""

from __future__ import annotations

from typing import Any

import torch

from zkv_workers.torch_awaited import AwaitedParameter

_ABOUT = (
    "_version grad_fn is_leaf retains_grad grad _grad output_nr requires_grad _backward_hooks "
    "_post_accumulate_grad_hooks name shape is_cuda is_mtia is_cpu is_xla is_xpu is_ipu is_sparse "
    "is_sparse_csr is_mkldnn is_mps is_maia is_vulkan is_quantized is_meta is_nested dtype layout "
    "device ndim nbytes itemsize grad_dtype"
)
"""What can be read (and of it, set) without a look at the values."""
_CALLS = (
    "numel nelement data_ptr dim ndimension size stride storage_offset element_size is_contiguous "
    "is_floating_point is_complex get_device requires_grad_ retain_grad register_hook "
    "register_post_accumulate_grad_hook __len__"
)
_attributes = frozenset(_ABOUT.split())
_functions = frozenset(getattr(torch.Tensor, name) for name in _CALLS.split())


class ReleasedParameter(AwaitedParameter):
    """A parameter whose memory was given back."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Fetch the values of all such parameters among the arguments, if they are needed."""
        if not _is_harmless(function):
            return super().__torch_function__(function, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __repr__(self, **options: Any) -> str:
        """Say that there is nothing to show."""
        return f"Parameter without values here, of shape {tuple(self.shape)}, {self.dtype}"


def _is_harmless(function: Any) -> bool:
    if function in _functions:
        return True
    accessor = getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")
    return accessor and getattr(function.__self__, "__name__", "") in _attributes
