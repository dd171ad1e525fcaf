"""Rank 0's notices: the attachments, and a site that has quantized nothing, in real training of every kind."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry import counters, notices
from tests.codecs import gaussian
from tests.distributed import Ranks, run_ranks

ROOT = Path(__file__).parents[2]
STEPS = 4


def ddp(config: fap.FlashConfig) -> list[str]:
    model = DistributedDataParallel(nn.Linear(64, 128, bias=False))
    model.register_comm_hook(None, fap.ddp_hook(config))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(STEPS):
            model(torch.ones(2, 64)).sum().backward()
    return text.getvalue().splitlines()


def fsdp(config: fap.FlashConfig) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False))
    for module in (*model, model):
        fully_shard(module)
    for module in model.modules():
        module.set_custom_reduce_scatter(fap.FlashReduceScatter(config))  # type: ignore[operator]
        module.set_custom_all_gather(fap.FlashAllGather(config))  # type: ignore[operator]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(STEPS):
            model(torch.ones(2, 64)).sum().backward()
    return text.getvalue().splitlines()


def fsdp1(config: fap.FlashConfig) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False))
    model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    model.register_comm_hook(None, fap.fsdp1_hook(config))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(STEPS):
            model(torch.ones(2, 64)).sum().backward()
    return text.getvalue().splitlines()


def apex(config: fap.FlashConfig) -> list[str]:
    sys.path.insert(0, str(ROOT / "tests" / "integrations" / "apex_stub"))
    from apex.parallel import Reducer

    fap.apex.enable(config)
    model = nn.Linear(64, 128, bias=False)
    reducer, text = Reducer(model), io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(STEPS):
            model(torch.ones(2, 64)).sum().backward()
            reducer.reduce()
    return text.getvalue().splitlines()


SMALL = (
    "message below min_bytes (largest {}, min_bytes 1 MiB; set FlashConfig(min_bytes=...) or FLASH_ALLREDUCE_MIN_BYTES)"
)


@pytest.mark.parametrize(
    ("train", "to", "calls", "largest"),
    [
        (ddp, "DistributedDataParallel", "ddp.gradients has quantized none of its 2 calls: ", "32 KiB"),
        (fsdp, "FSDP2", "fsdp.gradients has quantized none of its 4 calls: ", "32 KiB"),
        (fsdp1, "FullyShardedDataParallel", "fsdp1.gradients has quantized none of its 2 calls: ", "48 KiB"),
        (apex, "apex.parallel", "apex.reducer has quantized none of its 2 calls: ", "32 KiB"),
    ],
)
def test_small_messages_are_named_once_on_rank_0(train: Any, to: str, calls: str, largest: str) -> None:
    first, second = run_ranks(2, train, fap.FlashConfig(min_bytes=1 << 20))
    assert second == []
    assert (
        f"flash all-reduce: attached to {to}: gradients in 8 bits, groups of 128, buckets from 1048576 bytes" in first
    )
    assert [line for line in first if "calls" in line and "parameters" not in line] == [
        f"flash all-reduce: {calls}{SMALL.format(largest)}"
    ]


@pytest.mark.parametrize("train", [ddp, fsdp, fsdp1])
def test_sites_that_quantize_print_nothing(train: Any) -> None:
    first, _ = run_ranks(2, train, fap.FlashConfig(min_bytes=0, bits=4))
    assert any("gradients in 4 bits" in line for line in first)
    assert not any("calls" in line for line in first)


@pytest.mark.parametrize(
    ("train", "said", "left"),
    [
        (ddp, "DistributedDataParallel: preset int4", ", error_feedback=true"),
        (fsdp, "FSDP2: preset int4", ", error_feedback=true"),
        (fsdp1, "FullyShardedDataParallel: preset int4 but error_feedback=false", ""),
        (apex, "apex.parallel: preset int4", ", error_feedback=true"),
    ],
)
def test_a_preset_is_named_with_its_fields(train: Any, said: str, left: str) -> None:
    first, _ = run_ranks(2, train, fap.FlashConfig(preset="int4", min_bytes=0))
    [line] = [line for line in first if "gradients in" in line]
    assert line == (
        f"flash all-reduce: attached to {said}, gradients in 4 bits, groups of 128, buckets from 0 bytes, "
        f"codebook=true{left}, spike_reserving=true"
    )


def test_a_disabled_plugin_prints_no_width() -> None:
    first, _ = run_ranks(2, ddp, fap.FlashConfig(enabled=False))
    assert first == [
        "flash all-reduce: attached to DistributedDataParallel, but switched off (enabled is false): every call runs "
        "in full precision"
    ]


def two_ddp_models() -> list[str]:
    """Interleave two models: the first quantizes, the buckets of the second are too small."""
    models = [DistributedDataParallel(nn.Linear(64, 128, bias=False)) for _ in range(2)]
    for model, min_bytes in zip(models, (0, 1 << 20), strict=True):
        model.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(min_bytes=min_bytes)))
    return printed_by(models)


def two_fsdp_models() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    models: list[nn.Module] = [nn.Sequential(nn.Linear(64, 128, bias=False)) for _ in range(2)]
    for model, min_bytes in zip(models, (0, 1 << 20), strict=True):
        fully_shard(model)
        model.set_custom_reduce_scatter(fap.FlashReduceScatter(fap.FlashConfig(min_bytes=min_bytes)))  # type: ignore[operator]
    return printed_by(models)


def two_fsdp1_models() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    models = [FullyShardedDataParallel(nn.Linear(64, 128), device_id=torch.device("cpu")) for _ in range(2)]
    for model, min_bytes in zip(models, (0, 1 << 20), strict=True):
        model.register_comm_hook(None, fap.fsdp1_hook(fap.FlashConfig(min_bytes=min_bytes)))
    return printed_by(models)


def two_apex_reducers() -> list[str]:
    """Use one configuration: the second model is too small for it."""
    sys.path.insert(0, str(ROOT / "tests" / "integrations" / "apex_stub"))
    from apex.parallel import Reducer

    fap.apex.enable(fap.FlashConfig(min_bytes=1 << 14))
    models = [nn.Linear(64, size, bias=False) for size in (128, 16)]
    reducers = [Reducer(model) for model in models]
    return printed_by(models, *(reducer.reduce for reducer in reducers))


def printed_by(models: Sequence[nn.Module], *after: Callable[[], Any]) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(STEPS):
            for number, model in enumerate(models):
                model(torch.ones(2, 64)).sum().backward()
                if after:
                    after[number]()
    return [line.removeprefix("flash all-reduce: ") for line in text.getvalue().splitlines() if "calls" in line]


@pytest.mark.parametrize(
    ("train", "site", "largest"),
    [
        (two_ddp_models, "ddp.gradients", "32 KiB"),
        (two_fsdp_models, "fsdp.gradients", "32 KiB"),
        (two_fsdp1_models, "fsdp1.gradients", "32.5 KiB"),
        (two_apex_reducers, "apex.reducer", "4 KiB"),
    ],
)
def test_the_second_model_gets_its_own_numbers(train: Callable[[], list[str]], site: str, largest: str) -> None:
    first, second = run_ranks(2, train)
    said = SMALL.format(largest) if site != "apex.reducer" else SMALL.format(largest).replace("1 MiB", "16 KiB")
    assert first == [f"{site} has quantized none of its 2 calls: {said}"]
    assert second == []


def test_one_rank_has_nothing_to_reduce() -> None:
    (lines,) = run_ranks(1, ddp, fap.FlashConfig(min_bytes=0))
    assert len(lines) == 1 and lines[0].endswith("; there is one rank and nothing to reduce")


def test_the_warm_up_is_waited_for() -> None:
    first, _ = run_ranks(2, ddp, fap.FlashConfig(min_bytes=0, warmup_steps=3))
    assert len(first) == 1 and "warmup_steps=3" in first[0]


def tally_of(*calls: tuple[str, Role, str | None]) -> counters.Tally:
    """Return the tally of calls (site, role, reason for full precision or None)."""
    tally = counters.Tally(lambda: None)
    for name, role, reason in calls:
        site = Site(name, role, tally=tally)
        if reason is None:
            counters.record_quantized(site, 1, 2)
        else:
            counters.record_full_precision(site, reason, 1, message=4096)
    return tally


def test_every_reason_has_a_way_out_of_it() -> None:
    tally = tally_of(
        ("t14.0", Role.BACKWARD, policy.is_full("backward_bits")),
        ("t14.1", Role.GRADIENT, policy.is_full("grad_bits")),
        ("t14.2", Role.EMBEDDING, policy.EMBEDDING),
        ("t14.3", Role.ANY, "dtype int64"),
        ("t14.4", Role.ANY, policy.WARM_UP),
        ("t14.5", Role.ANY, policy.ONE_RANK),
        ("t14.6", Role.FORWARD, policy.EVALUATION),
        ("t14.quantized", Role.ANY, None),
        ("t14.quantized", Role.ANY, policy.SMALL),
    )
    lines = notices.in_full_precision(tally, fap.FlashConfig(), lambda key: f"--{key}")
    assert list(lines.values()) == [
        "t14.0 has quantized none of its 1 calls: backward_bits is full (set --backward_bits)",
        "t14.1 has quantized none of its 1 calls: grad_bits is full (set --grad_bits)",
        "t14.2 has quantized none of its 1 calls: embedding (set --quantize_embedding)",
        "t14.3 has quantized none of its 1 calls: dtype int64",
        "t14.6 has quantized none of its 1 calls: evaluation (set --quantize_evaluation)",
    ]
    lines = notices.in_full_precision(tally, fap.FlashConfig(), lambda key: f"--{key}", passing=False)
    assert not any("dtype" in line for line in lines.values()) and len(lines) == 4


def test_every_field_that_keeps_a_call_is_named() -> None:
    """Use default fields: a gradient of an exchange needs two; a small message of a role in full precision too."""
    tally = tally_of(
        ("t39.0", Role.SEQUENCE_PARALLEL_GRADIENT, policy.is_full("backward_bits")),
        ("t39.1", Role.EXPERT_COMBINE_GRADIENT, policy.is_full("backward_bits")),
        ("t39.2", Role.LAYER_NORM, policy.LAYER_NORM),
        ("t39.3", Role.PARAMETER_DIFFERENCE, policy.SMALL),
        ("t39.4", Role.EXPERT, None),
        ("t39.4", Role.EXPERT_GRADIENT, policy.is_full("backward_bits")),
    )
    config = fap.FlashConfig(min_bytes=8192)
    lines = list(notices.in_full_precision(tally, config, lambda key: f"--{key}").values())
    assert lines == [
        "t39.0 has quantized none of its 1 calls: backward_bits is full (set --backward_bits and "
        "--sequence_parallel_gather_bits)",
        "t39.1 has quantized none of its 1 calls: backward_bits is full (set --backward_bits and --expert_bits)",
        "t39.2 has quantized none of its 1 calls: layer norm (set --quantize_layernorm and --grad_bits)",
        "t39.3 has quantized none of its 1 calls: message below min_bytes (largest 4 KiB, min_bytes 8 KiB; set "
        "--min_bytes and --param_bits)",
        "t39.4 has quantized 1 of its 2 calls: backward_bits is full (set --backward_bits and --expert_bits)",
    ]


def with_trial(own: float, better: float, bits: int = 4, name: str = "t40.gradients") -> counters.Tally:
    """Return the tally of a site with these dB, for its configuration and for codebook with spikes."""
    tally = tally_of((name, Role.ANY, None))
    counters.record_trial(
        Site(name, tally=tally), bits, (10.0, 10 * 10 ** (-own / 10)), (10.0, 10 * 10 ** (-better / 10))
    )
    return tally


def better(tally: counters.Tally, **fields: Any) -> list[str]:
    config = fap.FlashConfig(bits=4, **fields)
    return list(notices.better_at_few_bits(tally, config, lambda key: f"--{key}").values())


def test_a_site_with_low_sqnr_gets_a_line_about_codebook_and_spikes() -> None:
    said = "t40.gradients has 14 dB at 4 bits; codebook=true and spike_reserving=true would have 24 dB (set --codebook "
    assert better(with_trial(14.0, 23.8)) == [said + "and --spike_reserving)"]
    assert better(with_trial(14.0, 23.8), codebook=True) == [
        "t40.gradients has 14 dB at 4 bits; spike_reserving=true would have 24 dB (set --spike_reserving)"
    ]
    assert better(with_trial(14.0, 23.8), group_size=64, compact=True) == [
        "t40.gradients has 14 dB at 4 bits; codebook=true and spike_reserving=true and group_size=128 and "
        "compact=false would have 24 dB (set --codebook and --spike_reserving and --group_size and --compact)"
    ]


def test_a_site_that_is_not_poor_or_would_gain_little_is_left_in_peace() -> None:
    assert better(with_trial(17.1, 25.0)) == better(with_trial(14.0, 17.9)) == better(with_trial(10.1, 20.0, 3)) == []
    assert len(better(with_trial(9.9, 14.0, 3))) == len(better(with_trial(2.9, 9.0, 2))) == 1
    assert better(with_trial(math.nan, 20.0)) == []


def spoilt(config: fap.FlashConfig) -> list[str]:
    """Reduce gradients with one large element in each group."""
    model = DistributedDataParallel(nn.Linear(128, 512, bias=False))
    model.register_comm_hook(None, fap.ddp_hook(config))
    text, x = io.StringIO(), gaussian(1, 128)
    x[:, 7] = 30
    with contextlib.redirect_stdout(text):
        for _ in range(2 * STEPS):
            (model(x) * gaussian(512, seed=1)).sum().backward()
    return [line for line in text.getvalue().splitlines() if "would have" in line]


def test_a_training_at_4_bits_gets_one_line_without_measurements(
    ranks: Callable[[int], Ranks],
) -> None:
    first, second = ranks(2).run(spoilt, fap.FlashConfig(min_bytes=0, bits=4))
    assert second == []
    [line] = first
    assert line.startswith("flash all-reduce: ddp.gradients has ")
    assert " dB at 4 bits; codebook=true and spike_reserving=true would have " in line
    assert ranks(2).run(spoilt, fap.FlashConfig(min_bytes=0, bits=8)) == [[], []]


def test_two_attachments_do_not_hear_of_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Interleave calls at one site: the first quantizes, the second does not."""
    loud, silent = (notices.FirstSteps(fap.FlashConfig()) for _ in range(2))
    site = Site("t39.gradients")
    for step in range(STEPS):
        for steps, reason in ((loud, None), (silent, "dtype int64")):
            steps.at(step)
            own = steps.of(site)
            if reason is None:
                counters.record_quantized(own, 1, 2)
            else:
                counters.record_full_precision(own, reason, 1)
    assert capsys.readouterr().out.splitlines() == [
        "flash all-reduce: t39.gradients has quantized none of its 2 calls: dtype int64"
    ]


def test_without_steps_many_calls_are_looked_at_and_a_reason_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    steps = notices.FirstSteps(fap.FlashConfig(min_bytes=8192), framework="t40")
    for _ in range(4500):
        counters.record_full_precision(Site("t40.forward"), policy.SMALL, 1, message=4096)
    counters.record_full_precision(Site("t41.forward"), policy.SMALL, 1, message=4096)
    assert capsys.readouterr().out.splitlines() == [
        "flash all-reduce: t40.forward has quantized none of its 1000 calls: message below min_bytes (largest 4 KiB, "
        "min_bytes 8 KiB; set FlashConfig(min_bytes=...) or FLASH_ALLREDUCE_MIN_BYTES)"
    ]
    assert not steps.over


def without_a_slot() -> tuple[list[str], dict[str, int]]:
    """Return the output and the counters of calls with and without a slot, of activations, and in full precision."""
    config = fap.FlashConfig(bits=4, grad_bits=4, error_feedback=True, min_bytes=4096)
    owner, x = fap.Feedback.from_config(config), torch.ones(1024)
    result, text = x.new_empty(1024), io.StringIO()
    fap.reset_stats()
    with contextlib.redirect_stdout(text):
        for _ in range(2):
            fap.all_reduce(x.clone(), config=config, site=Site("no slot"))
            fap.all_reduce(x.clone(), config=config, site=Site("slot"), feedback=owner.slot("x"))
            fap.all_reduce(x.clone(), config=config, site=Site("activations", Role.FORWARD))
            fap.all_reduce(x[:1023].clone(), config=config, site=Site("small"))
            fap.reduce_scatter(result, torch.ones(2048), config=config, site=Site("no slot either", Role.GRADIENT))
    sites = {name: site["residuals_dropped"] for name, site in fap.stats()["sites"].items()}
    return text.getvalue().splitlines(), {name: dropped for name, dropped in sites.items() if dropped}


def test_error_feedback_without_a_slot_has_one_line_a_site_and_is_counted(ranks: Callable[[int], Ranks]) -> None:
    (said, counted), (others, same) = ranks(2).run(without_a_slot)
    assert [line.partition(":")[2].partition(":")[0] for line in said] == [
        f" error_feedback=true has no effect at {site}" for site in ("no slot", "no slot either")
    ]
    assert "pass feedback=owner.slot(name)" in said[0] and not others
    assert counted == same == {site: {"call without a slot": 2} for site in ("no slot", "no slot either")}


@pytest.mark.parametrize(("count", "said"), [(8, "8 bytes"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (1536, "1.5 KiB")])
def test_sizes(count: int, said: str) -> None:
    assert notices.size(count) == said


# Variables that have no effect

INIT = """
import torch
from flash_allreduce_plugin import autoload
autoload.load()
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
"""
# Without it a thread of gloo's may abort the process while the interpreter ends (pytorch #190489).
DESTROY = "\ndist.destroy_process_group()"
PLAIN = INIT + "dist.all_reduce(x)" + DESTROY
USED = INIT + "import flash_allreduce_plugin as fap; fap.all_reduce(x)" + DESTROY


def program(script: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ALLREDUCE_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **environment}
    env.update(RANK="0", WORLD_SIZE="1")
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unread_fields_are_named_at_the_end() -> None:
    said = program(PLAIN, FLASH_ALLREDUCE_BITS="4", FLASH_ALLREDUCE_LOG="")
    assert said.startswith("flash all-reduce: set, and read by nothing in this program: FLASH_ALLREDUCE_BITS; ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        (PLAIN, {}),
        (PLAIN, {"FLASH_ALLREDUCE_REFERENCE": "0"}),
        (PLAIN, {"FLASH_ALLREDUCE_BITS": "4", "FLASH_ALLREDUCE_AUTOLOAD": "0"}),
        (USED, {"FLASH_ALLREDUCE_BITS": "4"}),
        ("from flash_allreduce_plugin import autoload; autoload.load(); import torch", {"FLASH_ALLREDUCE_BITS": "4"}),
    ],
    ids=["none set", "a switch", "autoload is off", "used", "no training"],
)
def test_else_the_end_is_silent(script: str, environment: dict[str, str]) -> None:
    assert program(script, **environment) == ""


def test_importing_prints_nothing() -> None:
    assert not dist.is_initialized()
    assert program("import flash_allreduce_plugin.api.reductions", FLASH_ALLREDUCE_BITS="4") == ""
