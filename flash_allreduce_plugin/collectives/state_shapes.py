"""The shape that a loaded state must have, checked before anything goes on from it.

A shape is a type; a text, which is that text; the range of a number; a function that says whether a value will do;
(one, or another); [all alike]; [each of a row]; {each by its key}; {...: all alike, but for those that are named}. int
stands for a whole number that is not negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any


def misshapen(value: Any, shape: Any) -> str | None:
    """Where a state does not have its shape ("['groups']", "" at its root); None: it has it everywhere."""
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
