"""Engines of other kinds, several engines in one process, and full removal."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import (
    EIGHT,
    NEWEST,
    OFF,
    batch,
    configuration,
    deepspeed,
    engine,
    release,
    sparse,
    step,
    weights,
)
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.deepspeed import engine_seams
from flash_allreduce_plugin.integrations.deepspeed.engine import bind
from flash_allreduce_plugin.telemetry import muon as muon_notice
from tests.distributed import Ranks


def two_engines() -> dict[str, Any]:
    """Train three engines alternately: one at 8 bits, one at 4, one left alone."""
    fap.reset_stats()
    zero = {"zero_optimization": {"stage": 1}}
    eight, four = engine(zero, EIGHT), engine({"zero_optimization": {"stage": 3}}, {**EIGHT, "bits": 4})
    alone = engine(zero, None)
    for number in range(2):
        for built in (eight, alone, four):
            step(built, number)
    return {**fap.stats(), "report": fap.deepspeed.report()}


def test_two_configurations_in_one_process(engines: Callable[[int], Ranks]) -> None:
    for seen in engines(2).run(two_engines):
        first, second = (seen["sites"][f"deepspeed.stage{stage}.gradients"] for stage in (1, 3))
        assert first["quantized"] == first["calls"] == second["quantized"] == second["calls"] == 2
        # DeepSpeed's own at stage 1 is an all-reduce.
        assert first["bytes_sent"] / first["bytes_full_precision"] == pytest.approx(8.25 / 64, rel=0.02)
        assert second["bytes_sent"] / second["bytes_full_precision"] == pytest.approx(4.25 / 32, rel=0.02)
        entry = seen["report"]["deepspeed.stage1.gradients"]
        assert entry["in_place"] and entry["calls"] == 2
        assert "deepspeed.stage1.gradients: 2 calls, 2 quantized" in str(seen["report"])
        assert "deepspeed.stage2.gradients" in str(seen["report"]).split("not in place: ")[1]


def different() -> str:
    """Run one rank in full precision, which never reaches the plugin's collectives."""
    # 7 bits: a group does not compare settings again after it has agreed on them.
    built = engine({}, {**EIGHT, "bits": 7, "enabled": dist.get_rank() == 0})
    with pytest.raises(fap.MismatchError) as refused:
        step(built, 0)
    return str(refused.value)


def test_ranks_that_differ_do_not_wait_for_each_other(engines: Callable[[int], Ranks]) -> None:
    for message in engines(2).run(different):
        assert "enabled" in message


def off_again(stage: int) -> None:
    package = deepspeed()
    served = package.DeepSpeedEngine.__init__
    fap.deepspeed.disable()
    theirs = package.DeepSpeedEngine.__init__
    assert theirs is not served and not fap.deepspeed.is_enabled()
    left_alone = engine_without_attach({"zero_optimization": {"stage": stage}}, EIGHT)

    fap.deepspeed.enable(fap.FlashConfig(bits=8, min_bytes=0))
    assert fap.deepspeed.is_enabled() and package.DeepSpeedEngine.__init__ is not theirs
    built = engine_without_attach({"zero_optimization": {"stage": stage}}, None)
    assert replaced(built) and not replaced(left_alone)
    with_section = engine_without_attach({"zero_optimization": {"stage": stage}}, {**EIGHT, "bits": 4})
    assert vars(with_section)["_flash_allreduce"][0].config.bits == 4  # a section overrides enable
    fap.reset_stats()
    step(built, 0)
    assert fap.stats()["quantized"] == 1
    assert set(fap.stats()["full_precision"]) == ({"param_bits is full"} if stage else set())

    fap.deepspeed.disable()
    assert package.DeepSpeedEngine.__init__ is theirs
    assert not replaced(built)
    fap.reset_stats()
    step(built, 1)
    step(left_alone, 1)
    assert fap.stats()["calls"] == 0
    fap.deepspeed.disable()  # twice is once
    deepspeed()


def replaced(built: Any) -> set[str]:
    """Return our functions on an engine and its optimizer."""
    names = {place.attribute.split(".")[1] for place in engine_seams.places(None)}
    return names & {*vars(built), *vars(built.optimizer)}


def engine_without_attach(options: dict[str, Any], flash: dict[str, Any] | None) -> Any:
    import deepspeed as package
    from deepspeed_training import model

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    built, *_ = package.initialize(model=net, optimizer=optimizer, config=configuration(options, flash))
    return built


@pytest.mark.parametrize("stage", range(4))
def test_enable_serves_engines_without_a_section_and_disable_takes_it_all_off(
    engines: Callable[[int], Ranks], stage: int
) -> None:
    engines(2).run(off_again, stage)


def an_engine_that_is_gone() -> None:
    deepspeed()

    class Engine:
        global_steps = skipped_steps = 0
        module = nn.Module()
        sequence_parallel_size = 1

        def zero_optimization_stage(self) -> int:
            return 2

    built = Engine()
    bind(built, fap.FlashConfig())
    gone = weakref.ref(built)
    del built
    gc.collect()
    assert gone() is None


def test_engines_are_not_kept_alive(engines: Callable[[int], Ranks]) -> None:
    engines(2).run(an_engine_that_is_gone)


def test_enable_needs_a_configuration() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.deepspeed.enable({"bits": 4})  # type: ignore[arg-type]


@contextmanager
def other_parameters(function_name: str) -> Iterator[None]:
    """Patch DeepSpeed so that its stage 1 and 2 optimizer has another signature."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    theirs = getattr(DeepSpeedZeroOptimizer, function_name)

    def changed(self: Any, bucket: Any, communicator: Any) -> None: ...

    setattr(DeepSpeedZeroOptimizer, function_name, changed)
    try:
        yield
    finally:
        setattr(DeepSpeedZeroOptimizer, function_name, theirs)


def unknown_version() -> str:
    package = deepspeed()
    fap.deepspeed.disable()
    theirs = package.DeepSpeedEngine.__init__
    with other_parameters("allreduce_bucket"):
        with pytest.raises(fap.PatchError) as enabled:
            fap.deepspeed.enable()
        assert package.DeepSpeedEngine.__init__ is theirs and not fap.deepspeed.is_enabled()
        with pytest.raises(fap.PatchError) as built:
            engine({}, EIGHT)  # a section is not ignored
        engine({}, None)
    assert str(enabled.value) == str(built.value)
    return str(built.value)


def test_another_version_is_refused_and_nothing_changed(engines: Callable[[int], Ranks]) -> None:
    for message in engines(2).run(unknown_version):
        assert "DeepSpeedZeroOptimizer.allreduce_bucket: expected the parameters (self, bucket, comm" in message
        assert "Supported: deepspeed 0.17.6 to 0.19 (installed: " in message


def pipeline(flash: dict[str, Any] | None, dtype: dict[str, Any]) -> dict[str, Any]:
    package = deepspeed()
    from deepspeed.pipe import PipelineModule

    fap.reset_stats()
    torch.manual_seed(5)
    net = PipelineModule(
        layers=[nn.Linear(48, 97), nn.Tanh(), nn.Linear(97, 48)],
        num_stages=1,
        loss_fn=lambda out, target: (out - target).float().square().mean(),
    )
    options = {"gradient_accumulation_steps": 2, **dtype}
    built, *_ = package.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), config=configuration(options, flash)
    )
    before = weights(built)
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        inputs = [torch.randn(8, 48, generator=generator).to(before_dtype(built)) for _ in range(2)]
        losses.append(float(built.train_batch(iter([(x, x.flip(1)) for x in inputs]))))
    kinds = {"kind": type(built).__name__, "optimizer": type(built.optimizer).__name__}
    return {"losses": losses, "moved": weights(built) - before, **kinds, **fap.stats()}


def before_dtype(built: Any) -> torch.dtype:
    return next(built.module.parameters()).dtype


@pytest.mark.parametrize("dtype", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_the_pipeline_engine(engines: Callable[[int], Ranks], dtype: dict[str, Any]) -> None:
    plain, eight = (engines(2).run(pipeline, flash, dtype) for flash in (None, EIGHT))
    for rank in range(2):
        assert eight[rank]["kind"] == "PipelineEngine" and plain[rank]["calls"] == 0
        assert eight[rank]["quantized"] == 3  # once a step
        gathered = {"deepspeed.stage0.parameters"} if eight[rank]["optimizer"] == "BF16_Optimizer" else set()
        assert set(eight[rank]["sites"]) == {"deepspeed.stage0.gradients"} | gathered
        error = (eight[rank]["moved"] - plain[rank]["moved"]).norm() / plain[rank]["moved"].norm()
        assert 0 < error < (0.1 if dtype else 0.01), error
        assert torch.equal(eight[rank]["moved"], eight[0]["moved"])


class Experts(nn.Module):
    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(9)
        self.dense = nn.Linear(32, 32)
        expert = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
        self.experts = MoE(32, expert, num_experts=2, ep_size=ep_size, k=1, capacity_factor=2.0, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.dense(x))[0]  # type: ignore[no-any-return]


def experts(zero: dict[str, Any], flash: dict[str, Any] | None) -> dict[str, Any]:
    package = deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    fap.reset_stats()
    net = Experts(ep_size=2)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "parameters"}
    )
    optimizer = torch.optim.SGD(groups, lr=0.5)
    options = {"zero_optimization": {"reduce_scatter": True, **zero}}
    built, *_ = package.initialize(model=net, optimizer=optimizer, config=configuration(options, flash))
    before = weights(built)
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(16, 32, generator=generator)
        target = x.flip(1) if dist.get_rank() else x.roll(5, 1)  # a part that is not reduced has another direction
        built.backward((built(x) - target).square().mean())
        built.step()
    return {"weights": weights(built), "moved": weights(built) - before, **fap.stats()}


@pytest.mark.parametrize(
    "zero",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "use_multi_rank_bucket_allreduce": False}],
    ids=["0", "1", "2", "2-one-owner"],
)
def test_experts_have_a_group_and_a_divisor_of_their_own(engines: Callable[[int], Ranks], zero: dict[str, Any]) -> None:
    """Check four ranks with experts on two: gradients are summed over two ranks and divided by four."""
    plain, off, eight = (engines(4).run(experts, zero, flash) for flash in (None, OFF, EIGHT))
    for rank in range(4):
        assert torch.equal(off[rank]["weights"], plain[rank]["weights"])
        assert off[rank]["full_precision"] == {"disabled by configuration": eight[rank]["calls"]}
        sites = {name: site for name, site in eight[rank]["sites"].items() if site["quantized"]}
        assert set(sites) == {f"deepspeed.stage{zero['stage']}.gradients", "deepspeed.experts"}
        for site in sites.values():
            assert site["quantized"] == site["calls"] > 0
        error = (eight[rank]["moved"] - plain[rank]["moved"]).norm() / plain[rank]["moved"].norm()
        assert 0 < error < 0.01, error
        assert torch.equal(eight[rank]["weights"], eight[rank % 2]["weights"])


def test_a_slice_with_several_owners_is_for_everybody() -> None:
    """Check matrices of Muon. Releases 0.17 and 0.18 give an owner as a rank's number."""
    bucket = [torch.zeros(3), torch.zeros(2, 2)]
    assert engine_seams._slices(bucket, [1, frozenset({0})]) == [(1, 3), (0, 4)]
    assert engine_seams._slices(bucket, [frozenset({1}), frozenset({0, 1})]) is None


def muon(zero: dict[str, Any]) -> dict[str, Any]:
    """Return a Muon step's changes of matrices, the middle one of two owners: DeepSpeed's own, and at 8 bits."""
    with mock.patch.object(torch._dynamo.config, "disable", True):  # to compile Muon takes half a minute
        return by_muon(zero)


def by_muon(zero: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for name, flash in (("plain", None), ("eight", EIGHT)):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 48, bias=False))
        options = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}, "zero_optimization": zero}
        given = {"model": net, "model_parameters": list(net.parameters()), "config": configuration(options, flash)}
        built, *_ = deepspeed().initialize(**given)
        fap.reset_stats()
        before = weights(built)
        x = batch(built, 0, rows=256)  # of full rank: nothing else is amplified
        target = x.flip(1) if dist.get_rank() else x.roll(5, 1)  # a part that is not reduced has another direction
        built.backward((built(x) - target).square().mean())
        built.step()
        moved[name] = weights(built) - before
        built.destroy()
    return {**moved, **fap.stats()}


@pytest.mark.parametrize(("stage", "reduce_scatter"), [(1, True), (2, False)])
def test_a_matrix_of_muon_with_two_owners(engines: Callable[[int], Ranks], stage: int, reduce_scatter: bool) -> None:
    if release() < (0, 19, 8):
        pytest.skip("DeepSpeed before 0.19.8 gives Muon matrices that are reduced in part")
    outcomes = engines(2).run(muon, {"stage": stage, "reduce_scatter": reduce_scatter})
    for seen in outcomes:
        counted = seen["sites"][f"deepspeed.stage{stage}.gradients"]
        assert counted["quantized"] == counted["calls"] == 1
        assert torch.equal(seen["eight"], outcomes[0]["eight"])
        error = (seen["eight"] - seen["plain"]).norm() / seen["plain"].norm()
        assert 0 < error < 0.25, error  # Muon scales small singular values up, with their error; not reduced: 0.54


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def lines_of_muon(bits: int) -> list[str]:
    """Return the printed lines about the optimizer."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), mock.patch.object(muon_notice, "_said", False):
        train_by_muon({"stage": 2}, {"bits": bits, "min_bytes": 0})
    return [line for line in text.getvalue().splitlines() if "Muon" in line]


def test_muon_has_a_line_below_8_bits(engines: Callable[[int], Ranks]) -> None:
    assert engines(2).run(lines_of_muon, 8) == [[], []]
    [line], none = engines(2).run(lines_of_muon, 4)
    assert "MuonWithAuxAdam steps on gradients of 4 bits (deepspeed.stage2.gradients), " in line and none == []


def train_by_muon(zero: dict[str, Any], flash: dict[str, Any] | None) -> dict[str, Any]:
    """Train twelve steps: a bias, which Adam moves, and matrices that the ranks' partitions cut."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh())
    net.append(nn.Linear(64, 48))
    options = {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "torch_adam": True}},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # from stage 1 on DeepSpeed would clip the orthogonalized update
    }
    fap.reset_stats()
    losses = []
    with mock.patch.object(torch._dynamo.config, "disable", True):  # to compile Muon takes half a minute
        given = {"model": net, "model_parameters": list(net.parameters()), "config": configuration(options, flash)}
        built, *_ = deepspeed().initialize(**given)
        for number in range(12):
            x = batch(built, number, rows=64)
            loss = (built(x) - x.flip(1)).square().mean()
            built.backward(loss)
            built.step()
            losses.append(float(loss.detach()))
        found = {"losses": losses, **fap.stats(), "weights": weights(built)}
        built.destroy()
    return found


@pytest.mark.parametrize(
    "zero",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, **OFFLOAD}, {"stage": 3, "reduce_scatter": False}],
    ids=["0", "1", "2", "2-offload", "3"],
)
def test_muon_trains_as_without(engines: Callable[[int], Ranks], zero: dict[str, Any]) -> None:
    if release() < (0, 19, 8):
        pytest.skip("DeepSpeed before 0.19.8 gives Muon matrices that are reduced in part")
    stage = zero["stage"]
    plain = engines(2).run(train_by_muon, zero, None)
    for flash in (EIGHT, {"preset": "int4", "min_bytes": 0}):
        outcomes = engines(2).run(train_by_muon, zero, flash)
        for rank, seen in enumerate(outcomes):
            assert seen["losses"][-1] < 0.95 * seen["losses"][0]
            assert seen["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=0.01)
            assert torch.equal(seen["weights"], outcomes[0]["weights"]), "the replicas have drifted apart"
            gradients = seen["sites"][f"deepspeed.stage{stage}.gradients"]
            assert gradients["quantized"] == gradients["calls"] == 12
            others = {name: site["full_precision"] for name, site in seen["sites"].items() if "gradients" not in name}
            reasons = {"first gather of parameters"} if flash is not EIGHT and stage in (1, 2) else set()
            assert flash is EIGHT or set().union(*others.values()) == reasons
            # Stage 3 and offloading gather gradients and momenta of matrices: exact, by DeepSpeed's own all-gather.
            gathers = sum(one["calls"] for name, one in seen["beside"].items() if name.startswith("all_gather"))
            assert (gathers > 0) == (stage == 3 or "offload_optimizer" in zero)


def test_sparse_gradients_are_counted(engines: Callable[[int], Ranks]) -> None:
    for plain, eight in zip(engines(2).run(sparse, None), engines(2).run(sparse, EIGHT), strict=True):
        assert eight["full_precision"] == {"sparse gradient": 2}
        assert eight["quantized"] == 2
        torch.testing.assert_close(eight["weights"], plain["weights"], atol=5e-3, rtol=0)


def inference(tensor_parallel: int) -> list[str]:
    """Return our lines while engines are served, and after that."""
    package, text = deepspeed(), io.StringIO()
    theirs = package.InferenceEngine.__init__
    # A policy of a class that the model does not have: to split layers DeepSpeed imports transformers.
    options = {"tensor_parallel": {"tp_size": tensor_parallel}, "injection_policy": {nn.Bilinear: ("0",)}}
    with contextlib.redirect_stdout(text):
        package.init_inference(nn.Sequential(nn.Linear(4, 4)), dtype=torch.float32, **options)
        fap.deepspeed.enable(fap.FlashConfig(bits=8))
        assert package.InferenceEngine.__init__ is not theirs
        package.init_inference(nn.Sequential(nn.Linear(4, 4)), dtype=torch.float32, **options)
        fap.deepspeed.disable()
    assert package.InferenceEngine.__init__ is theirs
    deepspeed()
    return [line for line in text.getvalue().splitlines() if line.startswith("flash")]


@NEWEST
def test_unsupported_inference_gets_one_line(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(inference, 2)
    assert second == [] and first == [
        "flash all-reduce: deepspeed.init_inference is not served: the model has no layers of AutoTP, and what its 2 "
        "tensor-parallel ranks exchange stays in full precision (kernel injection has sums of its own)."
    ]
    assert engines(2).run(inference, 1) == [[], []], "nothing is sent"


def without_reductions(stage: int) -> list[str]:
    """Run two healthy steps, then four without a reduction, as where the program's own pipeline engine reduces."""
    built, text = engine({"zero_optimization": {"stage": stage}}, EIGHT), io.StringIO()
    with contextlib.redirect_stdout(text):
        for number in range(2):
            step(built, number)
        assert not text.getvalue().count("had no reduction")
        built.enable_backward_allreduce = False
        for number in range(4):
            step(built, number)
    return [line for line in text.getvalue().splitlines() if "had no reduction" in line]


@NEWEST
def test_steps_without_a_reduction_are_named(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(without_reductions, 0)
    assert len(first) == 1 and first[0].startswith("flash all-reduce: DeepSpeed's engine: 3 steps of the optimizer")
    assert second == []


def many_groups() -> list[str]:
    """Train at stage 3, which steps its optimizer once for each of its sub-groups."""
    text = io.StringIO()
    built = engine({"zero_optimization": {"stage": 3, "sub_group_size": 100}}, EIGHT)
    with contextlib.redirect_stdout(text):
        for number in range(4):
            step(built, number)
    return [line for line in text.getvalue().splitlines() if "had no reduction" in line]


@NEWEST
def test_sub_groups_are_one_step(engines: Callable[[int], Ranks]) -> None:
    assert engines(2).run(many_groups) == [[], []]
