"""scripts/make_benchmarks.py: the documents' tables equal their results, and can be made again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_allreduce_plugin import FlashConfig
from lab.planning import plan_measured
from scripts.benchmark_tables import TABLES, Table
from scripts.benchmark_texts import (
    ddp_step,
    ddp_training,
    deepspeed_step,
    deepspeed_training,
    pipeline_step,
    step_time,
    training,
    tuned,
)
from scripts.make_benchmarks import DOCUMENTS, END, INDEX, RESULTS, ROOT, block, default_codec, missing, rewrite

pytest.importorskip("typer")

INDEX_OF_RESULTS = json.loads((RESULTS / INDEX).read_text())
NAMES = ("benchmarks.md", "accuracy.md", "tuning.md")


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_of_a_document_are_those_of_the_results(name: str) -> None:
    document = (DOCUMENTS / name).read_text()
    made = rewrite(name, document, INDEX_OF_RESULTS, RESULTS)
    assert made == document, "run: python -m scripts.make_benchmarks --text"


@pytest.mark.parametrize(("name", "row"), [("benchmarks.md", "bfloat16, INT8"), ("accuracy.md", "8/64 c")])
def test_a_changed_figure_is_noticed(name: str, row: str) -> None:
    document = (DOCUMENTS / name).read_text()
    (line,) = [line for line in document.splitlines() if line.startswith(f"| {row} |")]
    changed = "|".join([*line.split("|")[:3], " 9.99 ", *line.split("|")[4:]])
    assert changed != line
    assert rewrite(name, document.replace(line, changed), INDEX_OF_RESULTS, RESULTS) == document


def test_every_result_makes_a_table() -> None:
    """Check these documents' tables. docs/decide/planning.md has `plan --check`, docs/trust/cuda.md gpu-check's."""
    used = {file for entry in INDEX_OF_RESULTS.values() for file in entry["files"]}
    left = {str(file.relative_to(RESULTS)) for file in RESULTS.glob("*/*")} - used
    assert {Path(name).name for name in left} <= {*plan_measured.FILES, "gpu_check-1.json"}
    assert set(INDEX_OF_RESULTS) == {table.name for table in TABLES}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_has_its_commands_machine_date_and_codec(table: Table) -> None:
    entry = INDEX_OF_RESULTS[table.name]
    lines = block(table, INDEX_OF_RESULTS, RESULTS).splitlines()
    shown = [table, *(other for other in TABLES if other.name in table.beside and other.document is None)]
    commands = [command.line for each in shown for command in each.commands]
    count = len(commands)
    assert lines[1 : 1 + count] == commands
    about = lines[3 + count]
    assert about.startswith(f"{entry['date']}, {entry['machine']}, {entry['cores']} cores")
    assert ("groups of" in about) == (not table.names_codec)
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 2 and len({row.count("|") for row in rows}) == 1
    assert block(table, {}, RESULTS).endswith("Not measured yet.")


def test_a_table_without_a_document_stands_in_another() -> None:
    for table in TABLES:
        if table.document is None:
            [other] = [other for other in TABLES if table.name in other.beside and other.document is not None]
            made = block(other, INDEX_OF_RESULTS, RESULTS)
            assert all(command.line in made for command in table.commands)
            here, its = INDEX_OF_RESULTS[other.name], INDEX_OF_RESULTS[table.name]
            same = (here["date"], here["machine"]) == (its["date"], its["machine"])
            assert same or f"(loss: {its['date']}, {its['machine']})" in made


def test_the_readmes_picture_can_be_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    [(name, draw)] = [table.picture for table in TABLES if table.name == "step time" and table.picture]
    assert f"docs/decide/{name}" in (ROOT / "README.md").read_text()
    draw([json.loads((RESULTS / file).read_text()) for file in INDEX_OF_RESULTS["step time"]["files"]], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_codec_of_a_measurement_is_the_default_of_its_day() -> None:
    config = FlashConfig()
    assert default_codec() == f"{'compact' if config.compact else 'plain'} groups of {config.group_size}"


def test_marks_without_a_table_are_refused() -> None:
    document = (DOCUMENTS / "benchmarks.md").read_text()
    with pytest.raises(ValueError, match="expected"):
        rewrite("benchmarks.md", document.replace("table: codec -->", "table: codecs -->"), {}, RESULTS)
    with pytest.raises(ValueError, match="no <!-- end --> after the table codec"):
        rewrite("benchmarks.md", document.replace("<!-- end -->", "", 1), {}, RESULTS)


def test_a_training_has_a_row_a_variant_and_the_worst_of_several_seeds() -> None:
    def row(variant: str, **seeds: float) -> dict[str, object]:
        return {"variant": variant, "difference %": seeds, "mean difference %": sum(seeds.values()) / len(seeds)}

    result = [row("full precision", a=0.0), row("INT8", a=0.1, b=0.3), row("noise 1", a=2.0)]
    assert training("TP 2, ")([result])[1:] == [
        ["TP 2, INT8", "+0.200 (+0.300)"],
        ["TP 2, noise 1", "+2.000"],
    ]


def test_a_training_with_deepspeed_has_the_mean_and_the_worst_seed_of_each_stage() -> None:
    def seed(loss: float) -> dict[str, object]:
        section = json.dumps({"bits": 4, "compact": True, "range": "mse", "error_feedback": True})
        return {
            "full precision": {"validation loss": 1.0, "parameters": 7e5},
            section: {"validation loss": 1.0 + loss / 100},
        }

    result = {"stages": {"0": {"1": seed(0.1), "2": seed(0.3)}, "2": {"1": seed(0.2)}}}
    assert deepspeed_training([result]) == [
        ["", "stage 0", "stage 2"],
        ["INT4, compact, range mse", "+0.200 (+0.300)", "+0.200"],
    ]


def test_a_variant_that_does_not_run_has_no_row() -> None:
    ran = {"step, seconds": 0.1, "x base": 2.0, "wire, bytes": 3e6, "bits on the wire per element": 8.25}
    failed = {"cannot run": "did not return within 60 s"}
    tables = [
        {"rate": "1gbit", "variants": {'{"bits": 8}': ran, "hook": failed}},
        {"rate": "200mbit", "variants": {'{"bits": 8}': ran | {"x base": 3.0}, "hook": failed}},
    ]
    assert ddp_step([{"tables": tables}], [])[1:] == [["INT8", "100", "2.00", "3.00", "3.0", ""]]
    seeds = {
        seed: {"fp32": {"validation loss": 1.0}, '{"bits": 4, "min_bytes": 0}': {"validation loss": loss}}
        for seed, loss in (("1", 1.001), ("2", 1.003))
    }
    trained = [{"seeds": seeds, "cannot run": {"hook": "IndexError"}}]
    assert ddp_training(trained)[1:] == [["INT4", "+0.200 (+0.300)"]]
    tables[0]["variants"] = tables[1]["variants"] = {'{"bits": 4}': ran}
    assert ddp_step([{"tables": tables}], trained)[1][-1] == "+0.200 (+0.300)"  # the loss is the training's


def test_a_step_has_the_loss_of_its_training() -> None:
    """Check the names: each training has another name for a step's INT4 or preset int4."""
    row = {"step, seconds": 1.0, "x base": 1.0, "wire, bytes": 3e6}
    names = ("bf16", "INT8", "INT4", "preset int4")
    tables = [{"rate": "none", "share": 0.1, "variants": dict.fromkeys(names, row)}]
    runs = [
        [{"variant": name, "mean difference %": loss, "difference %": {"1": loss}} for name, loss in each]
        for each in ((("full precision", 0.0), ("INT8", 0.1), ("INT4", 0.2)), (("INT8", 0.3), ("INT6", 0.4)))
    ]
    of_training = training("TP 2, ", "codebook, ")
    sent, loss = step_time(of_training)([{"tables": tables}], runs)[-2:]
    assert sent[-1] == "3.0" and loss == ["validation loss, %", "", "", "+0.100", "+0.200", "+0.400"]
    widths = {"pipeline_bits": 4, "pipeline_backward_bits": 4}
    variants = {"full precision": 1.0, json.dumps({"preset": "int4"}): 1.001, json.dumps(widths): 1.002}
    seed = {
        name: {"validation loss": loss, "bytes sent": 1, "bytes in full precision": 2}
        for name, loss in variants.items()
    }
    assert pipeline_step([{"tables": tables}], [{"seeds": {"1": seed}}])[-1][3:] == ["", "+0.200", "+0.100"]
    step = {"step, seconds": 0.1, "x base": 2.0, "x base, gradients": 3.0, "wire, bytes": 3e6}
    found = {
        "about": {"arguments": {"rate": "1gbit"}},
        "tables": [{"stage": 2, "variants": dict.fromkeys(("bf16", "INT4", "preset int4", "INT4 + 4"), step)}],
    }
    sections = {"full precision": {"validation loss": 1.0, "parameters": 7e5}}
    sections[json.dumps({"bits": 4, "param_bits": 4})] = {"validation loss": 1.003}
    rows = deepspeed_step([found], [], [{"stages": {"2": {"1": sections}}}])
    assert rows[1:] == [
        [2, "bf16", "100", "2.00", "3.0", ""],
        [2, "preset int4", "100", "2.00", "3.0", ""],
        [2, "INT4, param_bits 4", "100", "2.00", "3.0", "+0.300"],
    ]


def test_a_step_has_the_loss_of_a_model_of_its_size() -> None:
    step, pretraining = (
        next(table for table in TABLES if table.name == name) for name in ("TP x DP step", "pretraining")
    )
    measured, trained = (
        [json.loads((RESULTS / file).read_text()) for file in INDEX_OF_RESULTS[table.name]["files"]]
        for table in (step, pretraining)
    )
    size = measured[0]["about"]["arguments"]["size"]
    same = next(i for i, command in enumerate(pretraining.commands) if f"--size {size} " in f"{command.line} ")
    expected = {row[0]: str(row[1]).partition(" ")[0] for row in pretraining.rows([trained[same]])[1:]}
    losses = {row[0]: row[-1] for row in step.rows(measured, trained)[1:] if row[-1]}
    assert losses == {name: loss for name, loss in expected.items() if name in losses}
    assert {"preset int8", "preset int4"} <= losses.keys()
    assert all(row[-1] == "" for row in step.rows(measured, trained[:same])[1:]), "another size's"


def test_a_width_that_does_not_pay_is_off_in_the_table_of_tuning() -> None:
    def result(**written: Any) -> dict[str, Any]:
        check = [{"size": 1 << 20, "ratio": 1.0, "control": 1.0}]
        written = {"chunk_bytes": 1 << 20, "min_bytes": 1 << 26, **written}
        return {"about": {"link": "loopback", "ranks": 4}, "check": check, "written": written}

    assert [row[2] for row in tuned([result(), result(enabled=False)])] == ["min_bytes", "64 MiB", "off"]


def test_made_again_with_small_sizes(tmp_path: Path) -> None:
    documents, results = tmp_path / "docs", tmp_path / "results"
    documents.mkdir()
    for name in NAMES:
        shutil.copy(DOCUMENTS / name, documents)
    links = [] if missing(next(table for table in TABLES if table.name == "sizes")) else ["sizes"]
    script = [sys.executable, "-m", "scripts.make_benchmarks", "--quick", "--results", str(results)]
    done = subprocess.run(
        [*script, "--documents", str(documents), "--only", "codec", "scale", *links],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((results / INDEX).read_text())
    assert sorted(index) == ["codec", "scale", *links]
    assert all(0 < entry["seconds"] < 120 for entry in index.values())  # the duration of all of `make bench`
    text = (documents / "benchmarks.md").read_text()
    assert text == rewrite("benchmarks.md", text, index, results) != (DOCUMENTS / "benchmarks.md").read_text()
    assert f"{default_codec()}:" in text
    assert "Not measured yet." in (documents / "accuracy.md").read_text()


@pytest.mark.slow
def test_a_table_of_communication_hooks_made_again_has_every_variant_that_runs(tmp_path: Path) -> None:
    name = "DDP step"
    if need := missing(next(table for table in TABLES if table.name == name)):
        pytest.skip(f"it needs {need}")
    for document in NAMES:
        shutil.copy(DOCUMENTS / document, tmp_path)
    script = [sys.executable, "-m", "scripts.make_benchmarks", "--quick", "--results", f"{tmp_path}/r"]
    done = subprocess.run(
        [*script, "--documents", str(tmp_path), "--only", name], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = (tmp_path / "benchmarks.md").read_text().partition(f"<!-- table: {name} -->")[2].partition(END)[0]
    rows = {row.split("|")[1].strip(): row for row in made.splitlines() if row.startswith("| ")}
    assert {"fp16_compress_hook", "PowerSGD rank 4, one bucket", "INT8", "INT4", "preset thin"} <= set(rows)
    assert "quantization_pertensor_hook" not in rows


@pytest.mark.slow
def test_tables_of_one_command_are_measured_once(tmp_path: Path) -> None:
    """Check all of docs/decide/accuracy.md, with its picture."""
    if need := missing(next(table for table in TABLES if table.name == "accuracy")):
        pytest.skip(f"it needs {need}")
    for name in NAMES:
        shutil.copy(DOCUMENTS / name, tmp_path)
    script = [sys.executable, "-W", "ignore", "-m", "scripts.make_benchmarks", "--quick", "--results", f"{tmp_path}/r"]
    done = subprocess.run(
        [*script, "--documents", str(tmp_path), "--only", "accuracy", "accuracy of settings"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("python -m lab.benchmarks.accuracy") == 1
    index = json.loads((tmp_path / "r" / INDEX).read_text())
    measured = next(table for table in TABLES if table.name == "accuracy").commands
    of_document = [table for table in TABLES if table.document == "accuracy.md"]
    assert set(index) == {table.name for table in of_document if table.commands == measured}
    assert (tmp_path / "accuracy.md").read_text().count("Not measured yet.") == len(of_document) - len(index) > 0
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_quick_figures_do_not_reach_the_documents() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.make_benchmarks", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--quick is no measurement" in done.stderr
