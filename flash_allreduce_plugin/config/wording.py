"""The text of a configuration, and the sentences about mistakes in it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.config import strict_json


def sentences(
    error: ValidationError, values: Mapping[str, Any], spelled: Callable[[str], str], fields: Mapping[str, FieldInfo]
) -> list[str]:
    """Return one line for each field in `error`, in the order of the fields."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        # A union reports each of its members, and a nested model each of its keys: the first one suffices.
        key = str(problem["loc"][0])
        if key in lines:
            continue
        given = f"{spelled(key)}={shown(values[key])}"
        if problem["type"] == "combination":
            lines[key] = f"{given} {problem['msg']}."
        else:
            extra = fields[key].json_schema_extra
            assert isinstance(extra, dict)
            lines[key] = f"{given} is not valid; expected {extra['expected']}{_meant(values[key], fields[key])}."
    return list(lines.values())


def unknown_key(key: str, value: Any, spelled: Callable[[str], str], fields: Mapping[str, FieldInfo]) -> str:
    closest = nearest(key.lower().replace("-", "_"), fields)
    return f"{spelled(printable(key))}={shown(value)} is not a known key; the nearest is {closest}."


def _meant(value: Any, field: FieldInfo) -> str:
    """Return the end of a sentence with the field's value that is spelled nearly as `value`; "" if there is none."""
    return near(value, _names(field.annotation)) if isinstance(value, str) else ""


def near(given: str, names: Iterable[str]) -> str:
    """Return the end of a sentence with the name that is spelled nearly as `given`; "" if there is none."""
    found = difflib.get_close_matches(given.strip().lower(), list(names), n=1)
    return f'; the nearest is "{found[0]}"' if found else ""


def _names(annotation: Any) -> list[str]:
    """Return the strings among the values of an annotation's Literals."""
    if isinstance(annotation, str):
        return [annotation]
    return [name for part in get_args(annotation) for name in _names(part)]


def nearest(name: str, valid: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(valid), n=1, cutoff=0.0)[0]


def variable(key: str) -> str:
    return environment.PREFIX + key.upper()


def printable(text: str) -> str:
    """Return the text in one line that any terminal prints: lone surrogates and control characters as escapes."""
    return text if text.isprintable() else repr(text)[1:-1]


def shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse(text: str, default: Any) -> Any:
    """Return the value of an environment variable's text, by the type of its field's default."""
    try:
        value = strict_json.loads(text)
    except strict_json.DuplicateKeyError:
        raise
    except (ValueError, RecursionError):
        value = text
    if isinstance(default, tuple):
        names = [name.strip() for name in text.split(",") if name.strip()]
        return value if isinstance(value, list) else names
    if isinstance(default, bool) and text in ("0", "1"):
        return text == "1"
    return {"true": True, "false": False, "none": None}.get(text.lower(), value)
