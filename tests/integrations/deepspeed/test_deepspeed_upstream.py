"""DeepSpeed's own unit tests of gradient reduction, unedited: without the plugin, in pass-through and at 8 bits.

    DEEPSPEED_PATH=<a DeepSpeed checkout> pytest -s tests/integrations/deepspeed/test_deepspeed_upstream.py

Ranks on gloo and the CPU, as DeepSpeed's harness makes them; upstream_plugin.py brings the plugin into them and
writes down how each test ended. Only `tests` of the checkout is used, on the installed deepspeed. The operators that
DeepSpeed compiles (its Adam, shared memory) are compiled once, before the tests.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flash_allreduce_plugin.config import FlashConfig

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("DEEPSPEED_PATH", "")
TESTS = "tests/unit"
# The classes of each file that reduce gradients and run here; the whole file where none is named.
FILES: dict[str, tuple[str, ...]] = {
    "v1/zero/test_zero_coalesce_grad_reduction.py": (),
    "v1/zero/test_zero.py": (
        "TestGradientAllreduceOp",
        "TestBF16OptimizerGradReduction",
        "TestZeroFrozenWeights",
        "TestZeroOffloadStage1",
        "TestZero3ParamPartitioningBase",
        "TestZero3ParamPartitioningLargeParam",
        "TestZero3ParamPartitioningManyParams",
        "TestZero3SwitchModes",
        "TestZeroToFP32",
        "TestParamPartitioningSkipInit",
    ),
    "v1/zero/test_zero_user_backward.py": (
        "TestUnmanagedGradientAccumulation::test_step_always_applies_update",
        "TestUnmanagedGradientAccumulation::test_managed_baseline_applies_only_on_boundary",
    ),
    "v1/moe/test_moe.py": ("TestExpertWeightGradWithZero",),
    "v1/moe/test_autoep_grad_parity.py": (),
    "v1/moe/test_autoep_integration.py": ("TestAutoEPOnly", "TestAutoEPZero3ReplicaGroups"),
    "v1/zero/test_zero_hook_count_regression.py": (),
    "runtime/half_precision/test_zero_optim_overflow.py": ("TestZeROBFloat16",),
    "runtime/zero/test_zero_tensor_fragment.py": tuple(
        f"TestTensorFragmentUpdate::test_zero_fragments[none-{stage}-False-dtype{dtype}]"
        for stage in (1, 2, 3)
        for dtype in (0, 2)  # bf16, fp32
    ),
    "runtime/zero/test_zero_leaf_module.py": ("TestSetZ3LeafModule", "TestZ3LeafOptimization"),
    "runtime/pipe/test_pipe.py": ("TestPipeDynamicShape",),
}

MODES = {
    "without": None,
    "pass-through": FlashConfig(enabled=False),
    "8 bits": FlashConfig(bits=8, min_bytes=0),
}
# LOCAL_SIZE: as many "devices" as the largest test wants. Every test has ranks of its own, so that they can be told
# apart; a hang costs DEEPSPEED_TIMEOUT minutes.
ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "FLASH_ALLREDUCE_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "DS_ACCELERATOR": "cpu",
    "LOCAL_SIZE": "4",
    "DS_DISABLE_REUSE_DIST_ENV": "1",
    "DS_UNITTEST_TIMEOUT": "300",
    "DEEPSPEED_TIMEOUT": "3",
}
COMPILE = "from deepspeed.accelerator import get_accelerator as a; [a().create_op_builder(b).load() for b in {}]"
OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")

# Sites that these tests reach.
SITES = {*(f"deepspeed.stage{stage}.gradients" for stage in (0, 1, 2, 3)), "deepspeed.experts"}

COALESCE = "v1/zero/test_zero_coalesce_grad_reduction.py::"
ZERO = "v1/zero/test_zero.py::"

# Tests that fail here in every mode, by the reason.
NOT_HERE = {
    "fp16 is not supported on the CPU, which the test does not ask": [
        f"{COALESCE}TestCoalesceFP16::test_fp16_bit_exact[{stage}]" for stage in (1, 2, 3)
    ],
}

# Further tests that fail at 8 bits, by the reason.
NOT_AT_8_BITS = {
    # One step of bf16 in a weight (2e-3), which the first step of Adam makes of the smallest difference in a gradient.
    "wants the same bits from two runs whose buckets differ, in number or order: they are rounded differently": [
        f"{COALESCE}TestCoalesceCombinations::test_multi_backward_bit_exact[False-False-2]",
        f"{COALESCE}TestCoalesceCombinations::test_multi_backward_bit_exact[True-False-2]",
        f"{COALESCE}TestCoalesceCombinations::test_multi_backward_bit_exact[False-True-1]",
        f"{COALESCE}TestCoalesceCombinations::test_multi_backward_bit_exact[False-True-2]",
        f"{COALESCE}TestCoalesceCombinations::test_multi_backward_bit_exact[True-True-2]",
        f"{COALESCE}TestCoalesceBucketOverflow::test_multi_bucket_flush[2]",
        f"{COALESCE}TestCoalesceBucketOverflow::test_multi_bucket_flush[3]",
        f"{COALESCE}TestCoalesceCpuOffload::test_cpu_offload_bit_exact[2-True-False]",
        f"{COALESCE}TestCoalesceCorrectness::test_multi_step_no_state_leak[2]",
        f"{COALESCE}TestCoalesceCorrectness::test_multi_step_no_state_leak[3]",
        f"{COALESCE}TestCoalesceCorrectness::test_gradient_clipping[2]",
        f"{COALESCE}TestCoalesceCorrectness::test_n1_inside_context[2]",
        f"{COALESCE}TestCoalesceGradAccumDtype::test_zero2_bf16_fp32_grad_accum",
        f"{COALESCE}TestCoalesceMoE_EpSize1::test_smoke[2]",
        f"{COALESCE}TestCoalesceMoE_EpSize2::test_expert_parallel[2]",
    ],
    "wants the numbers of full precision, to 1e-5 or 1e-6": [
        *(
            f"{ZERO}TestGradientAllreduceOp::test[{options}-{op}-{stage}]"
            for options in ("True-True-False-1.0", "False-True-False-2.0", "False-False-True-1.0")
            for op in ("mean-1.0", "sum-2.0")
            for stage in (0, 1, 2)
        ),
        # The constant gradients of three tensors in one bucket; alone in a bucket each is exact.
        f"{ZERO}TestZero3ParamPartitioningBase::test_contiguous_gradients[True]",
    ],
    "wants the same gradients, to 1e-4, of experts that are reduced on two ranks and of those that are on one alone": [
        f"v1/moe/test_moe.py::TestExpertWeightGradWithZero::test[{stage}]" for stage in (0, 1, 2)
    ],
    "counts the calls of deepspeed.comm's collectives, which a quantized reduction does not make": [
        f"{COALESCE}TestCoalesceCollectiveCount::test_coalesce_issues_fewer_collectives[2]",
        f"{COALESCE}TestCoalesceCollectiveCount::test_coalesce_issues_fewer_collectives[3]",
    ],
}


def why_not() -> str:
    """Return why DeepSpeed's tests cannot run here, empty if they can."""
    if not CHECKOUT:
        return "DEEPSPEED_PATH is not set: no DeepSpeed checkout to run the unit tests of"
    if not Path(CHECKOUT, TESTS).is_dir():
        return f"DEEPSPEED_PATH={CHECKOUT} has no {TESTS}"
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), pytest.mark.skipif(bool(why_not()), reason=why_not())]


@functools.cache
def compiled() -> None:
    """Compile DeepSpeed's operators: in a test they would count as a hang."""
    command = (sys.executable, "-W", "ignore", "-c", COMPILE.format(OPERATORS))
    built = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=1800)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]


@functools.cache
def results(mode: str) -> dict[str, Any]:
    """Return the results that upstream_plugin.py wrote in a mode, test by test, with names without the folder."""
    compiled()
    config = MODES[mode]
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        site, folder = Path(scratch, "site"), Path(scratch, "results")
        site.mkdir()
        folder.mkdir()
        # The two alone, not ROOT: DeepSpeed's tests are no package of this project's.
        (site / "flash_allreduce_plugin").symlink_to(ROOT / "flash_allreduce_plugin")
        (site / "upstream_plugin.py").symlink_to(ROOT / "tests" / "integrations" / "deepspeed" / "upstream_plugin.py")
        own = {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ALLREDUCE_")}
        environment = {
            **own,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "UPSTREAM_CONFIG": "" if config is None else json.dumps(config.to_dict()),
            "UPSTREAM_RESULTS": str(folder),
        }
        options = ("-p", "upstream_plugin", "-p", "no:cacheprovider", "--basetemp", str(Path(scratch, "tmp")))
        nodes = ["::".join(filter(None, (file, name))) for file, names in FILES.items() for name in names or ("",)]
        command = (sys.executable, "-m", "pytest", *options, "--tb=short", *nodes)
        tests = Path(CHECKOUT, TESTS).resolve()
        run = subprocess.run(
            command,
            cwd=tests,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=5400,
        )
        assert (folder / "results.json").is_file(), run.stdout[-8000:]
        written: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert "Exit: Test hanged" not in run.stdout, run.stdout[-8000:]
    for key in ("outcomes", "ranks"):
        written[key] = {test.removeprefix("unit/"): value for test, value in written[key].items()}
    show(mode, written)
    return written


def show(mode: str, written: dict[str, Any]) -> None:
    """Print the table of the documentation, and every test that failed."""
    print(f"\n{mode}")
    for file in FILES:
        of_file = {test: outcome for test, (outcome, _) in written["outcomes"].items() if test.startswith(file)}
        counts = Counter(of_file.values())
        ends = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        print(f"  {file}: {ends}; calls: {calls(written, file)}")
    for test, (outcome, reason) in written["outcomes"].items():
        if outcome == "failed":
            print(f"  FAILED {test}: {reason}")
    print("  skipped:")
    reasons = Counter(reason for outcome, reason in written["outcomes"].values() if outcome == "skipped")
    for reason, count in reasons.most_common():
        print(f"    {count} {reason}")


def calls(written: dict[str, Any], file: str = "") -> dict[str, dict[str, int]]:
    """Return, by site, the calls on all ranks, quantized and by the reason for full precision; of one file's tests."""
    total: dict[str, Counter[str]] = {}
    for test, ranks in written["ranks"].items():
        for sites in ranks if test.startswith(file) else []:
            for site, counts in sites.items():
                total.setdefault(site, Counter()).update(quantized=counts["quantized"], **counts["full_precision"])
    return {site: {key: value for key, value in counts.items() if value} for site, counts in sorted(total.items())}


def failures(mode: str) -> set[str]:
    return {test for test, (outcome, _) in results(mode)["outcomes"].items() if outcome == "failed"}


def test_without_the_plugin() -> None:
    assert failures("without") == {test for tests in NOT_HERE.values() for test in tests}
    assert not calls(results("without"))


def test_in_pass_through_nothing_changes() -> None:
    ended = {mode: {t: o for t, (o, _) in results(mode)["outcomes"].items()} for mode in ("without", "pass-through")}
    assert ended["pass-through"] == ended["without"]
    reached = calls(results("pass-through"))
    assert set(reached) == SITES
    assert all(set(counts) == {"disabled by configuration"} for counts in reached.values())


def test_at_8_bits() -> None:
    expected = {test for tests in (*NOT_HERE.values(), *NOT_AT_8_BITS.values()) for test in tests}
    assert failures("8 bits") == expected
    reached = calls(results("8 bits"))
    assert set(reached) == SITES
    assert all(counts["quantized"] for counts in reached.values())
