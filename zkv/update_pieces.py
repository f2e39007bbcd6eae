"""The arithmetic of the update rules, for one piece of the flat arrays.

Each function here takes a rule's settings, the rate, the count of updates and the arrays' scalar
type, and gives the function that updates one piece. That function reads an element of an input
before it writes that element of an output, which is what allows work in place. This module must not
know how arrays are cut, checked or allocated, nor how rules are written as text: `zkv.optim` does
that.

The formulas and the order of operations are those that PyTorch documents for `torch.optim`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PIECES", "Array", "Piece", "Scalar", "Slots"]

Array = NDArray[Any]
Slots = tuple[Array, ...]
Scalar = Callable[[float], Any]
"""The scalar type of the arrays: constants are Python floats, rounded once by it."""
Piece = Callable[[Array, Slots, Array, Array, Slots, Array, Array], None]
"""(value, slots, gradient, value out, slots out, scratch, scratch): writes one piece."""


def _assign(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """The value becomes the aggregate; the rate plays no part."""

    def piece(x: Array, _: Slots, g: Array, x_out: Array, _out: Slots, a: Array, b: Array) -> None:
        np.copyto(x_out, g)

    return piece


def _sgd(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """x <- x - lr * (g + weight_decay * x)."""
    decay, rate = scalar(hyper["weight_decay"]), scalar(-lr)

    def piece(x: Array, _: Slots, g: Array, x_out: Array, _out: Slots, a: Array, b: Array) -> None:
        g = _decayed(g, x, decay, a)
        np.multiply(g, rate, out=b)
        np.add(x, b, out=x_out)

    return piece


def _momentum(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """m <- momentum * m + g; x <- x - lr * m (Polyak's heavy ball, the rate kept out of m)."""
    decay, keep, rate = scalar(hyper["weight_decay"]), scalar(hyper["momentum"]), scalar(-lr)

    def piece(x: Array, m: Slots, g: Array, x_out: Array, m_out: Slots, a: Array, b: Array) -> None:
        g = _decayed(g, x, decay, a)
        np.multiply(m[0], keep, out=b)
        np.add(b, g, out=m_out[0])
        np.multiply(m_out[0], rate, out=b)
        np.add(x, b, out=x_out)

    return piece


def _nesterov(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """m <- momentum * m + g; x <- x - lr * (g + momentum * m) (Sutskever et al., ICML 2013)."""
    decay, keep, rate = scalar(hyper["weight_decay"]), scalar(hyper["momentum"]), scalar(-lr)

    def piece(x: Array, m: Slots, g: Array, x_out: Array, m_out: Slots, a: Array, b: Array) -> None:
        g = _decayed(g, x, decay, a)
        np.multiply(m[0], keep, out=b)
        np.add(b, g, out=m_out[0])
        np.multiply(m_out[0], keep, out=b)
        np.add(g, b, out=b)
        np.multiply(b, rate, out=b)
        np.add(x, b, out=x_out)

    return piece


def _adam(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """Adam (Kingma and Ba, 2015, algorithm 1); weight decay is added to the gradient."""
    return _adam_piece(hyper, lr, count, scalar, hyper["weight_decay"], 1.0)


def _adamw(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2): x shrinks by 1 - lr * weight_decay."""
    return _adam_piece(hyper, lr, count, scalar, 0.0, 1.0 - lr * hyper["weight_decay"])


def _adam_piece(
    hyper: Mapping[str, float],
    lr: float,
    count: int,
    scalar: Scalar,
    coupled_decay: float,
    shrink_by: float,
) -> Piece:
    """The piece that adam and adamw share: they differ in where weight decay enters."""
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    decay, shrink, eps = scalar(coupled_decay), scalar(shrink_by), scalar(hyper["eps"])
    shrinks = shrink_by != 1.0
    keep2, take2 = scalar(beta2), scalar(1.0 - beta2)
    rate = scalar(-lr / (1.0 - beta1**count))
    square_bias = scalar(math.sqrt(1.0 - beta2**count))
    # The mean moves from its nearer end, so that beta1 = 0 gives the gradient itself and not a
    # rounded sum.
    near_mean = beta1 > 0.5
    part = scalar(1.0 - beta1 if near_mean else beta1)

    def piece(x: Array, s: Slots, g: Array, x_out: Array, s_out: Slots, a: Array, b: Array) -> None:
        (mean, square), (mean_out, square_out) = s, s_out
        g = _decayed(g, x, decay, a)
        np.subtract(g, mean, out=b)
        np.multiply(b, part, out=b)
        if near_mean:
            np.add(mean, b, out=mean_out)
        else:
            np.subtract(g, b, out=mean_out)
        np.multiply(g, take2, out=b)
        np.multiply(b, g, out=b)
        np.multiply(square, keep2, out=a)
        np.add(a, b, out=square_out)
        np.sqrt(square_out, out=b)
        np.divide(b, square_bias, out=b)
        np.add(b, eps, out=b)
        np.multiply(mean_out, rate, out=a)
        np.divide(a, b, out=a)
        if shrinks:
            x = np.multiply(x, shrink, out=b)
        np.add(x, a, out=x_out)

    return piece


def _adagrad(hyper: Mapping[str, float], lr: float, count: int, scalar: Scalar) -> Piece:
    """s <- s + g * g; x <- x - lr' * g / (sqrt(s) + eps) (Duchi et al., 2011, diagonal form).

    lr' = lr / (1 + (count - 1) * lr_decay).
    """
    decay, eps = scalar(hyper["weight_decay"]), scalar(hyper["eps"])
    rate = scalar(-lr / (1.0 + (count - 1) * hyper["lr_decay"]))

    def piece(x: Array, s: Slots, g: Array, x_out: Array, s_out: Slots, a: Array, b: Array) -> None:
        g = _decayed(g, x, decay, a)
        np.multiply(g, g, out=b)
        np.add(s[0], b, out=s_out[0])
        np.sqrt(s_out[0], out=b)
        np.add(b, eps, out=b)
        np.multiply(g, rate, out=a)
        np.divide(a, b, out=a)
        np.add(x, a, out=x_out)

    return piece


def _decayed(g: Array, x: Array, decay: Any, scratch: Array) -> Array:
    """The gradient with coupled weight decay, in `scratch`; itself where there is none."""
    if not decay:
        return g
    np.multiply(x, decay, out=scratch)
    return np.add(g, scratch, out=scratch)


PIECES: Mapping[str, Callable[[Mapping[str, float], float, int, Scalar], Piece]] = {
    "assign": _assign,
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
}
"""For each rule: (settings, rate, count, scalar type) to the function for one piece."""
