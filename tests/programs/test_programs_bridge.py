"""Megatron-Bridge's pretrain with its recipe gpt3_175b_pretrain_config, made small (bridge_pretrain.py), on the CPU
(bridge_shim.py): FLASH_ALLREDUCE_ATTACH=megatron in eight layouts against the same program without the plugin.

    nox -s test-bridge        (Megatron-Bridge 0.3.1, which needs a transformers below 5)
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from programs import OFF, ROOT, Run, start

INSTALLED = bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.bridge"))
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="not installed: megatron-bridge: nox -s test-bridge"),
    pytest.mark.timeout(2400),
]

HERE = Path(__file__).parent
ITERATIONS = 12
ATTACH = {
    "FLASH_ALLREDUCE_ATTACH": "megatron",
    "FLASH_ALLREDUCE_PRESET": "int8",
    "FLASH_ALLREDUCE_MIN_BYTES": "16384",
}
# 8 bits and 4 bytes of metadata for each group of 128, against bfloat16; ends of buckets are a little more.
MOST_SENT = 0.55

GRADIENTS, PARAMETERS = "data_parallel.gradients", "data_parallel.parameters"
TENSOR = ("g.forward", "linear.dgrad")
SEQUENCE = tuple(
    f"sequence_parallel.{name}"
    for name in ("g.forward", "g.backward", "linear.dgrad", "linear.gather", "linear.regather")
)
TP, SP, PP = "model.tensor_model_parallel_size", "model.sequence_parallel", "model.pipeline_model_parallel_size"
EXPERTS = {
    "model.num_moe_experts": 4,
    "model.expert_model_parallel_size": 2,
    "model.moe_ffn_hidden_size": 256,
    "model.moe_router_topk": 2,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_grouped_gemm": False,
}
NO_OPTIMIZER_SHARDS = {
    "ddp.use_distributed_optimizer": False,
    "ddp.overlap_param_gather": False,
    "optimizer.use_distributed_optimizer": False,
}
OWN_GROUPS = {
    "dist.use_decentralized_pg": True,
    "dist.use_gloo_process_groups": False,
    "model.cross_entropy_fusion_impl": "native",
}


@dataclass
class Layout:
    """changes: of the recipe's fields. sites: of megatron., which quantize. words: of bridge_pretrain.py."""

    ranks: int
    changes: dict[str, Any]
    sites: tuple[str, ...]
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


LAYOUTS = {
    "DP 2": Layout(2, NO_OPTIMIZER_SHARDS, (GRADIENTS,)),
    "distributed optimizer": Layout(2, {}, (GRADIENTS, PARAMETERS)),
    "TP 2 with sequence parallelism": Layout(2, {TP: 2, SP: True}, SEQUENCE),
    # After groups of one rank, in which Bridge converts weights: a width of pipelines is judged by the model.
    "PP 2": Layout(2, {PP: 2}, ("pipeline.forward",), ("--convert",), {"FLASH_ALLREDUCE_PIPELINE_BITS": "7"}),
    "EP 2": Layout(2, EXPERTS, (GRADIENTS, PARAMETERS, "expert.all_to_all.dispatch", "expert.all_to_all.combine")),
    "TP 2 x DP 2": Layout(4, {TP: 2}, (*TENSOR, GRADIENTS, PARAMETERS)),
    "groups of Bridge's own": Layout(4, {TP: 2, **OWN_GROUPS}, (*TENSOR, GRADIENTS, PARAMETERS)),
    "groups of Bridge's own, after others": Layout(
        4, {TP: 2, **OWN_GROUPS}, (*TENSOR, GRADIENTS, PARAMETERS), ("--convert",)
    ),
}


def train(
    folder: Path,
    layout: Layout,
    variables: Mapping[str, str],
    *words: str,
    iterations: int = ITERATIONS,
    **changes: Any,
) -> Run:
    """Run bridge_pretrain.py under torchrun in `folder`."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site)
    shutil.copy(HERE / "bridge_shim.py", site / "sitecustomize.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    program = (f"--nproc-per-node={layout.ranks}", str(HERE / "bridge_pretrain.py"))
    given = (json.dumps({**layout.changes, **changes}), "--iterations", str(iterations), *layout.words)
    settings = {"TORCHDYNAMO_DISABLE": "1", **variables}
    return start(folder, (*torchrun, *program, *given), settings, site, timeout=900)


def ranks(run: Run) -> list[dict[str, Any]]:
    """The file of each rank."""
    files = sorted(run.folder.glob("rank-*.json"))
    return [json.loads(file.read_text()) for file in files]


def losses(run: Run) -> list[float]:
    """Of the last pipeline stage."""
    return next(rank["losses"] for rank in ranks(run) if rank["losses"])


def different_copies(run: Run) -> tuple[int, list[str]]:
    """Compare every parameter that two ranks have copies of; return how many, and the names of those that differ."""
    everyone, compared, found = ranks(run), 0, []
    for number, rank in enumerate(everyone):
        for group in ("dp", "tp"):
            for other in (one for one in rank[group] if one > number):
                theirs = everyone[other]["parameters"]
                for name, (bits, split, expert) in rank["parameters"].items():
                    if name in theirs and not (split if group == "tp" else expert):
                        compared += 1
                        found += [name] * (bits != theirs[name][0])
    return compared, sorted(set(found))


def equal_parts(run: Run) -> list[str]:
    """Return the names of split matrices that have the same bits on two tensor-parallel ranks."""
    everyone = ranks(run)
    return [
        name
        for number, rank in enumerate(everyone)
        for other in (one for one in rank["tp"] if one > number)
        for name, (bits, split, _) in rank["parameters"].items()
        if split and name.endswith("weight") and everyone[other]["parameters"][name][0] == bits
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_train(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    full = train(tmp_path / "full", layout, OFF)
    served = train(tmp_path / "served", layout, {**ATTACH, **layout.variables})
    print(f"{name}: losses {losses(full)[0]:.4f} to {losses(full)[-1]:.4f}; quantized {losses(served)[-1]:.4f}")
    for site, counts in served.sites.items():
        print(f"  {site}: {dict(counts)}")
    assert full.lines == [] and full.sites == {}
    [line] = served.attached
    assert line.startswith("flash all-reduce: attached to megatron-core, ") and "preset int8" in line
    assert not [said for said in served.lines if "--flash-allreduce" in said or "FlashConfig(" in said]
    for site in layout.sites:
        counts = served.sites[f"megatron.{site}"]
        # A bucket has a second call, for copies, and the first gather sends values.
        least = ITERATIONS - 1 if site in (GRADIENTS, PARAMETERS) else counts["calls"]
        assert counts["quantized"] >= least > 0, site
        assert counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"], site
    assert len(losses(full)) == ITERATIONS and losses(full)[-1] < 0.9 * losses(full)[0]
    assert losses(served) == pytest.approx(losses(full), rel=5e-3)
    assert losses(served) != losses(full)
    for run in (full, served):
        compared, different = different_copies(run)
        assert compared > 0 or name in ("TP 2 with sequence parallelism", "PP 2")
        assert different == [] and equal_parts(run) == []


@pytest.mark.parametrize("saves", [True, False], ids=["AUTOSAVE", "nothing"])
def test_resume(tmp_path: Path, saves: bool) -> None:
    """With AUTOSAVE a resumed run goes on bit for bit; without, rank 0 says what is lost."""
    # megatron-core 0.16.1 loads no state of torch's Adam into the distributed optimizer.
    layout = LAYOUTS["DP 2"]
    variables = {**ATTACH, "FLASH_ALLREDUCE_ERROR_FEEDBACK": "true", "FLASH_ALLREDUCE_WARMUP_STEPS": "2"}
    if saves:
        variables["FLASH_ALLREDUCE_AUTOSAVE"] = f"{tmp_path / 'flash'}:4"
    folder = str(tmp_path / "checkpoints")
    changes = {"checkpoint.save": folder, "checkpoint.save_interval": 4}
    whole = train(tmp_path / "whole", layout, variables, iterations=8, **changes)
    changes = {"checkpoint.load": folder, "checkpoint.ckpt_step": 4}
    again = train(tmp_path / "again", layout, variables, iterations=8, **changes)
    assert len(losses(again)) == 4
    same = [rank["parameters"] for rank in ranks(again)] == [rank["parameters"] for rank in ranks(whole)]
    assert same is saves and (losses(again) == losses(whole)[4:]) is saves
    lost = [line for line in again.lines if "the optimizer resumes from step 4" in line]
    if saves:
        assert any("resumes from the state of step 4" in line for line in again.lines) and not lost
    else:
        [line] = lost
        assert "warmup_steps=2 counts from 0; residuals of error_feedback begin with zeros" in line
