"""`zkv.torch`: a PyTorch model that is trained by a cluster, in the loop that it has.

Nothing of the loop changes but the optimizer: `attach` returns one whose rule and state are on the
servers. Gradients leave from inside the backward pass, last layer first, and the next forward pass
begins as soon as its first layer's values are here.

Before each module's forward its own parameters are waited for, and a parameter that is used in any
other way waits for itself. Modules whose forward was not called in the first batch have theirs
waited for when a batch begins. So no gradient of values of an earlier batch is sent: code that
PyTorch does not see (outside of Python, and handed a parameter) ends in `StaleValues`, or in
autograd's own error about a change in place. This holds for what is computed between the begin and
the end of a batch; keep no graph of an earlier one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from zkv_workers import torch_tensors as tensors
from zkv_workers.blocking import Worker
from zkv_workers.faces import check_trained
from zkv_workers.model import check_weight
from zkv_workers.torch_block import Block as Block
from zkv_workers.torch_buffers import Buffers
from zkv_workers.torch_deferred import Deferred
from zkv_workers.torch_on_demand import JustInTime as JustInTime
from zkv_workers.torch_optimizer import Optimizer as Optimizer
from zkv_workers.torch_survey import Survey, check_module, survey

_attached: weakref.WeakKeyDictionary[Any, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""Modules and workers, with the optimizer that they were attached by."""


class AttachOptions(TypedDict, total=False):
    """What `attach` takes beside a model and a worker."""

    buffers: str
    """How the buffers of the state_dict are kept alike, after all have taken the first worker's.

    "mean" (the default) averages those of floating point over the workers, and takes integers from
    rank 0: each worker sees other data, and BatchNorm's statistics are estimates of one quantity
    from all of it. "rank0" takes all from rank 0, as DistributedDataParallel does. "local" leaves
    them alone.
    """
    buffers_every: int
    """After how many of its batches a worker sends its buffers; default 100.

    What comes of it is taken after the first batch by whose end it is here, so nobody waits;
    `Optimizer.sync_buffers` does.
    """
    frozen: str
    """Parameters that require no gradient take the first worker's values too ("first"), or stay as
    they are ("local": for large models that every worker has loaded)."""
    weight: float
    """Of how many samples a batch is, where neither `step` nor `batch` says; default 1."""
    overlap: bool
    """Send gradients in the backward pass (the default); else in `step`, after what a loop does
    with them there, such as clipping."""
    early: bool
    """Begin forward passes before all values are here (the default). Say False for `torch.compile`
    and TorchScript, which hide what uses a parameter."""
    scaler: Any
    """A `torch.amp.GradScaler`: gradients are unscaled before they are sent, and a batch in which
    one is not finite is withdrawn. Call `scaler.step(optimizer)` and `scaler.update()` as ever, or
    `optimizer.step()`, which does both."""
    just_in_time: bool
    """Hold no more of the model than is in use: each layer's values come before its forward and
    again before its backward pass, and their memory is given back after each. The model may be on
    the meta device."""
    ahead: int
    """With `just_in_time`: how many layers are fetched ahead of the one in use; default 1."""
    init: Callable[[Any], None] | None
    """With `just_in_time`: ``init(module)`` makes the first values of the parameters and buffers
    that a module on the meta device has itself; default: ``module.reset_parameters()``."""


DEFAULTS: AttachOptions = {
    "buffers": "mean",
    "buffers_every": 100,
    "frozen": "first",
    "weight": 1.0,
    "overlap": True,
    "early": True,
    "scaler": None,
    "just_in_time": False,
    "ahead": 1,
    "init": None,
}


def attach(model: Any, worker: Worker, **options: Unpack[AttachOptions]) -> Optimizer:
    """Let a cluster train a model; return the optimizer for its loop.

    Each parameter that requires a gradient is a key of the model, by its first name in
    `named_parameters()` (a tied one is one key); the first worker's values count. When this
    returns, the model has the values of the newest version (just in time: none). The servers'
    optimizer is theirs to configure (`zkv up --optimizer "adam:lr=0.001"`).

    Args:
        model: an `nn.Module`. Parameters that are contiguous and on the CPU are written in place,
            without a second copy.
        worker: from `zkv.connect`; it trains this one model.
        options: see `AttachOptions`.

    Raises:
        TypeError: no nn.Module, no blocking worker, no such option, or a dtype that does not
            travel.
        ValueError: the model or the worker is attached already; nothing is trained; two parameters
            share memory; an option is wrong.
        KeyMismatch: other workers have another model; the key and both specs are named.
        RuntimeError: just in time: PyTorch is older than 2.8.
    """
    given = _checked(options)
    check_module(model)
    if not isinstance(worker, Worker):
        raise TypeError(f"attach takes a worker of zkv.connect, not {type(worker).__name__}")
    parts = _parts(model, worker)
    # It changes the model, which therefore must not be attached.
    deferred = Deferred(model, given["init"]) if given["just_in_time"] else None
    try:
        made = _optimizer(model, worker, given, deferred)
    except BaseException:
        if deferred is not None:
            deferred.give_up(model)
        raise
    for one in parts:
        _attached[one] = weakref.ref(made)
    return made


def _optimizer(
    model: Any, worker: Worker, given: AttachOptions, deferred: Deferred | None
) -> Optimizer:
    """Initialise what travels, and return the optimizer."""
    found = survey(model)
    kept = Buffers(worker, found.buffers, given["buffers"], given["buffers_every"])
    if deferred is None:
        worker.init({key: one.detach() for key, one in found.trained.items()})
    else:
        deferred.give(found, worker)
    check_trained(worker._driver, found.trained)
    if given["frozen"] == "first":
        _init_frozen(found, worker)
    kept.init()
    if deferred is not None:
        return JustInTime(found, worker, kept, weight=given["weight"], ahead=given["ahead"])
    made = Optimizer(
        found,
        worker,
        kept,
        weight=given["weight"],
        overlap=given["overlap"],
        early=given["early"],
        scaler=given["scaler"],
    )
    made.pull()
    return made


def _checked(options: AttachOptions) -> AttachOptions:
    unknown = sorted(options.keys() - DEFAULTS.keys())
    if unknown:
        raise TypeError(f"attach has no option {', '.join(unknown)}; it has {', '.join(DEFAULTS)}")
    given: AttachOptions = {**DEFAULTS, **options}
    check_weight(given["weight"])
    for option in ("buffers_every", "ahead"):
        if type(given[option]) is not int:
            raise TypeError(f"{option}={given[option]!r} is no int")
    if given["init"] is not None and not callable(given["init"]):
        raise TypeError(f"init={given['init']!r} is no function of a module")
    if given["frozen"] not in ("first", "local"):
        raise ValueError(f"frozen={given['frozen']!r} is neither 'first' nor 'local'")
    if given["just_in_time"]:
        _check_just_in_time(given)
    elif alone := sorted({"ahead", "init"} & options.keys()):
        raise ValueError(f"attach({alone[0]}=...) says something only with just_in_time=True")
    return given


def _check_just_in_time(given: AttachOptions) -> None:
    if given["scaler"] is not None:
        raise ValueError(
            "a scaler looks at all gradients at the end of a batch, and just_in_time keeps none: "
            "train in bfloat16, which needs no scaler, or attach without just_in_time"
        )
    for option in ("overlap", "early"):
        if not given[option]:
            raise ValueError(
                f"{option}=False keeps the whole model or all gradients here, just_in_time neither"
            )
    if given["ahead"] < 0:
        raise ValueError(f"ahead={given['ahead']!r}: it counts layers, so it is at least 0")


def _parts(model: Any, worker: Worker) -> list[Any]:
    """Return what is attached with a model.

    Raises:
        ValueError: a part is attached already.
    """
    parts: dict[Any, str] = {worker: "the worker"}
    for name, module in model.named_modules():
        parts[module] = f"module {name!r}" if name else "the model"
    for one, name in parts.items():
        held = _attached[one]() if one in _attached else None
        if held is not None and held.attached:
            raise ValueError(
                f"{name} is attached already; call optimizer.detach() first, or put several models "
                "into one nn.ModuleDict and attach that"
            )
    return list(parts)


def _init_frozen(found: Survey, worker: Worker) -> None:
    if found.frozen:
        worker.init({key: one.detach() for key, one in found.frozen.items()}, plain=True)
        for key, array in worker.pull(list(found.frozen)).items():
            tensors.write(key, array, found.frozen[key])
