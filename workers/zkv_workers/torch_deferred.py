"""First values of a model that its worker does not hold: made and sent layer by layer.

A model for `attach(just_in_time=True)` may be built on the meta device. Its parameters get a place
on the CPU, without memory; the worker that the broker asks for first values lets one module after
the other make its own, sends them, and gives the memory back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from zkv.dtypes import DTYPES
from zkv.wire import KeySpec
from zkv_workers import seeding, torch_layers
from zkv_workers import torch_tensors as tensors
from zkv_workers.blocking import Worker
from zkv_workers.torch_awaited import guard, guardable, release
from zkv_workers.torch_memory import raw_view, return_memory
from zkv_workers.torch_released import ReleasedParameter
from zkv_workers.torch_survey import Survey, check_apart


class Deferred:
    """A model whose parameters may have no values yet.

    Parameters and buffers on the meta device are replaced by ones on the CPU.

    Raises:
        RuntimeError: PyTorch is too old.
        TypeError: a module that hooks do not reach into (compiled, scripted, DDP).
        ValueError: a parameter that cannot be given its memory back, or a module that cannot make
            its values; it is named.
    """

    def __init__(self, model: Any, init: Callable[[Any], None] | None) -> None:
        _check(model)
        return_memory()
        self._init = _reset if init is None else init
        self._blank: set[str] = set()
        """Keys without values: their modules make them."""
        self._new_buffers: dict[int, Any] = {}
        """Modules with buffers that had no values."""
        for name, module in model.named_modules():
            meta = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if init is None and any(_is_meta(one) for one in meta) and not hasattr(module, _RESET):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is on the meta device and has no "
                    f"{_RESET}() to make its first values: give attach an init(module) that does"
                )
        parameters = dict(model.named_parameters())
        for key, parameter in parameters.items():
            _check_parameter(key, parameter)
        check_apart({key: one for key, one in parameters.items() if not _is_meta(one)})
        for key, parameter in parameters.items():
            if parameter.requires_grad:
                self._prepare(model, key, parameter)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if _is_meta(buffer):
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
                    self._new_buffers[id(module)] = module

    def _prepare(self, model: Any, key: str, parameter: Any) -> None:
        """Give a parameter a memory of its own, which may be taken away and given back."""
        if isinstance(parameter, ReleasedParameter):  # It was attached before.
            release(parameter)
            self._blank.add(key)
            return
        if _is_meta(parameter):
            self._blank.add(key)
            made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            made.__dict__.update(parameter.__dict__)
            _replace(model, parameter, made)
            _empty(made)
            return
        storage, nbytes = parameter.untyped_storage(), parameter.numel() * parameter.element_size()
        if not storage.resizable() or storage.nbytes() != nbytes or not parameter.is_contiguous():
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)

    def give_up(self, model: Any) -> None:
        """The model is not attached after all: whoever uses a parameter without memory is told."""
        for key, parameter in model.named_parameters():
            if guardable(parameter) and parameter.numel() and not parameter.data_ptr():
                guard(parameter, partial(_no_values, key), ReleasedParameter)

    def give(self, found: Survey, worker: Worker) -> None:
        """Initialise the keys of the model; give the values, if they are asked of this worker.

        Raises:
            KeyMismatch: other workers have another model; the key and both specs are named.
            TypeError: a dtype that does not travel.
        """
        seeds = seeding.offer(worker, [_spec(key, one) for key, one in found.trained.items()])
        if seeds is None:
            for module in self._new_buffers.values():
                self._make(found, module)
                for parameter in module.parameters(recurse=False):
                    if any(parameter is found.trained[key] for key in self._blank):
                        _empty(parameter)
            return
        keys_of = {id(one.module): one.keys for one in found.owners}
        for module in found.model.modules():
            keys = keys_of.get(id(module), ())
            fresh = [key for key in keys if key not in seeds.given]
            new = id(module) in self._new_buffers
            if new or self._blank.intersection(fresh):
                self._make(found, module)
            for key in fresh:
                given = found.trained[key]
                near = given.device.type == "cpu" and given.numel()
                seeds.give(key, raw_view(given) if near else tensors.copy_of(given))
            for key in keys:
                _empty(found.trained[key])
        seeds.end()

    def _make(self, found: Survey, module: Any) -> None:
        """Let a module make its values; where its parameters have no memory, they get one."""
        trained = {id(one) for one in found.trained.values()}
        for parameter in module.parameters(recurse=False):
            storage = parameter.untyped_storage()
            if id(parameter) in trained and not storage.nbytes():
                storage.resize_(parameter.numel() * parameter.element_size())
        with torch.no_grad():
            self._init(module)


_RESET = "reset_parameters"


def _reset(module: Any) -> None:
    if not hasattr(module, _RESET):
        raise RuntimeError(
            f"{type(module).__name__} has no {_RESET}() to make its first values: give attach an "
            "init(module) that does"
        )
    getattr(module, _RESET)()


def _check(model: Any) -> None:
    if torch_layers.top_hooks is None:
        raise RuntimeError(
            f"just_in_time needs PyTorch 2.8 or later, whose hooks on saved tensors can be asked "
            f"for; this is {torch.__version__}"
        )
    for name, module in model.named_modules():
        kinds = {one.__name__ for one in type(module).__mro__}
        for kind in ("ScriptModule", "OptimizedModule", "DistributedDataParallel", "DataParallel"):
            if kind in kinds:
                raise TypeError(
                    f"{f'module {name!r}' if name else 'the model'} is a {kind}, whose parameters "
                    "are used where hooks do not reach: just_in_time takes a model without it"
                )


def _empty(parameter: Any) -> None:
    if parameter.numel():
        parameter.untyped_storage().resize_(0)


def _check_parameter(key: str, parameter: Any) -> None:
    if isinstance(parameter, ReleasedParameter):
        return
    if not parameter.requires_grad:
        if _is_meta(parameter):
            raise ValueError(
                f"key {key!r} is frozen and on the meta device: frozen parameters are held by "
                "each worker, so give it values before attach"
            )
    elif isinstance(parameter, UninitializedParameter) or not guardable(parameter):
        raise ValueError(
            f"key {key!r} is a {type(parameter).__name__}: just_in_time takes ordinary "
            "nn.Parameters, with a shape"
        )


def _no_values(key: str) -> None:
    raise RuntimeError(
        f"key {key!r} has no values: attach(just_in_time=True) has taken its memory, and then "
        "failed; attach the model again"
    )


def _is_meta(tensor: Any) -> bool:
    return bool(tensor.device.type == "meta")


def _replace(model: Any, before: Any, after: Any) -> None:
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is before:
                module._parameters[name] = after


def _spec(key: str, parameter: Any) -> KeySpec:
    name = str(parameter.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(
            f"key {key!r}: dtype {name} does not travel; use one of {', '.join(DTYPES)}"
        )
    return KeySpec(key, name, tuple(parameter.shape))
