"""Build a wheel with the CUDA library, and import it where there is no compiler. Needs nvcc, and no GPU.

    nox -s package-cuda                  # ten minutes, 5 GB to download
    nox -s package-cuda -- --architectures "8.0;9.0;10.0+PTX" --python 3.12 --torch 2.11.0

1. The sdist is made, and compiled in an empty environment that has a CUDA build of torch: the one that the package
   index has for that Python and release, or the one of --site.
2. The contents of the wheel are checked, as by `nox -s package`.
3. It is installed into another environment, without a compiler on its PATH. There doctor must find no problem and load
   the CUDA library, two ranks must end an all-reduce with the same bits, and every CUDA operator must be registered and
   refuse CPU tensors in a sentence.

The results of kernels are not tested here, but by `nox -s check-ptx`, and by `python -m scripts.gpu_check` on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from scripts import check_package
from scripts.environments import CommandFailed, Environment
from scripts.package import ROOT, build_sdist, build_wheel, refuse, self_test
from scripts.support_matrix import interpreter

OPERATORS = """
import sys, torch
import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops
assert torch.version.cuda is not None, f"torch {torch.__version__} is built without CUDA"
assert ops.cuda_unavailable is None, ops.cuda_unavailable
registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
missing = [name for name in sys.argv[1:] if f"flash_allreduce::{name}" not in registered]
assert not missing, f"no CUDA operator {missing}"

def refused(call):
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("a call without a GPU was not refused")

on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
x, payload = torch.zeros(1, 256), torch.zeros(1, 264, dtype=torch.uint8)
encode = torch.ops.flash_allreduce.encode.default
said = refused(lambda: encode.redispatch(on_cuda, x, payload, 8, 128, 0, 0, 0, 0))
assert "expected one GPU" in said, said
print(f"torch {torch.__version__}: {len(sys.argv) - 1} CUDA operators; the library on CPU tensors: {said}")
if not torch.cuda.is_available():
    said = refused(lambda: fap.encode(torch.zeros(256, device="cuda"), fap.FlashConfig()))
    assert "NVIDIA" in said or "CUDA" in said, said
    print(f"a CUDA tensor: {said}")
"""


def operators() -> list[str]:
    """The names of those that csrc/cuda registers for CUDA tensors."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")))
    blocks = re.findall(r"STABLE_TORCH_LIBRARY_IMPL\(\w+, CUDA, m\) \{(.*?)\n\}", sources, re.DOTALL)
    return re.findall(r'm\.impl\("(\w+)"', "".join(blocks))


def package(out: Path, work: Path, python: str, torch: str, site: Path | None, architectures: str) -> None:
    begin = time.monotonic()

    def step(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("flash_allreduce_plugin-*"):
        old.unlink()
    builder = Environment(work / "build", python)
    if site is None:
        builder.install("--no-cache-dir", f"torch=={torch}")
        site = builder.site
    else:
        _lend(builder, site)
    builder.install("setuptools>=77", "ninja")
    step(f"torch {builder.python('import torch; print(torch.__version__)').split()[-1]}: there")
    variables = {"FLASH_ALLREDUCE_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": architectures}
    variables |= {name: os.environ[name] for name in ("NVCC", "CUDA_HOME", "MAX_JOBS") if name in os.environ}
    sdist = build_sdist(out)
    _, wheel = build_wheel(sdist, builder, out, variables)
    sdist.unlink()  # `nox -s package` has it
    step(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB for {architectures}: made")
    refuse(wheel, check_package.wheel_problems(wheel, cuda=True))
    user = Environment(work / "wheel", python, compiler=False)
    _lend(user, site)
    printed = self_test(user, wheel, wheel.name)
    if not re.search(r"_cuda \(GPU\)\W+loaded", printed):
        raise CommandFailed(f"{printed}\n{wheel.name}: flash-allreduce doctor does not load the CUDA library")
    step(user.python(OPERATORS, *operators()).strip())


def _lend(environment: Environment, site: Path) -> None:
    """Make another site-packages importable too."""
    (environment.site / "site.pth").write_text(f"{site}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "cuda", help="default: dist/cuda")
    parser.add_argument("--python", default="3.12", help="its version; default: 3.12")
    parser.add_argument("--torch", default="2.11.0", help="default: 2.11.0, the oldest that the binary serves")
    parser.add_argument("--site", type=Path, help="a site-packages that has a CUDA build of torch for this Python")
    parser.add_argument("--architectures", default="9.0", help='as TORCH_CUDA_ARCH_LIST; default: "9.0"')
    parser.add_argument("--keep", type=Path, help="make the environments in this folder, and leave them there")
    arguments = parser.parse_args()
    python = interpreter(arguments.python)
    if python is None:
        parser.error(f"--python {arguments.python}: there is no such Python here")
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="package-cuda-") as scratch:
        work, site = (arguments.keep or Path(scratch)).resolve(), arguments.site and arguments.site.resolve()
        try:
            package(arguments.out.resolve(), work, python, arguments.torch, site, arguments.architectures)
        except CommandFailed as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
