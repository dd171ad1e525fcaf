"""Parameters of Megatron's distributed optimizer, gathered by differences: real training steps of its own DDP and
optimizer on real ranks, in bfloat16 with masters in float32.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import CudaIsCpu, counts, enabled, start_megatron

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import checkpoint, environment, megatron, policy
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, replicas_equal
from flash_allreduce_plugin.collectives import copies, differences
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.megatron import data_parallel, parameters
from flash_allreduce_plugin.telemetry import counters

SITE = parameters.PARAMETERS.name
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
CONFIG = FlashConfig(param_bits=4, group_size=64, min_bytes=0)
DATA = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(5))  # learnt fast: 16 of 256 bytes


class Training:
    """A GPT in `dtype` with Megatron's DDP and distributed optimizer. Options are of its DDP."""

    def __init__(
        self, tp: int = 1, seed: int = 3, dtype: torch.dtype = torch.bfloat16, size: ModelSize = SIZE, **options: Any
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.size, self.group = size, parallel_state.get_data_parallel_group()
        options = {"use_distributed_optimizer": True, "bucket_size": 20_000, **options}
        self.model = build_model(size, tensor_parallel=tp, sequence_parallel=False, seed=seed).to(dtype)
        self.ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(**options), self.model)
        self.ddp.broadcast_params()
        shared = {name: options.get(name, False) for name in ("use_distributed_optimizer", "overlap_param_gather")}
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=dtype == torch.bfloat16, clip_grad=1.0, **shared)
        self.optimizer = get_megatron_optimizer(adam, [self.ddp])
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        self.ddp.zero_grad_buffer()
        starts = torch.arange(self.size.batch) * 1000 + 40 * number + 17 * self.group.rank()
        loss = loss_of(self.ddp, DATA.repeat(2), starts, self.size.sequence)
        loss.backward()
        self.losses.append(float(loss.detach()))
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]

    def run(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)

    def gathered(self) -> torch.Tensor:
        """All parameters, once all gathers are done."""
        if self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).clone()

    def replicas(self) -> bool:
        """Whether all data-parallel ranks have the same bits."""
        mine = self.gathered()
        others = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(others, mine, group=self.group)
        return all(torch.equal(mine.view(torch.int16), one.view(torch.int16)) for one in others)

    def distance(self) -> float:
        """Of what is held from the exact values, relative, over the parts of this rank."""
        error = square = 0.0
        for one in self.optimizer.chained_optimizers:
            for models, masters in zip(one.model_float16_groups, one.shard_fp32_from_float16_groups, strict=True):
                for model, master in zip(models, masters, strict=True):
                    part = one._get_model_param_range_map(model)["param"]
                    held = model.detach().view(-1)[part.start : part.end].float()
                    error += float((held - master).square().sum())
                    square += float(master.square().sum())
        return math.sqrt(error / square)


def fired() -> tuple[int, dict[str, int]]:
    return counts().get(SITE, (0, {}))


@contextlib.contextmanager
def trained(config: FlashConfig | None, **options: Any) -> Iterator[Training]:
    with CudaIsCpu(), enabled(config):
        counters.reset_stats()
        yield Training(**options)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)
STEPS = 5


def observe() -> dict[str, Any]:
    start_megatron()
    seen: dict[str, Any] = {"ways": []}
    for way in WAYS:
        found: dict[str, Any] = {}
        for name, config in {
            "stock": None,
            "full": FlashConfig(min_bytes=0),
            "4": CONFIG,
            "small": FlashConfig(param_bits=4),
            "off": CONFIG.model_copy(update={"enabled": False}),
            "warm-up": CONFIG.model_copy(update={"warmup_steps": 2}),
            "stochastic": CONFIG.model_copy(update={"rounding": "stochastic", "hadamard": True}),
        }.items():
            with trained(config, **way) as training:
                equal = []
                for number in range(STEPS):
                    training.step(number)
                    equal.append(training.replicas())
                found[name] = {
                    "equal": equal,
                    "losses": training.losses,
                    "parameters": training.gathered(),
                    "distance": training.distance(),
                    "fired": fired(),
                    "steps": megatron.step(),
                    "buckets": len(training.ddp.bucket_groups),
                    "meta": [bucket.param_data.is_meta for g in training.ddp.bucket_groups for bucket in g.buckets],
                }
        seen["ways"].append(found)
    seen["asynchronous"] = asynchronous()
    seen["changes"] = {what: changes(what) for what in CHANGES}
    seen["undone"] = [undone(how) for how in ("disable", "full", "in between")]
    seen["refused"] = refused()
    seen["float32"] = float32()
    return seen


def asynchronous() -> tuple[list[bool], list[bool]]:
    """Of the gathers that the first module of a forward pass starts: whether there is a handle, and if it was done."""
    with trained(CONFIG, **WAYS[2]) as training:
        training.run(0, 2)
        groups, handles = training.ddp.bucket_groups, []
        for group in groups:
            group.start_param_sync()
            handles.append(group.param_gather_handle is not None)
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        quantized = [known.held.digest is not None for known in parameters.buckets._known.values()]
        assert training.replicas()
    return handles, quantized


CHANGES = ("nothing", "load_state_dict", "one rank", "evaluation", "between step and gather", "full_precision()")


def changes(what: str) -> dict[str, Any]:
    """What becomes of weights that somebody changes between two steps."""
    way = WAYS[2] if what == "between step and gather" else {}
    with trained(CONFIG, **way) as training:
        training.run(0, 2)
        state = {name: one.clone() for name, one in training.model.state_dict().items() if one is not None}
        counters.reset_stats()
        last = list(training.model.parameters())[-1]
        if what == "load_state_dict":
            training.model.load_state_dict({name: one * 0.5 for name, one in state.items()})
        elif what == "one rank" and dist.get_rank() == 1:
            last.data.view(-1)[7] += 1
        elif what == "evaluation":
            training.model.eval()
            with torch.no_grad():
                loss_of(training.ddp, DATA, torch.tensor([0]), SIZE.sequence)
            training.model.train()
        elif what == "between step and gather":
            with torch.no_grad():
                last.copy_(torch.full_like(last, 0.25))
            training.gathered()
            return {"fired": fired(), "kept": bool((last == 0.25).all()), "distance": training.distance()}
        with megatron.full_precision() if what == "full_precision()" else contextlib.nullcontext():
            training.step(2)
        first = fired()
        equal = training.replicas()
        training.step(3)
        return {"fired": first, "then": fired(), "equal": equal and training.replicas(), "first": training.distance()}


def undone(how: str) -> dict[str, Any]:
    """The plugin goes between a step and its gather: Megatron gathers what it would have copied."""
    with trained(CONFIG, **WAYS[2]) as training:
        training.run(0, 3)
        if how == "in between":  # the emergency switch
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(environment.DISABLE, "1")
                training.gathered()
        else:
            megatron.disable() if how == "disable" else megatron.enable(FlashConfig())
            training.gathered()
        left = len(parameters.buckets._known)
        distance, equal = training.distance(), training.replicas()
        own = torch.cat([m.flatten() for m in masters(training)]).bfloat16()
        held = torch.cat([m.flatten() for m in held_parts(training)])
    return {"left": left, "equal": equal, "rounded": torch.equal(own, held), "distance": distance}


def masters(training: Training) -> list[torch.Tensor]:
    return [
        master
        for one in training.optimizer.chained_optimizers
        for group in one.shard_fp32_from_float16_groups
        for master in group
    ]


def held_parts(training: Training) -> list[torch.Tensor]:
    found = []
    for one in training.optimizer.chained_optimizers:
        for group in one.model_float16_groups:
            for model in group:
                part = one._get_model_param_range_map(model)["param"]
                found.append(model.detach().view(-1)[part.start : part.end])
    return found


def refused() -> dict[str, str]:
    found = {}
    for name, change in {
        "fp8": lambda training: setattr(training.ddp.ddp_config, "fp8_param_gather", True),
        "precision": lambda training: setattr(training.optimizer.config, "use_precision_aware_optimizer", True),
        "fsdp": lambda training: setattr(training.ddp.ddp_config, "use_megatron_fsdp", True),
    }.items():
        with trained(CONFIG) as training:
            change(training)
            try:
                training.optimizer.chained_optimizers[0]._copy_main_params_to_model_params()
            except ConfigError as error:
                found[name] = str(error)
    with trained(CONFIG, use_distributed_optimizer=False) as training:
        try:
            training.step(0)
        except ConfigError as error:
            found["gathers nothing"] = str(error)
    return found


def float32() -> Any:
    with trained(CONFIG, dtype=torch.float32) as training:
        training.run(0, 2)
        return fired(), training.replicas()


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, observe, timeout=200, preload=MEGATRON)


def ways(ranks: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return ((way, runs) for seen in ranks for way, runs in zip(WAYS, seen["ways"], strict=True))


def test_differences_travel_and_every_rank_holds_the_same_bits(ranks):
    for way, runs in ways(ranks):
        for name in ("4", "stochastic"):
            found = runs[name]
            assert found["equal"] == [True] * STEPS
            assert found["steps"] == STEPS and not any(found["meta"])
            # With overlap, the first forward pass gathers too.
            gathers = (STEPS + bool(way.get("overlap_param_gather"))) * found["buckets"]
            reasons = dict(found["fired"][1])
            assert reasons == {differences.FIRST: found["buckets"]}
            assert found["fired"][0] == gathers - found["buckets"]


def test_four_bits_are_as_near_to_the_exact_values_as_bfloat16(ranks):
    for _, runs in ways(ranks):
        for name in ("4", "stochastic"):
            assert 0.5 < runs[name]["distance"] / runs["stock"]["distance"] < 1.2
        assert runs["4"]["losses"] == pytest.approx(runs["stock"]["losses"], rel=2e-3)
        assert runs["4"]["losses"][-1] < runs["4"]["losses"][0] - 0.1
        assert not torch.equal(runs["4"]["parameters"], runs["stock"]["parameters"])


def test_full_is_megatrons_own(ranks):
    for _, runs in ways(ranks):
        assert runs["full"]["fired"] == (0, {})
        for name in ("full", "small", "off"):
            assert torch.equal(runs[name]["parameters"], runs["stock"]["parameters"])
            assert runs[name]["losses"] == runs["stock"]["losses"]
        assert set(runs["small"]["fired"][1]) == {policy.SMALL} and set(runs["off"]["fired"][1]) == {policy.DISABLED}


def test_the_first_steps_go_in_full_precision(ranks):
    for way, runs in ways(ranks):
        found = runs["warm-up"]
        quantized, reasons = found["fired"]
        # A gather belongs to the step before it: two in the warm-up are followed by one that is the first to be known.
        early = 2 if way.get("overlap_param_gather") else 1
        assert reasons == {policy.WARM_UP: early * found["buckets"], differences.FIRST: found["buckets"]}
        assert quantized == (STEPS - 2) * found["buckets"]
        assert found["losses"][:3] == runs["stock"]["losses"][:3]


def test_overlapped_gathers_have_a_handle_each(ranks):
    for seen in ranks:
        handles, quantized = seen["asynchronous"]
        assert len(handles) > 1 and all(handles) and all(quantized)


def test_evaluation_changes_nothing(ranks):
    for seen in ranks:
        for what in ("nothing", "evaluation"):
            found = seen["changes"][what]
            assert found["equal"] and found["fired"][1] == found["then"][1] == {}


@pytest.mark.parametrize("what", ["load_state_dict", "one rank"])
def test_changed_weights_are_gathered_whole_once(ranks, what):
    for seen in ranks:
        found = seen["changes"][what]
        quantized, reasons = found["fired"]
        buckets = quantized + reasons[differences.CHANGED]
        assert set(reasons) == {differences.CHANGED} and (what == "one rank") == (quantized > 0)
        assert found["equal"] and found["then"] == (quantized + buckets, reasons)


def test_full_precision_on_request(ranks):
    for seen in ranks:
        found = seen["changes"]["full_precision()"]
        quantized, reasons = found["fired"]
        assert quantized == 0 and set(reasons) == {"full_precision()"}
        assert found["then"][1] == {**reasons, differences.FIRST: reasons["full_precision()"]}


def test_what_is_written_between_a_step_and_its_gather_stays(ranks):
    for seen in ranks:
        found = seen["changes"]["between step and gather"]
        quantized, reasons = found["fired"]
        assert reasons == {differences.CHANGED: 1} and quantized > 0
        assert found["kept"]


def test_nothing_of_a_step_is_lost_when_the_plugin_goes_before_its_gather(ranks):
    for seen in ranks:
        for found in seen["undone"]:
            assert found["rounded"] and found["equal"]
        assert [found["left"] > 0 for found in seen["undone"]] == [False, False, True]


def test_what_cannot_be_served_is_refused(ranks):
    for seen in ranks:
        said = seen["refused"]
        assert said["fp8"].startswith("fp8_param_gather and param_bits exclude each other: it is not for parameters in")
        assert said["precision"].startswith("use_precision_aware_optimizer and param_bits exclude each other")
        assert said["fsdp"].startswith("use_megatron_fsdp and param_bits exclude each other")
        assert said["gathers nothing"].startswith("param_bits has no effect without the distributed optimizer")
        assert all("\n" not in line and line.endswith("leave param_bits at full.") for line in list(said.values())[:3])


def test_float32_parameters_have_nothing_beside_them(ranks):
    for seen in ranks:
        (quantized, reasons), equal = seen["float32"]
        assert quantized == 0 and set(reasons) == {parameters.NO_MASTERS} and equal
