"""Error feedback: the quantization error of a gradient is added to the next one, and nothing else changes."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import error_feedback, flat
from flash_allreduce_plugin.integrations.ddp.hook import REBUILT, _Reduction
from flash_allreduce_plugin.policy import Plan, Site
from tests.distributed import Ranks

Case = dict[str, Any]
NUMEL = 16_000 - 3  # ragged, and with small chunks several of them
SITE = Site("gradients")
SMALL_CHUNKS = 4096


def configuration(**fields: Any) -> fap.FlashConfig:
    return fap.FlashConfig(**{"min_bytes": 0, "chunk_bytes": SMALL_CHUNKS, "error_feedback": True, **fields})


def gradient(dtype: torch.dtype = torch.float32, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def reduced(collective: str, x: torch.Tensor, config: fap.FlashConfig, slot: Any) -> torch.Tensor:
    """Return the sum over the ranks, or this rank's part of it (uneven: parts of different sizes)."""
    if slot is None:
        config = config.model_copy(update={"error_feedback": False})  # else the call is counted, and a line printed
    world, rank = dist.get_world_size(), dist.get_rank()
    if collective == "all_reduce":
        result = x.clone()
        fap.all_reduce(result, config=config, site=SITE, feedback=slot)
        return result
    if collective == "reduce_scatter":
        x = x[: len(x) // world * world]
        result = x.new_empty(len(x) // world)
        fap.reduce_scatter(result, x, config=config, site=SITE, feedback=slot)
        return result
    parts = list(x.split([len(x) - 700 * (world - 1), *[700] * (world - 1)]))
    result = x.new_empty(len(parts[rank]))
    fap.reduce_scatter(result, parts, config=config, site=SITE, feedback=slot)
    return result


COLLECTIVES = ["all_reduce", "reduce_scatter", "uneven"]


def errors_of_average(
    collective: str, fields: Case, steps: int, numel: int = NUMEL, momentum: float = 0.0
) -> tuple[float, float]:
    """Return the average's relative error over the steps of a constant gradient, without feedback and with."""
    config, owner = configuration(**fields), fap.Feedback(momentum=momentum)
    x = gradient(numel=numel)
    exact = reduced(collective, x, fap.FlashConfig(enabled=False), None)
    errors = []
    for slot in (None, owner.slot("x")):
        mean = sum(reduced(collective, x, config, slot) for _ in range(steps)) / steps
        errors.append(float((mean - exact).norm() / exact.norm()))
    return errors[0], errors[1]


def held_back(collective: str, fields: Case) -> dict[str, float]:
    """Reduce a gradient with two thirds zero at every other step. Return the result there and the average's error."""
    config, owner = configuration(**fields), fap.Feedback(momentum=0.0)
    x, steps = gradient(), 24
    rests = torch.arange(NUMEL) // 40 % 3 != 0
    total, exact, not_zero = 0.0, 0.0, 0
    off = fap.FlashConfig(enabled=False)
    for step in range(2 * steps):
        now = torch.where(rests, 0.0, x) if step % 2 else x
        result, plain = reduced(collective, now, config, owner.slot("x")), reduced(collective, now, off, None)
        not_zero += int((result[plain == 0] != 0).sum())
        total, exact = total + result, exact + plain
    assert isinstance(total, torch.Tensor) and isinstance(exact, torch.Tensor)
    return {"not zero": not_zero, "error": float((total - exact).norm() / exact.norm())}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_guarantee_8_a_residual_waits_where_the_gradient_is_zero(
    ranks: Callable[[int], Ranks], collective: str
) -> None:
    for fields in ({"bits": 3}, {"bits": 4, "compact": True}, {"bits": 8, "range": "mse"}):
        for seen in ranks(2).run(held_back, collective, fields):
            assert seen["not zero"] == 0 and seen["error"] < 0.04, (fields, seen)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_average_converges(ranks: Callable[[int], Ranks], world: int, bits: int) -> None:
    steps = 32
    for collective in COLLECTIVES:
        for without, with_feedback in ranks(world).run(errors_of_average, collective, {"bits": bits}, steps):
            # The sum of the sent values lacks one residual in all: 1 / steps of it a step.
            assert with_feedback < 1.5 / steps * without, (collective, without, with_feedback)


@pytest.mark.parametrize("momentum", [0.5, 0.8])
def test_the_average_converges_with_momentum(ranks: Callable[[int], Ranks], momentum: float) -> None:
    steps = 32
    for collective in COLLECTIVES:
        for without, with_feedback in ranks(2).run(errors_of_average, collective, {"bits": 3}, steps, NUMEL, momentum):
            # One residual in all over 1 - momentum: each step adds that share of the error.
            assert with_feedback < 1.5 / steps / (1 - momentum) * without, (collective, without, with_feedback)


def test_a_momentum_that_cannot_be() -> None:
    for momentum in (-0.1, 1.0):
        with pytest.raises(ValueError, match="expected 0 or more and below 1"):
            fap.Feedback(momentum=momentum)


def test_the_configurations_momentum_and_reset_interval(ranks: Callable[[int], Ranks]) -> None:
    for same, other in ranks(2).run(configured):
        assert same and not other
    owner = fap.Feedback.from_config(configuration(error_feedback_reset_interval=5))
    assert (owner._interval, owner._momentum) == (5, 0.8)


def configured() -> tuple[bool, bool]:
    """Return True if an owner from a configuration equals one with its momentum, and one with the default."""
    config, x = configuration(bits=3, error_feedback_momentum=0.0), gradient()
    owners = [fap.Feedback.from_config(config), fap.Feedback(momentum=0.0), fap.Feedback()]
    results = [[reduced("all_reduce", x, config, owner.slot("x")) for _ in range(3)][-1] for owner in owners]
    return torch.equal(results[0], results[1]), torch.equal(results[0], results[2])


OPTIONS: list[Case] = [
    {"hadamard": True},
    {"spike_reserving": True},
    {"symmetric": True, "group_size": 32},
    {"compact": True, "group_size": 64},
    {"range": "mse"},
    {"rounding": "stochastic"},
    {"reduce_bits": 2, "gather_bits": 5},
]


@pytest.mark.parametrize("fields", OPTIONS, ids=lambda fields: "-".join(fields))
def test_the_average_converges_with_every_option(ranks: Callable[[int], Ranks], fields: Case) -> None:
    for collective in ("all_reduce", "reduce_scatter"):
        for without, with_feedback in ranks(2).run(errors_of_average, collective, {"bits": 3, **fields}, 32):
            assert with_feedback < 0.5 * without if "rounding" in fields else with_feedback < 0.1 * without


def sums_of_what_was_lost(collective: str, momentum: float) -> tuple[list[float], list[float]]:
    """Rotate a gradient with many zeros at 2 bits. Return the largest lost sum at zeros and elsewhere in 50 steps."""
    config, owner = configuration(bits=2, hadamard=True), fap.Feedback(momentum=momentum)
    x = gradient(numel=1000)  # 7 groups and a ragged one
    x[torch.arange(1000) % 3 != 0] = 0.0
    exact = reduced(collective, x, fap.FlashConfig(enabled=False), None)
    lost, zero, rest = torch.zeros_like(exact), [], []
    for step in range(1, 201):
        lost += exact - reduced(collective, x, config, owner.slot("x"))
        if step % 50 == 0:
            zero.append(float(lost[exact == 0].abs().max()))
            rest.append(float(lost[exact != 0].abs().max()))
    return zero, rest


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_rotated_zeros_lose_no_more_than_other_elements(ranks: Callable[[int], Ranks], momentum: float) -> None:
    for collective in ("all_reduce", "reduce_scatter"):
        for zero, rest in ranks(2).run(sums_of_what_was_lost, collective, momentum):
            assert max(zero) < 1.5 * max(rest), (collective, zero, rest)
            assert max(zero) < 1.5 * zero[0], (collective, zero)  # no growth from step 50 to step 200


def first_calls(collective: str, dtype: torch.dtype, fields: Case) -> list[torch.Tensor]:
    """Reduce one gradient without feedback, with an empty residual, and with the residual of that call."""
    config, owner = configuration(**fields), fap.Feedback()
    x = gradient(dtype)
    if dist.get_rank() == 0:
        x[0] = -0.0
    results = []
    for slot in (None, owner.slot("x"), owner.slot("x")):
        forget_draws()
        results.append(reduced(collective, x, config, slot))
    return results


def forget_draws() -> None:
    """Reset the group's count of calls, so that stochastic rounding draws the same random numbers for each."""
    from flash_allreduce_plugin.runtime import groups

    assert dist.group.WORLD is not None
    groups.state_of(dist.group.WORLD).draws = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fields", [{}, *OPTIONS], ids=lambda fields: "-".join(fields) or "plain")
def test_without_a_residual_the_bits_are_the_same(
    ranks: Callable[[int], Ranks], fields: Case, dtype: torch.dtype
) -> None:
    for collective in COLLECTIVES:
        for off, first, second in ranks(2).run(first_calls, collective, dtype, {"bits": 3, **fields}):
            assert torch.equal(off.view(torch.uint8), first.view(torch.uint8)), collective
            assert not torch.equal(first, second), collective


def chunked(chunk_bytes: int) -> list[torch.Tensor]:
    owner = fap.Feedback()
    x = gradient(numel=20_000)
    return [reduced("all_reduce", x, configuration(bits=3, chunk_bytes=chunk_bytes), owner.slot(0)) for _ in range(3)]


def test_replicas_and_chunk_sizes_agree(ranks: Callable[[int], Ranks]) -> None:
    first, *others = [result for size in (SMALL_CHUNKS, 1 << 20) for result in ranks(3).run(chunked, size)]
    for other in others:
        assert all(map(torch.equal, first, other))


def poisoned(collective: str, bad: float) -> tuple[bool, bool, float, dict[str, int]]:
    """Make a step with a bad element at one rank, then many good ones. Return also the error of their average."""
    fap.reset_stats()
    config, owner = configuration(bits=3), fap.Feedback(momentum=0.0)
    x = gradient()
    exact = reduced(collective, x, fap.FlashConfig(enabled=False), None)
    owner.begin()
    reduced(collective, x, config, owner.slot())
    owner.begin()
    spoiled = x.clone()
    if dist.get_rank() == 1:
        spoiled[7] = bad
    reduced(collective, spoiled, config, owner.slot())
    left = bool(next(iter(owner._residuals.values())).before.any())
    # Even if the residuals were kept, nothing of the bad group has stayed.
    kept = reduced(collective, x, config, owner.slot("0"))
    results = []
    for _ in range(32):
        owner.begin()
        results.append(reduced(collective, x, config, owner.slot()))
    error = float((sum(results) / 32 - exact).norm() / exact.norm())
    return bool(kept.isfinite().all()), left, error, fap.stats()["sites"]["gradients"]["residuals_dropped"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_non_finite_values_leave_no_residual(ranks: Callable[[int], Ranks], collective: str, bad: float) -> None:
    outcomes = ranks(2).run(poisoned, collective, bad)
    for finite, left, error, _ in outcomes:
        assert finite and left
        assert error < 0.02
    # An all-reduce shows it to every rank, a reduce-scatter to the owner.
    assert outcomes[0][3] == {error_feedback.NOT_FINITE: 1}
    assert outcomes[1][3] == ({error_feedback.NOT_FINITE: 1} if collective == "all_reduce" else {})


def changing() -> dict[str, Any]:
    fap.reset_stats()
    config, owner = configuration(bits=3), fap.Feedback()
    seen = {}
    for name, x, fields in (
        ("first", gradient(), {}),
        ("size", gradient(numel=4000), {}),
        ("dtype", gradient(torch.bfloat16, 4000), {}),
        ("bits", gradient(torch.bfloat16, 4000), {"bits": 4}),
    ):
        now = config.model_copy(update=fields)
        with_feedback = reduced("all_reduce", x, now, owner.slot("x"))
        seen[name] = torch.equal(with_feedback, reduced("all_reduce", x, now, None))
    reduced("all_reduce", gradient(torch.int64), now, owner.slot("x"))  # in full precision
    return {**seen, "keys": owner.keys(), "bytes": owner.nbytes(), **fap.stats()["residuals_dropped"]}


def test_another_layout_drops_and_is_counted(ranks: Callable[[int], Ranks]) -> None:
    for seen in ranks(2).run(changing):
        assert seen.pop("bytes") == 32 * 130 + 16 * 130, "1 byte an element and 2 a group, half as much after the sum"
        assert seen == {
            "first": True,
            "size": True,
            "dtype": True,
            "bits": True,
            "keys": ["x"],
            error_feedback.LAYOUT: 3,
        }


def passes(interval: int) -> tuple[list[bool], dict[str, int]]:
    """Return at which steps the result was as without feedback, two calls a step."""
    fap.reset_stats()
    config, owner = configuration(bits=3), fap.Feedback(interval)
    fresh = []
    for step in range(7):
        owner.begin(step)
        for scale in (1.0, 2.0):
            x = scale * gradient()
            result = reduced("all_reduce", x, config, owner.slot())
        fresh.append(torch.equal(result, reduced("all_reduce", x, config, None)))
    assert owner.keys() == ["0", "1"]
    owner.reset()
    return fresh, fap.stats()["residuals_dropped"]


def test_the_reset_interval(ranks: Callable[[int], Ranks]) -> None:
    for fresh, dropped in ranks(2).run(passes, 3):
        assert fresh == [True, False, False, True, False, False, True]
        assert dropped == {error_feedback.INTERVAL: 4, error_feedback.ASKED: 2}
    assert ranks(2).run(passes, 0)[0][0] == [True] + 6 * [False]


def test_the_owned_groups_of_every_chunk_have_their_place() -> None:
    config = configuration()
    plan = Plan(config.format(), config.format(2), SMALL_CHUNKS)
    for world in (2, 3, 8):
        for numel in (1, 127, 5000, 100_000):
            before, after = flat.groups_of_residual("all_reduce", [numel], plan, world)
            assert before == -(-numel // 128)
            assert before <= world * after < before + world * (2 + before * 132 // SMALL_CHUNKS)


# DistributedDataParallel

WIDTH, STEPS = 64, 4


def ddp_model(config: fap.FlashConfig, rebuilds: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.03, find_unused_parameters=not rebuilds)
    hook = fap.ddp_hook(config)
    ddp.register_comm_hook(None, hook)
    return ddp, hook, torch.optim.SGD(ddp.parameters(), lr=0.2)


def ddp_steps(ddp: Any, optimizer: Any, steps: range, accumulate: bool = False) -> None:
    for step in steps:
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        if accumulate:
            with ddp.no_sync():
                (ddp(x) - x).square().mean().backward()
        (ddp(x) - x.flip(1)).square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def ddp_runs(rebuilds: bool, accumulate: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, on in (("on", True), ("off", False)):
        fap.reset_stats()
        ddp, hook, optimizer = ddp_model(configuration(bits=3, error_feedback=on), rebuilds)
        ddp_steps(ddp, optimizer, range(STEPS), accumulate)
        stats = fap.stats()
        seen[name] = weights(ddp)
        seen[f"{name} dropped"] = stats["residuals_dropped"]
        seen["calls"] = stats["quantized"]
        if on:
            seen["keys"] = hook.feedback.keys()
            seen["left"] = all(bool(kept["before"].any()) for kept in hook.feedback.state_dict()["residuals"].values())
            seen["step"] = hook.feedback.step
        else:
            assert hook.feedback is None
    return seen


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rebuilds", [False, True])
def test_ddp(ranks: Callable[[int], Ranks], rebuilds: bool, accumulate: bool) -> None:
    seen = ranks(2).run(ddp_runs, rebuilds, accumulate)
    for one in seen:
        assert not torch.equal(one["on"], one["off"])
        assert torch.equal(one["on"], seen[0]["on"]), "the replicas have drifted apart"
        assert one["left"] and one["step"] == STEPS
        assert one["off dropped"] == {}
        if not rebuilds:
            assert one["on dropped"] == {}
            assert STEPS * len(one["keys"]) == one["calls"]
        else:
            assert set(one["on dropped"]) <= {"DDP rebuilt its buckets", error_feedback.LAYOUT}


def test_a_bucket_that_ddp_rebuilt_starts_without_residuals() -> None:
    fap.reset_stats()
    reduction = _Reduction(configuration())
    owner, (a, b) = reduction.feedback, (nn.Parameter(torch.zeros(8)) for _ in range(2))
    assert owner is not None
    for parameters, kept in (([a, b], 0), ([a, b], 1), ([b, a], 0), ([b, a], 1)):
        slot = reduction.slot(1, parameters)
        assert slot is not None and len(owner.keys()) == kept
        slot.open("16 elements", SITE, (1, 1), 128, torch.device("cpu"))
    assert fap.stats()["residuals_dropped"] == {REBUILT: 1}


def ddp_resumed(interval: int) -> dict[str, Any]:
    """Run six steps; then three, saved to a file, and three in new objects, with the residuals and without."""
    config = configuration(bits=3, error_feedback_reset_interval=interval)
    ddp, _, optimizer = ddp_model(config, False)
    ddp_steps(ddp, optimizer, range(6))
    seen = {"straight": weights(ddp)}
    ddp, hook, optimizer = ddp_model(config, False)
    ddp_steps(ddp, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": ddp.state_dict(), "feedback": hook.feedback.state_dict()}, file)
    for name in ("resumed", "forgotten"):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        ddp, hook, optimizer = ddp_model(config, False)
        ddp.load_state_dict(state["model"])
        if name == "resumed":
            hook.feedback.load_state_dict(state["feedback"])
        ddp_steps(ddp, optimizer, range(3, 6))
        seen[name] = weights(ddp)
    return seen


@pytest.mark.parametrize("interval", [0, 5])
def test_ddp_resumes_bit_for_bit(ranks: Callable[[int], Ranks], interval: int) -> None:
    for seen in ranks(2).run(ddp_resumed, interval):
        assert torch.equal(seen["resumed"], seen["straight"])
        assert not torch.equal(seen["forgotten"], seen["straight"])


def loaded_elsewhere() -> tuple[list[str], bool]:
    """Load the residual that a group of two ranks left in the group of three."""
    config, owner = configuration(bits=3), fap.Feedback()
    x = gradient()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        fap.all_reduce(x.clone(), group=pair, config=config, feedback=owner.slot("x"))
    other = fap.Feedback()
    other.load_state_dict(owner.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = reduced("all_reduce", x, config, other.slot("x"))
    return [str(warning.message) for warning in caught], torch.equal(result, reduced("all_reduce", x, config, None))


def test_the_residuals_of_another_number_of_ranks_are_dropped_with_a_warning(ranks: Callable[[int], Ranks]) -> None:
    for rank, (messages, same) in enumerate(ranks(3).run(loaded_elsewhere)):
        assert same, rank
        assert len(messages) == (1 if rank < 2 else 0)
        assert all(f"rank {rank} of 2" in message and f"rank {rank} of 3" in message for message in messages)


def records(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers in the format of a residual, one group of 128 a row."""
    return fap.encode(numbers, fap.FlashConfig(symmetric=True)).view(len(numbers), -1)


RECORDS = records(torch.ones(2, 128))
DAMAGED: dict[str, tuple[tuple[str, ...], Any, str]] = {  # its path, the damage, the path in the message
    "nothing in it": ((), {}, "state['step']"),
    "no state": ((), [], "state"),
    "a text for the step": (("step",), "3", "state['step']"),
    "a step that is no number": (("step",), math.nan, "state['step']"),
    "a step below 0": (("step",), -1, "state['step']"),
    "a number for finite": (("finite",), 1, "state['finite']"),
    "no residuals": (("residuals",), None, "state['residuals']"),
    "a residual without layout": (("residuals", "x"), {"before": RECORDS}, "state['residuals']['x']['layout']"),
    "a number for a layout": (("residuals", "x", "layout"), 7, "state['residuals']['x']['layout']"),
    "a text for records": (("residuals", "x", "before"), "x", "state['residuals']['x']['before']"),
    "int8": (("residuals", "x", "before"), RECORDS.to(torch.int8), "state['residuals']['x']['before']"),
    "1-D": (("residuals", "x", "after"), RECORDS[0], "state['residuals']['x']['after']"),
    "of no group size": (("residuals", "x", "after"), RECORDS[:, :99].clone(), "state['residuals']['x']['after']"),
    "NaN": (("residuals", "x", "after"), records(torch.full((2, 128), math.nan)), "state['residuals']['x']['after']"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_state_is_refused_and_nothing_changed(damage: str) -> None:
    (*path, last), new, found = DAMAGED[damage][0] or ("",), *DAMAGED[damage][1:]
    layout = "of another run"
    owner, state = fap.Feedback(), {"step": 4, "finite": False, "residuals": {}}
    state["residuals"] = {"x": {"layout": layout, "before": RECORDS.clone(), "after": RECORDS.clone()}}
    owner.load_state_dict(state)
    damaged = copy.deepcopy(state)
    place: Any = damaged
    for key in path:
        place = place[key]
    if last:
        place[last] = new
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        owner.load_state_dict(damaged if last else new)
    message = str(caught.value)
    assert message.startswith(f"{found} is not as Feedback.state_dict gives it; expected step ") and "\n" not in message
    kept = owner.state_dict()
    assert (kept["step"], kept["finite"], list(kept["residuals"])) == (4, False, ["x"])
    assert torch.equal(kept["residuals"]["x"]["before"], RECORDS) and kept["residuals"]["x"]["layout"] == layout


# FSDP2


def fsdp_run(config: fap.FlashConfig, shared: bool, accumulate: bool = False) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    fap.reset_stats()
    torch.manual_seed(7)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    for block in net:
        fully_shard(block)
    fully_shard(net)
    one, comms = fap.FlashReduceScatter(config), []
    for module in net.modules():
        if isinstance(module, FSDPModule):
            comms.append(one if shared else fap.FlashReduceScatter(config))
            module.set_custom_reduce_scatter(comms[-1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(1 + accumulate):
            seed = 100 * step + 10 * micro + dist.get_rank()
            x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
            (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    owners = [comm.feedback for comm in dict.fromkeys(comms) if comm.feedback is not None]
    kept = [r for owner in owners for r in owner.state_dict()["residuals"].values()]
    return {
        "weights": torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()]),
        "residuals": len(kept),
        "left": all(bool(r["before"].any()) for r in kept),
        "steps": {owner.step for owner in owners if owner.keys()},
        "dropped": fap.stats()["residuals_dropped"],
    }


def test_fsdp(ranks: Callable[[int], Ranks]) -> None:
    for accumulate in (False, True):
        off = ranks(2).run(fsdp_run, configuration(bits=3, error_feedback=False), False, accumulate)
        alone, shared = (ranks(2).run(fsdp_run, configuration(bits=3), way, accumulate) for way in (False, True))
        for rank in range(2):
            assert off[rank]["residuals"] == 0
            for found in (alone[rank], shared[rank]):
                assert found["residuals"] == 3 and found["left"] and found["dropped"] == {}
                assert found["steps"] == {STEPS * (1 + accumulate)}
                assert not torch.equal(found["weights"], off[rank]["weights"])
                assert torch.equal(found["weights"], alone[0]["weights"]), "shared or not, the same residuals"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_element_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    for numel in (0, 1, 5000):
        x = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
        assert error_feedback._is_finite(x), "its squares are not, and it is"
        for value in (math.nan, math.inf, -math.inf):
            for place in {0, numel - 1} if numel else ():
                worse = torch.zeros_like(x)
                worse[place] = value
                assert not error_feedback._is_finite(worse)
