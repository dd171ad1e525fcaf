"""Build, test and measure everything that needs a GPU, on a bare machine without a network.

    python3 -m scripts.gpu_check

On one GPU the kernels and steps of the DDP example; on two to eight also NCCL's all-reduce against ours,
and steps of the other examples.

    python -m scripts.gpu_check --out FOLDER [--quick] [--slow] [--only STEP ...] [--wheels FOLDER]

It makes no virtual environment: it uses the python that runs it, with the CUDA build of torch that is installed there,
nvcc and a C++ compiler. Besides torch the package needs pydantic, and the tests pytest, pytest-timeout, hypothesis and
numpy. Where one of them is missing and there is no network, bring it as wheels in a folder and name it with --wheels:

    pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 -d wheels pydantic

Each step is a process of its own with a time limit, and one that fails does not keep the others from running. The
folder has gpu_check.json (versions, each step's status, seconds and figures), report.txt (a page of it) and log.txt
(everything the steps printed), written after every step. Exit status 1 if a step failed. The first two may be sent to
the project: they have no names of hosts, users or folders.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("numpy", "pydantic", "pytest", "pytest_timeout", "hypothesis")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
TAIL = 25  # lines of a failed step that are printed

DEVICE = """
import json, torch
import flash_allreduce_plugin.codec.format
about = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": []}
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    about["devices"].append({"name": p.name, "capability": f"{p.major}.{p.minor}", "memory": p.total_memory,
                             "multiprocessors": p.multi_processor_count, "L2": getattr(p, "L2_cache_size", None)})
print("ABOUT " + json.dumps(about))
assert about["devices"], "torch finds no CUDA device"
"""
LOADED = """
from flash_allreduce_plugin.codec import ops
assert ops.unavailable is None, ops.unavailable
reason = getattr(ops, "cuda_unavailable", "this package has no CUDA operators")
assert reason is None, reason
"""


@dataclass
class Outcome:
    """status: ok, failed, timed out or left out."""

    status: str
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.status in ("ok", "left out")


@dataclass
class Step:
    """A step. command: of the process. read: returns the figures in its output, and the problem with them or "".

    absent: why the step is left out before it begins, or "".
    """

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    read: Callable[[str], tuple[dict[str, Any], str]] = lambda output: ({}, "")
    absent: str = ""


class Check:
    """The steps that ran, and the folder of their results."""

    def __init__(self, out: Path, budget: float) -> None:
        self.out = out
        self.end = time.monotonic() + budget
        self.outcomes: dict[str, Outcome] = {}
        self.about: dict[str, Any] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "arguments": sys.argv[1:],
        }
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "log.txt"
        self.log.write_text("")

    def run(self, step: Step, environment: dict[str, str]) -> Outcome:
        print(f"{step.name} ...", flush=True)
        outcome = self._run(step, environment)
        self.outcomes[step.name] = outcome
        print(f"{step.name}: {outcome.status} {outcome.seconds:.1f} s {outcome.why}", flush=True)
        self.save()
        return outcome

    def _run(self, step: Step, environment: dict[str, str]) -> Outcome:
        if step.absent:
            return Outcome("left out", step.absent)
        limit = min(step.seconds, self.end - time.monotonic())
        if limit <= 0:
            return Outcome("timed out", "no time was left for it")
        start = time.monotonic()
        code, output = run_process(step.command, limit, {**environment, **step.environment})
        seconds = time.monotonic() - start
        with self.log.open("a") as log:
            log.write(f"==== {step.name}: {' '.join(step.command)[:200]}\n{output}\n==== exit status {code}\n\n")
        tail = [line[:200] for line in output.splitlines() if line.strip()][-TAIL:]
        try:
            figures, wrong = step.read(output)
        except NotHere as reason:
            return Outcome("left out", str(reason), seconds, {}, tail)
        except Exception as error:  # a step that died in the middle has no figures
            figures, wrong = {}, "" if code else f"its figures could not be read: {error}"
        if code is None:
            return Outcome("timed out", f"after {limit:.0f} s", seconds, figures, tail)
        if code or wrong:
            return Outcome("failed", wrong or f"exit status {code}", seconds, figures, tail)
        return Outcome("ok", "", seconds, figures)

    def save(self) -> None:
        steps = {
            name: {"status": o.status, "why": o.why, "seconds": round(o.seconds, 1), "figures": o.figures}
            for name, o in self.outcomes.items()
        }
        text = json.dumps({"about": self.about, "steps": steps}, indent=2) + "\n"
        (self.out / "gpu_check.json").write_text(text)
        (self.out / "report.txt").write_text(self.page())

    def page(self) -> str:
        """Return the summary: the machine, each step, and the figures of the measuring steps."""
        devices = [f"{d['name']} ({d['capability']})" for d in self.about.get("devices", [])]
        about = ", ".join(f"{key} {self.about.get(key)}" for key in ("python", "torch", "cuda"))
        lines = [f"gpu-check of {self.about['date']}: {', '.join(devices) or 'no GPU'}; {about}", ""]
        for name, outcome in self.outcomes.items():
            figures = ", ".join(f"{k} {v}" for k, v in outcome.figures.items() if isinstance(v, (int, float, str)))
            lines.append(f"{name:32}{outcome.status:10}{outcome.seconds:6.0f} s  {outcome.why or figures}"[:160])
            lines += [f"    {row}" for row in outcome.figures.get("page", ())]
        return "\n".join(lines) + "\n"

    def report(self) -> int:
        """Print the failures, then the table. Return the exit status."""
        for name, outcome in self.outcomes.items():
            if not outcome.is_good:
                print(f"\n---- {name}: {outcome.status}, {outcome.why}. The end of its output:")
                print("\n".join(outcome.tail))
        print(f"\n{'step':34}{'status':10}{'s':>7}  figures")
        for name, outcome in self.outcomes.items():
            figures = ", ".join(f"{k} {v}" for k, v in outcome.figures.items() if isinstance(v, (int, float, str)))
            print(f"{name:34}{outcome.status:10}{outcome.seconds:7.1f}  {outcome.why or figures}"[:160])
        bad = [name for name, outcome in self.outcomes.items() if not outcome.is_good]
        print(f"{len(bad)} of {len(self.outcomes)} steps failed" + (f": {', '.join(bad)}" if bad else ""))
        return 1 if bad else 0


def run_process(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[int | None, str]:
    """Exit status, None where time was up, and everything printed. All that it started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return 127, str(error)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def read_about(output: str) -> tuple[dict[str, Any], str]:
    line = next(line for line in output.splitlines() if line.startswith("ABOUT "))
    return json.loads(line.removeprefix("ABOUT ")), ""


def read_tests(report: Path) -> tuple[dict[str, Any], str]:
    """Counts out of pytest's XML; a file in which nothing passed is wrong."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    names, reasons = [], set()
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                names.append(str(case.get("name")))
            skipped = case.find("skipped")
            if skipped is not None:
                reasons.add(str(skipped.get("message")))
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    figures = {"passed": passed, "skipped": counts["skipped"], "failed": names, "reasons": sorted(reasons)}
    if names or counts["failures"] or counts["errors"]:
        return figures, f"{len(names)} failed: {', '.join(names[:4])}"
    return figures, "" if passed else f"nothing passed: {'; '.join(sorted(reasons)) or 'no tests'}"


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    results = json.loads(path.read_text())
    return results if isinstance(results, dict) else {"results": results}, ""


def read_bench(path: Path) -> tuple[dict[str, Any], str]:
    """NCCL's all-reduce and ours: a row a size, ms and how many times as fast."""
    sizes: dict[int, list[str]] = {}
    for row in json.loads(path.read_text())["rows"]:
        said = f"{row['variant']} {1e3 * row['seconds']:.3f} ms, {row['speedup']:.2f} x"
        sizes.setdefault(row["size"], []).append(said)
    return {"page": [f"{size:>12,} bytes: {'; '.join(said)}" for size, said in sizes.items()]}, ""


def read_codec(path: Path) -> tuple[dict[str, Any], str]:
    """The kernels' times; of 64 MiB a row for each form, with the shares of a copy's speed."""
    results = json.loads(path.read_text())
    page = [
        f"{row['dtype']} {row['bits']} bits g{row['group_size']:<5}{row['options']:17}"
        + ", ".join(f"{kernel} {us:.0f} us ({row['share'][kernel]:.2f})" for kernel, us in row["us"].items())
        for row in results["rows"]
        if row["MiB"] == 64
    ]
    return {**results, "page": page}, ""


def read_training(output: str) -> tuple[dict[str, Any], str]:
    """The losses of an example, which must fall, and how many calls were quantized."""
    losses = [float(found) for found in re.findall(r"^step +\d+:? +loss (\d+\.\d+)", output, re.MULTILINE)]
    if len(losses) < 2:
        return {}, "it printed no losses"
    counts = re.findall(r"(\d+) of \d+ calls quantized|\d+ calls, (\d+) quantized", output)
    figures = {"first loss": losses[0], "last loss": losses[-1], "calls quantized": sum(int(a or b) for a, b in counts)}
    return figures, "" if losses[-1] < losses[0] else f"the loss does not fall: {losses[0]} to {losses[-1]}"


class NotHere(Exception):
    """A step turns out not to work on this machine, which is not the project's doing."""


def read_sanitizer(output: str) -> tuple[dict[str, Any], str]:
    """Return pytest's summary line. The exit status has the outcome."""
    if "Device not supported" in output:
        raise NotHere("compute-sanitizer does not support this device")
    lines = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    if not lines:
        return {}, "it printed no summary"
    clean = "ERROR SUMMARY: 0 errors" in lines[-1] or "0 hazards displayed" in lines[-1]
    return {"summary": lines[-1]}, "" if clean else lines[-1]


def training_steps(gpus: int, work: Path) -> list[Step]:
    """Some steps of the examples, in full precision and quantized, on all GPUs; two ranks of DDP share the only one."""
    ranks = max(2, min(gpus, 8))
    one = "" if gpus > 1 else "there is one GPU, and this takes a GPU a rank"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    data = work / "stdlib"
    prepare = [sys.executable, "examples/megatron/prepare_data.py", "--output-prefix", str(data)]
    megatron = [*run, "examples/megatron/pretrain_gpt_small.py", "--data-path", str(data)]
    megatron += ["--data-cache-path", str(work / "cache"), "--tensor-model-parallel-size", str(ranks), "--bf16"]
    megatron += ["--micro-batch-size", "8"]  # activations of 1 MiB: smaller ones are sent in full precision
    bits = ["--flash-allreduce", "--flash-allreduce-bits", "8", "--flash-allreduce-backward-bits", "8"]
    deepspeed = [*run, "examples/deepspeed/train.py", "--config", "examples/deepspeed/ds_config.json"]

    def missing(module: str) -> str:
        return one or ("" if importlib.util.find_spec(module) else f"not installed: {module}")

    def quantized(output: str) -> tuple[dict[str, Any], str]:
        figures, wrong = read_training(output)
        return figures, wrong or ("" if figures["calls quantized"] else "nothing was quantized")

    ddp, plain = [*run, "examples/ddp/train.py"], read_training
    return [
        Step("train ddp, full precision", ddp, 90, {}, plain),
        Step("train ddp, 8 bits", [*ddp, "--bits", "8"], 90, {}, quantized),
        Step("train deepspeed", deepspeed, 120, {}, quantized, missing("deepspeed")),
        Step("prepare megatron", prepare, 60, {}, absent=missing("megatron")),
        Step("train megatron, full precision", megatron, 120, {}, plain, missing("megatron")),
        Step("train megatron, 8 bits", [*megatron, *bits], 120, {}, quantized, missing("megatron")),
    ]


def steps(arguments: argparse.Namespace, work: Path, gpus: int = 1) -> list[Step]:
    """All of them, in the order in which they run. gpus: of this machine."""
    python, quick = sys.executable, arguments.quick
    every = {"GPU_TESTS_EVERY": "5" if quick else "1"}
    found: list[Step] = [
        Step("build", [python, "setup.py", "build_ext", "--inplace"], 400, {"FLASH_ALLREDUCE_BUILD": "cuda"}),
        Step("load", [python, "-c", LOADED], 60),
    ]
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        report = work / f"{path.stem}.xml"
        command = [python, "-m", "pytest", str(path.relative_to(ROOT)), "-p", "no:cacheprovider", "--tb=short", "-v"]
        command += [f"--junitxml={report}", *([] if arguments.slow else ["-m", "not slow"])]
        if path.stem == "test_gpu_codec" and importlib.util.find_spec("xdist"):
            command += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]  # most of it is the CPU's codec
        command += ["-k", "not inductor"] if quick else []
        limit = 600 if arguments.slow else 90 if quick else 150
        found.append(Step(path.stem, command, limit, every, lambda output, report=report: read_tests(report)))
    for path in sorted((ROOT / "lab" / "benchmarks").glob("cuda_*.py")):
        results = work / f"{path.stem}.json"
        command = [python, "-m", f"lab.benchmarks.{path.stem}", "--json", str(results), *(["--quick"] if quick else [])]
        read = read_codec if path.stem == "cuda_codec" else read_json
        found.append(Step(path.stem, command, 180, {}, lambda output, read=read, results=results: read(results)))
    kernels, cost = work / "cuda_codec.json", work / "cost.json"
    command = [python, "-m", "lab.planning.cost_estimate", "--kernels", str(kernels), "--json", str(cost)]
    found.append(Step("cost_estimate", command, 60, {}, lambda output: read_json(cost)))
    speeds = work / "nccl.json"
    bench = [python, "-m", "flash_allreduce_plugin", "bench", "--device", "cuda", "--ranks", str(min(gpus, 8))]
    bench += ["-d", "bfloat16", "-b", "64K", "-e", "16M" if quick else "256M", "-f", "4", "--rounds", "5"]
    read_speeds = lambda output: read_bench(speeds)  # noqa: E731
    found.append(
        Step(
            "NCCL and ours",
            [*bench, "--json", str(speeds)],
            180,
            {},
            read_speeds,
            "" if gpus > 1 else "there is one GPU",
        )
    )
    found += training_steps(gpus, work)
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    absent = "--quick" if quick else "" if tool else "there is no compute-sanitizer"
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor an allocation of its own
    for name in SANITIZERS:
        command = [tool or "", "--tool", name, "--report-api-errors", "no", "--error-exitcode", "9"]
        command += [python, "-m", "tests.gpu.small_cases"]
        found.append(Step(f"sanitizer {name}", command, 90, alone, read_sanitizer, absent))
    return found


def missing_modules(python: str, environment: dict[str, str]) -> list[str]:
    code = f"import importlib.util as u; print(*[n for n in {NEEDED!r} if u.find_spec(n) is None])"
    _, output = run_process([python, "-c", code], 60, environment)
    return output.split()


def environment_of(site: Path | None) -> dict[str, str]:
    """Return this process's environment, without variables that would change the test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASH_ALLREDUCE_", "GPU_TESTS_"))}
    path = [str(ROOT), *([str(site)] if site else []), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        # The ninja in the folder of this python: without ninja files are compiled one by one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "FLASH_ALLREDUCE_AUTOLOAD": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # The ranks are all here, and the host's name need not resolve on a machine without a network.
        "GLOO_SOCKET_IFNAME": kept.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": kept.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"))
    parser.add_argument(
        "--quick", action="store_true", help="under 3 minutes: fewer cases and sizes, no inductor, no compute-sanitizer"
    )
    parser.add_argument("--slow", action="store_true", help="also what takes minutes and 20 GB of the GPU's memory")
    parser.add_argument("--only", nargs="+", default=[], help="steps whose names begin with one of these")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of packages that are missing here")
    parser.add_argument("--budget", type=float, help="seconds for everything (default 900, quick 180, slow 1800)")
    arguments = parser.parse_args()
    budget = arguments.budget or (1800 if arguments.slow else 180 if arguments.quick else 900)
    check = Check(arguments.out.resolve(), budget)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work, site = Path(folder), None
        if arguments.wheels:
            site = work / "site"
            wheels = sorted(map(str, arguments.wheels.resolve().glob("*.whl")))
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--target",
                str(site),
            ]
            check.run(Step("wheels", [*install, *wheels], 60), environment_of(None))
        environment = environment_of(site)
        check.about["missing"] = missing_modules(sys.executable, environment)
        if check.about["missing"]:
            print(f"missing here: {', '.join(check.about['missing'])}; see --help for how to bring them", flush=True)
        device = check.run(Step("device", [sys.executable, "-c", DEVICE], 60, {}, read_about), environment)
        check.about.update(device.figures)
        devices = device.figures.get("devices") or [{}]
        if "capability" in devices[0]:
            # For this GPU alone: the other architectures are compiled where there is no GPU.
            environment.setdefault("TORCH_CUDA_ARCH_LIST", devices[0]["capability"])
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        check.about["nvcc"] = run_process([nvcc, "--version"], 30, environment)[1].strip().splitlines()[-1:]
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        check.about["nvidia-smi"] = run_process(smi, 30, environment)[1].strip().splitlines()[:8]
        for step in steps(arguments, work, len(device.figures.get("devices", ()))):
            if not arguments.only or step.name.startswith(tuple(arguments.only)):
                check.run(step, environment)
    return check.report()


if __name__ == "__main__":
    sys.exit(main())
