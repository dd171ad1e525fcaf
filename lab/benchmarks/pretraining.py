"""Pretraining with everything on: tensor parallelism both ways, the distributed optimizer's gradients and parameters.

    python -m lab.benchmarks.pretraining                              22 M parameters, one seed: hours on two cores
    python -m lab.benchmarks.pretraining --size 10m --seeds 1 2 3
    torchrun --nproc-per-node 8 -m lab.benchmarks.pretraining --size 124m --tokens train.bin --vocabulary 50304 \\
        --steps 10000 --batch 32 --sequence 1024 --lr 6e-4

megatron-core's GPT with normalized queries and keys, DistributedDataParallel and distributed optimizer, bf16 weights
and fp32 masters, TP 2 and DP over the other ranks. Every variant of a seed sees the same weights and batches and is
validated in full precision on the same held-out text: the sources of Python's standard library as bytes, or --tokens, a
file of uint16 (nanoGPT's train.bin).

Controls, not quantized: "noise S" has Gaussian noise of relative size S wherever a quantized run rounds; "fp32" is full
precision with weights and activations in fp32 in place of bf16.

A training at the edge of stability shows nothing: there a last bit decides about the step at which the loss falls.
Without normalized queries and keys, or with a rate that rises in 100 steps, this training was there.

--folder keeps a checkpoint every --save steps and the finished runs: the same command resumes bit for bit. --plot draws
the curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import forward, gpt
from lab.benchmarks import command, megatron_on_cpu
from lab.benchmarks.results import LOSSES, SMOOTHED, smooth
from lab.benchmarks.trainings import FULL_PRECISION, NOISE, windows

FP32 = "fp32"
#: The relative error of a call at 8 bits and at 4 with the codebook: 45.5 and 22.1 dB.
CONTROLS = [f"{NOISE}0.0053", f"{NOISE}0.079", FP32]
CONFIGS = ['{"preset": "int8"}', '{"preset": "int4"}']


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int


SIZES = {
    "1m": Size(4, 128, 4),
    "5m": Size(6, 256, 8),
    "10m": Size(6, 384, 8),
    "20m": Size(7, 512, 8),
    "124m": Size(12, 768, 12),  # with a vocabulary of 50304
    "1b": Size(24, 1792, 28),
}


@dataclass
class Run:
    """One variant of one seed: the contents of a checkpoint, and the result after the end."""

    model: Any
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0


def build(arguments: argparse.Namespace, seed: int, *, bf16: bool = True) -> Run:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(seed)
    size = SIZES[arguments.size]
    settings = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "tensor_model_parallel_size": arguments.tp,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "qk_layernorm": True,
    }
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    lengths = {"vocab_size": arguments.vocabulary, "max_sequence_length": arguments.sequence}
    model: Any = gpt(settings, spec, **lengths).to(device())
    config = model.config
    data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, data_parallel, Float16Module(config, model) if bf16 else model)
    ddp.broadcast_params()
    adam = OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        adam_beta2=0.95,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=bf16,
        use_distributed_optimizer=True,
    )
    return Run(ddp, get_megatron_optimizer(adam, [ddp]))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def loss_of(model: torch.nn.Module, data: torch.Tensor, generator: torch.Generator, batch: int, length: int) -> Any:
    """Mean cross entropy in nats a token of `batch` sequences."""
    text = windows(data, batch, length, generator).long().to(device())
    return forward(model, text).float().mean()


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """A fifth of the steps up, then a cosine down to 0: at a rate that stays, the last loss is a matter of luck."""
    rise = max(1, arguments.steps // 5)
    fall = 0.5 + 0.5 * math.cos(math.pi * max(0, step - rise) / max(1, arguments.steps - rise))
    return float(arguments.lr * min((step + 1) / rise, fall))


class Noise:
    """Gaussian, `size` times the root mean square: on g's output, on the input gradients of column-parallel layers and
    on the gradients of the weights. Ranks that hold copies draw the same.
    """

    def __init__(self, model: torch.nn.Module, size: float, seed: int, replica: int) -> None:
        self.size, self.model, self.seed, self.replica = size, model, seed, replica
        self.activations = torch.Generator()
        for name, module in model.named_modules():
            if name.endswith(("linear_proj", "linear_fc2")):
                module.register_forward_hook(self._after_g)
            if name.endswith(("linear_qkv", "linear_fc1", "output_layer")):
                module.register_forward_pre_hook(self._before_f)

    def _noisy(self, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        size = self.size * tensor.detach().float().square().mean().sqrt()
        return tensor + (size * torch.randn(tensor.shape, generator=generator).to(tensor.device)).to(tensor.dtype)

    def _after_g(self, _module: Any, _inputs: Any, output: Any) -> Any:
        return (self._noisy(output[0], self.activations), *output[1:]) if self.model.training else None

    def _before_f(self, _module: Any, inputs: Any) -> None:
        if self.model.training and inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: self._noisy(gradient, self.activations))

    def begin(self, step: int) -> None:
        self.activations.manual_seed(zlib.crc32(f"{self.seed} {step} {self.replica}".encode()))

    def on_gradients(self, step: int) -> None:
        for name, parameter in self.model.named_parameters():
            seed = zlib.crc32(f"{self.seed} {step} {name}".encode())
            gradient = parameter.main_grad  # type: ignore[attr-defined]
            gradient.copy_(self._noisy(gradient, torch.Generator().manual_seed(seed)))


def train(variant: str, seed: int, text: tuple[torch.Tensor, torch.Tensor], arguments: argparse.Namespace) -> Any:
    """Train a variant from where its checkpoint ends, and validate it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    group = parallel_state.get_data_parallel_group()
    batch, rest = divmod(arguments.batch, replicas)
    if rest or not batch:
        raise SystemExit(f"--batch {arguments.batch} must be a multiple of the {replicas} replicas.")
    fap.reset_stats()
    if variant.startswith("{"):
        fap.megatron.enable(fap.FlashConfig.from_dict({"min_bytes": 0, **json.loads(variant)}))
    run = build(arguments, seed, bf16=variant != FP32)
    noise = None
    if variant.startswith(NOISE):
        noise = Noise(run.model, float(variant.removeprefix(NOISE)), seed, replica)
    folder = arguments.folder / _name(variant, seed)
    load(run, folder)
    for step in range(len(run.losses), arguments.until):
        begin = time.perf_counter()
        run.model.zero_grad_buffer()
        run.optimizer.zero_grad()
        if noise is not None:
            noise.begin(step)
        generator = _generator(seed, step, replica)
        loss = loss_of(run.model, text[0], generator, batch, arguments.sequence)
        loss.backward()
        finalize_model_grads([run.model])
        if noise is not None:
            noise.on_gradients(step)
        for parameters in run.optimizer.param_groups:
            parameters["lr"] = learning_rate(step, arguments)
        _, norm, _ = run.optimizer.step()
        run.seconds += time.perf_counter() - begin
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        run.losses.append(float(mean) / replicas)
        run.norms.append(float(norm))
        if len(run.losses) % arguments.save == 0 and len(run.losses) < arguments.until:
            save(run, folder)
            say(f"{variant}, seed {seed}, step {len(run.losses)}: loss {statistics.fmean(run.losses[-50:]):.4f}")
    sites = fap.stats()["sites"]
    fap.megatron.disable()  # held-out text is read in full precision
    run.model.eval()
    held_out = torch.zeros((), device=device())
    with torch.no_grad():
        for number in range(arguments.validation):
            held_out += loss_of(run.model, text[1], _generator(-1, number, replica), batch, arguments.sequence)
    dist.all_reduce(held_out, group=group)
    return {
        "variant": variant,
        "seed": seed,
        "parameters": _parameters(run.model, arguments.tp),
        "ranks": dist.get_world_size(),
        "validation loss": float(held_out) / replicas / arguments.validation,
        "losses": run.losses,
        "norms": run.norms,
        "seconds a step": run.seconds / arguments.until,
        "quantized": {name: site["quantized"] for name, site in sites.items() if site["quantized"]},
    }


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(numbers).encode()))


def _parameters(model: torch.nn.Module, tensor_parallel: int) -> int:
    split = (getattr(p, "tensor_model_parallel", False) for p in model.parameters())
    return sum(p.numel() * (tensor_parallel if s else 1) for p, s in zip(model.parameters(), split, strict=True))


def _name(variant: str, seed: int) -> str:
    return f"{''.join(c if c.isalnum() else '-' for c in variant).strip('-')}-{seed}"


def _masters(run: Run) -> list[Any]:
    """This rank's torch optimizers, over its fp32 shards."""
    return [one.optimizer for one in getattr(run.optimizer, "chained_optimizers", [run.optimizer])]


def save(run: Run, folder: Path) -> None:
    """Each rank its own file; which step all of them have is written after all have written."""
    step, rank = len(run.losses), dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": run.model.state_dict(),
        "masters": [[p.detach() for group in one.param_groups for p in group["params"]] for one in _masters(run)],
        "adam": [one.state_dict() for one in _masters(run)],
        "flash_allreduce": fap.state_dict(),
        "losses": run.losses,
        "norms": run.norms,
        "seconds": run.seconds,
    }
    torch.save(state, folder / f"{step}-{rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / "step.part").write_text(str(step))
        (folder / "step.part").replace(folder / "step")
    dist.barrier()
    for old in folder.glob(f"*-{rank}.pt"):
        if old.name != f"{step}-{rank}.pt":
            old.unlink()


def load(run: Run, folder: Path) -> None:
    """Load the last state of `save`, if there is one."""
    if not (folder / "step").exists():
        return
    step = (folder / "step").read_text()
    state = torch.load(folder / f"{step}-{dist.get_rank()}.pt", map_location=device(), weights_only=True)
    run.model.load_state_dict(state["model"])
    for one, masters, adam in zip(_masters(run), state["masters"], state["adam"], strict=True):
        parameters = [p for group in one.param_groups for p in group["params"]]
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
        one.load_state_dict(adam)
    fap.load_state_dict(state["flash_allreduce"])
    run.losses, run.norms, run.seconds = state["losses"], state["norms"], state["seconds"]
    say(f"{folder.name}: goes on after step {step}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def start(tensor_parallel: int) -> None:
    """Start the process group and Megatron's groups; without a GPU, replace the CUDA calls."""
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        megatron_on_cpu.prepare()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)


def in_rank(arguments: argparse.Namespace) -> NoReturn:
    """Every run that is not done, one after the other."""
    start(arguments.tp)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    text = read(arguments)
    for index, seed in enumerate(arguments.seeds):
        for variant in (FULL_PRECISION, *arguments.configs, *(() if index else arguments.controls)):
            file = arguments.folder / f"{_name(variant, seed)}.json"
            if not file.exists():
                result = train(variant, seed, text, arguments)
                if dist.get_rank() == 0:
                    file.write_text(json.dumps(result) + "\n")
                    shutil.rmtree(arguments.folder / _name(variant, seed), ignore_errors=True)
                say(f"{variant}, seed {seed}: validation loss {result['validation loss']:.5f}")
            dist.barrier()
    os._exit(0)  # a thread of gloo's may abort the process while the interpreter ends


def read(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out tokens."""
    if arguments.tokens is None:
        return split(corpus(None, limit=1 << 30), arguments.sequence)
    tokens = torch.from_file(str(arguments.tokens), size=arguments.tokens.stat().st_size // 2, dtype=torch.uint16)
    held_out = len(tokens) // 20
    return tokens[:-held_out], tokens[-held_out:]


def finished(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs, without their steps."""
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [
        {key: value for key, value in run.items() if key not in ("losses", "norms")} | {LOSSES: smooth(run["losses"])}
        for run in runs
    ]


def show(runs: list[dict[str, Any]]) -> None:
    base = {run["seed"]: run["validation loss"] for run in runs if run["variant"] == FULL_PRECISION}
    by_variant: dict[str, dict[int, float]] = {}
    for run in runs:
        loss = run["validation loss"]
        by_variant.setdefault(run["variant"], {})[run["seed"]] = 100 * (loss / base[run["seed"]] - 1)
    for variant, each in by_variant.items():
        seeds = "  ".join(f"{seed}: {value:+.3f}" for seed, value in each.items())
        print(f"{variant:48}{statistics.fmean(each.values()):+8.3f} %  by seed {seeds}", flush=True)


def plot(files: list[Any], picture: Path) -> None:
    """Draw the loss by step and its difference to full precision, for the first seed of each file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(files), 2, figsize=(11, 3.6 * len(files)), squeeze=False)
    for (losses, differences), runs in zip(axes, files, strict=True):
        seed = min(run["seed"] for run in runs)
        mine = {run["variant"]: run[LOSSES] for run in runs if run["seed"] == seed}
        base = mine[FULL_PRECISION]
        for number, (variant, curve) in enumerate(mine.items()):
            steps, look = [SMOOTHED * (i + 0.5) for i in range(len(curve))], {"color": f"C{number}", "linewidth": 1}
            losses.plot(steps, curve, label=variant, **look)
            differences.plot(steps, [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)], **look)
        losses.set_title(f"{runs[0]['parameters'] / 1e6:.0f} M parameters, seed {seed}: loss, nats a token")
        differences.set_title("difference to full precision, %")
        losses.set_yscale("log")
        for one in (losses, differences):
            one.set_xlabel("step")
            one.grid(alpha=0.3)
        losses.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--configs", nargs="*", default=CONFIGS, help="fields of FlashConfig, as JSON")
    parser.add_argument(
        "--controls", nargs="*", default=CONTROLS, help=f'"{NOISE}SIZE" or {FP32}, on the first seed; none: no control'
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--until", type=int, help="end after this step of them, to compare how trainings begin")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--tokens", type=Path, help="a file of uint16 tokens; none: bytes of Python's sources")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--validation", type=int, default=100, help="batches of held-out text")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="where torchrun has not started them")
    parser.add_argument("--save", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, help="checkpoints and finished runs (default runs/pretraining-SIZE)")
    parser.add_argument("--plot", type=Path)


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    arguments.until = arguments.until or arguments.steps
    arguments.folder = arguments.folder or Path("runs") / f"pretraining-{arguments.size}"
    if "RANK" in os.environ:
        in_rank(arguments)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    environment = {"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    subprocess.run([*launcher, "-m", "lab.benchmarks.pretraining", *sys.argv[1:]], env=environment, check=True)
    runs = finished(arguments.folder)
    show(runs)
    keep(runs)
    if arguments.plot:
        plot([runs], arguments.plot)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
