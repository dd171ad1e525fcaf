"""The operators with arguments that do not fit: an error that leaves everything as it was, or the reference's result.

FUZZ_EXAMPLES: how many examples of each test (`nox -s fuzz`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops, reference
from flash_allreduce_plugin.codec.format import GROUP_SIZES, Draw, Format
from tests.codecs import DTYPES, as_bytes, compiled, fits, same_bits

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "250"))
# The suite runs the same examples each time. `nox -s fuzz`, which sets their number, draws others each time.
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
OTHER_DTYPES = (torch.float64, torch.int8, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
FLAGS = ("symmetric", "spikes", "hadamard", "mse", "stochastic", "compact", "codebook")
BESIDE_CODEBOOK = ("symmetric", "stochastic", "compact")  # excluded


def mostly(good: Any, *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw `good` four times out of five."""
    return st.integers(0, 4).flatmap(lambda i: st.one_of(*others) if i == 0 else st.just(good))


@dataclass(repr=False)
class Made:
    """A tensor, its memory, and the change that was made to it."""

    tensor: Tensor
    memory: Tensor
    kind: str

    @property
    def before(self) -> Tensor:
        return self._before

    def __repr__(self) -> str:
        """Return a short text, for hypothesis to print as an example."""
        t = self.tensor
        return f"{self.kind} {tuple(t.shape)} {t.stride()} {t.storage_offset()} {t.dtype}"

    def remember(self) -> None:
        self._before = self.memory.clone()


KINDS = ("meta", "resized", "negative", "grad")
# No negative view: torch gives the operator a copy and then fails because there is no result to copy back from. The
# other results that the operator has written stay.
RESIDUALS = ("meta", "resized", "grad")


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, kinds: tuple[str, ...] = KINDS) -> Made:
    """Draw a tensor of that shape and dtype, sometimes of another, of other strides, or without its memory."""
    dtype = draw(mostly(dtype, st.sampled_from((*DTYPES, torch.uint8, *OTHER_DTYPES))))
    shape = tuple(max(0, n + draw(mostly(0, st.sampled_from((-1, 1, -2, 33, -1000))))) for n in shape)
    if draw(mostly(False, st.booleans())):
        shape = draw(st.sampled_from(((), shape[:1], (*shape, 1), (1, *shape), shape[::-1])))
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        # Gaps, overlaps and expansion; where no element is reached by a stride, any stride at all.
        gaps = (st.integers(0, 5), st.just(-n * step), st.just(-1))
        stride = max(0, step + draw(mostly(0, *gaps)))
        strides.insert(0, draw(mostly(stride, st.just(1 << 61))) if n == 1 or 0 in shape else stride)
        step = max(step, stride) * max(n, 1)
    offset = draw(st.integers(0, 9))
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)
    reached = offset + (0 if 0 in shape else last + 1)
    numel = reached + draw(st.integers(0, 9))
    pattern = draw(st.binary(min_size=1, max_size=40))
    size = numel * dtype.itemsize
    memory = torch.frombuffer(
        bytearray((pattern * (size // len(pattern) + 1))[:size]) or bytearray(1), dtype=torch.uint8
    )
    memory = memory[:size].clone()
    tensor = torch.as_strided(memory.view(dtype), shape, strides, offset)
    kind = draw(mostly("plain", st.sampled_from(kinds)))
    if kind == "meta":
        tensor = tensor.to("meta")
    elif kind == "resized":
        left = draw(st.integers(0, max(0, reached * dtype.itemsize - 1)))
        memory.untyped_storage().resize_(left)
        return Made(tensor, torch.empty(0), kind)
    elif kind == "negative" and dtype.is_floating_point and dtype.itemsize > 1:
        tensor = torch._neg_view(tensor)
    elif kind == "grad" and dtype.is_floating_point:
        tensor = tensor.detach().requires_grad_()
    return Made(tensor, memory, kind)


@st.composite
def formats(draw: st.DrawFn) -> Format:
    flags = {flag: draw(st.booleans()) for flag in FLAGS}
    flags["compact"] &= not flags["symmetric"]
    flags["stochastic"] &= not flags["mse"]
    flags["codebook"] &= not any(flags[flag] for flag in BESIDE_CODEBOOK)
    sizes = [g for g in GROUP_SIZES if fits(g, flags)]
    return Format(draw(st.integers(2, 8)), draw(st.sampled_from(sizes)), **flags)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list[Any], Format, Format]:
    """Draw the name of an operator, its arguments, and the codecs that the numbers among them mean."""
    codec = draw(formats())
    gather = replace(codec, bits=draw(st.integers(2, 8)))
    numbers = [draw(mostly(n, INT64)) for n in (codec.bits, codec.group_size, codec.options)]
    gather_bits = draw(mostly(gather.bits, INT64))
    factor = draw(st.sampled_from((1.0, 0.5, 1 / 3)) | st.floats(width=32))
    drawn = [draw(st.just(0) | INT64) for _ in range(3)]
    rows, numel = draw(st.integers(0, 3)), draw(st.integers(0, 200) | st.integers(0, 2500))
    dtype = draw(st.sampled_from(DTYPES))
    payload = codec.payload_bytes(numel)
    name = draw(st.sampled_from(("encode", "decode", "decode_sum", "decode_sum_encode")))
    if name == "encode":
        made = [draw(tensors((rows, numel), dtype)), draw(tensors((rows, payload), torch.uint8))]
        return name, [*made, *numbers, *drawn], codec, gather
    if name == "decode":
        made = [draw(tensors((rows, payload), torch.uint8)), draw(tensors((rows, numel), dtype))]
        return name, [*made, *numbers], codec, gather
    ranks = draw(tensors((rows, payload), torch.uint8))
    if name == "decode_sum":
        return name, [ranks, draw(tensors((numel,), dtype)), factor, *numbers], codec, gather
    sent = draw(tensors((codec.groups(numel) * gather.record_bytes,), torch.uint8))
    return name, [ranks, sent, factor, numbers[0], gather_bits, *numbers[1:], *drawn[:2]], codec, gather


@given(call=calls())
@fuzz
def test_an_error_or_the_right_result(call: tuple[str, list[Any], Format, Format]) -> None:
    name, arguments, codec, gather = call
    made = [a for a in arguments if isinstance(a, Made)]
    for one in made:
        one.remember()
    given = [a.tensor if isinstance(a, Made) else a for a in arguments]
    expected = None if any(one.kind == "meta" for one in made) else _expected(name, given, made, codec, gather)
    try:
        getattr(compiled, name)(*given)
    except (RuntimeError, TypeError, ValueError):
        done = False
    else:
        done = True
    output = made[1]
    meta = any(one.kind == "meta" for one in made)
    if done and any(one.kind == "resized" and one.tensor.numel() for one in made) and not meta:
        raise AssertionError(f"{name} used memory that is not there")
    if any(one.kind == "resized" for one in made):
        return
    assert torch.equal(made[0].memory, made[0].before), "the input was written to"
    if not done or meta:
        assert torch.equal(output.memory, output.before), f"{name} wrote, and then refused"
        return
    assert expected is not None, f"{name} took what the reference does not"
    assert same_bits(output.tensor.detach().resolve_neg(), expected)
    outside = torch.ones(len(output.memory) // output.tensor.itemsize, dtype=torch.bool)
    outside.as_strided(output.tensor.shape, output.tensor.stride(), output.tensor.storage_offset())[...] = False
    same = (output.memory == output.before).view(-1, output.tensor.itemsize).all(-1)
    assert same[outside].all(), f"{name} wrote beside its output"


@st.composite
def feedback_calls(draw: st.DrawFn) -> tuple[list[Any], Format]:
    """Draw the arguments of encode_feedback, and its codec."""
    codec = draw(formats())
    numel, g = draw(st.integers(0, 200) | st.integers(0, 2500)), codec.group_size
    shape, dtype = draw(st.sampled_from([((g + 2), torch.uint8), (g, torch.bfloat16)]))
    made = [
        draw(tensors((1, numel), draw(st.sampled_from(DTYPES)))),
        draw(tensors((1, codec.payload_bytes(numel)), torch.uint8)),
        draw(tensors((codec.groups(numel), shape), dtype, RESIDUALS)),
    ]
    momentum = draw(mostly(0.8, st.floats()))
    drawn = [draw(st.just(0) | INT64) for _ in range(2)]
    return [*made, momentum, codec.bits, g, codec.options, *drawn], codec


@given(call=feedback_calls())
@fuzz
def test_feedback_is_an_error_or_the_right_result(call: tuple[list[Any], Format]) -> None:
    arguments, codec = call
    made, (momentum, *_, key, first) = arguments[:3], arguments[3:]
    for one in made:
        one.remember()
    given = [a.tensor if isinstance(a, Made) else a for a in arguments]
    try:
        compiled.encode_feedback(*given)
    except (RuntimeError, TypeError, ValueError):
        for one in made:
            assert one.kind == "resized" or torch.equal(one.memory, one.before), "wrote, and then refused"
        return
    if any(one.kind == "meta" for one in made):
        return
    assert 0 <= momentum < 1 and not any(one.kind == "resized" and one.tensor.numel() for one in made)
    assert torch.equal(made[0].memory, made[0].before), "the input was written to"
    if any(one.kind == "resized" for one in made):
        return
    x, *others = (one.tensor.detach().resolve_neg() for one in made)
    before = [
        one.before.view(one.tensor.dtype).as_strided(one.tensor.shape, one.tensor.stride(), one.tensor.storage_offset())
        for one in made[1:]
    ]
    payload, residual = (one.clone(memory_format=torch.contiguous_format) for one in before)
    reference.encode_feedback(x.contiguous(), payload, residual, momentum, codec, Draw(key, first))
    assert same_bits(others[0], payload) and same_bits(others[1], residual)


def _expected(name: str, given: list[Any], made: list[Made], codec: Format, gather: Format) -> Tensor | None:
    """Return the reference's result, or None if ops.py does not allow the arguments."""
    if any(one.kind == "resized" and one.tensor.numel() for one in made):
        return None
    first, output = (one.tensor.detach() for one in made)
    if any(one.kind == "resized" for one in made):  # its memory was taken away: no result to compare
        return None
    first, result = (
        first.clone(memory_format=torch.contiguous_format),
        torch.empty_like(output, memory_format=torch.contiguous_format),
    )
    numbers = {"encode": given[2:5], "decode": given[2:5], "decode_sum": given[3:6]}.get(name)
    valid = numbers == [codec.bits, codec.group_size, codec.options] if numbers else True
    if name == "decode_sum_encode":
        valid = [given[3], given[5], given[6]] == [codec.bits, codec.group_size, codec.options]
        valid &= given[4] == gather.bits
    if not valid:
        codec, gather = _said(name, given)
        if codec is None or gather is None:
            return None
    try:
        if name == "encode":
            assert first.dtype in DTYPES and result.dtype == torch.uint8 and first.dim() == 2
            assert result.shape == (len(first), codec.payload_bytes(first.shape[1]))
            if result.numel():
                reference.encode(first, result, codec, Draw(*given[5:8]))
        elif name == "decode":
            assert result.dtype in DTYPES and first.dtype == torch.uint8 and result.dim() == 2
            assert first.shape == (len(result), codec.payload_bytes(result.shape[1]))
            if result.numel():
                reference.decode(first, result, codec)
        elif name == "decode_sum":
            assert result.dtype in DTYPES and first.dtype == torch.uint8 and result.dim() == 1
            assert first.dim() == 2 and first.shape == (len(first), codec.payload_bytes(len(result))) and len(first)
            if result.numel():
                reference.decode_sum(first, result, codec, given[2])
        else:
            assert result.dtype == first.dtype == torch.uint8 and result.dim() == 1 and first.dim() == 2 and len(first)
            groups, rest = divmod(len(result), gather.record_bytes)
            assert rest == 0 and first.shape == (len(first), groups * codec.record_bytes)
            if result.numel():
                reference.decode_sum_encode(first, result, codec, gather, given[2], Draw(*given[7:9]))
    except (AssertionError, IndexError, TypeError):
        return None
    return result


def _said(name: str, given: list[Any]) -> tuple[Format | None, Format | None]:
    """Return the codecs that changed numbers mean, if they happen to mean any."""
    bits, gather_bits, group_size, options = (
        given[3:7]
        if name == "decode_sum_encode"
        else [(n := given[3:6] if name == "decode_sum" else given[2:5])[0], *n]
    )
    flags = {flag: bool(options >> i & 1) for i, flag in enumerate(FLAGS)}
    wrong = not 0 <= options < 128 or (flags["symmetric"] and flags["compact"])
    wrong |= flags["mse"] and flags["stochastic"]
    wrong |= flags["codebook"] and (any(flags[f] for f in BESIDE_CODEBOOK) or not fits(group_size, flags))
    if wrong or not 2 <= bits <= 8 or not 2 <= gather_bits <= 8 or group_size not in GROUP_SIZES:
        return None, None
    return Format(bits, group_size, **flags), Format(gather_bits, group_size, **flags)


@given(
    numel=INT64,
    bits=INT64 | st.integers(2, 8),
    group_size=INT64 | st.sampled_from(GROUP_SIZES),
    options=INT64 | st.integers(0, 127),
)
@fuzz
def test_the_size_of_a_payload(numel: int, bits: int, group_size: int, options: int) -> None:
    try:
        size = compiled.payload_bytes(numel, bits, group_size, options)
    except RuntimeError as error:
        assert "expected" in str(error) or "exclude" in str(error)
        return
    assert 0 <= numel <= 1 << 56
    codec, _ = _said("encode", [None, None, bits, group_size, options])
    assert codec is not None and size == codec.payload_bytes(numel)


@given(
    payload=st.binary(max_size=200),
    shape=st.lists(st.integers(-2, 1 << 40) | st.integers(0, 40), max_size=3),
    dtype=st.sampled_from((*DTYPES, *OTHER_DTYPES)),
    bits=st.integers(2, 8),
    wrong=st.integers(0, 3),
)
@example(payload=b"", shape=[0, 3_036_988_439, 3_037_012_561], dtype=torch.float32, bits=2, wrong=0)
@fuzz
def test_decode_of_any_payload(payload: bytes, shape: list[int], dtype: torch.dtype, bits: int, wrong: int) -> None:
    """Check that nothing is allocated for a shape that the payload does not fill."""
    given = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    given = given.to(torch.int32) if wrong == 1 else given.view(1, -1) if wrong == 2 else given
    config = fap.FlashConfig(bits=bits, group_size=32)
    try:
        result = fap.decode(given, shape, dtype, config)
    except (TypeError, ValueError):
        return
    assert result.shape == torch.Size(shape) and len(payload) == fap.payload_bytes(result.numel(), config)


def test_rows_that_overlap_are_not_written() -> None:
    """Check overlapping rows: threads would write them at the same time, and the result would depend on chance."""
    codec, x = Format(4, 64), torch.randn(3, 100)
    payload = torch.zeros(codec.payload_bytes(100), dtype=torch.uint8)
    with pytest.raises(
        RuntimeError, match="payload has rows of 72 elements every 0; expected rows that do not overlap"
    ):
        compiled.encode(x, payload.expand(3, -1), 4, 64, 0)
    assert not payload.any()
    rows = torch.zeros(3, 72, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="output has rows of 100 elements every 99; expected rows that do not"):
        compiled.decode(rows, torch.zeros(300).as_strided((3, 100), (99, 1)), 4, 64, 0)


def test_rows_too_long_to_have_a_size() -> None:
    x, payload = torch.empty(0, 1 << 62), torch.empty(0, 0, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="numel is 4611686018427387904; expected 0 to 72057594037927936"):
        compiled.encode(x, payload, 8, 32, 0)
    with pytest.raises(RuntimeError, match="numel is 4611686018427387904; expected 0 to 72057594037927936"):
        compiled.decode(payload, x, 8, 32, 0)


def test_rows_of_no_elements_with_any_stride() -> None:
    """Use strides that reach beyond int64: the sanitizer of `nox -s fuzz -- library` would see the overflow."""
    payloads = torch.empty(0, dtype=torch.uint8).as_strided((9, 0), (1 << 61, 1))
    output = torch.empty(0)
    compiled.decode_sum(payloads, output, 1.0, 4, 64, 0)
    assert not len(output)


def test_memory_that_was_taken_away_is_not_read() -> None:
    """Free the memory as FSDP frees a parameter; torch's own operators would read freed memory."""
    x = torch.randn(2, 100)
    payload = torch.zeros(2, 72, dtype=torch.uint8)
    x.untyped_storage().resize_(799)
    with pytest.raises(RuntimeError, match="input has 799 bytes of memory; its elements need 800"):
        compiled.encode(x, payload, 4, 64, 0)
    assert not payload.any()


def test_the_number_of_a_group_wraps_around() -> None:
    x = torch.randn(3, 200)
    ours, theirs = (torch.zeros(3, Format(4, 32).payload_bytes(200), dtype=torch.uint8) for _ in range(2))
    draw = Draw(-5, (1 << 63) - 1, (1 << 63) - 3)
    codec = Format(4, 32, stochastic=True)
    compiled.encode(x, ours, 4, 32, codec.options, draw.key, draw.first_group, draw.groups_a_row)
    reference.encode(x, theirs, codec, draw)
    assert torch.equal(as_bytes(ours), as_bytes(theirs))
