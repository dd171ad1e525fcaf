"""lab/planning/plan_check.py: plan's predictions against measurements, this project's and others' published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from flash_allreduce_plugin.cli.plan import inputs as plan_inputs
from flash_allreduce_plugin.cli.plan.step_model import predict, quantizable
from lab.planning import plan_check, plan_measured, plan_published

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results" / "2026-11-21"


@pytest.fixture(scope="module")
def measured():
    return plan_measured.rows(RESULTS)


def test_every_measured_row_is_predicted_within_15_percent(measured):
    beyond = [(row.what, f"{row.error:+.1%}") for row in measured if not row.within]
    assert len(measured) == 56 and not beyond


def test_three_steps_without_a_limit_are_the_only_inputs(measured):
    """Check that the inputs are no rows; a file with every other time changed gives the same rows."""
    assert not any("no limit, bf16" in row.what or "no limit, INT8" in row.what for row in measured)
    steps = json.loads((RESULTS / "step_time.json").read_text())
    before = plan_measured.calibrated(steps)
    for table in steps["tables"]:
        for variant, row in table["variants"].items():
            if table["rate"] != "none" or variant in ("INT6", "INT4"):
                row["step, seconds"] *= 7
    assert plan_measured.calibrated(steps) == before


def test_bytes_equal_the_counts_of_the_runs():
    steps = json.loads((RESULTS / "step_time.json").read_text())
    core = plan_measured.calibrated(steps)
    model, layout = plan_measured._model(steps["about"]["arguments"])
    for variant, row in steps["tables"][0]["variants"].items():
        if variant == "no collectives":
            continue
        bits = variant.removeprefix("INT")
        widths = dict.fromkeys(quantizable(model, core, layout), int(bits)) if bits != variant else {}
        parts = predict(model, core, layout, widths).parts
        assert sum(part.after.bytes_sent for part in parts) == pytest.approx(row["bytes sent"])


def test_gradients_of_stages_1_to_3_are_half_of_stage_0s(measured):
    """Check that quantized gradients are sent to their owners alone: 4.125 and 2.125 bits an element for two ranks."""
    core = plan_measured.calibrated(json.loads((RESULTS / "step_time.json").read_text()))
    for bits, sent in (("INT8", 8.25), ("INT4", 4.25)):
        said = [row.communication[1] for row in measured if "DeepSpeed" in row.what and row.what.endswith(bits)]
        link, start = 8 * 2048**2 * sent / 8 / plan_measured.link("1gbit"), core.start
        assert said == pytest.approx([link + start, link / 2 + start, link / 2 + start, link / 2 + 8 * start])


def test_parameters_quantized_too_are_rows_of_their_own(tmp_path):
    """Use the step of stage 0 without gradients; 4 bits of differences, 8 of values, one gather a step."""
    for name in plan_measured.FILES:
        (tmp_path / name).write_text((RESULTS / name).read_text())
    file = tmp_path / "deepspeed_step.json"
    steps = json.loads(file.read_text())
    rest = steps["tables"][0]["variants"]["gradients not sent"]["step, seconds"]
    wire = 8 * 2048**2 / 8 / plan_measured.link("1gbit")  # of one bit an element
    # Between two ranks: half of 4.25 bits for the gradients; half of 4.25 or 8.25 for the parameters.
    by_hand = {1: (4, 4.25 * wire), 2: (4, 4.25 * wire), 3: (8, 6.25 * wire)}
    for stage, (bits, sent) in by_hand.items():
        steps["tables"][stage]["variants"][f"INT4 + {bits}"] = {"step, seconds": rest + sent}
    file.write_text(json.dumps(steps))
    found = [row for row in plan_measured.rows(tmp_path) if " + " in row.what]
    assert [row.what.rsplit(", ", 1)[1] for row in found] == ["INT4 + 4", "INT4 + 4", "INT4 + 8"]
    start = plan_measured.calibrated(json.loads((RESULTS / "step_time.json").read_text())).start
    for row, calls in zip(found, (2, 2, 16), strict=True):  # the codec hides behind the wire; a call's start does not
        assert row.predicted == pytest.approx(row.measured + calls * start)
        assert row.communication == pytest.approx((row.measured - rest, row.predicted - rest))


def test_the_speed_of_a_core_is_the_measured_one():
    steps = json.loads((RESULTS / "step_time.json").read_text())
    core, preset = plan_measured.calibrated(steps), plan_inputs.cluster_of("cpu")[0]
    for field in ("flops", "start", "transport", "codec"):
        assert getattr(preset, field) == pytest.approx(getattr(core, field), rel=0.02), field


def test_the_check_prints_both_tables_and_fails_beyond_15_percent(tmp_path, capsys):
    assert plan_check.main(["--results", str(RESULTS), "--json", str(tmp_path / "check.json")]) == 0
    out = capsys.readouterr().out
    assert "56 rows" in out and "0 beyond 15%" in out and "ZeRO++ over ZeRO-3" in out
    found = json.loads((tmp_path / "check.json").read_text())
    assert len(found["measured"]) == 56 and all(row["within"] for row in found["measured"])
    for name in plan_measured.FILES:
        content = json.loads((RESULTS / name).read_text())
        if name == "deepspeed_step.json":
            content["tables"][0]["variants"]["INT8"]["step, seconds"] *= 1.3
        (tmp_path / name).write_text(json.dumps(content))
    assert plan_check.main(["--results", str(tmp_path)]) == 1
    assert "1 beyond 15%" in capsys.readouterr().out


def test_a_folder_without_results_is_one_sentence(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        plan_check.main(["--results", str(tmp_path)])
    assert ended.value.code == 2 and f"--results {tmp_path}: expected step_time.json" in capsys.readouterr().err


def test_piped_as_json():
    command = [sys.executable, "-m", "lab.planning.plan_check", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(json.loads(done.stdout)["measured"]) == 56, done.stderr


def test_the_newest_day_of_results_is_taken():
    folder = plan_measured.results_folder()
    assert folder is not None and folder.name >= "2026-11-21"


def test_published_rows_are_shown_with_their_differences():
    rows = plan_published.rows()
    assert {row.source for row in rows} == {
        plan_published.FLASH, plan_published.ZEROPP, plan_published.COCCL, plan_published.TACO,
        plan_published.QUICKREDUCE, plan_published.EGOVERSE, *(source for source, _, _ in plan_published.UNKNOWN),
    }  # fmt: skip
    for row in rows:
        assert row.note and row.published[0] <= row.published[1]
        if row.predicted is None:
            assert row.difference is None
            continue
        assert 0.9 < row.predicted[0] <= row.predicted[1] and row.difference is not None
    by_hand = plan_published.Row("", "", (2.0, 2.2), (1.0, 1.8), "")
    assert by_hand.difference == pytest.approx(-0.1)
    assert plan_published.Row("", "", (2.0, 2.2), (2.1, 9.0), "").difference == 0
    assert plan_published.Row("", "", (2.0, 2.0), (3.0, 3.0), "").difference == pytest.approx(0.5)
