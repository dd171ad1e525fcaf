"""The fallback: the package without its compiled library, or with the fallback chosen by a variable."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops, reference, rows
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import DTYPES, gaussian, same_bits
from tests.distributed import run_ranks
from tests.gpu.cases import NAMES, OPTIONS
from tests.simulation import Call, result_of

PACKAGE = Path(fap.__file__).parent


class _NoInexactReciprocals(TorchFunctionMode):
    """Refuse divisions by numbers with an inexact reciprocal: on CUDA torch multiplies by the reciprocal."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = getattr(function, "__name__", "") in ("__truediv__", "__itruediv__", "div", "div_", "true_divide")
        if divides and isinstance(args[1], float | int):
            assert math.frexp(args[1])[0] == 0.5, f"a division by {args[1]}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_it_divides_as_on_a_gpu(options: dict[str, bool]) -> None:
    x = gaussian(2, 1100)
    for bits in (6, 3):
        c = Format(bits, 128, **options)
        payload = torch.empty(2, c.payload_bytes(1100), dtype=torch.uint8)
        with _NoInexactReciprocals():
            reference.encode(x, payload, c)
            reference.decode_sum(payload, torch.empty(1100), c, 1 / 3)


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Repeat the choice between the codecs, made once a process, in this test and after it."""
    monkeypatch.delenv("FLASH_ALLREDUCE_REFERENCE", raising=False)
    rows.use_reference.cache_clear()
    yield
    rows.use_reference.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
def test_asked_for_it_serves_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows.use_reference()


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("value", ["", "0"])
def test_0_and_empty_do_not_ask_for_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", value)
    monkeypatch.setattr(ops, "unavailable", None)
    assert not rows.use_reference()


@pytest.mark.usefixtures("fresh_choice")
def test_without_a_library_it_serves_and_says_why_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "unavailable", "no compiled library is installed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fap.encode(torch.ones(5), fap.FlashConfig())
    assert len(caught) == 1 and caught[0].category is RuntimeWarning
    assert "plain PyTorch codec, which is slower: no compiled library is installed" in str(caught[0].message)


@pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))
@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("bits", range(2, 9))
def test_guarantee_4_the_public_functions_give_the_same_bits_either_way(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    config = fap.FlashConfig(bits=bits)
    inputs = [gaussian(7, 43).t().to(dtype) for dtype in DTYPES]
    compiled = [fap.encode(x, config) for x in inputs]
    decoded = [fap.decode(p, (43, 7), x.dtype, config) for p, x in zip(compiled, inputs, strict=True)]
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", "1")
    rows.use_reference.cache_clear()
    for x, payload, y in zip(inputs, compiled, decoded, strict=True):
        assert torch.equal(fap.encode(x, config), payload)
        assert same_bits(fap.decode(payload, (43, 7), x.dtype, config), y)


def copy_without_library(folder: Path) -> None:
    shutil.copytree(
        PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("_C*", "__pycache__", "cli", "megatron")
    )


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_package_without_its_library_works_and_warns_once(tmp_path: Path) -> None:
    copy_without_library(tmp_path)
    script = (
        "import torch, flash_allreduce_plugin as fap; config = fap.FlashConfig(bits=4)\n"
        "x = torch.arange(300.0)\n"
        "for _ in range(3): payload = fap.encode(x, config)\n"
        "print(fap.__file__); print(bytes(payload.tolist()).hex())"
    )
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    where, payload = done.stdout.split()
    assert str(tmp_path) in where
    assert bytes(fap.encode(torch.arange(300.0), fap.FlashConfig(bits=4)).tolist()).hex() == payload
    assert done.stderr.count("no compiled library is installed") == 1


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    copy_without_library(tmp_path)
    (tmp_path / PACKAGE.name / "_C.abi3.so").write_bytes(b"not a library")
    done = run(tmp_path, "from flash_allreduce_plugin.codec import ops; print(ops.unavailable)")
    assert done.returncode == 0, done.stderr
    assert "_C.abi3.so could not be loaded" in done.stdout


def reduce_on_the_reference(calls: list[Call]) -> list[str]:
    os.environ["FLASH_ALLREDUCE_REFERENCE"] = "1"
    rows.use_reference.cache_clear()
    assert rows.use_reference()
    return [result_of(call) for call in calls]


def reduce_on_the_library(calls: list[Call]) -> list[str]:
    os.environ.pop("FLASH_ALLREDUCE_REFERENCE", None)
    rows.use_reference.cache_clear()
    assert not rows.use_reference()
    return [result_of(call) for call in calls]


def reduce_on_either(calls: list[Call]) -> list[str]:
    """Use the compiled library on even ranks alone: a group may be mixed."""
    import torch.distributed as dist

    return reduce_on_the_reference(calls) if dist.get_rank() % 2 else reduce_on_the_library(calls)


@pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))
def test_guarantee_4_collectives_give_the_same_bits_on_either_codec() -> None:
    calls = [
        Call(collective, numel, dtype, {"bits": bits})
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for dtype in ("float32", "bfloat16")
        for numel, bits in ((1, 8), (129, 4), (20_011, 5))
    ]
    results = run_ranks(3, every_way, calls)
    for rank in results:
        assert rank[0] == rank[1] == rank[2]


def every_way(calls: list[Call]) -> list[list[str]]:
    return [way(calls) for way in (reduce_on_the_library, reduce_on_the_reference, reduce_on_either)]
