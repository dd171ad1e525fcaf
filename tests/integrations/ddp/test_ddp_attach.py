"""Test fap.ddp.enable and FLASH_ALLREDUCE_ATTACH with models that have no registered hook."""

from __future__ import annotations

import copy
import gc
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from tests.attached import loss_of, program, said
from tests.distributed import Ranks, run_ranks

WIDTH, STEPS = 96, 6
QUANTIZED = fap.FlashConfig(bits=4, min_bytes=0)
PROGRAM = Path(__file__).with_name("program.py")


def build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(16, WIDTH, generator=generator)


def train(ddp: Any, steps: int = STEPS, accumulate: int = 1) -> torch.Tensor:
    """Return the weights after some steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x = batch(accumulate * step + part)
            (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def attached(config: fap.FlashConfig | None, how: dict[str, Any], compiled: str | None = None, **more: Any) -> Any:
    """Return weights and counts of a model that is attached, or has the hook registered by hand."""
    results = []
    for by_hand in (False, True):
        fap.reset_stats()
        if not by_hand:
            fap.ddp.enable(config)
        ddp: Any = DistributedDataParallel(build(), bucket_cap_mb=None if compiled else 0.05, **how)
        if by_hand:
            ddp.register_comm_hook(None, fap.ddp_hook(config))
        if compiled is not None:
            torch._dynamo.reset()
            ddp = torch.compile(ddp, backend=compiled)
        weights = train(ddp, **more)
        results.append((weights, fap.stats()["sites"]["ddp.gradients"]))
        fap.ddp.disable()
    return results


@pytest.fixture
def alone() -> Iterator[Callable[..., list[Any]]]:
    """Run in separate ranks: enabling the plugin for later models changes the whole process."""
    yield lambda case, *args: run_ranks(2, case, *args)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda how: "+".join(how) or "default",
)
def test_the_same_bits_as_a_hook_registered_by_hand(ranks: Callable[[int], Ranks], how: dict[str, Any]) -> None:
    for (weights, counts), (by_hand, expected) in ranks(2).run(attached, QUANTIZED, how):
        assert torch.equal(weights, by_hand)
        assert counts["quantized"] == expected["quantized"] > STEPS
        assert counts["bytes_sent"] == expected["bytes_sent"] < 0.2 * counts["bytes_full_precision"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(ranks: Callable[[int], Ranks], backend: str) -> None:
    for (weights, counts), (by_hand, _) in ranks(2).run(attached, QUANTIZED, {}, backend):
        assert torch.equal(weights, by_hand)
        assert counts["quantized"] == STEPS


def copied(how: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return weights of a model and of its copy after the same steps, quantized calls, and models with a line."""
    fap.ddp.enable(QUANTIZED)
    ddp = DistributedDataParallel(build())
    if how == "deepcopy":
        copy_of_it = copy.deepcopy(ddp)
    else:
        file = io.BytesIO()
        torch.save(ddp, file)
        assert b"flash_allreduce" not in file.getvalue(), "who loads it need not have the package"
        file.seek(0)
        copy_of_it = torch.load(file, weights_only=False)
    fap.reset_stats()
    weights = train(ddp), train(copy_of_it)
    quantized = fap.stats()["sites"]["ddp.gradients"]["quantized"]
    models = str(fap.ddp.report()).count("attached to DistributedDataParallel")
    fap.ddp.disable()
    return *weights, quantized, models


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_are_served_and_files_have_no_hook(ranks: Callable[[int], Ranks], how: str) -> None:
    for one, other, quantized, models in ranks(2).run(copied, how):
        assert torch.equal(one, other)
        assert quantized == 2 * STEPS and models == 2


def copied_by_hand() -> list[Any]:
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(None, fap.ddp_hook(QUANTIZED, replicated=[ddp.module[0].weight]))
    again = copy.deepcopy(ddp)
    [(hook, _)] = again._comm_hooks
    return [hook.reduction.config == QUANTIZED, hook.reduction.replicated[0] is again.module[0].weight]


def test_a_hook_that_was_registered_by_hand_can_be_copied(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(copied_by_hand) == [[True, True]] * 2


def without_sync() -> list[int]:
    fap.ddp.enable(QUANTIZED)
    ddp = DistributedDataParallel(build())
    calls = []
    for _ in range(2):
        fap.reset_stats()
        with ddp.no_sync():
            ddp(batch(0)).sum().backward()
        calls.append(fap.stats()["calls"])
        ddp(batch(1)).sum().backward()
        calls.append(fap.stats()["calls"])
    fap.ddp.disable()
    return calls


def test_no_sync_sends_nothing(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(without_sync) == [[0, 1, 0, 1]] * 2


def undone() -> tuple[bool, bool, int, Any]:
    """Return the weights after disable and DDP's own; equal methods; the count of a later model; the report."""
    before = dict(vars(DistributedDataParallel))
    fap.ddp.enable(QUANTIZED)
    assert fap.ddp.is_enabled()
    ddp = DistributedDataParallel(build())
    fap.ddp.disable()
    same_methods = dict(vars(DistributedDataParallel)) == before
    fap.reset_stats()
    weights = train(ddp)
    quantized = fap.stats()["quantized"]
    later = train(DistributedDataParallel(build()))
    return same_methods, torch.equal(weights, later), quantized, fap.ddp.report().models


@pytest.mark.parametrize("world", [2, 3])
def test_disable_restores_ddps_own_bits_and_methods(ranks: Callable[[int], Ranks], world: int) -> None:
    assert ranks(world).run(undone) == [(True, True, 0, ())] * world


def by_the_program(own: str) -> tuple[torch.Tensor, torch.Tensor, int, tuple[str, ...], list[Any]]:
    """Return weights with the program's hook, attached and not; our counts; our lines."""
    found = []
    for attach in (True, False):
        fap.reset_stats()
        if attach:
            fap.ddp.enable(QUANTIZED)
        ddp = DistributedDataParallel(build())
        if own == "builtin":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        if attach:
            models, hooks = fap.ddp.report().models, [hook.__name__ for hook, _ in ddp._comm_hooks]
        found.append(train(ddp))
        if attach:
            counted = fap.stats()["calls"]
        fap.ddp.disable()
    return (*found, counted, models, hooks)


@pytest.mark.parametrize("own", ["hook", "builtin"])
def test_a_hook_of_the_programs_wins(ranks: Callable[[int], Ranks], own: str) -> None:
    for weights, expected, counted, models, hooks in ranks(2).run(by_the_program, own):
        assert torch.equal(weights, expected)
        assert counted == 0
        assert hooks == ["fp16_compress_hook"]
        assert "replaces ours" in models[-1]


def twice() -> str:
    fap.ddp.enable(QUANTIZED)
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8)))
    try:
        with pytest.raises(RuntimeError) as error:
            ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8)))
        return str(error.value)
    finally:
        fap.ddp.disable()


def test_a_second_hook_of_the_programs_is_torchs_error(ranks: Callable[[int], Ranks]) -> None:
    assert all("can only be called once" in message for message in ranks(2).run(twice))


def warmed_up() -> list[int]:
    """Return the quantized calls after each step of the optimizer, with two backward passes a step."""
    fap.ddp.enable(fap.FlashConfig(bits=4, min_bytes=0, warmup_steps=3))
    ddp = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(ddp.parameters())
    counts = []
    for step in range(5):
        for _ in range(2):
            ddp(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(fap.stats()["quantized"])
    saved = optimizer.state_dict()
    fap.ddp.disable()

    fap.ddp.enable(fap.FlashConfig(bits=4, min_bytes=0, warmup_steps=4))
    fap.reset_stats()
    again = DistributedDataParallel(build())
    resumed = torch.optim.AdamW(again.parameters())
    resumed.load_state_dict(saved)
    optimizer_steps.finished = 0  # simulates a restarted process
    optimizer_steps._most = 0
    for step in range(2):
        again(batch(step)).square().mean().backward()
        resumed.step()
    counts.append(fap.stats()["quantized"])
    fap.ddp.disable()
    return counts


def test_warm_up_counts_steps_of_the_optimizer_and_those_of_a_loaded_one(
    alone: Callable[..., list[Any]],
) -> None:
    for counts in alone(warmed_up):
        assert counts == [0, 0, 0, 2, 4, 1]


def left_alone() -> list[str]:
    lines = []
    pair = dist.new_group([0, 1])
    fap.ddp.enable(QUANTIZED)
    if dist.get_rank() < 2:
        ddp = DistributedDataParallel(build(), process_group=pair)
        assert not ddp._comm_hooks
        lines.extend(fap.ddp.report().models)
    fap.ddp.disable()
    return lines


def test_a_group_that_may_have_copies_stays_in_full_precision(ranks: Callable[[int], Ranks]) -> None:
    first, second, third = ranks(3).run(left_alone)
    assert first == second and third == []
    assert "is left alone: its group has 2 of 3 ranks" in first[0]


def mixed() -> tuple[list[str], int]:
    from torch.nn.parallel.distributed import _MixedPrecision

    fap.ddp.enable(QUANTIZED)
    fap.reset_stats()
    DistributedDataParallel(build(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    lines = list(fap.ddp.report().models)
    fap.ddp.disable()
    return lines, fap.stats()["calls"]


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch makes no torch.Stream without a GPU",
)
def test_torchs_own_mixed_precision_stays_in_full_precision(ranks: Callable[[int], Ranks]) -> None:
    for lines, calls in ranks(2).run(mixed):
        assert calls == 0
        assert "it has a hook already (torch's mixed precision registers one)" in lines[0]


def joined() -> tuple[torch.Tensor, torch.Tensor]:
    """Train on uneven inputs: return weights attached, and with a hook by hand."""
    found = []
    for by_hand in (False, True):
        if not by_hand:
            fap.ddp.enable(QUANTIZED)
        ddp = DistributedDataParallel(build())
        if by_hand:
            ddp.register_comm_hook(None, fap.ddp_hook(QUANTIZED))
        with ddp.join(divide_by_initial_world_size=False):
            train(ddp, steps=2 + 2 * dist.get_rank())
        fap.ddp.disable()
        found.append(torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()]))
    return found[0], found[1]


def test_join(ranks: Callable[[int], Ranks]) -> None:
    (first, by_hand), (second, _) = ranks(2).run(joined)
    assert torch.equal(first, by_hand)
    assert torch.equal(first, second)


def fed_back() -> bool:
    """Return True if two halves of a run with error_feedback, the second from a state, give the bits of the whole."""
    config = fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True)

    def run(ddp: nn.Module, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for step in range(first, last):
            optimizer.zero_grad()
            ddp(batch(step)).square().mean().backward()
            optimizer.step()

    fap.ddp.enable(config)
    # Otherwise torch rebuilds the buckets after the first pass and drops the loaded state of a resumed run.
    whole = DistributedDataParallel(build(), find_unused_parameters=True)
    run(whole, 0, 3)
    saved, state = {k: v.clone() for k, v in whole.module.state_dict().items()}, fap.state_dict()
    run(whole, 3, 6)
    expected = [parameter.detach().clone() for parameter in whole.parameters()]
    del whole
    gc.collect()  # a state is of the models that live
    resumed = DistributedDataParallel(build(), find_unused_parameters=True)
    resumed.module.load_state_dict(saved)
    fap.load_state_dict(state)
    run(resumed, 3, 6)
    fap.ddp.disable()
    return all(torch.equal(a, b.detach()) for a, b in zip(expected, resumed.parameters(), strict=True))


def test_error_feedback_continues_from_a_state(alone: Callable[..., list[Any]]) -> None:
    assert alone(fed_back) == [True, True]


def test_bad_arguments_change_nothing() -> None:
    before = dict(vars(DistributedDataParallel))
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig"):
        fap.ddp.enable({"bits": 4})  # type: ignore[arg-type]
    with pytest.raises(fap.ConfigError, match=r"include=.* has no effect in DistributedDataParallel"):
        fap.ddp.enable(fap.FlashConfig(include=["a"]))
    with pytest.raises(fap.ConfigError, match=r"param_bits=4 has no effect in DistributedDataParallel"):
        fap.ddp.enable(fap.FlashConfig(param_bits=4))
    assert dict(vars(DistributedDataParallel)) == before
    assert not fap.ddp.is_enabled()


def test_a_replacement_of_another_library_is_kept() -> None:
    fap.ddp.enable(QUANTIZED)
    ours = DistributedDataParallel.register_comm_hook
    try:
        DistributedDataParallel.register_comm_hook = lambda self, state, hook: None  # type: ignore[method-assign]
        with pytest.raises(fap.PatchError, match=r"register_comm_hook .* was replaced again after us"):
            fap.ddp.disable()
        assert fap.ddp.is_enabled()
    finally:
        DistributedDataParallel.register_comm_hook = ours  # type: ignore[method-assign]
        fap.ddp.disable()
    assert not fap.ddp.is_enabled()


# ---- by the environment, in a program that does not import the package ----


def test_one_variable_attaches_an_unedited_program(tmp_path: Path) -> None:
    (tmp_path / "fap.json").write_text('{"bits": 8, "min_bytes": 0}')
    wanted = {"FLASH_ALLREDUCE_ATTACH": "ddp", "FLASH_ALLREDUCE_CONFIG": "fap.json", "FLASH_ALLREDUCE_BITS": "4"}
    served = program(tmp_path, "ddp", FLASH_ALLREDUCE_LOG="log.jsonl", **wanted)
    by_hand = program(tmp_path, "ddp", "by_hand", FLASH_ALLREDUCE_BITS="4", FLASH_ALLREDUCE_MIN_BYTES="0")
    plain = program(tmp_path, "ddp")
    assert loss_of(served) == loss_of(by_hand) != loss_of(plain)
    lines = said(served)
    assert len(lines) == 1
    assert "attached to DistributedDataParallel (Linear, 65792 parameters in float32): gradients in 4 bits" in lines[0]
    assert "flash all-reduce" not in plain.stdout + plain.stderr
    report = subprocess.run(
        [sys.executable, "-m", "flash_allreduce_plugin", "report", "log.jsonl"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "ddp.gradients" in report.stdout


def test_a_program_that_builds_no_such_model_gets_a_line(tmp_path: Path) -> None:
    done = program(tmp_path, "ddp", FLASH_ALLREDUCE_ATTACH="fsdp")
    assert loss_of(done)
    [line] = said(done)
    assert line.startswith("flash all-reduce: FLASH_ALLREDUCE_ATTACH=fsdp, and this program has built no such model")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"ATTACH": "ddp,dpp"},
            "FLASH_ALLREDUCE_ATTACH=ddp,dpp cannot be served: "
            ".*ddp, fsdp, megatron, megatron_fsdp, deepspeed, context_parallel, tensor_parallel, pipelining; "
            "dpp is none",
        ),
        ({"ATTACH": "ddp", "AUTOLOAD": "0"}, "FLASH_ALLREDUCE_AUTOLOAD is off"),
        ({"ATTACH": "ddp", "PRESET": "int5"}, "FLASH_ALLREDUCE_PRESET='int5' is not valid; expected \"int8\""),
        ({"ATTACH": "all", "CONFIG": "none.json"}, "none.json: cannot be read"),
        ({"ATTACH": "all", "INCLUDE": "head"}, "FLASH_ALLREDUCE_INCLUDE=.* has no effect in DistributedDataParallel"),
        ({"ATTACH": "ddp", "SYMMETRIC": "1", "COMPACT": "1"}, "FLASH_ALLREDUCE_SYMMETRIC=True excludes compact=True"),
    ],
)
def test_bad_variables_end_the_program_before_it_trains(
    tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    wrong = {f"FLASH_ALLREDUCE_{name}": value for name, value in variables.items()}
    # A setting that only DistributedDataParallel refuses fails when a model is built.
    done = program(tmp_path, "ddp", alone=not {"INCLUDE", "SYMMETRIC"} & variables.keys(), **wrong)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("flash all-reduce: ")]
    assert len(lines) == 1, done.stderr
    assert re.search(sentence, lines[0]), lines
    assert "loss" not in done.stdout


def test_nothing_attached_means_nothing_touched() -> None:
    script = (
        "import torch, sys; from torch.nn.parallel import DistributedDataParallel as D;"
        "assert not any(name.startswith('flash_allreduce_plugin.integrations.ddp') for name in sys.modules);"
        "assert not hasattr(D.__init__, '__flash_allreduce_seam__')"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ALLREDUCE_")}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=100)
