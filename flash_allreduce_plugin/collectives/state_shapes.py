"""The shape of a loaded state, checked before the state is used.

A shape is one of

    a type                  an instance of it; int: a whole number, not negative
    a str, a range          this text; a number in this range
    a function              a value for which it returns True
    (shape, shape)          one of them
    [shape]                 a list, each element of this shape
    [shape, shape, ...]     a list of this length, one shape an element
    {key: shape}            a dictionary with at least these keys; {...: shape}: every other key
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any


def misshapen(value: Any, shape: Any) -> str | None:
    """Return the place at which a state has another shape ("['groups']", "" at its root), or None."""
    if isinstance(shape, tuple):
        found = [misshapen(value, one) for one in shape]
        return None if None in found else max(found, key=lambda where: len(where or ""))
    if isinstance(shape, list):
        if not isinstance(value, list) or len(shape) not in (1, len(value)):
            return ""
        return _first((n, misshapen(one, shape[n % len(shape)])) for n, one in enumerate(value))
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return ""
        if ... in shape:
            inner = [(k, shape.get(k, shape[...])) for k in value]
            return _first((k, misshapen(value[k], one) if isinstance(k, str) else "") for k, one in inner)
        return _first((k, misshapen(value[k], inner) if k in value else "") for k, inner in shape.items())
    return None if _is(value, shape) else ""


def _is(value: Any, shape: Any) -> bool:
    if shape is None:
        return value is None
    if isinstance(shape, FunctionType):
        return bool(shape(value))
    if isinstance(shape, str):
        return isinstance(value, str) and value == shape
    if isinstance(shape, range):
        return type(value) is int and value in shape
    if shape is int:
        return type(value) is int and 0 <= value < 2**63
    return type(value) is shape


def _first(found: Iterable[tuple[object, str | None]]) -> str | None:
    return next((f"[{key!r}]{where}" for key, where in found if where is not None), None)
