"""Published shapes of models and speeds of machines, each with its source, for `plan` and lab/planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from flash_allreduce_plugin.cli.plan.cost_model import Model, Shares


@dataclass(frozen=True, slots=True)
class ModelPreset:
    model: Model
    published: float  # parameters
    source: str


def _gpt(layers: int, hidden: int, heads: int, published: float) -> ModelPreset:
    model = Model(layers, hidden, heads, heads, 4 * hidden, 50257, 2048, positions=2048)
    return ModelPreset(model, published, "arXiv 2005.14165, table 2.1")


def _llama(
    layers: int, hidden: int, heads: int, kv: int, ffn: int, published: float, source: str,
    vocabulary: int = 32000, sequence: int = 2048, tied: bool = False,
) -> ModelPreset:  # fmt: skip
    model = Model(layers, hidden, heads, kv, ffn, vocabulary, sequence, gated=True, tied=tied)
    return ModelPreset(model, published, source)


def _experts(
    experts: int, per_token: int, layers: int, hidden: int, heads: int, kv: int, ffn: int, published: float,
    source: str, vocabulary: int, head_size: int,
) -> ModelPreset:  # fmt: skip
    model = Model(
        layers, hidden, heads, kv, ffn, vocabulary, 4096, gated=True, tied=False, head_size=head_size,
        experts=experts, experts_per_token=per_token,
    )  # fmt: skip
    return ModelPreset(model, published, source)


_ONE, _TWO, _THREE = "arXiv 2302.13971, table 2", "arXiv 2307.09288", "arXiv 2407.21783, table 3"
_SMALL = "config.json of meta-llama/Llama-3.2"
_QWEN = "config.json of Qwen/Qwen3"
MODELS = {
    # Heads of 128 in the table are 24 x 128 for 1.3B, more than its hidden size: 16. 5140 for 13B is 40 x 128 = 5120.
    "gpt3-125m": _gpt(12, 768, 12, 125e6),
    "gpt3-350m": _gpt(24, 1024, 16, 350e6),
    "gpt3-760m": _gpt(24, 1536, 16, 760e6),
    "gpt3-1.3b": _gpt(24, 2048, 16, 1.3e9),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2.7e9),
    "gpt3-6.7b": _gpt(32, 4096, 32, 6.7e9),
    "gpt3-13b": _gpt(40, 5120, 40, 13e9),
    "gpt3-175b": _gpt(96, 12288, 96, 175e9),
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 6.7e9, _ONE),
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 13.0e9, _ONE),
    "llama-33b": _llama(60, 6656, 52, 52, 17920, 32.5e9, _ONE),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 65.2e9, _ONE),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 6.74e9, _TWO, sequence=4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 13.0e9, _TWO, sequence=4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 70e9, _TWO, sequence=4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 8.03e9, _THREE, 128256, 8192),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 70.6e9, _THREE, 128256, 8192),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, 405e9, _THREE, 128256, 8192),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 1.23e9, _SMALL + "-1B", 128256, 8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 3.21e9, _SMALL + "-3B", 128256, 8192, tied=True),
    "mixtral-8x7b": _experts(8, 2, 32, 4096, 32, 8, 14336, 46.7e9, "arXiv 2401.04088, table 1", 32000, 128),
    "qwen3-30b-a3b": _experts(128, 8, 48, 2048, 32, 4, 768, 30.5e9, _QWEN + "-30B-A3B", 151936, 128),
    "qwen3-235b-a22b": _experts(128, 8, 94, 4096, 64, 4, 1536, 235e9, _QWEN + "-235B-A22B", 151936, 128),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """A speed: reached of peak, each a second, and the source of both."""

    reached: float
    peak: float
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. peak_flops: dense, bf16 (fp16 without bf16). copy: bytes read and written together. memory: bytes.

    shares: the share of copy that the codec's kernels reach, by width.
    """

    peak_flops: float
    copy: Speed
    source: str
    memory: float
    shares: Mapping[int, Shares]


#: The share of the data sheet's memory bandwidth that a copy reaches: the H100's (below), assumed for others.
COPY = 0.9
#: The assumed upper share of a copy's speed for a kernel of the codec: the goal of the benchmarks (docs/trust/cuda.md).
CODEC = 0.9


def _shares(other: Shares, eight: Shares, four: Shares) -> dict[int, Shares]:
    named = {8: eight, 4: four}
    return {bits: Shares(*(min(share, CODEC) for share in astuple(named.get(bits, other)))) for bits in range(2, 9)}


# The kernels' shares of a copy's speed: bf16, groups of 128, 8 ranks.
#
# H100: measured at 64 MiB (docs/trust/cuda.md). Widths other than 8 and 4 have the least of these shares. The A100 can
# issue as many instructions for a byte of its memory, so it has the H100's. The H200's memory is 1.43 times as fast:
# shares below 0.9 on an H100 are divided by that, the others are those of scripts/cuda_model.py.
_H100 = _shares(Shares(0.71, 0.68, 0.46, 0.28), Shares(1.00, 0.93, 0.90, 0.90), Shares(0.97, 0.92, 0.91, 0.67))
_A100 = _H100
_H200 = _shares(Shares(0.50, 0.48, 0.32, 0.20), Shares(1.00, 1.00, 1.00, 0.99), Shares(1.00, 1.00, 0.90, 0.47))
#: An unknown GPU has the shares of an A100, an assumption: L40 and V100 can issue more for a byte.
UNKNOWN = _A100
#: Seconds of the host for a call of one chunk and for each further chunk, without launches: measured on the two cores
#: of docs/decide/benchmarks.md by `python -m lab.benchmarks.call_overhead --quantized`, the slowest of its three
#: collectives. Other hosts differ.
HOST_CALL, HOST_CHUNK = 59e-6, 8e-6
#: Launches of a chunk of an all-reduce, of kernels and of NCCL together; the other collectives have three.
LAUNCHES = 5
#: The share of the peak that training reaches: 0.54 for 530B on 2240 A100 (arXiv 2205.05198); elsewhere assumed.
EFFICIENCY = 0.5
#: Seconds of one launch, of one exchange over NVLink, over PCIe, between nodes: assumptions.
LAUNCH, LATENCY_NVLINK, LATENCY_PCIE, LATENCY_NODES = 5e-6, 10e-6, 20e-6, 30e-6


def host() -> tuple[float, float]:
    """Return the host's seconds for a call of one chunk and for each further chunk, launches included."""
    return HOST_CALL + LAUNCHES * LAUNCH, HOST_CHUNK + LAUNCHES * LAUNCH


def _copy(peak: float, sheet: str) -> Speed:
    return Speed(COPY * peak, peak, f"{COPY:g} of {peak / 1e9:g} GB/s in {sheet}, an assumption")


def _device(
    flops: float, bandwidth: float, memory: float, sheet: str, shares: Mapping[int, Shares] = UNKNOWN
) -> Device:
    return Device(flops, _copy(bandwidth, sheet), sheet, memory, shares)


DEVICES = {
    "a100": _device(312e12, 2039e9, 80e9, "NVIDIA's A100 80GB SXM data sheet"),
    "a800": _device(312e12, 2039e9, 80e9, "NVIDIA's A100 80GB data sheet (the A800 differs in NVLink)"),
    "h100": Device(
        989e12,
        Speed(3.0e12, 3.35e12, "3.0 TB/s, reached by an H100 80GB HBM3, of 3.35 in NVIDIA's H100 SXM data sheet"),
        "NVIDIA's H100 SXM data sheet",
        80e9,
        _H100,
    ),
    "h200": _device(989e12, 4800e9, 141e9, "NVIDIA's H200 data sheet", _H200),
    "h800": _device(989e12, 3350e9, 80e9, "NVIDIA's H100 SXM data sheet (the H800 differs in NVLink)", _H100),
    "l40": _device(181e12, 864e9, 48e9, "NVIDIA's L40 data sheet"),
    "v100": _device(125e12, 900e9, 32e9, "NVIDIA's V100 SXM data sheet (fp16)"),
}

_NCCL = "of the peak, which applications reach (NCCL's maintainer, github.com/NVIDIA/nccl/issues/1054)"
_TCP = "1448 of 1538 bytes of a frame are TCP's payload"
_IB = "a 400 Gbit/s adapter reaches 46 to 48 of 50 GB/s (github.com/NVIDIA/nccl-tests/issues/290)"


def _share(gbit: float, share: float, source: str) -> Speed:
    return Speed(share * gbit * 1e9 / 8, gbit * 1e9 / 8, source)


LINKS = {
    "nvlink-v100": Speed(120e9, 150e9, f"0.8 {_NCCL}"),
    "nvlink-a100": Speed(240e9, 300e9, f"0.8 {_NCCL}"),
    "nvlink-h800": Speed(160e9, 200e9, f"0.8 {_NCCL}"),
    "nvlink-h100": Speed(370e9, 450e9, "NCCL's maintainer in github.com/NVIDIA/nccl-tests/issues/212"),
    "pcie4": Speed(24e9, 31.5e9, "NCCL's own model of PCIe 4.0 x16 (github.com/NVIDIA/nccl-tests/issues/307)"),
    "pcie5": Speed(48e9, 63e9, "the same share of PCIe 5.0 x16, an assumption"),
    "infiniband-100g": _share(100, 0.94, _IB + ", the same share assumed"),
    "infiniband-200g": _share(200, 0.94, _IB + ", the same share assumed"),
    "infiniband-400g": _share(400, 0.94, _IB),
    "ethernet-1g": _share(1, 1448 / 1538, _TCP),
    "ethernet-10g": _share(10, 1448 / 1538, _TCP),
    "ethernet-25g": _share(25, 1448 / 1538, _TCP),
    "ethernet-100g": _share(100, 1448 / 1538, _TCP),
    "ethernet-400g": _share(400, 1448 / 1538, _TCP),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A node: its ranks, the link between them, the adapters to other nodes."""

    device: str
    ranks: int
    intra: str
    inter: str
    adapters: int
    about: str


CLUSTERS = {
    "a100": Machine("a100", 8, "nvlink-a100", "infiniband-200g", 8, "DGX A100"),
    "a100-pcie": Machine("a100", 8, "pcie4", "infiniband-200g", 1, "8 A100 on PCIe, one adapter"),
    "h100": Machine("h100", 8, "nvlink-h100", "infiniband-400g", 8, "DGX H100"),
    "h100-ethernet": Machine("h100", 8, "nvlink-h100", "ethernet-100g", 1, "8 H100, one 100 Gbit/s Ethernet a node"),
    "h200": Machine("h200", 8, "nvlink-h100", "infiniband-400g", 8, "DGX H200"),
    "h800": Machine("h800", 8, "nvlink-h800", "infiniband-400g", 4, "8 H800, four adapters"),
    "l40": Machine("l40", 8, "pcie4", "ethernet-100g", 1, "8 L40 on PCIe, one 100 Gbit/s Ethernet a node"),
    "v100": Machine("v100", 16, "nvlink-v100", "infiniband-100g", 8, "DGX-2"),
}
#: One core of the machine of docs/decide/benchmarks.md over gloo, from step_time.json (lab/planning/plan_measured.py).
CPU = "cpu"
CPU_FLOPS, CPU_CODEC, CPU_START, CPU_TRANSPORT = 0.272e12, 20e9, 4.7e-3, 0.48e9
