"""torchtitan's train.py, unmodified, with its debug model: FSDP2 alone, with replicas, with tensor parallelism, with
gradient accumulation and torch.compile, and DDP (`replicate`).

    nox -s test-programs        (torchtitan 0.2.2; 0.3.0 needs a newer torch than 2.13 and, for its attention, a GPU)

train.py imports triton and takes a GPU. On the CPU it needs the setup in ON_CPU, before and without it. Two things that
torchtitan allows do not start there, with the plugin or without it: CPU offload (it names the CPU's backend twice), and
PREMUL_SUM, FSDP2's way to a divisor of one's own, which gloo lacks; ours is served on gloo too. So only the runs
without the plugin ask torch for sums (FORCE_SUM).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from programs import BY_HAND, MOST_SENT, OFF, SETTINGS, WORDS, Run, needs, start

pytestmark = [needs("torchtitan", "torchdata", "datasets", "tokenizers", "triton"), pytest.mark.timeout(2400)]

STEPS = 6
# A sequence for each rank and pass. The learning rate is that of torchtitan's own debug configuration.
ARGUMENTS = (
    "--model.name llama3 --model.flavor debugmodel --model.hf_assets_path tokenizer --training.dataset c4_test "
    f"--training.dataset_path c4 --training.steps {STEPS} --training.local_batch_size 1 --training.seq_len 128 "
    "--optimizer.lr 8e-4 --lr_scheduler.warmup_steps 2 --debug.seed 1 --metrics.log_freq 1 "
    "--metrics.disable_color_printing --checkpoint.enable --checkpoint.export_dtype float32"
).split()
MODEL = "Transformer, 6.164 M parameters in float32"

# A rank's sitecustomize: its device is the CPU, which answers as a GPU would.
ON_CPU = """
import os, types

if "RANK" in os.environ:
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu = torch.cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(name="cpu", total_memory=1 << 34)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.current_device = lambda: 0

    if "FORCE_SUM" in os.environ:
        from torch.distributed.fsdp import FSDPModule

        theirs = FSDPModule.set_gradient_divide_factor

        def set_gradient_divide_factor(self, factor):
            self.set_force_sum_reduction_for_comms(True)
            theirs(self, factor)

        FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor
"""


@dataclass
class Mode:
    """A mode. arguments: of train.py. to: the attach line's start. kind: of hook by hand; empty where there is none."""

    ranks: int
    arguments: str
    to: str
    kind: str
    sites: tuple[str, ...] = ("fsdp.gradients",)


def fsdp2(meshes: str) -> str:
    return f"FSDP2 ({MODEL}, shards x replicas {meshes}): gradients of 8 of 8 modules in 8 bits"


REPLICAS = "--parallelism.data_parallel_replicate_degree 2"
MODES = {
    "FSDP2": Mode(2, "", fsdp2("2 x 1"), "fsdp"),
    "two passes for each step": Mode(2, "--training.global_batch_size 4", fsdp2("2 x 1"), "fsdp"),
    "torch.compile": Mode(2, "--compile.enable --compile.backend aot_eager", fsdp2("2 x 1"), "fsdp"),
    "tensor parallelism": Mode(4, "--parallelism.tensor_parallel_degree 2", fsdp2("2 x 1"), "fsdp"),
    # torch has no hook for the replicas of a mesh of two dimensions.
    "HSDP": Mode(4, REPLICAS, fsdp2("2 x 2"), "", ("fsdp.gradients", "fsdp.replicas")),
    "DDP": Mode(
        2,
        f"{REPLICAS} --parallelism.data_parallel_shard_degree 1",
        "DistributedDataParallel (ParameterList, 6.164 M parameters in float32): gradients in 8 bits",
        "ddp",
        ("ddp.gradients",),
    ),
}


def train(folder: Path, mode: Mode, variables: Mapping[str, str], by_hand: bool = False) -> Run:
    """Run `torchrun -m torchtitan.train` in a folder with a tokenizer of bytes, a text and the CPU setup."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for name in ("tokenizer", "c4", "on-cpu"):
        (folder / name).mkdir(parents=True)
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    chance = random.Random(1)
    lines = [json.dumps({"text": " ".join(chance.choices(WORDS, k=200))}) for _ in range(100)]
    (folder / "c4" / "data.json").write_text("\n".join(lines))
    (folder / "on-cpu" / "sitecustomize.py").write_text(ON_CPU + BY_HAND * by_hand)
    launcher = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(mode.ranks),
        "--local-addr",
        "127.0.0.1",
    )
    words = ("-m", *launcher, "-m", "torchtitan.train", *ARGUMENTS, *mode.arguments.split())
    return start(folder, words, dict(variables), folder / "on-cpu", timeout=600)


def losses(run: Run) -> list[float]:
    """Return the loss of every step, as the first rank to print it does."""
    of_step = dict(re.findall(r"step: +(\d+) +loss: +(\S+)", run.printed))
    return [float(of_step[str(step + 1)]) for step in range(STEPS)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Return the gathered weights of torchtitan's checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    [saved] = (run.folder / "outputs" / "checkpoint").iterdir()
    dcp_to_torch_save(saved, run.folder / "weights.pt")
    tensors: dict[str, torch.Tensor] = torch.load(run.folder / "weights.pt", weights_only=True)
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", MODES)
def test_train(tmp_path: Path, name: str) -> None:
    mode = MODES[name]
    full = train(tmp_path / "full", mode, {"FORCE_SUM": "1", **OFF})
    served = train(tmp_path / "served", mode, {"FLASH_ALLREDUCE_ATTACH": "ddp,fsdp", **SETTINGS})
    assert full.lines == [] and full.sites == {}
    [line] = served.attached
    assert line.startswith(f"flash all-reduce: attached to {mode.to}")
    assert set(served.sites) == set(mode.sites)
    for counts in served.sites.values():
        assert counts["quantized"] > 0 and counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"]
    assert losses(full)[-1] < 0.8 * losses(full)[0]
    assert losses(served) == pytest.approx(losses(full), rel=2e-3)
    assert not same(weights(served), weights(full))
    if mode.kind:
        hand = train(tmp_path / "hand", mode, {"BY_HAND": mode.kind, **OFF, **SETTINGS}, by_hand=True)
        assert served.sites == hand.sites
        assert losses(served) == losses(hand) and same(weights(served), weights(hand))


def test_parameters_too(tmp_path: Path) -> None:
    """Check parameters gathered in bfloat16 without the plugin, so that 8 bits are half the bytes."""
    mode = MODES["FSDP2"]
    full = train(tmp_path / "full", mode, {"FORCE_SUM": "1", **OFF})
    variables = {"FLASH_ALLREDUCE_ATTACH": "fsdp", "FLASH_ALLREDUCE_PARAM_BITS": "8", **SETTINGS}
    served = train(tmp_path / "served", mode, variables)
    [line] = served.attached
    assert "gradients of 8 of 8 modules in 8 bits, parameters of 8 in 8" in line
    gathered = served.sites["fsdp.parameters"]
    assert gathered["quantized"] == gathered["calls"] > 0
    assert gathered["bytes_sent"] < 2 * MOST_SENT * gathered["bytes_full_precision"]
    assert losses(served) == pytest.approx(losses(full), rel=2e-3)


def test_tensor_parallelism_too(tmp_path: Path) -> None:
    """Train with sequence parallelism, which torchtitan always has, and FSDP2 around it."""
    mode = MODES["tensor parallelism"]
    full = train(tmp_path / "full", mode, {"FORCE_SUM": "1", **OFF})
    widths = dict.fromkeys(("FLASH_ALLREDUCE_BACKWARD_BITS", "FLASH_ALLREDUCE_SEQUENCE_PARALLEL_GATHER_BITS"), "8")
    served = train(tmp_path / "served", mode, {"FLASH_ALLREDUCE_ATTACH": "fsdp,tensor_parallel", **widths, **SETTINGS})
    assert len(served.attached) == 2
    for name in ("reduce.forward", "reduce.backward", "gather.forward", "gather.backward"):
        counts = served.sites[f"tensor_parallel.{name}"]
        assert counts["quantized"] > 0.8 * counts["calls"]  # the rest: logits
        # Against bfloat16, in which torchtitan computes.
        most = 0.8 if name == "gather.forward" else 2 * MOST_SENT
        assert counts["bytes_sent"] < most * counts["bytes_full_precision"]
    assert losses(served) == pytest.approx(losses(full), rel=5e-3)
    assert not same(weights(served), weights(full))
