"""The hooks of an attached model: when they call, and how they go away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zkv_workers.torch_survey import Survey


class OwnHook:
    """A forward hook, or one before it, of just this module: what is copied or pickled with the
    module is a hook that does nothing.

    `call` gets what PyTorch gives the hook beside the module: its arguments, and its output.
    """

    def __init__(self, module: Any, call: Callable[..., None]) -> None:
        self._module, self._call = module, call

    def __call__(self, module: Any, *given: Any) -> None:
        """Be called by PyTorch."""
        if module is self._module:
            self._call(*given)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook_maker, ()


def no_hook(*given: Any) -> None:
    """Do nothing: what a copy of an attached module has for a hook."""


def _no_hook_maker() -> Callable[..., None]:
    return no_hook


class Hooks:
    """All hooks of one model.

    `forward(module, place)` is called before the forward of the model (place -1) and of each of its
    owners (their places in the survey); `gradient(key, parameter)` when a parameter's gradient is
    complete in a backward pass, on the thread that computes it.
    """

    def __init__(
        self,
        survey: Survey,
        forward: Callable[[Any, int], None],
        gradient: Callable[[str, Any], None],
        *,
        owners: bool,
    ) -> None:
        self._handles: list[Any] = []
        places = {id(one.module): place for place, one in enumerate(survey.owners)}
        modules = {id(survey.model): survey.model}
        if owners:
            modules |= {id(one.module): one.module for one in survey.owners}
        for number, module in modules.items():
            call = partial(forward, module, places.get(number, -1))
            hook = OwnHook(module, lambda args, call=call: call())
            # Before the user's own: theirs may use the parameters.
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for key, parameter in survey.trained.items():
            # Not a function of our own: in a backward pass each of them is a miss of the caches.
            ready = partial(gradient, key)
            self._handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def remove(self) -> None:
        """Remove them all."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
