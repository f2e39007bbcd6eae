"""One worker of zkv's main job: a network learns handwritten digits (`zkv run -n 3 digits.py`)."""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import zkv

try:
    import cupy as xp  # The same code on a GPU.

    xp.cuda.runtime.getDeviceCount()  # Raises where CuPy is installed but no GPU is there.
except Exception:
    xp = np


def forward(p, x):
    """Return the hidden layer, (samples, 512), and the logits, (samples, 10)."""
    hidden = xp.maximum(x @ p["w1"] + p["b1"], 0)
    return hidden, hidden @ p["w2"] + p["b2"]


def backward(p, x, y, push):
    """Push the mean gradients of the cross-entropy, last layer first; return the mean loss."""
    hidden, logits = forward(p, x)
    log_q = logits - logits.max(axis=1, keepdims=True)
    log_q -= xp.log(xp.exp(log_q).sum(axis=1, keepdims=True))
    delta = (xp.exp(log_q) - xp.eye(10, dtype="f4")[y]) / len(y)
    push("w2", hidden.T @ delta)  # On its way while the first layer is still computed.
    push("b2", delta.sum(axis=0))
    delta = (delta @ p["w2"].T) * (hidden > 0)
    push("w1", x.T @ delta)
    push("b1", delta.sum(axis=0))
    return float(-log_q[xp.arange(len(y)), y].mean())


parser = argparse.ArgumentParser(description=__doc__)
for name, default in (("--seed", 0), ("--passes", 30), ("--batch", 32)):
    parser.add_argument(name, type=int, default=default, help="default: %(default)s")
args = parser.parse_args()
x, y = load_digits(return_X_y=True)
split = train_test_split(np.float32(x / 16), y, test_size=0.2, stratify=y, random_state=args.seed)
x, x_test, y, y_test = map(xp.asarray, split)
rng = np.random.default_rng(args.seed)
params = {"w1": rng.normal(0, (2 / 64) ** 0.5, (64, 512)), "b1": np.zeros(512)}
params |= {"w2": rng.normal(0, (2 / 512) ** 0.5, (512, 10)), "b2": np.zeros(10)}
report = {"loss": [], "accuracy": None}
with zkv.connect() as worker:  # ZKV_BROKER, RANK and WORLD_SIZE come from the environment.
    worker.init({key: value.astype("f4") for key, value in params.items()})
    shard = np.arange(len(x))[worker.rank :: worker.world]
    count = -(-len(x) // (worker.world * args.batch))  # The same for every worker.
    for _ in range(args.passes):
        for some in map(xp.asarray, np.array_split(rng.permutation(shard), count)):
            with worker.batch(weight=len(some)) as batch:
                p = {key: xp.asarray(value) for key, value in batch.params.items()}
                batch.set_loss(loss := backward(p, x[some], y[some], batch.push))
                report["loss"].append((time.time(), loss))
    worker.barrier()  # Every update is committed: what rank 0 pulls is the final model.
    if worker.rank == 0:
        p = {key: xp.asarray(value) for key, value in worker.pull(list(params)).items()}
        report["accuracy"] = float((forward(p, x_test)[1].argmax(axis=1) == y_test).mean())
    report |= {"rank": worker.rank, **worker.stats()}
if "ZKV_REPORT" in os.environ:
    Path(os.environ["ZKV_REPORT"], f"worker-{report['rank']}.json").write_text(json.dumps(report))
