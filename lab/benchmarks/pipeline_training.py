"""Training over pipeline stages, quantized sends against full precision: validation loss by seed.

    python -m lab.benchmarks.pipeline_training                            two stages, 3.3 M parameters, three seeds
    python -m lab.benchmarks.pipeline_training --stages 4 --seeds 1 --configs '{"pipeline_bits": 4}'

The demo's GPT (its own embedding and output weights) with Megatron's 1F1B schedule on gloo, on the demo's text. On the
first seed full precision is also trained with noise on the sent activations: it shows that the comparison can find a
difference. All variants of a seed see the same weights and batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import VOCABULARY, forward, gpt, prepare_cpu
from flash_allreduce_plugin.cli.demo.training import BETAS, CLIP, learning_rate
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters
from lab.benchmarks import command, ranks, trainings
from lab.benchmarks.megatron_on_cpu import CudaIsCpu
from lab.benchmarks.trainings import FULL_PRECISION, NOISE, outcome, windows

_HADAMARD, _FINE = '"hadamard": true, "group_size": 64', '"codebook": true'
CONFIGS = [
    '{"pipeline_bits": 8, "pipeline_backward_bits": 8}',
    '{"pipeline_bits": 4, "pipeline_backward_bits": 4}',
    f'{{"pipeline_bits": 4, "pipeline_backward_bits": 4, {_FINE}}}',
    '{"preset": "int4"}',
    f'{{"pipeline_bits": 4, "pipeline_backward_bits": 4, {_HADAMARD}}}',
    # As TAH-Quant trains: activations in 4 and 3 bits, rotated, in groups of a token's channels.
    f'{{"pipeline_bits": 4, "pipeline_backward_bits": 8, {_HADAMARD}}}',
    f'{{"pipeline_bits": 3, "pipeline_backward_bits": 8, {_HADAMARD}}}',
]


def build_model(arguments: argparse.Namespace, seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """This rank's stage; the same weights for the same seed."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    settings = {
        "num_layers": arguments.layers,
        "hidden_size": arguments.hidden,
        "num_attention_heads": 8,
        "pipeline_model_parallel_size": arguments.stages,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "batch_p2p_sync": False,
    }
    model: Any = gpt(settings, tied=False, vocab_size=VOCABULARY, max_sequence_length=arguments.sequence)
    model.model_type = None
    moved: torch.nn.Module = model.to(dtype)
    return moved


def batches(data: torch.Tensor, number: int, seed: int, arguments: argparse.Namespace) -> Iterator[torch.Tensor]:
    """The micro-batches of a step, each of sequences with the byte after them."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    for _ in range(arguments.micro_batches):
        yield windows(data, arguments.batch, arguments.sequence, generator)


def run_step(model: Any, data: Iterator[torch.Tensor], arguments: argparse.Namespace, forward_only: bool) -> float:
    """One pass of Megatron's schedule; the mean loss, which the last stage knows."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(micro_batches: Any, stage: Any, *_: Any) -> Any:
        return forward(stage, next(micro_batches)), lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    with CudaIsCpu(), torch.set_grad_enabled(not forward_only):
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=arguments.micro_batches,
            seq_length=arguments.sequence,
            micro_batch_size=arguments.batch,
            forward_only=forward_only,
        )
    loss = torch.tensor(statistics.fmean(float(one["loss"]) for one in losses) if losses else 0.0)
    dist.broadcast(loss, dist.get_world_size() - 1)
    return float(loss)


def clip(model: torch.nn.Module) -> None:
    """To the norm of all stages' gradients."""
    square = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()
    dist.all_reduce(square)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, CLIP / (float(square.sqrt()) + 1e-6)))


def add_noise(model: Any, size: float, seed: int) -> None:
    """Add Gaussian noise, `size` times the root mean square, to the activations that a stage sends."""
    generator = torch.Generator().manual_seed(10_000 * seed + dist.get_rank())

    def noisy(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + size * output.detach().square().mean().sqrt() * torch.randn(output.shape, generator=generator)

    if not model.post_process:
        model.register_forward_hook(noisy)


def train(variant: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: train a variant, full precision, "noise <size>" or a configuration as JSON, and validate it."""
    model = build_model(arguments, seed)
    if variant.startswith(NOISE):
        add_noise(model, float(variant.removeprefix(NOISE)), seed)
    counters.reset_stats()
    if variant.startswith("{"):
        megatron.enable(FlashConfig.from_dict({"min_bytes": 0, **json.loads(variant)}))
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    training, validation = split(corpus(None), arguments.sequence)
    losses = []
    for step in range(arguments.steps):
        optimizer.zero_grad()
        losses.append(run_step(model, batches(training, step, seed, arguments), arguments, forward_only=False))
        clip(model)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps)
        optimizer.step()
    sites = [one for name, one in counters.stats()["sites"].items() if "pipeline" in name]
    megatron.disable()  # held-out text is read in full precision
    numbers = range(arguments.validation)
    held_out = [run_step(model, batches(validation, n, seed, arguments), arguments, forward_only=True) for n in numbers]
    result = outcome(held_out, losses, quantized=sum(one["quantized"] for one in sites))
    result["bytes sent"] = sum(one["bytes_sent"] for one in sites)
    result["bytes in full precision"] = sum(one["bytes_full_precision"] for one in sites)
    return result


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every variant, one after the other."""
    from megatron.core import parallel_state

    ranks.start()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=arguments.stages)
    prepare_cpu()
    return {variant: train(variant, arguments.seed, arguments) for variant in arguments.variants}


def share(results: list[dict[str, Any]]) -> str:
    whole = results[0]["bytes in full precision"]
    return f"{results[0]['bytes sent'] / whole:7.3f} of fp32's bytes" if whole else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="fields of FlashConfig, as JSON")
    parser.add_argument("--stages", type=int, default=2)
    trainings.add_arguments(parser)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--validation", type=int, default=64, help="steps of held-out text")


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    seeds = trainings.by_seed(
        arguments,
        [FULL_PRECISION, *arguments.configs],
        lambda seed, chosen: ranks.torchrun(in_rank, arguments.stages, arguments, seed=seed, variants=chosen),
        lambda found: keep({"seeds": found}),
    )
    trainings.show(seeds, share)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
