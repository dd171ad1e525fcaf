"""The doctor's report of a healthy installation, and of installations with real faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

import flash_allreduce_plugin
from flash_allreduce_plugin.api import tensors
from flash_allreduce_plugin.cli.doctor import command as doctor
from flash_allreduce_plugin.cli.doctor import environment as doctor_environment
from flash_allreduce_plugin.cli.doctor import frameworks as doctor_frameworks
from flash_allreduce_plugin.cli.doctor import selftest as doctor_selftest
from flash_allreduce_plugin.cli.doctor import versions as doctor_versions
from flash_allreduce_plugin.cli.doctor.child import Child, Findings
from flash_allreduce_plugin.cli.main import app
from flash_allreduce_plugin.codec import ops
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.patching import Seam

ROOT = Path(__file__).parents[2]
PACKAGE = Path(flash_allreduce_plugin.__file__).parent
STUBS = [ROOT / "tests" / "integrations" / "apex_stub", ROOT / "tests" / "integrations" / "megatron" / "te_stub"]
HANGS = 'import os, pathlib, time\npathlib.Path(os.environ["HANGING"]).write_text(str(os.getpid()))\ntime.sleep(600)\n'


def distribution(folder: Path, name: str, version: str, *more: str) -> None:
    """Write the metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *more]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def installed(folder: Path) -> None:
    """Install this package with pyproject.toml's requirements: an editable installation may have older ones."""
    text = (ROOT / "pyproject.toml").read_text()
    [version] = re.findall(r'^version = "(.*)"', text, flags=re.MULTILINE)
    windows = re.findall(r'"((?:torch|megatron-core|deepspeed)[<>=][^"]*)"', text)
    requires = [f"Requires-Dist: {window}" for window in windows]
    distribution(folder, "flash-allreduce-plugin", version, "Requires-Python: >=3.10", *requires)
    points = "[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n"
    (folder / f"flash_allreduce_plugin-{version}.dist-info" / "entry_points.txt").write_text(points)


def module(folder: Path, name: str, source: str) -> None:
    path = folder.joinpath(*name.split(".")) / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)


def environment(*path: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ALLREDUCE_")}
    more = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**kept, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT), *more]), **variables}


def run(folder: Path, *path: Path, **variables: str) -> tuple[int, str, dict[tuple[str, str], dict[str, str]]]:
    """Return exit status, text, and findings by section and name."""
    command = [sys.executable, "-m", "flash_allreduce_plugin", "doctor", "--json", "found.json"]
    done = subprocess.run(
        command, cwd=folder, env=environment(*path, **variables), capture_output=True, text=True, timeout=200
    )
    assert all(line.startswith("# ") for line in done.stderr.splitlines()), done.stderr  # progress, and nothing else
    assert "# importing torch" in done.stderr and "#" not in done.stdout
    found = json.loads((folder / "found.json").read_text())["findings"]
    return done.returncode, done.stdout, {(line["section"], line["name"]): line for line in found}


def test_as_json_stdout_has_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_allreduce_plugin", "doctor", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)
    assert done.returncode == (found["problems"] > 0) and "# reducing over 2 ranks" in done.stderr
    assert "self-test" in {line["section"] for line in found["findings"]} and "\nself-test\n" in done.stderr


def by_level(found: dict[tuple[str, str], dict[str, str]], level: str) -> set[tuple[str, str]]:
    return {key for key, line in found.items() if line["level"] == level}


def test_a_healthy_installation(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    installed(tmp_path / "site")
    status, text, found = run(tmp_path, tmp_path / "site", *STUBS, FLASH_ALLREDUCE_BITS="4")
    assert status == 0 and not by_level(found, "problem"), text
    assert found["libraries", "_C (CPU)"]["text"].startswith(f"loaded; instruction set {ops.cpu_capability()} ")
    assert found["versions", "torch"]["text"].endswith(">=2.11)")
    assert found["versions", "megatron-core"]["level"] == "ok"
    assert found["versions", "deepspeed"]["text"].endswith(" (supported: >=0.17.6,<0.20)")
    assert found["autoload", "entry point"]["text"] == "registered; torch has called it"
    assert found["environment", "FLASH_ALLREDUCE_BITS"]["level"] == "ok"
    assert found["environment", "configuration"]["text"] == "the defaults except bits=4"
    seams = {name for section, name in found if section == "Megatron seams"}
    assert seams == {seam.id for seam in megatron.seams()}
    assert {"apex.gradients", "apex.reducer"} == {name for section, name in found if section == "apex seams"}
    assert len([name for section, name in found if section == "Transformer Engine seams"]) == 21
    assert "the compiled codec equals plain PyTorch bit for bit" in found["self-test", "codec on cpu"]["text"]
    reduced = [line["text"] for (_, name), line in found.items() if name.startswith("all_reduce, 2 ranks, ")]
    assert len(reduced) == 3 and all(line.startswith("bit for bit equal on all ranks, ") for line in reduced)
    # To be pasted: plain, and narrow but for paths.
    assert text.isascii() and "\033" not in text
    assert all(len(line) <= doctor.WIDTH or len(line.split()) == 1 for line in text.splitlines())
    for (section, name), line in found.items():
        assert f"\n{section}\n" in text and name in text and line["text"].split()[0] in text


def test_each_broken_part_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    site = tmp_path / "site"
    installed(site)
    distribution(site, "megatron-core", "0.12.1")
    module(site, "megatron.core", "raise OSError('libcudart is missing')")
    module(site, "apex", "import pyramid")
    module(site, "deepspeed", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    variables = {
        "FLASH_ALLREDUCE_BITS": "banana",
        "FLASH_ALLREDUCE_BIT": "4",
        "GLOO_SOCKET_IFNAME": "nowhere0",
    }
    status, text, found = run(tmp_path, site, **variables)
    assert status == 1
    expected = {
        ("versions", "megatron-core"): ("0.12.1 is not supported", "pip install 'megatron-core>=0.13,<0.20'"),
        ("versions", "apex"): ("is not NVIDIA's apex nor AMD's", "pip uninstall apex"),
        ("libraries", "_C (CPU)"): ("no compiled library is installed", "C++ compiler"),
        ("environment", "FLASH_ALLREDUCE_BITS"): ("expected a whole number from 2 to 8", "unset"),
        ("environment", "FLASH_ALLREDUCE_BIT"): ("the nearest is FLASH_ALLREDUCE_BITS", "unset"),
        ("Megatron seams", "megatron-core"): (
            "OSError: libcudart is missing",
            "python -c 'import megatron.core'",
        ),
        ("DeepSpeed seams", "check"): ("ended with signal SIGSEGV (importing deepspeed)", "import deepspeed"),
        ("self-test", "all_reduce, 2 ranks"): ("nowhere0", "GLOO_SOCKET_IFNAME"),
    }
    assert by_level(found, "problem") == set(expected), text
    for key, (says, remedy) in expected.items():
        assert says in found[key]["text"] and found[key]["remedy"] and remedy in found[key]["remedy"], found[key]
    assert found["self-test", "codec on cpu"]["level"] == "ok"
    assert "8 problems" in text


def in_process(tmp_path: Path, check: str) -> dict[str, dict[str, str]]:
    report = Findings(str(tmp_path / "results"))
    getattr(doctor_environment, check)(report)
    lines = map(json.loads, (tmp_path / "results").read_text().splitlines())
    return {line["finding"]["name"]: line["finding"] for line in lines if "finding" in line}


def test_variables_that_are_no_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", "maybe")
    monkeypatch.setenv("FLASH_ALLREDUCE_TWO_SHOT_BYTES", "much")
    monkeypatch.setenv("FLASH_ALLREDUCE_DISABLE", "1")
    monkeypatch.setenv("FLASH_ALLREDUCE_BUILD", "none")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    found = in_process(tmp_path, "variables")
    levels = {name: line["level"] for name, line in found.items() if name.startswith("FLASH_ALLREDUCE_")}
    assert levels == {
        "FLASH_ALLREDUCE_BUILD": "ok",
        "FLASH_ALLREDUCE_DISABLE": "note",
        "FLASH_ALLREDUCE_REFERENCE": "problem",
        "FLASH_ALLREDUCE_TWO_SHOT_BYTES": "problem",
    }
    assert "NCCL_SOCKET_IFNAME=eth7" in found["other variables"]["text"]


def test_plain_pytorch_on_request_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", "1")
    monkeypatch.setattr(ops, "unavailable", "no compiled library is installed")
    found = in_process(tmp_path, "libraries")
    assert found["used"]["level"] == "note" == found["_C (CPU)"]["level"]


def test_gpus_without_peer_access_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA L40", major=8, minor=9, total_memory=48 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 2})
    found = in_process(tmp_path, "gpus")
    assert found["GPUs"]["text"] == "3 x NVIDIA L40 (sm_89, 48 GiB)"
    assert (found["peer access"]["level"], found["peer access"]["text"]) == (
        "note",
        "missing for 2 of 6 pairs: 0-2, 2-0",
    )
    assert found["symmetric memory"]["text"].endswith("the two-shot kernel is off")


def test_autoload_that_is_off_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_AUTOLOAD", "off")
    found = in_process(tmp_path, "entry_point")["entry point"]
    assert found["level"] == "note" and found["text"].startswith("off: FLASH_ALLREDUCE_AUTOLOAD=off")


@pytest.mark.parametrize(
    ("found", "window", "is_in"),
    [
        ("0.13.0", ">=0.13,<0.20", True),
        ("0.12.3", ">=0.13,<0.20", False),
        ("0.13.0rc1", ">=0.13,<0.20", False),
        ("0.13.1rc1", ">=0.13,<0.20", True),
        ("0.19.2+local", ">=0.13,<0.20", True),
        ("0.20.0", ">=0.13,<0.20", False),
        ("0.20.0rc0", ">=0.13,<0.20", False),
        ("2.11.0a0+git1", ">=2.11", False),
        ("2.13.0+cpu", ">=2.11", True),
    ],
)
def test_versions_in_a_window(found: str, window: str, is_in: bool) -> None:
    assert doctor_versions.fits(found, window) == is_in


def test_a_framework_that_hangs_is_a_problem_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path / "site", "deepspeed", HANGS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    with Child(tmp_path, "deepspeed", "flash_allreduce_plugin.cli.doctor.frameworks:check", "deepspeed") as child:
        [found] = doctor._outcome(child, "DeepSpeed seams", 5)
    assert (found.level, found.text) == ("problem", "not finished after 5 s (importing deepspeed)")
    assert "--timeout" in found.remedy
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, r"rank 1 ended with signal SIGKILL \(starting\)"),
        (signal.SIGSTOP, r"not finished after 3 s: rank 0 \(.*\), rank 1 \(starting\)"),
    ],
)
def test_a_dead_or_silent_rank_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, says: str
) -> None:
    source = (
        "import os\nif os.environ.get('RANK') == '1':\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    os.kill(os.getpid(), {number.value})\n"
    )
    (tmp_path / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [found] = doctor_selftest.all_reduce(tmp_path, 2, 3)
    assert found.level == "problem" and re.fullmatch(says, found.text), found.text
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_seam_that_does_not_fit_is_a_problem(tmp_path: Path) -> None:
    def seam(*parameters: str) -> Seam:
        return Seam("some.seam", "json", "dumps", (*parameters, ...), lambda original: lambda: None, "nothing")

    report = Findings(str(tmp_path / "results"))
    doctor_frameworks._verify(report, [seam("obj"), seam("other")], "install another json")
    lines = map(json.loads, (tmp_path / "results").read_text().splitlines())
    fits, does_not = [line["finding"] for line in lines if "finding" in line]
    assert (fits["level"], does_not["level"]) == ("ok", "problem")
    assert "json.dumps: expected the parameters (other, ...)" in does_not["text"]
    assert does_not["remedy"] == "install another json"


def test_answers_of_the_ranks_are_compared() -> None:
    def finding(**changed: object) -> tuple[str, str]:
        good = {"digest": "1", "sqnr_db": 41.5, "quantized": True}
        compared = doctor_selftest._compared("all_reduce", "8", [{"8": good}, {"8": {**good, **changed}}])
        return compared.level, compared.text

    assert finding() == ("ok", "bit for bit equal on all ranks, 41.5 dB")
    assert finding(digest="2") == ("problem", "the result of rank 1 differs from rank 0's (41.5 dB)")
    assert finding(sqnr_db=20.0)[0] == finding(quantized=False)[0] == "problem"


@pytest.mark.parametrize("function", ["encode", "decode"])
def test_other_bits_than_the_reference_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    right = getattr(tensors, function)

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        result[-1] = result[-1] + 1  # of a payload: the code of an element behind the last one, which decode drops
        return result

    monkeypatch.setattr(tensors, function, wrong)
    monkeypatch.setattr(doctor_selftest, "NUMEL", 1000)
    report = Findings(str(tmp_path / "results"))
    doctor_selftest.codec(report)
    assert (
        "bits differ from those of the codec in plain PyTorch: 8 bits of float32 with no option"
        in (tmp_path / "results").read_text()
    )


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    module(tmp_path / "site", "deepspeed", HANGS)
    (tmp_path / "tmp").mkdir()
    pid = tmp_path / "pid"
    env = environment(tmp_path / "site", TMPDIR=str(tmp_path / "tmp"), HANGING=str(pid))
    command = [sys.executable, "-m", "flash_allreduce_plugin", "doctor"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            wait_until(lambda: pid.exists() and pid.read_text())
            process.send_signal(number)
            assert process.wait(20) not in (0, -number)
            assert ended(int(pid.read_text()))
            assert not list((tmp_path / "tmp").iterdir())
        finally:
            process.kill()


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    module(tmp_path / "site", "deepspeed", HANGS)
    pid = tmp_path / "pid"
    script = (
        "import pathlib, time; from flash_allreduce_plugin.cli.doctor.child import Child; "
        f"Child(pathlib.Path({str(tmp_path)!r}), 'x', "
        "'flash_allreduce_plugin.cli.doctor.frameworks:check', 'deepspeed'); "
        "time.sleep(600)"
    )
    env = environment(tmp_path / "site", HANGING=str(pid))
    with subprocess.Popen([sys.executable, "-c", script], env=env) as process:
        try:
            wait_until(lambda: pid.exists() and pid.read_text())
        finally:
            process.kill()
    wait_until(lambda: ended(int(pid.read_text())))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--timeout", "soon"], "--timeout"),
        (["--json", "no-such-folder/x.json"], "expected a file in a folder that exists"),
    ],
)
def test_bad_usage_is_answered_before_anything_starts(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())
