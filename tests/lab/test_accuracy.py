"""lab/benchmarks/accuracy.py: formats of other projects match their description, the frontier is one, checks fail."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.benchmarks import accuracy, accuracy_report, accuracy_tensors, peer_codecs, smollm2
from lab.benchmarks.accuracy import Frontier, Point
from lab.benchmarks.accuracy_tensors import Sample
from lab.benchmarks.peer_codecs import E2M1, E2M3, E4M3, FLOATS, PEERS, Peer
from tests.lab import run_command, tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {peer.name: peer for peer in (*PEERS, *FLOATS)}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample(numel: int = 1 << 14) -> Sample:
    return accuracy_tensors.made_up(numel, seed=1)[0]


@pytest.mark.parametrize(("name", "db"), [("FBGEMM 8", 44.6), ("FBGEMM 4", 20.0), ("FBGEMM 2", 6.0)])
def test_sqnr_of_one_rounding_is_the_known_one(name: str, db: float) -> None:
    x = gaussian(1024, 128)
    assert accuracy.sqnr_db(x, BY_NAME[name].round_trip(x)[0]) == pytest.approx(db, abs=0.1)


@pytest.mark.parametrize(
    ("name", "db"),
    # ROCm/aiter, pull requests 4970 and 5554: all-reduces over 8 devices.
    [("QuickReduce INT4", 18.3), ("QuickReduce INT6", 30.4), ("FlyDSL INT4", 19.2), ("FlyDSL INT6", 30.2)],
)
def test_sqnr_of_an_all_reduce_is_the_published_one(name: str, db: float) -> None:
    ranks = [gaussian(256, 256, seed=rank) for rank in range(8)]
    exact = torch.stack(ranks).double().sum(0)
    assert accuracy.sqnr_db(exact, accuracy.all_reduce(BY_NAME[name], ranks)) == pytest.approx(db, abs=0.15)


@pytest.mark.parametrize(
    ("name", "count"),  # of 96 rows of 256
    [
        ("Flash Comm. INT4", 96 * 2 * (64 + 4)),
        ("Flash Comm. INT5", 96 * 2 * (80 + 4)),
        ("Flash Comm. V2 INT2 spikes", 96 * 8 * (8 + 8)),
        ("SDP4Bit gradients", 96 * 2 * (64 + 4)),
        ("SDP4Bit differences", 12 * (1024 + 4)),
        ("QuickReduce INT4", 96 * (128 + 8 * 2)),
        ("QuickReduce INT6", 96 * (192 + 8 * 2)),
        ("QuickReduce INT8", 96 * (256 + 8 * 2)),
        ("FlyDSL INT4", 96 * (128 + 16)),
        ("FlyDSL INT6", 96 * (192 + 16)),
        ("FlashInfer FP8", 96 * (256 + 4)),
        ("torchft FP8", 96 * (256 + 4)),
        ("TACO FP8", 96 * (256 + 2 * 8)),
        ("DeepSpeed INT4", 96 * 128 + 256 * 4),
        ("DeepSpeed INT8", 96 * 256 + 256 * 4),
        ("DynamiQ 4", 96 * (128 + 16 + 2)),
        ("THC 4", 96 * 192 + 3 * 4),
        ("FBGEMM 2", 96 * 2 * (32 + 4)),
        ("FBGEMM 4", 96 * 2 * (64 + 4)),
        ("FBGEMM 8", 96 * 2 * (128 + 8)),
        ("MXFP4", 96 * 8 * (16 + 1)),
        ("MXFP6 e2m3", 96 * 8 * (24 + 1)),
        ("MXFP8 e4m3", 96 * 8 * (32 + 1)),
        ("NVFP4", 96 * 16 * (8 + 1) + 4),
        ("e2m1 g128", 96 * 2 * (64 + 2)),
        ("e4m3 g32", 96 * 8 * (32 + 2)),
    ],
)
def test_bytes_are_counted(name: str, count: int) -> None:
    decoded, counted = BY_NAME[name].round_trip(gaussian(96, 256))
    assert (counted, decoded.shape) == (count, (96, 256))


@pytest.mark.parametrize("peer", [*PEERS, *FLOATS], ids=lambda peer: peer.name)
def test_zeros_and_the_scale_do_not_matter(peer: Peer) -> None:
    x = gaussian(64, 256)
    x[:8] = 0
    decoded, _ = peer.round_trip(x)
    assert decoded.isfinite().all()
    assert torch.equal(decoded[:8], x[:8]) or peer.name == "THC 4"  # which rotates all of the tensor
    larger, _ = peer.round_trip(x * 4)
    assert accuracy.sqnr_db(x * 4, larger) == pytest.approx(accuracy.sqnr_db(x, decoded), abs=0.05)


def test_minifloats_are_the_formats() -> None:
    x = gaussian(1 << 14) * gaussian(1 << 14, seed=1).exp() * 30
    assert torch.equal(E4M3.round(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX v1.0, table 5
    assert E2M1.round(torch.linspace(-9, 9, 5001)).unique().tolist() == sorted({s * v for v in values for s in (-1, 1)})
    assert E2M1.round(torch.tensor([0.25, 0.75, 2.5, 5.0])).tolist() == [0, 1, 2, 4]  # ties to even
    assert E2M3.round(torch.tensor([7.4, 100.0, 0.06, 0.07])).tolist() == [7.5, 7.5, 0, 0.125]


def test_the_greatest_element_is_quickreduce_lowest_code() -> None:
    """Check both signs, and even and odd elements apart."""
    x = torch.zeros(1, 64)
    x[0, 2], x[0, 3], x[0, 4], x[0, 5] = 8.0, -16.0, -7.0, 15.0
    decoded, _ = peer_codecs.quickreduce(x, bits=4)
    assert decoded[0, :6].tolist() == [0, 0, 8.0, -16.0, -7.0, 14.0]  # 15 of 16 lies beyond the code 7


def test_settings_are_all_there_under_names_of_their_own() -> None:
    assert len(accuracy.SETTINGS) == len(accuracy.settings()) == 7 * 6 * 24 + 7 * 4 * 8


def test_frontier_rises_and_keeps_to_the_budget() -> None:
    points = [Point("a", 4.0, 20.0), Point("b", 4.0, 21.0), Point("c", 5.0, 19.0), Point("d", 6.0, 30.0)]
    frontier = Frontier(points)
    assert [at.name for at in frontier.points] == ["b", "d"]
    best = [frontier.best(bits) for bits in (3.9, 4.0, 5.9, 6.0, 99.0)]
    assert [at and at.name for at in best] == [None, "b", "b", "d", "d"]
    measured = accuracy.measure(sample(4096), ())["frontier"].points
    assert all(low.bits < high.bits and low.db < high.db for low, high in pairwise(measured))
    assert measured[-1].db > 45


def test_the_measured_all_reduce_is_two_roundings() -> None:
    c = accuracy.SETTINGS["4/64 m"]
    ranks = [gaussian(64, 256, seed=rank) for rank in range(3)]
    ours = Peer("ours", lambda x: accuracy.one_rounding(c, x))
    assert torch.equal(accuracy.our_all_reduce(c, ranks), accuracy.all_reduce(ours, ranks))


def test_bytes_of_the_ranks_add_up() -> None:
    """Check that 2 ranks and 8 give the sum that one rank computes."""
    seen = accuracy_tensors._Seen(gaussian(4, 8, 32).double(), gaussian(24, 32).double(), gaussian(4, 8, 24).double())
    assert seen.input is not None and seen.weight is not None and seen.gradient is not None
    for ranks in (2, 8):
        for parts, whole in (
            (seen.activations(ranks), (seen.input @ seen.weight.T).flatten(0, 1)),
            (seen.input_gradients(ranks), (seen.gradient @ seen.weight).flatten(0, 1)),
            (seen.weight_gradients(ranks), torch.einsum("sbo,sbi->oi", seen.gradient, seen.input)),
        ):
            assert len(parts) == ranks
            torch.testing.assert_close(sum(parts), whole)


def test_samples_have_a_root_mean_square_near_one_by_a_power_of_two() -> None:
    parts = {ranks: [gaussian(8, 8, seed=rank) * 3e-6 for rank in range(ranks)] for ranks in (2, 8)}
    made = accuracy_tensors._normalized("tiny", "made up", parts)
    factor = float(made.one[0, 0] / parts[2][0][0, 0])
    assert 0.7 < float(made.one.square().mean().sqrt()) < 1.42
    assert math.log2(factor) == round(math.log2(factor))


@pytest.mark.parametrize(("bits", "is_better"), [(2, True), (32, False)])
def test_check_fails_when_a_peer_is_better(
    bits: int, is_better: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let a peer be nearly exact at 2 bits, which is better, and hardly right at 32 bits, which is not."""
    peer = Peer("rival", lambda x: (x * (0.999 if is_better else 0.5), x.numel() * bits // 8))
    monkeypatch.setattr(accuracy, "PEERS", (peer,))
    monkeypatch.setattr(
        sys, "argv", ["accuracy", "--numel", "4096", "--steps", "0", "--pretrained-steps", "0", "--check"]
    )
    threads = torch.get_num_threads()
    try:
        assert run_command(accuracy) == (1 if is_better else 0)
    finally:  # one is its own setting: two wait for each other at tensors of this size
        torch.set_num_threads(threads)
    assert ("rival wins on Gaussian: 60.00 dB" in capsys.readouterr().out) == is_better


def test_tokens_weigh_the_same_in_a_pretrained_model() -> None:
    """Make one exact token hold all the energy: the others, a tenth off, still give 20 dB."""
    exact = torch.ones(10, 8)
    exact[3], exact[4] = 1e6, 0.0
    off = exact.clone()
    off[torch.arange(10) != 3] *= 1.1
    assert accuracy.sqnr_db(exact, off, by_row=True) == pytest.approx(20.0 + 10 * math.log10(9 / 8), abs=0.01)
    assert accuracy.sqnr_db(exact, off) > 100
    assert accuracy.sqnr_db(exact, exact, by_row=True) == math.inf


def test_spikes_of_flash_communication_v2() -> None:
    """Check that the extremes arrive as bf16, and do not widen the range of the others."""
    x = torch.linspace(-1, 1, 32).view(1, 32)
    x[0, 5], x[0, 9] = 1000.0, -3000.0
    decoded, _ = peer_codecs.flash_communication_v2(x, bits=4)
    assert decoded[0, 5] == 1000 and decoded[0, 9] == -3008  # the nearest bf16
    others = torch.ones(32, dtype=torch.bool)
    others[5] = others[9] = False
    assert float((decoded - x)[0, others].abs().max()) < 1.01 / 15
    plain, _ = peer_codecs.flash_communication(x.repeat(1, 4), bits=4)
    assert float((plain[0, :32] - x)[0, others].abs().max()) > 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf.write(file)
    return file


def test_samples_of_a_pretrained_model(tiny: Path) -> None:
    """Check three layers, two blocks, four kinds: sums are those of one rank, and a step moves every weight."""
    text = "".join(smollm2.texts().values())
    threads = torch.get_num_threads()
    samples = list(accuracy_tensors.of_pretrained(smollm2.load(tiny), text, steps=2))
    assert torch.get_num_threads() == threads
    assert len(samples) == len({one.name for one in samples}) == 3 * 2 * 4
    for one in samples:
        if one.kind == "parameter step":
            assert set(one.ranks) == {1} and float((one.one != 0).float().mean()) > 0.99
            continue
        assert {n: len(parts) for n, parts in one.ranks.items()} == {2: 2, 8: 8}
        assert one.by_row == (one.kind != "weight gradient")
        whole = sum(one.ranks[2])
        assert isinstance(whole, Tensor)
        # Each has been multiplied by one power of two for all numbers of ranks.
        torch.testing.assert_close(sum(one.ranks[8]), whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))


def test_the_table_on_real_tensors_stands_first(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {name: accuracy.SETTINGS[name] for name in accuracy.NAMED}
    monkeypatch.setattr(accuracy, "SETTINGS", chosen)
    command = ["accuracy", "--numel", "4096", "--steps", "0", "--pretrained-steps", "2", "--json", f"{tmp_path}/a.json"]
    threads = torch.get_num_threads()
    try:
        monkeypatch.setattr(sys, "argv", [*command, "--weights", str(tiny)])
        run_command(accuracy)
        printed, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
        monkeypatch.setattr(sys, "argv", [*command, "--weights", "nowhere.gguf"])
        run_command(accuracy)
        without, alone = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    finally:
        torch.set_num_threads(threads)
    first = "Ours (**) and others' formats, mean dB of one rounding, "
    assert printed.index(first + "real tensors") < printed.index(first + "made-up tensors")
    kinds = {tensor["kind"] for tensor in found["real"]["tensors"]}
    assert kinds == {"activation", "activation gradient", "weight gradient", "parameter step"}
    header, *lines = accuracy_report.by_kind(found["real"])
    assert header[2:] == ["activations", "activation gradients", "weight gradients", "AdamW steps"]
    assert {f"**{name}**" for name in accuracy.NAMED} < {line[0] for line in lines}
    assert {"SDP4Bit differences", "Flash Comm. INT4", "MXFP4", "DynamiQ 4"} < {line[0] for line in lines}
    bits = [float(str(line[1])) for line in lines]
    assert bits == pytest.approx(sorted(bits, reverse=True), abs=0.01)
    assert "no file" in without and "The tables on real tensors are left out." in without
    assert "real" not in alone and first + "real tensors" not in without
    assert alone["tensors"] == found["tensors"]


def test_simplest_of_equal_settings() -> None:
    assert accuracy.simplest({"4/64 Hm": 21.0, "4/64 m": 20.97, "4/64": 20.9, "4/128 m": 20.96}) == "4/64 m"


def other(name: str, lead: float, at_2: float, at_8: float, *, is_peer: bool = True) -> dict[str, object]:
    two = {
        "our dB at 2 ranks": 20.0,
        "dB at 2 ranks": 20.0 - at_2,
        "our dB at 8 ranks": 20.0,
        "dB at 8 ranks": 20.0 - at_8,
    }
    return {"name": name, "bits": 4.5, "is peer": is_peer, "difference": lead, **two}


def tensor(name: str, *rows: dict[str, object]) -> dict[str, Any]:
    return {"tensor": name, "others": accuracy.columns(rows)}


def test_tables_have_the_least_and_mean_leads_and_every_loss() -> None:
    result = {
        "tensors": [
            tensor("a", other("rival", 1.0, 2.0, 3.0), other("e2m1 g64", 0.5, 1.0, 0.2, is_peer=False)),
            tensor("b", other("rival", 2.0, -0.5, 1.0), other("e2m1 g64", 1.5, 1.0, 0.4, is_peer=False)),
        ]
    }
    assert accuracy_report.rivals(result)[1:] == [["rival", "4.500", "+1.00", "+1.50", "+1.00", "+2.00"]]
    assert accuracy_report.lost(result)[1:] == [["rival", "b", "+2.00", "-0.50", "+1.00"]]
    assert accuracy_report.floats(result)[1:] == []  # with this codec's groups, and behind everywhere
    result["tensors"][1]["others"]["difference"][1] = -0.25
    assert accuracy_report.floats(result)[1:] == [["e2m1 g64", "4.500", "-0.25", "+0.12", "+0.20", "+0.30"]]


def test_end_to_end(tmp_path: Path) -> None:
    """Capture a short training, print the tables, write the figures and the plot."""
    pytest.importorskip("megatron.core", reason="the training needs megatron-core")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    command = [sys.executable, "-W", "ignore", "-m", "lab.benchmarks.accuracy", "--numel", "2048", "--steps", "3"]
    command += ["--pretrained-steps", "0", "--hidden", "32", "--layers", "2"]
    command += ["--json", f"{tmp_path}/a.json", "--plot", f"{tmp_path}/a.png"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    tensors = found["tensors"]
    names = [tensor["tensor"] for tensor in tensors]
    assert len(names) == len(set(names)) == 4 + 18
    assert {name.rpartition(" ")[2] for name in names if "gradient" in name} == {"early", "middle", "late"}
    assert all(math.isfinite(db) for tensor in tensors for db in tensor["others"]["dB"])
    assert set(found["recommended"]) == {"activation", "activation gradient", "weight gradient", ""}
    assert [len(of["dB"]) for of in found["settings"].values()] == [5] * len(accuracy.NAMED)
    assert "8 ranks: least" in done.stdout and "The setting least behind each tensor's own best" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
