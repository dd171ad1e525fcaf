"""Every seam of megatron-core on two real ranks: it fires, it counts, it changes its own target, no more.

Starting ranks that import Megatron costs seconds, so each fixture runs one rank function that observes many
things and the tests check the result.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import scopes, sequence_parallel, tensor_parallel
from flash_allreduce_plugin.telemetry import counters

WORLD = 2
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
G, F = tensor_parallel.G_FORWARD.name, tensor_parallel.F_BACKWARD.name
DGRAD, FROZEN = tensor_parallel.LINEAR_DGRAD.name, tensor_parallel.FROZEN_LINEAR_DGRAD.name
EMBEDDING = tensor_parallel.EMBEDDING.name
SP_G, SP_F = sequence_parallel.G_FORWARD.name, sequence_parallel.F_BACKWARD.name
SP_DGRAD = sequence_parallel.LINEAR_DGRAD.name
SP_G_BACKWARD, SCATTER = sequence_parallel.G_BACKWARD.name, sequence_parallel.SCATTER_BACKWARD.name
SP_F_FORWARD = sequence_parallel.F_FORWARD.name
GATHER, REGATHER = sequence_parallel.LINEAR_GATHER.name, sequence_parallel.LINEAR_REGATHER.name
GATHERS = [SP_G_BACKWARD, SCATTER, SP_F_FORWARD, GATHER, REGATHER]
SEAMS = [G, F, DGRAD, FROZEN, EMBEDDING]
SEAMS += [SP_G, SP_G_BACKWARD, SP_F_FORWARD, SP_F, SCATTER, GATHER, REGATHER, SP_DGRAD]

BOTH = FlashConfig(bits=8, backward_bits=8, min_bytes=0)
FORWARD_ONLY = FlashConfig(bits=8, min_bytes=0)
DRAWS = 40


def start_megatron() -> Any:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    prepare_cpu()
    return parallel_state.get_tensor_model_parallel_group()


def raw_entries() -> dict[str, Any]:
    """Return the object at each seam's target, staticmethod objects as such."""
    entries = {}
    for seam in tensor_parallel.seams(FlashConfig) + sequence_parallel.seams(FlashConfig):
        *path, name = seam.attribute.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(seam.module))
        entries[seam.id] = inspect.getattr_static(owner, name)
    return entries


def counts(call: Any) -> tuple[Any, dict[str, Any]]:
    """Return the value of `call()` and the counts of each site during it: {site: (quantized, {reason: count})}."""
    counters.reset_stats()
    value = call()
    sites = counters.stats()["sites"]
    return value, {name: (site["quantized"], site["full_precision"]) for name, site in sites.items()}


def loss_and_gradients(model: torch.nn.Module) -> tuple[float, list[torch.Tensor]]:
    data = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    loss = loss_of(model, data, torch.tensor([0, 1000]), SIZE.sequence)
    loss.backward()
    return float(loss), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def model_runs(with_sequence_parallel: bool) -> dict[str, Any]:
    """Run the same step of a GPT with nothing patched, then enabled in several ways, then disabled."""
    model = build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=with_sequence_parallel, seed=3)

    def run() -> Any:
        return counts(lambda: loss_and_gradients(model))

    before = raw_entries()
    seen: dict[str, Any] = {"stock": run()}
    megatron.enable(BOTH)
    seen["both"], seen["both again"] = run(), run()
    patched = raw_entries()
    seen["report"] = megatron.report()
    seen["printed"] = str(megatron.report())
    megatron.enable(FORWARD_ONLY)
    seen["seams stay"] = all(raw_entries()[seam] is patched[seam] for seam in SEAMS)
    seen["forward only"] = run()
    megatron.enable(FlashConfig(enabled=False))
    seen["switched off"] = run()
    megatron.disable()
    megatron.disable()
    seen["all replaced"] = all(patched[seam] is not before[seam] for seam in SEAMS)
    seen["all restored"] = all(raw_entries()[seam] is before[seam] for seam in SEAMS)
    seen["disabled"] = run()
    return seen


def linear_runs(config: Any, group: Any, with_sequence_parallel: bool, frozen: bool = False) -> dict[str, Any]:
    """Return the input gradient of a column-parallel layer, stock and enabled with 8 and full backward bits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    torch.manual_seed(11)
    layer = ColumnParallelLinear(
        64, 128, config=config, init_method=torch.nn.init.xavier_normal_, bias=False, tp_group=group
    )
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(7))
    upstream = torch.randn(16 * (WORLD if with_sequence_parallel else 1), 2, 64)

    def run() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        layer(leaf)[0].backward(upstream)
        return leaf.grad

    seen = {"stock": counts(run)}
    for name, choice in (("both", BOTH), ("forward only", FORWARD_ONLY)):
        megatron.enable(choice)
        seen[name] = counts(run)
        megatron.disable()
    for rounding in ("nearest", "stochastic"):
        megatron.enable(BOTH.model_copy(update={"backward_bits": 4, "codebook": True, "backward_rounding": rounding}))
        seen[rounding] = [run() for _ in range(DRAWS)]
        megatron.disable()
    return seen


class _Log(TorchDispatchMode):
    """Writes down matrix products, in the backward pass too, and lets the test add its own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.lines.append("product")
        return function(*args, **(kwargs or {}))


def overlap(config: Any, group: Any, collective: str) -> list[str]:
    """Return the order of a column-parallel layer's backward: products, start of the collective, wait."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = ColumnParallelLinear(
        64, 128, config=config, init_method=torch.nn.init.xavier_normal_, bias=False, tp_group=group
    )
    real = getattr(reductions, collective)
    log = _Log()

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> Any:
            log.lines.append("wait")
            return self.handle.wait()

    def logged(*args: Any, **kwargs: Any) -> Handle:
        log.lines.append("start async" if kwargs["async_op"] else "start")
        return Handle(real(*args, **kwargs))

    megatron.enable(BOTH)
    setattr(reductions, collective, logged)
    try:
        output = layer(torch.randn(16, 2, 64, requires_grad=True))[0]
        with log:
            output.sum().backward()
    finally:
        setattr(reductions, collective, real)
        megatron.disable()
    return log.lines


def observe_tensor_parallel() -> dict[str, Any]:
    """Return a rank's view of everything without sequence parallelism."""
    group = start_megatron()
    other = dist.new_group(list(range(WORLD)))
    from megatron.core.tensor_parallel import mappings

    seen = model_runs(with_sequence_parallel=False)
    model = build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=False, seed=3)
    seen["linear"] = linear_runs(model.config, group, False)
    seen["frozen linear"] = linear_runs(model.config, group, False, frozen=True)
    seen["overlap"] = overlap(model.config, group, "all_reduce")

    tokens = torch.arange(64).reshape(2, 32)
    positions = torch.arange(32).expand(2, -1)
    seen["embedding stock"] = model.embedding(tokens, positions)
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(rank := dist.get_rank()))
    total = x.clone()
    dist.all_reduce(total)
    integers = torch.arange(1000) + 10**12 + rank

    megatron.enable(BOTH)
    seen["embedding"] = counts(lambda: model.embedding(tokens, positions))
    seen["total"] = total
    g = mappings.reduce_from_tensor_model_parallel_region
    seen["strided"] = counts(lambda: g(x.t(), group).t())
    seen["contiguous"] = counts(lambda: g(x.clone(), group))
    seen["other group"] = counts(lambda: g(x.t(), other).t())
    seen["integers"] = counts(lambda: g(integers.clone(), group))
    seen["sum of integers"] = torch.arange(1000) * 2 + 2 * 10**12 + 1

    def f_backward() -> torch.Tensor:
        leaf = torch.zeros_like(x).requires_grad_()
        mappings.copy_to_tensor_model_parallel_region(leaf, group).backward(x.clone())
        return leaf.grad

    seen["f"] = counts(f_backward)
    megatron.enable(FORWARD_ONLY)
    seen["f full"] = counts(f_backward)
    megatron.disable()
    return seen


def observe_sequence_parallel() -> dict[str, Any]:
    """Return a rank's view of everything with sequence parallelism."""
    group = start_megatron()
    from megatron.core.tensor_parallel import mappings

    seen = model_runs(with_sequence_parallel=True)
    model = build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=True, seed=3)
    seen["linear"] = linear_runs(model.config, group, True)
    seen["frozen linear"] = linear_runs(model.config, group, True, frozen=True)
    seen["overlap"] = overlap(model.config, group, "reduce_scatter")

    rank = dist.get_rank()
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(rank))
    total = x.clone()
    dist.all_reduce(total)
    seen["total"] = total[rank * 20 : (rank + 1) * 20]
    scatter = mappings.reduce_scatter_to_sequence_parallel_region
    megatron.enable(BOTH)
    seen["whole"] = counts(lambda: scatter(x.clone(), group))
    seen["strided"] = counts(lambda: scatter(x.t().contiguous().t(), group))
    seen["buffer"] = counts(lambda: scatter(x.clone(), group, None, True).clone())
    # gloo has no uneven reduce-scatter: this call only checks that Megatron's own path is taken.
    seen["split sizes"] = counts(lambda: outcome(lambda: scatter(x.clone(), group, [20, 20])))
    try:
        scatter(torch.zeros(3, 4), group)
    except ValueError as error:
        seen["indivisible"] = str(error)
    megatron.disable()
    return seen


def outcome(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:
        return str(error)


def pickled(observe: Any) -> bytes:
    """Return this rank's results of `observe`, by value: hundreds of tensors are too many for shared memory."""
    return pickle.dumps(observe())


def observed(observe: Any) -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, pickled, observe, preload=MEGATRON)]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return observed(observe_tensor_parallel)


@pytest.fixture(scope="module")
def sequence() -> list[dict[str, Any]]:
    return observed(observe_sequence_parallel)


@pytest.fixture(params=["plain", "sequence"])
def runs(request: pytest.FixtureRequest) -> tuple[list[dict[str, Any]], str, str]:
    """Run both ways, with the names of the forward and the backward site that a stock GPT uses."""
    return request.getfixturevalue(request.param), *((G, DGRAD) if request.param == "plain" else (SP_G, SP_DGRAD))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def reduced(fired: dict[str, Any]) -> dict[str, Any]:
    """Return the counts without the all-gathers of sequence parallelism, which are in full precision here."""
    return {site: counted for site, counted in fired.items() if site not in GATHERS}


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected)


def test_every_seam_is_replaced_stays_and_is_restored_to_the_same_object(runs):
    for seen in runs[0]:
        assert seen["all replaced"]
        assert seen["seams stay"], "a second enable changes the configuration only"
        assert seen["all restored"]


def test_a_step_fires_the_seams_a_stock_gpt_uses(runs):
    ranks, forward, backward = runs
    for seen in ranks:
        assert seen["stock"][1] == {}
        assert seen["disabled"][1] == {}
        assert reduced(seen["both"][1]) == {
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
            forward: (2 * SIZE.layers, {}),
            backward: (2 * SIZE.layers + 1, {}),
        }
        assert reduced(seen["forward only"][1]) == {
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
            forward: (2 * SIZE.layers, {}),
            backward: (0, {policy.is_full("backward_bits"): 2 * SIZE.layers + 1}),
        }


def test_the_gathers_of_sequence_parallelism_are_counted_in_full_precision(sequence):
    linears = 2 * SIZE.layers
    for seen in sequence:
        for run, reason in (
            ("both", policy.is_full("sequence_parallel_gather_bits")),
            ("forward only", policy.is_full("backward_bits")),
        ):
            assert {site: counted for site, counted in seen[run][1].items() if site in GATHERS} == {
                GATHER: (0, {policy.is_full("sequence_parallel_gather_bits"): linears + 1}),
                REGATHER: (0, {policy.is_full("sequence_parallel_gather_bits"): linears + 1}),
                SP_G_BACKWARD: (0, {reason: linears, policy.EMBEDDING: 1}),
            }


def test_gradients_at_8_bits_are_close_to_full_precision_and_reproducible(runs):
    for seen in runs[0]:
        (loss, gradients), (stock_loss, stock) = seen["both"][0], seen["stock"][0]
        assert loss == pytest.approx(stock_loss, rel=1e-3)
        assert len(gradients) == len(stock) > 10
        for found, expected in zip(gradients, stock, strict=True):
            assert 0 < relative_error(found, expected) < 0.05
        assert all(map(same_bits, seen["both again"][0][1], gradients))


def test_disabled_by_configuration_or_by_call_is_bitwise_stock(runs):
    for seen in runs[0]:
        for way in ("switched off", "disabled"):
            assert seen[way][0][0] == seen["stock"][0][0]
            assert all(map(same_bits, seen[way][0][1], seen["stock"][0][1]))


def test_the_forward_width_alone_decides_the_loss(runs):
    for seen in runs[0]:
        assert seen["forward only"][0][0] == seen["both"][0][0] != seen["stock"][0][0]


def test_report_counts_every_seam_and_prints(runs):
    ranks, forward, _ = runs
    for seen in ranks:
        others = ("data_parallel", "expert", "attention", "pipeline", "shared_gradients", "grouped_queries", "fsdp")
        assert [seam for seam in seen["report"] if not any(map(seam.__contains__, others))] == SEAMS
        assert seen["report"][forward]["quantized"] == seen["report"][forward]["calls"] == 2 * SIZE.layers
        assert seen["report"][EMBEDDING]["full_precision"] == {policy.EMBEDDING: 1}
        assert all(entry["in_place"] and entry["covers"] for entry in seen["report"].values())
        assert f"{forward}: {2 * SIZE.layers} calls, {2 * SIZE.layers} quantized" in seen["printed"]
        assert f"in full precision: 1 {policy.EMBEDDING}" in seen["printed"]


@pytest.mark.parametrize("layer", ["linear", "frozen linear"])
def test_backward_bits_decide_the_input_gradient(runs, layer):
    ranks, _, backward = runs
    site = backward if layer == "linear" else {DGRAD: FROZEN, SP_DGRAD: SP_F}[backward]
    for seen in ranks:
        stock = seen[layer]["stock"][0]
        quantized, fired = seen[layer]["both"]
        assert reduced(fired) == {site: (1, {})}
        assert 0 < relative_error(quantized, stock) < 0.02
        full, fired = seen[layer]["forward only"]
        assert reduced(fired) == {site: (0, {policy.is_full("backward_bits"): 1})}
        assert same_bits(full, stock)


@pytest.mark.parametrize("layer", ["linear", "frozen linear"])
def test_backward_rounding_takes_the_bias_of_input_gradients_away(runs, layer):
    """Check rounding bias: to the nearest, a gradient errs in the same way at every step; at random it does not."""
    for seen in runs[0]:
        stock = seen[layer]["stock"][0]
        nearest, *again = seen[layer]["nearest"]
        assert all(same_bits(one, nearest) for one in again)
        first, second, *_ = drawn = seen[layer]["stochastic"]
        assert not same_bits(first, second)
        assert relative_error(torch.stack(drawn).mean(0), stock) < 0.5 * relative_error(nearest, stock)
        assert relative_error(first, stock) > relative_error(nearest, stock) > 0.02


def test_the_weight_gradient_is_computed_while_the_collective_runs(runs):
    for seen in runs[0]:
        assert seen["overlap"] == ["product", "start async", "product", "wait"]


def test_the_embedding_stays_in_full_precision(plain):
    for seen in plain:
        output, fired = seen["embedding"]
        assert same_bits(output, seen["embedding stock"])
        assert fired == {EMBEDDING: (0, {policy.EMBEDDING: 1})}


def test_g_returns_the_sum_for_strided_input_too(plain):
    for seen in plain:
        for way in ("contiguous", "strided"):
            found, fired = seen[way]
            assert fired == {G: (1, {})}
            assert 0 < relative_error(found, seen["total"]) < 0.02


def test_integers_through_g_are_exact_and_counted(plain):
    for seen in plain:
        found, fired = seen["integers"]
        assert torch.equal(found, seen["sum of integers"])
        assert fired == {G: (0, {"dtype int64": 1})}


def test_another_group_of_the_same_ranks_stays_in_full_precision_and_is_counted(plain):
    for seen in plain:
        found, fired = seen["other group"]
        assert torch.equal(found, seen["total"])
        assert fired == {G: (0, {scopes.OTHER_GROUP: 1})}


def test_f_backward(plain):
    for seen in plain:
        found, fired = seen["f"]
        assert fired == {F: (1, {})}
        assert 0 < relative_error(found, seen["total"]) < 0.02
        found, fired = seen["f full"]
        assert fired == {F: (0, {policy.is_full("backward_bits"): 1})}
        assert torch.equal(found, seen["total"])


def test_reduce_scatter_forward(sequence):
    for seen in sequence:
        for way in ("whole", "strided", "buffer"):
            found, fired = seen[way]
            assert fired == {SP_G: (1, {})}
            assert 0 < relative_error(found, seen["total"]) < 0.02
        assert seen["split sizes"][1] == {SP_G: (0, {sequence_parallel.SPLIT_SIZES: 1})}
        assert seen["indivisible"] == f"{SP_G}: the first dimension, 3, is no multiple of 2 ranks"


def test_all_ranks_see_the_same_bits(plain):
    first, second = plain
    for way in ("contiguous", "strided", "f"):
        assert torch.equal(first[way][0], second[way][0])
    assert first["both"][0][0] == second["both"][0][0]


def test_a_configuration_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="config must be a FlashConfig, got dict"):
        megatron.enable({"bits": 8})


def test_a_megatron_of_another_shape_is_refused_before_anything_changes(monkeypatch):
    from megatron.core.tensor_parallel import mappings

    before = raw_entries()
    changed = staticmethod(lambda ctx, input_: input_)  # as in 0.11 and 0.12, without a group
    monkeypatch.setattr(mappings._ReduceFromModelParallelRegion, "forward", changed)
    with pytest.raises(PatchError) as error:
        megatron.enable(BOTH)
    for part in (
        "megatron.core.tensor_parallel.mappings._ReduceFromModelParallelRegion.forward",
        "(ctx, input_, group)",
        "found (ctx, input_)",
        "megatron-core 0.13 to 0.19",
    ):
        assert part in str(error.value)
    after = raw_entries()
    assert all(after[seam] is before[seam] for seam in SEAMS if seam != G)
