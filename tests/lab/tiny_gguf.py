"""A GGUF file of a tiny untrained Llama with single-byte tokens: smollm2.py reads it in seconds."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.llama import Llama
from lab.benchmarks.smollm2 import Config

CONFIG = Config(layers=2, hidden=96, heads=3, kv_heads=3, mlp=192, vocabulary=261)
MERGES = ["h e", "l l", "he ll"]
F32, Q4_1, Q8_0 = 0, 3, 8
#: Kinds of two weights; the others are F32.
KINDS = {"blk.0.attn_q.weight": Q4_1, "blk.1.ffn_down.weight": Q8_0}


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))


def _stored(weight: Tensor, kind: int) -> tuple[bytes, Tensor]:
    """Return the bytes of a weight, and its value as these bytes have it: one element after another, in Python."""
    if kind == F32:
        return weight.contiguous().view(torch.uint8).numpy().tobytes(), weight
    data, values = b"", []
    for block in weight.flatten().view(-1, 32).tolist():
        least, most = min(block), max(block)
        if kind == Q8_0:
            scale, least = _half(max(-least, most) / 127), 0.0
            codes = [round(x / scale) for x in block]
            data += struct.pack("<e32b", scale, *codes)
        else:
            scale, least = _half((most - least) / 15), _half(least)
            codes = [min(15, max(0, round((x - least) / scale))) for x in block]
            data += struct.pack("<ee", scale, least) + bytes(
                a | b << 4 for a, b in zip(codes[:16], codes[16:], strict=True)
            )
        values += [code * scale + least for code in codes]
    return data, torch.tensor(values).view(weight.shape)


def _half(value: float) -> float:
    """Return the value rounded to fp16."""
    (rounded,) = struct.unpack("<e", struct.pack("<e", value))
    return float(rounded)


def write(path: Path, architecture: str = "llama", kind: int | None = None) -> dict[str, Tensor]:
    """Write the file and return the weights that it stands for. kind: another type of the last tensor, without data."""
    torch.manual_seed(0)
    model = Llama(CONFIG)
    torch.nn.init.normal_(model.token_embd.weight, std=0.3)
    letters = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    facts: dict[str, Any] = {
        "general.architecture": architecture,
        "llama.block_count": CONFIG.layers,
        "llama.embedding_length": CONFIG.hidden,
        "llama.attention.head_count": CONFIG.heads,
        "llama.attention.head_count_kv": CONFIG.kv_heads,
        "llama.feed_forward_length": CONFIG.mlp,
        "llama.vocab_size": CONFIG.vocabulary,
        "llama.rope.freq_base": CONFIG.rope_base,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.norm_epsilon,
        "tokenizer.ggml.tokens": [*map(chr, letters), *(merge.replace(" ", "") for merge in MERGES)],
        "tokenizer.ggml.merges": MERGES,
    }
    weights, places, data = {}, b"", b""
    for name, weight in model.state_dict().items():
        of = KINDS.get(name, F32)
        stored, weights[name] = _stored(weight, of)
        shape = weight.shape[::-1]
        places += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, of, len(data))
        data += stored + bytes(-len(stored) % 32)
    if kind is not None:
        places += _text("odd") + struct.pack("<IQIQ", 1, 32, kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights) + (kind is not None), len(facts))
    head += b"".join(_text(key) + _value(value) for key, value in facts.items()) + places
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return weights
