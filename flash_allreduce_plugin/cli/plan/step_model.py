"""A training step as cost_model sees it: which collectives a layout makes, what hides them, and what a step takes.

Ranks are placed tensor-parallel ones next to each other, then data-parallel, then pipeline stages (Megatron's order).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Cost, Group, Model, Traffic, cost, full_precision
from flash_allreduce_plugin.codec.format import Format

FORWARD, BACKWARD = "bits", "backward_bits"
GATHER, GRADIENT = "sequence_parallel_gather_bits", "grad_bits"
PARAMETERS = "param_bits"
PIPELINE, PIPELINE_BACKWARD = "pipeline_bits", "pipeline_backward_bits"
FSDP_PARAMETERS = "parameters"  # no field of FlashConfig: FSDP2's FlashAllGather
_FIELDS = {
    "megatron": (FORWARD, BACKWARD, GATHER, GRADIENT, PARAMETERS, PIPELINE, PIPELINE_BACKWARD),
    "deepspeed": (GRADIENT, PARAMETERS, PIPELINE, PIPELINE_BACKWARD),
    "torch": (GRADIENT, FSDP_PARAMETERS),
}
#: DeepSpeed's stage 3 gathers values, not differences: what is lost is not made up for. Below 6 bits the plugin warns.
VALUE_BITS = 8
#: A step that takes longer than the fastest by less than this share is as good.
WORTH = 0.005


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread out and trained.

    zero: 0: gradients all-reduced; 1 to 3: DeepSpeed's stages, 1 with framework "megatron" the distributed optimizer.
    framework: "torch": its own DistributedDataParallel (zero 0) and FSDP2 (3).
    accumulation: micro-batches a rank and step. itemsize: bytes of activations and parameters on the wire, gradient_
    itemsize: of gradients. overlap: gradients and parameters are sent while others are computed. recompute: the forward
    pass is made again in the backward pass. bucket: gradients of one call.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    framework: Literal["megatron", "deepspeed", "torch"] = "megatron"
    micro_batch: int = 1
    accumulation: int = 1
    itemsize: int = 2
    gradient_itemsize: int = 2
    overlap: bool = True
    recompute: bool = False
    bucket: int = 40_000_000

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp


def check(model: Model, layout: Layout) -> None:
    """Raises ValueError, one sentence, for an impossible layout."""
    for what, value in (("attention heads", model.heads), ("columns of the MLP", model.ffn)):
        if value % layout.tp:
            raise ValueError(f"--tp {layout.tp} does not divide the {value} {what}; choose a divisor.")
    if not model.head_size and model.hidden % model.heads:
        raise ValueError(f"hidden {model.hidden} is not a multiple of the {model.heads} attention heads.")
    if model.heads % model.kv_heads:
        raise ValueError(f"kv_heads {model.kv_heads} does not divide the {model.heads} attention heads.")
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        raise ValueError(
            f"--tp {layout.tp} and the {model.kv_heads} heads of keys and values do not divide each other."
        )
    if model.layers % layout.pp:
        raise ValueError(f"--pp {layout.pp} does not divide the {model.layers} layers; choose a divisor.")
    if layout.sequence_parallel and model.sequence % layout.tp:
        raise ValueError(
            f"--sequence-parallel: --tp {layout.tp} does not divide the sequence of {model.sequence}; choose another."
        )
    if layout.zero >= 2 and layout.pp > 1:
        raise ValueError(f"--zero {layout.zero} does not go with --pp {layout.pp}: with stages, choose --zero 0 or 1.")
    if layout.framework == "torch" and (layout.zero not in (0, 3) or layout.tp * layout.pp > 1):
        raise ValueError("--framework torch is data-parallel, --zero 0 (DDP) or 3 (FSDP2), without --tp and --pp.")
    if layout.zero >= 2 and layout.framework == "megatron":
        raise ValueError(f"--zero {layout.zero} is DeepSpeed's: use --framework deepspeed or torch, or --zero 0 or 1.")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one micro-batch on one stage, and of one layer in it."""

    forward: float
    backward: float
    layer_forward: float
    layer_backward: float


def times(model: Model, cluster: Cluster, layout: Layout) -> Times:
    """The output layer counts as part of every stage's share."""
    tokens = layout.micro_batch * model.sequence
    rank = layout.tp * cluster.flops
    forward = model.forward_flops(tokens) / layout.pp / rank
    layer = model.layer_flops(tokens) / rank
    again = 3 if layout.recompute else 2
    return Times(forward, again * forward, layer, again * layer)


def group_of(stride: int, ranks: int, ranks_per_node: int) -> Group:
    """Of every stride-th rank, counted from the first: how many of them share a node."""
    return Group(ranks, max(1, min(ranks, ranks_per_node // stride)))


def traffic(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """What a rank of one stage sends in a step."""
    return [
        *_tensor_parallel(model, cluster, layout),
        *_pipeline(model, cluster, layout),
        *_data(model, cluster, layout),
    ]


def _tensor_parallel(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """f and g of Megatron: two exchanges a layer and direction; with sequence parallelism as gathers and scatters."""
    tokens = layout.micro_batch * model.sequence
    layers, batches = model.layers // layout.pp, layout.accumulation
    group = group_of(1, layout.tp, cluster.ranks_per_node)

    def of(kind: str, field: str | None, collective: str, calls: float, columns: float = 0.0) -> Traffic:
        # Beside it: one GEMM of the column-parallel layer, the weight's gradient or (gathers) the input's.
        hide = 2.0 * tokens * model.hidden * columns / layout.tp / cluster.flops
        numel = tokens * model.hidden
        return Traffic(kind, field, collective, numel, layout.itemsize, calls * batches, group, hide, every_batch=True)  # type: ignore[arg-type]

    again = 2 if layout.recompute else 1
    attention, mlp = model.qkv_columns, model.ffn_columns
    if not layout.sequence_parallel:
        return [
            of("TP forward (g)", FORWARD, "all_reduce", 2 * layers * again),
            of("TP forward (embedding)", None, "all_reduce", 1),
            of("TP backward (f)", BACKWARD, "all_reduce", layers, attention),
            of("TP backward (f)", BACKWARD, "all_reduce", layers, mlp),
            of("TP backward (f)", BACKWARD, "all_reduce", 1, model.vocabulary),
        ]
    return [
        of("SP forward, scatter", FORWARD, "reduce_scatter", 2 * layers * again),
        of("SP forward (embedding)", None, "reduce_scatter", 1),
        of("SP forward, gather", GATHER, "all_gather", 2 * layers * again + 1),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", layers, attention),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", layers, mlp),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", 1, model.vocabulary),
        of("SP backward, input gathered again", GATHER, "all_gather", layers, attention),
        of("SP backward, input gathered again", GATHER, "all_gather", layers, mlp),
        of("SP backward, input gathered again", GATHER, "all_gather", 1, model.vocabulary),
        replace(of("SP backward, gradient gathered", GATHER, "all_gather", 2 * layers), needs=BACKWARD),
    ]


def _pipeline(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Activations to the next stage, their gradients back; waited for."""
    if layout.pp == 1:
        return []
    numel = layout.micro_batch * model.sequence * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    together = layout.ranks <= cluster.ranks_per_node
    group = Group(2, 2 if together else 1)
    return [
        Traffic(f"PP send, {what}", field, "send", numel, layout.itemsize, layout.accumulation, group, every_batch=True)
        for what, field in (("activations", PIPELINE), ("gradients", PIPELINE_BACKWARD))
    ]


def _data(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Gradients, and with ZeRO the parameters. The first or last of a row of calls has nothing beside it."""
    t = times(model, cluster, layout)
    numel = model.parameters / (layout.tp * layout.pp)
    layers, batches = model.layers // layout.pp, layout.accumulation
    group = group_of(layout.tp, layout.dp, cluster.ranks_per_node)

    def row(kind: str, field: str | None, collective: str, numel: float, item: int, calls: int, repeats: int,
            hide: float, owners: bool = False, differences: bool = False) -> list[Traffic]:  # fmt: skip
        """`repeats` rows of `calls` calls, all but one of each row beside `hide` seconds of computing."""
        common = (kind, field, collective, numel, item)
        hide = hide if layout.overlap else 0.0
        return [
            Traffic(*common, repeats * (calls - 1), group, hide, owners=owners, differences=differences),  # type: ignore[arg-type]
            Traffic(*common, repeats, group, owners=owners, differences=differences),  # type: ignore[arg-type]
        ]

    if layout.zero == 3:
        per_layer, field = numel / layers, FSDP_PARAMETERS if layout.framework == "torch" else PARAMETERS
        gathers = [
            row("ZeRO-3 parameters, forward", field, "all_gather", per_layer, layout.itemsize, layers, batches,
                t.layer_forward),
            row("ZeRO-3 parameters, backward", field, "all_gather", per_layer, layout.itemsize, layers, batches,
                t.layer_backward),
        ]  # fmt: skip
        left = max(0.0, t.layer_backward - full_precision(gathers[1][0], cluster)[1])  # one link for both
        gradients = row(
            "ZeRO-3 gradients", GRADIENT, "reduce_scatter", per_layer, layout.gradient_itemsize, layers, batches, left
        )
        return [*gathers[0], *gathers[1], *gradients]
    buckets = max(1, round(numel / layout.bucket))
    repeats = batches if layout.zero == 2 else 1
    deepspeed = layout.framework == "deepspeed"
    collective = "reduce_scatter" if layout.zero and not deepspeed else "all_reduce"
    kind = f"DP gradients (ZeRO-{layout.zero})" if layout.zero else "DP gradients"
    gradients = row(
        kind, GRADIENT, collective, numel / buckets, layout.gradient_itemsize, buckets, repeats, t.backward / buckets,
        owners=layout.zero > 0 and deepspeed,
    )  # fmt: skip
    if not layout.zero:
        return gradients
    # DeepSpeed gathers flat tensors, in buckets of its own, and waits for them.
    calls, hide = (buckets, 0.0) if deepspeed else (layers, t.layer_forward)
    parameters = row(
        "DP parameters", PARAMETERS, "all_gather", numel / calls, layout.itemsize, calls, 1, hide, differences=True
    )
    return [*gradients, *parameters]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of traffic in a step: in full precision, and as the widths have it."""

    kind: str
    field: str | None
    group: Group
    before: Cost
    after: Cost
    bits: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds. compute: of all micro-batches, bubble: of the pipeline, in full precision and quantized.

    Quantized, it takes as long at least as the host needs for the calls; what else it has to start is not known.
    """

    compute: float
    bubble_before: float
    bubble_after: float
    parts: tuple[Part, ...]

    @property
    def before(self) -> float:
        return self.compute + self.bubble_before + sum(part.before.exposed for part in self.parts)

    @property
    def after(self) -> float:
        return max(self.compute + self.bubble_after + sum(part.after.exposed for part in self.parts), self.host)

    @property
    def host(self) -> float:
        return sum(part.after.host for part in self.parts)

    @property
    def speedup(self) -> float:
        return self.before / self.after


def predict(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    widths: Mapping[str, int],
    codec: Format = Format(8, 128),  # noqa: B008  frozen
    min_bytes: int = 1 << 20,
) -> Step:
    """A step in full precision and with the fields of `widths` quantized to their bits, the rest of `codec` alike.

    Calls below min_bytes stay in full precision. What the plugin refuses to quantize stays out of `widths`.
    """
    all_traffic = traffic(model, cluster, layout)
    parts: dict[str, Part] = {}
    waits = [0.0, 0.0]
    for t in all_traffic:
        asked = t.field and (t.needs is None or t.needs in widths) and t.numel * t.itemsize >= min_bytes
        bits = widths.get(t.field) if t.field and asked else None
        before = cost(t, cluster)
        after = before if bits is None else cost(t, cluster, Format(bits, codec.group_size, codec.symmetric))
        if t.every_batch:
            waits[0] += before.exposed
            waits[1] += after.exposed
        if not before.bytes_sent:
            continue
        if t.kind in parts:
            known = parts[t.kind]
            before, after, bits = _sum(known.before, before), _sum(known.after, after), known.bits or bits
        parts[t.kind] = Part(t.kind, t.field, t.group, before, after, bits)
    each = times(model, cluster, layout)
    compute = layout.accumulation * (each.forward + each.backward)
    share = (layout.pp - 1) / layout.accumulation
    return Step(compute, share * (compute + waits[0]), share * (compute + waits[1]), tuple(parts.values()))


def _sum(a: Cost, b: Cost) -> Cost:
    return Cost(
        a.bytes_sent + b.bytes_sent, a.link + b.link, a.busy + b.busy, a.hidden + b.hidden, a.exposed + b.exposed,
        b.way, a.host + b.host,
    )  # fmt: skip


def quantizable(model: Model, cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """The fields that some traffic of this step has and its framework can set."""
    there = {t.field for t in traffic(model, cluster, layout) if t.field and t.group.ranks > 1}
    return tuple(field for field in _FIELDS[layout.framework] if field in there)


def widths_at(layout: Layout, fields: Iterable[str], bits: int) -> dict[str, int]:
    """These fields at `bits`, but for the parameters of DeepSpeed's stage 3."""
    return {field: VALUE_BITS if layout.zero == 3 and field == PARAMETERS else bits for field in fields}


def advise(model: Model, cluster: Cluster, layout: Layout, bits: int) -> dict[str, int]:
    """The fewest fields that come within WORTH of the fastest step at `bits`; none, if full precision does.

    What travels at `bits` has no switch of its own: where the forward pass stays in full precision, so does all of
    tensor parallelism, and where DeepSpeed's gradients do, so do its parameters.
    """
    fields = quantizable(model, cluster, layout)
    first, others = (GRADIENT, {PARAMETERS}) if layout.framework == "deepspeed" else (FORWARD, {BACKWARD, GATHER})
    found: list[tuple[float, dict[str, int]]] = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(fields, n) for n in range(len(fields) + 1)):
        if first in chosen or not others & set(chosen):
            widths = widths_at(layout, chosen, bits)
            found.append((predict(model, cluster, layout, widths).after, widths))
    best = min(seconds for seconds, _ in found)
    near = [(len(widths), seconds, widths) for seconds, widths in found if seconds <= best * (1 + WORTH)]
    return min(near, key=lambda each: each[:2])[2]
