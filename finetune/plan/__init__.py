"""Predicts the memory and time of a run, and searches layouts. Standard library only; never imports torch.

`from finetune import plan` returns this package, whatever was imported before, so the package itself is
callable: it forwards to `finetune.api.planning.plan`."""

import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from finetune.api import planning

        return planning.plan(*args, **kwargs)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """For `help`, which shows a module's docstring: the function, with its arguments."""
        from finetune.api import planning

        return f"plan{self.__signature__}\n\n{planning.plan.__doc__}"

    @property
    def __signature__(self) -> Any:
        """For `help` and a notebook's completion."""
        import inspect

        from finetune.api import planning

        return inspect.signature(planning.plan)


sys.modules[__name__].__class__ = _Plan
