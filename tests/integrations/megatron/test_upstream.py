"""Megatron-LM's own unit tests of four folders, unedited: without the plugin, in full precision and at 8 bits.

    MEGATRON_LM_PATH=<a Megatron-LM checkout, core_v0.16.1> nox -s test-upstream-megatron

Eight ranks on gloo and the CPU; cuda_shim.py makes "cuda" the CPU in them, upstream_ranks.py writes down how each
test ended. Megatron-LM's conftest.py is left out: it downloads data that these tests do not use. A test that fails
without the plugin needs a GPU or a package; the table that is printed has its error.
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

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
TESTS = "tests/unit_tests"
FOLDERS = ("tensor_parallel", "distributed", "pipeline_parallel", "transformer/moe")
WORLD_SIZE = 8

MODES: dict[str, dict[str, Any]] = {
    "without": {},
    "full precision": {"enabled": False},
    # Plain codes: the tests' constant tensors are sent exactly then.
    "8 bits": {"preset": "int8", "codebook": False, "spike_reserving": False, "group_size": 128, "min_bytes": 0},
}

# Tests that are not run in any mode, and why: each would wait for a timeout, or compute for minutes.
TE = "needs Transformer Engine"
NAMES = "gives two groups one name: gloo, which connects immediately, never meets its peers"
SCHEDULES = "pipeline_parallel/test_schedules.py::test_forward_backward_pipelining"
NOT_RUN = {
    "distributed/test_grad_sync_with_expert_parallel.py": TE,
    "distributed/test_finalize_model_grads.py::TestAllReduceLNGrads": TE,
    f"{SCHEDULES}_without_interleaving_with_custom_pgs": NAMES,
    f"{SCHEDULES}_with_interleaving_with_custom_pgs": NAMES,
    "transformer/moe/test_moe_layer_discrepancy.py": TE,
    "transformer/moe/test_multihot_indices_converter.py": "a Triton kernel, no communication",
    "transformer/moe/test_routers.py::test_router_gating_linear": "large products in bf16, no communication",
}

# Tests of tensor_parallel that cannot run here in any mode.
NOT_HERE = {
    "test_initialization.py::Test::test_te_col_init": "needs Transformer Engine",
    "test_initialization.py::Test::test_te_row_init": "needs Transformer Engine",
    "test_random.py::test_checkpoint_without_output": "needs Transformer Engine (0.16.1 reads its FP8 state)",
    "test_random.py::test_convert_cuda_rng_state": "needs CUDA's generator and its graphs",
    "test_random.py::test_double_fork_cuda_rng_states_tracker[True]": "needs CUDA's generator and its graphs",
    "test_tensor_parallel_utils.py::test_gather_split_1d_tensor": "needs NCCL: gloo gathers equal shapes only",
}

# Tests that pass in full precision and fail at 8 bits. Those of `distributed` replace torch's collectives and expect
# their calls. Those of moe compare tokens after dispatch and combine with the tokens before, with assert_close's own
# tolerance. The other tests allow the rounding, or send tensors that are constant within a quantization group, which
# are sent exactly.
A2A = "test_a2a_token_dispatcher.py::TestAlltoAllDispatcher::test"
GATHERED = "test_token_dispatcher.py::TestAllgatherDispatcher::test"
CASES = ("False-False", "True-False")
COLLECTIVE = "test_param_and_grad_buffer.py::test_force_all_reduce_uses_correct_collective"
NOT_AT_8_BITS: dict[str, set[str]] = {
    "distributed": {f"{COLLECTIVE}[False]", f"{COLLECTIVE}[True]"},
    "transformer/moe": {
        *(f"{A2A}_forward_backward[{case}-{ranks}]" for case in CASES for ranks in ("1-8", "8-1", "4-2")),
        *(f"{A2A}_capacity_forward_backward[False-{ranks}]" for ranks in ("1-8", "8-1", "4-2")),
        *(f"{A2A}_capacity_padding_forward_backward[False-{ranks}]" for ranks in ("1-8", "4-2")),
        *(f"{GATHERED}_forward_backward[False-{ranks}]" for ranks in ("8-1", "1-8", "2-4")),
        *(f"{GATHERED}_moe_tp_forward_backward[{ranks}-False]" for ranks in ("1-1-8", "1-2-4", "1-4-2", "2-2-4")),
    },
}

# The calls of each site in a test of tensor_parallel, on every rank; no other test reaches a site.
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

# The tests of each folder that pass without the plugin, at least, and the sites that its tests reach at 8 bits.
PASSED = {"tensor_parallel": 21, "distributed": 76, "pipeline_parallel": 64, "transformer/moe": 146}
MOE = ("all_to_all", "all_gather", "tensor_parallel")
QUANTIZED: dict[str, set[str]] = {
    "tensor_parallel": {site for sites in CALLS.values() for site in sites},
    "distributed": {"megatron.data_parallel.gradients", "megatron.fsdp.gradients", "megatron.fsdp.parameters"},
    "pipeline_parallel": {"megatron.pipeline.forward"},
    "transformer/moe": {f"megatron.expert.{by}.{part}" for by in MOE for part in ("dispatch", "combine")},
}


def why_not() -> str:
    """Return why Megatron-LM's tests cannot run here, empty if they can."""
    if not CHECKOUT:
        return "MEGATRON_LM_PATH is not set: no Megatron-LM checkout (tag core_v0.16.1) to run the unit tests of"
    if not Path(CHECKOUT, TESTS).is_dir():
        return f"MEGATRON_LM_PATH={CHECKOUT} has no {TESTS}"
    return ""


pytestmark = [pytest.mark.timeout(3600), pytest.mark.skipif(bool(why_not()), reason=why_not())]


@functools.cache
def ranks(folder: str, mode: str) -> list[dict[str, Any]]:
    """Return the results that each rank wrote in a mode: see upstream_ranks.py."""
    config, checkout = MODES[mode], str(Path(CHECKOUT).resolve())
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        site, results = Path(scratch, "site"), Path(scratch, "results")
        site.mkdir()
        results.mkdir()
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
            "TORCH_GLOO_LAZY_INIT": "0",  # connecting late hangs where groups share a device
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "UPSTREAM_CONFIG": json.dumps(config) if config else "",
            "UPSTREAM_RESULTS": str(results),
        }
        torchrun = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
        options = [*("-p", "upstream_ranks", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "--tb=short")]
        options += ["--continue-on-collection-errors", *(f"--deselect={TESTS}/{name}" for name in NOT_RUN)]
        command = (sys.executable, "-m", *torchrun, str(WORLD_SIZE), "-m", "pytest", *options, f"{TESTS}/{folder}")
        output = run(command, checkout, environment)
        files = [results / f"rank-{rank}.json" for rank in range(WORLD_SIZE)]
        assert all(file.is_file() for file in files), output[-8000:]
        return [json.loads(file.read_text()) for file in files]


def run(command: tuple[str, ...], folder: str, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=1200)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks down with it
        try:
            output = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        pytest.fail(f"Megatron-LM's tests did not end:\n{output[-8000:]}")


@functools.cache
def outcomes(folder: str, mode: str) -> dict[str, str]:
    """Return by test "passed", "skipped", or why it failed on the first rank where it did; print a table."""
    ended: dict[str, str] = {}
    for rank in ranks(folder, mode):
        for test, (outcome, reason) in rank["outcomes"].items():
            name = short(folder, test)
            if ended.get(name, "passed") in ("passed", "skipped"):
                ended[name] = f"failed: {reason}" if outcome == "failed" else outcome
    passed = sum(outcome == "passed" for outcome in ended.values())
    print(f"\n{folder}, {mode}: {passed} of {len(ended)} tests passed on {WORLD_SIZE} ranks")
    for name, outcome in ended.items():
        quantized = {site: counts["quantized"] for site, counts in sites(folder, mode, 0).get(name, {}).items()}
        print(f"  {name}: {outcome}", f"quantized: {quantized}" if quantized else "")
    return ended


def short(folder: str, test: str) -> str:
    return test.removeprefix(f"{TESTS}/{folder}/")


def sites(folder: str, mode: str, rank: int) -> dict[str, dict[str, Any]]:
    """Return the counts of a rank's sites, for each test that reached a site."""
    found = ranks(folder, mode)[rank]["sites"]
    return {short(folder, test): counts for test, counts in found.items() if counts}


def not_passed(folder: str, mode: str) -> set[str]:
    return {name for name, outcome in outcomes(folder, mode).items() if outcome != "passed"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_without_the_plugin(folder: str) -> None:
    ended = outcomes(folder, "without")
    assert len(ended) - len(not_passed(folder, "without")) >= PASSED[folder]
    if folder == "tensor_parallel":
        assert not_passed(folder, "without") == set(NOT_HERE)
    for number, rank in enumerate(ranks(folder, "without")):
        assert rank["megatron"].startswith(str(Path(CHECKOUT).resolve())), "not the installed megatron-core"
        assert not sites(folder, "without", number)


@pytest.mark.parametrize("folder", FOLDERS)
def test_in_full_precision_nothing_changes(folder: str) -> None:
    assert not_passed(folder, "full precision") == not_passed(folder, "without")
    for number, rank in enumerate(ranks(folder, "full precision")):
        assert all(rank["in place"])
        found = sites(folder, "full precision", number)
        assert not any(entry["quantized"] for counts in found.values() for entry in counts.values())
        if folder == "tensor_parallel":
            calls = {
                test: {site: entry["full_precision"]["disabled by configuration"] for site, entry in counts.items()}
                for test, counts in found.items()
            }
            assert calls == CALLS


@pytest.mark.parametrize("folder", FOLDERS)
def test_at_8_bits(folder: str) -> None:
    assert not_passed(folder, "8 bits") - not_passed(folder, "without") == NOT_AT_8_BITS.get(folder, set())
    for number, rank in enumerate(ranks(folder, "8 bits")):
        assert all(rank["in place"])
        found = sites(folder, "8 bits", number)
        quantized = {site for counts in found.values() for site, entry in counts.items() if entry["quantized"]}
        assert quantized == QUANTIZED[folder]
        if folder == "tensor_parallel":
            assert {t: {s: entry["quantized"] for s, entry in counts.items()} for t, counts in found.items()} == CALLS
            assert not any(entry["full_precision"] for counts in found.values() for entry in counts.values())
