"""cli/plan/memory.py: the published figures of the papers that its formula is from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_allreduce_plugin.cli.plan import presets
from flash_allreduce_plugin.cli.plan.cost_model import Model
from flash_allreduce_plugin.cli.plan.memory import estimate
from flash_allreduce_plugin.cli.plan.step_model import Layout

GPT = presets.MODELS["gpt3-175b"].model


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_are_those_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    """Compare with figure 1 of arXiv 1910.02054: 7.5 G parameters, 64 data-parallel ranks, fp16 gradients."""
    found = estimate(GPT, Layout(dp=64, zero=zero, framework="deepspeed"))
    states = found.parameters + found.gradients + found.optimizer
    assert states * 7.5e9 / GPT.parameters == pytest.approx(1e9 * gigabytes, rel=0.005)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "expected"), [(1, False, 34), (8, False, 10 + 24 / 8), (8, True, 34 / 8)]
)
def test_a_layer_of_gpt_keeps_the_activations_of_the_paper(tp: int, sequence_parallel: bool, expected: float) -> None:
    """Compare with table 2 of arXiv 2205.05198, without the scores of attention: s b h times the figure, of a layer."""
    layout = Layout(tp=tp, pp=2, micro_batch=3, accumulation=8, sequence_parallel=sequence_parallel)
    layer = 3 * GPT.sequence * GPT.hidden * expected
    assert estimate(GPT, layout).activations == pytest.approx(GPT.layers * layer)


def test_recompute_keeps_inputs_and_one_layer() -> None:
    tokens = GPT.sequence
    found = estimate(GPT, Layout(pp=2, accumulation=8, recompute=True)).activations
    assert found == pytest.approx(tokens * GPT.hidden * (2 * GPT.layers + 34))


def test_a_stage_holds_no_more_micro_batches_than_there_are() -> None:
    four = estimate(GPT, Layout(pp=4, accumulation=16)).activations
    assert estimate(GPT, Layout(pp=4, accumulation=1)).activations == pytest.approx(four / 4)


def test_logits_count_without_stages() -> None:
    model = Model(2, 64, 4, 4, 256, 100, 32)
    more = estimate(replace(model, vocabulary=200), Layout()).activations - estimate(model, Layout()).activations
    assert more == 4 * 32 * 100
