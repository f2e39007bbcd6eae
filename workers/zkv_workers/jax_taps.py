"""Taps: identities on parameters whose backward pass hands the gradient to the host on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from zkv.dtypes import Array


def tap(told: Callable[[Array], None]) -> Callable[[Any], Any]:
    """Return an identity that calls `told` with its gradient, as a view, when that is computed.

    The gradient that goes on is the same bits, but waits for the call: who has it knows that the
    call was made. The call is not ordered among others, so it can be made as soon as its own
    gradient is there. `told` must not raise, keep the view, or use JAX, which would wait for itself
    (jax-ml/jax#24255).
    """

    def host(gradient: Any) -> Any:
        told(np.asarray(gradient))
        return np.True_

    def forward(leaf: Any) -> tuple[Any, None]:
        return leaf, None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        done = io_callback(host, jax.ShapeDtypeStruct((), np.bool_), gradient)
        # An optimization barrier would say the same, but XLA drops it before it schedules on a CPU.
        return (jnp.where(done, gradient, jnp.full_like(gradient, jnp.nan)),)

    made = jax.custom_vjp(lambda leaf: leaf)
    made.defvjp(forward, backward)
    identity: Callable[[Any], Any] = made
    return identity
