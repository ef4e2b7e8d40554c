"""torch.compiler's decorators without torch._dynamo, which they import and which takes seconds to load.

Nothing is compiled before torch._dynamo is there: until then a decorated function runs as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """As torch.compiler.disable: compiled code calls the function as it is, with a graph break."""
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run


def constant_result(function: Any) -> Any:
    """As torch.compiler.assume_constant_result: compiled code takes the result at tracing for a constant."""
    function._dynamo_marked_constant = True
    return function
