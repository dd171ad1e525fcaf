"""Megatron-LM's own unit tests of tensor_parallel, unedited: without the plugin, in pass-through and at 8 bits.

    MEGATRON_LM_PATH=<a Megatron-LM checkout, core_v0.16.1> nox -s test-upstream-megatron

Eight ranks on gloo and the CPU; cuda_shim.py makes "cuda" the CPU in them, upstream_ranks.py writes down how each
test ended. Megatron-LM's conftest.py is left out: it downloads data that these tests do not use, and the packages it
imports are the only ones that would be needed beyond megatron-core's own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flash_allreduce_plugin.config import FlashConfig

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
TESTS = "tests/unit_tests/tensor_parallel"
WORLD_SIZE = 8

MODES = {
    "without": None,
    "pass-through": FlashConfig(enabled=False),
    "8 bits": FlashConfig(
        bits=8, backward_bits=8, sequence_parallel_gather_bits=8, quantize_embedding=True, min_bytes=0
    ),
}

# Tests that cannot run here in any mode.
NOT_HERE = {
    "test_initialization.py::Test::test_te_col_init": "needs Transformer Engine",
    "test_initialization.py::Test::test_te_row_init": "needs Transformer Engine",
    "test_random.py::test_checkpoint_without_output": "needs Transformer Engine (0.16.1 asks its FP8 state unasked)",
    "test_random.py::test_convert_cuda_rng_state": "needs CUDA's generator and its graphs",
    "test_random.py::test_double_fork_cuda_rng_states_tracker[True]": "needs CUDA's generator and its graphs",
    "test_tensor_parallel_utils.py::test_gather_split_1d_tensor": "needs NCCL: gloo gathers equal shapes only",
}

# Further tests that fail at 8 bits, and why. There are none: these tests reduce and gather tensors that are constant
# within a quantization group, and such a group is sent exactly.
NOT_AT_8_BITS: dict[str, str] = {}

# The calls of each site in a test, on every rank; no other test reaches a site.
CALLS = {
    "test_layers.py::test_LinearWithFrozenWeight[8-True]": {"megatron.frozen_linear.dgrad": 1},
    "test_mappings.py::test_CopyToModelParallelRegion": {"megatron.f.backward": 1},
    "test_mappings.py::test_ReduceFromModelParallelRegion": {"megatron.g.forward": 1},
    "test_mappings.py::test_GatherFromSequenceParallelRegion": {
        "megatron.sequence_parallel.f.forward": 1,
        "megatron.sequence_parallel.f.backward": 1,
    },
    "test_mappings.py::test_ReduceScatterToSequenceParallelRegion": {
        "megatron.sequence_parallel.g.forward": 1,
        "megatron.sequence_parallel.g.backward": 1,
    },
}


def why_not() -> str:
    """Return why Megatron-LM's tests cannot run here, empty if they can."""
    if not CHECKOUT:
        return "MEGATRON_LM_PATH is not set: no Megatron-LM checkout (tag core_v0.16.1) to run the unit tests of"
    if not Path(CHECKOUT, TESTS).is_dir():
        return f"MEGATRON_LM_PATH={CHECKOUT} has no {TESTS}"
    return ""


pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=why_not())]


@functools.cache
def ranks(mode: str) -> list[dict[str, Any]]:
    """Return the results that each rank wrote in a mode: see upstream_ranks.py."""
    config, checkout = MODES[mode], str(Path(CHECKOUT).resolve())
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        site, folder = Path(scratch, "site"), Path(scratch, "results")
        site.mkdir()
        folder.mkdir()
        shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
        shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "upstream_ranks.py", site)
        # The package alone, not ROOT: Megatron-LM has a package `tests` of its own.
        (site / "flash_allreduce_plugin").symlink_to(ROOT / "flash_allreduce_plugin")
        own = {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ALLREDUCE_")}
        environment = {
            **own,
            "PYTHONPATH": os.pathsep.join([str(site), checkout, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASH_ALLREDUCE_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_GLOO_LAZY_INIT": "1",  # a test makes dozens of groups, and uses few
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "UPSTREAM_CONFIG": "" if config is None else json.dumps(config.to_dict()),
            "UPSTREAM_RESULTS": str(folder),
        }
        torchrun = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
        options = ("-p", "upstream_ranks", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "--tb=short")
        command = (sys.executable, "-m", *torchrun, str(WORLD_SIZE), "-m", "pytest", *options, TESTS)
        output = run(command, checkout, environment)
        files = [folder / f"rank-{rank}.json" for rank in range(WORLD_SIZE)]
        assert all(file.is_file() for file in files), output[-8000:]
        return [json.loads(file.read_text()) for file in files]


def run(command: tuple[str, ...], folder: str, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=500)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks down with it
        try:
            output = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        pytest.fail(f"Megatron-LM's tests did not end:\n{output[-8000:]}")


@functools.cache
def outcomes(mode: str) -> dict[str, str]:
    """Return by test "passed", "skipped", or why it failed on the first rank where it did; print a table."""
    ended: dict[str, str] = {}
    for rank in ranks(mode):
        for test, (outcome, reason) in rank["outcomes"].items():
            name = test.removeprefix(f"{TESTS}/")
            if ended.get(name, "passed") in ("passed", "skipped"):
                ended[name] = f"failed: {reason}" if outcome == "failed" else outcome
    passed = sum(outcome == "passed" for outcome in ended.values())
    print(f"\n{mode}: {passed} of {len(ended)} tests passed on {WORLD_SIZE} ranks")
    for name, outcome in ended.items():
        quantized = {site: counts["quantized"] for site, counts in sites(ranks(mode)[0]).get(name, {}).items()}
        print(f"  {name}: {outcome}", f"quantized: {quantized}" if quantized else "")
    return ended


def sites(rank: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the counts of a rank's sites, for each test that reached a site."""
    return {test.removeprefix(f"{TESTS}/"): counts for test, counts in rank["sites"].items() if counts}


def failures(mode: str) -> set[str]:
    return {name for name, outcome in outcomes(mode).items() if outcome != "passed"}


def test_without_the_plugin():
    assert failures("without") == set(NOT_HERE)
    for rank in ranks("without"):
        assert rank["megatron"].startswith(str(Path(CHECKOUT).resolve())), "not the installed megatron-core"
        assert not sites(rank)


def test_in_pass_through_nothing_changes():
    assert failures("pass-through") == failures("without")
    for rank in ranks("pass-through"):
        assert all(rank["in place"])
        calls = {
            test: {site: entry["full_precision"]["disabled by configuration"] for site, entry in counts.items()}
            for test, counts in sites(rank).items()
        }
        assert calls == CALLS
        assert not any(entry["quantized"] for counts in sites(rank).values() for entry in counts.values())


def test_at_8_bits():
    assert failures("8 bits") - set(NOT_HERE) == set(NOT_AT_8_BITS)
    for rank in ranks("8 bits"):
        assert all(rank["in place"])
        quantized = {test: {s: entry["quantized"] for s, entry in c.items()} for test, c in sites(rank).items()}
        assert quantized == CALLS
        assert not any(entry["full_precision"] for counts in sites(rank).values() for entry in counts.values())
