"""enabled "auto" on ranks: the faster way stays, the same on all ranks; nothing hangs, and decisions are kept."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.policy import topology
from flash_allreduce_plugin.runtime import auto, checkpoint, groups
from flash_allreduce_plugin.runtime.verdict import LEVELS, Switches
from tests.codecs import same_bits
from tests.distributed import Ranks, run_ranks

AUTO = fap.FlashConfig(bits=4, min_bytes=0, enabled="auto", error_feedback=True)
FIRST, SECOND = fap.Site("first"), fap.Site("second")
STEPS = 60  # more than the trial of one site takes
SLOW = 0.03  # seconds: more than steps vary on a busy machine
NUMEL = 4000


@contextmanager
def slowly(
    module: Any, name: str, seconds: float = SLOW, when: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """Make a function take so much longer."""
    original = getattr(module, name)

    def later(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            time.sleep(seconds)
        return original(*arguments, **named)

    with mock.patch.object(module, name, later):
        yield


def slow_codec(seconds: float = SLOW) -> Any:
    stack = ExitStack()
    for name in ("encode", "encode_feedback"):
        stack.enter_context(slowly(rows, name, seconds))
    return stack


def slow_wire() -> Any:
    """Slow down calls in full precision."""
    return slowly(transport, "all_reduce")


def fresh() -> None:
    """Reset: no trial, no decision, no counts."""
    auto.load_state_dict({})
    fap.reset_stats()


def tensor(step: int, site: fap.Site = FIRST) -> Tensor:
    seed = 100 * step + dist.get_rank() + 10_000 * (site is SECOND)
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def train(steps: range, config: fap.FlashConfig = AUTO, sites: tuple[fap.Site, ...] = (FIRST,)) -> list[Tensor]:
    """Run one all-reduce of each site a step. Return the results."""
    feedback = fap.Feedback.from_config(config)
    results = []
    for step in steps:
        feedback.begin(step)
        for site in sites:
            results.append(tensor(step, site))
            fap.all_reduce(results[-1], config=config, site=site, step=step, feedback=feedback.slot(site.name))
    return results


def decided(slow: Callable[[], Any], sites: tuple[fap.Site, ...] = (FIRST,), steps: int = STEPS) -> dict[str, Any]:
    """Return the decision of a training in which something is slow, and the counters."""
    fresh()
    with slow():
        train(range(steps), sites=sites)
    counts = fap.stats()["sites"]
    found = {name: (one["quantized"], dict(one["full_precision"])) for name, one in counts.items()}
    decision = auto.decision()
    return {"decision": None if decision is None else decision.said(), "counts": found}


@pytest.mark.parametrize("world", [2, 3])
def test_faster_sites_stay_on_at_every_rank(ranks: Callable[[int], Ranks], world: int) -> None:
    off = ranks(world).run(decided, slow_codec)
    assert off == [off[0]] * world and off[0]["decision"] == {"on": False, "but": []}
    quantized, reasons = off[0]["counts"]["first"]
    assert 3 <= quantized <= STEPS // 3, "a slow way is not taken often (exactly: test_alternation.py)"
    assert set(reasons) == {policy.TRIAL, policy.SLOWER} and sum(reasons.values()) + quantized == STEPS
    on = ranks(world).run(decided, slow_wire)
    assert on == [on[0]] * world and on[0]["decision"] == {"on": True, "but": []}
    quantized, reasons = on[0]["counts"]["first"]
    assert set(reasons) == {policy.TRIAL} and reasons[policy.TRIAL] <= STEPS // 2


def first_is_slow_to_encode_second_to_send() -> Any:
    """Slow them down so that only the second pays."""
    stack = ExitStack()
    site: list[str] = []
    decide = fap.api.reductions.decide

    def noting(call: Any) -> Any:
        site[:] = [call.request.site.name]
        return decide(call)

    stack.enter_context(mock.patch.object(fap.api.reductions, "decide", noting))
    stack.enter_context(slowly(rows, "encode_feedback", when=lambda *_: site == ["first"]))
    stack.enter_context(slowly(transport, "all_reduce", when=lambda *_: site == ["second"]))
    return stack


def test_each_site_is_switched_alone(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2).run(decided, first_is_slow_to_encode_second_to_send, (FIRST, SECOND), 120)
    assert found[0] == found[1]
    switches = Switches.of(found[0]["decision"])
    assert (switches.has("first"), switches.has("second")) == (False, True), found[0]


def small_site(steps: int) -> list[str]:
    """Decide for two sites. One sends next to nothing: it is not tried alone, and joins the other."""
    fresh()
    lines: list[str] = []
    config = AUTO.model_copy(update={"error_feedback": False})  # no line of calls without a slot
    with slow_wire(), mock.patch.object(auto.notices, "say", lines.append):
        for step in range(steps):
            fap.all_reduce(tensor(step), config=config, site=FIRST, step=step)
            fap.all_reduce(torch.ones(20), config=config, site=SECOND, step=step)
    decision = auto.decision()
    assert decision is not None and decision.has("first") and decision.has("second")
    return lines


def test_the_line_names_the_times_and_the_setting_that_pins_it(ranks: Callable[[int], Ranks]) -> None:
    [line], _ = ranks(2).run(small_site, 60)
    assert line.startswith("auto: a step takes ") and " ms in full precision and " in line
    assert line.endswith(": on; to pin it: enabled=true")


def two_nodes(levels_are_slow: bool) -> tuple[bool, bool, int]:
    """Run two nodes of two ranks. Return if calls are quantized, if in two levels, and one call's bytes between."""
    fresh()
    config = AUTO.model_copy(update={"error_feedback": False, "hierarchical": "auto"})
    groups.state_of(dist.group.WORLD).hosts = None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(topology, "host", lambda: "aabb"[dist.get_rank()]))
        stack.enter_context(slowly(transport, "all_reduce", 5 * SLOW))
        name = "exchange" if levels_are_slow else "all_to_all"
        stack.enter_context(slowly(transport, name))
        train(range(60), config)
        decision = auto.decision()
        fap.reset_stats()
        train(range(60, 61), config)
    groups.state_of(dist.group.WORLD).hosts = None
    assert decision is not None
    return decision.has(FIRST.name), decision.has(LEVELS), fap.stats()["bytes_between_nodes"]


def test_levels_are_judged_too(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(4).run(two_nodes, False)
    assert found == [found[0]] * 4 and found[0][:2] == (True, True) and found[0][2] > 0
    assert ranks(4).run(two_nodes, True) == [(True, False, 0)] * 4


# ---- the numbers ----


PARAMETERS = fap.Site("parameters", fap.Role.PARAMETER_DIFFERENCE)


def switched_off(site: str) -> int:
    """Count calls that "auto" kept in full precision. A switch makes the differences' first call send whole values."""
    reasons = fap.stats()["sites"].get(site, {"full_precision": {}})["full_precision"]
    return sum(count for reason, count in reasons.items() if reason in (policy.TRIAL, policy.SLOWER))


def trace(config: fap.FlashConfig, forced: dict[str, list[bool]] | None) -> tuple[list[Tensor], dict[str, list[bool]]]:
    """Reduce gradients with error feedback, gather parameters by differences, 60 steps. Return also the steps' ways.

    forced: True if a site is quantized, at each step, in place of the trial.
    """
    fresh()
    world, rank = dist.get_world_size(), dist.get_rank()
    held, weights, master = HeldWeights(), torch.zeros(world * 256), torch.zeros(256)
    feedback = fap.Feedback.from_config(config)
    on: dict[str, list[bool]] = {FIRST.name: [], PARAMETERS.name: []}
    results = []

    def at(site: fap.Site, step: int) -> dict[str, Any]:
        enabled = config if forced is None else config.model_copy(update={"enabled": forced[site.name][step]})
        return {"config": enabled, "site": site, "step": step}

    with slow_wire():
        for step in range(60):
            before = {name: switched_off(name) for name in on}
            feedback.begin(step)
            gradient = tensor(step)
            fap.all_reduce(gradient, feedback=feedback.slot("gradients"), **at(FIRST, step))
            master -= 0.1 * gradient[rank * 256 : (rank + 1) * 256]
            fap.all_gather(weights, master, held=held, **at(PARAMETERS, step))
            results += [gradient, weights.clone()]
            for name, count in before.items():
                on[name].append(switched_off(name) == count)
    return results, on


def replayed() -> dict[str, list[bool]]:
    config = AUTO.model_copy(update={"param_bits": 4})
    results, on = trace(config, None)
    again, _ = trace(config, on)
    assert all(map(same_bits, results, again))
    return on


def test_feedback_and_differences_cross_the_switches(ranks: Callable[[int], Ranks]) -> None:
    """Compare bit for bit with a run that has a list of the sites to quantize at each step."""
    found = ranks(3).run(replayed)
    assert found == [found[0]] * 3
    switches = [sum(one != next for one, next in itertools.pairwise(on)) for on in found[0].values()]
    assert min(switches) >= 1 and max(switches) >= 3, found[0]


# ---- which sites ----


def at_sites(enabled: list[str]) -> dict[str, Any]:
    fresh()
    config = fap.FlashConfig(bits=4, min_bytes=0, enabled=enabled)
    for site in (FIRST, SECOND):
        fap.all_reduce(tensor(0), config=config, site=site)
    counts = fap.stats()["sites"]
    return {name: (one["quantized"], dict(one["full_precision"])) for name, one in counts.items()}


def test_a_list_names_the_sites_that_are_quantized(ranks: Callable[[int], Ranks]) -> None:
    off = (0, {policy.NOT_ENABLED: 1})
    assert ranks(2).run(at_sites, ["first"])[0] == {"first": (1, {}), "second": off}
    assert ranks(2).run(at_sites, ["s*"])[0] == {"first": off, "second": (1, {})}


def without_steps() -> int:
    fresh()
    lines: list[str] = []
    with mock.patch.object(auto, "_told", False), mock.patch.object(auto.notices, "say", lines.append):
        for _ in range(20):
            fap.all_reduce(tensor(0), config=AUTO.model_copy(update={"error_feedback": False}))
    assert auto.decision() is None
    assert len(lines) == 1 and "no step" in lines[0] and "give step=" in lines[0], lines
    return int(fap.stats()["quantized"])


def test_calls_without_a_step_are_quantized(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(without_steps) == [20, 20]


# ---- again, and never again ----


def twice(interval: int) -> list[bool | None]:
    """Slow the wire in the first 30 steps, then the codec. Return the decision at the ends of both."""
    fresh()
    config = AUTO.model_copy(update={"auto_interval": interval})
    found = []
    for slow, steps in ((slow_wire, range(30)), (slow_codec, range(30, interval + 40))):
        with slow():
            train(steps, config)
        decision = auto.decision()
        found.append(None if decision is None else decision.on)
    return found


def test_it_measures_again(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(twice, 40) == [[True, False]] * 2


def resumed() -> list[dict[str, int]]:
    """Decide, save, and continue with and without the saved state. Return the reasons of eight more steps."""
    fresh()
    with slow_codec():
        train(range(STEPS))
    state = checkpoint.state_of({})
    assert state["auto"] == {"on": False, "but": []}
    reasons = []
    for one in (state, None):
        fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 says that there is no state
            assert checkpoint.resume(one, {}, "the test") is (one is not None)
        train(range(STEPS, STEPS + 8))  # a trial takes nine or more
        reasons.append(dict(fap.stats()["full_precision"]))
    return reasons


def test_a_resumed_run_does_not_measure_again(ranks: Callable[[int], Ranks]) -> None:
    kept, anew = ranks(2).run(resumed)[0]
    assert kept == {policy.SLOWER: 8}
    assert set(anew) == {policy.TRIAL}


def one_has_no_decision() -> bool | None:
    """Resume when rank 1 had made no such call before saving."""
    fresh()
    state = checkpoint.state_of({})
    if dist.get_rank() == 0:
        state["auto"] = {"on": True, "but": ["first"]}
    assert checkpoint.resume(state, {}, "the test")
    decision = auto.decision()
    return None if decision is None else decision.has("first")


def two_decisions() -> tuple[bool, list[str]]:
    fresh()
    state = checkpoint.state_of({})
    state["auto"] = {"on": dist.get_rank() == 0, "but": []}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return checkpoint.resume(state, {}, "the test"), [str(one.message) for one in said]


def test_all_ranks_continue_from_one_decision(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(one_has_no_decision) == [False, False]
    (resumed, [line]), others = ranks(2).run(two_decisions)
    assert not resumed and "the ranks' states are not of one checkpoint" in line and others == (False, [])


# ---- ranks that come late, leave, or die ----


def late(rank_of_late: int) -> bool:
    """Reduce in pairs of ranks; one pair begins six steps late. Return the decision."""
    fresh()
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    with slow_codec():
        for step in range(STEPS):
            if step >= 6 or rank // 2 != rank_of_late // 2:
                fap.all_reduce(tensor(step), group=group, config=AUTO, site=FIRST, step=step)
            dist.barrier()  # the ranks are those of one training
    decision = auto.decision()
    assert decision is not None
    return decision.on


def test_a_late_rank_takes_part(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(4).run(late, 3)
    assert found == [found[0]] * 4


def gone() -> bool:
    """Stop ranks 2 and 3 after the third step. Return True if there is a decision."""
    fresh()
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with slow_codec(), mock.patch.object(auto, "_PATIENCE", timedelta(seconds=1)):
        for step in range(STEPS if rank < 2 else 3):
            fap.all_reduce(tensor(step), group=group, config=AUTO, site=FIRST, step=step)
    decision = auto.decision()
    dist.barrier()
    return decision is not None


def test_a_rank_without_calls_is_not_waited_for_again(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run(gone) == [True, True, False, False]


def killed(victim: int) -> tuple[str, float]:
    fresh()
    start = time.monotonic()
    try:
        for step in range(STEPS):
            if dist.get_rank() == victim and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            fap.all_reduce(tensor(step), config=AUTO, site=FIRST, step=step)
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_guarantee_7_a_rank_dies_in_the_trial() -> None:
    with Ranks(3, timedelta(seconds=3)) as ranks:
        outcomes = ranks.outcomes(killed, 1, timeout=60)
    assert outcomes[1] == ("died", -signal.SIGKILL)
    for kind, value in (outcomes[0], outcomes[2]):
        assert kind == "value" and "at site 'first'" in value[0] and value[1] < 10, value


def renewed(folder: str) -> list[Any]:
    """Make the default group again, for a new trial; then with a rank that was never in the first."""
    found = []
    for turn, slow in enumerate((slow_codec, slow_wire)):
        fap.reset_stats()
        with slow():
            train(range(STEPS))
        decision = auto.decision()
        found.append(None if decision is None else decision.on)
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(folder) / f"store-{turn}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return found


def test_a_new_default_group_is_measured_again(tmp_path: Path) -> None:
    assert run_ranks(2, renewed, str(tmp_path)) == [[False, True]] * 2


def test_values_of_the_switches() -> None:
    on = Switches(True, frozenset({"a"}))
    assert not on.has("a") and on.has("b") and on.toggled("a") == Switches(True)
    for switches in (on, Switches(False), Switches(False).toggled("b")):
        assert Switches.of(switches.said()) == switches
    assert all(Switches(flag).has("x") is flag for flag in (True, False))
    assert list(itertools.islice(iter(on.but), 2)) == ["a"]
