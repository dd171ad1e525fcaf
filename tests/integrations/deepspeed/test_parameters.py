"""Gathers of parameters at ZeRO stages 1 and 2 and with BF16_Optimizer, by their differences, on real engines."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import weight_differences
from tests.distributed import RankFailure
from tests.integrations.deepspeed import deepspeed_training as training

FOUR = {"bits": 8, "param_bits": 4, "group_size": 64, "min_bytes": 0}
BF16 = {"bf16": {"enabled": True}}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {**BF16, "zero_optimization": {"stage": 1}},
    "stage 2": {**BF16, "zero_optimization": {"stage": 2}},
    "fp32": {"zero_optimization": {"stage": 2}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": 1}},
    "offloaded": {**BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "BF16_Optimizer": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
}
STEPS = 5


def takes_fp16() -> None:
    training.deepspeed()
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True  # asks for mkldnn's; torch computes without it


def run(engines: Any, way: str, case: Any, *args: Any) -> list[Any]:
    """Run the case on two ranks. Skip where this DeepSpeed builds an optimizer that gathers nothing: refused."""
    try:
        found: list[Any] = engines(2).run(case, *args)
    except RankFailure as failure:
        if way != "BF16_Optimizer" or "param_bits=4 has no effect with FP16_UnfusedOptimizer" not in str(failure):
            raise
        pytest.skip(f"DeepSpeed {'.'.join(map(str, training.release()))} builds FP16_UnfusedOptimizer here")
    return found


def site(options: dict[str, Any]) -> str:
    return f"deepspeed.stage{options['zero_optimization']['stage']}.parameters"


def flat_and_masters(engine: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return the flat weights, this rank's parts of them, and the exact values of these parts."""
    optimizer, rank = engine.optimizer, dist.get_rank()
    if type(optimizer).__name__ == "BF16_Optimizer":
        parts = [ranks[rank] for ranks in optimizer.bf16_partitioned_groups]
        return optimizer.bf16_groups_flat, parts, optimizer.fp32_groups_flat_partition
    parts = [ranks[rank] for ranks in optimizer.parallel_partitioned_bit16_groups]
    return optimizer.bit16_groups_flat, parts, optimizer.single_partition_of_fp32_groups


def distance(engine: Any) -> list[float]:
    """Return the relative error of the held parts, and the error of their dtype alone."""
    _, parts, masters = flat_and_masters(engine)
    found = []
    for part, master in zip(parts, masters, strict=True):
        exact = master.detach().float()
        for held in (part, exact.to(part.dtype)):
            found.append(float((held.float() - exact).norm() / exact.norm()))
    return found


def same_bits(engine: Any) -> bool:
    flats, *_ = flat_and_masters(engine)
    for weights in flats:
        ranks = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, weights.contiguous())
        if not all(torch.equal(ranks[0], other) for other in ranks):
            return False
    return True


def trains(options: dict[str, Any]) -> dict[str, Any]:
    takes_fp16()
    plain = training.train(options, {**FOUR, "param_bits": "full"}, STEPS)
    fap.reset_stats()
    built = training.engine(options, FOUR)
    before = training.weights(built)
    losses, alike = [], []
    for number in range(STEPS):
        losses.append(training.step(built, number))
        alike.append(same_bits(built))
    result = {
        "plain": plain["losses"],
        "losses": losses,
        "alike": all(alike),
        "site": fap.stats()["sites"][site(options)],
        "distance": distance(built),
        "covered": fap.deepspeed.report()[site(options)],
        "moved": (training.weights(built) - before, plain["moved"]),
        "numel": sum(weights.numel() for weights in flat_and_masters(built)[0]),
    }
    built.destroy()
    return result


@pytest.mark.parametrize("way", WAYS)
def test_training(engines: Any, way: str) -> None:
    options = WAYS[way]
    for found in run(engines, way, trains, options):
        calls = found["site"]
        assert calls["full_precision"] == {weight_differences.FIRST: 1} and calls["quantized"] == STEPS - 1, calls
        assert found["alike"], "replicas hold the same bits after every step"
        assert found["losses"] == pytest.approx(found["plain"], rel=0.01)
        held, own = found["distance"]
        assert held < (2 * own if way not in ("fp32", "fp16") else 4e-3), (
            "little more than the dtype of the weights itself loses, at steps as large as these"
        )
        ours, theirs = found["moved"]
        assert float((ours - theirs).norm() / theirs.norm()) < 0.1
        assert found["covered"]["in_place"] and found["covered"]["quantized"] == STEPS - 1
        itemsize = 4 if way == "fp32" else 2
        assert calls["bytes_full_precision"] == STEPS * found["numel"] // 2 * itemsize
        assert calls["bytes_sent"] < calls["bytes_full_precision"] * (0.45 if way != "fp32" else 0.35)


def three_ranks() -> bool:
    built = training.engine(WAYS["stage 2"], {**FOUR, "param_bits": 2})
    for number in range(3):
        training.step(built, number)
    found = same_bits(built)
    built.destroy()
    return found


def test_three_ranks_at_two_bits(engines: Any) -> None:
    assert engines(3).run(three_ranks) == [True] * 3


def left_alone(options: dict[str, Any]) -> tuple[bool, list[Any], str]:
    from flash_allreduce_plugin.integrations.deepspeed import engine as ours

    built = training.engine(options, {"bits": 8, "min_bytes": 0})
    served = getattr(built, ours._BOUND)[0].parameters is not None
    fap.reset_stats()
    training.step(built, 0)
    counted = [one["full_precision"] for name, one in fap.stats()["sites"].items() if "parameters" in name]
    optimizer = type(built.optimizer).__name__
    built.destroy()
    return served, counted, optimizer


@pytest.mark.parametrize("way", ["stage 2", "BF16_Optimizer"])
def test_gathers_are_deepspeeds_own_and_counted_unless_asked_for(engines: Any, way: str) -> None:
    for served, counted, optimizer in engines(2).run(left_alone, WAYS[way]):
        if optimizer == "FP16_UnfusedOptimizer":
            pytest.skip(
                f"DeepSpeed {'.'.join(map(str, training.release()))} builds {optimizer} here, which gathers nothing"
            )
        assert not served and counted == [{"param_bits is full": 1}]


def is_changed(what: str) -> dict[str, Any]:
    options = WAYS["stage 2"]
    built = training.engine(options, FOUR)
    for number in range(3):
        training.step(built, number)
    with torch.no_grad():
        first = next(iter(built.module.parameters()))
        if what == "averaged":  # as a moving average is swapped in, on every rank
            for parameter in built.module.parameters():
                parameter.data.mul_(0.5)
        elif what == "one rank" and dist.get_rank() == 1:
            first.data[0] += 1
        elif what == "load_state_dict":
            built.module.load_state_dict({name: value * 2 for name, value in built.module.state_dict().items()})
    fap.reset_stats()
    training.step(built, 3)
    exact, *_ = distance(built)
    result = {"why": fap.stats()["sites"][site(options)]["full_precision"], "alike": same_bits(built), "far": exact}
    training.step(built, 4)
    result["again"] = fap.stats()["sites"][site(options)]["quantized"]
    built.destroy()
    return result


@pytest.mark.parametrize("what", ["averaged", "one rank", "load_state_dict"])
def test_changed_parameters_are_gathered_whole_once(engines: Any, what: str) -> None:
    for found in engines(2).run(is_changed, what):
        assert found["why"] == {weight_differences.CHANGED: 1} and found["alike"] and found["again"] == 1
        assert found["far"] < 2e-3, "the exact values count"


def skips() -> dict[str, Any]:
    """Check that a step that the loss scaler skips gathers nothing, and that the next step gathers."""
    takes_fp16()
    fap.reset_stats()
    options = {"fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 2}}
    built = training.engine(options, FOUR)
    for number in range(2):
        training.step(built, number)
    before = [weights.clone() for weights in flat_and_masters(built)[0]]
    loss = built(training.batch(built, 7)).float().sum() * float("inf")
    built.backward(loss)
    built.step()
    same = all(torch.equal(a, b) for a, b in zip(before, flat_and_masters(built)[0], strict=True))
    training.step(built, 3)
    result = {"skipped": built.skipped_steps, "same": same, **fap.stats()["sites"][site(options)]}
    built.destroy()
    return result


def test_a_skipped_step(engines: Any) -> None:
    for found in engines(2).run(skips):
        assert found["skipped"] == 1 and found["same"], found
        assert found["full_precision"] == {weight_differences.FIRST: 1} and found["quantized"] == 2


def resumes(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    built = training.engine(options, FOUR)
    for number in range(3):
        training.step(built, number)
    built.save_checkpoint(folder, tag="three")
    for number in range(3, 6):
        training.step(built, number)
    through = training.weights(built)
    built.destroy()
    built = training.engine(options, FOUR)
    built.load_checkpoint(folder, tag="three")
    fap.reset_stats()
    for number in range(3, 6):
        training.step(built, number)
    result = {"same": torch.equal(training.weights(built), through), **fap.stats()["sites"][site(options)]}
    built.destroy()
    return result


@pytest.mark.parametrize("way", ["stage 1", "stage 2", "BF16_Optimizer", "fp32"])
def test_a_resumed_run_continues_bit_for_bit(engines: Any, way: str, tmp_path: Any) -> None:
    for found in run(engines, way, resumes, str(tmp_path), WAYS[way]):
        assert found["same"] and found["quantized"] == 3 and not found["full_precision"], found


class Adapted(nn.Module):
    """A frozen layer with adapters, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.down, self.up = nn.Linear(48, 48), nn.Linear(48, 8, bias=False), nn.Linear(8, 48, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def beside_an_empty_group(stage: int, flash: dict[str, Any] | None, folder: str) -> tuple[list[float], bool]:
    """Return the losses, and True if a run resumed in the middle ends with the same bits."""

    def build() -> Any:
        net = Adapted()
        groups = [{"params": [one for one in net.parameters() if one.requires_grad]}, {"params": []}]
        options = training.configuration({**BF16, "zero_optimization": {"stage": stage}}, flash)
        built, *_ = training.deepspeed().initialize(
            model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=options
        )
        return built

    built = build()
    losses = [training.step(built, number) for number in range(3)]
    built.save_checkpoint(folder, tag="three")
    losses += [training.step(built, number) for number in range(3, 6)]
    through = training.weights(built)
    built.destroy()
    built = build()
    built.load_checkpoint(folder, tag="three")
    for number in range(3, 6):
        training.step(built, number)
    same = torch.equal(training.weights(built), through)
    built.destroy()
    return losses, same


@training.NEWEST
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_with_an_empty_group(engines: Any, stage: int, tmp_path: Any) -> None:
    plain = engines(2).run(beside_an_empty_group, stage, None, str(tmp_path / "plain"))
    four = engines(2).run(beside_an_empty_group, stage, FOUR, str(tmp_path / "four"))
    for (losses, resumed), (theirs, theirs_resumed) in zip(four, plain, strict=True):
        assert resumed and theirs_resumed, "a resumed run goes on bit for bit"
        assert losses == pytest.approx(theirs, rel=0.01 if stage < 3 else 0.05)  # values of 4 bits at stage 3


def loads_another(folder: str) -> dict[str, int]:
    """Load the parameters alone of a checkpoint: whole values are sent once."""
    options = WAYS["stage 2"]
    built = training.engine(options, FOUR)
    for number in range(3):
        training.step(built, number)
    built.save_checkpoint(folder, tag="a")
    training.step(built, 3)
    built.load_checkpoint(folder, tag="a", load_module_only=True)
    fap.reset_stats()
    training.step(built, 4)
    reasons: dict[str, int] = dict(fap.stats()["sites"][site(options)]["full_precision"])
    built.destroy()
    return reasons


def test_a_loaded_module_is_gathered_whole_once(engines: Any, tmp_path: Any) -> None:
    assert engines(2).run(loads_another, str(tmp_path)) == [{weight_differences.FIRST: 1}] * 2


def refused(options: dict[str, Any]) -> str:
    from deepspeed.runtime.config import DeepSpeedConfigError

    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: unraisable.append(what.exc_type)
    try:
        with pytest.raises(DeepSpeedConfigError) as caught:
            training.engine(options, FOUR)
        message = str(caught.value)
        del caught
        gc.collect()  # the engine that was never built
    finally:
        sys.unraisablehook = hook
    assert RecursionError not in unraisable
    return message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "param_bits=4 has no effect at zero_optimization.stage 0"),
        (BF16, "param_bits=4 has no effect with "),
        (
            {**BF16, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow and flash_allreduce.param_bits exclude each other",
        ),
    ],
)
def test_refused_where_nothing_is_gathered(engines: Any, options: dict[str, Any], said: str) -> None:
    assert all(said in message for message in engines(2).run(refused, options))


def undone() -> bool:
    built = training.engine(WAYS["stage 2"], FOUR)
    training.step(built, 0)
    fap.deepspeed.disable()
    fap.reset_stats()
    training.step(built, 1)
    clean = "step" not in vars(built.optimizer) and not fap.stats()["sites"]
    _, parts, masters = flat_and_masters(built)
    exact = all(torch.equal(part, master.to(part.dtype)) for part, master in zip(parts, masters, strict=True))
    built.destroy()
    return clean and exact


def test_disable_gives_the_gather_back(engines: Any) -> None:
    assert engines(2).run(undone) == [True] * 2


def reference(stage: int, extra: dict[str, Any], flash: dict[str, Any]) -> tuple[list[str], bool, dict[str, Any]]:
    """Train TRL's prepare_deepspeed: a model alone, and a copy of the policy's JSON, at stage 0 unless it is 3.

    Return our lines, True if the model computes exactly, and the counters.
    """
    config = copy.deepcopy(training.configuration({"zero_optimization": {"stage": stage}, **extra}, flash))
    if stage != 3:
        config["zero_optimization"]["stage"] = 0
    net, text = training.model(), io.StringIO()
    theirs, deepspeed = copy.deepcopy(net), training.deepspeed()
    with contextlib.redirect_stdout(text):
        built, *_ = deepspeed.initialize(model=net, config=config)
    built.eval()
    fap.reset_stats()
    with torch.no_grad():
        x = training.batch(built, 0)
        exact = torch.equal(built(x), theirs.to(x.dtype)(x))
    sites = fap.stats()["sites"]
    built.destroy()
    return [line for line in text.getvalue().splitlines() if line.startswith("flash")], exact, sites


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
GATHERS_NOTHING = "at zero_optimization.stage 0, which gathers no parameters)."


@training.NEWEST
@pytest.mark.parametrize(
    ("extra", "optimizer"),
    [({}, "without an optimizer"), (ADAM, "with AdamW"), (BF16, "with BF16_Optimizer"), ({**BF16, **ADAM}, "with ")],
    ids=["alone", "optimizer", "bf16", "both"],
)
def test_a_reference_model_of_the_policys_json(engines: Any, extra: dict[str, Any], optimizer: str) -> None:
    (lines, exact, sites), (others, *_) = engines(2).run(reference, 2, extra, FOUR)
    assert others == [] and exact and not sites
    left_out, attached = lines
    assert left_out.startswith("flash all-reduce: DeepSpeedEngine, ZeRO stage 0, was given nothing to train (an opt")
    assert f"It leaves out param_bits=4 ({optimizer}" in left_out and left_out.endswith(GATHERS_NOTHING)
    assert f"attached to DeepSpeedEngine {optimizer}" in attached and "parameters" not in attached


@training.NEWEST
def test_a_reference_model_at_stage_3_gathers_as_the_policy_does(engines: Any) -> None:
    (lines, exact, sites), _ = engines(2).run(reference, 3, {}, {**FOUR, "param_bits": 8})
    assert "ZeRO stage 3: gradients, if it reduces any, in 8 bits, parameters in 8" in lines[0] and len(lines) == 1
    assert not exact and sites["deepspeed.stage3.parameters"]["quantized"] > 0


@training.NEWEST
def test_a_preset_leaves_a_reference_model_exact(engines: Any) -> None:
    (lines, exact, sites), _ = engines(2).run(reference, 3, {}, {"preset": "int8", "min_bytes": 0})
    assert exact and len(lines) == 1 and "parameters" not in lines[0]
    assert sites["deepspeed.stage3.parameters"]["quantized"] == 0


@training.NEWEST
def test_a_reference_model_leaves_unused_widths_out(engines: Any) -> None:
    widths = {"param_backward_bits": 4, "pipeline_bits": 8, "pipeline_backward_bits": 6, "attention_bits": 8}
    widths |= {"expert_bits": 8, "expert_combine_bits": 4, "backward_bits": 8}
    (lines, exact, _), _ = engines(2).run(reference, 2, {}, {**FOUR, **widths})
    assert exact and len(lines) == 2
    assert all(f"{key}={bits} (" in lines[0] for key, bits in widths.items()), lines[0]
    assert lines[1].endswith(
        "ZeRO stage 0: gradients, if it reduces any, in 8 bits, groups of 64, buckets from 0 bytes"
    )
