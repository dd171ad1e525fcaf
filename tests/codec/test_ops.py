"""The operators as torch sees them: schemas, fakes, torch.compile, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops
from flash_allreduce_plugin.codec import rows as codec_module
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import compiled, gaussian

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

CODEC = Format(4, 64)


def payload_for(rows: int, numel: int) -> Tensor:
    return torch.zeros(rows, CODEC.payload_bytes(numel), dtype=torch.uint8)


def calls() -> dict[str, tuple[Any, ...]]:
    """Return good arguments of each operator."""
    x = gaussian(3, 100)
    payload = payload_for(3, 100)
    compiled.encode(x, payload, 4, 64, False)
    return {
        "encode": (x, payload_for(3, 100), 4, 64, False),
        "decode": (payload, torch.zeros(3, 100), 4, 64, False),
        "decode_sum": (payload, torch.zeros(100), 0.5, 4, 64, False),
        "decode_sum_encode": (payload, payload_for(1, 128)[0], 0.5, 4, 4, 64, False),
    }


# The operators only mutate: they return nothing and have no derivative. So opcheck can test that they mutate the
# tensors that the schema names and nothing else, that a fake run agrees (shapes known or symbolic), that
# autograd is left alone, and that AOTAutograd's functionalization gives the same result.
OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["encode", "decode", "decode_sum", "decode_sum_encode"])
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(compiled, name).default, calls()[name], test_utils=OPCHECKS)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_break_in_the_graph(backend: str) -> None:
    def round_trip(x: Tensor) -> Tensor:
        y = x * 2
        payload = torch.empty(y.shape[0], CODEC.payload_bytes(y.shape[1]), dtype=torch.uint8)
        torch.ops.flash_allreduce.encode(y, payload, 4, 64, False)
        output = torch.empty_like(y)
        torch.ops.flash_allreduce.decode(payload, output, 4, 64, False)
        total = torch.empty_like(y[0])
        torch.ops.flash_allreduce.decode_sum(payload, total, 1.0, 4, 64, False)
        return output + total

    x = gaussian(3, 200)
    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend=backend)(x), round_trip(x))


def test_the_functions_of_the_codec_compile_too() -> None:
    config = fap.FlashConfig(bits=4, group_size=64)

    def round_trip(x: Tensor) -> Tensor:
        payload = torch.empty(x.shape[0], CODEC.payload_bytes(x.shape[1]), dtype=torch.uint8)
        codec_module.encode(x, payload, CODEC)
        output = torch.empty_like(x)
        codec_module.decode(payload, output, CODEC)
        return output

    x = gaussian(1, 200)
    codec_module.use_reference()
    assert torch.equal(torch.compile(round_trip, backend="aot_eager")(x), round_trip(x))
    assert torch.equal(round_trip(x)[0], fap.decode(fap.encode(x[0], config), (200,), torch.float32, config))


X, Y, P = gaussian(3, 100), torch.zeros(3, 100), payload_for(3, 100)
ONE = payload_for(1, 128)[0]
BAD: list[tuple[str, tuple[Any, ...], str]] = [
    ("encode", (X, P, 1, 64, False), "bits is 1; expected 2 to 8"),
    ("encode", (X, P, 9, 64, False), "bits is 9; expected 2 to 8"),
    ("encode", (X, P, 4, 48, False), "group_size is 48; expected a power of two from 32 to 1024"),
    ("encode", (X, P, 4, 2048, False), "group_size is 2048"),
    ("encode", (X, P[:, :-1], 4, 64, False), "payload has 71 bytes a row; expected 72"),
    ("encode", (X, P, 5, 64, False), "payload has 72 bytes a row; expected 88"),
    ("encode", (X, P[:2], 4, 64, False), "payload has 2 rows; expected 3"),
    ("encode", (X, P.char(), 4, 64, False), "payload is not uint8"),
    (
        "encode",
        (X.double(), P, 4, 64, False),
        "input has an unsupported dtype; expected float32, bfloat16 or float16",
    ),
    ("encode", (X.long(), P, 4, 64, False), "input has an unsupported dtype"),
    ("encode", (X[0], P, 4, 64, False), "input has 1 dimensions; expected"),
    (
        "encode",
        (gaussian(100, 3).t(), P, 4, 64, False),
        "input has rows with stride 3; expected contiguous rows",
    ),
    ("encode", (X, P.t().contiguous().t(), 4, 64, False), "payload has rows with stride 3"),
    ("decode", (P, Y, 1, 64, False), "bits is 1; expected 2 to 8"),
    ("decode", (P[:, :-1], Y, 4, 64, False), "payload has 71 bytes a row; expected 72"),
    ("decode", (P, Y.double(), 4, 64, False), "output has an unsupported dtype"),
    ("decode", (P, torch.zeros(100, 3).t(), 4, 64, False), "output has rows with stride 3"),
    ("decode", (P.float(), Y, 4, 64, False), "payload is not uint8"),
    ("decode_sum", (P, torch.zeros(200)[::2], 1.0, 4, 64, False), "output is not a contiguous vector"),
    ("decode_sum", (P, torch.zeros(129), 1.0, 4, 64, False), "payloads has 72 bytes a row; expected 108"),
    ("decode_sum", (P[:0], torch.zeros(100), 1.0, 4, 64, False), "payloads has no rows; expected one a rank"),
    ("decode_sum", (P, torch.zeros(100).int(), 1.0, 4, 64, False), "output has an unsupported dtype"),
    (
        "decode_sum_encode",
        (P, ONE[:-1], 1.0, 4, 4, 64, False),
        "payload has 71 bytes; expected a multiple of 36",
    ),
    ("decode_sum_encode", (P, ONE, 1.0, 4, 9, 64, False), "bits is 9; expected 2 to 8"),
    ("decode_sum_encode", (P[:, :36], ONE, 1.0, 4, 4, 64, False), "payloads has 36 bytes a row; expected 72"),
    ("decode_sum_encode", (P, ONE.char(), 1.0, 4, 4, 64, False), "payload is not a contiguous uint8 vector"),
]


@pytest.mark.parametrize(("name", "arguments", "sentence"), BAD, ids=[f"{b[0]}: {b[2]}" for b in BAD])
def test_bad_arguments_are_refused_and_nothing_is_written(name: str, arguments: tuple[Any, ...], sentence: str) -> None:
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    with pytest.raises(RuntimeError) as raised:
        getattr(compiled, name)(*arguments)
    assert sentence in str(raised.value)
    for a, b in zip(arguments, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 1 << 40])
def test_payload_bytes_checks_its_arguments(bits: int) -> None:
    with pytest.raises(RuntimeError, match="expected 2 to 8"):
        compiled.payload_bytes(100, bits, 128, False)
    with pytest.raises(RuntimeError, match="group_size is"):
        compiled.payload_bytes(100, 4, bits, False)


def test_meta_tensors_pass_without_data_and_mixed_devices_do_not_write() -> None:
    """Call with a meta tensor, torch's own tracing device: the fake answers, no memory is touched."""
    for name, arguments in calls().items():
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        assert getattr(compiled, name)(*meta) is None
    x, payload, *rest = calls()["encode"]
    compiled.encode(x.to("meta"), payload, *rest)
    assert (payload == 0).all()
