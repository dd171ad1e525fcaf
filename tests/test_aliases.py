"""Old names of modules give the modules themselves: checkpoints, forks and programs may name them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.aliases import MOVED

NAME = fap.__name__


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_itself(old: str) -> None:
    module = importlib.import_module(f"{NAME}.{old}")
    assert module is importlib.import_module(f"{NAME}.{MOVED[old]}")
    assert module.__name__ == f"{NAME}.{MOVED[old]}" and module.__spec__ is not None
    assert module.__spec__.name == module.__name__, "its spec is that of its file"


def test_modules_of_an_old_package_are_no_second_copies() -> None:
    import flash_allreduce_plugin.ddp.hook as old  # type: ignore[import-not-found]

    import flash_allreduce_plugin.integrations.ddp.hook as new

    assert old is new and fap.ddp.hook is new


def test_a_pickle_that_names_an_old_module_loads() -> None:
    assert pickle.loads(b"cflash_allreduce_plugin.collectives.differences\nHeldWeights\n.") is fap.HeldWeights


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_allreduce_plugin\.megatron\.nothing'"):
        importlib.import_module(f"{NAME}.megatron.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.nothing")


def test_the_launcher_keeps_its_name() -> None:
    done = subprocess.run([sys.executable, "-m", f"{NAME}.megatron"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "usage: torchrun ... -m flash_allreduce_plugin.megatron SCRIPT" in done.stderr
