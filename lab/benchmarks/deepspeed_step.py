"""A DeepSpeed step between two hosts with a slow link: the time its gradients' reduction takes, quantized and in bf16.

    python -m lab.benchmarks.deepspeed_step --rate 1gbit        needs root: makes hosts with netlab

Wide layers and few rows in bf16, plain SGD, one rank and one core a host: nearly all of a step is communication. Every
variant is an engine of its own; they take their steps in turn, so that a machine that drifts drifts for all of them. A
time is the median over the rounds of the slowest rank's. "gradients" is a step's time less that of the step whose
gradients are not sent at all: ZeRO's parameter gathers are in "step" and not in "gradients". "nothing sent" is the step
without them too. "INT4 + 2" has gradients in 4 bits and parameters in 2: differences at stages 1 and 2, values at
stage 3. "wire" is what a step puts on the interfaces of a host, headers and all.

ZeRO++ quantizes on GPUs alone. "ZeRO++, its bytes" sends what its gradients would be (qgZ: 4 bits, and a scale of fp32
for each of max(rows, columns, ranks) groups of a matrix) and computes nothing for them; its parameters are ours in 8
bits, of which qwZ has as many. Its loss cannot be measured here.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.deepspeed import engine as attachment
from flash_allreduce_plugin.integrations.deepspeed.reduction import Reduction
from lab.benchmarks import netlab
from lab.benchmarks.ranks import finish, on_the_wire, result_of
from lab.benchmarks.results import write_json

NOT_SENT, FULL_PRECISION = "gradients not sent", "bf16"
PRESET, ZERO_PLUS_PLUS = "preset ", "ZeRO++, its bytes"
PIECES = 8  # in flight at once: one exchange of gloo's alone fills half of a link
NOTHING_SENT = "nothing sent"  # nor parameters: at stages 1 and 2, what is left for no width to gain


class _NothingSent(Reduction):
    """Leaves the reductions out: the rest of a step alone."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        pass

    def reduce_scatter_coalesced(self, tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
        world, rank = dist.get_world_size(), dist.get_rank()
        sizes = [math.ceil(tensor.numel() / world) for tensor in tensors]
        return [t.reshape(-1)[rank * size : (rank + 1) * size] for t, size in zip(tensors, sizes, strict=True)]


class _ZeroPlusPlus(_NothingSent):
    """Sends as many bytes as qgZ, of nothing."""

    def reduce_scatter_coalesced(self, tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
        world = dist.get_world_size()
        size = sum(math.ceil(tensor.numel() / 2) + 4 * max(*tensor.shape[:2], world) for tensor in tensors)
        piece = torch.empty(math.ceil(size / world / PIECES) * world, dtype=torch.uint8)
        handles = [dist.all_to_all_single(torch.empty_like(piece), piece, async_op=True) for _ in range(PIECES)]
        for handle in handles:
            handle.wait()
        return super().reduce_scatter_coalesced(tensors, group)


def build_engine(variant: str, stage: int, arguments: argparse.Namespace) -> Any:
    import deepspeed

    torch.manual_seed(1)
    width = arguments.width
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(arguments.layers)])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    if variant.startswith("INT"):
        bits, _, params = variant.removeprefix("INT").partition(" + ")
        config["flash_allreduce"] = {"bits": int(bits), **({"param_bits": int(params)} if params else {})}
    elif variant.startswith(PRESET):
        config["flash_allreduce"] = {"preset": variant.removeprefix(PRESET)}
    elif variant != FULL_PRECISION:
        config["flash_allreduce"] = {"param_bits": 8} if variant == ZERO_PLUS_PLUS else {}
    reductions = {NOT_SENT: _NothingSent, NOTHING_SENT: _NothingSent, ZERO_PLUS_PLUS: _ZeroPlusPlus}
    attachment.Reduction = reductions.get(variant, Reduction)  # type: ignore[misc]
    built, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=config)
    return built


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant's steps at every stage; rank 0 prints one JSON object."""
    import deepspeed
    from deepspeed.runtime.zero import stage_1_and_2

    gathers = (stage_1_and_2.all_gather_dp_groups, lambda **_: None)
    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # a minute's compilation
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")
    attachment.attach()
    quantized = [f"INT{bits}" for bits in arguments.bits]
    presets = [PRESET + preset for preset in arguments.presets]
    x = torch.randn(arguments.rows, arguments.width).bfloat16()
    results: dict[int, Any] = {}
    for stage in arguments.stages:
        params = [] if stage == 0 else arguments.values if stage == 3 else arguments.differences
        unsent = [NOT_SENT, NOTHING_SENT] if stage in (1, 2) else [NOT_SENT]
        variants = [*unsent, FULL_PRECISION, *quantized, *presets, *(f"{quantized[-1]} + {bits}" for bits in params)]
        variants += [ZERO_PLUS_PLUS] if stage == 3 else []
        engines = {variant: build_engine(variant, stage, arguments) for variant in variants}
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        sent = {variant: 0 for variant in variants}
        wire: dict[str, list[float]] = {variant: [] for variant in variants}
        for round_ in range(arguments.rounds + 2):
            turn = round_ % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                engine = engines[variant]
                fap.reset_stats()
                dist.barrier()
                before = on_the_wire()
                begin = time.perf_counter()
                with mock.patch.object(stage_1_and_2, "all_gather_dp_groups", gathers[variant == NOTHING_SENT]):
                    engine.backward(engine(x).float().square().mean())
                    engine.step()
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                sent[variant] = fap.stats()["bytes_sent"]
                if round_ > 1:  # the first round allocates, and what is gathered by differences goes whole once
                    seconds[variant].append(float(took))
                    wire[variant].append(on_the_wire() - before)
        optimizer = type(engines[FULL_PRECISION].optimizer).__name__
        results[stage] = {"optimizer": optimizer, "seconds": seconds, "sent": sent, "wire": wire}
        for engine in engines.values():
            engine.destroy()
    finish(results)


def table(stage: int, result: dict[str, Any], elements: int) -> dict[str, Any]:
    """Medians, and every variant against bf16."""
    medians = {variant: statistics.median(times) for variant, times in result["seconds"].items()}
    gradients = {variant: seconds - medians[NOT_SENT] for variant, seconds in medians.items()}
    rows = {
        variant: {
            "step, seconds": seconds,
            "gradients, seconds": gradients[variant],
            "x bf16, gradients": None if "sent" in variant else gradients[FULL_PRECISION] / gradients[variant],
            "x bf16, step": medians[FULL_PRECISION] / seconds,
            "bits sent per element": 8 * result["sent"][variant] / elements,
            "wire, bytes": statistics.median(result["wire"][variant]),
            "step by round": result["seconds"][variant],
        }
        for variant, seconds in medians.items()
    }
    return {"stage": stage, "optimizer": result["optimizer"], "variants": rows}


def show(tables: list[dict[str, Any]]) -> None:
    for entry in tables:
        print(f"\nstage {entry['stage']}, {entry['optimizer']}")
        print(
            f"{'':20}{'step ms':>9}{'gradients ms':>14}{'x bf16':>8}{'whole step':>12}{'bits sent':>11}"
            f"{'wire MB':>9}{'x bf16':>8}"
        )
        for variant, row in entry["variants"].items():
            ratio, bits, wire = row["x bf16, gradients"], row["bits sent per element"], row["wire, bytes"]
            of_bf16 = wire / entry["variants"][FULL_PRECISION]["wire, bytes"]
            print(
                f"{variant:20}{1e3 * row['step, seconds']:9.0f}{1e3 * row['gradients, seconds']:14.0f}"
                f"{f'{ratio:.2f}' if ratio else '':>8}{row['x bf16, step']:12.2f}{f'{bits:.3f}' if bits else '':>11}"
                f"{wire / 1e6:9.2f}{of_bf16:8.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--presets", nargs="*", default=["int4", "thin"], help="of the plugin's")
    parser.add_argument("--differences", type=int, nargs="*", default=[4, 2], help="of parameters, at stages 1 and 2")
    parser.add_argument("--values", type=int, nargs="*", default=[8], help="bits of parameters at stage 3")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return measure(arguments)
    os.environ |= {"DS_ACCELERATOR": "cpu", "FLASH_ALLREDUCE_AUTOLOAD": "0"}
    with netlab.hosts(arguments.hosts, arguments.rate) as lab:
        out = lab.run(
            [sys.executable, "-m", "lab.benchmarks.deepspeed_step", *sys.argv[1:], "--rank"], timeout=arguments.timeout
        )[0]
    result = result_of(out)
    elements = arguments.layers * arguments.width**2
    tables = [table(int(stage), entry, elements) for stage, entry in result.items()]
    print(f"{elements / 1e6:.1f} M parameters, {arguments.hosts} hosts, links of {arguments.rate}")
    show(tables)
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        about = {"machine": platform.processor(), "torch": torch.__version__, "deepspeed": version("deepspeed")}
        write_json(arguments.json, {"about": about | {"arguments": kept}, "tables": tables})
    return None


if __name__ == "__main__":
    main()
