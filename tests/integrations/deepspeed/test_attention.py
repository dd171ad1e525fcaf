"""DeepSpeed-Ulysses: attention is exchanged at attention_bits forward and, with backward_bits, backward."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import deepspeed, engine, package, release, weights
from torch import Tensor, nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import refusals
from flash_allreduce_plugin.integrations.deepspeed import attention, section
from flash_allreduce_plugin.integrations.deepspeed import engine as engines_of
from tests.distributed import Ranks, run_ranks

HEAD, LOCAL, BATCH = 32, 24, 2
FORWARD, BACKWARD = "deepspeed.attention.forward", "deepspeed.attention.backward"
PLAIN = {"bits": 8, "min_bytes": 0}
EIGHT = {**PLAIN, "attention_bits": 8, "backward_bits": 8}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to tensors [batch, sequence, heads, head], the layout that DeepSpeed passes."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Local(nn.Module):
    def __init__(self, sequence_first: bool) -> None:
        super().__init__()
        self.sequence_first = sequence_first

    def forward(self, *qkv: Tensor) -> Tensor:
        if self.sequence_first:
            return attend(*(one.transpose(0, 1) for one in qkv)).transpose(0, 1)
        return attend(*qkv)


class Block(nn.Module):
    """Attention over the sequence of all ranks. This rank has LOCAL tokens."""

    def __init__(self, heads: int, kv_heads: int, sequence_first: bool = False) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        torch.manual_seed(5)
        self.sizes, self.sequence_first = (heads, kv_heads, kv_heads), sequence_first
        self.inputs = nn.Linear(64, HEAD * sum(self.sizes))
        gathered = 0 if sequence_first else 1
        self.attention = DistributedAttention(Local(sequence_first), dist.group.WORLD, 2, gathered)
        self.outputs = nn.Linear(HEAD * heads, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.sequence_first else x
        qkv = [part.unflatten(-1, (-1, HEAD)) for part in self.inputs(x).split([HEAD * n for n in self.sizes], -1)]
        found = self.attention(*qkv, 1 if self.sequence_first else 0).flatten(2)
        out = self.outputs(found)
        return out.transpose(0, 1) if self.sequence_first else out


class OfTransformers(nn.Module):
    """Call DeepSpeed's replacement of a transformers attention in the same way as transformers does."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        def core(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return attend(*(one.transpose(1, 2) for one in (q, k, v))), None

        torch.manual_seed(5)
        self.sizes = (heads, kv_heads, kv_heads)
        self.inputs, self.outputs = nn.Linear(64, HEAD * sum(self.sizes)), nn.Linear(HEAD * heads, 64)
        # In a closure of transformers' registry, not in the model.
        sizes = {"local_seq_length": LOCAL, "global_seq_length": LOCAL * dist.get_world_size(), "num_hidden_layers": 1}
        self.ulysses = [
            UlyssesSPAttentionHF(
                attn=core,
                batch_size=BATCH,
                attn_head_count=heads,
                attn_head_size=HEAD,
                kv_head_count=kv_heads,
                process_group=dist.group.WORLD,
                **sizes,
            )
        ]

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).split([HEAD * n for n in self.sizes], -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        positions = torch.arange(LOCAL).expand(BATCH, LOCAL) + LOCAL * dist.get_rank()
        return self.outputs(self.ulysses[0](self, q, k, v, None, position_ids=positions)[0])


@contextmanager
def rounded(log: list[tuple[int, ...]]) -> Iterator[None]:
    """Replace the sent runs of DeepSpeed's own all-to-all by runs that the codec has rounded one by one."""
    import deepspeed.comm as comm

    theirs, wire = comm.all_to_all_single, fap.FlashConfig(bits=8)

    def all_to_all_single(
        output: Tensor, input: Tensor, to: Any = None, of: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        log.append(tuple(input.shape))
        sizes = of or [len(input) // dist.get_world_size(group)] * dist.get_world_size(group)
        runs = [fap.decode(fap.encode(run, wire), tuple(run.shape), run.dtype, wire) for run in input.split(sizes)]
        return theirs(output, torch.cat(runs), to, of, group, async_op)

    comm.all_to_all_single = all_to_all_single
    try:
        yield
    finally:
        comm.all_to_all_single = theirs


def train(
    make: Callable[..., nn.Module], sizes: Any, flash: Any, options: Any = None, steps: int = 2
) -> dict[str, Any]:
    fap.reset_stats()
    deepspeed()
    built = engine(options or {}, flash, make(*sizes), lr=0.1)
    dtype = next(built.module.parameters()).dtype
    losses, gradients = [], []
    for number in range(2):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x = torch.randn(BATCH, LOCAL, 64, generator=generator).to(dtype).requires_grad_()
        loss = (built(x) - x.detach().flip(-1)).float().square().mean()
        built.backward(loss)
        built.step()
        losses.append(float(loss.detach()))
        assert x.grad is not None
        gradients.append(x.grad.clone())
    result = {"losses": losses, "gradients": torch.stack(gradients), "weights": weights(built), **fap.stats()}
    result["report"] = fap.deepspeed.report()
    built.destroy()
    return result


SHAPES: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {
    "two": (2, (4, 4), {}),
    "four": (4, (4, 4), {}),
    "grouped": (2, (4, 2), {"zero_optimization": {"stage": 3}}),
    "bf16": (2, (4, 4), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}),
}
if release() >= (0, 19, 8):  # which has mended it
    SHAPES["sequence-first"] = (2, (4, 4, True), {})


def side_by_side(make: Callable[..., nn.Module], sizes: Any, options: Any) -> dict[str, Any]:
    found = {
        "plain": train(make, sizes, None, options),
        "off": train(make, sizes, {**EIGHT, "enabled": False}, options),
        "eight": train(make, sizes, EIGHT, options),
        "forward": train(make, sizes, {**PLAIN, "attention_bits": 8}, options),
    }
    log: list[tuple[int, ...]] = []
    with rounded(log):
        found["expected"] = train(make, sizes, PLAIN, options)
    found["exchanges"] = len(log)
    return found


def check(found: dict[str, Any]) -> None:
    plain, off, eight, expected = (found[name] for name in ("plain", "off", "eight", "expected"))
    for key in ("weights", "gradients"):
        assert torch.equal(off[key], plain[key]), key
        assert torch.equal(eight[key], expected[key]), key
    assert eight["losses"] == expected["losses"] and eight["losses"] != plain["losses"]
    assert eight["losses"] == pytest.approx(plain["losses"], rel=0.01)
    for name, site in (("off", FORWARD), ("off", BACKWARD), ("eight", FORWARD), ("eight", BACKWARD)):
        counted = found[name]["sites"][site]
        assert counted["calls"] == 8 and found["exchanges"] == 16
        assert counted["quantized"] == (8 if name == "eight" else 0)
        assert counted["bytes_full_precision"] == off["sites"][site]["bytes_sent"]
        entry = found[name]["report"][site]
        assert entry["in_place"] and entry["calls"] == 8
    sent, full = (eight["sites"][FORWARD][key] for key in ("bytes_sent", "bytes_full_precision"))
    assert 0.25 < sent / full < 0.56
    forward = found["forward"]["sites"]
    assert forward[FORWARD]["quantized"] == 8 and forward[BACKWARD]["full_precision"] == {"backward_bits is full": 8}


@pytest.mark.parametrize("name", SHAPES)
def test_an_exchange_equals_rounding_each_run_and_a_full_precision_exchange(
    engines: Callable[[int], Ranks], name: str
) -> None:
    world, sizes, options = SHAPES[name]
    outcomes = engines(world).run(side_by_side, Block, sizes, options)
    for found in outcomes:
        check(found)
        assert torch.equal(found["eight"]["weights"], outcomes[0]["eight"]["weights"])


def with_groups(make: Callable[..., nn.Module], sizes: tuple[int, int]) -> dict[str, Any]:
    """Pass an object with the ranks that share a sequence, as register_with_transformers makes it."""
    theirs = package()
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    version: Any = importlib.metadata.version
    importlib.metadata.version = lambda name: "5.0.0" if name == "transformers" else version(name)
    sys.modules["transformers"] = types.ModuleType("transformers")
    theirs.init_distributed("gloo")
    mpu.initialize_sequence_parallel(sequence_parallel_size=dist.get_world_size())
    initialize = theirs.initialize
    theirs.initialize = lambda **how: initialize(**how, mpu=mpu)
    found = side_by_side(make, sizes, {})
    del sys.modules["transformers"]
    if make is OfTransformers:
        with pytest.raises(Exception, match="attention_bits=8 has no effect"):
            train(make, sizes, EIGHT)
    return found


UNEVEN = pytest.mark.skipif(release() < (0, 19, 8), reason="one number of heads counts for the whole process")


@pytest.mark.parametrize(
    ("world", "make", "sizes"),
    [(2, OfTransformers, (4, 4)), (4, OfTransformers, (4, 2)), pytest.param(2, Block, (3, 3), marks=UNEVEN)],
    ids=["transformers", "transformers-grouped", "uneven"],
)
def test_deepspeed_versions_that_need_the_sequence_group(
    world: int, make: Callable[..., nn.Module], sizes: tuple[int, int]
) -> None:
    for found in run_ranks(world, with_groups, make, sizes):
        check(found)


class Stream:
    """A stream that does nothing: without an accelerator there is one queue, and nothing to wait for."""

    def wait_stream(self, _other: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...


def overlapped(flash: Any) -> dict[str, Any]:
    """Exchange gradients of queries and keys asynchronously, and wait for them where they are used."""
    package()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.default_stream = accelerator.current_stream = lambda *_: Stream()

    def make(*sizes: Any) -> nn.Module:
        block = Block(*sizes)
        from deepspeed.sequence.layer import DistributedAttention

        block.attention = DistributedAttention(Local(False), dist.group.WORLD, 2, 1, sp_stream=Stream())
        return block

    try:
        return train(make, (4, 4), flash)
    finally:
        del accelerator.default_stream, accelerator.current_stream


def with_and_without_overlap() -> list[dict[str, Any]]:
    return [overlapped({**EIGHT, "enabled": False}), overlapped(EIGHT), train(Block, (4, 4), EIGHT)]


@pytest.mark.skipif(release() < (0, 19, 8), reason="the hooks of older ones expect another graph")
def test_overlapped_exchanges_give_the_same_bits(engines: Callable[[int], Ranks]) -> None:
    for off, overlapping, synchronous in engines(2).run(with_and_without_overlap):
        assert overlapping["sites"][BACKWARD]["quantized"] == off["sites"][BACKWARD]["calls"] == 8
        assert torch.equal(overlapping["weights"], synchronous["weights"])


def two_engines_and_their_end() -> dict[str, Any]:
    """Train an engine with a section and one without; warm-up; evaluation; state after the end."""
    deepspeed()
    from deepspeed.sequence import layer

    engines_of.detach()
    deepspeed()
    fap.reset_stats()
    theirs = {name: getattr(layer, name) for name in ("single_all_to_all", "uneven_heads_all2all")}
    served = engine({}, {**EIGHT, "warmup_steps": 1, "quantize_evaluation": False}, Block(4, 4))
    alone = engine({}, None, Block(4, 4))
    during = {name: getattr(layer, name) is one for name, one in theirs.items()}
    x = torch.randn(BATCH, LOCAL, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
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
    after = {name: getattr(layer, name) is one for name, one in theirs.items()}
    fap.reset_stats()
    served.train()
    served(x)
    return {"during": during, "after": after, "uncounted": uncounted, "sites": sites, "left": fap.stats()["calls"]}


def guarded() -> dict[str, Any]:
    return train(
        Block, (4, 4), {**EIGHT, "attention_bits": 2, "backward_bits": 2, "min_sqnr_db": 20, "quality_interval": 1}
    )


def test_the_guard_widens_exchanges_that_are_not_exact_enough(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(guarded):
        for site in (FORWARD, BACKWARD):
            assert found["sites"][site]["bits"] > 2 and found["sites"][site]["sqnr_db"] is not None


def test_only_the_engine_with_the_section_is_served_and_nothing_stays(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(two_engines_and_their_end):
        assert not any(found["during"].values()) and all(found["after"].values())
        assert found["uncounted"] == found["left"] == 0
        assert found["sites"][FORWARD]["full_precision"] == {"warm-up": 4, "evaluation": 4}
        assert found["sites"][FORWARD]["quantized"] == 4
        assert found["sites"][BACKWARD]["quantized"] == 4 and found["sites"][BACKWARD]["calls"] == 8


def without_attention() -> str:
    with pytest.raises(Exception, match="attention_bits") as caught:
        engine({}, EIGHT)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_attention_bits_without_attention_across_ranks_is_refused_in_one_sentence(
    engines: Callable[[int], Ranks],
) -> None:
    assert engines(2).run(without_attention) == 2 * [
        "DeepSpeedConfigError: flash_allreduce.attention_bits=8 has no effect: no attention of this model spans "
        "several ranks (Ulysses' DistributedAttention, or UlyssesSPAttentionHF); leave it out."
    ]


def test_backward_bits_need_a_width_of_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = section.parse({"flash_allreduce": EIGHT})
    assert config is not None and (config.attention_bits, config.backward_bits) == (8, 8)
    assert attention.wanted(config)
    with pytest.raises(fap.ConfigError, match=r"^flash_allreduce.backward_bits=8 has no effect in DeepSpeed"):
        section.parse({"flash_allreduce": {**EIGHT, "attention_bits": "full"}})
    (tmp_path / "flash.json").write_text('{"attention_bits": 6}')
    config = section.parse({"flash_allreduce": {"config": str(tmp_path / "flash.json"), "backward_bits": 7}})
    assert config is not None and (config.attention_bits, config.backward_bits) == (6, 7)
    monkeypatch.setenv("FLASH_ALLREDUCE_ATTENTION_BITS", "5")
    config = section.parse({"flash_allreduce": {"backward_bits": 7}})
    assert config is not None and config.attention_bits == 5
    given = fap.FlashConfig(attention_bits=8, backward_bits=8)
    assert not refusals.refusals(given.given(), "DeepSpeed", section.lacking(given.given(), splits=False))
