"""FLASH_ALLREDUCE_ATTACH=megatron: unedited programs, under torchrun, on real megatron-core; and Megatron-LM's
scripts (the stub of test_launch) as if --flash-allreduce had been given.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.utils import get_tensor_model_parallel_group_if_none

from flash_allreduce_plugin.cli.report.log import read
from tests.integrations.megatron.test_launch import STUB, TORCHRUN, run

# Two tensor-parallel layers, trained. Only the lines that BY_HAND adds refer to the plugin.
PROGRAM = """
import hashlib
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.leaving import leave

torch.cuda.current_device = lambda: torch.device("cpu")


class Model(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False}
        self.wide = ColumnParallelLinear(256, 512, gather_output=False, **options)
        self.narrow = RowParallelLinear(512, 256, input_is_parallel=True, skip_bias_add=False, **options)

    def forward(self, inputs):
        return self.narrow(self.wide(inputs)[0].relu())[0]


def main():
    options = eval(sys.argv[1]) if len(sys.argv) > 1 else {}
    # As in Megatron-Bridge: there is a configuration before there are groups.
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, tensor_model_parallel_size=2,
    )
    for name, value in options.items():
        setattr(config, name, value)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(config.tensor_model_parallel_size)
    # BY HAND
    torch.manual_seed(1)
    model = Model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(512, 256)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
    weights = b"".join(bytes(p.detach().view(torch.uint8).flatten().tolist()) for p in model.parameters())
    print(f"rank {dist.get_rank()} weights {hashlib.sha256(weights).hexdigest()} loss {loss:.6f}", flush=True)
    dist.barrier()
    leave()


main()
"""
CONFIG = {"FLASH_ALLREDUCE_BITS": "4", "FLASH_ALLREDUCE_BACKWARD_BITS": "8", "FLASH_ALLREDUCE_MIN_BYTES": "65536"}
ATTACH = {"FLASH_ALLREDUCE_ATTACH": "megatron", **CONFIG}
LINE = "flash all-reduce: attached to megatron-core, "
OWN = """
    import flash_allreduce_plugin as fap
    fap.megatron.enable(fap.FlashConfig(bits=4, backward_bits=8, min_bytes=65536))
"""


# It never calls initialize_model_parallel.
OWN_GROUPS = PROGRAM.replace(
    "parallel_state.initialize_model_parallel(config.tensor_model_parallel_size)",
    "parallel_state._set_global_memory_buffer()\n    global GROUP\n    GROUP = dist.new_group([0, 1])",
).replace('options = {"config": config,', 'options = {"tp_group": GROUP, "config": config,')


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program, and with two that enable the seams themselves."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(PROGRAM)
    (folder / "own.py").write_text(PROGRAM.replace("    # BY HAND", OWN))
    (folder / "own_groups.py").write_text(OWN_GROUPS)
    early = PROGRAM.replace("    # As in Megatron-Bridge", f"{OWN}    # As in Megatron-Bridge")
    (folder / "own_early.py").write_text(early)
    return folder


@pytest.fixture(scope="module")
def by_hand(program: Path) -> list[str]:
    """Return the ranks' final results where the program enables the seams itself."""
    done = train(program, "own.py")
    assert LINE not in done.stdout
    return trained(done)


def train(folder: Path, script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *TORCHRUN, script, *words, timeout=450, **environment)


def trained(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the final result of each rank."""
    assert done.returncode == 0, done.stdout[-6000:]
    found = dict(re.findall(r"rank (\d) weights (\w+) loss", done.stdout))
    return [found["0"], found["1"]]


@pytest.mark.timeout(1200)
def test_a_program_on_megatron_core_is_served_as_by_hand(program: Path, by_hand: list[str], tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    done = train(program, "train.py", **ATTACH, FLASH_ALLREDUCE_LOG=str(log))
    assert trained(done) == by_hand
    assert done.stdout.count(LINE) == 1, "rank 0 only"
    assert "seams, forward 4 bits, backward 8 bits, groups of 128, from 65536 bytes" in done.stdout
    found = read(log)
    assert found.steps == 4, "counted without Megatron-LM's loop"
    assert {name: (site.calls, site.quantized) for name, site in found.sites.items()} == {
        "megatron.g.forward": (4, 4),
        "megatron.linear.dgrad": (4, 4),
    }


@pytest.mark.skipif(
    "parallel_state.is_initialized" not in inspect.getsource(get_tensor_model_parallel_group_if_none),
    reason="a layer of this megatron-core asks parallel_state for its group",
)
@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_program_with_groups_of_its_own_is_served_too(program: Path, by_hand: list[str]) -> None:
    done = train(program, "own_groups.py", **ATTACH)
    assert trained(done) == by_hand
    assert done.stdout.count(LINE) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_other_names_leave_megatron_alone(program: Path, by_hand: list[str]) -> None:
    done = train(program, "train.py", **{**ATTACH, "FLASH_ALLREDUCE_ATTACH": "ddp"})
    assert trained(done) != by_hand
    assert LINE not in done.stdout


@pytest.mark.timeout(1200)
def test_warmup_follows_the_optimizer(program: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    trained(train(program, "train.py", **ATTACH, FLASH_ALLREDUCE_LOG=str(log), FLASH_ALLREDUCE_WARMUP_STEPS="3"))
    site = read(log).sites["megatron.g.forward"]
    assert (site.calls, site.quantized, dict(site.full_precision)) == (4, 1, {"warm-up": 3})


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "script", ["own.py", pytest.param("own_early.py", marks=pytest.mark.slow)], ids=["after the groups", "before"]
)
def test_the_programs_own_enable_overrides_the_environment(program: Path, by_hand: list[str], script: str) -> None:
    done = train(program, script, **{**ATTACH, "FLASH_ALLREDUCE_BITS": "8"})
    assert trained(done) == by_hand
    said = done.stdout.count("flash all-reduce: the program has enabled Megatron's seams itself")
    assert said == (1 if script == "own_early.py" else 0)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        (
            {},
            ("{'symmetric_ar_type': 'two_shot'}",),
            "symmetric_ar_type='two_shot' and FLASH_ALLREDUCE_ATTACH=megatron",
        ),
        pytest.param(
            {"FLASH_ALLREDUCE_PARAM_BACKWARD_BITS": "8"}, (), "has no effect in Megatron", marks=pytest.mark.slow
        ),
    ],
    ids=["an option that bypasses the seams", "a field without effect"],
)
def test_unsupported_models_end_the_program_with_a_sentence(
    program: Path, variables: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    done = train(program, "train.py", *words, **ATTACH, **variables)
    assert done.returncode != 0
    assert "weights" not in done.stdout, "before training"
    assert done.stdout.count(said) == 1, done.stdout
    ours = [line for line in done.stdout.splitlines() if line.startswith("flash all-reduce: ")]
    assert len([line for line in ours if said in line]) == 1
    assert "flash_allreduce_plugin/megatron" not in done.stdout, "no traceback"
    assert "has built no such model" not in done.stdout, "the reason has been printed"


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_width_without_a_pipeline_ends_the_program_after_its_first_step(program: Path) -> None:
    """Check that groups do not decide: a program may have made them for another purpose."""
    done = train(program, "train.py", **ATTACH, FLASH_ALLREDUCE_PIPELINE_BITS="8")
    assert done.returncode != 0 and "weights" not in done.stdout
    said = "flash all-reduce: FLASH_ALLREDUCE_PIPELINE_BITS=8 has no effect: there is no pipeline here; leave it out."
    assert done.stdout.count(said) == 1 and "Traceback" not in done.stdout.partition("torch/distributed")[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_one_tensor_parallel_rank_the_missing_parallelism_is_named(program: Path) -> None:
    done = train(program, "train.py", "{'tensor_model_parallel_size': 1}", **ATTACH)
    assert "tensor_model_parallel_size is 1: there is no tensor-parallel collective to quantize." in done.stdout
    assert "FLASH_ALLREDUCE_GRAD_BITS" in done.stdout


@pytest.mark.timeout(1200)
def test_a_megatron_lm_script_behaves_as_with_the_flag(tmp_path: Path) -> None:
    for name, text in STUB.items():
        file = tmp_path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    words = ("checkout/pretrain_stub.py", "--tensor-model-parallel-size", "2")
    variables = {"FLASH_ALLREDUCE_ATTACH": "all", "FLASH_ALLREDUCE_MIN_BYTES": "524288"}
    done = train(tmp_path, *words, **variables)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("seams attached, forward 8 bits") == 1
    assert LINE not in done.stdout and "has enabled Megatron's seams itself" not in done.stdout
    assert "megatron.g.forward: 1 calls, 1 quantized" in done.stdout
    # Flags have precedence over variables, and need no --flash-allreduce if the variable is set.
    done = train(tmp_path, *words, "--flash-allreduce-bits", "5", **variables)
    assert "seams attached, forward 5 bits" in done.stdout
