"""DeepSpeed's AutoTP: sums forward at bits, their gradients at backward_bits, copies equal on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import autotp_training as autotp
import pytest
import torch
from autotp_training import BACKWARD, BF16, EIGHT, EMBEDDING, FORWARD, HEAD, LAYERS, ROW_HEAD, options, train
from deepspeed_training import NEWEST, deepspeed

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations.deepspeed import engine as engines_of
from flash_allreduce_plugin.integrations.deepspeed import section, tensor_parallel
from flash_allreduce_plugin.integrations.deepspeed.reduction import LOGITS
from tests.distributed import POOLS, Pool, Ranks

pytestmark = NEWEST

STEPS = 6
SUMS, GRADIENTS = 2 * LAYERS, 5 * LAYERS  # of a step
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # options, all-reduces of gradients in a step
    "stage0": (options(0), GRADIENTS),
    "stage1-bf16": ({**options(1), **BF16}, GRADIENTS),
    "stage2": (options(2), GRADIENTS),
    "stage1-overlap": (options(1, tp_overlap_comm=True), GRADIENTS),
    "stage2-gathered-head": (options(2, head=HEAD), GRADIENTS + 1),
    "stage3": (options(3), GRADIENTS),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[int], Ranks]]:
    """Yield ranks of this file's own: later engines of a process would find AutoTP's groups in DeepSpeed's globals."""
    pool = Pool()
    yield pool
    pool.close()
    POOLS.remove(pool)


def exact_and_eight(given: dict[str, Any], flash: Any = EIGHT, tied: bool = False) -> list[dict[str, Any]]:
    return [train(given, one, STEPS, tied) for one in (None, flash)]


@pytest.mark.parametrize("name", CASES)
def test_training_in_8_bits_is_as_good_and_copies_stay_equal(engines: Callable[[int], Ranks], name: str) -> None:
    given, gradients = CASES[name]
    outcomes = engines(2).run(exact_and_eight, given)
    for exact, eight in outcomes:
        assert eight["losses"] == pytest.approx(exact["losses"], abs=0.01) and eight["losses"] != exact["losses"]
        assert eight["evaluated"] == pytest.approx(exact["evaluated"], abs=0.01)
        assert all(eight["equal"]) and len(eight["equal"]) == STEPS
        for site, calls in ((FORWARD, SUMS), (BACKWARD, gradients)):
            counted = eight["sites"][site]
            assert counted["calls"] == counted["quantized"] == calls * STEPS and counted["bits"] == 8
            whole = 0.52 if "bf16" in given else 0.26
            assert counted["bytes_sent"] < whole * counted["bytes_full_precision"]
        assert eight["evaluation"][FORWARD]["quantized"] == SUMS
        assert {FORWARD, BACKWARD} <= eight["in_place"]
        assert not exact["sites"]
    (_, first), (_, second) = outcomes
    assert second["lines"] == [] and first["losses"] == second["losses"]
    assert len(first["lines"]) == 1, "a data-parallel group of one rank is no reason for a notice"
    assert "gradients in 8 bits, sums of tensor parallelism in 8 (their gradients in 8), groups of" in first["lines"][0]


def asynchronous() -> list[tuple[str, bool, bool]]:
    """Return (site, asked for a handle, the handle was waited for) of each sum of a step with tp_overlap_comm."""
    engine = autotp.built(options(1, tp_overlap_comm=True), EIGHT)
    calls: list[tuple[str, bool, Any]] = []
    ours = reductions.all_reduce

    def all_reduce(tensor: torch.Tensor, **how: Any) -> Any:
        handle = ours(tensor, **how)
        if handle is not None:
            handle = mock.Mock(wraps=handle)
        calls.append((how["site"].name, how["async_op"], handle))
        return handle

    with mock.patch.object(tensor_parallel.reductions, "all_reduce", all_reduce):
        loss = engine(autotp.words(0))
        engine.backward(loss)
    return [(site, given, handle is not None and handle.wait.call_count == 1) for site, given, handle in calls]


def test_overlapped_sums_are_started_and_waited_for_where_deepspeed_waits(engines: Callable[[int], Ranks]) -> None:
    expected = Counter({(FORWARD, False, False): SUMS, (BACKWARD, True, True): GRADIENTS})
    for found in engines(2).run(asynchronous):
        assert Counter(one for one in found if one[0] in (FORWARD, BACKWARD)) == expected


def test_logits_of_a_row_parallel_head_stay_in_full_precision(engines: Callable[[int], Ranks]) -> None:
    for exact, eight in engines(2).run(exact_and_eight, options(1, head=ROW_HEAD)):
        assert eight["losses"] == pytest.approx(exact["losses"], abs=0.01) and all(eight["equal"])
        assert eight["sites"][FORWARD]["full_precision"] == {LOGITS: STEPS}
        assert eight["sites"][FORWARD]["quantized"] == SUMS * STEPS
        assert eight["sites"][BACKWARD]["quantized"] == (GRADIENTS + 1) * STEPS


def embeddings() -> list[dict[str, Any]]:
    given = options(1, vocab_parallel_lm_head=True)
    return [train(given, flash, 3, True) for flash in (EIGHT, {**EIGHT, "quantize_embedding": True})]


def test_a_split_embedding_is_quantized_on_request(engines: Callable[[int], Ranks]) -> None:
    for without, quantized in engines(2).run(embeddings):
        assert without["sites"][EMBEDDING]["full_precision"] == {"embedding": 3}
        assert quantized["sites"][EMBEDDING]["quantized"] == 3
        assert quantized["losses"] == pytest.approx(without["losses"], abs=0.01)
        assert quantized["losses"] != without["losses"]
        assert all(quantized["equal"])
        beside = [name for name in quantized["beside"] if name.startswith("all_reduce")]
        assert beside, "the cross entropy's sums are DeepSpeed's own"


def with_gradients_of_copies() -> list[dict[str, Any]]:
    """Train with norms in front of split layers. DeepSpeed sums their gradients itself (q_norm and k_norm of Qwen3)."""
    given = options(1)
    specs = given["tensor_parallel"]["partition_config"]["layer_specs"]
    specs.append({"patterns": [r".*\.other_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True})
    return [train(given, flash) for flash in (None, EIGHT)]


def test_gradients_of_replicated_parameters_stay_in_full_precision(engines: Callable[[int], Ranks]) -> None:
    for exact, eight in engines(2).run(with_gradients_of_copies):
        assert eight["losses"] == pytest.approx(exact["losses"], abs=0.01) and all(eight["equal"])
        assert eight["sites"][FORWARD]["calls"] == SUMS * STEPS
        assert eight["sites"][BACKWARD]["calls"] == GRADIENTS * STEPS
        sent = [one for name, one in eight["beside"].items() if name.startswith("all_reduce")]
        assert sum(one["calls"] for one in sent) >= LAYERS * STEPS


def data_and_tensor_parallel() -> list[dict[str, Any]]:
    small = {**EIGHT, "min_bytes": 4 * autotp.WIDTH + 1}
    return [train({**options(1), **more}, flash) for more in ({}, BF16) for flash in (None, small)]


def test_data_parallel_and_tensor_parallel(engines: Callable[[int], Ranks]) -> None:
    for exact, eight, exact_bf16, bf16 in engines(4).run(data_and_tensor_parallel):
        for one, other in ((exact, eight), (exact_bf16, bf16)):
            assert other["losses"] == pytest.approx(one["losses"], abs=0.02)
            assert all(other["equal"])
            assert other["sites"]["deepspeed.stage1.gradients"]["quantized"] > 0
            for site, calls in ((FORWARD, SUMS), (BACKWARD, GRADIENTS)):
                assert other["sites"][site]["quantized"] == calls * STEPS


def with_fields() -> dict[str, dict[str, Any]]:
    flashes = {
        "forward alone": {"bits": 8, "min_bytes": 0},
        "evaluation": {**EIGHT, "quantize_evaluation": False},
        "warm-up": {**EIGHT, "warmup_steps": 2},
        "include": {**EIGHT, "include": ["layers.0.*"]},
        "exclude": {**EIGHT, "exclude": ["*.down_proj", "*.q_proj", "*.nowhere"]},
        "small": {**EIGHT, "min_bytes": 1 << 20},
        "off": {**EIGHT, "enabled": False},
        "stochastic": {**EIGHT, "backward_bits": 6, "backward_rounding": "stochastic"},
        "int4": {"preset": "int4", "min_bytes": 0},
        "int8": {"preset": "int8", "min_bytes": 0},
    }
    return {name: train(options(2), flash, 4) for name, flash in flashes.items()}


def test_fields_act_as_in_megatron(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(with_fields)
    for found in (first, second):
        exact = {
            name: {site: one["sites"][site]["full_precision"] for site in (FORWARD, BACKWARD)}
            for name, one in found.items()
        }
        sums, gradients = 4 * SUMS, 4 * GRADIENTS
        assert exact["forward alone"] == {FORWARD: {}, BACKWARD: {"backward_bits is full": gradients}}
        assert exact["evaluation"] == {FORWARD: {}, BACKWARD: {}}
        assert found["evaluation"]["evaluation"][FORWARD]["full_precision"] == {"evaluation": SUMS}
        assert exact["warm-up"] == {FORWARD: {"warm-up": sums // 2}, BACKWARD: {"warm-up": gradients // 2}}
        assert exact["include"] == {
            FORWARD: {"not in include": sums // 2},
            BACKWARD: {"not in include": gradients // 2},
        }
        assert exact["exclude"] == {FORWARD: {"in exclude": sums // 2}, BACKWARD: {"in exclude": gradients // 5}}
        assert exact["small"][FORWARD] == {"message below min_bytes": sums}
        assert exact["off"][BACKWARD] == {"disabled by configuration": gradients}
        for name in ("stochastic", "int4", "int8"):
            assert exact[name] == {FORWARD: {}, BACKWARD: {}}
        assert all(all(one["equal"]) for one in found.values())
        bits = {name: [found[name]["sites"][site]["bits"] for site in (FORWARD, BACKWARD)] for name in found}
        assert bits["stochastic"] == [8, 6] and bits["int4"] == [6, 6] and bits["int8"] == [8, 8]
    notices = {
        name: [line.removeprefix("flash all-reduce: ") for line in one["lines"][1:]] for name, one in first.items()
    }
    assert notices["forward alone"] == [
        f"{BACKWARD} has quantized none of its {3 * GRADIENTS} calls: backward_bits is full "
        '(set "backward_bits" in the section "flash_allreduce")'
    ]
    assert notices["exclude"][0] == (
        "exclude pattern '*.nowhere' matches no layer that AutoTP has split; such layers are named like "
        "'layers.0.q_proj'."
    )
    assert [notices[name] for name in ("evaluation", "int8", "off")] == [[], [], []]
    assert (
        "gradients in 4 bits, differences of parameters in 4, sums of tensor parallelism in 6 (their"
        in first["int4"]["lines"][0]
    )


def undone() -> dict[str, Any]:
    """Train an engine with a section and one without, and end both."""
    deepspeed()
    engines_of.detach()
    deepspeed()
    from deepspeed.module_inject import layers

    places = [
        (getattr(layers, seam.attribute.split(".")[0]), seam.attribute.split(".")[1])
        for seam in engines_of.of_tensors().seams
    ]
    theirs = [vars(owner)[name] for owner, name in places]
    alone = autotp.built(options(0), None)
    untouched = [vars(owner)[name] for owner, name in places] == theirs
    served = autotp.built(options(0), EIGHT)
    during = [vars(owner)[name] for owner, name in places]
    fap.reset_stats()
    autotp.step(alone, 0)
    uncounted = fap.stats()["quantized"]
    autotp.step(served, 0)
    counted = fap.stats()["quantized"]
    layers.RowParallel.forward = staticmethod(lambda *given: None)
    with pytest.raises(PatchError, match="replaced again after us"):
        engines_of.detach()
    layers.RowParallel.forward = during[0]
    loss = served(autotp.words(1))
    engines_of.detach()  # between a forward and its backward
    after = [vars(owner)[name] for owner, name in places]
    fap.reset_stats()
    served.backward(loss)
    served.step()
    autotp.step(served, 2)
    hooks = [*tensor_parallel.layers(served.module).values()]
    hooks = [hook for one in hooks for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())]
    left = fap.stats()["calls"]
    deepspeed()
    return {
        "untouched": untouched,
        "replaced": sum(a is not b for a, b in zip(theirs, during, strict=True)),
        "restored": all(a is b for a, b in zip(theirs, after, strict=True)),
        "uncounted": uncounted,
        "counted": counted,
        "left": left,
        "hooks": len(hooks),
    }


def test_only_the_engine_with_the_section_is_served_and_nothing_stays(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(undone):
        assert found["untouched"] and found["replaced"] == 7 and found["restored"]
        assert found["uncounted"] == 0 and found["counted"] == SUMS + GRADIENTS
        assert found["left"] == 0 and found["hooks"] == 0


def refused() -> list[str]:
    deepspeed()
    none = options(0)
    none["tensor_parallel"]["partition_config"]["layer_specs"] = [{"patterns": ["nothing"], "partition_type": "row"}]
    plain = {"zero_optimization": {"stage": 0}}
    fields = ({"backward_bits": 8}, {"include": ["a"]}, {"quantize_embedding": True})
    found = []
    for given, flash in (*((plain, field) for field in fields), (none, {"backward_bits": 8})):
        with pytest.raises(Exception, match="flash_allreduce") as caught:
            autotp.built(given, flash)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    fap.deepspeed.enable(fap.FlashConfig(backward_bits=8, exclude=["a"]))
    try:
        with pytest.raises(Exception, match="flash_allreduce") as caught:
            autotp.built(plain, None)
        autotp.built(options(0), None)
    finally:
        fap.deepspeed.disable()
    return [*found, str(caught.value)]


def test_keys_without_an_effect_are_refused_in_a_sentence(engines: Callable[[int], Ranks]) -> None:
    size = "tensor_parallel.autotp_size of 2 or more"
    alone = f"has no effect in DeepSpeed, where only tensor parallelism uses it ({size}); leave it out."
    assert engines(2).run(refused)[0] == [
        "DeepSpeedConfigError: flash_allreduce.backward_bits=8 has no effect in DeepSpeed, where only tensor "
        f"parallelism ({size}), attention_bits and expert_bits use it; leave it out.",
        f"DeepSpeedConfigError: flash_allreduce.include=['a'] {alone}",
        f"DeepSpeedConfigError: flash_allreduce.quantize_embedding=True {alone}",
        "DeepSpeedConfigError: flash_allreduce.backward_bits=8 has no effect: AutoTP has split no layer of this model; "
        "leave it out.",
        f"flash_allreduce.exclude=['a'] has no effect without tensor parallelism ({size}); leave it out.\n"
        f"flash_allreduce.backward_bits=8 has no effect without tensor parallelism ({size}); leave it out.",
    ]


def test_the_section_depends_on_autotp(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"bits": 6, "backward_bits": 6, "backward_rounding": "stochastic", "include": ["*.o_proj"]}
    config = section.parse({"tensor_parallel": {"autotp_size": 2}, "flash_allreduce": fields})
    assert config == fap.FlashConfig(**fields)
    monkeypatch.setenv("FLASH_ALLREDUCE_EXCLUDE", "*.norm")
    with pytest.raises(fap.ConfigError, match=r"^FLASH_ALLREDUCE_EXCLUDE=\['\*\.norm'\] has no effect in DeepSpeed, "):
        section.parse({"tensor_parallel": {"autotp_size": 1}, "flash_allreduce": {"bits": 6}})
    assert section.parse({"tensor_parallel": {"autotp_size": 4}, "flash_allreduce": {}}) is not None


def test_the_sums_stay_equal_with_feedback_and_the_guard(engines: Callable[[int], Ranks]) -> None:
    flash = {**EIGHT, "bits": 2, "backward_bits": 2, "min_sqnr_db": 20.0, "quality_interval": 1}
    for found in engines(2).run(train, options(2), flash, 5):
        assert all(found["equal"])
        assert found["sites"][FORWARD]["bits"] > 2 and found["sites"][FORWARD]["sqnr_db"] is not None
        assert torch.tensor(found["losses"]).isfinite().all()
