"""Megatron's own exchanges over the context-parallel group: Mamba's all-to-alls and the gathers of sparse attention."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import os
import sys
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import MEGATRON, run_ranks

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    # not importorskip: Megatron looks for Transformer Engine when it is imported, and a rank finds te_stub only then
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.model import prepare_cpu
from flash_allreduce_plugin.integrations.megatron import arguments, attach, attention, refusals

WIDTH, INNER, HEADS, GROUPS, STATE = 48, 128, 8, 4, 16
LOCAL, BATCH, STEPS = 16, 2, 2
CONVOLVED = INNER + 2 * GROUPS * STATE
EIGHT = {"attention_bits": 8, "backward_bits": 8, "min_bytes": 0}
EXCHANGES, GATHERS = 6, 1  # a step's in the forward pass: of z, x, B, C, dt and the output; of the keys


class Mixer(nn.Module):
    """The exchanges of Megatron's MambaMixer around its kernels, and attention to keys gathered as DSA gathers them."""

    def __init__(self) -> None:
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.ssm.mamba_context_parallel import MambaContextParallel

        torch.manual_seed(7)
        self.inputs, self.outputs = nn.Linear(WIDTH, INNER + CONVOLVED + HEADS), nn.Linear(INNER, WIDTH)
        self.convolution = nn.Conv1d(CONVOLVED, CONVOLVED, 4, groups=CONVOLVED, padding=3)
        self.dt_bias = nn.Parameter(torch.randn(HEADS))
        self.queries, self.keys = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        convolution: dict[str, Any] = {"conv1d_cp1": self.convolution}
        if "conv1d_cp1" not in inspect.signature(MambaContextParallel).parameters:  # from 0.17 on
            convolution = {"conv1d_weight_cp1": self.convolution.weight, "conv1d_bias_cp1": self.convolution.bias}
            convolution["conv1d_padding"] = 3
        self.group = parallel_state.get_context_parallel_group()
        self.across = MambaContextParallel(
            cp_group=self.group,
            d_inner_local_tp=INNER,
            nheads_local_tp=HEADS,
            ngroups_local_tp=GROUPS,
            d_state=STATE,
            dt_bias_cp1=self.dt_bias,
            A_log_cp1=torch.randn(HEADS),
            D_cp1=torch.randn(HEADS),
            D_has_hdim=False,
            **convolution,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute on x [tokens of this rank, batch, width]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        ranks = self.group.size()
        inner, shared = INNER // ranks, GROUPS // ranks * STATE
        z, mixed, dt = self.across.pre_conv_ssm(self.inputs(x)).split(
            [inner, inner + 2 * shared, HEADS // ranks], dim=-1
        )
        mixed = self.across.conv1d(mixed.permute(1, 2, 0))[..., : LOCAL * ranks].permute(2, 0, 1)
        values, b, c = nn.functional.silu(mixed).split([inner, shared, shared], dim=-1)
        weight = (b * c).mean(-1, keepdim=True) + nn.functional.softplus(dt + self.across.get_dt_bias()).mean(-1, True)
        found = self.across.post_conv_ssm(values * nn.functional.silu(z) * weight)
        keys = gather_from_sequence_parallel_region(self.keys(x), group=self.group)
        scores = torch.einsum("sbh,tbh->bst", self.queries(x), keys).softmax(-1)
        return self.outputs(found) + torch.einsum("bst,tbh->sbh", scores, keys).mean(-1, keepdim=True)


def train() -> dict[str, Any]:
    fap.reset_stats()
    model = Mixer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, gradients = [], []
    for step in range(STEPS):
        x = torch.randn(LOCAL, BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        x.requires_grad_()
        loss = (model(x) - x.detach().flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(float(loss.detach()))
        assert x.grad is not None
        gradients.append(x.grad)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return {"losses": losses, "gradients": torch.stack(gradients), "weights": weights, **fap.stats()}


@contextmanager
def rounded() -> Any:
    """Replace the sent runs of Megatron's own collectives by runs that the codec has rounded one by one."""
    from megatron.core.tensor_parallel import mappings

    wire = fap.FlashConfig(min_bytes=0)
    theirs = dist.all_to_all_single, mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def one(run: Tensor) -> Tensor:
        return fap.decode(fap.encode(run, wire), tuple(run.shape), run.dtype, wire)

    def all_to_all_single(output: Tensor, input: Tensor, *, group: Any, async_op: bool = False, **_: Any) -> Any:
        runs = [one(run) for run in input.chunk(group.size())]
        return theirs[0](output, torch.cat(runs), group=group, async_op=async_op)

    def gather(input: Tensor, *more: Any) -> Tensor:
        return theirs[1](one(input), *more)  # type: ignore[no-any-return]

    def reduce_scatter(input: Tensor, group: Any, *_: Any) -> Tensor:
        output = torch.empty_like(input[: len(input) // group.size()])
        fap.reduce_scatter(output, input.contiguous(), group=group, config=wire)
        return output

    names = "_gather_along_first_dim", "_reduce_scatter_along_first_dim"
    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]
    for name, function in zip(names, (gather, reduce_scatter), strict=True):
        setattr(mappings, name, function)
    try:
        yield
    finally:
        dist.all_to_all_single = theirs[0]
        for name, function in zip(names, theirs[1:], strict=True):
            setattr(mappings, name, function)


def side_by_side(context_parallel: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel)
    prepare_cpu()
    found = {"plain": train()}
    with rounded():
        found["expected"] = train()
    for name, keys in (
        ("full", {"attention_bits": "full"}),
        ("forward", {"backward_bits": "full"}),
        ("eight", {}),
        ("warm", {"warmup_steps": 1}),
    ):
        fap.megatron.enable(fap.FlashConfig(**{**EIGHT, **keys}))
        found[name] = train()
        if name == "eight":
            found["report"] = {key: dict(entry) for key, entry in fap.megatron.report().items()}
        fap.megatron.disable()
    fap.megatron.enable(fap.FlashConfig(**EIGHT))
    with fap.megatron.full_precision():
        found["asked"] = train()
    fap.megatron.disable()
    return found


CALLS = {
    attention.EXCHANGE.name: EXCHANGES * STEPS,
    attention.EXCHANGE_BACKWARD.name: EXCHANGES * STEPS,
    attention.GATHER.name: GATHERS * STEPS,
    attention.GATHER_BACKWARD.name: GATHERS * STEPS,
}


@pytest.mark.parametrize("world", [2, 4])
def test_an_exchange_equals_rounding_each_run_and_a_full_precision_exchange(world: int) -> None:
    outcomes = run_ranks(world, side_by_side, world, preload=MEGATRON)
    for found in outcomes:
        plain, eight, expected = found["plain"], found["eight"], found["expected"]
        for key in ("gradients", "weights"):
            assert torch.equal(found["full"][key], plain[key]) and torch.equal(found["asked"][key], plain[key])
            assert torch.equal(eight[key], expected[key]), key
            assert not torch.equal(eight[key], plain[key])
        assert eight["losses"] == expected["losses"] and eight["losses"] == pytest.approx(plain["losses"], rel=0.01)
        for site, calls in CALLS.items():
            backward = site.endswith("backward")
            assert eight["sites"][site]["quantized"] == eight["sites"][site]["calls"] == calls, site
            assert found["full"]["sites"][site]["full_precision"] == {"attention_bits is full": calls}
            assert found["forward"]["sites"][site]["quantized"] == (0 if backward else calls)
            assert found["warm"]["sites"][site]["full_precision"] == {"warm-up": calls // 2}
            assert found["asked"]["sites"][site]["full_precision"] == {"full_precision()": calls}
            entry = found["report"][site]
            assert entry["in_place"] and entry["calls"] == calls and entry["covers"]
            full, sent = (eight["sites"][site][key] for key in ("bytes_full_precision", "bytes_sent"))
            assert full == found["full"]["sites"][site]["bytes_sent"] and sent < 0.6 * full, site
        assert torch.equal(eight["weights"], outcomes[0]["eight"]["weights"])


def test_without_context_parallelism_a_width_is_refused() -> None:
    config, said = fap.FlashConfig(attention_bits=8), "there is no context parallelism here"
    alone = SimpleNamespace(context_parallel_size=1, rank=0)
    with pytest.raises(fap.ConfigError) as caught:
        arguments.refuse_incompatible(alone, config)
    assert str(caught.value) == (
        f"--flash-allreduce-attention-bits has no effect: {said} (--context-parallel-size 1); leave it at full."
    )
    arguments.refuse_incompatible(alone, fap.FlashConfig())
    ring = SimpleNamespace(context_parallel_size=2, cp_comm_type=["p2p"], rank=0)
    with pytest.raises(fap.ConfigError, match=r"--cp-comm-type p2p runs in functions of Transformer Engine's own"):
        arguments.refuse_incompatible(ring, config)
    for reached in ({"cp_comm_type": ["a2a+p2p"]}, {"is_hybrid_model": True}):
        assert not refusals.of_attention(SimpleNamespace(**{**vars(ring), **reached}), refusals.field, "attention_bits")


def wrapped(**options: Any) -> None:
    """Wrap a model as for training."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **options)
    _BaseDataParallel(config=config, module=torch.nn.Linear(1, 1))


def without_context_parallelism() -> str:
    """Return a training model's error. Groups of one rank alone raise none: a program may convert weights in them."""
    from megatron.core import parallel_state

    fap.megatron.enable(fap.FlashConfig(attention_bits=8))
    parallel_state.initialize_model_parallel()
    fap.megatron.enable(fap.FlashConfig(attention_bits=7))
    wrapped(context_parallel_size=2)
    with pytest.raises(fap.ConfigError) as caught:
        wrapped()
    fap.megatron.disable()
    return str(caught.value)


def test_a_model_that_trains_without_it_refuses_a_width() -> None:
    assert run_ranks(1, without_context_parallelism, preload=MEGATRON) == [
        "attention_bits has no effect: there is no context parallelism here (context_parallel_size=1); "
        "leave it at full."
    ]


def attached_to_a_ring() -> str:
    """Check a model that trains as FLASH_ALLREDUCE_ATTACH=megatron does."""
    from megatron.core import parallel_state

    os.environ.update({f"FLASH_ALLREDUCE_{key.upper()}": str(value) for key, value in EIGHT.items()})
    attach.by_environment()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    wrapped(context_parallel_size=2, cp_comm_type="a2a")
    printed = io.StringIO()
    with pytest.raises(SystemExit), redirect_stderr(printed):
        wrapped(context_parallel_size=2, cp_comm_type="p2p")
    return printed.getvalue()


def test_a_ring_is_refused_where_the_environment_has_attached_it() -> None:
    said = run_ranks(2, attached_to_a_ring, preload=MEGATRON)[0]
    assert said.startswith("flash all-reduce: FLASH_ALLREDUCE_ATTENTION_BITS has no effect: cp_comm_type='p2p' runs in")


STUB = Path(__file__).parent / "te_stub"


def attention_of_transformer_engine() -> dict[str, Any]:
    sys.path.insert(0, str(STUB))
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    theirs: Any = importlib.import_module(attention.te_module())
    group = parallel_state.get_context_parallel_group()
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = [torch.randn(BATCH, LOCAL, 4, 32, generator=generator) for _ in range(4)]

    def run() -> list[Tensor]:
        qkv = [one.clone().requires_grad_() for one in given[:3]]
        output = theirs.AttnFuncWithCPAndQKVOA2A.apply(True, *qkv, group, None)
        output.backward(given[3])
        return [output.detach(), *(one.grad for one in qkv)]  # type: ignore[list-item]

    found: dict[str, Any] = {"plain": run()}
    with rounded():
        found["expected"] = run()
    own = theirs.flash_attn_a2a_communicate
    for name, keys in (("full", {"attention_bits": "full"}), ("eight", {}), ("outside", {})):
        fap.megatron.enable(fap.FlashConfig(**{**EIGHT, **keys}))
        fap.reset_stats()
        if name == "outside":
            theirs.flash_attn_a2a_communicate(given[0], None, 1, group.size(), group, None, True)
        else:
            found[name] = run()
        report = fap.megatron.report()
        sites = attention.TE_EXCHANGE.name, attention.TE_EXCHANGE_BACKWARD.name
        found[f"{name} report"] = {site: dict(report[site]) for site in sites}
        fap.megatron.disable()
    found["restored"] = theirs.flash_attn_a2a_communicate is own
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_transformer_engines_all_to_alls(world: int) -> None:
    forward, backward = attention.TE_EXCHANGE.name, attention.TE_EXCHANGE_BACKWARD.name
    for found in run_ranks(world, attention_of_transformer_engine):
        assert all(map(torch.equal, found["full"], found["plain"])) and found["restored"]
        assert all(map(torch.equal, found["eight"], found["expected"]))
        assert not any(map(torch.equal, found["eight"], found["plain"]))
        for site in (forward, backward):
            assert found["eight report"][site]["in_place"] and found["eight report"][site]["covers"]
            assert found["eight report"][site]["quantized"] == 4
            assert found["full report"][site]["full_precision"] == {"attention_bits is full": 4}
        assert found["outside report"][forward]["full_precision"] == {attention.OUTSIDE: 1}
