"""Switches: each documented value has its effect; any other is refused."""

from __future__ import annotations

import pytest

from flash_allreduce_plugin import autoload, environment
from flash_allreduce_plugin.errors import ConfigError


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " 1 "])
def test_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(environment.DISABLE, value)
    assert environment.is_on(environment.DISABLE)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(environment.DISABLE, value)
    assert not environment.is_on(environment.DISABLE)


def test_unset_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.REFERENCE, raising=False)
    assert not environment.is_on(environment.REFERENCE)


def test_anything_else_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.REFERENCE, "maybe")
    with pytest.raises(ConfigError, match="FLASH_ALLREDUCE_REFERENCE='maybe' is not valid; expected 1 or 0"):
        environment.is_on(environment.REFERENCE)


def test_autoload_writes_the_same_names_again() -> None:
    """Check that it imports nothing of the package: `import torch` works where half of it is missing."""
    assert (autoload.PREFIX, autoload.SWITCH) == (environment.PREFIX, environment.AUTOLOAD)
