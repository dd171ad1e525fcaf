"""JSON as people write it: a byte order mark is accepted, a repeated key is an error."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A repeated key in one object. The message names it."""


def loads(text: str | bytes) -> Any:
    """Return json.loads of text that may begin with a byte order mark.

    Raises DuplicateKeyError, and as json.loads ValueError, and RecursionError for deep nesting.
    """
    if isinstance(text, str):  # json.loads removes the mark of bytes
        text = text.removeprefix("\ufeff")
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKeyError(f"the key {json.dumps(key)} stands twice; expected each key once")
        found[key] = value
    return found
