"""DeepSpeed's experts: tokens are sent at expert_bits, outputs at expert_combine_bits, gradients with backward_bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import NEWEST, configuration, deepspeed, engine, package, weights
from torch import Tensor, nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.deepspeed import engine as engines_of
from flash_allreduce_plugin.integrations.deepspeed import experts, section
from tests.distributed import Ranks
from tests.signatures import signatures

WIDTH, TOKENS = 64, 24
SITES = [site.name for site in experts.SITES]
FORWARD, BACKWARD = SITES[0::2], SITES[1::2]
PLAIN = {"bits": 8, "min_bytes": 0}
EIGHT = {**PLAIN, "expert_bits": 8, "backward_bits": 8}


class Model(nn.Module):
    def __init__(self, ep_size: int, k: int = 1) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(9)
        self.dense = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))
        # Twice the slots that the tokens need: half of them are empty.
        sizes = {"num_experts": 4, "ep_size": ep_size, "k": k, "capacity_factor": 2.0}
        self.experts = MoE(WIDTH, expert, **sizes, use_rts=False, top2_2nd_expert_sampling=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.dense(x))[0]  # type: ignore[no-any-return]


@contextmanager
def rounded() -> Iterator[None]:
    """Replace the sent runs of DeepSpeed's own all-to-all by runs that the codec has rounded one by one."""
    import deepspeed.comm as comm

    theirs, wire = comm.all_to_all_single, fap.FlashConfig(bits=8)

    def all_to_all_single(
        output: Tensor, input: Tensor, to: Any = None, of: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        runs = [
            fap.decode(fap.encode(run, wire), tuple(run.shape), run.dtype, wire)
            for run in input.chunk(dist.get_world_size(group))
        ]
        return theirs(output, torch.cat(runs), to, of, group, async_op)

    comm.all_to_all_single = all_to_all_single
    try:
        yield
    finally:
        comm.all_to_all_single = theirs


def built(flash: Any, options: dict[str, Any], ep_size: int = 2, k: int = 1, net: nn.Module | None = None) -> Any:
    deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    net = Model(ep_size, k) if net is None else net
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    optimizer = torch.optim.SGD(groups, lr=0.5)
    return package().initialize(model=net, optimizer=optimizer, config=configuration(options, flash))[0]


def train(flash: Any, options: dict[str, Any], k: int = 1, steps: int = 2) -> dict[str, Any]:
    fap.reset_stats()
    made = built(flash, options, k=k)
    arrived: list[Tensor] = []
    made.module.experts.deepspeed_moe.experts.register_forward_hook(
        lambda _, given, __: arrived.append(given[0].detach().clone())
    )
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(TOKENS, WIDTH, generator=generator).to(next(made.module.parameters()).dtype)
        loss = (made(x) - x.flip(1)).float().square().mean()
        made.backward(loss)
        made.step()
        losses.append(float(loss.detach()))
    result = {"losses": losses, "weights": weights(made), "arrived": arrived, **fap.stats()}
    result["report"] = fap.deepspeed.report()
    made.destroy()
    return result


def side_by_side(options: dict[str, Any], k: int) -> dict[str, Any]:
    found = {
        "plain": train(None, options, k),
        "off": train({**EIGHT, "enabled": False}, options, k),
        "eight": train(EIGHT, options, k),
        "forward": train({**PLAIN, "expert_bits": 8}, options, k),
        "thin": train({**EIGHT, "expert_bits": 8, "expert_combine_bits": 5}, options, k),
        "half": train({**EIGHT, "expert_combine_bits": "full"}, options, k),
    }
    with rounded():
        found["expected"] = train(PLAIN, options, k)
    return found


@pytest.mark.parametrize(
    ("world", "options", "k"),
    [
        (2, {}, 1),
        (2, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, 2),
        (4, {"zero_optimization": {"stage": 1}}, 2),
    ],
    ids=["two", "bf16", "four"],
)
def test_an_exchange_equals_rounding_each_run_and_a_full_precision_exchange(
    engines: Callable[[int], Ranks], world: int, options: dict[str, Any], k: int
) -> None:
    for found in engines(world).run(side_by_side, options, k):
        plain, off, eight, expected = (found[name] for name in ("plain", "off", "eight", "expected"))
        assert torch.equal(off["weights"], plain["weights"])
        assert torch.equal(eight["weights"], expected["weights"])
        assert eight["losses"] == expected["losses"] and eight["losses"] != plain["losses"]
        assert eight["losses"] == pytest.approx(plain["losses"], rel=0.02)
        for site in SITES:
            counted = eight["sites"][site]
            assert counted["calls"] == counted["quantized"] == 2
            assert 0.25 < counted["bytes_sent"] / counted["bytes_full_precision"] < 0.56
            assert off["sites"][site]["full_precision"] == {"disabled by configuration": 2}
            assert off["sites"][site]["bytes_sent"] == counted["bytes_full_precision"]
            assert eight["report"][site]["in_place"] and eight["report"][site]["calls"] == 2
        # Slots without a token are zero where they arrive, too.
        exact, quantized = plain["arrived"][0], eight["arrived"][0]
        empty = (exact == 0).all(-1)
        assert 0 < empty.sum() < empty.numel()
        assert torch.equal((quantized == 0).all(-1), empty) and not torch.equal(quantized, exact)
        assert all(found["forward"]["sites"][site]["quantized"] == 2 for site in FORWARD)
        assert all(
            found["forward"]["sites"][site]["full_precision"] == {"backward_bits is full": 2} for site in BACKWARD
        )
        bits = {site: found["thin"]["sites"][site]["bits"] for site in SITES}
        assert list(bits.values()) == [8, 8, 5, 5]
        for site in SITES[2:]:
            assert found["half"]["sites"][site]["full_precision"] == {"expert_combine_bits is full": 2}


def two_engines_and_their_end() -> dict[str, Any]:
    """Train an engine with a section and one without; warm-up; evaluation; state after the end."""
    deepspeed()
    from deepspeed.moe.sharded_moe import MOELayer

    engines_of.detach()
    deepspeed()
    fap.reset_stats()
    theirs = MOELayer.forward
    served = built({**EIGHT, "warmup_steps": 1, "quantize_evaluation": False}, {})
    alone = built(None, {})
    during = MOELayer.forward is theirs
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    alone(x)
    uncounted = fap.stats()["calls"]
    for _ in range(2):
        served.backward(served(x).square().mean())
        served.step()
    served.eval()
    with torch.no_grad():
        served(x)
    sites = fap.stats()["sites"]
    engines_of.detach()
    after = MOELayer.forward is theirs
    fap.reset_stats()
    served.train()
    served(x)
    return {"during": during, "after": after, "uncounted": uncounted, "sites": sites, "left": fap.stats()["calls"]}


def test_only_the_engine_with_the_section_is_served_and_nothing_stays(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(two_engines_and_their_end):
        assert not found["during"] and found["after"]
        assert found["uncounted"] == found["left"] == 0
        for site in FORWARD:
            assert found["sites"][site]["full_precision"] == {"warm-up": 1, "evaluation": 1}
            assert found["sites"][site]["quantized"] == 1
        for site in BACKWARD:
            assert found["sites"][site]["full_precision"] == {"warm-up": 1} and found["sites"][site]["quantized"] == 1


class TwoLayers(Model):
    def __init__(self) -> None:
        super().__init__(2)
        self.others = Model(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.others(super().forward(x)))  # type: ignore[no-any-return]


def signatures_of_layers(site: str) -> list[int]:
    deepspeed()
    made = built(EIGHT, {}, net=TwoLayers())
    with signatures(site) as found:
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        made.backward(made(x).square().mean())
        made.step()
    made.destroy()
    return found


@NEWEST
@pytest.mark.parametrize("site", [experts.COMBINE.name, experts.DISPATCH_BACKWARD.name])
def test_messages_of_one_layer_never_reach_another_layer(engines: Callable[[int], Ranks], site: str) -> None:
    here, there = engines(2).run(signatures_of_layers, site)
    first, second, again = here
    assert first == again != second and here == there


def guarded() -> dict[str, Any]:
    return train({**EIGHT, "expert_bits": 2, "backward_bits": 2, "min_sqnr_db": 20, "quality_interval": 1}, {}, steps=5)


def test_the_guard_widens_exchanges_that_are_not_exact_enough(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(guarded):
        for site in SITES:
            assert found["sites"][site]["bits"] > 2 and found["sites"][site]["sqnr_db"] is not None


def refused() -> list[str]:
    found = []
    for make in (lambda: engine({}, EIGHT), lambda: built({**EIGHT}, {}, ep_size=1)):
        with pytest.raises(Exception, match="expert_bits") as caught:
            make()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_expert_bits_without_experts_on_several_ranks_are_refused_in_one_sentence(
    engines: Callable[[int], Ranks],
) -> None:
    sentence = (
        "DeepSpeedConfigError: flash_allreduce.expert_bits=8 has no effect: no experts of this model lie on several "
        "ranks (deepspeed.moe.layer.MoE with ep_size 2 or more); leave it out."
    )
    assert engines(2).run(refused) == 2 * [2 * [sentence]]


def test_backward_bits_need_a_width_of_exchanges() -> None:
    config = section.parse({"flash_allreduce": EIGHT})
    assert config is not None and (config.expert_bits, config.backward_bits) == (8, 8) and experts.wanted(config)
    with pytest.raises(fap.ConfigError, match=r"^flash_allreduce.backward_bits=8 has no effect in DeepSpeed"):
        section.parse({"flash_allreduce": {**EIGHT, "expert_bits": "full"}})
