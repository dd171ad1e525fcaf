"""ZeRO 3 gathers parameters at param_bits for the forward and the backward pass, and in full precision otherwise."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import EIGHT, NEWEST, batch, deepspeed, engine, model, release, step, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.integrations.deepspeed import gathering, section
from flash_allreduce_plugin.integrations.deepspeed.gathering import OUTSIDE, PERSISTENT, clear_padding
from tests.distributed import Ranks

SITE = "deepspeed.stage3.parameters"
BACKWARD = f"{SITE}.backward"
VALUES = {**EIGHT, "param_bits": 8}
BF16 = {"bf16": {"enabled": True}}
NO_REUSE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def zero3(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **zero}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (2, zero3()),
    "bf16-x2": (2, {**zero3(), **BF16, "gradient_accumulation_steps": 2}),
    "three-ranks": (3, {**zero3(**NO_REUSE), **BF16}),
    "persistent": (2, zero3(stage3_param_persistence_threshold=200)),
    "offload": (2, {**zero3(offload_param={"device": "cpu"}), **BF16}),
    "hpz": (4, {**zero3(zero_hpz_partition_size=2, **NO_REUSE), "gradient_accumulation_steps": 2}),
}
if release() >= (0, 18, 5):
    CASES["sequential"] = (2, zero3(stage3_allgather_sequential=True))


def side_by_side(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the engine left alone, with a section that is switched off, and with parameters at 8 bits."""
    return [train(options, flash) for flash in (None, {**VALUES, "enabled": False}, VALUES)]


@pytest.mark.parametrize("name", CASES)
def test_trains_as_without_and_counts_every_byte(engines: Callable[[int], Ranks], name: str) -> None:
    world, options = CASES[name]
    outcomes = engines(world).run(side_by_side, options)
    for plain, off, eight in outcomes:
        assert plain["calls"] == 0
        assert torch.equal(off["weights"], plain["weights"]) and off["losses"] == plain["losses"]
        counted, unquantized = eight["sites"][SITE], off["sites"][SITE]
        assert counted["quantized"] > 0 and counted["calls"] == unquantized["calls"]
        assert set(counted["full_precision"]) <= {OUTSIDE, PERSISTENT}
        assert (PERSISTENT in counted["full_precision"]) is (name == "persistent")
        # The bytes that DeepSpeed itself would have sent, for either route of a gather.
        assert counted["bytes_full_precision"] == unquantized["bytes_full_precision"] == unquantized["bytes_sent"]
        quantized = counted["bytes_full_precision"] - counted["bytes_plain"]
        share = (counted["bytes_sent"] - counted["bytes_plain"]) / quantized
        assert 0 < share < (0.6 if "bf16" in options else 0.3), share  # 8.25 bits of 16 or 32, and groups not full
        error = (eight["moved"] - plain["moved"]).norm() / plain["moved"].norm()
        assert 0 < error < (0.1 if "bf16" in options else 0.02), error
        assert eight["losses"] == pytest.approx(plain["losses"], rel=0.01)
        assert torch.equal(eight["weights"], outcomes[0][2]["weights"]), "the replicas have drifted apart"


def shards(built: Any) -> list[torch.Tensor]:
    """Return this rank's shards, without the padding."""
    found = []
    for one in built.module.parameters():
        size = one.ds_tensor.numel()
        held = max(0, min(size, one.ds_numel - size * dist.get_rank()))
        found.append(one.ds_tensor[:held].clone())
    return found


def exact(built: Any) -> list[torch.Tensor]:
    """Return every parameter, gathered from the ranks' shards."""
    whole = []
    for one in built.module.parameters():
        parts = [torch.empty_like(one.ds_tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, one.ds_tensor.contiguous())
        whole.append(torch.cat(parts)[: one.ds_numel].view(one.ds_shape))
    return whole


@contextmanager
def seen(built: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record the weights that the layers compute with, in the forward and in the backward pass."""
    found: dict[str, list[torch.Tensor]] = {"forward": [], "backward": []}
    coordinator = gathering.coordinator_of(built)
    theirs = coordinator.fetch_sub_module

    def fetch_sub_module(layer: Any, forward: bool) -> None:
        theirs(layer, forward=forward)
        if isinstance(layer, nn.Linear):
            found["forward" if forward else "backward"].append(layer.weight.detach().clone())

    coordinator.fetch_sub_module = fetch_sub_module
    try:
        yield found
    finally:
        del coordinator.fetch_sub_module


def one_pass(options: dict[str, Any], flash: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that a forward and a backward pass see, and the shards afterwards."""
    built = engine(options, flash)
    step(built, 0)
    before, whole = shards(built), [one for one in exact(built) if one.dim() == 2]
    x = batch(built, 1)
    with seen(built) as found:
        built.backward((built(x) - x.flip(1)).float().square().mean())
    after = shards(built)
    kept = all(map(torch.equal, before, after))
    built.destroy()
    return {**found, "exact": whole, "kept": kept}


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("options", [zero3(**NO_REUSE), {**zero3(**NO_REUSE), **BF16}], ids=["fp32", "bf16"])
def test_both_passes_see_rounded_weights_the_same_on_every_rank_and_the_shards_stay_exact(
    engines: Callable[[int], Ranks], options: dict[str, Any]
) -> None:
    outcomes = engines(2).run(one_pass, options, {**VALUES, "param_bits": 6, "param_backward_bits": 3})
    for outcome in outcomes:
        assert outcome["kept"]
        assert all(0.005 < error < 0.03 for error in errors(outcome["forward"], outcome["exact"]))
        assert all(0.05 < error < 0.3 for error in errors(outcome["backward"][::-1], outcome["exact"]))
        for name in ("forward", "backward"):
            assert all(map(torch.equal, outcome[name], outcomes[0][name]))


@pytest.mark.parametrize(
    ("flash", "forward", "backward"),
    [
        ({"param_bits": 8}, {SITE: 8}, {}),
        ({"param_bits": 8, "param_backward_bits": 4}, {SITE: 8}, {BACKWARD: 4}),
        ({"param_bits": 8, "param_backward_bits": "full"}, {SITE: 8}, {BACKWARD: "param_backward_bits is full"}),
        ({"param_backward_bits": 8}, {SITE: "param_bits is full"}, {BACKWARD: 8}),
    ],
    ids=str,
)
def test_forward_and_backward_may_differ(
    engines: Callable[[int], Ranks], flash: dict[str, Any], forward: dict[str, Any], backward: dict[str, Any]
) -> None:
    for outcome in engines(2).run(train, zero3(**NO_REUSE), {**EIGHT, **flash}, 2):
        sites = {site: counted for site, counted in outcome["sites"].items() if site.startswith(SITE)}
        assert set(sites) == {*forward, *backward}
        for site, width in {**forward, **backward}.items():
            if isinstance(width, int):
                assert sites[site]["bits"] == width and sites[site]["quantized"] > 0
            else:
                assert sites[site]["quantized"] == 0 and sites[site]["full_precision"][width] > 0


def others() -> dict[str, Any]:
    """Read and write the parameters that DeepSpeed keeps after an evaluation."""
    theirs = deepspeed()
    built = engine({**zero3(stage3_gather_16bit_weights_on_model_save=True), **BF16}, VALUES)
    for number in range(3):  # DeepSpeed learns the order of the layers, and which parameters are used again
        step(built, number)
    built.eval()
    built(batch(built, 9))
    parameters = list(built.module.parameters())
    held = [one.ds_status.name for one in parameters]
    whole, before = exact(built), shards(built)
    rounded = [torch.equal(one, right) for one, right in zip(parameters, whole, strict=True) if one.numel()]
    fap.reset_stats()
    read = []
    for one in parameters:
        with theirs.zero.GatheredParameters([one], modifier_rank=0):
            read.append(one.detach().clone())
    counted = fap.stats()["sites"][SITE]
    result = {
        "held": held.count("AVAILABLE"),
        "rounded": not all(rounded),
        "read": all(map(torch.equal, read, whole)),
        "written": all(map(torch.equal, shards(built), before)),
        "counted": counted["full_precision"],
    }
    built(batch(built, 9))
    saved = built._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        result["saved"] = all(map(torch.equal, saved.values(), whole))
    built.destroy()
    return result


def test_everybody_else_gets_exact_parameters_and_is_counted(engines: Callable[[int], Ranks]) -> None:
    outcomes = engines(2).run(others)
    for outcome in outcomes:
        assert outcome["held"] > 0 and outcome["rounded"], "nothing was left that could be taken for exact"
        assert outcome["read"] and outcome["written"]
        assert outcome["counted"] == {OUTSIDE: 5}
    assert outcomes[0]["saved"]


def in_flight() -> dict[str, Any]:
    """Record when gathers begin and layers run. Rank 1 comes late, and rank 0's handle must not wait for it."""
    built = engine(
        zero3(**{**NO_REUSE, "stage3_max_live_parameters": 10**9, "stage3_prefetch_bucket_size": 4000}), VALUES
    )
    for number in range(3):
        step(built, number)
    events: list[str] = []
    done: list[bool] = []
    theirs = gathering.reductions.all_gather

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        handle = theirs(*args, **kwargs)
        done.append(handle.is_completed())
        events.append("gather")
        return handle

    hooks = [
        layer.register_forward_hook(lambda *_: events.append("layer"))
        for layer in built.module
        if isinstance(layer, nn.Linear)
    ]
    gathering.reductions.all_gather = all_gather  # type: ignore[assignment]
    try:
        with torch.no_grad():
            dist.barrier()
            built(batch(built, 9))
    finally:
        gathering.reductions.all_gather = theirs
        for hook in hooks:
            hook.remove()
    built.destroy()
    return {"events": events, "done": done}


def test_gathers_stay_asynchronous_and_ahead_of_their_layers(engines: Callable[[int], Ranks]) -> None:
    first, _ = engines(2).run(in_flight)
    assert first["done"] and not any(first["done"]), "the other rank had not even begun"
    ahead, gathers, layers = 0, 0, 0
    for event in first["events"]:
        gathers, layers = gathers + (event == "gather"), layers + (event == "layer")
        ahead = max(ahead, gathers - layers)
    assert layers == 3 and ahead > 1, first["events"]


def padded() -> dict[str, Any]:
    """Fill the memory behind the last element with NaN."""
    built = engine(zero3(**NO_REUSE), VALUES)
    step(built, 0)
    whole = [one for one in exact(built) if one.dim() == 2]
    spoiled = 0
    for one in built.module.parameters():
        size = one.ds_tensor.numel()
        held = max(0, min(size, one.ds_numel - size * dist.get_rank()))
        one.ds_tensor[held:] = float("nan")
        spoiled += size - held
    x = batch(built, 1)
    with seen(built) as found:
        built(x)
    built.destroy()
    return {"spoiled": spoiled, "errors": errors(found["forward"], whole)}


def test_padding_reaches_no_rank(engines: Callable[[int], Ranks]) -> None:
    outcomes = engines(3).run(padded)
    assert sum(outcome["spoiled"] for outcome in outcomes) > 0
    for outcome in outcomes:
        assert all(error < 0.02 for error in outcome["errors"]), outcome["errors"]


@pytest.mark.parametrize("rank", range(3))
def test_padding_begins_after_the_last_element(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Clear the padding of 7 elements in shards of 3, and of hpZ's shards where there are any."""
    monkeypatch.setattr(gathering.dist, "get_rank", lambda group: rank)
    shards = [torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.int8)]
    given = {"ds_numel": 7, "ds_process_group": None, "ds_zero_param_process_group": None}
    clear_padding(SimpleNamespace(ds_tensor=shards[0], ds_secondary_tensor=None, **given))
    clear_padding(SimpleNamespace(ds_tensor=None, ds_secondary_tensor=shards[1], **{**given, "ds_process_group": 0}))
    clear_padding(SimpleNamespace(ds_tensor=shards[2], ds_secondary_tensor=None, **given))
    left = 1 if rank == 2 else 3
    assert [int(one.sum()) for one in shards] == [left, left, 3], "a shard of DeepSpeed's own codes is left alone"


def frozen(widths: dict[str, Any]) -> dict[str, Any]:
    net = model()
    for one in net[0].parameters():
        one.requires_grad = False
    fap.reset_stats()
    built = engine(zero3(**NO_REUSE), {**VALUES, **widths}, net)
    step(built, 0)
    whole = [one for one in exact(built) if one.dim() == 2]
    with seen(built) as found:
        built(batch(built, 1))
    reasons = fap.stats()["sites"]["deepspeed.stage3.parameters"]["full_precision"]
    built.destroy()
    return {"errors": errors(found["forward"], whole), "reasons": reasons}


def test_frozen_parameters_are_gathered_exactly(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(2).run(frozen, {}):
        first, *others = outcome["errors"]
        assert first == 0 and all(0 < error < 0.01 for error in others)
        assert outcome["reasons"][policy.FROZEN] > 0


def test_frozen_parameters_are_gathered_like_the_others_on_request(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(2).run(frozen, {"quantize_frozen": True}):
        assert all(0 < error < 0.01 for error in outcome["errors"])
        assert policy.FROZEN not in outcome["reasons"]


# Batches change from one pass to the next.
FEW = {"stage3_max_live_parameters": 12000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 5000}


class Recomputed(nn.Module):
    """Two checkpointed layers, the first frozen. `seen` has the intermediate results of both runs of each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 97), nn.Linear(97, 48)) for _ in range(2))
        self.layers[0].requires_grad_(False)
        self.seen: list[list[torch.Tensor]] = [[], []]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(self.run, layer, number, x.requires_grad_(), use_reentrant=False)
        return x

    def run(self, layer: Any, number: int, x: torch.Tensor) -> torch.Tensor:
        first, second = layer
        between = first(x)
        self.seen[number].append(between.detach().clone())
        return second(torch.tanh(between))  # type: ignore[no-any-return]


def recomputed(widths: dict[str, Any], zero: Mapping[str, int] = NO_REUSE) -> list[bool] | str:
    """Return True for each layer and step with equal bits in both runs, or the refusal."""
    net = Recomputed()
    built = engine(zero3(**zero), {**EIGHT, **widths}, net, lr=0.01)
    equal = []
    try:
        for number in range(3):
            step(built, number)
            equal += [torch.equal(*pair) for pair in net.seen]
            net.seen = [[], []]
    except fap.ConfigError as refused:
        return str(refused)
    finally:
        built.destroy()
    return equal


@NEWEST
def test_recomputed_activations_see_the_same_weights_or_the_widths_are_refused(
    engines: Callable[[int], Ranks],
) -> None:
    for widths in ({"param_bits": 8}, {"param_bits": 4, "param_backward_bits": 4}, {"param_backward_bits": "full"}):
        assert engines(2).run(recomputed, widths) == [[True] * 6] * 2
    for min_bytes in (0, 10000):  # some batches gathered together exceed this size, no bias does
        widths = {"param_bits": 4, "min_bytes": min_bytes}
        assert engines(2).run(recomputed, widths, FEW) == [[True] * 6] * 2
    for forward, backward in ((8, 4), ("full", 4), (8, "full")):
        for message in engines(2).run(recomputed, {"param_bits": forward, "param_backward_bits": backward}):
            assert message == (
                f"flash_allreduce.param_backward_bits={backward!r} and activation checkpointing exclude each other: "
                "activations would be computed a second time with other weights than those of the forward pass, at "
                f"param_bits={forward!r}; leave param_backward_bits out."
            )


def two_engines() -> dict[str, Any]:
    """Train two engines, only one of them with the plugin."""
    fap.reset_stats()
    ours, alone = engine(zero3(**NO_REUSE), VALUES), engine(zero3(**NO_REUSE), EIGHT)
    theirs = exact(alone)
    step(ours, 0)
    counted = fap.stats()["sites"][SITE]["quantized"]
    with seen(alone) as found:
        alone(batch(alone, 0))
    with deepspeed().zero.GatheredParameters(list(alone.module.parameters())[:1]):
        pass
    counted = fap.stats()["sites"][SITE]["quantized"] - counted
    in_place = fap.deepspeed.report()[SITE]["in_place"]
    for one in (ours, alone):
        one.destroy()
    return {
        "errors": errors(found["forward"], [one for one in theirs if one.dim() == 2]),
        "quantized": counted,
        "in": in_place,
    }


def test_another_engines_parameters_are_not_ours(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(2).run(two_engines):
        assert outcome["errors"] == [0, 0, 0] and outcome["quantized"] == 0 and outcome["in"]


def test_warm_up_and_min_bytes(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(2).run(train, zero3(**NO_REUSE), {**VALUES, "warmup_steps": 2}):
        counted = outcome["sites"][SITE]
        assert counted["full_precision"]["warm-up"] == 2 * counted["quantized"] > 0
    for outcome in engines(2).run(train, zero3(**NO_REUSE), {**VALUES, "min_bytes": 20000}, 1):
        reasons = outcome["sites"][SITE]["full_precision"]
        assert reasons["message below min_bytes"] > 0 and outcome["sites"][SITE]["quantized"] > 0  # one of 25,220 bytes


def test_the_guard_hierarchy_and_other_options(engines: Callable[[int], Ranks]) -> None:
    guarded = {**VALUES, "param_bits": 4, "quality_interval": 1, "min_sqnr_db": 90.0}
    for outcome in engines(2).run(train, zero3(), guarded, 6):
        assert outcome["sites"][SITE]["full_precision"]["below min_sqnr_db"] > 0
    nodes = {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}
    for outcome in engines(4).run(train, zero3(), {**VALUES, "hierarchical": nodes, "rounding": "stochastic"}, 2):
        counted = outcome["sites"][SITE]
        assert counted["quantized"] > 0 and counted["bytes_between_nodes"] > 0


def replaced() -> dict[str, bool]:
    """Return True by place where a function of ours stands."""
    from deepspeed.runtime.zero import partition_parameters

    here = {"gather": partition_parameters._dist_allgather_fn, "outside": partition_parameters.Init._all_gather}
    return {name: hasattr(function, "__flash_allreduce_seam__") for name, function in here.items()}


def undone() -> dict[str, Any]:
    deepspeed()
    fap.deepspeed.disable()  # whatever engines of earlier cases are still alive
    deepspeed()
    full = engine(zero3(), EIGHT)
    result: dict[str, Any] = {"untouched": not any(replaced().values())}
    built = engine(zero3(zero_hpz_partition_size=2), VALUES)
    coordinator = gathering.coordinator_of(built)
    name = "_PartitionedParameterCoordinator__all_gather_params_"
    for number in range(3):
        step(built, number)
    built.eval()
    built(batch(built, 9))
    result["on"] = all(replaced().values()) and name in vars(coordinator)
    result["full"] = fap.stats()["sites"][SITE]["full_precision"].get("param_bits is full", 0)
    whole = [one for one in exact(built) if one.dim() == 2]
    fap.deepspeed.disable()
    result["off"] = any(replaced().values()) or name in vars(coordinator)
    result["off"] = result["off"] or name in vars(gathering.coordinator_of(full))
    fap.reset_stats()
    with seen(built) as found:
        built(batch(built, 9))
    result["errors"] = errors(found["forward"], whole)
    built.train()
    step(built, 4)
    result["calls"] = fap.stats()["calls"]
    for one in (built, full):
        one.destroy()
    deepspeed()
    return result


def test_disable_gives_everything_back(engines: Callable[[int], Ranks]) -> None:
    """Check that gathers afterwards are in full precision, those of hpZ's shards included."""
    for outcome in engines(2).run(undone):
        assert outcome["untouched"] and outcome["on"] and not outcome["full"] and not outcome["off"]
        assert outcome["errors"] == [0, 0, 0] and outcome["calls"] == 0


def said(options: dict[str, Any], flash: dict[str, Any]) -> str:
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        engine(options, flash).destroy()
    return lines.getvalue()


def test_few_bits_are_warned_about(engines: Callable[[int], Ranks]) -> None:
    run = engines(2).run
    first, second = run(said, zero3(), {**EIGHT, "param_bits": 4})
    assert "parameters in 4" in first and "flash all-reduce: param_bits is 4: at 4 bits the values of" in first
    assert not second
    assert "param_backward_bits is 5: " in run(said, zero3(), {**VALUES, "param_backward_bits": 5})[0]
    assert " is 6: " not in run(said, zero3(), {**EIGHT, "param_bits": 6})[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"param_bits": 8, "param_backward_bits": 8, "gather_bits": 4}, ["gather_bits is 4"]),
        ({"param_bits": 8, "hierarchical": {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}}, ["hierarchical."]),
        ({"param_bits": "full", "gather_bits": 4}, []),
        ({"param_bits": 3, "param_backward_bits": 4}, ["param_bits is 3", "param_backward_bits is 4"]),
    ],
    ids=str,
)
def test_the_width_that_counts_is_warned_about(given: dict[str, Any], named: list[str]) -> None:
    at_stage_3 = SimpleNamespace(zero_optimization_stage=lambda: 3)
    found = gathering.doubts(at_stage_3, fap.FlashConfig.from_dict(given))
    assert len(found) == len(named) and all(map(str.startswith, found, named)), found


def settled(**zero: Any) -> SimpleNamespace:
    given = {"stage": 3, "use_all_reduce_for_fetch_params": False, "offload_param": None, **zero}
    return SimpleNamespace(zero_config=SimpleNamespace(**given))


EXCLUDED = [
    ({"use_all_reduce_for_fetch_params": True}, "zero_optimization.stage3_use_all_reduce_for_fetch_params and "),
    ({"offload_param": SimpleNamespace(device="nvme")}, "zero_optimization.offload_param to nvme and "),
]


@pytest.mark.parametrize(("zero", "named"), EXCLUDED, ids=["all-reduce", "nvme"])
def test_options_that_bypass_the_gathers_are_refused(zero: dict[str, Any], named: str) -> None:
    for given in ({"param_bits": 8}, {"param_backward_bits": 8}):
        key = f"flash_allreduce.{next(iter(given))}"
        with pytest.raises(fap.ConfigError, match=f"^{named}{key} exclude each other: "):
            section.of_gathers(settled(**zero), fap.FlashConfig(**given))
    section.of_gathers(settled(**zero), fap.FlashConfig())
    section.of_gathers(settled(offload_param=SimpleNamespace(device="cpu")), fap.FlashConfig(param_bits=8))


@pytest.mark.parametrize(("zero", "named"), EXCLUDED, ids=["all-reduce", "nvme"])
def test_options_that_bypass_the_gathers_leave_param_bits_out_of_a_preset(
    zero: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = section.of_gathers(settled(**zero), fap.FlashConfig(preset="int4"))
    assert config == fap.FlashConfig(preset="int4", param_bits="full")
    assert f"preset int4 without param_bits: {named}" in capsys.readouterr().out


def test_a_presets_width_of_gathers_is_that_of_differences_or_of_values() -> None:
    config = fap.FlashConfig(preset="int4")
    assert [section.of_gathers(settled(stage=stage), config).param_bits for stage in (0, 1, 2, 3)] == [4, 4, 4, 8]
    given = fap.FlashConfig(preset="int4", param_bits=6)
    assert [section.of_gathers(settled(stage=stage), given).param_bits for stage in (2, 3)] == [6, 6]


def refusal(options: dict[str, Any], flash: dict[str, Any]) -> str:
    deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError) as refused:
        engine(options, flash)
    return str(refused.value)


def test_is_refused_at_initialize(engines: Callable[[int], Ranks]) -> None:
    run = engines(2).run
    for message in run(refusal, zero3(stage3_use_all_reduce_for_fetch_params=True), VALUES):
        assert message.startswith("zero_optimization.stage3_use_all_reduce_for_fetch_params and flash_allreduce.param_")
    nvme = {"device": "nvme", "nvme_path": "/nowhere"}
    for message in run(refusal, zero3(offload_param=nvme), VALUES):
        assert message.startswith("zero_optimization.offload_param to nvme and flash_allreduce.param_bits exclude")
    for message in run(refusal, zero3(zero_quantized_weights=True), VALUES):
        assert "zero_quantized_weights and flash_allreduce exclude each other" in message
    for message in run(refusal, {"zero_optimization": {"stage": 2}}, {**EIGHT, "param_backward_bits": 4}):
        assert message == (
            "flash_allreduce.param_backward_bits=4 has no effect at ZeRO stage 2, which gathers no parameters for the "
            "backward pass; leave it out."
        )
