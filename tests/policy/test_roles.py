"""One row a role: its fields exist, and each of them keeps the role in full precision."""

from __future__ import annotations

import pickle

import pytest

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.policy import FullPrecision, Role, bits_of, is_full

#: A configuration in which every role is quantized.
EVERYTHING = fap.FlashConfig(
    bits=8, backward_bits=7, grad_bits=6, param_bits=5, sequence_parallel_gather_bits=4, expert_bits=3,
    attention_bits=2, pipeline_bits=8, pipeline_backward_bits=7, quantize_embedding=True, quantize_layernorm=True,
)  # fmt: skip


@pytest.mark.parametrize("role", Role)
def test_the_first_field_that_is_set_gives_the_width(role: Role) -> None:
    set_fields = [name for name in role.widths if getattr(EVERYTHING, name) is not None]
    assert bits_of(role, EVERYTHING) == getattr(EVERYTHING, set_fields[0])


@pytest.mark.parametrize("role", [role for role in Role if role.widths != ("bits",)])
def test_full_in_its_field_keeps_a_role_in_full_precision(role: Role) -> None:
    name = next(name for name in role.widths if getattr(EVERYTHING, name) is not None)
    config = EVERYTHING.model_copy(update={name: "full"})
    assert bits_of(role, config) == FullPrecision(is_full(name))


@pytest.mark.parametrize("role", [role for role in Role if role.backward])
def test_a_gradient_of_activations_needs_backward_bits_too(role: Role) -> None:
    config = EVERYTHING.model_copy(update={"backward_bits": "full"})
    assert bits_of(role, config) == FullPrecision("backward_bits is full")


@pytest.mark.parametrize("role", [role for role in Role if role.switch])
def test_a_switch_keeps_a_role_in_full_precision(role: Role) -> None:
    assert role.switch is not None
    config = EVERYTHING.model_copy(update={role.switch[0]: False})
    assert bits_of(role, config) == FullPrecision(role.switch[1])


@pytest.mark.parametrize("role", Role)
def test_a_role_is_its_value(role: Role) -> None:
    assert Role(role.value) is role and role == role.value and pickle.loads(pickle.dumps(role)) is role
