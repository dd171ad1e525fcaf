"""`flash-allreduce demo`: starts the ranks, shows their progress, checks their results and writes them to files."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import queue
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flash_allreduce_plugin.cli import checkout
from flash_allreduce_plugin.cli.demo import report, slow_link
from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import VOCABULARY, ModelSize
from flash_allreduce_plugin.cli.demo.training import Settings, Variant, train
from flash_allreduce_plugin.errors import install_command

FULL_PRECISION = Variant("full precision")
NOISE_LEVELS = (1e-6, 0.3)
SILENCE_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The default length and size of a run."""

    steps: int
    hidden: int
    layers: int


SHORT = Scale(steps=60, hidden=192, layers=3)  # 90 seconds on two cores, with the slow link
LONG = Scale(steps=300, hidden=256, layers=4)  # about 6 minutes


class DemoError(RuntimeError):
    """A rank failed, or the ranks sent no message for too long. The message has the first failure."""


def run_demo(
    *,
    tensor_parallel: int,
    sequence_parallel: bool,
    steps: int,
    presets: list[str],
    bits: list[int],
    seed: int,
    data: Path | None,
    output: Path,
    json_file: Path | None,
    noise_control: bool,
    size: ModelSize,
    options: Mapping[str, Any],
    link: bool = True,
) -> bool:
    """Run the comparison, print it, write `output`/demo.json (or json_file) and `output`/demo.png.

    link: measure steps of the presets on a slow link too, if possible. Returns True if all checks passed.

    Raises ValueError for settings that cannot work and for noise_control outside of a checkout, before anything is
    started, and DemoError if a rank fails.
    """
    variants = [FULL_PRECISION, *(Variant(f"preset {name}", preset=name) for name in dict.fromkeys(presets))]
    variants += [Variant(f"INT{width}", bits=width) for width in dict.fromkeys(bits)]
    if noise_control:
        checkout.need("--noise-control", "noise")
        variants += [Variant(f"noise {level:g}", noise=level) for level in NOISE_LEVELS]
    settings = Settings(
        variants=tuple(variants),
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        steps=steps,
        seed=seed,
        size=size,
        data=data,
        threads=max(1, len(os.sched_getaffinity(0)) // tensor_parallel),
        options=options,
    )
    _check(settings)
    _missing_packages()
    output.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with _progress(report.progress_console(), settings) as on_step:
        result = run_ranks(settings, on_step)
    result["link"] = _on_a_link(settings) if link else {}
    result["settings"] = report.settings_dict(settings)
    result["versions"] = report.versions()
    result["wall_seconds"] = time.perf_counter() - begin
    result["checks"] = report.checks(result, settings)
    json_file = json_file or output / "demo.json"
    json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.plot(result, output / "demo.png")
    report.show(report.console(), result, [json_file, output / "demo.png"])
    return all(check["held"] for check in result["checks"])


def _on_a_link(settings: Settings) -> dict[str, Any]:
    """Return {"seconds": of a step by variant} measured on a slow link, or {"not measured": why}."""
    presets = [variant.preset for variant in settings.variants if variant.preset is not None]
    why = slow_link.cannot_measure()
    if why is None and (settings.sequence_parallel or not presets):
        why = "needs presets without sequence parallelism"
    if why is None:
        report.progress_console().print(f"Measuring steps between hosts with links of {slow_link.MEASURED}")
        try:
            return {"seconds": slow_link.measured(settings.size, settings.tensor_parallel, presets)}
        except (RuntimeError, ValueError) as error:
            why = str(error)
    return {"not measured": why}


def _missing_packages() -> None:
    for package, module in (("megatron-core", "megatron.core"), ("matplotlib", "matplotlib")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # no megatron at all
            found = None
        if found is None:
            raise DemoError(f"{package} is not installed: {install_command('megatron,cli')}")


def _check(settings: Settings) -> None:
    size, ranks = settings.size, settings.tensor_parallel
    if ranks < 2:
        raise ValueError(f"--tp {ranks}: at least 2 ranks are needed for anything to be reduced")
    for what, value in (("heads", size.heads), ("vocabulary", VOCABULARY), ("--sequence", size.sequence)):
        if value % ranks:
            raise ValueError(f"--tp {ranks} does not divide {what} ({value}); choose 2, 4 or 8")
    if size.hidden % size.heads:
        raise ValueError(f"--hidden {size.hidden} is not a multiple of the {size.heads} heads")
    for variant in settings.variants:
        if variant.quantized:
            # ConfigError, a ValueError, for an unknown preset, width or option
            variant.config(measure=False, options=settings.options)
    split(corpus(settings.data), size.sequence)


@contextmanager
def _progress(console: Console, settings: Settings) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield the function to call after each step: a bar on a terminal, a line at times elsewhere."""
    names = ", ".join(variant.name for variant in settings.variants)
    console.print(
        f"Training {names} alternately on {settings.tensor_parallel} ranks, {settings.steps} steps each; "
        "the first step takes some seconds",
        highlight=False,
    )
    losses = TextColumn("{task.fields[losses]}")
    bar = Progress(
        TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), losses, console=console
    )
    task = bar.add_task("steps", total=settings.steps, losses="starting")
    every = max(1, settings.steps // 10)

    def on_step(step: int, values: dict[str, float]) -> None:
        text = "  ".join(f"{name} {loss:.3f}" for name, loss in values.items())
        bar.update(task, completed=step + 1, losses=text)
        if not console.is_terminal and ((step + 1) % every == 0 or step == 0):
            console.print(f"step {step + 1}/{settings.steps}  loss: {text}", highlight=False)
        if step + 1 == settings.steps:
            console.print("Validating on held-out text")

    if not console.is_terminal:
        yield on_step
        return
    with bar:
        yield on_step


def run_ranks(settings: Settings, on_step: Callable[[int, dict[str, float]], None]) -> dict[str, Any]:
    """Start the ranks, pass on their progress and return rank 0's result. No rank outlives this call.

    Raises DemoError with the traceback of the first rank that fails, or after SILENCE_SECONDS without a message.
    """
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, settings, f"{folder}/store", messages), daemon=True)
            for rank in range(settings.tensor_parallel)
        ]
        try:
            for process in ranks:
                process.start()
            return _listen(messages, ranks, on_step)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()


def _listen(messages: Any, ranks: list[Any], on_step: Callable[[int, dict[str, float]], None]) -> dict[str, Any]:
    heard = time.monotonic()
    while True:
        try:
            kind, *content = messages.get(timeout=1.0)
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode:
                    raise DemoError(f"rank {rank} ended with exit status {process.exitcode}") from None
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise DemoError(f"no rank has reported for {SILENCE_SECONDS:.0f} s") from None
            continue
        heard = time.monotonic()
        if kind == "step":
            on_step(*content)
        elif kind == "error":
            raise DemoError(f"rank {content[0]} failed:\n{content[1]}")
        else:
            return dict(content[0])


def _rank(rank: int, settings: Settings, store: str, messages: Any) -> None:
    """Run a rank's process. Rank 0 reports steps and the result, every rank its failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", module="megatron")  # about CUDA, apex and Transformer Engine, once per rank
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works if the host name does not resolve

    def on_step(step: int, losses: dict[str, float]) -> None:
        if rank == 0:
            messages.put(("step", step, losses))

    try:
        result = train(rank, settings, store, on_step)
    except Exception:
        messages.put(("error", rank, traceback.format_exc()))
    else:
        if rank == 0:
            messages.put(("result", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
