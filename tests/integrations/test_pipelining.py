"""torch's own stages and schedules train over two and four ranks."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.integrations import pipelining
from flash_allreduce_plugin.telemetry import counters
from tests.codecs import same_bits
from tests.distributed import run_ranks

FORWARD, BACKWARD = pipelining.FORWARD.name, pipelining.BACKWARD.name
EIGHT = {"pipeline_bits": 8, "pipeline_backward_bits": 8, "group_size": 32, "min_bytes": 0}
STEPS, MICRO_BATCHES, WIDTH, ROWS = 2, 4, 64, 8


class Block(nn.Module):
    """A block that passes on a mask and numbers unchanged."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class WithNumbers(Block):
    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), numbers + 1


V_SHAPED = "ZBVZeroBubble"
# Stages of a rank.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, V_SHAPED: 2}


def numbers_of(name: str, rank: int, world: int) -> list[int]:
    """Return the stages of a rank."""
    if name == V_SHAPED:  # there and back: the first rank has the last stage too
        return [rank, 2 * world - 1 - rank]
    return [rank + world * chunk for chunk in range(SCHEDULES[name])]


def schedule_of(
    name: str, dtype: torch.dtype, block: type[Block] = Block, trains: bool = True
) -> tuple[Any, list[nn.Module]]:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, world, chunks = dist.get_rank(), dist.get_world_size(), SCHEDULES[name]
    numbers = numbers_of(name, rank, world)
    blocks = [block(number, dtype) for number in numbers]
    stages = [
        PipelineStage(one, number, world * chunks, torch.device("cpu"))
        for number, one in zip(numbers, blocks, strict=True)
    ]

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return (output - target).float().square().mean()

    kind = schedules.get_schedule_class(name)
    given: Any = stages if chunks > 1 else stages[0]
    return kind(given, MICRO_BATCHES, loss_fn=loss if trains else None), blocks  # type: ignore[call-arg, arg-type]


def train(name: str, config: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    schedule, blocks = schedule_of(name, dtype)
    optimizer = torch.optim.SGD([p for one in blocks for p in one.parameters()], lr=0.1)
    counters.reset_stats()
    if config is not None:
        pipelining.enable(fap.FlashConfig(**config))
    rank, world = dist.get_rank(), dist.get_world_size()
    last = 0 if name == V_SHAPED else world - 1
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x.flip(1), "losses": losses} if rank == last else {}))
        optimizer.step()
    report = pipelining.report()
    pipelining.disable()
    every = counters.stats()["sites"]
    return {
        "losses": [float(one.detach()) for one in losses],
        "weights": torch.cat([p.detach().float().reshape(-1) for one in blocks for p in one.parameters()]),
        "sites": {name: (one["quantized"], one["full_precision"]) for name, one in every.items()},
        "report": report,
    }


def variants(name: str) -> dict[str, Any]:
    configs = {  # the first one is trained first: steps are counted from the first `enable` on
        "warm-up": {**EIGHT, "warmup_steps": 1},
        "stock": None,
        "INT8": EIGHT,
        "back": {**EIGHT, "pipeline_bits": "full"},
        "small": {**EIGHT, "min_bytes": 1 << 20},
        "off": {**EIGHT, "enabled": False},
    }
    seen = {variant: train(name, config) for variant, config in configs.items()}
    seen["bf16"], seen["INT8 of bf16"] = (train(name, config, torch.bfloat16) for config in (None, EIGHT))
    os.environ[environment.DISABLE] = "1"
    try:
        seen["disabled"] = train(name, EIGHT)
    finally:
        del os.environ[environment.DISABLE]
    return seen


def borders(name: str, rank: int, world: int) -> int:
    """Return a rank's ends of sends, of one micro-batch and direction: none between two stages of its own."""
    count, own = world * SCHEDULES[name], numbers_of(name, rank, world)
    return sum(0 <= other < count and other not in own for stage in own for other in (stage - 1, stage + 1))


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("GPipe", 2),
        ("1F1B", 4),
        ("Interleaved1F1B", 2),
        ("LoopedBFS", 4),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
    ],
)
def test_every_schedule_sends_quantized_and_full_precision_is_torchs(name: str, world: int) -> None:
    ranks = run_ranks(world, variants, name, timeout=240)
    for rank, seen in enumerate(ranks):
        count = borders(name, rank, world) * MICRO_BATCHES * STEPS
        stock = seen["stock"]
        assert stock["sites"] == {}
        assert seen["INT8"]["sites"] == {FORWARD: (count, {}), BACKWARD: (count, {})}
        assert seen["INT8"]["report"][FORWARD]["in_place"] and not seen["stock"]["report"][FORWARD]["in_place"]
        assert seen["INT8"]["losses"] == pytest.approx(stock["losses"], rel=0.02)
        assert not torch.equal(seen["INT8"]["weights"], stock["weights"])
        assert seen["back"]["sites"] == {FORWARD: (0, {policy.is_full("pipeline_bits"): count}), BACKWARD: (count, {})}
        half = {policy.WARM_UP: count // STEPS}
        assert seen["warm-up"]["sites"] == {FORWARD: (count // STEPS, half), BACKWARD: (count // STEPS, half)}
        for variant, reason in (
            ("small", policy.SMALL),
            ("off", policy.DISABLED),
            ("disabled", environment.DISABLE),
        ):
            assert seen[variant]["sites"] == {FORWARD: (0, {reason: count}), BACKWARD: (0, {reason: count})}
            assert seen[variant]["losses"] == stock["losses"]
            assert same_bits(seen[variant]["weights"], stock["weights"])
        assert seen["INT8 of bf16"]["sites"] == {FORWARD: (count, {}), BACKWARD: (count, {})}
        assert seen["INT8 of bf16"]["losses"] == pytest.approx(seen["bf16"]["losses"], rel=0.02)


def with_tensor_parallelism() -> Any:
    """Train two stages of two ranks. torch hands their output over before its all-reduce has ended."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, seen = mesh["pp"].get_local_rank(), []
    for config in (None, fap.FlashConfig(**EIGHT)):
        torch.manual_seed(stage)
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        one = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = ScheduleGPipe(one, 2, loss_fn=lambda output, target: (output - target).square().mean())
        if config is not None:
            pipelining.enable(config)
        counters.reset_stats()
        losses: list[torch.Tensor] = []
        x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        schedule.step(*(() if stage else (x,)), **({"target": x, "losses": losses} if stage else {}))
        sites = {name: (one["quantized"], one["full_precision"]) for name, one in counters.stats()["sites"].items()}
        seen.append(([float(loss.detach()) for loss in losses], sites))
        pipelining.disable()
    return seen


def test_stages_with_tensor_parallelism_inside() -> None:
    for (plain, _), (losses, sites) in run_ranks(4, with_tensor_parallelism):
        assert sites == {FORWARD: (2, {}), BACKWARD: (2, {})}
        assert losses == pytest.approx(plain, rel=0.01)


def arrived() -> Any:
    """Return the second stage's input from the first one. Also run evaluation, with numbers next to the activations."""
    schedule, _ = schedule_of("GPipe", torch.float32, WithNumbers, trains=False)
    x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(MICRO_BATCHES * ROWS)
    found = []
    for config in ({}, {"quantize_evaluation": False}):
        pipelining.enable(fap.FlashConfig(**{**EIGHT, **config}))
        with torch.no_grad():
            found.append(schedule.eval(*((x, numbers) if dist.get_rank() == 0 else ())))
    sites = {name: (one["quantized"], one["full_precision"]) for name, one in counters.stats()["sites"].items()}
    pipelining.disable()
    return found, sites


def test_received_tensors_are_decoded_payloads_and_integers_are_exact() -> None:
    (_, (found, sites)) = run_ranks(2, arrived)
    x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    wire = fap.FlashConfig(**EIGHT)
    with torch.no_grad():
        sent = Block(0, torch.float32)(x)
        parts = [
            fap.decode(fap.encode(one, wire), tuple(one.shape), one.dtype, wire) for one in sent.chunk(MICRO_BATCHES)
        ]
        after = Block(1, torch.float32)
        for (output, numbers), expected in zip(found, (torch.cat(parts), sent), strict=True):
            assert torch.equal(numbers, torch.arange(MICRO_BATCHES * ROWS) + 2)
            assert torch.equal(output, torch.cat([after(one) for one in expected.chunk(MICRO_BATCHES)]))
    quantized, exact = sites[FORWARD]
    assert quantized == MICRO_BATCHES
    assert exact == {"dtype int64": MICRO_BATCHES, policy.EVALUATION: 2 * MICRO_BATCHES}


def different() -> str:
    schedule, _ = schedule_of("1F1B", torch.float32)
    pipelining.enable(fap.FlashConfig(**{**EIGHT, "pipeline_bits": 7 if dist.get_rank() else 6}))
    x = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
    with pytest.raises(fap.MismatchError) as raised:
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), **({"target": x} if dist.get_rank() else {}))
    pipelining.disable()
    return str(raised.value)


def test_stages_that_differ_are_named() -> None:
    for said in run_ranks(2, different):
        assert "pipeline_bits" in said


def test_fields_without_effect_are_refused() -> None:
    with pytest.raises(fap.ConfigError, match='pipeline_bits and pipeline_backward_bits are "full"'):
        pipelining.enable(fap.FlashConfig())
    for field, value in {
        "grad_bits": 4,
        "attention_bits": 8,
        "param_bits": 4,
        "include": ["x"],
        "error_feedback": True,
    }.items():
        with pytest.raises(fap.ConfigError, match=rf"^{field}=.* has no effect in pipelining, "):
            pipelining.enable(fap.FlashConfig(**{**EIGHT, field: value}))
    with pytest.raises(TypeError, match="config is dict"):
        pipelining.enable(EIGHT)  # type: ignore[arg-type]
    assert not pipelining.is_enabled()


def test_a_torch_that_differs_is_refused_and_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import schedules, stage

    monkeypatch.setattr(schedules, "_batch_p2p", lambda operations: [])
    before = dict(vars(stage._PipelineStageBase))
    with pytest.raises(fap.PatchError, match=r"_batch_p2p: expected the parameters \(p2p_ops, desc\)"):
        pipelining.enable(fap.FlashConfig(**EIGHT))
    assert dict(vars(stage._PipelineStageBase)) == before and not pipelining.is_enabled()


def test_undoing_restores_every_function() -> None:
    from torch.distributed.pipelining import schedules, stage

    before = dict(vars(stage._PipelineStageBase)), schedules._batch_p2p
    pipelining.enable(fap.FlashConfig(**EIGHT))
    assert schedules._batch_p2p is not before[1]
    pipelining.disable()
    assert (dict(vars(stage._PipelineStageBase)), schedules._batch_p2p) == before


def counted_alone() -> dict[str, Any]:
    """Train with FLASH_ALLREDUCE_ATTACH=all without widths: four steps of each stage's optimizer."""
    os.environ[environment.ATTACH] = "all"
    fap.reset_stats()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        pipelining.by_environment()
        schedule, blocks = schedule_of("1F1B", torch.float32)
        optimizer = torch.optim.SGD([p for one in blocks for p in one.parameters()], lr=0.1)
        x = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
        for _ in range(4):
            schedule.step(*((x,) if dist.get_rank() == 0 else ()), **({"target": x} if dist.get_rank() else {}))
            optimizer.step()
    seen = {"lines": text.getvalue().splitlines(), "on": pipelining.is_enabled(), "quantized": fap.stats()["quantized"]}
    seen["in place"] = [entry["in_place"] for entry in pipelining.report().values()]
    pipelining.disable()
    return seen


def test_among_all_sends_without_a_width_are_named_with_their_fields() -> None:
    first, second = run_ranks(2, counted_alone)
    assert [line.partition("calls: ")[2] for line in first["lines"]] == [
        f"{key} is full (set FLASH_ALLREDUCE_{key.upper()})" for key in ("pipeline_bits", "pipeline_backward_bits")
    ]
    for seen in (first, second):
        assert not seen["on"] and seen["quantized"] == 0 and seen["in place"] == [True, True]
    assert second["lines"] == []


@pytest.mark.parametrize(
    ("named", "given", "served"), [("pipelining", "8", True), ("all", None, False), ("all", "8", True)]
)
def test_by_the_environment(named: str, given: str | None, served: bool) -> None:
    script = (
        "import torch.distributed.pipelining, flash_allreduce_plugin.integrations.pipelining as p; "
        "import flash_allreduce_plugin.autoload as a; a.load(); import torch.distributed.pipelining.schedules; "
        "print(p.is_enabled())"
    )
    widths = {} if given is None else {"FLASH_ALLREDUCE_PIPELINE_BITS": given}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, environment.ATTACH: named, "FLASH_ALLREDUCE_AUTOLOAD": "1", **widths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(served)
    assert ("torch's pipelining" in done.stdout) == served
