"""JSON with a key twice, and with a byte order mark."""

from __future__ import annotations

import pytest

from flash_allreduce_plugin.config import strict_json


@pytest.mark.parametrize("text", ['{"a": 1, "b": [{"c": 2}]}', "[]", '"\\ufeff"', "7"])
def test_it_reads_json_values(text: str) -> None:
    expected = {"a": 1, "b": [{"c": 2}]} if text.startswith("{") else eval(text)
    for given in (text, "\ufeff" + text, text.encode(), text.encode("utf-8-sig")):
        assert strict_json.loads(given) == expected


@pytest.mark.parametrize("text", ['{"a\\u0062": 1, "ab": 1}', '[{"x": {"ab": 1, "c": 2, "ab": 3}}]'])
def test_a_key_that_stands_twice_is_named(text: str) -> None:
    with pytest.raises(strict_json.DuplicateKeyError, match=r'^the key "ab" stands twice; '):
        strict_json.loads(text)
