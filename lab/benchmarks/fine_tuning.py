"""Fine-tuning, quantized gradients against full precision: validation loss and accuracy, whole models and LoRA.

    python -m lab.benchmarks.fine_tuning                        DistributedDataParallel and ZeRO 2, three seeds
    python -m lab.benchmarks.fine_tuning --engines ddp --methods lora --seeds 1

The model is made here: examples/deepspeed's transformer, trained on Python's own sources to predict the next byte, kept
as --folder/pretrained.pt. The task: name the package of the standard library that a piece of text is from (--classes
packages with the most text, balanced; the last tenth of each is held out). LoRA: rank 8 on every matrix of the layers
and a new head (arXiv 2106.09685). Of one seed all variants see the same weights and batches. On the first seed full
precision is also trained with noise on every gradient.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import command, ranks, trainings
from lab.benchmarks.deepspeed_training import configuration
from lab.benchmarks.trainings import FULL_PRECISION, NOISE, WARM_UP_STEPS, add_noise, example, windows

SECTIONS = ['{"preset": "int8"}', '{"preset": "int4"}', '{"preset": "thin"}']
METHODS, ENGINES = ("full", "lora"), ("ddp", "zero2")
LORA_RANK, LORA_SCALE = 8, 2.0
WIDTH, LAYERS, SEQUENCE = 128, 3, 128
PRETRAINED = "pretrained.pt"  # in the folder


class Lora(nn.Module):
    """x W + scale x A B. A and B are trained; B starts at zero."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(LORA_RANK, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, LORA_RANK))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + LORA_SCALE * (x @ self.a.T @ self.b.T)


class Classifier(nn.Module):
    """The pretrained model's layers, and a head on the mean of its hidden states."""

    def __init__(self, model: Any, classes: int, lora: bool) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(WIDTH, classes)
        del model.head
        if lora:
            model.requires_grad_(False)
            for layer in model.layers:
                layer.qkv, layer.out = Lora(layer.qkv), Lora(layer.out)
                layer.mlp[0], layer.mlp[2] = Lora(layer.mlp[0]), Lora(layer.mlp[2])

    def logits(self, text: Tensor) -> Tensor:
        x = self.model.bytes(text) + self.model.positions(torch.arange(text.shape[1]))
        y: Tensor = self.head(self.model.layers(x).mean(1))
        return y

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(text), labels)


def packages(classes: int) -> list[Tensor]:
    """The text of each package, as bytes: the largest of the standard library, as much of each."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder in sorted(path for path in root.iterdir() if (path / "__init__.py").exists()):
        files = [file for file in sorted(folder.rglob("*.py")) if not {"test", "tests"} & set(file.parts)]
        found.append(b"".join(file.read_bytes() for file in files))
    found.sort(key=len, reverse=True)
    least = len(found[classes - 1])
    return [torch.frombuffer(bytearray(text[:least]), dtype=torch.uint8).long() for text in found[:classes]]


def build(seed: int) -> Any:
    module = example("deepspeed")
    module.WIDTH, module.LAYERS, module.SEQUENCE = WIDTH, LAYERS, SEQUENCE
    torch.manual_seed(seed)
    return module.Model()


def pretrain(file: Path, steps: int) -> None:
    """In one process; does nothing if it is there."""
    if file.exists():
        return
    model = build(0)
    text, _ = split(corpus(None), SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        loss = model(windows(text, 32, SEQUENCE, torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    print(f"pretrained: {steps} steps, loss {float(loss):.3f}", flush=True)


def batch(texts: list[Tensor], held_out: bool, number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * number + held_out)
    labels = torch.randint(len(texts), (rows,), generator=generator)
    border = len(texts[0]) * 9 // 10
    first, last = (border, len(texts[0])) if held_out else (0, border)
    starts = torch.randint(first, last - SEQUENCE, (rows,), generator=generator)
    pieces = [texts[k][start : start + SEQUENCE] for k, start in zip(labels.tolist(), starts.tolist(), strict=True)]
    return torch.stack(pieces), labels


def adam(trained: list[nn.Parameter], arguments: argparse.Namespace) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer and the schedule of its rate, the one that DeepSpeed has."""
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = min(WARM_UP_STEPS, arguments.steps // 4)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm_up, total_iters=warm_up)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps - warm_up)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warm_up])


def ddp_steps(model: nn.Module, section: dict[str, Any] | None, arguments: argparse.Namespace) -> Callable[[Any], Any]:
    """Return a step of DistributedDataParallel."""
    ddp = nn.parallel.DistributedDataParallel(model)
    if section is not None:
        ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig.from_dict(section)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, schedule = adam(trained, arguments)

    def step(inputs: Any) -> None:
        optimizer.zero_grad()
        ddp(*inputs).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()

    return step


def zero2_steps(
    model: nn.Module, section: dict[str, Any] | None, arguments: argparse.Namespace
) -> Callable[[Any], Any]:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=configuration(arguments, 2, section),
    )

    def step(inputs: Any) -> None:
        engine.backward(engine(*inputs))
        engine.step()

    return step


def train(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: tune a variant, and validate it in full precision on rank 0's batches, the same for all."""
    texts = packages(arguments.classes)
    model = build(arguments.seed)
    model.load_state_dict(torch.load(Path(arguments.folder) / PRETRAINED, weights_only=True))
    torch.manual_seed(arguments.seed)
    classifier = Classifier(model, arguments.classes, arguments.method == "lora")
    if variant.startswith(NOISE):
        trained = nn.ParameterList(p for p in classifier.parameters() if p.requires_grad)
        add_noise(trained, float(variant.removeprefix(NOISE)), arguments.seed)
    section = {"min_bytes": 0, **json.loads(variant)} if variant.startswith("{") else None
    fap.reset_stats()
    steps = {"ddp": ddp_steps, "zero2": zero2_steps}[arguments.engine](classifier, section, arguments)
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(arguments.steps):
        steps(batch(texts, False, (arguments.seed * 1_000_003 + number) * world + rank, arguments.batch))
    stats = fap.stats()
    losses, right, count = [], 0, 0
    with torch.no_grad():
        for number in range(arguments.validation):
            text, labels = batch(texts, True, number, 64)
            logits = classifier.logits(text)
            losses.append(float(nn.functional.cross_entropy(logits, labels)))
            right, count = right + int((logits.argmax(1) == labels).sum()), count + len(labels)
    return {
        "validation loss": statistics.fmean(losses),
        "accuracy": right / count,
        "trained": sum(p.numel() for p in classifier.parameters() if p.requires_grad),
        "quantized": stats["quantized"],
    }


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tune every variant, one after the other."""
    ranks.start_engine(arguments.engine)
    return {variant: train(variant, arguments) for variant in arguments.variants}


def accuracy(results: list[dict[str, Any]]) -> str:
    return f"{100 * statistics.fmean(one['accuracy'] for one in results):8.2f} % right"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", default=SECTIONS, help="fields of FlashConfig, as JSON")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    trainings.add_arguments(parser, noise=["1"], steps=300)
    parser.add_argument("--pretraining", type=int, default=1000, help="steps")
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="pieces a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--validation", type=int, default=64, help="batches of 64 pieces")
    parser.add_argument("--folder", type=Path, default=Path("runs/fine_tuning"))


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    pretrain(arguments.folder / PRETRAINED, arguments.pretraining)
    runs: dict[str, trainings.Seeds] = {}
    for engine, method in itertools.product(arguments.engines, arguments.methods):
        name = f"{engine}, {method}"

        def run(seed: int, variants: list[str], engine: str = engine, method: str = method) -> dict[str, Any]:
            result: dict[str, Any] = ranks.torchrun(
                in_rank, 2, arguments, engine=engine, method=method, seed=seed, variants=variants
            )
            return result

        def kept(seeds: trainings.Seeds, name: str = name) -> None:
            runs[name] = seeds
            keep({"runs": runs})

        seeds = trainings.by_seed(arguments, [FULL_PRECISION, *arguments.sections], run, kept)
        print(f"\n{name}, {seeds[arguments.seeds[0]][FULL_PRECISION]['trained']} parameters trained")
        trainings.show(seeds, accuracy)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
