"""Separate ranks for DeepSpeed. Importing DeepSpeed changes torch, and other tests must not see these changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from tests.distributed import Pool, Ranks


@pytest.fixture(scope="session")
def engines() -> Iterator[Callable[[int], Ranks]]:
    """Yield engines(n): n running ranks to build DeepSpeed engines on. They live as long as no case kills them."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    pool = Pool()
    yield pool
    pool.close()
