"""torch's own tests of DDP, its communication hooks, replicate, FSDP2 and DTensor's tensor parallelism, unedited:
without the plugin, attached with every message below min_bytes, and all but replicate's at 8 bits.

    PYTORCH_PATH=<a checkout of pytorch> nox -s test-programs

Without a checkout the files come from GitHub, of the very commit that the installed torch was built from; those of
`distributed_test` are in torch's wheel, where only the lines that start the ranks are missing. On gloo and the CPU:
tests that need GPUs skip themselves, most tests of communication hooks among them. FSDP2's have two ranks. Ranks are
torch's own, attached by the environment as any program is.
"""

from __future__ import annotations

import functools
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from programs import OFF, SETTINGS, Run, needs, source, start

pytestmark = [pytest.mark.slow, needs("expecttest"), pytest.mark.timeout(14400)]

REPOSITORY, VARIABLE = "pytorch/pytorch", "PYTORCH_PATH"
FSDP2 = "test/distributed/_composable/fsdp/test_fully_shard_training.py"
REPLICATE = "test/distributed/_composable/test_replicate.py"
WHEEL = "distributed_test"
C10D = "test/distributed/test_c10d_gloo.py"
TENSOR_PARALLEL = "test/distributed/tensor/parallel/test_tp_examples.py"
STYLES = "test/distributed/tensor/parallel/test_tp_style.py"
PLANS = "test/distributed/tensor/parallel/test_parallelize_api.py"
FILES = (WHEEL, C10D, REPLICATE, FSDP2, TENSOR_PARALLEL, STYLES, PLANS)
BESIDE = {C10D: ("test/distributed/test_c10d_common.py",)}  # files that a test file imports
# In these files, only some tests test attached modules (pytest's -k).
ONLY = {
    C10D: "DistributedDataParallelTest",
    WHEEL: "DistributedDataParallelCPU or DistributedDataParallel_requires_grad or ddp_create_graph or "
    "logging_data_cpu or static_graph_api_cpu or grads_same_across_ranks",
}
SPAWNED = """
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""
# These files skip on a machine without GPUs what torch allows on a CPU: FSDPTest every test (it counts devices), the
# other its transformers. FSDP2's tests have two ranks: most have eight, and each rank imports torch in each test.
ON_THE_CPU = """
import functools, unittest
import torch
from torch.testing._internal import common_distributed

{}
import {} as upstream

for name, case in list(vars(upstream).items()):
    if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == upstream.__name__:
        threads = issubclass(case, common_distributed.MultiThreadedTestCase)
        ranks = {{}} if threads else {}
        globals()[name] = type(name, (case,), {{"__module__": __name__, **ranks}})
del case  # pytest would collect it
"""
COUNTS_TWO = ("torch.accelerator.device_count = lambda: 2", '{"world_size": property(lambda self: 2)}')
# DTensor has no strategy for the flash attention of CPUs: its heads are sharded, or nothing is.
SKIPS_NONE = (
    """
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

common_distributed.skip_if_lt_x_gpu = functools.partial(common_distributed.skip_if_lt_x_gpu, allow_cpu=True)
forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
for attention, results, tensors in ((forward, 2, 3), (backward, 3, 6)):
    register_sharding(attention)(
        lambda *given, results=results, tensors=tensors, **_: [
            ([kind] * results, [kind] * tensors + [None] * (len(given) - tensors)) for kind in (Replicate(), Shard(1))
        ]
    )
""",
    "{}",
)
WITHOUT_GPUS = {FSDP2: COUNTS_TWO, TENSOR_PARALLEL: SKIPS_NONE}
# Variables that distributed_test reads, and the others do not.
OF_THE_WHEEL = {"BACKEND": "gloo", "WORLD_SIZE": "2"}
ATTACHED = {"FLASH_ALLREDUCE_ATTACH": "ddp,fsdp", **SETTINGS}
OF_TENSOR_PARALLEL = {"FLASH_ALLREDUCE_ATTACH": "ddp,fsdp,tensor_parallel"}
MODES = {
    "without": OFF,
    "full precision": {**ATTACHED, "FLASH_ALLREDUCE_MIN_BYTES": str(1 << 40)},
    "8 bits": ATTACHED,
}
# The exit status 1 of pytest is that a test failed, which is no failure here.
PYTEST = "import pytest, sys; sys.exit({0: 0, 1: 0, 5: 0}.get(int(pytest.main(sys.argv[1:])), 2))"

# Tests that end differently than without the plugin, by the reason: names of tests, without their files.
IN_FULL_PRECISION: dict[str, set[str]] = {}
AT_8_BITS: dict[str, set[str]] = {
    "compares weights with those of one process to 1e-5 or 5e-5": {
        "DistributedDataParallelTest.test_gloo_backend_cpu_module",
        "DistributedDataParallelTest.test_gloo_backend_cpu_module_grad_is_view",
        "TestDistBackendWithSpawn.test_DistributedDataParallelCPU",
        "TestDistBackendWithSpawn.test_DistributedDataParallelCPU_grad_is_view",
    },
    "compares losses, parameters or gradients with those of another model to 1e-5": {
        "TestFullyShard1DTrainingCompose.test_partial_group_forward_grad_accum_chunked",
        "TestFullyShard1DTrainingCompose.test_partial_group_forward_then_standalone",
        "TestFullyShard1DTrainingCore.test_explicit_prefetching",
        "TestFullyShard1DTrainingCore.test_multi_forward_module",
        "TestFullyShard1DTrainingCore.test_non_root_forward_backward",
        "TestFullyShard1DTrainingCore.test_train_parity_multi_group_cpu_offload_eager",
        "TestFullyShard1DTrainingCore.test_train_parity_multi_group_unshard_async_op",
        "TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_dim0",
        "TestFullyShard1DTrainingCore.test_train_parity_single_group_shard_largest_dim",
        "TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method",
        "TestFullyShardGradientAccumulation.test_1f1b_microbatching",
        "TestFullyShardHSDPTraining.test_train_parity_hsdp",
        "TestFullyShardShardPlacementFnMultiProcess.test_train_parity_shard_placement_fn_shard_largest_dim",
        "TestFullyShardShareCommContext.test_share_comm_context",
        "TestFullyShardSharedParams.test_train_parity_with_shared_params",
    },
    "compares outputs with those of one process to 1e-5": {
        "DistTensorParallelExampleTest.test_mlp_training_is_seq_parallel_False_recompute_activation_False",
        "DistTensorParallelExampleTest.test_mlp_training_is_seq_parallel_True_recompute_activation_False",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_all",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_layers_0_attention_wv"
        "__layers_0_feed_forward_w1__layers_1_feed_forward_w2__layers_1_ffn_norm__output__tok_embeddings",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_layers_1_ffn_norm__norm"
        "__output__tok_embeddings",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_norm__output",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_norm__output__tok_embeddings",
        "DistTensorParallelExampleTest.test_transformer_req_grad_seq_parallel_float32_thaw_output__tok_embeddings",
        "DistTensorParallelExampleTest.test_transformer_training_is_seq_parallel_False_float32",
        "DistTensorParallelExampleTest.test_transformer_training_is_seq_parallel_True_float32",
        "TensorParallelAPITests.test_linear_row_wise_parallel",
        "TensorParallelAPITests.test_parallelize_module_multi_wildcard",
        "TensorParallelAPITests.test_parallelize_module_with_no_match",
        "TensorParallelAPITests.test_parallelize_module_with_root_module",
    },
    "counts torch's collectives, which the plugin replaces": {
        "TensorParallelStyleTest.test_rowwise_parallel_style",
        "TestFullyShardGradientAccumulation.test_gradient_accumulation",
    },
}


@dataclass
class Result:
    """A result. run: of pytest, with our lines and counters. ended: "passed", "failed" or "skipped", by test."""

    run: Run
    ended: dict[str, str]


@functools.cache
def results(file: str, mode: str) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="upstream-"))
    if file == WHEEL:
        path, variables = folder / "test_of_the_wheel.py", OF_THE_WHEEL
        path.write_text(SPAWNED)
    else:
        for name in (*BESIDE.get(file, ()), file):
            path, variables = source(REPOSITORY, torch.version.git_version, VARIABLE, name, folder), {}
    beside: tuple[Path, ...] = ()
    if file in WITHOUT_GPUS:
        before, ranks = WITHOUT_GPUS[file]
        beside, text = (path.parent,), ON_THE_CPU.format(before, path.stem, ranks)
        path = folder / "test_on_the_cpu.py"
        path.write_text(text)
    # Not pytorch's pytest.ini and conftest.py, which want plugins of pytest.
    (folder / "empty.ini").write_text("[pytest]\n")
    options = ("-p", "no:cacheprovider", "-c", "empty.ini", "--noconftest", "--junitxml", "ended.xml", "-rA", "-s")
    only = ("-k", ONLY[file]) if file in ONLY else ()
    variables = {**variables, "TEMP_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **MODES[mode]}
    if mode != "without" and file in (TENSOR_PARALLEL, STYLES, PLANS):
        variables |= OF_TENSOR_PARALLEL
    run = start(folder, ("-c", PYTEST, *options, *only, str(path)), variables, *beside, timeout=3600)
    return Result(run, ended(folder / "ended.xml"))


def ended(file: Path) -> dict[str, str]:
    """Return how each test ended, by pytest's report."""
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    tests = {}
    for test in ElementTree.parse(file).iter("testcase"):
        name = f"{test.get('classname', '').rpartition('.')[2]}.{test.get('name')}"
        tests[name] = next((kinds[child.tag] for child in test if child.tag in kinds), "passed")
    return tests


def otherwise(file: str, mode: str) -> set[str]:
    """Return the tests that end differently than without the plugin."""
    plain, attached = results(file, "without"), results(file, mode)
    assert plain.ended.keys() == attached.ended.keys() and plain.ended
    assert plain.run.lines == [] and plain.run.sites == {}
    print(f"\n{file}, {mode}: {attached.run.sites}")
    return {test for test in plain.ended if plain.ended[test] != attached.ended[test]}


def known(file: str, tests: dict[str, set[str]]) -> set[str]:
    return set().union(*tests.values()) & results(file, "without").ended.keys()


@pytest.mark.parametrize("file", FILES)
def test_in_full_precision(file: str) -> None:
    assert otherwise(file, "full precision") == known(file, IN_FULL_PRECISION)
    sites = results(file, "full precision").run.sites
    assert not any(counts["quantized"] for counts in sites.values())


@pytest.mark.parametrize(
    ("file", "site"),
    [
        (WHEEL, "ddp.gradients"),
        (C10D, "ddp.gradients"),
        (FSDP2, "fsdp.gradients"),
        (TENSOR_PARALLEL, "tensor_parallel.reduce.forward"),
        (STYLES, "tensor_parallel.reduce.forward"),
        (PLANS, "tensor_parallel.reduce.forward"),
    ],
)
def test_at_8_bits(file: str, site: str) -> None:
    assert otherwise(file, "8 bits") == known(file, AT_8_BITS)
    assert results(file, "8 bits").run.sites[site]["quantized"] > 0


def test_threads_as_ranks_stay_in_full_precision() -> None:
    """Check that FSDP2 stays as it is between threads, whose group has no backend, and is attached between ranks."""
    run = results(FSDP2, "full precision").run
    assert any("is left alone: its process group" in line for line in run.lines)
    assert run.sites["fsdp.gradients"]["calls"] and run.sites["fsdp.replicas"]["calls"]
