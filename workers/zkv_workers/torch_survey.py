"""What of a PyTorch model travels, under which keys, and whether it is still the same model."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter


@dataclass(frozen=True, slots=True)
class Owner:
    """A module that owns trained parameters, and their keys."""

    module: Any
    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """A model's parameters and buffers by key: the first name that the model has for each."""

    model: Any
    trained: dict[str, Any]
    frozen: dict[str, Any]
    buffers: dict[str, Any]
    """Those that are part of the model's state_dict."""
    owners: tuple[Owner, ...]
    _shape: tuple[tuple[str, Any, tuple[Any, ...], tuple[Any, ...]], ...]

    def check(self) -> None:
        """Check that the model has the modules and parameters that it had.

        Raises:
            RuntimeError: it has not; the module or the key is named.
        """
        for name, module, parameters, children in self._shape:
            if _same(module._parameters, parameters) and _same(module._modules, children):
                continue
            where = f"module {name!r}" if name else "the model"
            gone = [key for key, one in self.trained.items() if not _has(self.model, one)]
            what = f"key {gone[0]!r} is no longer part of it" if gone else "a part of it is new"
            raise RuntimeError(
                f"{where} was changed after attach: {what}; call optimizer.detach() and attach "
                "the model again"
            )


def _same(now: dict[str, Any], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now.values(), then))


def _has(model: Any, parameter: Any) -> bool:
    return any(one is parameter for one in model.parameters())


def check_module(model: Any) -> None:
    """Check that a model is one.

    Raises:
        TypeError: it is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, not {type(model).__name__}")


def survey(model: Any) -> Survey:
    """Look at a model.

    Raises:
        TypeError: it is no nn.Module.
        ValueError: nothing in it is trained; or a parameter has no values yet, or is another one's
            memory; the keys are named.
    """
    check_module(model)
    parameters = dict(model.named_parameters())
    _check(parameters)
    trained = {key: one for key, one in parameters.items() if one.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires a gradient, so there is no training")
    kept = model.state_dict(keep_vars=True)
    key_of = {id(one): key for key, one in trained.items()}
    owners = []
    for name, module in model.named_modules():
        own = [key_of[id(one)] for one in module.parameters(recurse=False) if id(one) in key_of]
        if own:
            owners.append(Owner(module, name, tuple(own)))
    return Survey(
        model,
        trained,
        {key: one for key, one in parameters.items() if not one.requires_grad},
        {key: one for key, one in model.named_buffers() if key in kept},
        tuple(owners),
        tuple(
            (name, module, tuple(module._parameters.values()), tuple(module._modules.values()))
            for name, module in model.named_modules()
        ),
    )


def _check(parameters: dict[str, Any]) -> None:
    for key, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter) or parameter.device.type == "meta":
            raise ValueError(
                f"key {key!r} has no values yet (it is lazy, or on the meta device): run the model "
                "once, or give it values, before attach"
            )
    check_apart(parameters)


def check_apart(parameters: dict[str, Any]) -> None:
    """Check that each parameter has a memory of its own, as far as it has any.

    Raises:
        ValueError: two have the same; both keys are named.
    """
    places: dict[int, str] = {}
    for key, parameter in parameters.items():
        if parameter.data_ptr():
            other = places.setdefault(parameter.data_ptr(), key)
            if other != key:
                raise ValueError(
                    f"keys {other!r} and {key!r} are two parameters in one memory; to tie them, "
                    "assign the same nn.Parameter to both names"
                )
