"""scripts/gpu_check.py without a GPU: its report of steps that pass, fail, hang or cannot run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from scripts import gpu_check
from scripts.gpu_check import ROOT, Check, Outcome, Step, environment_of, read_sanitizer, read_tests, run_process


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_steps_that_pass_fail_hang_and_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(tmp_path, budget=60)
    environment = dict(os.environ)

    def broken(output: str) -> tuple[dict[str, object], str]:
        raise KeyError("no such figure")

    check.run(Step("good", python("print(7)"), 20, read=lambda out: ({"value": int(out)}, "")), environment)
    check.run(Step("bad", python("print('the reason'); raise SystemExit(3)"), 20), environment)
    check.run(Step("wrong", python("pass"), 20, read=lambda out: ({}, "too slow")), environment)
    check.run(Step("unreadable", python("pass"), 20, read=broken), environment)
    check.run(Step("hangs", python("print('here', flush=True); import time; time.sleep(60)"), 1), environment)
    check.run(Step("absent", ["no-such-tool"], 20, absent="there is none"), environment)
    check.run(Step("no command", ["no-such-tool"], 20), environment)
    assert [o.status for o in check.outcomes.values()] == [
        "ok", "failed", "failed", "failed", "timed out", "left out", "failed",
    ]  # fmt: skip
    assert check.report() == 1
    printed = capsys.readouterr().out
    assert "the reason" in printed and "here" in printed and "5 of 7 steps failed" in printed
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert saved["steps"]["good"] == {"status": "ok", "why": "", "seconds": saved["steps"]["good"]["seconds"],
                                      "figures": {"value": 7}}  # fmt: skip
    assert "the reason" in (tmp_path / "log.txt").read_text()


def test_all_that_a_step_started_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(mark)!r}).touch()"
    code, _ = run_process(python(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"), 20,
                          dict(os.environ))  # fmt: skip
    assert code == 0
    time.sleep(2.5)
    assert not mark.exists()


def test_a_budget_that_is_spent_stops_the_rest(tmp_path: Path) -> None:
    check = Check(tmp_path, budget=0)
    outcome = check.run(Step("late", python("pass"), 20), dict(os.environ))
    assert outcome.status == "timed out" and check.report() == 1


def test_the_counts_of_pytest(tmp_path: Path) -> None:
    """Check that a file in which everything is skipped is not counted as passed."""
    passing, skipping = tmp_path / "test_a.py", tmp_path / "test_b.py"
    passing.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('why')\n")
    skipping.write_text("import pytest\npytest.skip('no device', allow_module_level=True)\n")
    failing = tmp_path / "test_c.py"
    failing.write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    read = {}
    for path in (passing, skipping, failing):
        report = path.with_suffix(".xml")
        command = [sys.executable, "-m", "pytest", str(path), f"--junitxml={report}", "-c", os.devnull, "-q"]
        run_process(command, 60, dict(os.environ))
        read[path.stem] = read_tests(report)
    figures, wrong = read["test_a"]
    assert not wrong and figures["passed"] == 1 and figures["skipped"] == 1 and figures["reasons"] == ["why"]
    assert read["test_b"][1].startswith("nothing passed")
    assert read["test_c"][1] == "1 failed: test_a" and read["test_c"][0]["passed"] == 1


def test_the_summaries_of_compute_sanitizer() -> None:
    assert read_sanitizer("x\n========= ERROR SUMMARY: 0 errors\n")[1] == ""
    assert read_sanitizer("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")[1] == ""
    assert "4 errors" in read_sanitizer("========= ERROR SUMMARY: 4 errors\n")[1]
    assert "2 hazards" in read_sanitizer("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n")[1]
    assert read_sanitizer("Traceback ...")[1] == "it printed no summary"
    with pytest.raises(gpu_check.NotHere):
        read_sanitizer("========= Error: Device not supported\n")


@pytest.mark.parametrize("quick", [False, True])
def test_the_steps_name_existing_files(tmp_path: Path, quick: bool) -> None:
    found = gpu_check.steps(argparse.Namespace(quick=quick, slow=False), tmp_path)
    assert [step.name for step in found][:2] == ["build", "load"]
    for step in found:
        for word in step.command:
            if word.startswith(("tests/", "lab/")):
                assert (ROOT / word).exists(), word
            if word.startswith(("tests.", "lab.")):
                assert (ROOT / (word.replace(".", "/") + ".py")).exists(), word
    absent = {step.name: step.absent for step in found}
    assert absent["NCCL and ours"] == "there is one GPU" and not absent["train ddp, 8 bits"]
    assert absent["train deepspeed"].startswith("there is one GPU, and this takes")
    on_two = {step.name: step for step in gpu_check.steps(argparse.Namespace(quick=quick, slow=False), tmp_path, 2)}
    assert not on_two["NCCL and ours"].absent and not on_two["train ddp, 8 bits"].absent
    names = {step.name for step in found}
    assert {"test_gpu_codec", "test_gpu_streams", "test_gpu_collectives", "cuda_codec", "cost_estimate"} <= names


@pytest.mark.parametrize("name", ["train ddp, 8 bits", pytest.param("train megatron, 8 bits", marks=pytest.mark.slow)])
def test_a_training_step_trains(tmp_path: Path, name: str) -> None:
    """Train on CPUs, with gloo: the same commands, shortened."""
    found = {step.name: step for step in gpu_check.training_steps(2, tmp_path)}
    environment = environment_of(None)
    if "megatron" in name:
        code, output = run_process(found["prepare megatron"].command, 120, environment)
        assert code == 0, output[-2000:]
    shorter = ["--train-iters", "12", "--log-interval", "11"] if "megatron" in name else ["--steps", "100"]
    code, output = run_process([*found[name].command, *shorter], 240, {**environment, "OMP_NUM_THREADS": "1"})
    assert code == 0, output[-3000:]
    figures, wrong = found[name].read(output)
    assert not wrong and figures["last loss"] < figures["first loss"]
    assert figures["calls quantized"] > 0


def test_a_training_that_fails_is_seen() -> None:
    assert gpu_check.read_training("nothing")[1] == "it printed no losses"
    assert "does not fall" in gpu_check.read_training("step 1: loss 2.0\nstep 2: loss 2.5\n")[1]
    (step,) = [s for s in gpu_check.training_steps(2, Path()) if s.name == "train ddp, 8 bits"]
    assert step.read("step 1: loss 2.0\nstep 2: loss 1.5\nx: 0 of 9 calls quantized, \n")[1] == "nothing was quantized"


def test_the_page_that_is_sent(tmp_path: Path) -> None:
    """Write the page on two CPU ranks; the bench of two GPUs writes the same file."""
    results = tmp_path / "bench.json"
    command = [sys.executable, "-m", "flash_allreduce_plugin", "bench", "--ranks", "2", "-d", "bfloat16", "-b", "64K"]
    command += ["-e", "64K", "--rounds", "2", "-n", "1", "--json", str(results)]
    check = Check(tmp_path, budget=100)
    check.about["devices"] = [{"name": "H200", "capability": "9.0"}]
    check.run(
        Step("NCCL and ours", command, 90, {}, lambda output: gpu_check.read_bench(results)), environment_of(None)
    )
    page = (tmp_path / "report.txt").read_text()
    assert "H200 (9.0)" in page and "NCCL and ours" in page and str(Path.home()) not in page
    assert "      65,536 bytes: full precision " in page and "; INT4 " in page


def test_the_page_has_the_kernels_of_64_mib(tmp_path: Path) -> None:
    """Read the results that an H100 wrote."""
    (results,) = (ROOT / "lab" / "results").glob("*/gpu_kernels-1.json")
    figures, wrong = gpu_check.read_codec(results)
    check = Check(tmp_path, budget=10)
    check.outcomes["cuda_codec"] = Outcome("ok", figures=figures)
    check.save()
    page = (tmp_path / "report.txt").read_text()
    assert not wrong and "bf16 8 bits g256  codebook+spikes  encode 63 us (0.53), decode 48 us" in page
    assert page.count(" bits g") == sum(row["MiB"] == 64 for row in figures["rows"])


def test_switches_of_the_caller_do_not_reach_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_REFERENCE", "1")
    monkeypatch.setenv("GPU_TESTS_ON", "cpu")
    environment = environment_of(None)
    assert "FLASH_ALLREDUCE_REFERENCE" not in environment and "GPU_TESTS_ON" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_an_outcome_that_is_left_out_is_no_failure() -> None:
    assert Outcome("ok").is_good and Outcome("left out").is_good
    assert not Outcome("failed").is_good and not Outcome("timed out").is_good


def test_the_tests_of_the_gpu_run_with_the_cpu_in_its_place(tmp_path: Path) -> None:
    """Run some tests of each kind, so that they keep up with the package. All: GPU_TESTS_ON=cpu pytest tests/gpu."""
    report = tmp_path / "report.xml"
    environment = {**environment_of(None), "GPU_TESTS_ON": "cpu", "GPU_TESTS_EVERY": "25"}
    chosen = "plain or spikes-and or alignment or empty or refused or stay or aot_eager or guarantee_7 or uneven"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", chosen, f"--junitxml={report}"]
    code, output = run_process([*command, "-m", "not slow"], 200, environment)
    assert code == 0, output[-3000:]
    assert read_tests(report)[0]["passed"] >= 12
    code, output = run_process([sys.executable, "-m", "tests.gpu.small_cases"], 100, environment)
    assert code == 0 and "24 of 24" in output
