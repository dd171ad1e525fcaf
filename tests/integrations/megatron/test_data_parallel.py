"""Gradient buckets of Megatron's DistributedDataParallel on real ranks: single calls with known gradients, then
training with Megatron's own optimizers, plain and distributed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, prepare_cpu, replicas_equal
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import MismatchError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import arguments, data_parallel, tensor_parallel
from flash_allreduce_plugin.telemetry import counters, other_traffic
from lab.benchmarks.megatron_on_cpu import CudaIsCpu

SITE = data_parallel.GRADIENTS.name
GRADS = FlashConfig(grad_bits=8, min_bytes=0)
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
STEPS = 3


def start_megatron(tensor_parallel_size: int = 1, **options: Any) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size, **options)
    prepare_cpu()
    torch.cuda.current_stream = lambda *_args: None  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[assignment]


@contextlib.contextmanager
def enabled(config: FlashConfig | None) -> Iterator[None]:
    """Enable the plugin, or leave it off if config is None."""
    if config is not None:
        megatron.enable(config)
    try:
        yield
    finally:
        megatron.disable()


def counts() -> dict[str, Any]:
    sites = counters.stats()["sites"]
    return {name: (site["quantized"], site["full_precision"]) for name, site in sites.items()}


# Single calls


def wrapped(**options: Any) -> Any:
    """Return DistributedDataParallel around two parameters of different dtypes, so two buckets in one group."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = torch.nn.Module()
    module.large = torch.nn.Parameter(torch.zeros(64, 96))
    module.small = torch.nn.Parameter(torch.zeros(512, dtype=torch.bfloat16))
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), module, disable_bucketing=True)


def reduce(options: dict[str, Any], config: FlashConfig | None, **finish: Any) -> tuple[Any, ...]:
    """Return buckets after a gradient sync of gradients that depend on the rank (this rank's part of them with the
    distributed optimizer), the number of buckets in the one group, and the counts.
    """
    ddp = wrapped(**options)
    (group,) = ddp.bucket_groups
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for bucket in group.buckets:
        bucket.grad_data.copy_(torch.randn(bucket.grad_data.shape, generator=generator))
    counters.reset_stats()
    with enabled(config):
        if ddp.ddp_config.overlap_grad_reduce:
            group.start_grad_sync(**finish)
            assert group.grad_reduce_handle is not None
        ddp.finish_grad_sync(**finish)
        assert group.grad_reduce_handle is None
    results = []
    for bucket in group.buckets:
        whole = bucket.grad_data
        if ddp.ddp_config.use_distributed_optimizer and not finish:
            whole = whole.chunk(dist.get_world_size())[dist.get_rank()]
        results.append(whole.clone())
    return results, len(group.buckets), counts()


WAYS = [
    dict(use_distributed_optimizer=sharded, overlap_grad_reduce=overlap)
    for sharded, overlap in itertools.product((False, True), repeat=2)
]


def observe_calls() -> dict[str, Any]:
    start_megatron()
    seen: dict[str, Any] = {}
    for i, way in enumerate(WAYS):
        # Stock: one call for each bucket, since gloo does not coalesce two dtypes.
        seen[f"{i} sum"] = reduce(way, GRADS)
        # Megatron divides before the sum, or not at all where the collective averages.
        seen[f"{i} avg"] = reduce({**way, "average_in_collective": True}, GRADS)
        seen[f"{i} small"] = reduce(way, FlashConfig(grad_bits=8, min_bytes=8192))
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(dist.get_world_size())]
    ddp = wrapped(use_distributed_optimizer=True)
    seen["exact"] = []
    for bucket in ddp.bucket_groups[0].buckets:
        each = [torch.randn(bucket.grad_data.shape, generator=g).to(bucket.grad_data.dtype) for g in generators]
        seen["exact"].append(sum(gradient.float() for gradient in each) / len(each))
    forced = "force_all_reduce" in inspect.signature(ddp.finish_grad_sync).parameters  # from megatron-core 0.16 on
    seen["forced"] = reduce(WAYS[2], GRADS, force_all_reduce=True) if forced else seen["0 sum"]
    with megatron.full_precision():
        seen["requested"] = reduce(WAYS[1], GRADS)

    # Parameters are gathered as they are.
    bucket = ddp.bucket_groups[0].buckets[0]
    bucket.param_data.copy_(torch.randn(bucket.param_data.shape, generator=generators[dist.get_rank()]))
    shard = bucket.param_data.chunk(dist.get_world_size())[dist.get_rank()].clone()
    parts = [torch.empty_like(shard) for _ in generators]
    dist.all_gather(parts, shard)
    with enabled(GRADS):
        counters.reset_stats()
        ddp.start_param_sync(force_sync=True)
        ddp.broadcast_params()
    seen["parameters"] = torch.equal(bucket.param_data, torch.cat(parts)), counts()
    return seen


@pytest.fixture(scope="module")
def calls() -> list[dict[str, Any]]:
    return run_ranks(2, observe_calls, preload=MEGATRON)


def exact(seen: dict[str, Any], rank: int, way: dict[str, Any]) -> list[torch.Tensor]:
    return [mean.chunk(2)[rank] if way["use_distributed_optimizer"] else mean for mean in seen["exact"]]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("way", range(len(WAYS)), ids=str)
@pytest.mark.parametrize("operator", ["sum", "avg"])
def test_every_bucket_of_a_group_is_reduced_and_quantized(calls, way, operator):
    for rank, seen in enumerate(calls):
        found, buckets, fired = seen[f"{way} {operator}"]
        assert buckets == 2
        assert fired == {SITE: (2, {})}
        for bucket, mean in zip(found, exact(seen, rank, WAYS[way]), strict=True):
            assert 0 < relative_error(bucket, mean) < 0.02


@pytest.mark.parametrize("way", range(len(WAYS)), ids=str)
def test_a_small_bucket_next_to_a_quantized_one_is_megatrons_own(calls, way):
    for rank, seen in enumerate(calls):
        (large, small), _, fired = seen[f"{way} small"]
        assert fired == {SITE: (1, {policy.SMALL: 1})}
        large_mean, small_mean = exact(seen, rank, WAYS[way])
        if large.dtype == torch.bfloat16:
            large, small, large_mean, small_mean = small, large, small_mean, large_mean
        assert 1e-3 < relative_error(large, large_mean) < 0.02
        assert relative_error(small, small_mean) < 0.01  # bfloat16's own rounding


def test_replicas_of_an_all_reduced_bucket_have_the_same_bits(calls):
    for way in ("0 sum", "1 sum", "1 avg", "forced"):
        for ours, theirs in zip(calls[0][way][0], calls[1][way][0], strict=True):
            assert torch.equal(ours, theirs)


def test_overlap_and_a_forced_all_reduce_change_no_bits(calls):
    for seen in calls:
        for one, other in (("0 sum", "1 sum"), ("2 sum", "3 sum"), ("0 sum", "forced")):
            assert all(map(torch.equal, seen[one][0], seen[other][0]))


def test_full_precision_on_request(calls):
    for rank, seen in enumerate(calls):
        found, _, fired = seen["requested"]
        assert fired == {SITE: (0, {"full_precision()": 2})}
        for bucket, mean in zip(found, exact(seen, rank, WAYS[1]), strict=True):
            assert relative_error(bucket, mean) < (0.01 if bucket.dtype == torch.bfloat16 else 1e-6)


def test_parameters_are_gathered_and_broadcast_in_full_precision(calls):
    for seen in calls:
        assert seen["parameters"] == (True, {})


def observe_one_bucket() -> dict[str, Any]:
    """Observe a single bfloat16 bucket, with Megatron's own float32 accumulation too, which replaces a global of its
    module for good.
    """
    start_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as buffers

    stock = buffers.dist_reduce_scatter_func
    seen: dict[str, Any] = {"switched off": [one_bucket({}, None)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.DISABLE, "1")
        seen["switched off"].append(one_bucket({}, GRADS))
    option = "reduce_scatter_with_fp32_accumulation"  # from megatron-core 0.16 on
    accumulation = {option: True} if hasattr(DistributedDataParallelConfig, option) else {}
    full, small = FlashConfig(min_bytes=0), FlashConfig(grad_bits=8, min_bytes=1 << 20)
    for overlap in (False, True):
        way = dict(use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=None, **accumulation)
        for name, config in (("stock", None), ("full", full), ("8", GRADS), ("small", small)):
            seen[f"{name} {overlap}"] = one_bucket(way, config)
    seen["replaced"] = buffers.dist_reduce_scatter_func is not stock or not accumulation
    seen["mismatch"] = "no error"
    try:  # values that the ranks have not agreed on above
        one_bucket({}, FlashConfig(min_bytes=1, grad_bits=8 if dist.get_rank() else "full"))
    except MismatchError as error:
        seen["mismatch"] = str(error)
    return seen


def one_bucket(options: dict[str, Any], config: FlashConfig | None) -> tuple[torch.Tensor, dict[str, Any]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = torch.nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    transformer = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**options), module)
    (group,) = ddp.bucket_groups
    gradient = group.buckets[0].grad_data
    gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(dist.get_rank())))
    counters.reset_stats()
    with enabled(config):
        if ddp.ddp_config.overlap_grad_reduce:
            group.start_grad_sync()
        ddp.finish_grad_sync()
    return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone(), counts()


@pytest.fixture(scope="module")
def buckets() -> list[dict[str, Any]]:
    return run_ranks(2, observe_one_bucket, preload=MEGATRON)


def test_megatrons_float32_accumulation(buckets):
    for seen in buckets:
        assert seen["replaced"], "Megatron replaces its own global; the seam must not depend on it"
        for overlap in (False, True):
            stock, fired = seen[f"stock {overlap}"]
            assert fired == {}
            for name, reason in (("full", policy.is_full("grad_bits")), ("small", policy.SMALL)):
                found, fired = seen[f"{name} {overlap}"]
                assert torch.equal(found, stock)
                assert fired == {SITE: (0, {reason: 1})}
            found, fired = seen[f"8 {overlap}"]
            assert fired == {SITE: (1, {})}
            assert 0 < relative_error(found, stock.float()) < 0.02


def test_a_rank_with_other_grad_bits_is_found_out(buckets):
    for seen in buckets:
        assert 'grad_bits is "full" on rank 0; 8 on rank 1' in seen["mismatch"]


def test_the_emergency_switch_leaves_everything_to_megatron(buckets):
    for seen in buckets:
        (stock, _), (found, fired) = seen["switched off"]
        assert torch.equal(found, stock)
        assert fired == {SITE: (0, {environment.DISABLE: 1})}


# Training


SMALL = 1000  # bytes: more than a norm's weight has, less than an embedding of positions


def train(
    config: FlashConfig | None, tensor_parallel_size: int, steps: int = STEPS, learned: bool = False, **options: Any
) -> dict[str, Any]:
    """Train some steps of two micro-batches with Megatron's DDP and Adam, from the same seed.

    learned: with an embedding of positions, which has a copy on every tensor-parallel rank.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = options.get("use_distributed_optimizer", False)
    ddp_config = DistributedDataParallelConfig(bucket_size=20_000, **options)
    seed = 5 + parallel_state.get_data_parallel_rank()
    data = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(seed))  # learnt fast: 16 of 256 bytes
    losses, started = [], []
    with CudaIsCpu(), enabled(config):
        model = build_model(SIZE, tensor_parallel=tensor_parallel_size, sequence_parallel=False, seed=3)
        if learned:
            torch.manual_seed(3)
            model.embedding.position_embeddings = torch.nn.Embedding(SIZE.sequence, SIZE.hidden)
            model.embedding.add_position_embedding = True
        ddp = DistributedDataParallel(model.config, ddp_config, model)
        ddp.broadcast_params()
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=sharded, clip_grad=1.0)
        optimizer = get_megatron_optimizer(adam, [ddp])
        counters.reset_stats()
        for step in range(steps):
            ddp.zero_grad_buffer()
            for micro_batch in range(2):
                with ddp.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                    starts = (torch.tensor([0, 1000]) + 40 * (2 * step + micro_batch)) % 3900
                    loss = loss_of(ddp, data, starts, SIZE.sequence)
                    loss.backward()
            losses.append(float(loss.detach()))
            site = counters.stats()["sites"].get(SITE)
            started.append(site["calls"] if site else 0)
            ddp.finish_grad_sync()
            assert optimizer.step()[0]
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = {p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)}
    small = {p for p in copies if p.numel() * 4 < SMALL}
    group = parallel_state.get_data_parallel_group()
    replicas = [torch.empty_like(parameters) for _ in range(group.size())]
    dist.all_gather(replicas, parameters, group=group)
    return {
        "losses": losses,
        "parameters": parameters,
        "buckets": len(ddp.bucket_groups),
        "started before the backward pass was over": started,
        "buckets with small copies": sum(bool(small & bucket.params) for bucket in ddp.bucket_groups),
        "large copies": len(copies - small),
        "replicas equal": all(torch.equal(parameters, other) for other in replicas),
        "copies equal": replicas_equal(model, parallel_state.get_tensor_model_parallel_group()),
        "counts": counts(),
    }


def observe_training(tensor_parallel_size: int, backward_bits: int | str, ways: list[dict[str, Any]]) -> Any:
    start_megatron(tensor_parallel_size)
    widths = dict(bits=8, backward_bits=backward_bits, min_bytes=SMALL)
    seen = []
    for way in ways:
        runs = {"stock": train(None, tensor_parallel_size, **way)}
        runs["full"] = train(FlashConfig(enabled=False), tensor_parallel_size, **way)
        runs["8"] = train(FlashConfig(grad_bits=8, **widths), tensor_parallel_size, **way)
        runs["warm-up"] = train(FlashConfig(grad_bits=8, warmup_steps=2, **widths), tensor_parallel_size, **way)
        # gloo has no AVG of its own.
        averaged = {**way, "average_in_collective": True}
        runs["8 avg"] = train(FlashConfig(grad_bits=8, **widths), tensor_parallel_size, **averaged)
        seen.append(runs)
    return seen


@pytest.fixture(scope="module")
def training() -> list[list[dict[str, Any]]]:
    return run_ranks(2, observe_training, 1, "full", WAYS, timeout=200, preload=MEGATRON)


def test_training_stays_close_to_the_stock_run_and_replicas_agree(training):
    for ways in training:
        for runs in ways:
            stock = runs["stock"]
            start = stock["losses"][0]
            for name in ("8", "8 avg"):
                found = runs[name]
                assert found["replicas equal"]
                assert found["losses"][0] == start, "nothing but gradients is quantized"
                assert found["losses"] == pytest.approx(stock["losses"], rel=1e-3)
                assert not torch.equal(found["parameters"], stock["parameters"])
                assert relative_error(found["parameters"], stock["parameters"]) < 0.01
            assert stock["losses"][-1] < start


def test_switched_off_is_bitwise_stock(training):
    for ways in training:
        for runs in ways:
            assert torch.equal(runs["full"]["parameters"], runs["stock"]["parameters"])
            calls = STEPS * runs["stock"]["buckets"]
            assert runs["full"]["counts"][SITE] == (0, {policy.DISABLED: calls})
            assert runs["stock"]["counts"] == {}


def test_the_first_steps_go_in_full_precision(training):
    for ways in training:
        for runs in ways:
            found, buckets = runs["warm-up"], runs["stock"]["buckets"]
            assert found["counts"][SITE] == ((STEPS - 2) * buckets, {policy.WARM_UP: 2 * buckets})
            assert found["losses"] == runs["stock"]["losses"], "the third loss is of the second step's parameters"


def test_one_call_a_bucket_and_step_and_nothing_else(training):
    for ways in training:
        for way, runs in zip(WAYS, ways, strict=True):
            buckets = runs["8"]["buckets"]
            assert (buckets > 1) is way["overlap_grad_reduce"]
            for name in ("8", "8 avg"):
                fired = runs[name]["counts"]
                assert fired[SITE] == (STEPS * buckets, {})
                others = {site: found for site, found in fired.items() if site != SITE}
                assert all(quantized == 0 and set(why) == {policy.ONE_RANK} for quantized, why in others.values())


def test_overlapped_buckets_start_during_the_backward_pass(training):
    for ways in training:
        for way, runs in zip(WAYS, ways, strict=True):
            buckets = runs["8"]["buckets"]
            started = runs["8"]["started before the backward pass was over"]
            during = buckets if way["overlap_grad_reduce"] else 0
            # In its first step Megatron, from 0.16 on, only learns the order in which gradients become ready.
            assert started[0] in (0, during)
            assert started[1:] == [step * buckets + during for step in range(1, STEPS)]


def by_step(found: dict[str, Any], steps: int) -> tuple[int, dict[str, int]]:
    """Return the counts of gradients of a run in which a call is quantized from SMALL bytes on."""
    return steps * (found["buckets"] + found["large copies"]), {
        replicated_params.REASON: steps * found["buckets with small copies"]
    }


def test_tensor_and_data_parallel_side_by_side():
    """Check TP 2 x DP 2: each kind of reduction on its own group, counted at its own seam."""
    micro_batches = 2 * STEPS
    ways = [WAYS[3]]
    for (runs,) in run_ranks(4, observe_training, 2, 8, ways, timeout=200, preload=MEGATRON):
        found = runs["8"]
        assert found["replicas equal"]
        assert found["losses"] == pytest.approx(runs["stock"]["losses"], rel=5e-3)
        assert found["counts"] == {
            tensor_parallel.EMBEDDING.name: (0, {policy.EMBEDDING: micro_batches}),
            tensor_parallel.G_FORWARD.name: (micro_batches * 2 * SIZE.layers, {}),
            tensor_parallel.LINEAR_DGRAD.name: (micro_batches * (2 * SIZE.layers + 1), {}),
            SITE: by_step(found, STEPS),
        }
        assert found["copies equal"]
        assert torch.equal(runs["full"]["parameters"], runs["stock"]["parameters"])


def train_with_copies() -> list[dict[str, Any]]:
    start_megatron(2)
    config = FlashConfig(grad_bits=3, error_feedback=True, backward_bits=8, min_bytes=SMALL)
    ways = [WAYS[0], WAYS[1], {**WAYS[2], "average_in_collective": True}]
    return [train(config, 2, learned=True, **way) for way in ways]


def test_copies_of_a_parameter_stay_the_same_on_the_tensor_parallel_ranks():
    """Check a bucket with gradients of copies next to those of split parameters, which differ between these ranks."""
    for runs in run_ranks(4, train_with_copies, timeout=250, preload=MEGATRON):
        for found in runs:
            assert found["copies equal"] and found["replicas equal"]
            assert found["counts"][SITE] == by_step(found, STEPS)
            assert found["large copies"] == 1, "the embedding of positions"


def train_for_long(steps: int) -> dict[str, Any]:
    start_megatron(2)
    config = FlashConfig(grad_bits=4, error_feedback=True, rounding="stochastic", backward_bits=8, min_bytes=SMALL)
    return train(config, 2, steps, learned=True, **WAYS[3])


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_copies_are_the_same_after_many_steps_and_the_large_one_is_quantized(steps: int) -> None:
    for found in run_ranks(4, train_for_long, steps, timeout=250, preload=MEGATRON):
        assert found["copies equal"] and found["replicas equal"]
        assert found["counts"][SITE] == by_step(found, steps)
        assert found["large copies"] == 1
        assert found["losses"][-1] < (0.6 if steps == 200 else 0.9) * found["losses"][0]


def reduce_in_instances(min_bytes: int) -> tuple[bool, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Reduce at TP 2 x DP 4, two instances of the distributed optimizer. Return True if a layer norm's gradient lies
    across the two shards of its bucket, its exact average, this rank's part of it at the end, and the counts.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    instances = {"num_distributed_optimizer_instances": 2}
    start_megatron(2, **instances)
    torch.cuda.Stream = lambda *_args, **_kwargs: None  # type: ignore[assignment, misc]
    module = torch.nn.Module()
    for name, numel in (("column", 4096), ("norm", 500), ("row", 4096)):
        setattr(module, name, torch.nn.Parameter(torch.zeros(numel)))
        getattr(module, name).tensor_model_parallel = name != "norm"
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, **instances)
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    ddp = DistributedDataParallel(config, options, module, disable_bucketing=True)
    [bucket] = ddp.bucket_groups[0].buckets
    data, rank = parallel_state.get_data_parallel_group(), dist.get_rank()
    bucket.grad_data.copy_(torch.randn(bucket.grad_data.shape, generator=torch.Generator().manual_seed(rank)))
    norm = module.norm.main_grad
    norm.copy_(torch.randn(norm.shape, generator=torch.Generator().manual_seed(100 + data.rank())))
    exact = norm.clone()
    dist.all_reduce(exact, group=data)
    counters.reset_stats()
    with enabled(FlashConfig(grad_bits=4, min_bytes=min_bytes)):
        ddp.finish_grad_sync()
    first, border = (norm.data_ptr() - bucket.grad_data.data_ptr()) // 4, bucket.grad_data.numel() // 2
    shard = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True).rank()
    mine = slice(border - first) if shard == 0 else slice(border - first, None)
    return first < border < first + norm.numel(), exact[mine] / data.size(), norm[mine].clone(), counts()


def reduce_small_and_large() -> list[Any]:
    return [reduce_in_instances(min_bytes) for min_bytes in (2001, 0)]


def test_copies_across_two_shards_stay_the_same_between_instances_of_the_distributed_optimizer():
    """Check shards that Megatron reduces between the instances: the part of a gradient that lies in one is exact.
    In its bucket, before that, the gradient is quantized if it is large.
    """
    pytest.importorskip("einops")  # Megatron makes the groups of the instances with it
    outcomes = run_ranks(8, reduce_small_and_large, timeout=200)
    for rank, (small, large) in enumerate(outcomes):
        for kind, (across, _, found, _) in enumerate((small, large)):
            assert across
            assert torch.equal(found, outcomes[rank ^ 1][kind][2]), "the other tensor-parallel rank's copy"
        torch.testing.assert_close(small[2], small[1], rtol=1e-5, atol=1e-6)
        assert 0.02 < (large[2] - large[1]).norm() / large[1].norm() < 0.2
        assert small[3][SITE] == (2, {replicated_params.REASON: 2})
        assert large[3][SITE] == (3, {replicated_params.REASON: 1}), (
            "the copy, the rest, and the shard between instances"
        )


# All that leaves a rank


def observe_traffic() -> dict[str, Any]:
    """Return the counters of a run without us, and of two with the plugin."""
    start_megatron(2)

    class Owner:
        """Counts the sent bytes without us, too."""

    owner, seen = Owner(), {}
    other_traffic.attach(owner)
    for name, config in (
        ("stock", None),
        ("8", FlashConfig(bits=8, backward_bits=8, grad_bits=8, min_bytes=0)),
        ("small", FlashConfig(bits=8, backward_bits=8, grad_bits=8)),
        ("default", FlashConfig(min_bytes=0)),
    ):
        train(config, 2, use_distributed_optimizer=True)
        seen[name] = counters.stats()
    seen["summary"] = arguments.summary()
    return seen


def test_the_summary_adds_up_to_all_that_leaves_a_rank():
    """Check at TP 2 x DP 2, distributed optimizer: quantized, unquantized and other bytes sum to Megatron's bytes."""
    for seen in run_ranks(4, observe_traffic, timeout=200):
        stock = seen["stock"]
        assert stock["sites"] == {}
        whole = sum(one["bytes_sent"] for one in stock["beside"].values())
        for name in ("8", "small", "default"):
            stats = seen[name]
            others = sum(one["bytes_sent"] for one in stats["beside"].values())
            assert stats["bytes_full_precision"] + others == whole, name
            gathers = [key for key in stats["beside"] if key.startswith("all_gather, DATA_PARALLEL_GROUP")]
            assert gathers and all(stats["beside"][key] == stock["beside"][key] for key in gathers)
            assert not any(key.startswith("reduce_scatter, DATA_PARALLEL") for key in stats["beside"])
        assert seen["8"]["quantized"] > 0 and seen["small"]["quantized"] == 0
        lines = seen["summary"].splitlines()
        assert f"of {whole / 1e6:.2f} MB" in lines[0]
        assert any(line.startswith("  outside the plugin: all_gather, DATA_PARALLEL_GROUP") for line in lines)
        assert "by the plugin" in lines[-1] and lines[-1].endswith("% outside the plugin")


# Steps without a reduction


def without_reductions(sharded: bool) -> list[str]:
    """Run two healthy steps, then four of a loop that does not finish its gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    start_megatron()
    data = torch.randint(16, (2000,), generator=torch.Generator().manual_seed(5))
    text = io.StringIO()
    with CudaIsCpu(), enabled(GRADS), contextlib.redirect_stdout(text):
        model = build_model(SIZE, tensor_parallel=1, sequence_parallel=False, seed=3)
        how = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        ddp = DistributedDataParallel(model.config, how, model)
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=sharded)
        optimizer = get_megatron_optimizer(adam, [ddp])
        for step in range(6):
            ddp.zero_grad_buffer()
            loss_of(ddp, data, torch.tensor([0, 1000]), SIZE.sequence).backward()
            if step < 2:
                ddp.finish_grad_sync()
            optimizer.step()
    return [line for line in text.getvalue().splitlines() if "had no reduction" in line]


@pytest.mark.parametrize("sharded", [False, True])
def test_steps_without_a_reduction_are_named(sharded):
    first, second = run_ranks(2, without_reductions, sharded, preload=MEGATRON)
    assert len(first) == 1
    assert first[0].startswith("flash all-reduce: Megatron's DistributedDataParallel: 3 steps of the optimizer")
    assert second == []
