"""`flash-allreduce plan`: presets, inputs, refusals and outputs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import astuple, fields
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from flash_allreduce_plugin.cli.main import app
from flash_allreduce_plugin.cli.plan import inputs as plan_inputs
from flash_allreduce_plugin.cli.plan import layout_file
from flash_allreduce_plugin.cli.plan import presets as plan_presets
from flash_allreduce_plugin.config import FlashConfig

RESULTS = Path(__file__).parents[2] / "lab" / "results"
SMALL = {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 1024}
SLOW = {"peak_flops": "100T", "ranks_per_node": 1, "intra": "1GB/s", "inter": "1gbit"}


def run(line: str):
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], env={"COLUMNS": "200"})


def planned(tmp_path, line: str):
    done = run(f"{line} --json {tmp_path / 'plan.json'}")
    assert done.exit_code == 0, done.output
    return json.loads((tmp_path / "plan.json").read_text())


@pytest.fixture
def layout(tmp_path):
    """Write the file for --layout: the small model on the slow cluster, with changes."""

    def write(**more) -> str:
        file = tmp_path / "layout.json"
        file.write_text(json.dumps(SMALL | SLOW | more))
        return f"--layout {file}"

    return write


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
        None, peak_flops="989T", codec="3000GB/s", ranks_per_node=8, intra="370GB/s", inter="376gbit"
    )
    assert (ranks, none) == (16, None)
    for field in ("flops", "codec", "intra", "inter", "latency", "far", "start", "host", "ranks_per_node"):
        assert getattr(named, field) == pytest.approx(getattr(given, field)), field
    assert named.shares == plan_presets.DEVICES["h100"].shares and not given.shares
    unknown, _ = plan_inputs.cluster_of(None, peak_flops="1T", ranks_per_node=8, intra="1GB/s", inter="1gbit")
    assert unknown.shares == plan_presets.DEVICES["a100"].shares


def test_kernels_are_not_promised_more_than_the_aim():
    for device in plan_presets.DEVICES.values():
        assert set(device.shares) == set(range(2, 9))
        assert all(0 < share <= plan_presets.CODEC for of in device.shares.values() for share in astuple(of))
    h200 = plan_presets.DEVICES["h200"].shares
    assert (h200[4].decode_sum_encode, h200[4].encode, h200[6].decode_sum_encode) == (0.47, 0.9, 0.2)
    out = run("--model llama-7b --cluster h200-8x1 --tp 8 --bits 8").output
    assert "the slowest kernel 0.90 at 8 bits, 0.47 at 4 bits of it" in out and "measured on an H100" in out


def test_shares_of_the_kernels_are_those_of_an_h100():
    """Compare with lab/results at 64 MiB. Widths other than 8 and 4 take the least share of any of them."""
    results = json.loads(next(RESULTS.glob("*/gpu_kernels-1.json")).read_text(encoding="utf-8"))
    assert "H100" in results["about"]["device"]
    plain = [row for row in results["rows"] if (row["MiB"], row["dtype"], row["options"]) == (64, "bf16", "")]
    measured = {row["bits"]: row["share"] for row in plain}
    kernels = [field.name for field in fields(plan_presets.Shares)]
    others = {kernel: min(measured[bits][kernel] for bits in (7, 6, 5, 3, 2)) for kernel in kernels}
    for bits, shares in plan_presets.DEVICES["h100"].shares.items():
        expected = measured[bits] if bits in (8, 4) else others
        for kernel in kernels:
            assert getattr(shares, kernel) == pytest.approx(min(expected[kernel], plan_presets.CODEC), abs=0.006)


def test_the_host_is_in_the_plan(tmp_path):
    call, chunk = plan_presets.host()
    assert call > chunk > plan_presets.LAUNCHES * plan_presets.LAUNCH
    found = planned(tmp_path, "--model llama-7b --cluster h100-8x1 --tp 8 --bits 8")
    eight = found["widths"]["8"]
    hosts = [part["quantized"]["host"] for part in eight["traffic"] if part["setting"] in eight["pays"]]
    assert hosts and eight["host"] == pytest.approx(sum(hosts))
    assert f"host: {1e6 * call:.0f} us a quantized call" in run("--model llama-7b --cluster h100-8x1 --tp 8").output


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
    assert plan_inputs.speed(text, "inter") == pytest.approx(value)


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
    mixtral = {**LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    found = plan_inputs.model_of_hf(config(tmp_path, mixtral))
    assert found.parameters == pytest.approx(46.7e9, rel=0.001) and (found.experts, found.experts_per_token) == (8, 2)
    qwen = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    assert plan_inputs.model_of_hf(config(tmp_path, qwen)).ffn == 768


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
    more = "--num-experts 8 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 4 --context-parallel-size 2"
    experts = planned(tmp_path, f"--megatron-args '{MEGATRON} {more}' --cluster a100-8x8 --bits 8")
    assert [experts["layout"][key] for key in ("cp", "ep", "dp", "cp_comm_type")] == [2, 4, 4, "p2p"]
    assert [experts["model"][key] for key in ("experts", "experts_per_token", "ffn")] == [8, 2, 1024]
    heads = planned(tmp_path, f"--megatron-args '{MEGATRON} {more} --cp-comm-type a2a' --cluster a100-8x8 --bits 8")
    assert heads["layout"]["cp_comm_type"] == "a2a"


# Output ---------------------------------------------------------------------------------------------------------


def test_a_slow_link_pays_and_its_settings_are_printed(tmp_path, layout):
    line = f"{layout()} --tp 4 --dp 2"
    found = planned(tmp_path, line)
    eight, four = found["widths"]["8"], found["widths"]["4"]
    assert 1 < eight["speed-up"] < four["speed-up"] < four["at most"]
    assert eight["settings"] == {"bits": 8, "backward_bits": 8, "grad_bits": 8}
    assert found["full precision"]["seconds"] == pytest.approx(eight["seconds"] * eight["speed-up"])
    out = run(line).output
    assert "--flash-allreduce --flash-allreduce-bits 8 --flash-allreduce-backward-bits 8" in out
    assert '{"bits": 8, "backward_bits": 8, "grad_bits": 8}' in out and "An estimate." in out


def test_a_fast_link_does_not_pay(layout):
    done = run(f"{layout(peak_flops='1T', ranks_per_node=8, intra='400GB/s', inter='400GB/s')} --tp 8")
    assert (
        done.exit_code == 0
        and "INT8: leave the plugin off" in done.output
        and "INT4: leave the plugin off" in done.output
    )


def test_only_gradients_pay(tmp_path, layout):
    """Plan tensor parallelism inside fast nodes and data parallelism over a slow wire: only the gradients pay."""
    line = f"{layout(peak_flops='10T', ranks_per_node=4, intra='900GB/s')} --tp 4 --dp 4 --bits 8"
    settings = planned(tmp_path, line)["widths"]["8"]["settings"]
    assert settings == {"bits": 8, "grad_bits": 8, "exclude": ["*"]}
    assert FlashConfig.from_dict(settings).grad_bits == 8
    assert "--flash-allreduce-exclude '*'" in run(line).output


def test_a_section_of_deepspeed(tmp_path, layout):
    from flash_allreduce_plugin.integrations.deepspeed.section import parse

    line = f"{layout(ranks_per_node=4, intra='100GB/s', inter='10gbit')} --dp 16 --zero 3 --bits 4"
    found = planned(tmp_path, line)
    settings = found["widths"]["4"]["settings"]
    assert settings == {"bits": 4, "param_bits": 8, "hierarchical": "auto"}
    assert parse({"flash_allreduce": settings}) is not None
    assert found["layout"]["framework"] == "deepspeed" and '"flash_allreduce": {"bits": 4' in run(line).output


@pytest.mark.parametrize("stage, at_four", [(0, None), (1, 4), (2, 4), (3, 8)])
def test_parameters_of_deepspeed_on_a_slow_link(tmp_path, layout, stage, at_four):
    """Use the gradients' bits where differences are sent, 8 where values are, none where nothing is gathered."""
    from flash_allreduce_plugin.integrations.deepspeed.section import parse

    line = f"{layout()} --dp 4 --framework deepspeed --zero {stage} --bits 8,4"
    found = planned(tmp_path, line)["widths"]
    for bits, parameters in (("8", at_four and 8), ("4", at_four)):
        settings = found[bits]["settings"]
        assert settings == {"bits": int(bits)} | ({"param_bits": parameters} if parameters else {})
        config = parse({"flash_allreduce": settings})
        assert config == FlashConfig.from_dict(settings)
        gathers = {part["bits"] for part in found[bits]["traffic"] if "parameters" in part["kind"]}
        assert gathers == ({parameters} if parameters else set())
    out = run(line).output
    assert ("param_bits: 8 bits at every width" in out) is (stage == 3)


def test_parameters_of_the_distributed_optimizer_on_a_slow_link(tmp_path, layout):
    line = f"{layout()} --dp 4 --zero 1 --bits 8,4"
    out, found = run(line).output, planned(tmp_path, line)["widths"]
    for bits in (8, 4):
        settings = found[str(bits)]["settings"]
        assert settings == {"bits": bits, "grad_bits": bits, "param_bits": bits}
        assert FlashConfig.from_dict(settings).param_bits == bits
        assert f"--flash-allreduce-grad-bits {bits} --flash-allreduce-param-bits {bits}" in out
    assert re.search(r"DP parameters +│ param_bits ", out), out
    assert "param_bits" not in run(f"{layout()} --dp 4 --bits 8,4").output, "all-reduced gradients: nothing is gathered"


def test_the_hooks_of_torch(tmp_path, layout):
    line = f"{layout()} --dp 4 --framework torch --bits 8"
    ddp = run(line).output
    assert "INT8: fap.ddp_hook(fap.FlashConfig(bits=8))" in ddp and "DP gradients" in ddp
    fsdp = run(f"{line} --zero 3").output
    assert "fap.FlashReduceScatter(fap.FlashConfig(bits=8)), fap.FlashAllGather(fap.FlashConfig(bits=8))" in fsdp
    found = planned(tmp_path, f"{line} --zero 3")["widths"]["8"]
    assert found["pays"] == ["grad_bits", "parameters"]
    assert {part["bits"] for part in found["traffic"]} == {8}
    four = planned(tmp_path, f"{line},4 --zero 3")["widths"]["4"]
    assert four["settings"] == {"bits": 4} and {part["bits"] for part in four["traffic"]} == {4}


@pytest.mark.parametrize(
    "more, training, overlap",
    [
        ("", {}, True),
        ("--zero 1 --framework deepspeed", {}, False),
        ("--zero 3", {}, True),
        ("", {"overlap": False}, False),
    ],
)
def test_traffic_that_arithmetic_hides(tmp_path, layout, more, training, overlap):
    assert planned(tmp_path, f"{layout(**training)} --dp 4 {more}")["layout"]["overlap"] is overlap


def test_numbers_of_ranks_plot_and_batch(tmp_path, layout):
    line = f"{layout()} --tp 2 --dp 2 --global-batch 8 --scale 3,4,8,64 --plot {tmp_path / 'plan.png'}"
    rows = planned(tmp_path, line)["scale"]
    assert [row["ranks"] for row in rows] == [3, 4, 8, 64]
    assert "not a multiple of TP x PP = 2" in rows[0]["why not"] and "does not divide by" in rows[3]["why not"]
    assert [row["layout"]["accumulation"] for row in rows[1:3]] == [4, 2]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_layout_that_does_not_fit_is_warned_about(tmp_path):
    """Check 16 bytes a parameter of 70 G over eight ranks: 141 GB, and activations."""
    line = "--model llama-2-70b --cluster h100-8x1 --tp 8 --framework deepspeed --bits 8"
    memory = planned(tmp_path, line)["memory"]
    assert memory["fits"] is False and memory["of"] == 80e9
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"] == pytest.approx(138e9, rel=0.01)
    out = run(f"{line} --scale 8,64").output
    assert "Warning: this layout does not fit" in out and "of 80 GB" in out and "! does not fit the GPU" in out
    fits = "--model llama-2-70b --cluster h100-8x16 --tp 8 --sequence-parallel --zero 1 --pp 2 --bits 8"
    assert planned(tmp_path, fits)["memory"]["fits"] is True and "Warning" not in run(fits).output
    assert planned(tmp_path, "--model llama-7b --cluster cpu --dp 2 --bits 8")["memory"]["fits"] is None


def test_words_and_units_are_explained():
    out = run("--model llama-3-70b --cluster h100-8x16 --tp 8 --pp 4 --sequence-parallel --zero 1 --bits 8").output
    for word in ("traffic", "setting", "exposed", "bubble", "speed-up", "t_comm / t_compute"):
        assert f"  {word}: " in out
    assert re.search(r"SP forward, scatter .* 75.2 GB ", out), out


# Where the output is written -----------------------------------------------------------------------------------------


def test_piped_stdout_has_the_result_alone(layout):
    command = [sys.executable, "-m", "flash_allreduce_plugin", "plan", *shlex.split(layout()), "--dp", "2"]
    text, pure = (subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["--json", "-"]))
    assert text.returncode == pure.returncode == 0 and not text.stderr
    assert json.loads(pure.stdout)["layout"]["dp"] == 2 and pure.stderr == text.stdout


def test_the_example_of_a_layout_is_json_that_can_be_planned(tmp_path):
    done = run("--layout-example")
    file = tmp_path / "layout.json"
    file.write_text(done.stdout)
    assert json.loads(done.stdout) == json.loads(layout_file.example())
    assert "# latency_us: microseconds of one exchange" in done.stderr
    found = planned(tmp_path, f"--layout {file} --dp 32 --bits 4")
    assert found["model"]["ffn"] == 24576 and found["layout"]["zero"] == 3 and found["layout"]["recompute"]
    assert found["layout"]["dp"] == 32, "flags go before the file"


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
        (f"--megatron-args '{MEGATRON} --moe-layer-freq 2' --cluster h100", "--moe-layer-freq is not covered"),
        (f"--megatron-args '{MEGATRON} --cp-comm-type allgather' --cluster h100", "expected a2a or p2p"),
        ("--model llama-7b --cluster h100 --ep 2", "--ep 2 does not divide the 0 experts"),
        ("--model llama-7b --cluster h100-8x3 --tp 4 --cp 4", "--tp 4 x --pp 1 x --cp 4 = 16 does not divide the 24"),
        ("--model llama-7b --cluster h100 --tp 3", "--tp 3 does not divide the 32 attention heads"),
        ("--model llama-7b --cluster h100 --pp 5", "--pp 5 does not divide the 32 layers"),
        ("--model llama-7b --cluster h100-8x2 --tp 4 --dp 3", "= 12 is not the 16 ranks"),
        ("--model llama-7b --cluster h100-8x3 --tp 16", "= 16 does not divide the 24 ranks"),
        ("--model llama-7b --cluster h100 --dp 4 --global-batch 6", "--global-batch 6 is not a multiple"),
        ("--model llama-7b --cluster h100 --zero 3 --framework megatron", "--zero 3 is DeepSpeed's"),
        ("--model llama-7b --cluster h100 --zero 2 --pp 2", "--zero 2 and --pp 2 exclude each other"),
        ("--model llama-7b --cluster h100 --framework torch --tp 2", "--framework torch is data-parallel"),
        ("--model llama-7b --cluster h100 --framework torch --zero 1", "--framework torch is data-parallel"),
        ("--model llama-7b --cluster h100 --bits 9", "--bits 9: expected different whole numbers from 2 to 8"),
        ("--model llama-7b --cluster h100 --bits eight", "--bits eight: expected"),
        ("--model llama-7b --cluster h100 --scale 8,,16", "--scale 8,,16: expected"),
        ("--model llama-7b --cluster h100 --framework jax", "--framework jax: expected megatron, deepspeed, torch"),
        ("--model llama-7b --cluster h100 --json /nowhere/x.json", "--json /nowhere/x.json: cannot be written"),
        ("--model llama-7b --cluster h100 --plot /nowhere/x.png", "--plot /nowhere/x.png: cannot be written"),
        ("--model /nowhere/config.json --cluster h100", "cannot be read"),
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
        ({"layer": 2}, "layer is not known; the nearest is layers."),
        ({"layers": 0}, "layers is 0; expected a whole number above 0."),
        ({"layers": True}, "layers is true; expected a whole number above 0."),
        ({"layers": "many"}, 'layers is "many"; expected a whole number above 0.'),
        ({"gated": 1}, "gated is 1; expected true or false."),
        ({"hidden": 100, "heads": 3}, "hidden 100 is not a multiple of the 3 attention heads"),
        ({"sequence": 1001, "tp": 8, "sequence_parallel": True}, "of 1001"),
        ({"inter": 400}, 'inter is 400; expected a text such as "450GB/s" or "400gbit".'),
        ({"inter": "400"}, "inter 400: expected a speed such as 450GB/s"),
        ({"intra": "fast"}, "intra fast: expected a speed"),
        ({"intra": "0GB/s"}, "intra 0GB/s: expected a speed"),
        ({"peak_flops": "many"}, "peak_flops many: expected a number above 0"),
        ({"memory": "80"}, "memory 80: expected a size such as 80GB"),
        ({"efficiency": 1.5}, "efficiency is 1.5; expected a number above 0 and up to 1"),
        ({"ranks_per_node": 4}, "ranks_per_node is 4"),
        ({"gradients": "int8"}, 'gradients is "int8"; expected "fp32", "bf16", "fp16".'),
        ({"zero": 4}, "zero is 4; expected 0, 1, 2, 3."),
        ("[]", "expected a JSON object; plan --layout-example prints one."),
        ("{", "expected a JSON object ("),
        ('{"heads": 1, "heads": 2}', "heads"),
        (None, "cannot be read (No such file or directory)."),
    ],
)
def test_a_bad_layout_is_one_sentence(tmp_path, content, said):
    file = tmp_path / "layout.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    done = CliRunner().invoke(
        app, ["plan", "--model", "llama-7b", "--cluster", "h100-8x2", "--layout", str(file)], env={"COLUMNS": "999"}
    )
    words = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and said in words and "Traceback" not in words, words


def test_without_model_or_cluster_the_keys_that_lack_are_named(tmp_path):
    file = tmp_path / "layout.json"
    for sections, said in (
        ({"layers": 2}, "--layout FILE with hidden, heads."),
        (SMALL | {"intra": "1GB/s", "inter": "1gbit"}, "--layout FILE with peak_flops, ranks_per_node."),
    ):
        file.write_text(json.dumps(sections))
        done = CliRunner().invoke(app, ["plan", "--layout", str(file)], env={"COLUMNS": "999"})
        assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ({**LLAMA, "hidden_size": "wide"}, "expected a whole number above 0 under hidden_size"),
        ({**LLAMA, "n_routed_experts": 8}, "shared experts are not covered"),
        ({"model_type": "llama"}, "expected a whole number above 0 under"),
    ],
)
def test_a_bad_config_is_one_sentence(tmp_path, content, said):
    done = run(f"--model {config(tmp_path, content)} --cluster h100")
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split())


def test_without_matplotlib_one_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--model llama-7b --cluster h100 --dp 2 --plot x.png")
    assert done.exit_code == 1 and "plan: matplotlib is not installed: " in done.output


def test_a_name_with_brackets(tmp_path):
    folder = tmp_path / "[bold]model"
    folder.mkdir()
    assert "[bold]model" in run(f"--model '{config(folder, LLAMA)}' --cluster h100 --dp 2").output.replace("\n", "")


def test_the_command_line_stays_light():
    """Check that `--help` imports nothing of plan's, and its arithmetic no torch."""
    script = "import sys; from flash_allreduce_plugin.cli import main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "pydantic", "matplotlib"} & set(loaded)
    assert "flash_allreduce_plugin.cli.plan.step_model" not in loaded
    script = "import sys; from flash_allreduce_plugin.cli.plan import step_model; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "pydantic"} & set(loaded)
