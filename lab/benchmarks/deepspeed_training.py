"""Training with DeepSpeed, quantized gradients against full precision: validation loss by ZeRO stage and seed.

    python -m lab.benchmarks.deepspeed_training                                              0.7 M parameters
    python -m lab.benchmarks.deepspeed_training --width 288 --layers 5 --stages 0 2 --seeds 1    5.2 M parameters
    python -m lab.benchmarks.deepspeed_training --sections '{"bits": 4, "group_size": 32}'
    python -m lab.benchmarks.deepspeed_training --ulysses        every sequence is shared by the ranks
    python -m lab.benchmarks.deepspeed_training --experts        each layer has four experts, two of them a rank
    python -m lab.benchmarks.deepspeed_training --muon --stages 0    DeepSpeed's Muon moves the matrices

The transformer of examples/deepspeed, two ranks, on Python's own sources; a variant is a "flash_allreduce" section.
On the first seed of each stage full precision is also trained with noise on every gradient, tiny and large: if the
large one made no difference, the comparison could not tell anything. Of one seed and stage all variants see the same
weights and batches, and the held-out batches are the same for all.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import command, ranks, trainings
from lab.benchmarks.trainings import (
    FULL_PRECISION,
    NOISE,
    VALIDATION_BATCHES,
    WARM_UP_STEPS,
    add_noise,
    batch,
    example,
    outcome,
)

# Exchanges of so small a model are below min_bytes. First the gradients of weights alone, then attention too.
SMALL: dict[str, Any] = {"bits": 8, "min_bytes": 65536}
ULYSSES = [json.dumps(section) for section in (SMALL, {**SMALL, "attention_bits": 8, "backward_bits": 8})]
OF_EXPERTS = [
    json.dumps(section)
    for section in (
        SMALL,
        {**SMALL, "expert_bits": 8, "backward_bits": 8},
        {**SMALL, "expert_bits": 4, "backward_bits": 8, "codebook": True},
    )
]
EXPERTS, BALANCE = 4, 0.01


def build_model(arguments: argparse.Namespace, seed: int) -> torch.nn.Module:
    module = example("deepspeed")
    module.WIDTH, module.LAYERS, module.SEQUENCE = arguments.width, arguments.layers, arguments.sequence
    torch.manual_seed(seed)
    model: torch.nn.Module = module.Model()
    return model


def layered(model: torch.nn.Module, arguments: argparse.Namespace) -> torch.nn.Module:
    """With the layers of DeepSpeed's that the arguments ask for."""
    if arguments.experts:
        return Mixture(model, arguments.width)
    return Ulysses(model, example("deepspeed").HEADS) if arguments.ulysses else model


class Mixture(torch.nn.Module):
    """The example's model with EXPERTS of DeepSpeed's instead of each MLP; its loss keeps them in use."""

    def __init__(self, model: torch.nn.Module, width: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.model = model
        layers: Any = model.layers
        for layer in layers:
            layer.mlp = Experts(MoE(width, layer.mlp, EXPERTS, ep_size=2, capacity_factor=2.0, use_rts=False))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(text)
        layers: Any = self.model.layers
        return loss + BALANCE * sum(layer.mlp.imbalance for layer in layers) if self.training else loss


class Experts(torch.nn.Module):
    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.imbalance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        y, self.imbalance, _ = self.experts(x)
        return y


class Causal(torch.nn.Module):
    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, heads, head], as Ulysses hands it over."""
        q, k, v = (one.transpose(1, 2) for one in qkv)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Ulysses(torch.nn.Module):
    """The example's model with DeepSpeed's attention: every rank has a part of the sequence."""

    def __init__(self, model: torch.nn.Module, heads: int) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.model, self.heads = model, heads
        layers: Any = model.layers
        self.attention = torch.nn.ModuleList([DistributedAttention(Causal(), dist.group.WORLD, 2, 1) for _ in layers])

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        positions = torch.arange(text.shape[1] - 1).chunk(dist.get_world_size())[dist.get_rank()]
        x = model.bytes(text[:, positions]) + model.positions(positions)
        for layer, attention in zip(model.layers, self.attention, strict=True):
            q, k, v = layer.qkv(layer.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + layer.out(attention(q, k, v, 0).flatten(2))
            x = x + layer.mlp(layer.norms[1](x))
        return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), text[:, positions + 1].flatten())


def configuration(arguments: argparse.Namespace, stage: int, section: dict[str, Any] | str | None) -> dict[str, Any]:
    adam = {"lr": arguments.lr, "betas": [0.9, 0.95], "torch_adam": True}
    muon = {"muon_lr": 0.02, "adam_lr": arguments.lr, "momentum": 0.95, "betas": [0.9, 0.95], "torch_adam": True}
    by_muon = getattr(arguments, "muon", False)  # other benchmarks have no such option
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Muon", "params": muon} if by_muon else {"type": "AdamW", "params": adam},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": arguments.steps,
                "warmup_num_steps": min(WARM_UP_STEPS, arguments.steps // 4),
                "cos_min_ratio": 0.0,
            },
        },
        # Stage 3 would gather matrices of a model as small as these once, and keep them.
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 2048} if stage == 3 else {})},
    }
    if section is not None:
        config["flash_allreduce"] = section
    return config


def parameters(model: torch.nn.Module, arguments: argparse.Namespace) -> Any:
    """For the optimizer: those of experts are groups of their own."""
    if not arguments.experts:
        return model.parameters()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})


def train(variant: str, stage: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: train a variant, full precision, "noise <size>" or a section as JSON, and validate it."""
    import deepspeed

    section = None if variant == FULL_PRECISION or variant.startswith(NOISE) else json.loads(variant)
    fap.reset_stats()
    model = layered(build_model(arguments, seed), arguments)
    if variant.startswith(NOISE):
        add_noise(model, float(variant.removeprefix(NOISE)), seed)
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters(model, arguments), config=configuration(arguments, stage, section)
    )
    training, validation = split(corpus(None), arguments.sequence)
    rank = 0 if arguments.ulysses else dist.get_rank()  # ranks that share a sequence have the same batches
    losses = []
    for step in range(arguments.steps):
        loss = engine(batch(training, step, seed, arguments, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    stats = fap.stats()
    with torch.no_grad():
        numbers = range(arguments.steps, arguments.steps + VALIDATION_BATCHES)
        held_out = [float(engine(batch(validation, number, seed, arguments, rank))) for number in numbers]
    result = outcome(held_out, losses, parameters=numel, quantized=stats["quantized"])
    engine.destroy()
    sent = 8 * stats["bytes_sent"] / (arguments.steps * numel)
    return result | {"bits sent per element": sent, "full precision": stats["full_precision"]}


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every variant, one after the other."""
    ranks.start_deepspeed()
    return {variant: train(variant, arguments.stage, arguments.seed, arguments) for variant in arguments.variants}


def sent(results: list[dict[str, Any]]) -> str:
    bits = results[0]["bits sent per element"]
    return f"{f'{bits:7.3f} bits' if bits else '':12}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", nargs="+", help='"flash_allreduce" each')
    parser.add_argument("--muon", action="store_true", help="DeepSpeed's Muon for matrices")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--ulysses", action="store_true", help="DeepSpeed's attention across ranks")
    layers.add_argument("--experts", action="store_true", help="DeepSpeed's mixture of experts")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    trainings.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    sections = ULYSSES if arguments.ulysses else OF_EXPERTS if arguments.experts else ['{"bits": 8}', '{"bits": 4}']
    arguments.sections = arguments.sections or sections
    stages: dict[int, trainings.Seeds] = {}
    for stage in arguments.stages:

        def run(seed: int, variants: list[str], stage: int = stage) -> dict[str, Any]:
            result: dict[str, Any] = ranks.torchrun(
                in_rank, arguments.ranks, arguments, stage=stage, seed=seed, variants=variants
            )
            return result

        def kept(seeds: trainings.Seeds, stage: int = stage) -> None:
            stages[stage] = seeds
            keep({"deepspeed": version("deepspeed"), "stages": stages})

        seeds = trainings.by_seed(arguments, [FULL_PRECISION, *arguments.sections], run, kept)
        print(f"\nstage {stage}, {seeds[arguments.seeds[0]][FULL_PRECISION]['parameters'] / 1e6:.2f} M parameters")
        trainings.show(seeds, sent)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
