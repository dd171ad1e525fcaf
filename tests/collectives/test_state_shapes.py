"""The shapes of loaded states: which fit, and the place of one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from flash_allreduce_plugin.collectives.state_shapes import misshapen


@pytest.mark.parametrize(
    ("value", "shape", "where"),
    [
        (3, int, None),
        (-1, int, ""),
        (True, int, ""),
        (2**63, int, ""),
        (3.0, int, ""),
        (7, range(2, 9), None),
        (9, range(2, 9), ""),
        ("width", "width", None),
        ("guard", "width", ""),
        (None, (None, int), None),
        ("a", (None, int), ""),
        ([1, 2], [int], None),
        ([1, "2"], [int], "[1]"),
        ([1.0, 2.0], [float, float], None),
        ([1.0], [float, float], ""),
        ({"a": 1}, {"a": int}, None),
        ({}, {"a": int}, "['a']"),
        ({"a": 1, "b": 2.0}, {"a": int, ...: float}, None),
        ({"a": 1, "b": 2}, {"a": int, ...: float}, "['b']"),
        ({1: 2}, {...: int}, "[1]"),
        ({"groups": [{"size": "2"}]}, {"groups": [{"size": int}]}, "['groups'][0]['size']"),
        (4, lambda value: value % 2 == 0, None),
        (5, lambda value: value % 2 == 0, ""),
    ],
)
def test_where_a_value_is_misshapen(value: Any, shape: Any, where: str | None) -> None:
    assert misshapen(value, shape) == where


def test_of_several_shapes_the_deepest_place_is_named() -> None:
    assert misshapen({"a": [-1]}, ({"a": [int]}, int)) == "['a'][0]"
