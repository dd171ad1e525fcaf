"""Checks of a call's arguments: a bad one is refused in one sentence, before anything is sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.api import checks
from tests.api.test_reductions import QUANTIZED, still_works
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]


def bad_calls() -> dict[str, tuple[Callable[[], Any], list[Tensor]]]:
    """Return name -> (the call, the tensors that it must not touch)."""
    world = dist.get_world_size()
    x, y, z = torch.ones(60 * world), torch.ones(60), torch.ones(60 * world + 1)
    half, wide = torch.ones(60, dtype=torch.float16), torch.ones(1).expand(600)
    sparse = torch.ones(4, 4).to_sparse()
    whole, short = torch.ones(60 * world, dtype=torch.int64), torch.ones(60 * world, dtype=torch.int16)
    complex_, op = torch.ones(60 * world, dtype=torch.complex64), dist.ReduceOp
    wrapped = DTensor.from_local(x, DeviceMesh("cpu", [dist.get_rank()], _init_backend=False), run_check=False)
    negated = complex_.conj().imag
    return {
        "list": (lambda: fap.all_reduce([1.0, 2.0], config=QUANTIZED), []),
        "sparse": (lambda: fap.all_reduce(sparse, config=QUANTIZED), []),
        "config": (lambda: fap.all_reduce(x, config={"bits": 4}), [x]),
        "meta": (lambda: fap.all_reduce(torch.ones(600, device="meta"), config=QUANTIZED), []),
        "expanded": (lambda: fap.all_reduce(wide, config=QUANTIZED), [wide]),
        "expanded output": (lambda: fap.all_gather(wide, torch.ones(600 // world), config=QUANTIZED), [wide]),
        "indivisible": (lambda: fap.reduce_scatter(y, z, config=QUANTIZED), [y, z]),
        "swapped": (lambda: fap.reduce_scatter(x, y, config=QUANTIZED), [x, y]),
        "gather size": (lambda: fap.all_gather(z, y, config=QUANTIZED), [y, z]),
        "dtypes": (lambda: fap.reduce_scatter(half, x, config=QUANTIZED), [half, x]),
        "gather dtypes": (lambda: fap.all_gather(x, half, config=QUANTIZED), [half, x]),
        "devices": (lambda: fap.reduce_scatter(torch.ones(60, device="meta"), x, config=QUANTIZED), [x]),
        "average of integers": (lambda: fap.all_reduce(whole, op.AVG, config=QUANTIZED), [whole]),
        "scattered average": (lambda: fap.reduce_scatter(whole[:60], whole, op.AVG, config=QUANTIZED), [whole]),
        "bits of floats": (lambda: fap.all_reduce(x, op.BAND, config=QUANTIZED), [x]),
        "greatest complex": (lambda: fap.all_reduce(complex_, op.MAX, config=QUANTIZED), [complex_]),
        "int16": (lambda: fap.all_reduce(short, config=QUANTIZED), [short]),
        "gathered int16": (lambda: fap.all_gather(short, short[:60], config=QUANTIZED), [short]),
        "operator": (lambda: fap.all_reduce(x, "sum", config=QUANTIZED), [x]),
        "conjugate": (lambda: fap.all_reduce(complex_.conj(), config=QUANTIZED), [complex_]),
        "negative": (lambda: fap.all_reduce(negated, config=QUANTIZED), [complex_]),
        "negative input": (lambda: fap.all_gather(x, negated[:60], config=QUANTIZED), [x]),
        "site": (lambda: fap.all_reduce(x, config=QUANTIZED, site="mine"), [x]),
        "group": (lambda: fap.all_reduce(x, group="mine", config=QUANTIZED), [x]),
        "mesh": (lambda: fap.all_reduce(x, group=wrapped.device_mesh, config=QUANTIZED), [x]),
        "step": (lambda: fap.all_reduce(x, config=QUANTIZED, step="3"), [x]),
        "feedback": (lambda: fap.all_reduce(x, config=QUANTIZED, feedback=fap.Feedback()), [x]),
        "no input": (lambda: fap.reduce_scatter(y, None, config=QUANTIZED), [y]),
        "scatter config": (lambda: fap.reduce_scatter(y, x, config={"bits": 4}), [x, y]),
        "gather config": (lambda: fap.all_gather(x, y, config={"bits": 4}), [x, y]),
        "DTensor": (lambda: fap.all_reduce(wrapped, config=QUANTIZED), [x]),
        **bad_exchanges(world, x, y),
    }


def bad_exchanges(world: int, x: Tensor, y: Tensor) -> dict[str, tuple[Callable[[], Any], list[Tensor]]]:
    rank, out, odd = dist.get_rank(), torch.ones(60 * world), torch.ones(60 * world - 1)
    own = [0] * world
    own[rank] = 60

    def call(output: Any, input: Any, *sizes: Any, **how: Any) -> tuple[Callable[[], Any], list[Tensor]]:
        tensors = [one for one in (output, input) if isinstance(one, Tensor)]
        return lambda: fap.all_to_all(output, input, *sizes, **{"config": QUANTIZED, **how}), tensors

    return {
        "exchange list": call(out, [x]),
        "exchange dtypes": call(out.half(), x),
        "exchange number": call(torch.tensor(1.0), x),
        "exchange uneven": call(out, odd[: 60 * world - 1] if world > 1 else x, None, None if world > 1 else [59]),
        "exchange few sizes": call(out, x, [60] * (world + 1)),
        "exchange sum": call(out, x, None, [61] * world),
        "exchange negative": call(out, x, None, [-1] * world),
        "exchange halves": call(out, x, [60.0] * world),
        "exchange own": call(out[:59], y, [59 if r == rank else 0 for r in range(world)], own),
        "exchange in place": call(x, x),
        "exchange overlap": call(x[: 59 * world], x[world:]),
        "exchange config": call(out, x, config={"bits": 4}),
        "exchange int16": call(out.short(), x.short()),
        "gather sizes": (lambda: fap.all_gather(out, y, config=QUANTIZED, output_split_sizes=[1] * world), [out, y]),
        "gather part": (
            lambda: fap.all_gather(out, torch.ones(59), config=QUANTIZED, output_split_sizes=[60] * world),
            [out],
        ),
    }


SENTENCES = {
    "list": "TypeError: tensor is list; expected a dense tensor.",
    "sparse": "TypeError: tensor is torch.sparse_coo; expected a dense tensor.",
    "config": "TypeError: config is dict; expected FlashConfig or None.",
    "meta": "ValueError: the tensor is on meta, which the group's backend does not serve",
    "expanded": "ValueError: tensor has strides (0,), several elements at one place in memory",
    "expanded output": "ValueError: output has strides (0,), several elements at one place in memory",
    "indivisible": "ValueError: input has {z} elements and output 60; expected output x {world} ranks",
    "swapped": "ValueError: input has 60 elements and output {x}; expected output x {world} ranks = input.",
    "gather size": "ValueError: output has {z} elements and input 60; expected input x {world} ranks",
    "dtypes": "ValueError: output is torch.float16 on cpu and input torch.float32 on cpu; expected",
    "gather dtypes": "ValueError: input is torch.float16 on cpu and output torch.float32 on cpu; expected",
    "devices": "ValueError: output is torch.float32 on meta and input torch.float32 on cpu; expected",
    "average of integers": "ValueError: all_reduce of torch.int64: gloo does not reduce it by AVG; take SUM.",
    "scattered average": "ValueError: reduce_scatter of torch.int64: gloo does not reduce it by AVG; take SUM.",
    "bits of floats": "ValueError: all_reduce of torch.float32: gloo does not reduce it by BAND; take SUM.",
    "greatest complex": "ValueError: all_reduce of torch.complex64: gloo does not reduce it by MAX; take SUM.",
    "int16": "ValueError: all_reduce of torch.int16: gloo does not take it; convert the tensor to one of float32",
    "gathered int16": "ValueError: all_gather of torch.int16: gloo does not take it; convert",
    "operator": "TypeError: op is 'sum'; expected one of torch.distributed.ReduceOp.",
    "conjugate": "ValueError: tensor is a view that stands for the conjugate of its memory; resolve_conj() it first.",
    "negative": "ValueError: tensor is a view that stands for the negative of its memory; resolve_neg() it first.",
    "negative input": "ValueError: input is a view that stands for the negative of its memory",
    "site": "TypeError: site is str; expected Site, for example Site('mine').",
    "group": "TypeError: group is str; expected a ProcessGroup or None.",
    "mesh": "TypeError: group is DeviceMesh; expected a ProcessGroup (its get_group()) or None.",
    "step": "TypeError: step is str; expected a whole number or None.",
    "feedback": "TypeError: feedback is Feedback; expected the result of Feedback.slot(), or None.",
    "no input": "TypeError: input is NoneType; expected a dense tensor, or a list of one for each rank.",
    "scatter config": "TypeError: config is dict; expected FlashConfig or None.",
    "gather config": "TypeError: config is dict; expected FlashConfig or None.",
    "DTensor": "TypeError: tensor is DTensor; expected a plain dense tensor: give its to_local().",
    "exchange list": "TypeError: input is list; expected a dense tensor.",
    "exchange dtypes": "ValueError: output is torch.float16 on cpu and input torch.float32 on cpu; expected the same",
    "exchange number": "ValueError: output is a single number; expected rows, which are split along the",
    "exchange uneven": "ValueError: input",
    "exchange few sizes": "ValueError: output_split_sizes has {more} sizes; expected one for each of {world} ranks.",
    "exchange sum": "ValueError: input_split_sizes is [61",
    "exchange negative": "ValueError: input_split_sizes is [-1",
    "exchange halves": "TypeError: output_split_sizes is [60.0",
    "exchange own": "ValueError: input has 60 elements for rank",
    "exchange in place": "ValueError: output and input share memory; an all_to_all needs a tensor for each.",
    "exchange overlap": "ValueError: output and input share memory",
    "exchange config": "TypeError: config is dict; expected FlashConfig or None.",
    "exchange int16": "ValueError: all_to_all of torch.int16: gloo does not take it; convert the tensor to one of",
    "gather sizes": "ValueError: output_split_sizes is [1",
    "gather part": "ValueError: input has 59 elements; expected 60, as output_split_sizes has them.",
}


def bad_input(name: str, on: list[int]) -> tuple[str, bool, bool, bool]:
    """Return the error on the ranks `on`, then True if tensors are untouched, nothing is counted, the group works."""
    message, untouched, counted = "", True, {"calls": 0}
    if dist.get_rank() in on:
        call, tensors = bad_calls()[name]
        before = [t.clone() for t in tensors]
        fap.reset_stats()
        try:
            call()
        except (TypeError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
        counted = fap.stats()
        untouched = all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    return message, untouched, counted["calls"] == 0, still_works()


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input_is_refused_before_anything_is_sent(ranks: GetRanks, world_size: int, name: str) -> None:
    sentence = SENTENCES[name].format(world=world_size, more=world_size + 1, x=60 * world_size, z=60 * world_size + 1)
    if name == "swapped" and world_size == 1:
        pytest.skip("one rank: nothing to swap")
    # On one rank only: if anything were sent, the other rank's next collective would receive it.
    for on in ([0], list(range(world_size))):
        for rank, (message, *good) in enumerate(ranks(world_size).run(bad_input, name, on)):
            assert message.startswith(sentence) if rank in on else message == ""
            assert good == [True, True, True]


def taken() -> list[str]:
    """Return, for every dtype and operator, where this package and torch.distributed differ in accepting it."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

    def outcome(call: Callable[..., Any], dtype: torch.dtype, op: Any) -> str:
        try:
            call(torch.ones(8).to(dtype), op)
        except ValueError:
            return "refused"
        except RuntimeError:
            return "failed"
        return "taken"

    wrong = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        for name in names:
            op = getattr(dist.ReduceOp, name)
            found = outcome(dist.all_reduce, dtype, op), outcome(fap.all_reduce, dtype, op)
            if found not in (("taken", "taken"), ("failed", "refused")):
                wrong.append(f"{dtype} {name}: {found}")
    return wrong


def test_in_full_precision_only_torch_refuses(ranks: GetRanks) -> None:
    assert ranks(2).run(taken) == [[]] * 2


def views_after_remembered_calls() -> list[str]:
    refused = []
    for x in (torch.ones(60, dtype=torch.complex64).conj(), torch.ones(60, dtype=torch.complex64).conj().imag):
        for _ in range(3):
            fap.all_reduce(torch.ones(60, dtype=x.dtype))
        try:
            fap.all_reduce(x)
        except ValueError as error:
            refused.append(str(error))
    return refused


def test_a_lazy_view_is_refused_where_its_like_is_remembered(ranks: GetRanks) -> None:
    for conjugate, negative in ranks(2).run(views_after_remembered_calls):
        assert "conjugate" in conjugate and "negative" in negative


def overlapping() -> dict[str, str]:
    """Return rank 0's errors: each public function gets a view that it cannot write. Both ranks continue after them."""
    said: dict[str, str] = {}
    if dist.get_rank() == 0:
        memory = torch.ones(41)
        x, view, sites = torch.ones(80), memory.unfold(0, 2, 1), (fap.isend, fap.irecv)
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": lambda **how: fap.all_reduce(view, **how),
            "reduce_scatter": lambda **how: fap.reduce_scatter(view, torch.ones(160), **how),
            "reduce_scatter of parts": lambda **how: fap.reduce_scatter([x[:3], view], [[x[:83]], [x]], **how),
            "all_gather": lambda **how: fap.all_gather(view, x[:40], **how),
            "all_gather of differences": lambda **how: fap.all_gather(view, x[:40], held=fap.HeldWeights(), **how),
            "all_to_all": lambda **how: fap.all_to_all(view, x.view(40, 2), **how),
            "recv": lambda **how: fap.recv(view, 1, **how),
            "irecv": lambda **how: fap.irecv(view, 1, **how),
            "batch": lambda **how: fap.batch_isend_irecv([fap.P2POp(op, view, 1) for op in sites], **how),
            "broadcast": lambda **how: fap.broadcast(view, 1, **how),
            "reduce": lambda **how: fap.reduce(view, 0, **how),
            "scatter": lambda **how: fap.scatter(view, None, 1, **how),
            "gather": lambda **how: fap.gather(x, [x.clone(), view], 0, **how),
        }
        for (name, call), config in itertools.product(calls.items(), (QUANTIZED, fap.FlashConfig())):
            try:
                call(config=config)
                said[name] = "no error"
            except ValueError as error:
                said[name] = str(error)
        assert torch.equal(memory, torch.ones(41))
    assert still_works()
    return said


def test_guarantee_5_a_view_whose_elements_overlap_is_not_written(ranks: GetRanks) -> None:
    said, _ = ranks(2).run(overlapping)
    assert len(said) == 13
    for name, sentence in said.items():
        assert "has strides (1, 1), several elements at one place in memory, and cannot hold" in sentence, name


def test_elements_that_overlap_are_found_whatever_the_strides() -> None:
    draw, memory = random.Random(0), torch.zeros(400)
    for _ in range(3000):
        sizes = [draw.randint(0, 4) for _ in range(draw.randint(1, 4))]
        strides = [draw.randint(0, 9) for _ in sizes]
        places = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, sizes))]
        found = checks._overlaps(memory.as_strided(sizes, strides))
        assert found == (len(set(places)) < len(places)), (sizes, strides)
