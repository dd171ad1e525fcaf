"""torch's own ring and gathers of context parallelism, with the kernels that torch has for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.context_parallel import BACKWARD, FORWARD
from tests.distributed import run_ranks

EIGHT = fap.FlashConfig(attention_bits=8, backward_bits=8, min_bytes=0)
BATCH, HEADS, LOCAL, HEAD = 2, 4, 32, 16
aten = torch.ops.aten


class Ring(torch.autograd.Function):
    """The ring that torch's dispatcher calls for a CUDA tensor, here around the CPU's kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **_: Any) -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)  # type: ignore[no-any-return]

        out, lse = _attention._templated_ring_attention(dist.group.WORLD, 2, attend, q, k, v, is_causal=causal)
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def attend(
            *,
            grad_out: Tensor,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            logsumexp: Tensor,
            is_causal: bool,
        ) -> Any:
            given = grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given)

        q, k, v, out, lse = ctx.saved_tensors
        how = {"out": out, "logsumexp": lse, "is_causal": ctx.causal}
        given = dist.group.WORLD, 2, attend, gradients[0], "grad_out", q, k, v
        dq, dk, dv = _attention._templated_ring_attention_backward(*given, **how)
        return dq, dk, dv, None


def flex(q: Tensor, k: Tensor, v: Tensor, _causal: bool) -> Tensor:
    """Gather as the hook that torch puts in front of flex attention does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention

    kind = _attention._ContextParallel.AttentionType.FLEX
    parallel = _attention._ContextParallel(seq_dim=2, attention_type=kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (q, k, v), _ = parallel.flex_input_fn(None, (q, k, v), {}, mesh)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def run(attention: Callable[..., Tensor], causal: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(BATCH, HEADS, LOCAL, HEAD, generator=generator) for _ in range(4)]
    qkv = [one.clone().requires_grad_() for one in given[:3]]
    output = attention(*qkv, causal)
    output.backward(given[3])
    return [output.detach(), *(one.grad for one in qkv)]  # type: ignore[list-item]


@contextmanager
def rounded() -> Iterator[None]:
    """Replace the inputs of torch's own collectives by the codec's rounded values."""
    from torch.distributed.tensor.experimental._context_parallel import _attention, _cp_custom_ops

    collectives = _attention.ft_c
    names = [
        name for name in ("permute_tensor", "all_gather_single", "all_gather_tensor") if hasattr(collectives, name)
    ]
    theirs, gather = {name: getattr(collectives, name) for name in names}, _attention.flex_cp_allgather
    wire = fap.FlashConfig(min_bytes=0)

    def one(tensor: Tensor) -> Tensor:
        return fap.decode(fap.encode(tensor, wire), tuple(tensor.shape), tensor.dtype, wire)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, key: Tensor, value: Tensor, dim: int, name: str) -> tuple[Tensor, Tensor]:
            ctx.dim = dim  # its operator calls the gathers that are replaced below
            return _cp_custom_ops.flex_cp_allgather(key, value, dim, name)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            found = []
            for gradient in gradients:
                parts = gradient.chunk(dist.get_world_size(), ctx.dim)
                found.append(torch.empty(parts[0].shape))
                fap.reduce_scatter(found[-1], torch.stack(list(parts)), config=wire)
            return *found, None, None

    for name in names:
        setattr(collectives, name, lambda tensor, *more, name=name, **keys: theirs[name](one(tensor), *more, **keys))
    _attention.flex_cp_allgather = Gather.apply
    try:
        yield
    finally:
        _attention.flex_cp_allgather = gather
        for name in names:
            setattr(collectives, name, theirs[name])


def side_by_side(kind: str, causal: bool) -> dict[str, Any]:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    torch.set_num_threads(1)
    _attention._cp_options.enable_load_balance = causal
    if kind != "flex":
        _attention.set_rotate_method(kind)
    attention = flex if kind == "flex" else Ring.apply
    functions = "_AllToAllRotater.exchange_buffers", "_AllGatherRotater.next_buffer", "_ContextParallel.flex_input_fn"

    def owners() -> list[Any]:
        return [vars(getattr(_attention, name.split(".")[0]))[name.split(".")[1]] for name in functions]

    before = owners()
    found: dict[str, Any] = {"plain": run(attention, causal)}
    with rounded():
        found["expected"] = run(attention, causal)
    configs = {"eight": EIGHT, "forward": EIGHT.model_copy(update={"backward_bits": "full"})}
    configs["off"] = EIGHT.model_copy(update={"enabled": False})
    configs["warm"] = EIGHT.model_copy(update={"warmup_steps": 1})
    for name, config in configs.items():
        fap.context_parallel.enable(config)
        fap.reset_stats()
        found[name] = run(attention, causal)
        found[f"{name} report"] = {site: dict(entry) for site, entry in fap.context_parallel.report().items()}
        found[f"{name} stats"] = fap.stats()["sites"]
    fap.context_parallel.disable()
    found["restored"] = all(one is other for one, other in zip(owners(), before, strict=True))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "causal"),
    [("allgather", False), ("alltoall", False), ("allgather", True), ("alltoall", True), ("flex", False)],
)
def test_an_exchange_equals_rounding_and_a_full_precision_exchange(world: int, kind: str, causal: bool) -> None:
    hops = {"allgather": 1, "alltoall": world - 1, "flex": 1}[kind]
    calls = {FORWARD.name: 2 * hops, BACKWARD.name: world}  # keys and values are sent again for the backward pass
    if kind == "flex":
        calls = {FORWARD.name: 2, BACKWARD.name: 2}
    for found in run_ranks(world, side_by_side, kind, causal):
        assert found["restored"]
        for name in ("off", "warm"):
            assert all(map(torch.equal, found[name], found["plain"])), name
        assert all(map(torch.equal, found["eight"], found["expected"]))
        for ours, theirs in zip(found["eight"], found["plain"], strict=True):
            assert 0 < (ours - theirs).norm() / theirs.norm() < 0.02
        for site, count in calls.items():
            entry = found["eight report"][site]
            assert entry["calls"] == entry["quantized"] == count and entry["in_place"] and entry["covers"]
            assert found["warm report"][site]["full_precision"] == {"warm-up": count}
            sent = [found[f"{name} stats"][site]["bytes_sent"] for name in ("eight", "off")]
            assert sent[0] < 0.3 * sent[1]
        assert found["forward report"][BACKWARD.name]["full_precision"] == {
            "backward_bits is full": calls[BACKWARD.name]
        }
        assert found["forward report"][FORWARD.name]["quantized"] == calls[FORWARD.name]


def test_a_width_is_needed_and_other_keys_are_refused() -> None:
    with pytest.raises(fap.ConfigError, match=r'^attention_bits is "full": context_parallel would quantize nothing'):
        fap.context_parallel.enable(fap.FlashConfig())
    with pytest.raises(fap.ConfigError, match=r"^grad_bits=4 has no effect in context_parallel, where attention alone"):
        fap.context_parallel.enable(EIGHT.model_copy(update={"grad_bits": 4}))
    assert not fap.context_parallel.is_enabled()
    assert not any(entry["in_place"] for entry in fap.context_parallel.report().values())


PROGRAM = """
from flash_allreduce_plugin import autoload
autoload.load()
import torch.distributed.tensor.experimental
import flash_allreduce_plugin as fap
print("enabled:", fap.context_parallel.is_enabled())
"""


@pytest.mark.parametrize(
    ("named", "bits", "status", "said"),
    [
        ("all", "8", 0, "enabled: True"),
        ("all", None, 0, "enabled: False"),
        ("context_parallel", "8", 0, "enabled: True"),
        ("context_parallel", None, 2, 'attention_bits is "full": context_parallel would quantize nothing'),
    ],
)
def test_an_unedited_program(named: str, bits: str | None, status: int, said: str) -> None:
    given = {"FLASH_ALLREDUCE_ATTACH": named, "RANK": "0", "WORLD_SIZE": "1"}
    given |= {} if bits is None else {"FLASH_ALLREDUCE_ATTENTION_BITS": bits}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
