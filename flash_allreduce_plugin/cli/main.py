"""`flash-allreduce`: the commands and their options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_allreduce_plugin.cli.plan.command import plan
from flash_allreduce_plugin.integrations import registry

Json = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, help="Write JSON too. With -, JSON is on stdout and text on stderr."),
]
_RANKS = "Ranks on this machine, 2 by default. With --link each rank has a host."
_LINK = "Rate of each host's link, such as 1gbit (in a checkout, as root)."
_CONFIG = 'The other fields: a JSON file, or JSON such as \'{"range": "mse"}\'.'

app = typer.Typer(
    name="flash-allreduce",
    help="Quantized two-step all-reduce for training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Make typer treat `demo` as a subcommand."""


def _fields(options: str) -> dict[str, Any]:
    """Return the JSON object of --options."""
    from flash_allreduce_plugin.config import strict_json

    try:
        fields = strict_json.loads(options)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--options {options}: expected a JSON object ({error})") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter(f"--options {options}: expected a JSON object")
    return fields


@app.command()
def demo(
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks: 2, 4 or 8.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Use sequence parallelism.")] = False,
    long: Annotated[bool, typer.Option("--long", help="A larger model for more steps: about 6 minutes.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each variant. Default: 60, with --long 300.")
    ] = None,
    presets: Annotated[
        str | None, typer.Option(help="Presets to train with. Default: int8,int4, or none if --bits is given.")
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Widths to train with, forward and backward: 8,4.")] = None,
    options: Annotated[
        str, typer.Option(help='Other fields of these configurations, as JSON: \'{"range": "mse"}\'.')
    ] = "{}",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the batches.")] = 1234,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text to train on. Default: Python's own library."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path("demo-output"),
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="File for the JSON instead of OUTPUT/demo.json."),
    ] = None,
    noise_control: Annotated[
        bool,
        typer.Option("--noise-control", help="Also train with tiny and with large noise."),
    ] = False,
    hidden: Annotated[
        int | None, typer.Option(min=8, help="Hidden size of the model. Default: 192, with --long 256.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model. Default: 3, with --long 4.")] = None,
    sequence: Annotated[int, typer.Option(min=8, help="Bytes in a sequence.")] = 256,
    link: Annotated[bool, typer.Option(help="Measure steps on a slow link too; needs root.")] = True,
) -> None:
    """Train a small tensor-parallel GPT of megatron-core in full precision and with quantized reductions.

    Exit status 0 only if every check printed at the end holds.
    """
    from flash_allreduce_plugin.cli.demo.command import LONG, SHORT, DemoError, run_demo
    from flash_allreduce_plugin.cli.demo.model import ModelSize

    named = presets if presets is not None or bits is not None else "int8,int4"
    try:
        widths = [int(width) for width in bits.split(",")] if bits is not None else []
    except ValueError:
        raise typer.BadParameter(f"--bits {bits}: expected whole numbers from 2 to 8 separated by commas") from None
    scale, fields = LONG if long else SHORT, _fields(options)
    try:
        held = run_demo(
            tensor_parallel=tp,
            sequence_parallel=sequence_parallel,
            steps=steps or scale.steps,
            presets=named.split(",") if named is not None else [],
            bits=widths,
            seed=seed,
            data=data,
            output=output,
            json_file=json_file,
            noise_control=noise_control,
            size=ModelSize(hidden=hidden or scale.hidden, layers=layers or scale.layers, sequence=sequence),
            options=fields,
            link=link,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except DemoError as error:
        typer.echo(f"demo: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if held else 1)


@app.command()
def doctor(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Ranks of the self-test's all-reduce.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each check may take.")] = 120,
    json_file: Json = None,
) -> None:
    """Check the installation: versions, libraries, machine, environment, seams; and test it.

    A bug report needs this text. Exit status 0 only if there is no problem.
    """
    from flash_allreduce_plugin.cli.doctor.command import run_doctor

    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"--json {json_file}: expected a file in a folder that exists")
    raise typer.Exit(0 if run_doctor(ranks=ranks, seconds=timeout, json_file=json_file) else 1)


app.command()(plan)


@app.command()
def bench(
    minbytes: Annotated[str, typer.Option("--minbytes", "-b", help="First size, in bytes or with K, M, G.")] = "16K",
    maxbytes: Annotated[str, typer.Option("--maxbytes", "-e", help="Last size.")] = "64M",
    stepfactor: Annotated[int, typer.Option("--stepfactor", "-f", min=2, help="Factor between two sizes.")] = 4,
    iters: Annotated[int, typer.Option("--iters", "-n", min=1, help="Calls of a round.")] = 5,
    warmup_iters: Annotated[int, typer.Option("--warmup_iters", "-w", min=0, help="Calls before the rounds.")] = 1,
    check: Annotated[int, typer.Option("--check", "-c", min=0, max=1, help="1: check results first. 0: no check.")] = 1,
    datatype: Annotated[str, typer.Option("--datatype", "-d", help="float32, bfloat16 or float16.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds. Each times every variant once.")] = 10,
    collective: Annotated[
        str, typer.Option(help="all_reduce, reduce_scatter, all_gather, all_to_all, codec; several with commas.")
    ] = "all_reduce",
    algorithm: Annotated[
        str, typer.Option(help="two-step, ring (all_reduce alone, in a checkout), or both.")
    ] = "two-step",
    bits: Annotated[str | None, typer.Option(help="Widths to measure. Default: those of --config, else 8,4.")] = None,
    config: Annotated[str | None, typer.Option(help=f"{_CONFIG} min_bytes is 0 unless a file sets it.")] = None,
    ranks: Annotated[str | None, typer.Option(help=f"{_RANKS} 2,4,8: one run each.")] = None,
    link: Annotated[str, typer.Option(help=_LINK)] = "loopback",
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU a rank).")] = "cpu",
    json_file: Json = None,
) -> None:
    """Check the quantized collectives, and time them against torch.distributed's own.

    Runs alone or under torchrun. The columns are those of nccl-tests; wire: bytes that a rank sends. Exit status 0 only
    if no element is wrong: all ranks have the same bits, within the codec's error of the exact result.
    """
    from flash_allreduce_plugin.cli.bench.command import run_bench

    with _one_sentence("bench"):
        right = run_bench(
            minbytes=minbytes,
            maxbytes=maxbytes,
            stepfactor=stepfactor,
            iters=iters,
            warmup_iters=warmup_iters,
            rounds=rounds,
            check=check == 1,
            collectives=collective,
            algorithms=algorithm,
            datatype=datatype,
            bits=bits,
            config=config,
            rank_counts=ranks,
            link=link,
            device=device,
            json_file=json_file,
        )
    raise typer.Exit(0 if right else 1)


@app.command()
def tune(
    minbytes: Annotated[str, typer.Option("--minbytes", "-b", help="First size, in bytes or with K, M, G.")] = "1K",
    maxbytes: Annotated[str, typer.Option("--maxbytes", "-e", help="Last size.")] = "256M",
    datatype: Annotated[str, typer.Option("--datatype", "-d", help="float32, bfloat16 or float16.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds for a size; at least five rounds.")] = 2.0,
    collective: Annotated[
        str, typer.Option(help="all_reduce, reduce_scatter, all_gather; several with commas.")
    ] = "all_reduce",
    bits: Annotated[str, typer.Option(help="Widths to measure. The written configuration has the first.")] = "8,4",
    config: Annotated[str | None, typer.Option(help=_CONFIG)] = None,
    ranks: Annotated[str | None, typer.Option(help=_RANKS)] = None,
    link: Annotated[str, typer.Option(help=_LINK)] = "loopback",
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU a rank).")] = "cpu",
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="File for the configuration.")] = Path(
        "flash_allreduce.json"
    ),
    json_file: Json = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="File for a picture of the sweep, PNG.")] = None,
) -> None:
    """Measure the smallest size at which quantizing is faster here, and write chunk_bytes and min_bytes to a file.

    Runs under torchrun on the group of the job, or alone. Then the choice is measured: exit status 0 only if no size
    takes more than 1.05 times as long as in full precision.
    """
    from flash_allreduce_plugin.cli.tune.command import run_tune

    with _one_sentence("tune"):
        held = run_tune(
            collectives=collective,
            bits=bits,
            config=config,
            minbytes=minbytes,
            maxbytes=maxbytes,
            datatype=datatype,
            seconds=seconds,
            rank_count=ranks,
            link=link,
            device=device,
            output_file=output,
            json_file=json_file,
            plot_file=plot,
        )
    raise typer.Exit(0 if held else 1)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command: torchrun train.py ...")],
    bits: Annotated[str | None, typer.Option(help="Width of the codes, 2 to 8.")] = None,
    preset: Annotated[str | None, typer.Option(help="A named configuration: int8, int4 or thin.")] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A JSON file with fields of FlashConfig.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(
            help=f"The integrations to attach: {', '.join(registry.ATTACHABLE)}, with commas; or all.",
            show_default="all",
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other field. May be repeated.")
    ] = None,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", dir_okay=False, help="File to keep the log in, for `flash-allreduce report`."),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Check the installation first.")] = True,
) -> None:
    """Run an unchanged training with quantized collectives, and print a report of them.

    Variables of the environment (FLASH_ALLREDUCE_BITS and so on) apply too. The report is printed to stderr. Exit
    status: the command's own; 2 for bad options, 1 if the check fails, before anything is started.
    """
    from flash_allreduce_plugin.cli.run.command import options_of, run_run

    with _one_sentence("run"):
        options = options_of(bits, preset, config, attach, fields or [])
        status = run_run(command, options, report_file, check)
    raise typer.Exit(status)


@contextlib.contextmanager
def _one_sentence(command: str) -> Iterator[None]:
    """Exit with status 2 for bad usage and 1 for a failed rank, with one sentence on stderr."""
    from flash_allreduce_plugin.cli.ranks import RanksError

    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except RanksError as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def report(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Files that FLASH_ALLREDUCE_LOG=FILE wrote.")],
    html_file: Annotated[
        Path | None, typer.Option("--html", dir_okay=False, help="File for an HTML page with plots.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Show the collectives of a run, from its log.

    For each site: calls, bytes saved, measured error, and calls in full precision with their reasons.
    """
    from flash_allreduce_plugin.cli.report.command import run_report
    from flash_allreduce_plugin.cli.report.log import LogError
    from flash_allreduce_plugin.errors import install_command

    for option, file in (("--html", html_file), ("--json", json_file)):
        if file is not None and any(file.resolve() == log.resolve() for log in logs):
            raise typer.BadParameter(f"{option} {file} is one of the logs; expected another file")
    if html_file is not None and json_file is not None and html_file.resolve() == json_file.resolve():
        raise typer.BadParameter(f"--html and --json are both {html_file}; expected two files")
    try:
        run_report(logs, html_file, json_file)
    except LogError as error:
        raise typer.BadParameter(str(error)) from None
    except ImportError:
        typer.echo(f"report: --html: matplotlib is not installed: {install_command('cli')}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: cannot be written ({error.strerror})") from None
