"""`flash-allreduce plan`: estimate the effect of quantizing before there is a cluster (docs/decide/planning.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flash_allreduce_plugin.errors import install_command

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.output import Output
    from flash_allreduce_plugin.cli.plan.report import Forecast


def plan(
    model: Annotated[str | None, typer.Option(help="A preset (--list), or a config.json of Hugging Face.")] = None,
    megatron_args: Annotated[
        str | None, typer.Option(help="Megatron-LM's command line, quoted: shape and layout are taken from it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A preset (--list), or with its size: h100-8x16 is 16 nodes of 8.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks. Default: 1.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks. Default: the other ranks.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages. Default: 1.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Ranks that share a sequence. Default: 1.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Ranks that share out the experts. Default: 1.")] = None,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Megatron's.")] = False,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage. Default: 0.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="megatron, deepspeed or torch. Default: deepspeed with --zero 2 and 3.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a micro-batch. Default: 1.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step. Default: 1 micro-batch a rank, 4 a stage with --pp.")
    ] = None,
    bits: Annotated[str, typer.Option(help="Widths to compare.")] = "8,6,4",
    scale: Annotated[str | None, typer.Option(help='Numbers of ranks to compare: "16,64,256".')] = None,
    layout: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file with everything else: own sizes, links, efficiencies, memory."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write JSON too. With -, JSON is on stdout and text on stderr."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="File for a PNG.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the presets with their sources.")] = False,
    layout_example: Annotated[bool, typer.Option("--layout-example", help="Print a file for --layout.")] = False,
) -> None:
    """Predict a training step in full precision and quantized: hidden time, gain, and settings."""
    output = _output(json_file)
    if list_ or layout_example:
        _print_help(output, list_)
        return
    flags = {
        "tp": tp, "dp": dp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": sequence_parallel or None, "zero": zero,
        "framework": framework, "micro_batch": micro_batch, "global_batch": global_batch,
    }  # fmt: skip
    with _one_sentence():
        planned, rows = _planned(model, megatron_args, cluster, layout, flags, bits, scale)
        _show(output, planned, rows, plot)


def _output(json_file: Path | None) -> Output:
    from flash_allreduce_plugin.cli.output import Output

    output = Output(json_file, soft_wrap=False)
    return output if output.results.is_terminal else Output(json_file, width=180, soft_wrap=False)


def _print_help(output: Output, presets: bool) -> None:
    from flash_allreduce_plugin.cli.plan import layout_file
    from flash_allreduce_plugin.cli.plan.tables import show_presets

    if presets:
        show_presets(output.results)
        return
    output.results.print(layout_file.example(), markup=False, soft_wrap=True)
    output.note("# A file for --layout. Every key is optional. Flags have priority over the file.")
    for line in layout_file.meanings():
        output.note(f"# {line}")


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """End with exit status 2 and one sentence for bad input."""
    try:
        yield
    except ArithmeticError:
        raise typer.BadParameter(
            "a number is too large or too small for an estimate; expected those of a real machine."
        ) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _planned(
    model: str | None,
    megatron_args: str | None,
    cluster: str | None,
    layout: Path | None,
    flags: dict[str, Any],
    bits: str,
    scale: str | None,
) -> tuple[Forecast, list[tuple[int, Forecast | str]]]:
    """Return the plan, and the plans for the numbers of ranks of --scale."""
    from flash_allreduce_plugin.cli.plan import inputs, layout_file
    from flash_allreduce_plugin.cli.plan.report import make_forecast
    from flash_allreduce_plugin.cli.plan.step_model import check

    given = layout_file.read(layout)
    training = given["training"] | {key: value for key, value in flags.items() if value is not None}
    arguments = {} if megatron_args is None else inputs.megatron_arguments(megatron_args)
    m, name, source = inputs.model_of(model, arguments or None, given["model"])
    c, ranks = inputs.cluster_of(cluster, **given["cluster"])
    spread = inputs.layout_of(arguments, ranks, training)
    check(m, spread)
    widths = inputs.whole_numbers("--bits", bits, 2, 8, "8,6,4")
    counts = inputs.whole_numbers("--scale", scale, 1, 1 << 24, "16,64,256") if scale else []
    planned = make_forecast(m, name, source, c, spread, widths)
    batch = inputs.global_batch(arguments, training)
    return planned, [(count, _scaled(planned, count, batch)) for count in counts]


def _scaled(base: Forecast, ranks: int, batch: int | None) -> Forecast | str:
    """Return the plan for another number of data-parallel ranks, or why there is none."""
    from flash_allreduce_plugin.cli.plan.inputs import accumulation
    from flash_allreduce_plugin.cli.plan.report import make_forecast

    layout = base.layout
    others = layout.tp * layout.pp * layout.cp
    if ranks % others:
        return f"not a multiple of TP x PP{' x CP' if layout.cp > 1 else ''} = {others}"
    layout = replace(layout, dp=ranks // others)
    if layout.cp * layout.dp % layout.ep:
        return f"CP x DP = {layout.cp * layout.dp} is not a multiple of EP = {layout.ep}"
    if batch:
        try:
            layout = replace(layout, accumulation=accumulation(layout, batch))
        except ValueError:
            return f"a batch of {batch} does not divide by {layout.dp} x {layout.micro_batch}"
    return make_forecast(base.model, base.name, base.source, base.cluster, layout, list(base.steps))


def _show(output: Output, planned: Forecast, rows: list[tuple[int, Forecast | str]], plot: Path | None) -> None:
    from flash_allreduce_plugin.cli.plan import report

    report.show(planned, output.results)
    if rows:
        report.show_scale(rows, output.results)
    scaled = [{"ranks": n, **({"why not": p} if isinstance(p, str) else report.as_dict(p))} for n, p in rows]
    try:
        output.write_json(report.as_dict(planned) | ({"scale": scaled} if rows else {}))
    except OSError as error:
        raise ValueError(f"--json {output.json_file}: cannot be written ({error.strerror}).") from None
    if not plot:
        return
    try:
        from flash_allreduce_plugin.cli.plan.plot import draw

        draw(planned, rows, plot)
    except ImportError:
        typer.echo(f"plan: matplotlib is not installed: {install_command('cli')}", err=True)
        raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {plot}: cannot be written ({error}); expected a name with .png.") from None
