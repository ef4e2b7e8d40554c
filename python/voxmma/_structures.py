"""Structures of inputs and results (torch's pytree) as text, which a file may hold.

torch imports what such a text names: the factory of a defaultdict, the class of an enum among keys.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

#: Factories of a defaultdict that are plain types.
_FACTORIES = {("builtins", name) for name in ("bool", "dict", "float", "int", "list", "set", "str", "tuple")}


def check(text: str) -> None:
    """Raises ValueError where a structure is none, or names code that torch would import."""
    try:
        _, node = json.loads(text)
        _check(node)
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"no structure of inputs and results: {error!r}") from None


def _check(node: dict[str, Any]) -> None:
    context = node["context"]
    if node["type"] == "collections.defaultdict":
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in _FACTORIES:
            raise ValueError(f"a structure names a function to be imported: {'.'.join(factory)}")
    elif isinstance(context, str):
        enums: list[Any] = []
        with contextlib.suppress(json.JSONDecodeError):  # not all of them are JSON
            json.loads(context, object_hook=enums.append)
        if enums:
            raise ValueError(f"a structure names a class to be imported: {context[:80]}")
    for child in node["children_spec"]:
        _check(child)


def dumps(spec: TreeSpec) -> str:
    """A structure as text that `loads` takes.

    Raises NotImplementedError for types that torch has no word for, ValueError as `check`.
    """
    text = str(treespec_dumps(spec))
    check(text)
    return text


def loads(text: str) -> TreeSpec:
    """The structure in a text out of a file. Raises ValueError as `check`."""
    check(text)
    return treespec_loads(text)
