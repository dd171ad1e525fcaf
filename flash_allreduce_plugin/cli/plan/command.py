"""`flash-allreduce plan`: what quantizing would bring, before there is a cluster to try it on (docs/planning.md)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flash_allreduce_plugin.errors import install_command

if TYPE_CHECKING:
    from rich.console import Console

    from flash_allreduce_plugin.cli.plan.report import Plan
    from flash_allreduce_plugin.cli.plan.step_model import Layout

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes of a bucket by default: Megatron's 40 M fp32 elements, DeepSpeed's 500 M of bf16, DDP's 25 MiB.
_BUCKETS = {"megatron": 160_000_000, "deepspeed": 1_000_000_000, "torch": 25 << 20}


def plan(
    model: Annotated[str | None, typer.Option(help="A preset (--list), or a config.json of Hugging Face.")] = None,
    megatron_args: Annotated[
        str | None, typer.Option(help="Megatron-LM's command line, quoted: shape and layout are taken from it.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="In place of the preset's, as all numbers here.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values. Default: all.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Inner size of the MLP. Default: 4 x hidden.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Default: 50304.")] = None,
    gated: Annotated[bool, typer.Option("--gated", help="An MLP of three matrices (SwiGLU).")] = False,
    untied: Annotated[bool, typer.Option("--untied", help="An output layer of its own.")] = False,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A preset (--list), or with its size: h100-8x16 is 16 nodes of 8.")
    ] = None,
    peak_flops: Annotated[str | None, typer.Option(help="Of a device: 312e12 or 312T.")] = None,
    efficiency: Annotated[float | None, typer.Option(help="What training reaches of it. Default: 0.5.")] = None,
    codec: Annotated[str | None, typer.Option(help="Bytes the codec reads and writes a second: 2400GB/s.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node.")] = None,
    intra: Annotated[str | None, typer.Option(help="Link inside a node: a preset, 370GB/s, 100gbit.")] = None,
    inter: Annotated[str | None, typer.Option(help="An adapter to other nodes: a preset, 47GB/s, 400gbit.")] = None,
    adapters: Annotated[int | None, typer.Option(min=1, help="Adapters of a node. Default: one a rank.")] = None,
    link_efficiency: Annotated[
        float | None, typer.Option(help="Reached of the links' peak. Default: the preset's; 1 for numbers.")
    ] = None,
    latency: Annotated[float | None, typer.Option(min=0, help="Of one exchange, microseconds.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks. Default: 1.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks. Default: what is left.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages. Default: 1.")] = None,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Megatron's.")] = False,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage. Default: 0.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="megatron, deepspeed or torch. Default: deepspeed with --zero 2 and 3.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a micro-batch. Default: 1.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step. Default: 1 micro-batch a rank, 4 a stage with --pp.")
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: fp32 with megatron, else bf16.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Activations are computed again, all.")] = False,
    overlap: Annotated[
        bool | None,
        typer.Option(
            help="Gradients and parameters are sent while others are computed. Default: yes, but with DeepSpeed's "
            "stages 0 to 2 and where --megatron-args say otherwise."
        ),
    ] = None,
    bits: Annotated[str, typer.Option(help="Widths to compare.")] = "8,6,4",
    scale: Annotated[str | None, typer.Option(help='Numbers of ranks to compare: "16,64,256".')] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Where the JSON goes.")] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Where a PNG goes.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the presets with their sources.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Predict what was measured here and published elsewhere, and compare.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of measurements for --check. Default: the checkout's.")
    ] = None,
) -> None:
    """Predict a training step in full precision and quantized: what hides, what is gained, what to set.

    Exit status of --check: 0 only if every measurement of this project is predicted within 15 %.
    """
    try:
        from rich.console import Console
    except ImportError:
        typer.echo(f"plan: rich is not installed: {install_command('cli')}", err=True)
        raise typer.Exit(1) from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    if list_:
        from flash_allreduce_plugin.cli.plan.tables import show_presets

        show_presets(console)
        return
    if check:
        raise typer.Exit(0 if _check(results, json_file, console) else 1)
    from flash_allreduce_plugin.cli.plan import inputs
    from flash_allreduce_plugin.cli.plan.report import as_dict, make_plan, show, show_scale
    from flash_allreduce_plugin.cli.plan.report import plot as draw
    from flash_allreduce_plugin.cli.plan.step_model import check as check_layout

    try:
        arguments = None if megatron_args is None else inputs.megatron_arguments(megatron_args)
        shape = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocabulary=vocabulary)
        m, name, source = inputs.model_of(model, arguments, shape, gated, untied, sequence)
        c, ranks = inputs.cluster_of(
            cluster, peak_flops=peak_flops, efficiency=_share("--efficiency", efficiency), codec=codec,
            ranks_per_node=ranks_per_node, intra=intra, inter=inter, adapters=adapters,
            link_efficiency=_share("--link-efficiency", link_efficiency),
            latency=None if latency is None else _finite("--latency", latency) * 1e-6,
        )  # fmt: skip
        layout = _layout(
            arguments or {}, ranks, tp, dp, pp, zero, framework, micro_batch, global_batch, gradients,
            sequence_parallel, recompute, overlap,
        )  # fmt: skip
        check_layout(m, layout)
        widths = _whole_numbers("--bits", bits, 2, 8, "8,6,4")
        counts = _whole_numbers("--scale", scale, 1, 1 << 24, "16,64,256") if scale else []
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    try:
        planned = make_plan(m, name, source, c, layout, widths)
        batch = global_batch or (arguments or {}).get("global_batch_size")
        rows = [(n, _scaled(planned, n, int(batch) if batch else None)) for n in counts]
        show(planned, console)
        if rows:
            show_scale(rows, console)
    except ArithmeticError:
        raise typer.BadParameter("numbers this large or small cannot be planned with; expected a machine's.") from None
    if json_file:
        scaled = [{"ranks": n, **({"why not": p} if isinstance(p, str) else as_dict(p))} for n, p in rows]
        _write(json_file, as_dict(planned) | ({"scale": scaled} if rows else {}))
    if plot:
        try:
            draw(planned, rows, plot)
        except ImportError:
            typer.echo(f"plan: matplotlib is not installed: {install_command('cli')}", err=True)
            raise typer.Exit(1) from None
        except (OSError, ValueError) as error:
            raise typer.BadParameter(
                f"--plot {plot}: cannot be written ({error}); expected a name with .png."
            ) from None


def _share(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"{flag} {value:g}: expected a share above 0 and up to 1, such as 0.5.")
    return value


def _finite(flag: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{flag} {value}: expected a number.")
    return value


def _whole_numbers(flag: str, text: str, low: int, high: int, example: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(low <= number <= high for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{flag} {text}: expected different whole numbers from {low} to {high} with commas between, like {example}."
        )
    return numbers


def _layout(
    a: dict[str, Any],
    ranks: int | None,
    tp: int | None,
    dp: int | None,
    pp: int | None,
    zero: int | None,
    framework: str | None,
    micro_batch: int | None,
    global_batch: int | None,
    gradients: str | None,
    sequence_parallel: bool,
    recompute: bool,
    overlap: bool | None,
) -> Layout:
    """The layout of the flags, else of Megatron's arguments `a`, else the defaults; dp from the number of ranks."""
    from flash_allreduce_plugin.cli.plan.inputs import megatron_number
    from flash_allreduce_plugin.cli.plan.step_model import Layout

    tp = tp or megatron_number(a, "tensor_model_parallel_size", 1)
    pp = pp or megatron_number(a, "pipeline_model_parallel_size", 1)
    micro_batch = micro_batch or megatron_number(a, "micro_batch_size", 1)
    if zero is None:
        zero = 1 if "use_distributed_optimizer" in a else 0
    framework = framework or ("deepspeed" if zero >= 2 else "megatron")
    if framework not in _BUCKETS:
        raise ValueError(f"--framework {framework}: expected {', '.join(_BUCKETS)}.")
    gradients = gradients or ("bf16" if framework != "megatron" or "grad_reduce_in_bf16" in a else "fp32")
    if overlap is None:
        overlap = "overlap_grad_reduce" in a if a else framework != "deepspeed" or zero == 3
    if gradients not in _ITEMSIZE:
        raise ValueError(f"--gradients {gradients}: expected fp32, bf16 or fp16.")
    if ranks is None:
        dp = dp or 1
    elif dp is None and ranks % (tp * pp):
        raise ValueError(f"--tp {tp} x --pp {pp} = {tp * pp} does not divide the {ranks} ranks of --cluster.")
    elif dp is not None and tp * dp * pp != ranks:
        raise ValueError(
            f"--tp {tp} x --dp {dp} x --pp {pp} = {tp * dp * pp} is not the {ranks} ranks of --cluster; leave --dp out."
        )
    else:
        dp = ranks // (tp * pp)
    assert dp is not None
    layout = Layout(
        tp, dp, pp, sequence_parallel or "sequence_parallel" in a, zero, framework,  # type: ignore[arg-type]
        micro_batch, 1 if pp == 1 else 4 * pp, 2, _ITEMSIZE[gradients],
        overlap, recompute or a.get("recompute_granularity") == "full", _BUCKETS[framework] // _ITEMSIZE[gradients],
    )  # fmt: skip
    batch = global_batch or ("global_batch_size" in a and megatron_number(a, "global_batch_size"))
    return replace(layout, accumulation=_accumulation(layout, batch)) if batch else layout


def _accumulation(layout: Layout, batch: int) -> int:
    if batch % (layout.micro_batch * layout.dp):
        raise ValueError(
            f"--global-batch {batch} is not a multiple of --micro-batch {layout.micro_batch} x --dp {layout.dp}; "
            "choose one that is."
        )
    return batch // (layout.micro_batch * layout.dp)


def _scaled(base: Plan, ranks: int, batch: int | None) -> Plan | str:
    """The plan for another number of data-parallel ranks, or why there is none."""
    from flash_allreduce_plugin.cli.plan.report import make_plan

    layout = base.layout
    if ranks % (layout.tp * layout.pp):
        return f"no multiple of TP x PP = {layout.tp * layout.pp}"
    layout = replace(layout, dp=ranks // (layout.tp * layout.pp))
    if batch:
        try:
            layout = replace(layout, accumulation=_accumulation(layout, batch))
        except ValueError:
            return f"a batch of {batch} cannot be dealt to {layout.dp} x {layout.micro_batch}"
    return make_plan(base.model, base.name, base.source, base.cluster, layout, list(base.steps))


def _check(folder: Path | None, json_file: Path | None, console: Console) -> bool:
    from dataclasses import asdict

    from benchmarks import plan_measured, plan_published
    from flash_allreduce_plugin.cli.plan.tables import show_check

    folder = folder or plan_measured.results_folder()
    if folder is None:
        raise typer.BadParameter(
            "--check: no measurements beside the package; expected --results with a day of the repository's "
            "benchmarks/results."
        )
    try:
        measured = plan_measured.rows(folder)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise typer.BadParameter(
            f"--results {folder}: expected {', '.join(plan_measured.FILES)} as the benchmarks write them ({error})."
        ) from None
    published = plan_published.rows()
    show_check(measured, published, console)
    if json_file:
        mine = [asdict(row) | {"error": row.error, "within": row.within} for row in measured]
        others = [asdict(row) | {"difference": row.difference} for row in published]
        _write(json_file, {"measured": mine, "published": others})
    return all(row.within for row in measured)


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise typer.BadParameter(f"--json {path}: cannot be written ({error.strerror}).") from None
