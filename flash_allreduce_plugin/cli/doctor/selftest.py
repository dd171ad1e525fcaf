"""Checks of `flash-allreduce doctor`: the codec against its specification, and an all-reduce between real ranks."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.cli.doctor.child import OK, PROBLEM, Child, Finding, children

if TYPE_CHECKING:
    from torch import Tensor

    from flash_allreduce_plugin.cli.doctor.child import Findings

SECTION = "self-test"
WIDTHS = (8, 4, 2)
# dB, for Gaussian values in groups of 128: one dB below the codec's (docs/trust/numerics.md), and the loss of an
# all-reduce by its second rounding.
LEAST_SQNR = {8: 43.4, 4: 18.9, 2: 4.9}
SECOND_ROUNDING = 3.5
NUMEL = 100_003  # not a whole number of groups
REPORT_IT = "report it with this text, as a bug of this package"


def codec(report: Findings) -> None:
    """Compare encode and decode, on the CPU and on a GPU if there is one, with the codec in plain PyTorch."""
    report.section(SECTION)
    report.doing("encoding and decoding")
    import torch

    from flash_allreduce_plugin.api import tensors
    from flash_allreduce_plugin.codec import reference, rows
    from flash_allreduce_plugin.config import FlashConfig

    torch.manual_seed(1)
    values = torch.randn(NUMEL)
    options: list[dict[str, Any]] = [
        {},
        {"compact": True, "range": "mse"},
        {"codebook": True, "range": "mse"},
        {"codebook": True, "spike_reserving": True},
        {"hadamard": True},
        {"spike_reserving": True},
    ]
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        wrong, errors = [], {}
        for dtype in (torch.float32, torch.bfloat16):
            tensor = values.to(dtype)
            for width in WIDTHS:
                for option in options:
                    config = FlashConfig.from_dict({"bits": width, **option})
                    payload = tensors.encode(tensor.to(device), config)
                    decoded = tensors.decode(payload, tensor.shape, dtype, config).cpu()
                    wire = config.format()
                    expected = torch.empty(1, payload.numel(), dtype=torch.uint8)
                    reference.encode(tensor.view(1, -1), expected, wire)
                    output = torch.empty(1, NUMEL, dtype=dtype)
                    reference.decode(expected, output, wire)
                    if not torch.equal(payload.cpu(), expected[0]) or not torch.equal(decoded, output[0]):
                        wrong.append(
                            f"{width} bits of {str(dtype).removeprefix('torch.')} with {option or 'no option'}"
                        )
                    if not option and dtype == torch.float32:
                        errors[width] = sqnr_db(values, decoded)
        plain = rows.use_reference(device)
        name = f"codec on {device}"
        shown = ", ".join(f"{width} bits {error:.1f} dB" for width, error in errors.items())
        low = [width for width, error in errors.items() if error < LEAST_SQNR[width]]
        if wrong:
            report.problem(name, f"bits differ from those of the codec in plain PyTorch: {', '.join(wrong)}", REPORT_IT)
        elif low:
            report.problem(name, f"{shown}; expected at least {[LEAST_SQNR[width] for width in low]} dB", REPORT_IT)
        elif plain:
            report.ok(name, f"{shown}; this is the codec in plain PyTorch, nothing was compared")
        else:
            report.ok(name, f"{shown}; the compiled codec equals plain PyTorch bit for bit")


def sqnr_db(exact: Tensor, found: Tensor) -> float:
    """Return the SQNR in dB; inf for equal tensors."""
    signal, noise = exact.double().square().sum(), (found.double() - exact.double()).square().sum()
    return math.inf if noise == 0 else float(10 * (signal / noise).log10())


def all_reduce(folder: Path, ranks: int, seconds: float) -> list[Finding]:
    """Start ranks on gloo, and compare their results. A failing or silent rank is a finding, in bounded time."""
    plain = plain_environment()
    name = f"all_reduce, {ranks} ranks"
    store = str(folder / "store")
    check = f"{__name__}:one_rank"
    started: list[Child] = []
    with children(started):
        for number in range(ranks):
            variables = {"RANK": str(number), "WORLD_SIZE": str(ranks), **plain}
            child = Child(
                folder, f"rank{number}", check, str(number), str(ranks), store, str(seconds), environment=variables
            )
            started.append(child)
        failure = _first_failure(started, seconds)
        if failure is not None:
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            chosen = f" (GLOO_SOCKET_IFNAME is {interface})" if interface else ""
            remedy = f"check that gloo's interface exists{chosen} and that no firewall blocks it"
            return [Finding(SECTION, name, PROBLEM, failure, f"{remedy}; on a slow machine raise --timeout")]
        answers = [child.results()[0] for child in started]
    return [_compared(name, width, answers) for width in map(str, WIDTHS)]


def _first_failure(ranks: list[Child], seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    while True:
        running = any(child.running for child in ranks)
        for number, child in enumerate(ranks):
            failure = child.failure_so_far()
            if failure is not None:
                return f"rank {number} {failure}"
        if not running or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    waiting = [f"rank {number} ({child.doing()})" for number, child in enumerate(ranks) if child.running]
    if waiting:
        return f"not finished after {seconds:g} s: {', '.join(waiting)}"
    return None


def _compared(name: str, width: str, answers: list[dict[str, dict[str, object]]]) -> Finding:
    digests = [answer[width]["digest"] for answer in answers]
    error = min(float(str(answer[width]["sqnr_db"])) for answer in answers)
    quantized = all(answer[width]["quantized"] for answer in answers)
    name, shown = f"{name}, {width} bits", f"{error:.1f} dB"
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        return Finding(SECTION, name, PROBLEM, f"the result of rank {other} differs from rank 0's ({shown})", REPORT_IT)
    if not quantized:
        return Finding(SECTION, name, PROBLEM, "the call was not quantized", REPORT_IT)
    least = LEAST_SQNR[int(width)] - SECOND_ROUNDING
    if error < least:
        return Finding(SECTION, name, PROBLEM, f"{shown}; expected at least {least} dB", REPORT_IT)
    return Finding(SECTION, name, OK, f"bit for bit equal on all ranks, {shown}")


def plain_environment() -> dict[str, str | None]:
    """Return the changes of a child's environment: without the package's variables, which would change the test.

    The variable of the reference codec stays if it parses. The ranks use the loopback interface, so that the host name
    need not resolve.
    """

    found: dict[str, str | None] = {name: None for name in os.environ if name.startswith(environment.PREFIX)}
    try:
        environment.is_on(environment.REFERENCE)
        found.pop(environment.REFERENCE, None)
    except ValueError:
        pass
    if any(name == "lo" for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return found


def one_rank(report: Findings, rank: str, world_size: str, store: str, seconds: str) -> None:
    """Run one rank: all-reduces at each width. The result is {width: {digest, sqnr_db, quantized}}."""
    report.doing("importing torch")
    import torch
    import torch.distributed as dist

    from flash_allreduce_plugin.api import reductions
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.telemetry import counters

    report.doing("joining the group")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(seconds))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size), timeout=timeout
    )
    inputs = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(int(world_size))]
    exact = torch.stack(inputs).double().sum(0)
    answers = {}
    for width in WIDTHS:
        report.doing(f"reducing at {width} bits")
        tensor = inputs[int(rank)].clone()
        counters.reset_stats()
        reductions.all_reduce(tensor, config=FlashConfig(bits=width, min_bytes=0))
        answers[str(width)] = {
            "digest": hashlib.sha256(bytes(tensor.view(torch.uint8).tolist())).hexdigest(),
            "sqnr_db": sqnr_db(exact, tensor),
            "quantized": counters.stats()["quantized"] == 1,
        }
    report.doing("leaving the group")
    dist.barrier()  # gloo's threads of one rank may still be sending to another
    report.result(**answers)
