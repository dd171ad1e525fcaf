"""JSON as people write it: a byte order mark is no mistake, a key that stands twice is one."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A key that stands twice in one object; the message names it."""


def loads(text: str | bytes) -> Any:
    """json.loads, for text that may begin with a byte order mark.

    Raises DuplicateKeyError, and what json.loads raises: ValueError, and RecursionError for what is nested too deeply.
    """
    if isinstance(text, str):  # of bytes json.loads takes it off itself
        text = text.removeprefix("\ufeff")
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKeyError(f"the key {json.dumps(key)} stands twice; expected each key once")
        found[key] = value
    return found
