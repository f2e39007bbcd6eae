"""`zkv.torch`: a PyTorch model that is trained by a cluster, in the loop that it has.

Nothing of the loop changes but the optimizer: `attach` returns one whose rule and state are on the
servers. Gradients leave from inside the backward pass, last layer first, and the next forward pass
begins as soon as its first layer's values are here.
"""

from __future__ import annotations

import weakref
from typing import Any

from zkv_workers import torch_tensors as tensors
from zkv_workers.blocking import Worker
from zkv_workers.model import check_weight
from zkv_workers.torch_buffers import Buffers
from zkv_workers.torch_optimizer import Block as Block
from zkv_workers.torch_optimizer import Optimizer as Optimizer
from zkv_workers.torch_survey import survey

_attached: weakref.WeakKeyDictionary[Any, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""Modules and workers, with the optimizer that they were attached by."""


def attach(
    model: Any,
    worker: Worker,
    *,
    buffers: str = "mean",
    buffers_every: int = 100,
    frozen: str = "first",
    weight: float = 1.0,
    overlap: bool = True,
    early: bool = True,
    scaler: Any = None,
) -> Optimizer:
    """Let a cluster train a model; return the optimizer for its loop.

    Each parameter that requires a gradient is a key of the model, by its first name in
    `named_parameters()` (a tied one is one key). They are initialised: the first worker's values
    count. The servers' optimizer is theirs to configure (`zkv up --optimizer "adam:lr=0.001"`).

    Values arrive while the forward pass runs: before each module's forward its own parameters are
    waited for, and a parameter that is used in any other way waits for itself. Modules whose
    forward was not called in the first batch have theirs waited for when a batch begins. So no
    gradient of values of an earlier batch is sent: what PyTorch cannot be asked about (code outside
    of Python that is handed a parameter) ends in `StaleValues`, or in autograd's own error about a
    change in place. This holds for what is computed between the begin and the end of a batch; keep
    no graph of an earlier one.

    Args:
        model: an `nn.Module`; NumPy sees its parameters if they are contiguous and on the CPU, and
            they are then written without a second copy.
        worker: from `zkv.connect`; it trains this one model.
        buffers: how the buffers of the state_dict are kept alike (all take the first worker's
            values at first): "mean" averages those of floating point over the workers, integers
            come from rank 0; "rank0" takes all from rank 0, as DistributedDataParallel does;
            "local" leaves them alone. The mean is the default, as each worker sees other data, and
            BatchNorm's statistics are estimates of one quantity from all of it.
        buffers_every: after how many of its batches a worker sends its buffers. What comes of it is
            taken after the first batch by whose end it is here, so nobody waits;
            `optimizer.sync_buffers()` does.
        frozen: parameters that require no gradient take the first worker's values too ("first"),
            or stay as they are ("local", for large models that every worker has loaded).
        weight: of how many samples a batch is, where neither `step` nor `batch` says.
        overlap: send gradients in the backward pass; else in `step`, after what a loop does with
            them there (clipping, say).
        early: begin forward passes before all values are here. Say False for `torch.compile` and
            TorchScript, which hide what uses a parameter.
        scaler: a `torch.amp.GradScaler`: gradients are unscaled before they are sent, and a batch
            in which one is not finite is withdrawn. `scaler.step(optimizer); scaler.update()` as
            ever, or `optimizer.step()`, which does both.

    Raises:
        TypeError: no nn.Module, no blocking worker, or a dtype that does not travel.
        ValueError: the model or the worker is attached already; nothing is trained; two parameters
            share memory; an option is wrong.
        KeyMismatch: other workers have another model; the key and both specs are named.
    """
    found = survey(model)
    check_weight(weight)
    if not isinstance(worker, Worker):
        raise TypeError(f"attach takes a worker of zkv.connect, not {type(worker).__name__}")
    if frozen not in ("first", "local"):
        raise ValueError(f"frozen={frozen!r} is neither 'first' nor 'local'")
    everything = {worker: "the worker"}
    for name, module in model.named_modules():
        everything[module] = f"module {name!r}" if name else "the model"
    for one, name in everything.items():
        held = _attached[one]() if one in _attached else None
        if held is not None and held.attached:
            raise ValueError(
                f"{name} is attached already; call optimizer.detach() first, or put several models "
                "into one nn.ModuleDict and attach that"
            )
    kept = Buffers(worker, found.buffers, buffers, buffers_every)
    worker.init({key: one.detach() for key, one in found.trained.items()})
    if frozen == "first" and found.frozen:
        worker.init({key: one.detach() for key, one in found.frozen.items()}, plain=True)
        for key, array in worker.pull(list(found.frozen)).items():
            tensors.write(key, array, found.frozen[key])
    kept.init()
    made = Optimizer(
        found, worker, kept, weight=weight, overlap=overlap, early=early, scaler=scaler
    )
    made.pull()
    for one in everything:
        _attached[one] = weakref.ref(made)
    return made
