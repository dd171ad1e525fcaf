"""Switches mean what they say; anything else is refused."""

from __future__ import annotations

import pytest

from flash_allreduce_plugin import switches
from flash_allreduce_plugin.errors import ConfigError


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " 1 "])
def test_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(switches.DISABLE, value)
    assert switches.is_on(switches.DISABLE)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(switches.DISABLE, value)
    assert not switches.is_on(switches.DISABLE)


def test_unset_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switches.REFERENCE, raising=False)
    assert not switches.is_on(switches.REFERENCE)


def test_anything_else_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switches.REFERENCE, "maybe")
    with pytest.raises(ConfigError, match="FLASH_ALLREDUCE_REFERENCE='maybe' is not valid; expected 1 or 0"):
        switches.is_on(switches.REFERENCE)
