"""A collective over pretended ranks in one process, from reference.py alone, and the same call on real ranks.

    encode every rank's tensor -> sum in rank order -> encode -> decode

There are no chunks, shards or buffers here: the real collectives must equal the simulation bit for bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import reference, rows
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from flash_allreduce_plugin.runtime import groups
from tests.codecs import as_bytes

QUANTIZED = {"min_bytes": 0, "chunk_bytes": 4096}


@dataclass(frozen=True)
class Call:
    """One call with inputs that every process can make again.

    numel: of the tensor of all_reduce, of a shard of reduce_scatter and all_gather.
    kind: of values, a key of `VALUES`.
    """

    collective: str
    numel: int
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    op: str = "SUM"
    kind: str = "gaussian"
    async_op: bool = False

    @property
    def flash_config(self) -> fap.FlashConfig:
        return fap.FlashConfig(**{**QUANTIZED, **self.config})

    def input(self, rank: int, world_size: int) -> Tensor:
        numel = self.numel * (world_size if self.collective == "reduce_scatter" else 1)
        generator = torch.Generator().manual_seed(1000 * rank + numel)
        values = VALUES[self.kind](torch.randn(numel, generator=generator), rank)
        return values.to(getattr(torch, self.dtype))

    def run(self, x: Tensor) -> Tensor:
        """Return the result on this rank; x is used up."""
        world, op = dist.get_world_size(), getattr(dist.ReduceOp, self.op)
        if self.collective == "all_reduce":
            result = x
            work = fap.all_reduce(x, op, config=self.flash_config, async_op=self.async_op)
        elif self.collective == "reduce_scatter":
            result = x.new_empty(x.numel() // world)
            work = fap.reduce_scatter(result, x, op, config=self.flash_config, async_op=self.async_op)
        else:
            result = x.new_empty(x.numel() * world)
            work = fap.all_gather(result, x, config=self.flash_config, async_op=self.async_op)
        if work is not None:
            work.wait()
        return result

    def simulate(self, world_size: int) -> list[Tensor]:
        """Return the result of every rank."""
        inputs = [self.input(rank, world_size) for rank in range(world_size)]
        config = self.flash_config
        reduce, gather = (config.format(bits or config.bits) for bits in (config.reduce_bits, config.gather_bits))
        factor = 1 / world_size if self.op == "AVG" else 1.0
        if world_size == 1:
            return inputs
        # The first call of a group that is rounded stochastically, of seed 0.
        key = rows.draw_key(config.seed, 0)
        if self.collective == "all_reduce":
            return [all_reduce(inputs, factor, reduce, gather, key)] * world_size
        if self.collective == "all_gather":
            draws = [Draw(rows.draw_key(key, 1), rank * gather.groups(self.numel)) for rank in range(world_size)]
            values = [decoded(encoded(x, gather, draw), x, gather) for x, draw in zip(inputs, draws, strict=True)]
            return [torch.cat(values)] * world_size
        shards = [x.view(world_size, -1) for x in inputs]
        return [reduce_shard([s[rank] for s in shards], factor, reduce, key, rank) for rank in range(world_size)]


def encoded(x: Tensor, codec: Format, draw: Draw = NO_DRAW) -> Tensor:
    payload = torch.empty(1, codec.payload_bytes(x.numel()), dtype=torch.uint8)
    reference.encode(x.reshape(1, -1), payload, codec, draw)
    return payload


def decoded(payload: Tensor, like: Tensor, codec: Format) -> Tensor:
    output = torch.empty(1, like.numel(), dtype=like.dtype)
    reference.decode(payload, output, codec)
    return output[0]


def all_reduce(inputs: list[Tensor], factor: float, reduce: Format, gather: Format, key: int = 0) -> Tensor:
    draws = [Draw(rows.draw_key(key, 0, rank)) for rank in range(len(inputs))]
    payloads = torch.cat([encoded(x, reduce, draw) for x, draw in zip(inputs, draws, strict=True)])
    total = torch.empty(gather.payload_bytes(inputs[0].numel()), dtype=torch.uint8)
    if total.numel():
        reference.decode_sum_encode(payloads, total, reduce, gather, factor, Draw(rows.draw_key(key, 1)))
    return decoded(total.view(1, -1), inputs[0], gather)


def reduce_shard(shards: list[Tensor], factor: float, reduce: Format, key: int = 0, owner: int = 0) -> Tensor:
    output = torch.empty_like(shards[0])
    first = owner * reduce.groups(output.numel())
    draws = [Draw(rows.draw_key(key, 0, rank), first) for rank in range(len(shards))]
    if output.numel():
        payloads = torch.cat([encoded(x, reduce, draw) for x, draw in zip(shards, draws, strict=True)])
        reference.decode_sum(payloads, output, reduce, factor)
    return output


def _mixed_magnitudes(noise: Tensor, rank: int) -> Tensor:
    return noise * 10.0 ** (torch.arange(noise.numel()) // 64 % 61 - 30).float()


def _cancelling(noise: Tensor, rank: int) -> Tensor:
    """Return the same pattern on all ranks, of sizes and signs that make the sum depend on its order."""
    size = (1e8, 3.0, -1e8, 1e-3, -7.0, 2e5, 1e8, -3e4)[rank]
    return size * torch.sin(torch.arange(noise.numel()) * 0.37)


def _with(value: float) -> Any:
    def values(noise: Tensor, rank: int) -> Tensor:
        """Put `value` on rank 1 alone, at every 1000th element from the fifth."""
        if rank == 1:
            noise[5::1000] = value
        return noise

    return values


def _embedding(noise: Tensor, rank: int) -> Tensor:
    """Zero two rows of three on all ranks; the rest has zeros of both signs that are this rank's alone."""
    place = torch.arange(noise.numel())
    return torch.where((place // 48 % 3 != 0) | ((place + rank) % 5 == 0), 0.0 * noise, noise)


VALUES: dict[str, Any] = {
    "gaussian": lambda noise, rank: noise,
    "tiny": lambda noise, rank: noise * 1e-30,
    "huge": lambda noise, rank: noise * 1e30,
    "from 1e-30 to 1e30": _mixed_magnitudes,
    "constant": lambda noise, rank: torch.full_like(noise, 0.1 * (rank + 1)),
    "zero": lambda noise, rank: torch.zeros_like(noise) * (-1) ** rank,
    "offset": lambda noise, rank: 100 + 0.1 * noise.clamp(-1, 1),
    "rank": lambda noise, rank: torch.full_like(noise, rank + 1.0),
    "cancelling": _cancelling,
    "large fp16": lambda noise, rank: 40_000 * noise.sign(),
    "embedding": _embedding,
    "nan": _with(float("nan")),
    "inf": _with(float("inf")),
    "-inf": _with(float("-inf")),
}


def lost_zeros(calls: list[Call]) -> list[str]:
    """Return the calls that lose a zero: an element exactly zero on all ranks that is not zero in the result."""
    found, world, rank = [], dist.get_world_size(), dist.get_rank()
    for call in calls:
        x = call.input(rank, world)
        if call.collective == "all_gather":
            zero = torch.cat([call.input(other, world) == 0 for other in range(world)])
        else:
            zero = torch.stack([call.input(other, world) == 0 for other in range(world)]).all(0)
        if call.collective == "reduce_scatter":
            zero = zero.view(world, -1)[rank]
        result = call.run(x)
        assert not call.numel or (zero.any() and not zero.all())
        if not (result[zero] == 0).all() or (call.numel and (result[~zero] == 0).all()):
            found.append(str(call))
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()


def result_of(call: Call) -> str:
    """Return the digest of this rank's result, drawn as the group's first call for stochastic rounding."""
    groups.state_of(dist.group.WORLD).draws = 0
    return digest(call.run(call.input(dist.get_rank(), dist.get_world_size())))


def results_of(calls: list[Call]) -> list[str]:
    return [result_of(call) for call in calls]


def expected_of(calls: list[Call], world_size: int) -> list[list[str]]:
    """Return the expected output of results_of on every rank."""
    per_call = [[digest(t) for t in call.simulate(world_size)] for call in calls]
    return [list(rank) for rank in zip(*per_call, strict=True)]
