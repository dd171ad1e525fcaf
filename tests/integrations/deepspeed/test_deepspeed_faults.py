"""DeepSpeed: a rank that raises in the backward pass, and engines released half way or after another owner's patch."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import EIGHT, NEWEST, configuration, deepspeed, engine, model, step
from torch import nn
from torch.distributed import distributed_c10d

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.deepspeed import engine as served
from tests.distributed import Ranks

TIMEOUT = timedelta(seconds=3)
CONFIG = fap.FlashConfig(bits=8, min_bytes=0)


def raises(stage: int) -> tuple[str, float]:
    """Raise in a hook on a gradient at rank 1."""
    torch.set_num_threads(1)
    distributed_c10d.default_pg_timeout = TIMEOUT  # of the groups that DeepSpeed makes
    built = engine({"zero_optimization": {"stage": stage}}, EIGHT)
    step(built, 0)  # all is well

    def raising(gradient: torch.Tensor) -> None:
        raise ArithmeticError("this rank alone")

    if dist.get_rank() == 1:
        next(p for p in built.module.parameters() if p.requires_grad).register_hook(raising)
    start, message = time.monotonic(), "no error"
    try:
        step(built, 1)
    except (ArithmeticError, fap.CollectiveError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    time.sleep(max(0.0, TIMEOUT.total_seconds() + 1 - seconds))  # the peers of a rank that ends fail immediately
    fap.deepspeed.disable()
    return message, seconds


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_raises_in_the_backward_pass(stage: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with Ranks(2, TIMEOUT) as ranks:
        (first, here), (second, there) = ranks.outcomes(raises, stage, timeout=240)
    assert first == second == "value", (here, there)
    assert there[0] == "ArithmeticError: this rank alone", there
    assert here[0].startswith("CollectiveError: ") and f"'deepspeed.stage{stage}.gradients', rank 0 of 2" in here[0]
    assert here[1] < TIMEOUT.total_seconds() + 5


class Repeated(nn.Module):
    """Layers of one size. The second layer is called so many times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.times = nn.ModuleList(nn.Linear(48, 48) for _ in range(3)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = first(x)
        for _ in range(self.times):
            x = torch.tanh(second(x))
        return third(x)  # type: ignore[no-any-return]


def calls_a_layer_more_often() -> tuple[str, float, float]:
    """Call a layer more often on rank 1. Return the message, the largest error of a layer's weight, and the seconds."""
    torch.set_num_threads(1)
    distributed_c10d.default_pg_timeout = TIMEOUT
    net, own = Repeated(), Repeated()
    nothing_stays = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    built = engine({"zero_optimization": {"stage": 3, **nothing_stays}}, {**EIGHT, "param_bits": 8}, net, lr=1e-3)
    far = [0.0]
    for layer, exact in zip(net.layers, own.layers, strict=True):
        layer.register_forward_pre_hook(
            lambda layer, _, exact=exact: far.append(float((layer.weight - exact.weight).abs().max()))
        )
    step(built, 0)
    net.times = 1 + 2 * dist.get_rank()
    start, message = time.monotonic(), "no error"
    try:
        step(built, 1)
    except (fap.CollectiveError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    time.sleep(max(0.0, TIMEOUT.total_seconds() + 1 - seconds))
    return message, max(far), seconds


@NEWEST
def test_a_rank_that_calls_a_layer_more_often_never_gets_the_weights_of_another() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    with Ranks(2, TIMEOUT) as ranks:
        outcomes = ranks.run(calls_a_layer_more_often)
    for message, far, seconds in outcomes:
        assert message.startswith("CollectiveError: all_gather at site 'deepspeed.stage3.parameters', rank "), message
        assert far < 0.02, "the layers' weights differ by 0.28"
        assert seconds < TIMEOUT.total_seconds() + 5


def not_served() -> Any:
    package = deepspeed()
    fap.deepspeed.disable()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    built, *_ = package.initialize(
        model=net, optimizer=optimizer, config=configuration({"zero_optimization": {"stage": 2}}, None)
    )
    return built


def entries(built: Any) -> list[dict[str, int]]:
    """Return the attributes of the instances of an engine, its optimizer and its monitor."""
    return [{name: id(value) for name, value in vars(o).items()} for o in (built, built.optimizer, built.monitor)]


def half_way() -> int:
    """Let the replacing of every function of an engine fail once. Return how many functions there were."""
    added = {"param_bits": 4, "pipeline_bits": 4}  # to the functions that are replaced
    built, config = not_served(), CONFIG.model_copy(update=added)
    built.save_checkpoint = theirs = lambda *_: "theirs"  # a function that the program set before
    before, places = entries(built), served.places
    failed = 0

    def wrong(original: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("half way")

    for at in range(len(places(None))):

        def failing(reduction: Any, at: int = at) -> list[Any]:
            seams = list(places(reduction))
            seams[at] = dataclasses.replace(seams[at], replacement=wrong)
            return seams

        served.places = failing  # type: ignore[assignment]
        try:
            served.bind(built, config)
        except RuntimeError:
            failed += 1
        else:  # a function that this engine does not have
            served.release(built)
        finally:
            served.places = places
        assert entries(built) == before
        assert built not in served._engines
    served.bind(built, config)
    assert built.save_checkpoint is not theirs
    served.release(built)
    assert entries(built) == before
    return failed


def test_an_engine_that_fails_half_way_is_restored(engines: Callable[[int], Ranks]) -> None:
    assert min(engines(2).run(half_way)) >= 5


def replaced_since() -> str:
    built = not_served()
    before = entries(built)
    fap.deepspeed.enable(CONFIG)
    served.bind(built, CONFIG)
    ours = built.save_checkpoint
    built.save_checkpoint = lambda *_: "theirs"
    with pytest.raises(fap.PatchError) as refused:
        fap.deepspeed.disable()
    assert fap.deepspeed.is_enabled() and built in served._engines
    built.save_checkpoint = ours
    fap.deepspeed.disable()
    assert entries(built) == before
    return str(refused.value)


def test_a_function_of_an_engine_that_was_replaced_since(engines: Callable[[int], Ranks]) -> None:
    for message in engines(2).run(replaced_since):
        assert message.startswith("deepspeed: save_checkpoint of a DeepSpeedEngine was replaced again after us by ")
