"""Unmodified scripts under torchrun: the flags work through the entry point, and through the launcher.

A stub of Megatron-LM's training package (real argparse, functions of the same names) and megatron-core's own
reduction serve everywhere. With MEGATRON_LM_PATH=<a Megatron-LM checkout, core_v0.16.1> its own pretrain_gpt.py is
trained for 50 iterations on CPU. tests/integrations/megatron/cuda_shim.py is copied into the ranks for it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
# Hidden states of 256 x 2 x 256 are 512 KiB in fp32 and 256 KiB in bf16: by default too small to be quantized.
FLAGS = (
    *("--flash-allreduce", "--flash-allreduce-bits", "8", "--flash-allreduce-backward-bits", "8"),
    *("--flash-allreduce-min-bytes", "262144"),
)
ITERATIONS = 50
LAYERS = 2
ARGUMENTS = f"""
--tensor-model-parallel-size 2 --num-layers {LAYERS} --hidden-size 256 --num-attention-heads 4 --seq-length 256
--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 2 --train-iters {ITERATIONS} --lr 1e-3
--min-lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 255
--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --distributed-backend gloo
--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
--attention-backend unfused --position-embedding-type rope --no-check-for-nan-in-loss-and-grad --num-workers 0
--clip-grad 0
""".split()
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}

STUB = {
    "megatron/training/__init__.py": """
import torch
from .global_vars import get_args
from .initialize import initialize_megatron
""",
    "megatron/training/global_vars.py": """
_GLOBAL_ARGS = None

def get_args():
    return _GLOBAL_ARGS

def set_global_variables(args):
    set_args(args)

def set_args(args):
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
""",
    "megatron/training/arguments.py": """
import argparse, os

def add_megatron_arguments(parser):
    parser.add_argument_group("network size").add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    return parser

def parse_args(extra_args_provider=None):
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    return args
""",
    "megatron/training/initialize.py": """
from megatron.training.arguments import parse_args
from megatron.training.global_vars import set_global_variables

def initialize_megatron(extra_args_provider=None):
    set_global_variables(parse_args(extra_args_provider))
""",
    "neighbour.py": "here = True\n",
    "pretrain_stub.py": """
import torch
import neighbour  # the script's own folder is on the path
from megatron.training import get_args, initialize_megatron

if __name__ == "__main__":
    initialize_megatron(lambda parser: parser)
    print("initialized", get_args().rank, flush=True)
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
    from tests.leaving import leave

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(get_args().tensor_model_parallel_size)
    dtype = torch.bfloat16 if get_args().bf16 else torch.float32
    output = reduce_from_tensor_model_parallel_region(torch.full((512, 512), 1.0 + dist.get_rank(), dtype=dtype))
    assert output.dtype == dtype
    assert bool(((output - 3.0).abs() < 0.05).all()), output
    leave()
""",
}


def run(folder: Path, *command: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python <command>` in `folder`, with the package and its entry point, whether installed or not."""
    site = folder / "site"
    info = site / "flash_allreduce_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    path = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ALLREDUCE_")}
    env = {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **environment}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks down with it
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        pytest.fail(f"no end after {timeout} s:\n{output[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output, "")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
LAUNCHER = ("-m", "flash_allreduce_plugin.integrations.megatron")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Return a folder with a Megatron-LM of a few lines; `megatron` itself stays a namespace package."""
    for name, text in STUB.items():
        file = tmp_path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("launcher", "precision"), [(False, "bf16"), (True, "fp32")], ids=["entry point, bf16", "launcher, fp32"]
)
def test_flags_of_an_unmodified_script(stub: Path, launcher: bool, precision: str) -> None:
    command = (*LAUNCHER, "checkout/pretrain_stub.py") if launcher else ("checkout/pretrain_stub.py",)
    switch = {"FLASH_ALLREDUCE_AUTOLOAD": "0"} if launcher else {}
    done = run(stub, *TORCHRUN, *command, "--tensor-model-parallel-size", "2", *PRECISIONS[precision], *FLAGS, **switch)
    assert done.returncode == 0, done.stdout
    # Not at the start of a line: both ranks write to one place, line ends on their own.
    assert done.stdout.count("flash all-reduce: ") == 1, "rank 0 only"
    assert done.stdout.count("flash all-reduce, rank 0, whole run: ") == 1
    assert re.search(r"megatron\.g\.forward: 1 calls, 1 quantized, ", done.stdout)


def test_without_flags_nothing_happens(stub: Path) -> None:
    done = run(stub, *TORCHRUN, "checkout/pretrain_stub.py", "--tensor-model-parallel-size", "2")
    assert done.returncode == 0, done.stdout
    assert "flash" not in done.stdout


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_bad_value_is_refused_on_every_rank(stub: Path, rank: str) -> None:
    done = run(stub, "checkout/pretrain_stub.py", "--flash-allreduce", "--flash-allreduce-bits", "9", RANK=rank)
    assert done.returncode == 1
    assert "--flash-allreduce-bits=9 is not valid; expected a whole number from 2 to 8." in done.stdout
    assert "initialized" not in done.stdout


def test_help_has_a_group_of_its_own(stub: Path) -> None:
    done = run(stub, "checkout/pretrain_stub.py", "--help")
    assert done.returncode == 0
    network, _, ours = done.stdout.partition("\nflash all-reduce:\n")
    assert "network size:" in network and "--flash-allreduce-backward-bits BITS" in ours


def test_where_autoload_is_off_the_flags_are_unknown(stub: Path) -> None:
    done = run(stub, "checkout/pretrain_stub.py", "--flash-allreduce", FLASH_ALLREDUCE_AUTOLOAD="0")
    assert done.returncode == 2
    assert "unrecognized arguments: --flash-allreduce" in done.stdout


def test_the_launcher_says_how_it_is_used(stub: Path) -> None:
    for words, said in (((), "usage: "), (("--help",), "usage: "), (("none.py",), "none.py: no such file")):
        done = run(stub, *LAUNCHER, *words)
        assert done.returncode == 1 and said in done.stdout


SHIMMED = """
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from tests.leaving import leave

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(2)
torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
before = torch.get_rng_state()
config = ModelParallelConfig(tensor_model_parallel_size=2, params_dtype=torch.bfloat16)
layer = ColumnParallelLinear(16, 32, config=config, init_method=torch.nn.init.normal_, bias=False)
weight = layer.weight.detach().cuda()
assert weight.type() == "torch.cuda.BFloat16Tensor", weight.type()
assert torch.equal(before, torch.get_rng_state()), "drawn from the CPU's generator"
parts = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(parts, weight)
assert not torch.equal(*parts), "both ranks drew the same numbers"
leave()
"""


def test_the_shim_of_cuda_has_bf16_and_draws_other_weights_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", tmp_path / "site" / "sitecustomize.py")
    (tmp_path / "shimmed.py").write_text(SHIMMED)
    done = run(tmp_path, *TORCHRUN, "shimmed.py")
    assert done.returncode == 0, done.stdout[-4000:]


def why_not() -> str:
    """Return why the real Megatron-LM cannot run here, empty if it can."""
    if not CHECKOUT:
        return "MEGATRON_LM_PATH is not set: no Megatron-LM checkout (tag core_v0.16.1) to run pretrain_gpt.py of"
    if not Path(CHECKOUT, "pretrain_gpt.py").is_file():
        return f"MEGATRON_LM_PATH={CHECKOUT} has no pretrain_gpt.py"
    missing = [n for n in ("six", "regex", "yaml", "omegaconf", "triton") if importlib.util.find_spec(n) is None]
    return f"Megatron-LM needs {', '.join(missing)}, not installed here" if missing else ""


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_megatron_lm_trains_with_flags_only(tmp_path: Path, precision: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
    script = Path(CHECKOUT, "pretrain_gpt.py").resolve()
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(tmp_path, *TORCHRUN, str(script), *ARGUMENTS, *PRECISIONS[precision], *FLAGS, timeout=500, **environment)
    assert done.returncode == 0, done.stdout[-8000:]
    told = [
        line for line in done.stdout.splitlines() if "lm loss" in line or line.startswith(("flash all", "  megatron."))
    ]
    print("\n".join(told))
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == ITERATIONS
    assert losses[0] > 5 and losses[-1] < 0.5, "it learns the mock data"
    assert "forward 8 bits, backward 8 bits" in done.stdout
    forward, backward = ITERATIONS * 2 * LAYERS, ITERATIONS * (2 * LAYERS + 1)
    assert f"megatron.g.forward: {forward} calls, {forward} quantized" in done.stdout
    assert f"megatron.linear.dgrad: {backward} calls, {backward} quantized" in done.stdout
    assert f"megatron.embedding.forward: {ITERATIONS} calls, 0 quantized" in done.stdout


PIPELINES = {
    "PP 2": (2, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"),
    "TP 2 x PP 2": (4, "--pipeline-model-parallel-size 2"),
    "VPP": (
        4,
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers 8 "
        # Overlapped, as Megatron-LM wants it on two stages, its own sends end with NaN over gloo.
        "--num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", PIPELINES)
def test_megatron_lm_trains_over_stages_with_flags_only(tmp_path: Path, layout: str, precision: str) -> None:
    ranks, options = PIPELINES[layout]
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
    script = Path(CHECKOUT, "pretrain_gpt.py").resolve()
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    iterations, batches = 12, 4
    words = [*ARGUMENTS, *PRECISIONS[precision], *options.split()]
    words += ["--global-batch-size", str(2 * batches), "--train-iters", str(iterations)]
    flags = [*FLAGS, "--flash-allreduce-pipeline-bits", "8", "--flash-allreduce-pipeline-backward-bits", "8"]
    launch = [*TORCHRUN[:-1], str(ranks), str(script), *words]
    done = run(tmp_path, *launch, *flags, timeout=500, **environment)
    assert done.returncode == 0, done.stdout[-8000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == iterations and losses[0] > 5 > losses[-1]
    chunks = 2 if layout == "VPP" else 1  # of rank 0: the first of each has no stage before it to send to
    calls = iterations * batches * (2 * chunks - 1)
    for site_name in ("forward", "backward"):
        assert f"megatron.pipeline.{site_name}: {calls} calls, {calls} quantized" in done.stdout
    assert "pipeline_bits=8, pipeline_backward_bits=8" in done.stdout
    stock = run(tmp_path, *launch, timeout=500, **environment)
    theirs = [float(loss) for loss in re.findall(r"lm loss: (\S+)", stock.stdout)]
    assert losses == pytest.approx(theirs, rel=0.02)


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_megatron_lm_trains_under_megatron_fsdp_with_flags_only(tmp_path: Path, strategy: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
    script = Path(CHECKOUT, "pretrain_gpt.py").resolve()
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTHONDONTWRITEBYTECODE": "1"}
    iterations = 8
    small = "--bf16 --tensor-model-parallel-size 1 --hidden-size 64 --seq-length 64 --max-position-embeddings 64"
    ordinary = [*ARGUMENTS, *small.split(), "--global-batch-size", "4", "--train-iters", str(iterations)]
    ordinary += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    ordinary += ["--calculate-per-token-loss"]  # else gradients are multiplied in the collective, which gloo cannot
    words = [*ordinary, "--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy]
    words += ["--ckpt-format", "fsdp_dtensor"]
    flags = ["--flash-allreduce", "--flash-allreduce-min-bytes", "0"]
    flags += ["--flash-allreduce-grad-bits", "8", "--flash-allreduce-param-bits", "8"]
    done = run(tmp_path, *TORCHRUN, str(script), *words, *flags, timeout=500, **environment)
    assert done.returncode == 0, done.stdout[-8000:]
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("flash all", "  megatron.fsdp"))))
    ours = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(ours) == iterations
    for stock in (words, ordinary):  # Megatron-FSDP, and the ordinary distributed optimizer
        other = run(tmp_path, *TORCHRUN, str(script), *stock, timeout=500, **environment)
        theirs = [float(loss) for loss in re.findall(r"lm loss: (\S+)", other.stdout)]
        assert ours == pytest.approx(theirs, rel=0.01)
    assert re.search(r"megatron\.fsdp\.gradients: (\d+) calls, \1 quantized", done.stdout)
    assert f"megatron.fsdp.parameter{'s' if strategy.endswith('params') else '_differences'}: " in done.stdout
