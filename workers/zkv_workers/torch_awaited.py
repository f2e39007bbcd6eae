"""A parameter whose values are still on their way: whoever uses it first waits for them.

PyTorch's own lazy parameters are made this way (torch.nn.parameter.UninitializedParameter): while
its values are missing, a parameter is of a class with a `__torch_function__`, through which every
function of PyTorch passes that is given it, `F.linear(x, model.head.weight)` too. So no forward
pass in Python can compute on old values, whatever its modules do. What runs outside of Python
(TorchScript, compiled graphs) does not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_WAIT = "_zkv_wait"


class AwaitedParameter(nn.Parameter):  # type: ignore[misc]
    """A parameter between the begin of a batch and its first use in it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the values of all such parameters among the arguments, then do it."""
        kwargs = kwargs or {}
        for one in _found((args, kwargs.values())):
            _arrive(one)
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the values that it is about to have."""
        _arrive(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the values that it is about to have."""
        _arrive(self)
        return self.__reduce_ex__(protocol)


def guardable(parameter: Any) -> bool:
    """Whether `guard` may be used: it is an ordinary parameter, with no class of its own."""
    return type(parameter) is nn.Parameter


def guard(
    parameter: Any, wait: Callable[[], None], kind: type[AwaitedParameter] = AwaitedParameter
) -> None:
    """Let the first use of a parameter call `wait`, which has to call `release`."""
    parameter.__dict__[_WAIT] = wait
    parameter.__class__ = kind


def release(parameter: Any) -> None:
    """Make it an ordinary parameter again; it may be one already."""
    if isinstance(parameter, AwaitedParameter):
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop(_WAIT, None)


def _arrive(parameter: Any) -> None:
    wait = parameter.__dict__.get(_WAIT)
    if wait is not None:
        wait()
    release(parameter)


def _found(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, AwaitedParameter):
            yield value
        elif isinstance(value, dict):
            yield from _found(value.values())
        elif isinstance(value, list | tuple) or type(value) is type({}.values()):
            yield from _found(value)
