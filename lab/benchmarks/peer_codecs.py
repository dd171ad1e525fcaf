"""The formats of other projects in plain PyTorch, and floating-point formats that no project sends yet.

Each function takes a matrix [rows, columns] in float32. It returns the decoded matrix, in float32, and the bytes on the
wire, with metadata. Where a kernel computes in fp16 or bf16, this code computes in float32, which favours the format.
Stored numbers are rounded as in the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

RoundTrip = Callable[[Tensor], tuple[Tensor, int]]

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Peer:
    """slow: its two roundings are left out, for want of time or of a second one."""

    name: str
    round_trip: RoundTrip
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A float of few bits without infinities: sign, exponent, mantissa, subnormals, a largest value."""

    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def name(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}"

    def round(self, x: Tensor) -> Tensor:
        """Nearest, ties to even, beyond the largest value the largest value."""
        x = x.clamp(-self.largest, self.largest)
        least = 2 - 2 ** (self.exponent_bits - 1)  # exponent of the least normal number
        exponent = (torch.frexp(x).exponent - 1).clamp(min=least)
        step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa_bits)
        return ((x / step).round() * step).clamp(-self.largest, self.largest)


# OCP Microscaling Formats (MX) v1.0, table 1 and section 5.3; e4m3 as in torch.float8_e4m3fn.
E4M3 = Minifloat(4, 3, E4M3_MAX)
E3M2 = Minifloat(3, 2, 28.0)
E2M3 = Minifloat(2, 3, 7.5)
E2M1 = Minifloat(2, 1, 6.0)


def _groups(x: Tensor, size: int) -> Tensor:
    """[groups, size]; the matrix must divide."""
    if x.numel() % size:
        raise ValueError(f"{x.numel()} elements do not divide into groups of {size}; take a multiple.")
    return x.reshape(-1, size)


def quickreduce(x: Tensor, bits: int) -> tuple[Tensor, int]:
    """QuickReduce's line codecs, 4, 6 and 8 bits: csrc/core/allreduce.h of mk1-project/quickreduce, the same in
    vLLM's csrc/quickreduce/quick_reduce_impl.cuh and in AITER.

    Eight threads hold 64 elements; their even ones make a block of 32, their odd ones another. The element that is
    greatest in magnitude, with its sign, times -1 / 2^(bits - 1), is the block's fp16 scale, so that this element
    is the lowest code; codes -2^(bits - 1) ... 2^(bits - 1) - 1.
    """
    half = 2 ** (bits - 1)
    blocks = _groups(x, 64).view(-1, 32, 2).transpose(1, 2)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (extreme * (-1.0 / half)).half().float()
    divisor = scale + 2.0**-24
    codes = torch.where(divisor == 0, 0.0, blocks / divisor).round().clamp(-half, half - 1)
    decoded = (codes * scale).transpose(1, 2).reshape(x.shape)
    return decoded, x.numel() * bits // 8 + 2 * (x.numel() // 32)


def flydsl(x: Tensor, bits: int) -> tuple[Tensor, int]:
    """AITER's FlyDSL all-reduce, 4 and 6 bits: aiter/ops/flydsl/kernels/quick_allreduce_codec.py of ROCm/aiter.

    As QuickReduce, with groups of 16 in a row and the scale, with its sign, as 8 bits: 3 of mantissa and an
    exponent from -7 to 8, without subnormals.
    """
    half = 2 ** (bits - 1)
    groups = _groups(x, 16)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) * (-1.0 / half)
    mantissa, exponent = torch.frexp(extreme.abs())
    rounded = torch.ldexp((mantissa * 16 + 0.5).floor(), exponent - 4).clamp(2.0**-7 * 1.125, 480.0)
    scale = torch.where(extreme == 0, 0.0, rounded.copysign(extreme))
    codes = torch.where(scale == 0, 0.0, groups / scale).round().clamp(-half, half - 1)
    return (codes * scale).view(x.shape), x.numel() * bits // 8 + len(groups)


def flashinfer_fp8(x: Tensor) -> tuple[Tensor, int]:
    """flashinfer/comm/quantized_allreduce.py: e4m3, groups of 256, one fp32 scale max |x| / 448."""
    groups = _groups(x, 256)
    most = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    codes = (groups * (E4M3_MAX / most)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * (most / E4M3_MAX)).view(x.shape), x.numel() + 4 * len(groups)


def flash_communication(x: Tensor, bits: int, size: int = 128) -> tuple[Tensor, int]:
    """Flash Communication (arXiv 2412.04964): each group's least and greatest value, fp16 scale and zero point."""
    groups = _groups(x, size)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    return _uniform(groups, least, most, bits).view(x.shape), x.numel() * bits // 8 + 4 * len(groups)


def flash_communication_v2(x: Tensor, bits: int, size: int = 32) -> tuple[Tensor, int]:
    """Flash Communication V2 (arXiv 2508.03760) with spike reserving: the least and the greatest value of a group are
    sent as bf16 with a byte for the place, the others get the range that is left.

    The paper sends scales and zero points in fewer bits than 16 and describes several ways. Here they are fp16 and
    count as 8 bits each, which flatters the format.
    """
    groups = _groups(x, size)
    places = torch.cat([groups.argmin(-1, keepdim=True), groups.argmax(-1, keepdim=True)], -1)
    spiked = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, places, True)
    least = groups.masked_fill(spiked, math.inf).amin(-1, keepdim=True)
    most = groups.masked_fill(spiked, -math.inf).amax(-1, keepdim=True)
    decoded = torch.where(spiked, groups.bfloat16().float(), _uniform(groups, least, most, bits))
    return decoded.view(x.shape), x.numel() * bits // 8 + 8 * len(groups)


def _uniform(groups: Tensor, least: Tensor, most: Tensor, bits: int) -> Tensor:
    """2^bits values from about `least` to about `most`, with fp16 scale and zero point."""
    zero = least.half().float()
    scale = ((most - zero) / (2**bits - 1)).half().float()
    codes = torch.where(scale == 0, 0.0, (groups - zero) / scale).round().clamp(0, 2**bits - 1)
    return codes * scale + zero


def sdp4bit(x: Tensor, size: int, rotated: bool) -> tuple[Tensor, int]:
    """SDP4Bit (arXiv 2410.15526), 4 bits: symmetric, one fp32 scale a group. Gradients between nodes: groups of 128,
    rotated in blocks of 32. Differences of parameters: groups of 2048, or the largest power of two that divides.
    """
    size = min(size, x.numel() & -x.numel())
    rotation = _hadamard(32) if rotated else torch.eye(32)
    groups = _groups(_groups(x, 32) @ rotation, size)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    codes = torch.where(scale == 0, 0.0, groups / scale).round().clamp(-8, 7)
    decoded = _groups(codes * scale, 32) @ rotation
    return decoded.view(x.shape), x.numel() // 2 + 4 * len(groups)


def torchft_fp8(x: Tensor) -> tuple[Tensor, int]:
    """torchft/quantization.py: e4m3, one fp32 scale 448 / max |x| a row; rows are filled up to 4 bytes."""
    scale = E4M3_MAX / x.abs().amax(-1, keepdim=True)
    scale = torch.where(scale.isinf(), 1.0, scale)
    codes = (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float() / scale, x.shape[0] * 4 * (-(-x.shape[1] // 4) + 1)


def deepspeed(x: Tensor, bits: int, world: int = 8) -> tuple[Tensor, int]:
    """DeepSpeed's qgZ: Params<Symmetric> of csrc/includes/quantization_utils.h, with the groups of
    runtime/comm/coalesced_collectives.py, max(rows, columns, world) of them.

    fp32 scale; scale = 2^bits / (2 max |x|), codes clamped to -2^(bits - 1) ... 2^(bits - 1) - 1.
    """
    count = max(*x.shape, world)
    groups = _groups(x, x.numel() // count)
    most = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, 2**bits / (2 * most))
    codes = (groups * scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes * (1 / scale)).view(x.shape), x.numel() * bits // 8 + 4 * count


def dynamiq(x: Tensor, bits: int) -> tuple[Tensor, int]:
    """DynamiQ (arXiv 2602.08923) at one width, from summaries of the paper: groups of 16 with a scale of 8 bits, a part
    of a bf16 scale of 256 elements; codes of sign and magnitude with geometric levels,
    ((1 + e)^r - 1) / ((1 + e)^last - 1), rounded stochastically without a bias.

    The e that is best for the tensor. That the random numbers of the ranks are correlated is not modelled, nor that
    widths vary between groups.
    """
    generator = torch.Generator().manual_seed(0)
    last = 2 ** (bits - 1) - 1
    wide = _groups(x, 256).view(-1, 16, 16)
    most = wide.abs().amax(-1, keepdim=True)
    whole = (most.amax(1, keepdim=True) * (1 + 2.0**-8)).bfloat16().float()
    scale = torch.where(whole == 0, 0.0, (most / whole * 255).ceil() / 255 * whole)
    t = torch.where(scale == 0, 0.0, wide / scale)
    tried = []
    for e in (1e-4, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0):
        levels = ((1 + e) ** torch.arange(last + 1) - 1) / ((1 + e) ** last - 1)
        above = torch.bucketize(t.abs(), levels).clamp(1, last)
        low, high = levels[above - 1], levels[above]
        up = torch.rand(t.shape, generator=generator) * (high - low) < t.abs() - low
        tried.append(torch.where(up, high, low).copysign(t) * scale)
    best = min(tried, key=lambda decoded: float((decoded - wide).square().sum()))
    return best.view(x.shape), x.numel() * bits // 8 + x.numel() // 16 + 2 * (x.numel() // 256)


def thc(x: Tensor, granularity: int = 30, outside: float = 1 / 32) -> tuple[Tensor, int]:
    """THC (M. Li et al., NSDI 2024), 4 bits: rotated over all of a power of two of elements, clipped to where all but
    `outside` of Gaussian values lie, and rounded at random to 16 of granularity + 1 equally spaced values.

    One fp32 norm for each of these powers of two. Sums are added up as whole numbers, without a second rounding, and
    come back in 8 bits (of up to 8 ranks): 6 bits an element, on average of the two ways.
    """
    size = x.numel() & -x.numel()
    blocks = x.reshape(-1, size)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1
    rotated = _rotated(blocks * signs) / size**0.5
    end = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - outside)))
    reach = blocks.square().mean(-1, keepdim=True).sqrt() * end
    values = torch.tensor(_thc_table(granularity, end), dtype=torch.float32)
    place = torch.where(reach == 0, granularity / 2, (rotated / reach + 1) * (granularity / 2)).clamp(0, granularity)
    above = torch.bucketize(place, values).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    codes = torch.where(torch.rand(place.shape, generator=generator) < (place - low) / (high - low), high, low)
    decoded = _rotated((codes * (2 / granularity) - 1) * reach) / size**0.5 * signs
    return decoded.view(x.shape), x.numel() * 6 // 8 + 4 * len(blocks)


@cache
def _thc_table(granularity: int, end: float, count: int = 16) -> list[int]:
    """Return the `count` numbers from 0 to granularity with the least error of stochastic rounding.

    The values are Gaussian between -end and end. The numbers are a shortest path of count - 1 steps.
    """
    fine = torch.linspace(-end, end, 64 * granularity + 1, dtype=torch.float64)
    weight, place = torch.exp(-fine.square() / 2), (fine / end + 1) * granularity / 2

    def loss(i: int, j: int) -> float:
        inside = (place >= i) & (place < j)
        return float((weight * (place - i) * (j - place))[inside].sum())

    best = {0: (0.0, [0])}
    for _ in range(count - 1):
        best = {
            j: min((cost + loss(i, j), [*path, j]) for i, (cost, path) in best.items() if i < j)
            for j in range(1, granularity + 1)
            if any(i < j for i in best)
        }
    return best[granularity][1]


def _rotated(x: Tensor) -> Tensor:
    """[..., a power of two] times the Hadamard matrix of +-1."""
    stride = 1
    while stride < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return x


def fbgemm(x: Tensor, bits: int, row: int = 128, optimized: bool = False) -> tuple[Tensor, int]:
    """FBGEMM's row-wise codec, the real one, as torch carries it: scale and bias fp32 at 8 bits, fp16 below.

    optimized: its greedy search of the range that has the least squared error, 4 and 2 bits.
    """
    name = "byte" if bits == 8 else f"{bits}bit"
    pack = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")
    rows = _groups(x, row).contiguous()
    packed = pack(rows, True) if optimized else pack(rows)
    return unpack(packed).view(x.shape), packed.numel()


def taco(x: Tensor, size: int = 128) -> tuple[Tensor, int]:
    """TACO, arXiv 2604.24088, as in taco.cu of hpdps-group/COCCL (compressor_plugin), by default groups of 128.

    The group times 448 / root mean square (fp32, stored), Hadamard, e4m3 with the scale max / 448 (fp32, stored).
    """
    groups = _groups(x, size)
    adaptive = (E4M3_MAX * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-6)).clamp(1e-3, 1e3)
    rotation = _hadamard(size)
    rotated = (groups * adaptive) @ rotation
    scale = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    codes = (rotated / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = (codes.float() * scale) @ rotation / adaptive
    return decoded.view(x.shape), x.numel() + 8 * len(groups)


def _hadamard(size: int) -> Tensor:
    """Sylvester's, orthonormal, symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def mx(x: Tensor, element: Minifloat) -> tuple[Tensor, int]:
    """OCP Microscaling Formats (MX) v1.0: groups of 32, scale 2^k in 8 bits (e8m0), section 6.3's conversion.

    k = floor(log2 max |x|) - the exponent of the element's largest value; saturating.
    """
    groups = _groups(x, 32)
    most = groups.abs().amax(-1, keepdim=True)
    largest = math.frexp(element.largest)[1] - 1
    exponent = torch.where(most == 0, 0, torch.frexp(most).exponent - 1 - largest)
    scale = torch.ldexp(torch.ones_like(most), exponent)
    return (element.round(groups / scale) * scale).view(x.shape), x.numel() * element.bits // 8 + len(groups)


def nvfp4(x: Tensor) -> tuple[Tensor, int]:
    """NVFP4 (NVIDIA, "Introducing NVFP4", 2025): e2m1, groups of 16, an e4m3 scale each, one fp32 scale a tensor."""
    groups = _groups(x, 16)
    most = groups.abs().amax(-1, keepdim=True)
    whole = (most.max() / (E2M1.largest * E4M3_MAX)).clamp(min=1e-30)
    scale = (most / E2M1.largest / whole).to(torch.float8_e4m3fn).float() * whole
    codes = E2M1.round(torch.where(scale == 0, 0.0, groups / scale))
    return (codes * scale).view(x.shape), x.numel() // 2 + len(groups) + 4


def float_groups(x: Tensor, element: Minifloat, size: int) -> tuple[Tensor, int]:
    """Our codec with floats for codes: groups of `size` with a bf16 scale, the options as settings of the tensor.

    Range as range="mse": of three scales, from max |x| / largest, rounded up, to where max |x| still rounds to the
    largest value, the one with the least squared error. Rotated by Hadamard or not, whichever is better.
    """
    groups = _groups(x, size)
    rotation = _hadamard(size)
    plain = _least_error(groups, element)
    rotated = _least_error(groups @ rotation, element) @ rotation
    best = min((plain, rotated), key=lambda decoded: float((groups - decoded).square().sum()))
    return best.view(x.shape), x.numel() * element.bits // 8 + 2 * len(groups)


def _least_error(groups: Tensor, element: Minifloat) -> Tensor:
    half_step = math.ldexp(0.5, math.frexp(element.largest)[1] - 1 - element.mantissa_bits)
    most = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    decoded, errors = [], []
    for inside in (0.0, half_step / 2, half_step * 7 / 8):
        exact = most / (element.largest + inside)
        stored = exact.bfloat16().float()
        scale = torch.where(stored < exact, stored * (1 + 2.0**-7), stored).bfloat16().float()
        decoded.append(element.round(groups / scale) * scale)
        errors.append((groups - decoded[-1]).square().sum(-1))
    chosen = torch.stack(errors).argmin(0)
    return torch.stack(decoded)[chosen, torch.arange(len(groups))]


PEERS = (
    *(Peer(f"Flash Comm. INT{bits}", partial(flash_communication, bits=bits)) for bits in (4, 5, 6, 8)),
    *(Peer(f"Flash Comm. V2 INT{bits} spikes", partial(flash_communication_v2, bits=bits)) for bits in (2, 3, 4)),
    Peer("SDP4Bit gradients", partial(sdp4bit, size=128, rotated=True)),
    Peer("SDP4Bit differences", partial(sdp4bit, size=2048, rotated=False)),
    *(Peer(f"QuickReduce INT{bits}", partial(quickreduce, bits=bits)) for bits in (4, 6, 8)),
    *(Peer(f"FlyDSL INT{bits}", partial(flydsl, bits=bits)) for bits in (4, 6)),
    Peer("FlashInfer FP8", flashinfer_fp8),
    Peer("torchft FP8", torchft_fp8),
    Peer("TACO FP8", taco),
    *(Peer(f"DeepSpeed INT{bits}", partial(deepspeed, bits=bits)) for bits in (4, 8)),
    *(Peer(f"DynamiQ {bits}", partial(dynamiq, bits=bits), slow=True) for bits in (2, 4, 8)),
    Peer("THC 4", thc, slow=True),
    *(Peer(f"FBGEMM {bits}", partial(fbgemm, bits=bits)) for bits in (2, 4, 8)),
    *(Peer(f"FBGEMM {bits} searched", partial(fbgemm, bits=bits, optimized=True), slow=True) for bits in (2, 4)),
)

# Would they be better codes than integers are?
FLOATS = (
    Peer("MXFP4", partial(mx, element=E2M1)),
    Peer("NVFP4", nvfp4),
    Peer("MXFP6 e2m3", partial(mx, element=E2M3)),
    Peer("MXFP6 e3m2", partial(mx, element=E3M2)),
    Peer("MXFP8 e4m3", partial(mx, element=E4M3)),
    *(
        Peer(f"{element.name} g{size}", partial(float_groups, element=element, size=size))
        for element in (E2M1, E2M3, E4M3)
        for size in (32, 64, 128, 256)
    ),
)
