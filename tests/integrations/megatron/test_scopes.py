"""Properties that decide about a collective besides its place: the module, the step, evaluation, recomputation, gathers
of sequence parallelism. Real GPTs of megatron-core on two ranks.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import scopes, sequence_parallel, tensor_parallel
from flash_allreduce_plugin.telemetry import counters

WORLD = 2
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
G, DGRAD = tensor_parallel.G_FORWARD.name, tensor_parallel.LINEAR_DGRAD.name
EMBEDDING = tensor_parallel.EMBEDDING.name
SP_G, SP_G_BACKWARD = sequence_parallel.G_FORWARD.name, sequence_parallel.G_BACKWARD.name
SP_DGRAD, SP_F, SP_F_FORWARD = (
    sequence_parallel.LINEAR_DGRAD.name,
    sequence_parallel.F_BACKWARD.name,
    sequence_parallel.F_FORWARD.name,
)
SCATTER = sequence_parallel.SCATTER_BACKWARD.name
GATHER, REGATHER = sequence_parallel.LINEAR_GATHER.name, sequence_parallel.LINEAR_REGATHER.name
L = SIZE.layers


def config(**changes: Any) -> FlashConfig:
    return FlashConfig.from_dict({"bits": 8, "backward_bits": 8, "min_bytes": 0, **changes})


class Spy:
    """Record the site, module, inputs and outputs of every collective that the seams hand to api/reductions.py."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.gathered: dict[str, list[torch.Tensor]] = {}
        self.real = {name: getattr(reductions, name) for name in ("all_reduce", "reduce_scatter", "all_gather")}

    def __enter__(self) -> Spy:
        for name, real in self.real.items():
            setattr(reductions, name, self._spied(real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self.real.items():
            setattr(reductions, name, real)

    def _spied(self, real: Any) -> Any:
        def call(*tensors: torch.Tensor, **keywords: Any) -> Any:
            site = keywords["site"]
            self.calls.append((site.name, site.module))
            handle = real(*tensors, **keywords)
            if handle is not None:
                handle.wait()
            self.gathered.setdefault(site.name, []).append(tensors[0].detach().clone())
            return handle

        return call


def fired(call: Any) -> dict[str, Any]:
    """Return {site: (quantized, {reason: count})} of `call()`."""
    counters.reset_stats()
    call()
    sites = counters.stats()["sites"]
    return {name: (site["quantized"], site["full_precision"]) for name, site in sites.items()}


def loss(model: torch.nn.Module) -> torch.Tensor:
    data = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(5))
    return loss_of(model, data, torch.tensor([0, 1000]), SIZE.sequence)


def train(model: torch.nn.Module) -> None:
    model.zero_grad()
    loss(model).backward()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    train(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def start(with_sequence_parallel: bool) -> Any:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    prepare_cpu()
    return build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=with_sequence_parallel, seed=3)


def by_name(model: torch.nn.Module, **changes: Any) -> list[tuple[str, str | None]]:
    megatron.enable(config(**changes))
    with Spy() as spy:
        train(model)
    return spy.calls


class Wrapped(torch.nn.Module):
    """A wrapper that holds a model as Megatron's DistributedDataParallel and Float16Module do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)


def warm_up(model: torch.nn.Module) -> dict[str, Any]:
    """Return quantized calls of g per step, with gradient accumulation and the optimizer in two parts."""
    seen: dict[str, Any] = {}
    parameters = list(model.parameters())
    parts = [torch.optim.SGD(part, lr=0.0) for part in (parameters[:3], parameters[3:])]
    megatron.enable(config(warmup_steps=2))
    rows = []
    for _ in range(3):
        counted = fired(lambda: (train(model), train(model)))
        rows.append((megatron.step(), counted[G], counted[DGRAD]))
        for part in parts:
            part.step()
    seen["rows"] = rows
    megatron.set_step(1)
    seen["set back"] = fired(lambda: train(model))[G]
    megatron.disable()
    parts[0].step()
    megatron.enable(config(warmup_steps=1))
    seen["enabled anew"] = (megatron.step(), fired(lambda: train(model))[G])
    return seen


def evaluation(model: torch.nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    megatron.disable()
    stock = gradients(model)
    megatron.enable(config())
    with megatron.full_precision():
        seen["requested"] = fired(lambda: train(model))
        seen["requested is stock"] = all(map(torch.equal, gradients(model), stock))
        kept = loss(model)
    seen["backward outside"] = fired(kept.backward)
    seen["after"] = fired(lambda: train(model))[G]
    megatron.enable(config(quantize_evaluation=False))
    seen["training"] = fired(lambda: train(model))[G]
    model.eval()
    seen["evaluating"] = fired(lambda: loss(model))[G]
    megatron.enable(config())
    seen["evaluating, quantized"] = fired(lambda: loss(model))[G]
    model.train()
    return seen


def recomputation(model: torch.nn.Module) -> dict[str, Any]:
    """Return g's results in the forward and in the recomputation, for both checkpoint functions."""
    from megatron.core.tensor_parallel import checkpoint, random

    # There is no CUDA generator to save: the state of the CPU's serves for it.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    layer = model.decoder.layers[0].mlp
    x = torch.randn(SIZE.sequence, 2, SIZE.hidden, generator=torch.Generator().manual_seed(1))
    seen = {}

    def block(h: torch.Tensor) -> torch.Tensor:
        return layer(h)[0].square()  # the square keeps g's output, which the recomputation has to give again

    for name, run in {
        "megatron": lambda leaf: checkpoint(block, False, leaf),
        "torch": lambda leaf: torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=False),
        "plain": block,
    }.items():
        leaf = x.clone().requires_grad_()
        megatron.enable(config(quantize_evaluation=False, include=["decoder.layers.0"]))
        with Spy() as spy:
            run(leaf).sum().backward()
        seen[name] = {"calls": spy.calls, "g": spy.gathered[G], "gradient": leaf.grad}
    return seen


def observe_tensor_parallel() -> dict[str, Any]:
    model = start(with_sequence_parallel=False)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    seen: dict[str, Any] = {"unnamed": by_name(model), "all": by_name(model, exclude=["nothing"])}
    seen["in a wrapper"] = by_name(Wrapped(Wrapped(model)), include=["*"])
    for key, changes in {
        "include": {"include": ["decoder.layers.0.*"]},
        "a layer by its own name": {"include": ["decoder.layers.1"]},
        "exclude": {"exclude": ["*.self_attention.*", "output_layer"]},
        "both": {"include": ["decoder.layers.0"], "exclude": ["*.linear_proj"]},
    }.items():
        megatron.enable(config(**changes))
        seen[key] = fired(lambda: train(model))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    megatron.enable(config(include=["decoder.layers.0.*", "decoder.layer.1.*"], exclude=["output_layer", "lm_head"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(model)
            optimizer.step()
    seen["warnings"] = [str(w.message) for w in caught if "flash_allreduce" in str(w.message)]

    megatron.disable()
    seen["warm-up"] = warm_up(model)
    seen["evaluation"] = evaluation(model)
    seen["recomputation"] = recomputation(model)

    megatron.enable(config(quantize_embedding=True))
    seen["embedding"] = fired(lambda: train(model))[EMBEDDING]

    logits = torch.randn(8, 2, 128, generator=torch.Generator().manual_seed(dist.get_rank()))
    target = torch.randint(256, (8, 2), generator=torch.Generator().manual_seed(1))
    with Spy() as spy:
        quantized = vocab_parallel_cross_entropy(logits.clone(), target)
    megatron.disable()
    seen["cross entropy"] = spy.calls == [] and torch.equal(quantized, vocab_parallel_cross_entropy(logits, target))
    seen["hooks left"] = len(torch.nn.modules.module._global_forward_hooks)
    return seen


def observe_sequence_parallel() -> dict[str, Any]:
    model = start(with_sequence_parallel=True)
    from megatron.core.tensor_parallel import mappings

    seen: dict[str, Any] = {}
    megatron.disable()
    stock = gradients(model)
    megatron.enable(config(sequence_parallel_gather_bits=6))
    with Spy() as spy:
        seen["step"] = fired(lambda: seen.update(gradients=gradients(model)))
    seen["stock gradients"] = stock
    # The forward gathers first to last, the backward last to first.
    seen["regathered"] = list(zip(spy.gathered[GATHER], reversed(spy.gathered[REGATHER]), strict=True))
    seen["replicas"] = [t.double().sum().item() for t in spy.gathered[GATHER] + spy.gathered[SP_G_BACKWARD]]
    megatron.enable(config(sequence_parallel_gather_bits=6, backward_bits="full"))
    seen["backward full"] = fired(lambda: train(model))
    megatron.enable(config(sequence_parallel_gather_bits=6, quantize_embedding=True))
    seen["embedding"] = fired(lambda: train(model))
    megatron.enable(config(sequence_parallel_gather_bits=6, exclude=["decoder.layers.0.mlp.*"]))
    seen["exclude"] = fired(lambda: train(model))

    megatron.enable(config(sequence_parallel_gather_bits=8))
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
    parts = [torch.randn(16, 24, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
    seen["whole"] = torch.cat(parts)

    def scatter() -> None:
        leaf = torch.zeros(32, 24, requires_grad=True)
        mappings.scatter_to_sequence_parallel_region(leaf).backward(x)
        seen["scattered"] = leaf.grad

    seen["scatter"] = fired(scatter)
    seen["gather"] = fired(
        lambda: seen.update(gathered=mappings.gather_from_sequence_parallel_region(x, use_global_buffer=True).clone())
    )
    routing = torch.rand(16, 4, generator=torch.Generator().manual_seed(dist.get_rank())) < 0.5
    seen["routing"] = fired(lambda: seen.update(routing_map=mappings.gather_from_sequence_parallel_region(routing)))
    maps = [torch.rand(16, 4, generator=torch.Generator().manual_seed(rank)) < 0.5 for rank in range(WORLD)]
    seen["routing exact"] = torch.equal(seen["routing_map"], torch.cat(maps))
    megatron.disable()
    return seen


def pickled(observe: Any) -> bytes:
    return pickle.dumps(observe())


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, pickled, observe_tensor_parallel, preload=MEGATRON)]


@pytest.fixture(scope="module")
def sequence() -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, pickled, observe_sequence_parallel, preload=MEGATRON)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


NAMES = [
    (EMBEDDING, "embedding.word_embeddings"),
    *((G, f"decoder.layers.{i}.{part}") for i in range(L) for part in ("self_attention.linear_proj", "mlp.linear_fc2")),
    (DGRAD, "output_layer"),
    *(
        (DGRAD, f"decoder.layers.{i}.{part}")
        for i in reversed(range(L))
        for part in ("mlp.linear_fc1", "self_attention.linear_qkv")
    ),
]


def test_every_collective_has_its_module_forward_and_backward(plain):
    for seen in plain:
        assert seen["all"] == NAMES
        assert seen["in a wrapper"] == NAMES
        assert seen["unnamed"] == [(site, None) for site, _ in NAMES]


def test_include_and_exclude_take_both_directions(plain):
    for seen in plain:
        outside = {policy.NOT_INCLUDED: 2}
        assert seen["include"] == {
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
            G: (2, outside),
            DGRAD: (2, {policy.NOT_INCLUDED: 3}),
        }
        assert seen["a layer by its own name"] == seen["include"]
        assert seen["exclude"][G] == (L, {policy.EXCLUDED: L})
        assert seen["exclude"][DGRAD] == (L, {policy.EXCLUDED: L + 1})
        assert seen["both"][G] == (1, {policy.EXCLUDED: 1, **outside})
        assert seen["both"][DGRAD] == (2, {policy.NOT_INCLUDED: 3})


def test_a_pattern_that_matches_nothing_is_named_once(plain):
    for seen in plain:
        first, second = seen["warnings"]
        assert "include pattern 'decoder.layer.1.*' matches no module" in first
        assert "'decoder.layers.0.mlp.linear_fc1'" in first
        assert "exclude pattern 'lm_head' matches no module" in second


def test_warm_up_counts_steps_and_not_micro_batches_or_optimizers(plain):
    for seen in plain:
        calls, gradients = 4 * L, 4 * L + 2
        assert seen["warm-up"]["rows"] == [
            (0, (0, {policy.WARM_UP: calls}), (0, {policy.WARM_UP: gradients})),
            (1, (0, {policy.WARM_UP: calls}), (0, {policy.WARM_UP: gradients})),
            (2, (calls, {}), (gradients, {})),
        ]
        assert seen["warm-up"]["set back"] == (0, {policy.WARM_UP: 2 * L})
        assert seen["warm-up"]["enabled anew"] == (0, (0, {policy.WARM_UP: 2 * L}))


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "3"])
def test_a_step_is_a_whole_number(wrong):
    with pytest.raises(ValueError, match="expected a whole number"):
        megatron.set_step(wrong)


def test_full_precision_on_request_is_bitwise_stock_and_counted(plain):
    for seen in plain:
        found = seen["evaluation"]
        assert found["requested"] == {
            EMBEDDING: (0, {scopes.ON_REQUEST: 1}),
            G: (0, {scopes.ON_REQUEST: 2 * L}),
            DGRAD: (0, {scopes.ON_REQUEST: 2 * L + 1}),
        }
        assert found["requested is stock"]
        assert found["backward outside"] == {DGRAD: (0, {scopes.ON_REQUEST: 2 * L + 1})}
        assert found["after"] == (2 * L, {})


def test_quantize_evaluation_false_leaves_evaluation_in_full_precision(plain):
    for seen in plain:
        found = seen["evaluation"]
        assert found["training"] == found["evaluating, quantized"] == (2 * L, {})
        assert found["evaluating"] == (0, {scopes.EVALUATION: 2 * L})


def test_recomputation_gives_the_bits_of_the_first_forward(plain):
    fc1, fc2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"
    for seen in plain:
        expected = seen["recomputation"]["plain"]
        assert expected["calls"] == [(G, fc2), (DGRAD, fc1)]
        for way in ("megatron", "torch"):
            found = seen["recomputation"][way]
            assert found["calls"] == [(G, fc2), (G, fc2), (DGRAD, fc1)]
            assert torch.equal(*found["g"])
            assert torch.equal(found["g"][0], expected["g"][0])
            assert torch.equal(found["gradient"], expected["gradient"])


def test_the_embedding_is_quantized_on_request(plain, sequence):
    for seen in plain:
        assert seen["embedding"] == (1, {})
    for seen in sequence:
        assert seen["embedding"][EMBEDDING] == (1, {})
        assert seen["embedding"][SP_G_BACKWARD] == (2 * L + 1, {})


def test_cross_entropy_stays_in_full_precision(plain):
    assert all(seen["cross entropy"] for seen in plain)


def test_disable_removes_the_hooks(plain):
    assert all(seen["hooks left"] == 0 for seen in plain)


def test_the_gathers_are_quantized_and_the_backward_gathers_the_same_bits(sequence):
    for seen in sequence:
        assert seen["step"] == {
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
            SP_G: (2 * L, {}),
            SP_G_BACKWARD: (2 * L, {policy.EMBEDDING: 1}),
            GATHER: (2 * L + 1, {}),
            REGATHER: (2 * L + 1, {}),
            SP_DGRAD: (2 * L + 1, {}),
        }
        assert len(seen["regathered"]) == 2 * L + 1
        assert all(torch.equal(*pair) for pair in seen["regathered"])
        for found, expected in zip(seen["gradients"], seen["stock gradients"], strict=True):
            assert 0 < relative_error(found, expected) < 0.1
    first, second = sequence
    assert first["replicas"] == second["replicas"]


def test_gradient_gathers_need_backward_bits_as_well(sequence):
    for seen in sequence:
        assert seen["backward full"][SP_G_BACKWARD] == (
            0,
            {policy.is_full("backward_bits"): 2 * L, policy.EMBEDDING: 1},
        )
        assert seen["backward full"][GATHER] == seen["backward full"][REGATHER] == (2 * L + 1, {})


def test_a_module_is_left_out_in_all_its_collectives(sequence):
    for seen in sequence:
        assert seen["exclude"] == {
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
            SP_G: (2 * L - 1, {policy.EXCLUDED: 1}),
            SP_G_BACKWARD: (2 * L - 1, {policy.EXCLUDED: 1, policy.EMBEDDING: 1}),
            GATHER: (2 * L, {policy.EXCLUDED: 1}),
            REGATHER: (2 * L, {policy.EXCLUDED: 1}),
            SP_DGRAD: (2 * L, {policy.EXCLUDED: 1}),
        }


def test_explicit_gather_and_scatter(sequence):
    for seen in sequence:
        assert seen["scatter"] == {SCATTER: (1, {})}
        assert seen["gather"] == {SP_F_FORWARD: (1, {})}
        for found in (seen["scattered"], seen["gathered"]):
            assert 0 < relative_error(found, seen["whole"]) < 0.01


def test_a_routing_map_is_gathered_exactly(sequence):
    for seen in sequence:
        assert seen["routing"] == {SP_F_FORWARD: (0, {"dtype bool": 1})}
        assert seen["routing exact"]
