"""The compiled codec and the reference side by side, and inputs that are hard on both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import reference
from flash_allreduce_plugin.codec.format import MIN_CODEBOOK_GROUP_SIZE, NO_DRAW, Draw, Format, residual_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = range(2, 9)
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
LAYOUTS: tuple[dict[str, bool], ...] = ({}, {"symmetric": True}, {"compact": True})
CODEBOOK = {"codebook": True}  # a fourth, for groups of 128 and more
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 997, 1024, 1025, 2311)


def residuals(numel: int, group_size: int, seed: int = 5) -> list[Tensor]:
    """Return residuals that error feedback may have left for a row of numel elements: of 8 bits and of bf16."""
    groups, own = -(-numel // group_size), residual_format(group_size)
    values = (gaussian(groups, group_size, seed=seed) * 128).round() / 1024
    records = torch.empty(1, groups * own.record_bytes, dtype=torch.uint8)
    reference.encode(values.view(1, -1), records, own)
    return [records.view(groups, own.record_bytes), values.bfloat16()]


compiled = torch.ops.flash_allreduce


def fits(group_size: int, layout: dict[str, bool]) -> bool:
    """Return True if the layout has groups of this size."""
    return group_size >= MIN_CODEBOOK_GROUP_SIZE or not layout.get("codebook")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: comparing them distinguishes -0 from 0 and one NaN from another."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


@dataclass(frozen=True)
class Both:
    """Every operation, done by both; fails if a bit differs."""

    codec: Format

    @property
    def key(self) -> tuple[int, int, int]:
        return self.codec.bits, self.codec.group_size, self.codec.options

    def encode(self, rows: Tensor, draw: Draw = NO_DRAW) -> Tensor:
        shape = rows.shape[0], self.codec.payload_bytes(rows.shape[1])
        ours, theirs = torch.full(shape, 0xA5, dtype=torch.uint8), torch.full(shape, 0x5A, dtype=torch.uint8)
        compiled.encode(rows, ours, *self.key, draw.key, draw.first_group, draw.groups_a_row)
        reference.encode(rows, theirs, self.codec, draw)
        differing = (ours != theirs).nonzero()
        assert not len(differing), f"{self.codec} {rows.dtype}: bytes {differing[:4].tolist()} of the payload"
        return ours

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        ours, theirs = (torch.full((payload.shape[0], numel), 77.0, dtype=dtype) for _ in range(2))
        compiled.decode(payload, ours, *self.key)
        reference.decode(payload, theirs, self.codec)
        assert same_bits(ours, theirs), f"{self.codec} decodes differently into {dtype}"
        return ours

    def encode_feedback(
        self, x: Tensor, residual: Tensor, momentum: float = 0.8, draw: Draw = NO_DRAW
    ) -> tuple[Tensor, Tensor]:
        """Encode x [1, numel]. Return the payload and the new residual."""
        payloads = [torch.full((1, self.codec.payload_bytes(x.shape[1])), 0xA5, dtype=torch.uint8) for _ in range(2)]
        residuals = [residual.clone() for _ in range(2)]
        compiled.encode_feedback(x, payloads[0], residuals[0], momentum, *self.key, draw.key, draw.first_group)
        reference.encode_feedback(x, payloads[1], residuals[1], momentum, self.codec, draw)
        assert same_bits(*payloads), f"{self.codec} {x.dtype}: another payload"
        assert same_bits(*residuals), f"{self.codec} {x.dtype}: another residual of {residual.dtype}"
        return payloads[0], residuals[0]

    def decode_sum_encode_feedback(
        self, payloads: Tensor, residual: Tensor, gather: Format, factor: float = 1.0, draw: Draw = NO_DRAW
    ) -> tuple[Tensor, Tensor]:
        groups = payloads.shape[1] // self.codec.record_bytes
        out = [torch.zeros(groups * gather.record_bytes, dtype=torch.uint8) for _ in range(2)]
        residuals, (bits, group_size, options) = [residual.clone() for _ in range(2)], self.key
        numbers = bits, gather.bits, group_size, options, draw.key, draw.first_group
        compiled.decode_sum_encode_feedback(payloads, out[0], residuals[0], factor, 0.8, *numbers)
        reference.decode_sum_encode_feedback(payloads, out[1], residuals[1], self.codec, gather, factor, 0.8, draw)
        assert same_bits(*out) and same_bits(*residuals), f"{self.codec} to {gather}, {residual.dtype}"
        return out[0], residuals[0]

    def encode_difference(self, master: Tensor, held: Tensor, draw: Draw = NO_DRAW) -> Tensor:
        """Encode master, in float32, minus held [1, numel]."""
        shape = 1, self.codec.payload_bytes(held.shape[1])
        ours, theirs = torch.full(shape, 0xA5, dtype=torch.uint8), torch.full(shape, 0x5A, dtype=torch.uint8)
        finite = compiled.encode_difference(master, held, ours, *self.key, draw.key, draw.first_group)
        difference = master - held.float()
        reference.encode(difference, theirs, self.codec, draw)
        assert same_bits(ours, theirs), f"{self.codec} {held.dtype}: another difference"
        assert finite or not (difference.isfinite().all() and difference.abs().max() < 1e37), "all are finite"
        assert not finite or difference.isfinite().all()
        return ours

    def decode_add(self, payload: Tensor, held: Tensor) -> Tensor:
        """Add the payload to held [rows, numel]. Return the sum."""
        ours, decoded = held.clone(), torch.empty(held.shape)
        compiled.decode_add(payload, ours, *self.key)
        reference.decode(payload, decoded, self.codec)
        theirs = (held.float() + decoded).to(held.dtype)
        differing = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        assert not differing.any(), f"{self.codec} adds differently to {held.dtype}"
        return ours

    def decode_sum(
        self, payloads: Tensor, numel: int, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> Tensor:
        ours, theirs = (torch.full((numel,), 77.0, dtype=dtype) for _ in range(2))
        compiled.decode_sum(payloads, ours, factor, *self.key)
        reference.decode_sum(payloads, theirs, self.codec, factor)
        assert same_bits(ours, theirs), f"{self.codec} sums differently into {dtype}"
        return ours

    def decode_sum_encode(self, payloads: Tensor, gather: Format, factor: float = 1.0, draw: Draw = NO_DRAW) -> Tensor:
        groups = payloads.shape[1] // self.codec.record_bytes
        ours, theirs = (torch.zeros(groups * gather.record_bytes, dtype=torch.uint8) for _ in range(2))
        bits, group_size, options = self.key
        compiled.decode_sum_encode(
            payloads, ours, factor, bits, gather.bits, group_size, options, draw.key, draw.first_group
        )
        reference.decode_sum_encode(payloads, theirs, self.codec, gather, factor, draw)
        assert torch.equal(ours, theirs), f"{self.codec} to {gather}"
        return ours

    def round_trip(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.decode(self.encode(rows), rows.shape[1], dtype)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sqnr_db(exact: Tensor, result: Tensor) -> float:
    """Return 10 log10(signal / noise) of the whole tensors."""
    exact = exact.flatten().double()
    return float(10 * (exact.square().sum() / (result.flatten().double() - exact).square().sum()).log10())


def hard_values(numel: int) -> dict[str, Tensor]:
    """Return name -> numel fp32 values."""
    noise = gaussian(numel)
    place = torch.arange(numel)
    inf, nan = float("inf"), float("nan")

    def with_value(value: float, every: int) -> Tensor:
        return torch.where(place % every == every // 2, value, noise)

    return {
        "gaussian": noise,
        "around 1e-30": noise * 1e-30,
        "around 1e30": noise * 1e30,
        "near the end of float32": noise.sign() * 3e38,
        "from 1e-30 to 1e30": noise * 10.0 ** ((place // 64) % 61 - 30).float(),
        "subnormal": noise * 1e-40,
        "normal and subnormal": torch.where(place % 2 == 0, noise * 1e-40, noise * 1e-37),
        "all 0": torch.zeros(numel),
        "all -0": -torch.zeros(numel),
        "0 and -0": torch.where(place % 3 == 0, -0.0, 0.0) * torch.ones(numel),
        "-0 first, then positive": torch.where(place % 64 == 0, -0.0, noise.abs()),
        "constant": torch.full((numel,), 3.14159),
        "constant, negative": torch.full((numel,), -2.71828),
        "100 +- 0.1": 100 + 0.1 * noise.clamp(-1, 1),
        "-100 +- 0.1": -100 + 0.1 * noise.clamp(-1, 1),
        "one spike": torch.where(place % 97 == 5, 1e4, noise),
        "NaN here and there": with_value(nan, 211),
        "Inf here and there": with_value(inf, 211),
        "-Inf here and there": with_value(-inf, 211),
        "NaN everywhere": torch.full((numel,), nan),
        "Inf and -Inf": torch.where(place % 2 == 0, inf, -inf) * torch.ones(numel),
    }
