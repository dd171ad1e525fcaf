"""Checks of `flash-allreduce doctor`: libraries, machine, torch.distributed, variables, the entry point."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from flash_allreduce_plugin import autoload, environment
from flash_allreduce_plugin.cli.doctor import versions as versions
from flash_allreduce_plugin.cli.doctor.child import described

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.doctor.child import Findings

# Variables of other projects that affect collectives: shown, not judged.
_SHOWN = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|TORCH_GLOO|TORCH_DISTRIBUTED|TORCH_SYMM_MEM|TORCH_DEVICE_BACKEND)_\w+|CUDA_VISIBLE_DEVICES"
    r"|DS_ACCELERATOR|OMP_NUM_THREADS|ATEN_CPU_CAPABILITY|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|PYTHONPATH"
)
_OFF = ("0", "false", "no", "off")


def check(report: Findings) -> None:
    """Check versions and everything in this file. Stops after torch if torch cannot be imported."""
    report.section("versions")
    versions.own(report)
    versions.python(report)
    versions.of(report, "torch", "torch")
    versions.of(report, "megatron-core", "megatron.core")
    versions.of(report, "deepspeed", "deepspeed")
    report.section("torch")
    report.doing("importing torch")
    try:
        import torch
    except BaseException as error:
        report.problem(
            "import",
            f"import torch failed: {described(error)}; every other check needs torch",
            "python -c 'import torch' shows the traceback; install torch again",
        )
        return
    report.ok("build", f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    backends(report)
    report.section("versions")
    versions.transformer_engine(report)
    versions.apex(report)
    libraries(report)
    machine(report)
    entry_point(report)
    variables(report)


def backends(report: Findings) -> None:
    """Report the backends of torch.distributed."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        report.problem("distributed", "torch is built without it", "install another build of torch")
        return
    kinds = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(dist, f"is_{name}_available", bool)()]
    text = f"backends {', '.join(kinds) or 'none'}"
    if torch.cuda.is_available() and "nccl" not in kinds:
        report.problem("distributed", f"{text}: no nccl for the GPUs", "install a build of torch with NCCL")
    elif "gloo" not in kinds and "nccl" not in kinds:
        report.problem("distributed", f"{text}: neither gloo nor nccl", "install another build of torch")
    else:
        report.ok("distributed", text)


def libraries(report: Findings) -> None:
    """Report the compiled codecs for CPU and GPU tensors."""
    import torch

    report.section("libraries")
    report.doing("loading the compiled libraries")
    from flash_allreduce_plugin.codec import ops
    from flash_allreduce_plugin.errors import ConfigError

    try:
        asked = environment.is_on(environment.REFERENCE)
    except ConfigError:  # reported with the variables
        asked = False
    without = "the slower codec in plain PyTorch is used; its bits are the same"
    if asked:
        report.note("used", f"{environment.REFERENCE} is on: {without}", "unset it to use the libraries")
    if ops.unavailable is None:
        report.ok("_C (CPU)", f"loaded; instruction set {ops.cpu_capability()} (of avx512, avx2, default)")
    elif asked:
        report.note("_C (CPU)", ops.unavailable)
    else:
        report.problem(
            "_C (CPU)",
            f"{ops.unavailable}: {without}",
            f"install a C++ compiler and run {versions.INSTALL}; if this is intended, set {environment.REFERENCE}=1",
        )
    if ops.cuda_unavailable is None:
        report.ok("_cuda (GPU)", "loaded")
    elif not torch.cuda.is_available():
        report.ok("_cuda (GPU)", f"not needed, torch has no GPU ({ops.cuda_unavailable})")
    elif asked:
        report.note("_cuda (GPU)", ops.cuda_unavailable)
    else:
        report.problem("_cuda (GPU)", f"{ops.cuda_unavailable}: {without}", f"install nvcc and run {versions.INSTALL}")


def machine(report: Findings) -> None:
    report.section("machine")
    report.doing("asking for GPUs")
    model = _first_match("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.ok("CPU", f"{model}, {cores} of {os.cpu_count()} cores for this process")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address.startswith("127.") or address == "no address":
        report.note(
            "host name",
            f"{name} resolves to {address}: other hosts cannot reach gloo there",
            "with several hosts set GLOO_SOCKET_IFNAME to the interface between them (docs/use/clusters.md)",
        )
    else:
        report.ok("host name", f"{name}, {address}")
    gpus(report)


def gpus(report: Findings) -> None:
    import torch

    from flash_allreduce_plugin.collectives import two_shot

    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if not torch.cuda.is_available():
        if not present:
            report.ok("GPUs", "none")
        elif torch.version.cuda is None:
            report.problem("GPUs", f"{present}, but torch is built without CUDA", "install a CUDA build of torch")
        else:
            report.problem("GPUs", f"{present}, but torch cannot use them", "compare the driver with torch's CUDA")
        return
    count = torch.cuda.device_count()
    kinds: Counter[str] = Counter()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        kinds[f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)"] += 1
    report.ok("GPUs", ", ".join(f"{number} x {kind}" for kind, number in kinds.items()))
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    cut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not pairs:
        report.ok("peer access", "one GPU")
    elif not cut:
        report.ok("peer access", "between all GPUs")
    else:
        shown = ", ".join(f"{one}-{other}" for one, other in cut[:8]) + (", ..." if len(cut) > 8 else "")
        report.note("peer access", f"missing for {len(cut)} of {len(pairs)} pairs: {shown}")
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
        limit = os.environ.get(two_shot.LIMIT) or "0"
        used = two_shot.limits_of_environment().fused
    except Exception as error:
        report.note("symmetric memory", described(error))
    else:
        taken = "small all-reduces take the two-shot kernel" if used else "the two-shot kernel is off"
        report.ok("symmetric memory", f"torch has it; {two_shot.LIMIT} is {limit}: {taken}")


def entry_point(report: Findings) -> None:
    """Check that flags and sections work in unmodified scripts. torch is imported, so the entry point has run."""
    report.section("autoload")
    points = [point for point in importlib.metadata.entry_points(group="torch.backends")]
    registered = any(point.value == "flash_allreduce_plugin.autoload:load" for point in points)
    instead = "`python -m flash_allreduce_plugin.megatron` and `import flash_allreduce_plugin.deepspeed.attach` work"
    waiting = any(isinstance(finder, autoload.AfterImport) for finder in sys.meta_path)
    off = [environment.AUTOLOAD] if os.environ.get(environment.AUTOLOAD, "").strip().lower() in _OFF else []
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":  # as torch reads it
        off.append("TORCH_DEVICE_BACKEND_AUTOLOAD")
    if off:
        report.note("entry point", f"off: {off[0]}={os.environ[off[0]]}; {instead}", f"unset {off[0]} to switch it on")
    elif not registered:
        report.note("entry point", f"not registered, the package is not installed; {instead}", versions.INSTALL)
    elif waiting:
        report.ok("entry point", "registered; torch has called it")
    else:
        report.problem(
            "entry point",
            "registered, but torch has not called it, or it failed",
            "python -c 'import torch' shows why; remove other copies of the package from the path",
        )


def variables(report: Findings) -> None:
    """Check that FLASH_ALLREDUCE_* variables parse, and show the relevant variables of other projects."""
    from flash_allreduce_plugin.collectives import two_shot
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.errors import ConfigError

    report.section("environment")
    lines: list[str] = []
    config = None
    try:
        config = FlashConfig.from_env()
    except ConfigError as error:
        lines += str(error).splitlines()
    on = []
    for switch in (environment.DISABLE, environment.NVLS, environment.REFERENCE):
        try:
            on += [switch] if environment.is_on(switch) else []
        except ConfigError as error:
            lines.append(str(error))
    try:
        two_shot.limits_of_environment()
    except ConfigError as error:
        lines.append(str(error))
    seen = sorted(variable for variable in os.environ if variable.startswith(environment.PREFIX))
    for variable in seen:
        wrong = [line for line in lines if line.startswith(f"{variable}=")]
        if wrong:
            report.problem(variable, wrong[0], f"correct it, or unset {variable}, on every rank")
            lines = [line for line in lines if line not in wrong]
        elif variable == environment.DISABLE and variable in on:
            report.note(variable, f"{os.environ[variable]!r}: every call runs in full precision", f"unset {variable}")
        else:
            report.ok(variable, repr(os.environ[variable]))
    for line in lines:  # about two variables each
        report.problem("configuration", line, "correct the variables above, on every rank")
    if not seen:
        report.ok(f"{environment.PREFIX}*", "none set")
    if config is not None:
        defaults = FlashConfig().to_dict()
        changed = {key: value for key, value in config.to_dict().items() if value != defaults[key]}
        text = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        report.ok("configuration", f"the defaults except {text}" if text else "the defaults")
    others = sorted(variable for variable in os.environ if _SHOWN.fullmatch(variable))
    report.ok("other variables", " ".join(f"{name}={os.environ[name]}" for name in others) or "none")


def _first_match(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1].strip() if match else None
