"""encode, decode and payload_bytes, as users call them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import reference
from flash_allreduce_plugin.codec.format import Format
from tests.codec.test_rows import codecs, dtypes
from tests.codecs import gaussian, same_bits


@given(
    codec=codecs,
    dtype=dtypes,
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_shape_and_stride_is_encoded_in_row_major_order(
    codec: Format, dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    x = gaussian(*shape).to(dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from(["transpose", "slice", "expand", "flip"]))
        if kind == "transpose" and x.dim() > 1:
            x = x.transpose(0, -1)
        elif kind == "slice" and x.dim():
            x = x[data.draw(st.integers(0, 3)) :: data.draw(st.integers(1, 3))]
        elif kind == "expand":
            x = x.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *x.shape)
        elif kind == "flip" and x.dim():
            x = x.flip(-1)
    config = fap.FlashConfig(
        bits=codec.bits,
        group_size=codec.group_size,
        symmetric=codec.symmetric,
        compact=codec.compact,
        codebook=codec.codebook,
    )
    payload = fap.encode(x, config)
    assert torch.equal(payload, fap.encode(x.clone(memory_format=torch.contiguous_format).view(-1), config))
    decoded = fap.decode(payload, x.shape, dtype, config)
    assert decoded.shape == x.shape and decoded.dtype == dtype
    flat = torch.empty(1, x.numel(), dtype=dtype)
    reference.decode(payload.view(1, -1), flat, codec)
    assert same_bits(decoded.view(-1), flat.view(-1))


def test_the_public_functions_check_their_arguments() -> None:
    config = fap.FlashConfig(bits=4)
    with pytest.raises(TypeError, match="float64 cannot be quantized; expected float32, bfloat16 or float16"):
        fap.encode(torch.zeros(4, dtype=torch.float64), config)
    payload = fap.encode(torch.zeros(4), config)
    for call in (
        lambda: fap.encode(torch.zeros(4), {"bits": 4}),
        lambda: fap.decode(payload, (4,), torch.float32, {"bits": 4}),
        lambda: fap.payload_bytes(4, {"bits": 4}),
    ):
        with pytest.raises(TypeError, match=r"config is dict; expected FlashConfig\."):
            call()
    with pytest.raises(TypeError, match="int64 cannot be quantized"):
        fap.decode(payload, (4,), torch.int64, config)
    with pytest.raises(TypeError, match="expected 1-D uint8"):
        fap.decode(payload.view(1, -1), (4,), torch.float32, config)
    with pytest.raises(ValueError, match="payload has 68 bytes; 129 elements at 4 bits in groups of 128 take 136"):
        fap.decode(payload, (129,), torch.float32, config)


def test_encoding_a_leaf_that_needs_its_gradient_adds_nothing_to_the_graph() -> None:
    x = torch.ones(40, requires_grad=True)
    payload = fap.encode(x, fap.FlashConfig())
    assert not payload.requires_grad and x.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_written_and_returned(dtype: torch.dtype) -> None:
    config, x = fap.FlashConfig(bits=3, group_size=32), gaussian(7, 31).to(dtype)
    payload = torch.empty(fap.payload_bytes(x.numel(), config), dtype=torch.uint8)
    result = torch.empty_like(x)
    assert fap.encode(x, config, out=payload).data_ptr() == payload.data_ptr()
    assert torch.equal(payload, fap.encode(x, config))
    assert fap.decode(payload, x.shape, dtype, config, out=result).data_ptr() == result.data_ptr()
    assert same_bits(result, fap.decode(payload, x.shape, dtype, config))


def test_an_out_that_does_not_fit_is_refused_and_not_written() -> None:
    config, x = fap.FlashConfig(bits=4), gaussian(2, 128)
    payload = fap.encode(x, config)
    for wrong in (
        payload.int(),
        torch.zeros(len(payload) + 1, dtype=torch.uint8),
        payload.view(2, -1),
        payload.to("meta"),
    ):
        with pytest.raises(ValueError, match=r"out is .*; expected torch\.uint8 \(136,\) on cpu, contiguous"):
            fap.encode(x, config, out=wrong)
    strided = torch.zeros(4, 128)[::2]
    for wrong in (strided, x.bfloat16(), x.view(-1), x[:1]):
        with pytest.raises(ValueError, match=r"out is .*; expected torch\.float32 \(2, 128\) on cpu, contiguous"):
            fap.decode(payload, x.shape, x.dtype, config, out=wrong)
    assert not strided.any()
