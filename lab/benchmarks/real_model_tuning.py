"""Fine-tuning of SmolLM2-135M through the real integrations: held-out loss against full precision.

    python -m lab.benchmarks.real_model --fine-tune                                   a night on two cores
    python -m lab.benchmarks.real_model --fine-tune --engines ddp --steps 50

Ranks on gloo train every weight on sources of Python's standard library; the last twentieth of the text is held out.
FLASH_ALLREDUCE_ATTACH=<engine> attaches the plugin, with a file that FLASH_ALLREDUCE_CONFIG names, or DeepSpeed's JSON:
- ddp: DistributedDataParallel, two ranks.
- zero2: DeepSpeed, ZeRO stage 2, two ranks, by the section "flash_allreduce" of its JSON.
- megatron: tensor parallelism of megatron-core, three ranks (the model has nine heads). The held-out text is read in
  full precision after the training, and as the training reads it before.

All variants of a seed see the same weights and batches. "noise 1" is full precision with Gaussian noise of each
gradient's own root mean square: if it made no difference, the comparison could not show one.

A run (engine, variant, seed) that is done is kept in --folder. The same command runs those that are left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment
from flash_allreduce_plugin.cli.demo.data import VALIDATION_SHARE, corpus
from lab.benchmarks import command, fine_tuning, megatron_llama, ranks, smollm2, trainings
from lab.benchmarks.llama import pretrained
from lab.benchmarks.megatron_llama import MegatronLlama
from lab.benchmarks.trainings import FULL_PRECISION, NOISE, add_noise, batch

RANKS = {"ddp": 2, "zero2": 2, "megatron": 3}
TEXT_BYTES = 1 << 20
#: Settings that a finished run was made with, and that must be the same to count as done.
_KEPT = ("steps", "batch", "sequence", "lr", "validation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tuning = parser.add_argument_group("fine-tuning")
    tuning.add_argument("--fine-tune", action="store_true", help="fine-tune in place of measuring perplexity")
    tuning.add_argument("--engines", nargs="+", choices=RANKS, default=list(RANKS))
    tuning.add_argument("--sections", nargs="+", default=fine_tuning.SECTIONS, help="fields of FlashConfig, as JSON")
    trainings.add_arguments(tuning, seeds=[1], noise=["1"], steps=200)
    tuning.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    tuning.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    tuning.add_argument("--lr", type=float, default=5e-5)
    tuning.add_argument("--validation", type=int, default=48, help="held-out sequences")
    tuning.add_argument("--folder", type=Path, default=Path("runs/real_model"), help="finished runs")


def held_out(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the loss of each sequence, the same in all ranks. Ranks that have whole models share the sequences."""
    if isinstance(model, MegatronLlama):
        with torch.no_grad():
            return torch.stack([model(sequence[None]).double() for sequence in sequences])
    losses = torch.zeros(len(sequences), dtype=torch.float64)
    with torch.no_grad():
        for number in range(dist.get_rank(), len(sequences), dist.get_world_size()):
            losses[number] = float(model(sequences[number : number + 1]))
    dist.all_reduce(losses)
    return losses


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: train one variant. The environment has attached the plugin to DDP, or has not."""
    weights = smollm2.load(arguments.weights and Path(arguments.weights))
    megatron = arguments.engine == "megatron"
    model = MegatronLlama(weights, arguments.sequence) if megatron else pretrained(weights)
    ids = weights.tokenizer(corpus(None, TEXT_BYTES).decode(errors="replace"))
    border = len(ids) - int(len(ids) * VALIDATION_SHARE)
    sequences = ids[border:].unfold(0, arguments.sequence + 1, arguments.sequence)[: arguments.validation]
    numel = sum(weight.numel() for weight in weights.weights.values())
    rank = 0 if megatron else dist.get_rank()
    if arguments.variant.startswith(NOISE):
        add_noise(model, float(arguments.variant.removeprefix(NOISE)), arguments.seed, replicas=not megatron)
    before = held_out(model, sequences)
    if arguments.engine == "zero2":
        section = json.loads(arguments.variant) if arguments.variant.startswith("{") else None
        step = fine_tuning.zero2_steps(model, section, arguments)
    elif megatron:
        step = megatron_llama.steps(model, arguments)
    else:
        step = fine_tuning.ddp_steps(model, None, arguments)
    fap.reset_stats()
    begin = time.monotonic()
    for number in range(arguments.steps):
        step((batch(ids[:border], number, arguments.seed, arguments, rank),))
    seconds = (time.monotonic() - begin) / arguments.steps
    stats = fap.stats()
    if megatron:
        fap.megatron.disable()
    return {
        "before": before.tolist(),
        "held-out": held_out(model, sequences).tolist(),
        "seconds a step": seconds,
        "parameters": numel,
        "bits sent per element": 8 * stats["bytes_sent"] / (arguments.steps * numel),
        "quantized": stats["quantized"],
        "full precision": stats["full_precision"],
    }


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant. The autoload has attached the plugin, or is off."""
    ranks.start_engine(arguments.engine, attach=False)
    return train(arguments)


def one_run(engine: str, variant: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run: the kept one, or that of ranks which are started for it.

    Raises SystemExit where the folder has that run with other settings, or the plugin was to quantize and did not.
    """
    letters = "".join(c if c.isalnum() else "-" for c in variant).strip("-")
    file = arguments.folder / f"{engine}-{letters}-{seed}.json"
    settings = {key: getattr(arguments, key) for key in _KEPT}
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text())
        if kept["settings"] != settings:
            raise SystemExit(f"{file} was made with {kept['settings']}, not {settings}; name another --folder.")
        return kept
    print(f"{engine}, {variant}, seed {seed}: {arguments.steps} steps", file=sys.stderr, flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    variables = {}
    if variant.startswith("{"):
        variables[environment.AUTOLOAD] = "1"
    if variant.startswith("{") and engine != "zero2":
        config = file.with_suffix(".config")
        config.write_text(variant)
        variables |= {environment.ATTACH: engine, environment.CONFIG: str(config)}
    result = ranks.torchrun(in_rank, RANKS[engine], arguments, variables, engine=engine, variant=variant, seed=seed)
    if variant.startswith("{") and not result["quantized"]:
        raise SystemExit(f"{engine}, {variant}: nothing was quantized; is the plugin installed, with its entry point?")
    kept = {"engine": engine, "variant": variant, "seed": seed, "settings": settings, **result}
    file.write_text(json.dumps(kept) + "\n")
    return kept


def table(runs: list[dict[str, Any]]) -> list[list[object]]:
    """Return the header and a row an engine and variant: held-out loss, and the difference in % by seed.

    ±: the standard error of the mean over held-out sequences, the same as in full precision.
    """
    rows: list[list[object]] = [
        ["engine", "variant", "bits", "held-out loss", "difference, %", "by seed", "seconds a step"]
    ]
    for engine, variant in dict.fromkeys((run["engine"], run["variant"]) for run in runs):
        mine = [run for run in runs if (run["engine"], run["variant"]) == (engine, variant)]
        differences, each = [], []
        for run in mine:
            full = next(
                other
                for other in runs
                if (other["engine"], other["variant"], other["seed"]) == (engine, FULL_PRECISION, run["seed"])
            )
            scale = 100 / statistics.fmean(full["held-out"])
            lost = [scale * (a - b) for a, b in zip(run["held-out"], full["held-out"], strict=True)]
            differences.append(statistics.fmean(lost))
            error = statistics.stdev(lost) / len(lost) ** 0.5
            each.append(f"{run['seed']}: {differences[-1]:+.3f} ± {error:.3f}")
        loss = statistics.fmean(statistics.fmean(run["held-out"]) for run in mine)
        seconds = statistics.fmean(run["seconds a step"] for run in mine)
        sent = mine[0]["bits sent per element"]
        cells = [f"{sent:.2f}" if sent else "", f"{loss:.4f}", f"{statistics.fmean(differences):+.3f}"]
        rows.append([engine, variant, *cells, ", ".join(each), f"{seconds:.1f}"])
    return rows


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    try:
        smollm2.find(arguments.weights)
    except smollm2.MissingWeights as missing:
        print(missing, file=sys.stderr)
        return 2
    runs: list[dict[str, Any]] = []
    for engine in arguments.engines:
        for index, seed in enumerate(arguments.seeds):
            control = [NOISE + size for size in arguments.noise] if index == 0 else []
            for variant in (FULL_PRECISION, *arguments.sections, *control):
                runs.append(one_run(engine, variant, seed, arguments))
                keep(runs)
    before = statistics.fmean(runs[0]["before"])
    print(f"{runs[0]['parameters'] / 1e6:.0f} M parameters, held-out loss before: {before:.4f}\n")
    lines = table(runs)
    widths = [max(len(str(row[i])) for row in lines) for i in range(len(lines[0]))]
    for row in lines:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
