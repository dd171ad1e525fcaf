"""Parameters of Megatron's distributed optimizer, gathered by differences: real training steps of its own DDP and
optimizer on real ranks, in bfloat16 with masters in float32.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import CudaIsCpu, counts, enabled, start_megatron

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, replicas_equal
from flash_allreduce_plugin.collectives import replicated_params, weight_differences
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import parameters
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
        sharded = {"use_distributed_optimizer": options["use_distributed_optimizer"]}
        adam = OptimizerConfig(optimizer="adam", lr=4e-4, bf16=dtype == torch.bfloat16, clip_grad=1.0, **sharded)
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
        """Return all parameters, once all gathers are done."""
        if self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).clone()

    def replicas(self) -> bool:
        """Return True if all data-parallel ranks have the same bits."""
        mine = self.gathered()
        others = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(others, mine, group=self.group)
        return all(torch.equal(mine.view(torch.int16), one.view(torch.int16)) for one in others)

    def distance(self) -> float:
        """Return the relative error of the held values, over the parts of this rank."""
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
CONFIGS = {
    "stock": None,
    "4": CONFIG,
    "full": FlashConfig(min_bytes=0),
    "small": FlashConfig(param_bits=4),
    "off": CONFIG.model_copy(update={"enabled": False}),
    "warm-up": CONFIG.model_copy(update={"warmup_steps": 2}),
    "stochastic": CONFIG.model_copy(update={"rounding": "stochastic", "hadamard": True}),
}
RUNS = (tuple(CONFIGS), ("stock", "4"), ("stock", "4", "full", "warm-up"))
STEPS = 4


def observe() -> dict[str, Any]:
    start_megatron()
    seen: dict[str, Any] = {"ways": []}
    for way, names in zip(WAYS, RUNS, strict=True):
        found: dict[str, Any] = {}
        for name in names:
            with trained(CONFIGS[name], **way) as training:
                equal = []
                for number in range(STEPS):
                    training.step(number)
                    if number == STEPS - 1 or not way.get("overlap_param_gather"):  # where it would not overlap
                        equal.append(training.replicas())
                groups = training.ddp.bucket_groups
                found[name] = {
                    "equal": all(equal),
                    "losses": training.losses,
                    "fired": fired(),
                    "parameters": training.gathered(),
                    "distance": training.distance(),
                    "steps": megatron.step(),
                    "buckets": len(groups),
                    "meta": [bucket.param_data.is_meta for group in groups for bucket in group.buckets],
                }
        seen["ways"].append(found)
    seen["asynchronous"] = asynchronous()
    seen["changes"] = {what: changes(what) for what in CHANGES}
    seen["undone"] = [undone(how) for how in ("disable", "full", "in between")]
    seen["refused"] = refused()
    seen["float32"] = float32()
    seen["resumed"] = resumed()
    return seen


def asynchronous() -> tuple[list[bool], list[bool]]:
    """Return, for gathers that a forward pass's first module starts: True if there is a handle, True if it was done."""
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
    """Change weights between two steps and return the effect."""
    way = {"between step and gather": WAYS[2], "one rank": WAYS[1]}.get(what, {})
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
    """Disable the plugin between a step and its gather: Megatron gathers the values it would have copied."""
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
        "fsdp": lambda training: setattr(training.ddp.ddp_config, "use_torch_fsdp2", True),
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


class Stopped:
    """The parts of a training that a checkpoint has, at the end of a step."""

    def __init__(self, training: Training) -> None:
        self.parameters = {name: one.clone() for name, one in named(training)}
        self.masters = [master.detach().clone() for master in masters(training)]
        self.adam = [one.optimizer.state_dict() for one in training.optimizer.chained_optimizers]
        self.adam = copy.deepcopy(self.adam)
        self.ours = fap.state_dict()

    def load(self, training: Training) -> None:
        training.model.load_state_dict(self.parameters, strict=False)
        for master, saved in zip(masters(training), self.masters, strict=True):
            master.data.copy_(saved)
        for one, state in zip(training.optimizer.chained_optimizers, self.adam, strict=True):
            one.optimizer.load_state_dict(copy.deepcopy(state))


def named(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, one.detach()) for name, one in training.model.named_parameters())


def resumed() -> list[Any]:
    """Run a training to the end, and others from the middle of it: with the plugin's state and without."""
    found = []
    for way in WAYS[1:]:
        config = CONFIG.model_copy(update={"rounding": "stochastic", "hadamard": not way.get("overlap_param_gather")})
        with trained(config, **way) as training:
            training.run(0, 3)
            training.gathered()
            stopped = Stopped(training)
            training.run(3, 5)
            expected, losses = training.gathered(), training.losses[3:]
        for ours in (stopped.ours, None):
            with trained(config, seed=8, **way) as training:
                stopped.load(training)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    went_on = fap.load_state_dict(ours)
                training.run(3, 5)
                same = torch.equal(training.gathered(), expected) and training.losses == losses
                reasons = fired()[1]
                reasons.pop(replicated_params.REASON, None)
                found.append((way, ours is not None, went_on, same, reasons, len(training.ddp.bucket_groups)))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, observe, timeout=200, preload=MEGATRON)


def runs_of(ranks: list[dict[str, Any]], name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield (way, run, stock run)."""
    for seen in ranks:
        for way, runs in zip(WAYS, seen["ways"], strict=True):
            if name in runs:
                yield way, runs[name], runs["stock"]


@pytest.mark.parametrize("name", ["4", "stochastic"])
def test_differences_are_sent_and_every_rank_holds_the_same_bits(ranks, name):
    for way, found, stock in runs_of(ranks, name):
        assert found["equal"]
        assert found["steps"] == STEPS and not any(found["meta"])
        quantized, reasons = found["fired"]
        reasons.pop(replicated_params.REASON, None)  # padding, of rotated groups
        # With overlap, the first forward pass gathers too.
        first = 2 if way.get("overlap_param_gather") else 1
        assert reasons == {weight_differences.FIRST: first * found["buckets"]}
        assert quantized == (STEPS - 1) * found["buckets"]
        assert 0.5 < found["distance"] / stock["distance"] < 1.2, "as near to the exact values as bfloat16 is"
        assert found["losses"] == pytest.approx(stock["losses"], rel=2e-3)
        assert found["losses"][-1] < found["losses"][0] - 0.1
        assert not torch.equal(found["parameters"], stock["parameters"])


@pytest.mark.parametrize(
    ("name", "reasons"),
    [("full", {policy.is_full("param_bits")}), ("small", {policy.SMALL}), ("off", {policy.DISABLED})],
    ids=str,
)
def test_full_precision_is_bitwise_megatrons_own(ranks, name, reasons):
    for _, found, stock in runs_of(ranks, name):
        assert torch.equal(found["parameters"], stock["parameters"]) and found["losses"] == stock["losses"]
        assert found["fired"][0] == 0 and set(found["fired"][1]) == reasons


def test_the_first_steps_go_in_full_precision(ranks):
    for way, found, stock in runs_of(ranks, "warm-up"):
        quantized, reasons = found["fired"]
        # A gather belongs to the step before it. The one after the warm-up is the first that differences can follow.
        first = 2 if way.get("overlap_param_gather") else 1
        assert reasons == {policy.WARM_UP: found["buckets"], weight_differences.FIRST: first * found["buckets"]}
        assert quantized == (STEPS - 2) * found["buckets"]
        assert found["losses"][:3] == stock["losses"][:3]


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
        buckets = quantized + reasons[weight_differences.CHANGED]
        assert set(reasons) == {weight_differences.CHANGED} and (what == "one rank") == (quantized > 0)
        assert found["equal"] and found["then"] == (quantized + buckets, reasons)


def test_full_precision_on_request(ranks):
    for seen in ranks:
        found = seen["changes"]["full_precision()"]
        quantized, reasons = found["fired"]
        assert quantized == 0 and set(reasons) == {"full_precision()"}
        assert found["then"][1] == {**reasons, weight_differences.FIRST: reasons["full_precision()"]}


def test_values_written_between_a_step_and_its_gather_stay(ranks):
    for seen in ranks:
        found = seen["changes"]["between step and gather"]
        quantized, reasons = found["fired"]
        assert reasons == {weight_differences.CHANGED: 1} and quantized > 0
        assert found["kept"]


def test_disabling_before_a_gather_loses_no_step(ranks):
    for seen in ranks:
        for found in seen["undone"]:
            assert found["rounded"] and found["equal"]
        assert [found["left"] > 0 for found in seen["undone"]] == [False, False, True]


def test_unsupported_settings_are_refused(ranks):
    for seen in ranks:
        said = seen["refused"]
        assert said["fp8"].startswith("fp8_param_gather and param_bits exclude each other: it is not for parameters in")
        assert said["precision"].startswith("use_precision_aware_optimizer and param_bits exclude each other")
        assert said["fsdp"].startswith("use_torch_fsdp2 and param_bits exclude each other")
        assert said["gathers nothing"].startswith("param_bits has no effect without the distributed optimizer")
        assert all("\n" not in line and line.endswith("leave param_bits at full.") for line in list(said.values())[:3])


def test_a_resumed_run_continues_bit_for_bit(ranks):
    for seen in ranks:
        for way, with_ours, went_on, same, reasons, buckets in seen["resumed"]:
            assert with_ours == went_on == same
            # With overlap, the first forward pass gathers too: the loaded values are there already.
            overlap = bool(way.get("overlap_param_gather"))
            before = {parameters.NOTHING_NEW: buckets} if overlap else {}
            assert reasons == (before if with_ours else {weight_differences.FIRST: (1 + overlap) * buckets})


def test_float32_parameters_have_no_exact_copies(ranks):
    for seen in ranks:
        (quantized, reasons), equal = seen["float32"]
        assert quantized == 0 and set(reasons) == {parameters.NO_MASTERS} and equal


# Tensor parallelism, and several instances


def beside_tensor_parallelism() -> dict[str, Any]:
    """Train at TP 2 x DP 2, 20 steps."""
    from megatron.core import parallel_state

    start_megatron(2)
    seen: dict[str, Any] = {}
    for name, config in (("stock", None), ("4", CONFIG.model_copy(update={"bits": 8}))):
        with trained(config, tp=2, overlap_grad_reduce=True) as training:
            distances = []
            for number in range(20):
                training.step(number)
                distances.append(training.distance())
            seen[name] = {
                "losses": training.losses,
                "distances": distances,
                "equal": training.replicas(),
                "copies": replicas_equal(training.model.float(), parallel_state.get_tensor_model_parallel_group()),
                "fired": fired(),
                "buckets": len(training.ddp.bucket_groups),
            }
    seen["bytes"] = {bits: bytes_of_steps(bits) for bits in ("full", 8, 4)}
    return seen


def bytes_of_steps(bits: int | str) -> dict[str, float]:
    """Train two steps of a model with the example's proportions at a micro-batch of 2, gradients summed in float32.
    Return all sites' bytes with and without the plugin. Tensor parallelism at 8 bits; bits: of parameters.
    """
    size = ModelSize(hidden=256, layers=4, heads=8, sequence=256, batch=2)
    config = FlashConfig(bits=8, backward_bits=8, grad_bits=8 if bits == "full" else bits, param_bits=bits, min_bytes=0)
    with trained(config, tp=2, size=size, grad_reduce_in_fp32=True) as training:
        training.step(0)  # the gather of this step sends whole values
        counters.reset_stats()
        training.run(1, 3)
        stats = counters.stats()
    beside = sum(one["bytes_sent"] for one in stats["beside"].values())
    sites = {name: (site["bytes_sent"], site["bytes_full_precision"]) for name, site in stats["sites"].items()}
    return {"sent": stats["bytes_sent"] + beside, "whole": stats["bytes_full_precision"] + beside, "sites": sites}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, beside_tensor_parallelism, timeout=200, preload=MEGATRON)


def test_copies_stay_the_same_on_the_tensor_parallel_ranks(four):
    for seen in four:
        found = seen["4"]
        assert found["copies"] and found["equal"]
        quantized, reasons = found["fired"]
        assert quantized == 19 * found["buckets"]
        assert (
            reasons[weight_differences.FIRST] == found["buckets"] and 0 < reasons[replicated_params.REASON] <= quantized
        )


def test_the_distance_from_the_exact_values_does_not_grow(four):
    for seen in four:
        found, stock = seen["4"], seen["stock"]
        assert max(found["distances"][10:]) < 1.2 * max(stock["distances"])
        assert found["losses"] == pytest.approx(stock["losses"], rel=5e-3)


def test_bytes_of_the_step(four):
    """Check TP 2 x DP 2, distributed optimizer, min_bytes=0 (a micro-batch's hidden states are 256 KiB here)."""
    for seen in four:
        share = {bits: found["sent"] / found["whole"] for bits, found in seen["bytes"].items()}
        whole = {found["whole"] for found in seen["bytes"].values()}
        print(share, seen["bytes"][4])
        assert max(whole) < 1.001 * min(whole)
        assert share[4] < 0.38 < share[8] < share["full"]


class Chunk(torch.nn.Module):
    """A stage's chunk of a model: a layer, a norm, and an expert, which other ranks have copies of."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        for name, shape in (("dense", (64, 96)), ("norm", (96,)), ("expert", (96, 64))):
            setattr(self, name, torch.nn.Parameter(0.05 * torch.randn(shape)))
        self.expert.allreduce = False  # type: ignore[attr-defined]
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.dense * (1 + self.norm)) @ self.expert


def trained_chunks(overlap: bool, **instances: Any) -> dict[str, Any]:
    """Train two chunks for six steps."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    sharded = {"use_distributed_optimizer": True}
    overlaps = {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    ddp_config = DistributedDataParallelConfig(**sharded, **overlaps, **instances)
    with CudaIsCpu(), enabled(CONFIG):
        counters.reset_stats()
        chunks = [DistributedDataParallel(config, ddp_config, Chunk(number)) for number in range(2)]
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, **sharded), chunks)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
        losses = []
        for _ in range(6):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            y = x
            for chunk in chunks:
                y = y + chunk(y)
            loss = (y.float() - 1).square().mean()
            loss.backward()
            losses.append(float(loss))
            for chunk in chunks:
                chunk.finish_grad_sync()
            assert optimizer.step()[0]
        if overlap:
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)
        steps, (quantized, reasons) = megatron.step(), fired()
    same = {}
    expert_ranks = parallel_state.get_expert_data_parallel_group()
    for kind, group in (("dense", parallel_state.get_data_parallel_group()), ("expert", expert_ranks)):
        mine = torch.cat([getattr(chunk.module, kind).detach().flatten() for chunk in chunks])
        others = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(others, mine, group=group)
        same[kind, group.size()] = all(torch.equal(mine, one) for one in others)
    ranks = chunks[0].bucket_groups[0].intra_distributed_optimizer_instance_size
    found = {"same": same, "losses": losses, "steps": steps, "quantized": quantized, "reasons": reasons}
    return {**found, "ranks": ranks}


def several() -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    start_megatron(expert_model_parallel_size=2)
    found = [trained_chunks(overlap) for overlap in (False, True)]
    parallel_state.destroy_model_parallel()
    instances = {"num_distributed_optimizer_instances": 2}
    start_megatron(**instances)
    torch.cuda.Stream = lambda *_args, **_kwargs: None  # type: ignore[assignment, misc]
    return [*found, trained_chunks(False, **instances)]


def test_experts_chunks_and_instances():
    """Check DP 4: experts on two pairs of ranks; then two instances of the distributed optimizer, each of two ranks."""
    pytest.importorskip("einops")  # Megatron makes the groups of the instances with it
    for plain, overlapped, instances in run_ranks(4, several, timeout=200, preload=MEGATRON):
        for found in (plain, overlapped, instances):
            assert all(found["same"].values()) and found["steps"] == 6
            assert found["losses"][-1] < found["losses"][0]
        assert plain["same"].keys() == {("dense", 4), ("expert", 2)}
        # Two chunks with a bucket of each kind. The step of each kind gathers both kinds, one of them without changes.
        first, nothing_new = weight_differences.FIRST, parameters.NOTHING_NEW
        assert (plain["quantized"], plain["reasons"]) == (20, {first: 6, nothing_new: 22})
        assert (overlapped["quantized"], overlapped["reasons"]) == (20, {first: 8})
        assert (instances["quantized"], instances["reasons"]) == (20, plain["reasons"])
        assert (plain["ranks"], instances["ranks"]) == (4, 2)
