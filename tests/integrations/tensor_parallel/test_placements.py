"""Trainings with quantized sums and gathers, and their bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import flash_allreduce_plugin as fap
from tests.distributed import run_ranks
from tests.integrations.tensor_parallel.model import (
    EIGHT,
    TOKENS,
    WORDS,
    counts,
    mesh_of,
    new_model,
    served,
    train,
)

# ---- trainings ----


def trained(sequence: bool, loss: bool, updates: dict[str, Any]) -> dict[str, Any]:
    def one() -> dict[str, Any]:
        model = new_model(sequence, loss=loss)
        return train(model, dist.group.WORLD, clip=sequence, loss_is_parallel=loss)

    found = {"stock": one(), "ours": served(EIGHT.model_copy(update=updates), one)}
    sites = fap.stats()["sites"].values()
    bytes = [sum(site[key] for site in sites) for key in ("bytes_sent", "bytes_full_precision")]
    return {**found, "counts": counts(), "bytes": bytes}


LAST = {"gather along the last dimension": 6}
PLAIN = {
    "reduce.forward": (24, 24, {}),
    "reduce.backward": (54, 54, {}),
    "gather.forward": (6, 0, LAST),
    "embedding.forward": (6, 0, {"embedding": 6}),
}
SEQUENCE = {
    "reduce.forward": (24, 24, {}),
    "reduce.backward": (30, 30, {}),
    "gather.forward": (36, 30, LAST),
    "gather.backward": (30, 30, {}),
    "embedding.forward": (6, 0, {"embedding": 6}),
}


@pytest.mark.parametrize(
    ("world", "sequence", "loss", "updates", "expected"),
    [
        (2, False, False, {}, PLAIN),
        (2, True, False, {}, SEQUENCE),
        (2, True, True, {}, {**SEQUENCE, "gather.forward": (30, 30, {})}),
        (4, True, False, {"quantize_embedding": True}, {**SEQUENCE, "embedding.forward": (6, 6, {})}),
        (
            *(2, False, False, {"warmup_steps": 4, "backward_bits": "full"}),
            {
                "reduce.forward": (24, 8, {"warm-up": 16}),
                "reduce.backward": (54, 0, {"backward_bits is full": 54}),
            },
        ),
    ],
)
def test_a_training_reaches_the_loss_of_full_precision_and_copies_stay_equal(
    world: int, sequence: bool, loss: bool, updates: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = run_ranks(world, trained, sequence, loss, updates)
    for rank in found:
        assert rank["ours"]["losses"] == pytest.approx(rank["stock"]["losses"], rel=1e-3)
        assert rank["ours"]["losses"] != rank["stock"]["losses"]
        assert all(rank["ours"]["copies are equal"])
        assert {site: rank["counts"][site] for site in expected} == expected
    sent, full = found[0]["bytes"]
    assert sent < (0.95 if "warmup_steps" in updates else 0.55) * full


class Functional(TorchDispatchMode):
    """Counts torch's functional collectives, as profilers and CommDebugMode see them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def in_full_precision(updates: dict[str, Any]) -> tuple[list[float], list[float], Any, dict[str, Any]]:
    """Return the losses of two steps without the plugin and with it, torch's functional collectives of both, and the
    calls of our sites.
    """

    def one() -> tuple[list[float], Counter[str]]:
        with Functional() as seen:
            losses = train(new_model(True), dist.group.WORLD, steps=2)["losses"]
        return losses, seen.counts

    (stock, theirs), (ours, seen) = one(), served(EIGHT.model_copy(update=updates), one)
    return stock, ours, (theirs, seen), counts()


@pytest.mark.parametrize("updates", [{"enabled": False}, {"warmup_steps": 2}])
def test_full_precision_is_torchs_own_functional_collective(updates: dict[str, Any]) -> None:
    for stock, ours, (theirs, seen), calls in run_ranks(2, in_full_precision, updates):
        assert stock == ours and theirs == seen and sum(seen.values()) > 20
        assert calls["reduce.forward"][:2] == (8, 0) and calls["gather.backward"][:2] == (10, 0)


def test_measured_calls_in_full_precision_have_torchs_bits() -> None:
    """8 bits have no 200 dB: after a call of each site the guard keeps full precision, and measures on."""
    updates = {"quality_interval": 1, "min_sqnr_db": 200.0}
    for stock, ours, _, calls in run_ranks(2, in_full_precision, updates):
        assert ours == pytest.approx(stock, rel=1e-3)
        for site in ("reduce.forward", "reduce.backward", "gather.backward"):
            number, quantized, reasons = calls[site]
            assert 0 < quantized < number == quantized + sum(reasons.values()), calls[site]


# ---- bits ----


WIDE = 96  # of 2 and of 3 ranks


def layers_bit_for_bit(sequence: bool) -> dict[str, bool]:
    """Compare a column-parallel and a row-parallel layer with fap's functions on the same local tensors."""
    mesh, rank, ranks = mesh_of(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    column, row = nn.Linear(WIDE, 2 * WIDE, bias=False), nn.Linear(2 * WIDE, WIDE, bias=False)
    x = torch.randn(ranks * 3, 5, WIDE)
    gradient = torch.randn(ranks * 3, 5, WIDE)
    up, down = (one.weight.detach().chunk(ranks, dim)[rank] for one, dim in ((column, 0), (row, 1)))
    layout = Shard(0) if sequence else Replicate()
    model = nn.Sequential(column, row)
    parallelize_module(
        model, mesh, {"0": ColwiseParallel(input_layouts=layout), "1": RowwiseParallel(output_layouts=layout)}
    )

    def mine(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks)[rank].clone() if sequence else tensor.clone()

    given = mine(x).requires_grad_()
    output = served(EIGHT, model, given * 1.0)
    served(EIGHT, output.backward, mine(gradient))

    def summed(partial: Tensor) -> Tensor:
        if sequence:
            result = torch.empty_like(mine(partial))
            fap.reduce_scatter(result, partial.contiguous(), config=EIGHT)
            return result
        partial = partial.contiguous()
        fap.all_reduce(partial, config=EIGHT)
        return partial

    def whole(part: Tensor) -> Tensor:
        if not sequence:
            return part
        result = part.new_empty(ranks * part.shape[0], *part.shape[1:])
        fap.all_gather(result, part.contiguous(), config=EIGHT)
        return result

    hidden = torch.nn.functional.linear(whole(mine(x)), up)
    expected = summed(torch.nn.functional.linear(hidden, down))
    back = summed(whole(mine(gradient)) @ down @ up)
    return {
        "forward": torch.equal(output, expected),
        "backward": bool(torch.allclose(given.grad, back, atol=1e-5)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_equal_our_functions(world: int, sequence: bool) -> None:
    for found in run_ranks(world, layers_bit_for_bit, sequence):
        assert found == {"forward": True, "backward": True}


def uneven(tokens: int) -> dict[str, Any]:
    """Train on a sequence that the ranks cannot share evenly: torch pads."""
    mesh = mesh_of()
    torch.manual_seed(0)
    linear = nn.Linear(WIDE, WIDE, bias=False)
    x = torch.randn(2, tokens, WIDE)
    exact = linear(x).detach()
    parallelize_module(linear, mesh, RowwiseParallel(output_layouts=Shard(1), use_local_output=False))
    part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    split = served(EIGHT, linear, part.clone().requires_grad_() * 1.0)
    whole = split.redistribute(placements=[Replicate()]).to_local()
    return {"counts": counts(), "error": float((whole - exact).norm() / exact.norm()), "shape": tuple(whole.shape)}


def test_uneven_sequences() -> None:
    for found in run_ranks(3, uneven, 7):
        assert found["counts"]["reduce.forward"] == (1, 1, {})
        assert found["shape"] == (2, 7, WIDE) and 0 < found["error"] < 0.02


def test_ranks_that_are_simulated_stay_in_full_precision() -> None:
    """Train in one process that stands for two ranks: torch's LocalTensor has a tensor for each of them."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gradients() -> list[Tensor]:
        with LocalTensorMode(2):
            model = new_model(True, layers=1)
            ids = torch.arange(4 * TOKENS).view(4, TOKENS) % WORDS
            model(ids).square().mean().backward()
            whole = (parameter.grad.full_tensor() for parameter in model.parameters())  # type: ignore[union-attr]
            return [gradient.reconcile() for gradient in whole]

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        stock, ours = gradients(), served(EIGHT, gradients)
        found = counts()
    finally:
        dist.destroy_process_group()
        fap.reset_stats()
    assert len(stock) > 5 and all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))
    assert found.keys() == {"other"} and found["other"][2]["LocalTensor, no plain tensor"] > 10
