"""`flash-allreduce plan`: presets, inputs, refusals, outputs, and its two checks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from benchmarks import plan_measured, plan_published
from flash_allreduce_plugin.cli.main import app
from flash_allreduce_plugin.cli.plan import inputs as plan_inputs
from flash_allreduce_plugin.cli.plan import presets as plan_presets
from flash_allreduce_plugin.cli.plan.step_model import predict, quantizable
from flash_allreduce_plugin.config import FlashConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21"
SMALL = "--layers 8 --hidden 1024 --heads 16 --sequence 1024"
SLOW = "--peak-flops 100T --ranks-per-node 1 --intra 1GB/s --inter 1gbit"


def run(line: str):
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], env={"COLUMNS": "200"})


def planned(tmp_path, line: str):
    done = run(f"{line} --json {tmp_path / 'plan.json'}")
    assert done.exit_code == 0, done.output
    return json.loads((tmp_path / "plan.json").read_text())


# Presets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plan_presets.MODELS)
def test_parameters_are_those_published(name):
    preset = plan_presets.MODELS[name]
    assert preset.model.parameters == pytest.approx(preset.published, rel=0.02)


def test_every_preset_is_whole():
    for machine in plan_presets.CLUSTERS.values():
        assert {machine.intra, machine.inter} <= set(plan_presets.LINKS) and machine.device in plan_presets.DEVICES
    for link in plan_presets.LINKS.values():
        assert 0.5 < link.reached / link.peak < 1


@pytest.mark.parametrize("name", [*plan_presets.CLUSTERS, plan_presets.CPU])
def test_every_cluster_can_be_planned_with(name):
    assert run(f"--model llama-7b --cluster {name} --dp 2 --bits 8").exit_code == 0


def test_the_list_has_them_all():
    out = run("--list").output
    for name in (*plan_presets.MODELS, *plan_presets.CLUSTERS, *plan_presets.LINKS, plan_presets.CPU):
        assert f" {name} " in out


def test_a_cluster_by_name_and_by_numbers_are_the_same():
    named, ranks = plan_inputs.cluster_of("h100-8x2")
    given, none = plan_inputs.cluster_of(
        None, peak_flops="989T", codec="2700GB/s", ranks_per_node=8, intra="370GB/s", inter="376gbit"
    )
    assert (ranks, none) == (16, None)
    for field in ("flops", "codec", "intra", "inter", "latency", "far", "start", "ranks_per_node"):
        assert getattr(named, field) == pytest.approx(getattr(given, field)), field


def test_adapters_are_shared_by_the_ranks_of_a_node():
    assert plan_inputs.cluster_of("h100-8x2", inter="400gbit", adapters=1)[0].inter == pytest.approx(50e9 / 8)
    assert plan_inputs.cluster_of("h100-8x2", inter="400gbit")[0].inter == pytest.approx(50e9)
    assert plan_inputs.cluster_of("l40")[0].inter == pytest.approx(12.5e9 * 1448 / 1538 / 8)
    half = plan_inputs.cluster_of("h100-8x2", link_efficiency=0.5)[0]
    assert (half.intra, half.inter) == pytest.approx((225e9, 25e9))


@pytest.mark.parametrize(
    "text, value",
    [
        ("450GB/s", 450e9),
        ("400gbit", 5e10),
        ("100Gb/s", 12.5e9),
        ("1.5 TB/s", 1.5e12),
        ("98mbit", 12.25e6),
        ("8Gbps", 1e9),
    ],
)
def test_speeds(text, value):
    assert plan_inputs.speed(text, "--inter") == pytest.approx(value)


# Models from elsewhere -----------------------------------------------------------------------------------------------

LLAMA = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024)


def config(tmp_path, content) -> Path:
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_config_of_hugging_face(tmp_path):
    assert plan_inputs.model_of_hf(config(tmp_path, LLAMA)).parameters == pytest.approx(8.03e9, rel=0.001)
    assert plan_inputs.model_of_hf(tmp_path).sequence == 4096
    gpt2 = plan_inputs.model_of_hf(config(tmp_path, GPT2))
    assert gpt2.parameters == pytest.approx(124.4e6, rel=0.002) and not gpt2.gated and gpt2.tied


MEGATRON = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu "
    "--group-query-attention --num-query-groups 8 --seq-length=8192 --vocab-size 128256 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 64 --bf16"
)


def test_the_arguments_of_megatron(tmp_path):
    found = planned(tmp_path, f"--megatron-args '{MEGATRON}' --cluster a100-8x4 --bits 8")
    assert found["model"]["parameters"] == pytest.approx(8.03e9, rel=0.001) and found["model"]["sequence"] == 8192
    layout = found["layout"]
    assert (layout["tp"], layout["dp"], layout["pp"], layout["zero"], layout["framework"]) == (4, 4, 2, 1, "megatron")
    assert (layout["micro_batch"], layout["accumulation"], layout["sequence_parallel"]) == (2, 8, True)
    assert (layout["gradient_itemsize"], layout["overlap"], layout["bucket"]) == (4, False, 40_000_000)
    assert planned(tmp_path, f"--megatron-args '{MEGATRON} --overlap-grad-reduce' --cluster a100")["layout"]["overlap"]
    other = planned(tmp_path, f"--megatron-args '{MEGATRON} --grad-reduce-in-bf16' --cluster a100-8x4 --tp 8 --bits 8")
    assert (other["layout"]["tp"], other["layout"]["dp"], other["layout"]["gradient_itemsize"]) == (8, 2, 2)


# What it says --------------------------------------------------------------------------------------------------------


def test_a_slow_link_pays_and_says_what_to_set(tmp_path):
    found = planned(tmp_path, f"{SMALL} {SLOW} --tp 4 --dp 2")
    eight, four = found["widths"]["8"], found["widths"]["4"]
    assert 1 < eight["speed-up"] < four["speed-up"] < four["at most"]
    assert eight["settings"] == {"bits": 8, "backward_bits": 8, "grad_bits": 8}
    assert found["full precision"]["seconds"] == pytest.approx(eight["seconds"] * eight["speed-up"])
    out = run(f"{SMALL} {SLOW} --tp 4 --dp 2").output
    assert "--flash-allreduce --flash-allreduce-bits 8 --flash-allreduce-backward-bits 8" in out
    assert '{"bits": 8, "backward_bits": 8, "grad_bits": 8}' in out and "An estimate." in out


def test_a_fast_link_does_not_pay():
    done = run(f"{SMALL} --peak-flops 1T --ranks-per-node 8 --intra 400GB/s --inter 400GB/s --tp 8")
    assert done.exit_code == 0 and "INT8: leave it off" in done.output and "INT4: leave it off" in done.output


def test_only_gradients_pay(tmp_path):
    """Tensor parallelism inside fast nodes, data parallelism over a slow wire: the one without the other."""
    line = f"{SMALL} --peak-flops 10T --ranks-per-node 4 --intra 900GB/s --inter 1gbit --tp 4 --dp 4 --bits 8"
    settings = planned(tmp_path, line)["widths"]["8"]["settings"]
    assert settings == {"bits": 8, "grad_bits": 8, "exclude": ["*"]}
    assert FlashConfig.from_dict(settings).grad_bits == 8
    assert "--flash-allreduce-exclude '*'" in run(line).output


def test_a_section_of_deepspeed(tmp_path):
    from flash_allreduce_plugin.deepspeed.section import parse

    line = f"{SMALL} --peak-flops 100T --ranks-per-node 4 --intra 100GB/s --inter 10gbit --dp 16 --zero 3 --bits 4"
    found = planned(tmp_path, line)
    settings = found["widths"]["4"]["settings"]
    assert settings == {"bits": 4, "hierarchical": "auto"} and parse({"flash_allreduce": settings}) is not None
    assert found["layout"]["framework"] == "deepspeed" and '"flash_allreduce": {"bits": 4' in run(line).output


def test_the_hooks_of_torch(tmp_path):
    line = f"{SMALL} {SLOW} --dp 4 --framework torch --bits 8"
    ddp = run(line).output
    assert "INT8: fap.ddp_hook(fap.FlashConfig(bits=8))" in ddp and "DP gradients" in ddp
    fsdp = run(f"{line} --zero 3").output
    assert "fap.FlashReduceScatter(fap.FlashConfig(bits=8)), fap.FlashAllGather(fap.FlashConfig(bits=8))" in fsdp
    found = planned(tmp_path, f"{line} --zero 3")["widths"]["8"]
    assert found["pays"] == ["grad_bits", "parameters"]
    assert {part["bits"] for part in found["traffic"]} == {8}


@pytest.mark.parametrize(
    "more, overlap",
    [("", True), ("--zero 1 --framework deepspeed", False), ("--zero 3", True), ("--no-overlap", False)],
)
def test_what_is_sent_beside_the_arithmetic(tmp_path, more, overlap):
    assert planned(tmp_path, f"{SMALL} {SLOW} --dp 4 {more}")["layout"]["overlap"] is overlap


def test_numbers_of_ranks_plot_and_batch(tmp_path):
    line = f"{SMALL} {SLOW} --tp 2 --dp 2 --global-batch 8 --scale 3,4,8,64 --plot {tmp_path / 'plan.png'}"
    rows = planned(tmp_path, line)["scale"]
    assert [row["ranks"] for row in rows] == [3, 4, 8, 64]
    assert "no multiple of TP x PP = 2" in rows[0]["why not"] and "cannot be dealt" in rows[3]["why not"]
    assert [row["layout"]["accumulation"] for row in rows[1:3]] == [4, 2]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, said",
    [
        ("--model llama-3-80b --cluster h100", "--model llama-3-80b is not known; the nearest is llama-3-8"),
        ("--model gpt3-175b --cluster h101-8x2", "--cluster h101 is not known; the nearest is h100"),
        ("--model gpt3-175b --cluster h100-0x2", "expected ranks a node and nodes above 0"),
        ("--cluster h100", "no model: expected --model NAME"),
        ("--model llama-7b", "no cluster: expected --cluster NAME"),
        ("--model llama-7b --megatron-args '--num-layers 2' --cluster h100", "give one of them"),
        ("--megatron-args '--num-layers 2' --cluster h100", "expected --hidden-size with a whole number"),
        ("--megatron-args 'nothing' --cluster h100", "expected Megatron-LM's flags"),
        ("--megatron-args '\"open' --cluster h100", "expected one quoted command line"),
        (f"--megatron-args '{MEGATRON} --num-experts 8' --cluster h100", "a mixture of experts is not covered"),
        ("--model llama-7b --cluster h100 --tp 3", "--tp 3 does not divide the 32 attention heads"),
        ("--model llama-7b --cluster h100 --pp 5", "--pp 5 does not divide the 32 layers"),
        ("--model llama-7b --cluster h100-8x2 --tp 4 --dp 3", "= 12 is not the 16 ranks"),
        ("--model llama-7b --cluster h100-8x3 --tp 16", "= 16 does not divide the 24 ranks"),
        ("--model llama-7b --cluster h100-8x2 --ranks-per-node 4", "--ranks-per-node says 4"),
        ("--model llama-7b --cluster h100 --dp 4 --global-batch 6", "--global-batch 6 is not a multiple"),
        ("--model llama-7b --cluster h100 --zero 3 --framework megatron", "--zero 3 is DeepSpeed's"),
        ("--model llama-7b --cluster h100 --zero 2 --pp 2", "--zero 2 does not go with --pp 2"),
        ("--model llama-7b --cluster h100 --framework torch --tp 2", "--framework torch is data-parallel"),
        ("--model llama-7b --cluster h100 --framework torch --zero 1", "--framework torch is data-parallel"),
        ("--model llama-7b --cluster h100 --sequence-parallel --tp 8 --sequence 1001", "the sequence of 1001"),
        ("--model llama-7b --cluster h100 --inter 400", "--inter 400: expected a speed such as 450GB/s"),
        ("--model llama-7b --cluster h100 --intra fast", "--intra fast: expected a speed"),
        ("--model llama-7b --cluster h100 --intra 0GB/s", "--intra 0GB/s: expected a speed"),
        ("--model llama-7b --cluster h100 --peak-flops many", "--peak-flops many: expected a number above 0"),
        ("--model llama-7b --cluster h100 --efficiency 1.5", "--efficiency 1.5: expected a share"),
        ("--model llama-7b --cluster h100 --bits 9", "--bits 9: expected different whole numbers from 2 to 8"),
        ("--model llama-7b --cluster h100 --bits eight", "--bits eight: expected"),
        ("--model llama-7b --cluster h100 --scale 8,,16", "--scale 8,,16: expected"),
        ("--model llama-7b --cluster h100 --framework jax", "--framework jax: expected megatron, deepspeed, torch"),
        ("--model llama-7b --cluster h100 --gradients int8", "--gradients int8: expected fp32"),
        ("--model llama-7b --cluster h100 --json /nowhere/x.json", "--json /nowhere/x.json: cannot be written"),
        ("--model llama-7b --cluster h100 --plot /nowhere/x.png", "--plot /nowhere/x.png: cannot be written"),
        ("--model /nowhere/config.json --cluster h100", "cannot be read"),
        ("--layers 2 --hidden 100 --heads 3 --cluster h100", "--hidden 100 is not a multiple of the 3 attention heads"),
        ("--layers 2 --cluster h100", "--hidden, --heads too"),
        ("--check --results /work", "expected"),
        ("--layers 0 --cluster h100", "--layers"),
    ],
)
def test_bad_input_is_one_sentence(line, said):
    done = run(line)
    assert done.exit_code == 2, done.output
    words = " ".join(done.output.replace("│", " ").split())
    assert said in words and "Traceback" not in words


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ({**LLAMA, "hidden_size": "wide"}, "expected a whole number above 0 under hidden_size"),
        ({**LLAMA, "num_local_experts": 8}, "a mixture of experts is not covered"),
        ({"model_type": "llama"}, "expected a whole number above 0 under"),
    ],
)
def test_a_bad_config_is_one_sentence(tmp_path, content, said):
    done = run(f"--model {config(tmp_path, content)} --cluster h100")
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("package, more", [("rich.console", ""), ("matplotlib", "--plot x.png")])
def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path, package, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    done = run(f"--model llama-7b --cluster h100 --dp 2 {more}")
    assert done.exit_code == 1 and f"plan: {package.partition('.')[0]} is not installed: " in done.output


def test_a_name_with_brackets(tmp_path):
    folder = tmp_path / "[bold]model"
    folder.mkdir()
    assert "[bold]model" in run(f"--model '{config(folder, LLAMA)}' --cluster h100 --dp 2").output.replace("\n", "")


def test_the_command_line_stays_light():
    """`--help` imports nothing of plan's, and its arithmetic no torch."""
    script = "import sys; from flash_allreduce_plugin.cli import main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "pydantic", "matplotlib"} & set(loaded)
    assert "flash_allreduce_plugin.cli.plan.step_model" not in loaded
    script = "import sys; from flash_allreduce_plugin.cli.plan import step_model; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "pydantic"} & set(loaded)


# Against measurements ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    return plan_measured.rows(RESULTS)


def test_every_measured_row_is_predicted_within_15_percent(measured):
    beyond = [(row.what, f"{row.error:+.1%}") for row in measured if not row.within]
    assert len(measured) == 56 and not beyond


def test_three_steps_without_a_limit_are_the_only_inputs(measured):
    """The inputs are no rows; the same rows come out of a file in which every other time is another."""
    assert not any("no limit, bf16" in row.what or "no limit, INT8" in row.what for row in measured)
    steps = json.loads((RESULTS / "step_time.json").read_text())
    before = plan_measured.calibrated(steps)
    for table in steps["tables"]:
        for variant, row in table["variants"].items():
            if table["rate"] != "none" or variant in ("INT6", "INT4"):
                row["seconds"] *= 7
    assert plan_measured.calibrated(steps) == before


def test_bytes_are_those_that_the_runs_counted():
    steps = json.loads((RESULTS / "step_time.json").read_text())
    core = plan_measured.calibrated(steps)
    model, layout = plan_measured._model(steps["about"]["arguments"])
    for variant, row in steps["tables"][0]["variants"].items():
        if variant == "no collectives":
            continue
        bits = variant.removeprefix("INT")
        widths = dict.fromkeys(quantizable(model, core, layout), int(bits)) if bits != variant else {}
        parts = predict(model, core, layout, widths).parts
        assert sum(part.after.bytes_sent for part in parts) == pytest.approx(1e6 * row["megabytes sent"])


def test_gradients_of_stages_1_to_3_are_half_of_stage_0s(measured):
    """Quantized they go to their owners alone: 4.125 and 2.125 bits an element between two ranks."""
    core = plan_measured.calibrated(json.loads((RESULTS / "step_time.json").read_text()))
    for bits, sent in (("INT8", 8.25), ("INT4", 4.25)):
        said = [row.communication[1] for row in measured if "DeepSpeed" in row.what and row.what.endswith(bits)]
        link, start = 8 * 2048**2 * sent / 8 / plan_measured.link("1gbit"), core.start
        assert said == pytest.approx([link + start, link / 2 + start, link / 2 + start, link / 2 + 8 * start])


def test_what_the_preset_of_a_core_says_is_what_was_measured():
    steps = json.loads((RESULTS / "step_time.json").read_text())
    core, preset = plan_measured.calibrated(steps), plan_inputs.cluster_of("cpu")[0]
    for field in ("flops", "start", "transport", "codec"):
        assert getattr(preset, field) == pytest.approx(getattr(core, field), rel=0.02), field


def test_the_check_prints_both_tables_and_fails_beyond_15_percent(tmp_path):
    done = run(f"--check --results {RESULTS} --json {tmp_path / 'check.json'}")
    assert done.exit_code == 0, done.output
    assert "56 rows" in done.output and "0 beyond 15%" in done.output and "ZeRO++ over ZeRO-3" in done.output
    found = json.loads((tmp_path / "check.json").read_text())
    assert len(found["measured"]) == 56 and all(row["within"] for row in found["measured"])
    for name in plan_measured.FILES:
        content = json.loads((RESULTS / name).read_text())
        if name == "deepspeed_step.json":
            content["tables"][0]["variants"]["INT8"]["step, seconds"] *= 1.3
        (tmp_path / name).write_text(json.dumps(content))
    failed = run(f"--check --results {tmp_path}")
    assert failed.exit_code == 1 and "1 beyond 15%" in failed.output and "beyond" in failed.output


def test_the_newest_day_of_results_is_taken():
    folder = plan_measured.results_folder()
    assert folder is not None and folder.name >= "2026-11-21"


def test_published_rows_are_shown_with_their_differences():
    rows = plan_published.rows()
    assert {row.source for row in rows} == {
        plan_published.FLASH, plan_published.ZEROPP, plan_published.COCCL, plan_published.TACO,
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
