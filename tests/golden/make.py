"""Write the golden payloads: python -m tests.golden.make

Run once for a wire version. A payload that changes without a new WIRE_VERSION breaks ranks that run two
versions of the package, so do not run it to make a test pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import reference
from flash_allreduce_plugin.codec.format import Draw, Format

FOLDER = Path(__file__).parent

# Exact in every dtype: (first + i) / divisor for i in 0 ... count - 1.
RAMPS = [
    {"first": -64, "count": 128, "divisor": 8},
    {"first": 1, "count": 45, "divisor": 4},
    {"first": -200, "count": 161, "divisor": 1},
]

# One group of 32 each, shorter ones ragged; float.hex, so that every bit is written out.
EDGES = {
    "one element": ["0x1.921fb6p+1"],
    "zeros of both signs": ["0x0.0p+0", "-0x0.0p+0"] * 16,
    "constant": ["-0x1.5bf0a8p+1"] * 32,
    "offset": ["0x1.9p+6", "0x1.90199ap+6", "0x1.8fe666p+6", "0x1.900ccdp+6"] * 8,
    "NaN in the second group": ["0x1.0p+0"] * 32 + ["nan"] + ["0x1.8p+0"] * 31,
    "Inf": ["-0x1.0p+0"] * 31 + ["inf"],
    "subnormal": ["0x0.000002p-126", "-0x0.8p-126", "0x0.fffffep-126", "0x1.0p-126"] * 8,
    "tiny": ["0x1.4484cp-100", "-0x1.4484cp-101", "0x1.8p-100"] * 5,
    "huge": ["0x1.93e594p+99", "-0x1.2p+98", "0x1.0p+97"] * 5,
    "wider than float32": ["0x1.fffffep+127", "-0x1.fffffep+127"] * 16,
}


def values_of(input: Any, dtype: torch.dtype) -> Tensor:
    """Return the tensor that the "input" of a case describes."""
    if isinstance(input, dict):
        return ((torch.arange(input["count"]) + input["first"]) / input["divisor"]).to(dtype)
    return torch.tensor([float.fromhex(text) for text in input], dtype=torch.float64).to(dtype)


# Options of every kind; the draw of the stochastic ones.
OPTIONS = [
    {"spikes": True},
    {"spikes": True, "symmetric": True, "mse": True},
    {"hadamard": True},
    {"hadamard": True, "spikes": True, "mse": True},
    {"mse": True},
    {"stochastic": True},
    {"hadamard": True, "symmetric": True, "stochastic": True},
    {"compact": True},
    {"compact": True, "spikes": True, "mse": True},
    {"compact": True, "stochastic": True},
]
# Options of the codebook. Its groups are larger.
CODEBOOK = [
    {"codebook": True},
    {"codebook": True, "mse": True},
    {"codebook": True, "hadamard": True},
    {"codebook": True, "hadamard": True, "mse": True},
]
SPIKES = [{**chosen, "spikes": True} for chosen in CODEBOOK]
DRAW = Draw(key=-1234567890123456789, first_group=3)


def case(name: str, codec: Format, dtype: str, input: Any) -> dict[str, Any]:
    x = values_of(input, getattr(torch, dtype)).view(1, -1)
    payload = torch.empty(1, codec.payload_bytes(x.shape[1]), dtype=torch.uint8)
    reference.encode(x, payload, codec, DRAW)
    decoded = torch.empty(x.shape)
    reference.decode(payload, decoded, codec)
    return {
        "name": name,
        "bits": codec.bits,
        "group_size": codec.group_size,
        "symmetric": codec.symmetric,
        "options": {
            name: True
            for name in ("spikes", "hadamard", "mse", "stochastic", "compact", "codebook")
            if getattr(codec, name)
        },
        "dtype": dtype,
        "input": input,
        "payload": bytes(payload[0].tolist()).hex(),
        "decoded_float32": bytes(decoded.view(torch.uint8)[0].tolist()).hex(),
    }


def main() -> None:
    ramps = [
        case(f"{ramp['count']} from {ramp['first']}", Format(bits, group_size, symmetric), dtype, ramp)
        for ramp, group_size, dtype in zip(RAMPS, (128, 32, 64), ("float32", "bfloat16", "float16"), strict=True)
        for bits in range(2, 9)
        for symmetric in (False, True)
    ]
    edges = [
        case(name, Format(bits, 32, symmetric), "float32", input)
        for name, input in EDGES.items()
        for bits, symmetric in ((8, False), (4, True), (3, False))
    ]
    options = [
        case(f"{ramp['count']} from {ramp['first']}", Format(bits, group_size, **chosen), dtype, ramp)
        for chosen in OPTIONS
        for ramp, group_size, dtype in zip(RAMPS, (64, 32, 512), ("float32", "bfloat16", "float16"), strict=True)
        for bits in (2, 3, 4, 8)
    ]
    codebook = [
        case(f"{ramp['count']} from {ramp['first']}", Format(bits, group_size, **chosen), dtype, ramp)
        for chosen in CODEBOOK
        for ramp, group_size, dtype in zip(RAMPS, (128, 256, 512), ("float32", "bfloat16", "float16"), strict=True)
        for bits in range(2, 9)
    ]
    codebook += [
        case(name, Format(bits, 128, codebook=True, mse=bits == 4), "float32", input)
        for name, input in EDGES.items()
        for bits in (2, 3, 4, 8)
    ]
    spikes = [
        case(f"{ramp['count']} from {ramp['first']}", Format(bits, group_size, **chosen), dtype, ramp)
        for chosen in SPIKES
        for ramp, group_size, dtype in zip(RAMPS, (128, 256, 1024), ("float32", "bfloat16", "float16"), strict=True)
        for bits in (2, 4, 7, 8)
    ]
    spikes += [
        case(name, Format(bits, 128, codebook=True, spikes=True, mse=bits == 4), "float32", input)
        for name, input in EDGES.items()
        for bits in (2, 3, 4, 8)
    ]
    stems = {"ramps": ramps, "edges": edges, "options": options, "codebook": codebook, "spikes": spikes}
    for stem, cases in stems.items():
        (FOLDER / f"{stem}.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
