"""The model of a training step: the collectives of a layout, the computation that hides them, and the step time.

Order of ranks: tensor-parallel ranks are neighbours, then context-parallel, data-parallel, and pipeline stages
(Megatron's order). Experts are spread over the ranks of context and data parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Cost, Group, Kind, Model, Traffic, cost, full_precision
from flash_allreduce_plugin.codec.format import Format

FORWARD, BACKWARD = "bits", "backward_bits"
GATHER, GRADIENT = "sequence_parallel_gather_bits", "grad_bits"
PARAMETERS = "param_bits"
PIPELINE, PIPELINE_BACKWARD = "pipeline_bits", "pipeline_backward_bits"
ATTENTION, EXPERT = "attention_bits", "expert_bits"
FSDP_PARAMETERS = "parameters"  # not a field of FlashConfig: FSDP2's FlashAllGather
_FIELDS = {
    "megatron": (FORWARD, BACKWARD, GATHER, GRADIENT, PARAMETERS, PIPELINE, PIPELINE_BACKWARD, ATTENTION, EXPERT),
    "deepspeed": (GRADIENT, PARAMETERS, PIPELINE, PIPELINE_BACKWARD, ATTENTION, EXPERT, BACKWARD),
    "torch": (GRADIENT, FSDP_PARAMETERS),
}
#: DeepSpeed's stage 3 gathers values, not differences: no later gather corrects errors. Below 6 bits the plugin warns.
VALUE_BITS = 8
#: A step slower than the fastest by less than this share counts as equal.
WORTH = 0.005


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel layout of a training.

    zero: 0: gradients are all-reduced; 1 to 3: DeepSpeed's stages; 1 with framework "megatron": the distributed
        optimizer.
    framework: "torch": DistributedDataParallel (zero 0) and FSDP2 (zero 3).
    accumulation: micro-batches a rank and step.
    itemsize, gradient_itemsize: bytes on the wire of activations and parameters, and of gradients.
    overlap: True if gradients and parameters are sent during computation.
    recompute: True if the backward pass repeats the forward pass.
    bucket: bytes of gradients of one call.
    cp: ranks that share a sequence (DeepSpeed: Ulysses), not counted in dp. cp_comm_type: exchange of their attention.
    ep: ranks among which experts are divided.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    cp_comm_type: Literal["a2a", "p2p"] = "a2a"
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
        return self.tp * self.cp * self.dp * self.pp

    def tokens(self, model: Model) -> float:
        """Return the tokens of a micro-batch on a rank."""
        return self.micro_batch * model.sequence / self.cp


def check(model: Model, layout: Layout) -> None:
    """Raise ValueError, one sentence, for an impossible layout."""
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
    if layout.sequence_parallel and model.sequence % (layout.tp * layout.cp):
        raise ValueError(
            f"--sequence-parallel: --tp {layout.tp} does not divide the sequence of {model.sequence // layout.cp}; "
            "choose another."
        )
    _check_context(model, layout)
    _check_experts(model, layout)
    if layout.zero >= 2 and layout.pp > 1:
        raise ValueError(
            f"--zero {layout.zero} and --pp {layout.pp} exclude each other: with stages, choose --zero 0 or 1."
        )
    if layout.framework == "torch" and (layout.zero not in (0, 3) or layout.dp < layout.ranks or layout.ep > 1):
        raise ValueError(
            "--framework torch is data-parallel, --zero 0 (DDP) or 3 (FSDP2), without --tp, --pp, --cp and --ep."
        )
    if layout.zero >= 2 and layout.framework == "megatron":
        raise ValueError(f"--zero {layout.zero} is DeepSpeed's: use --framework deepspeed or torch, or --zero 0 or 1.")


def _check_context(model: Model, layout: Layout) -> None:
    if model.sequence % layout.cp:
        raise ValueError(f"--cp {layout.cp} does not divide the sequence of {model.sequence}; choose a divisor.")
    if layout.cp_comm_type == "a2a" and model.kv_heads % (layout.tp * layout.cp):
        raise ValueError(
            f"--cp {layout.cp} does not divide the {model.kv_heads} heads of keys and values, of which each of the "
            f'--tp {layout.tp} has its part; choose a divisor, or "cp_comm_type": "p2p".'
        )


def _check_experts(model: Model, layout: Layout) -> None:
    if layout.ep == 1 and not model.experts:
        return
    if model.experts % layout.ep or not model.experts:
        raise ValueError(f"--ep {layout.ep} does not divide the {model.experts} experts of a layer; choose a divisor.")
    if model.experts_per_token > model.experts:
        raise ValueError(f"experts_per_token {model.experts_per_token} is more than the {model.experts} experts.")
    if layout.cp * layout.dp % layout.ep:
        raise ValueError(
            f"--ep {layout.ep} does not divide --cp {layout.cp} x --dp {layout.dp}, the ranks that share out experts."
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ValueError(f"experts with --tp {layout.tp} need --sequence-parallel, in Megatron too.")
    if layout.zero == 3 and layout.ep > 1:
        raise ValueError(f"--zero 3 and --ep {layout.ep} exclude each other; choose --zero 0, 1 or 2.")


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of one micro-batch on one stage, and of one layer in it."""

    forward: float
    backward: float
    layer_forward: float
    layer_backward: float


def times(model: Model, cluster: Cluster, layout: Layout) -> Times:
    """Return the times of a stage. The output layer is divided among all stages."""
    tokens = layout.tokens(model)
    rank = layout.tp * cluster.flops
    forward = model.forward_flops(tokens) / layout.pp / rank
    layer = model.layer_flops(tokens) / rank
    again = 3 if layout.recompute else 2
    return Times(forward, again * forward, layer, again * layer)


def group_of(stride: int, ranks: int, ranks_per_node: int) -> Group:
    """Return the group of every stride-th rank from the first, with its ranks on a node."""
    return Group(ranks, max(1, min(ranks, ranks_per_node // stride)))


def traffic(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the traffic of a rank of one stage in a step."""
    return [
        *_tensor_parallel(model, cluster, layout),
        *_attention(model, cluster, layout),
        *_experts(model, cluster, layout),
        *_pipeline(model, cluster, layout),
        *_data(model, cluster, layout),
    ]


def _tensor_parallel(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return f and g of Megatron: two exchanges a layer and direction; gathers and scatters in sequence parallelism."""
    tokens = layout.tokens(model)
    layers, batches = model.layers // layout.pp, layout.accumulation
    group = group_of(1, layout.tp, cluster.ranks_per_node)

    def of(kind: str, field: str | None, collective: str, calls: float, columns: float = 0.0) -> Traffic:
        # Hidden by one GEMM of the column-parallel layer: the weight's gradient or (gathers) the input's.
        hide = 2.0 * tokens * model.hidden * columns / layout.tp / cluster.flops
        numel = tokens * model.hidden
        field = field if layout.framework == "megatron" else None  # only Megatron's is quantized
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
    dense = 0 if model.experts else layers  # the experts' exchanges are _experts'
    return [
        of("SP forward, scatter", FORWARD, "reduce_scatter", (layers + dense) * again),
        of("SP forward (embedding)", None, "reduce_scatter", 1),
        of("SP forward, gather", GATHER, "all_gather", (layers + dense) * again + 1),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", layers, attention),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", dense, mlp),
        of("SP backward, scatter", BACKWARD, "reduce_scatter", 1, model.vocabulary),
        of("SP backward, input gathered again", GATHER, "all_gather", layers, attention),
        of("SP backward, input gathered again", GATHER, "all_gather", dense, mlp),
        of("SP backward, input gathered again", GATHER, "all_gather", 1, model.vocabulary),
        replace(of("SP backward, gradient gathered", GATHER, "all_gather", layers + dense), needs=BACKWARD),
    ]


def _attention(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the traffic of ranks that share a sequence: all-to-alls of heads (a2a), or a ring of keys, values (p2p).

    The ring overlaps with attention to the previous keys and values. Transformer Engine makes these calls, and they are
    not quantized. The all-to-alls do not overlap.
    """
    if layout.cp == 1:
        return []
    tokens, group = layout.tokens(model), group_of(layout.tp, layout.cp, cluster.ranks_per_node)
    output = tokens * model.attention_size / layout.tp
    keys_values = tokens * (model.qkv_columns - model.attention_size) / layout.tp
    again = 2 if layout.recompute else 1
    calls = model.layers // layout.pp * layout.accumulation

    def of(kind: str, field: str | None, collective: Kind, numel: float, calls: float, hide: float = 0.0) -> Traffic:
        return Traffic(kind, field, collective, numel, layout.itemsize, calls, group, hide, every_batch=True)

    if layout.cp_comm_type == "p2p":
        beside = tokens * model.attention_flops / layout.cp / (layout.tp * cluster.flops)
        return [
            of("CP ring, keys and values", None, "send", keys_values, (layout.cp - 1) * calls * again, beside),
            of("CP ring, backward", None, "send", 2 * keys_values, (layout.cp - 1) * calls, 2 * beside),
        ]
    # One call each for query, output, key and value.
    sizes = (output, keys_values / 2)
    forward = [of("CP attention, forward", ATTENTION, "all_to_all", numel, 2 * calls * again) for numel in sizes]
    backward = [of("CP attention, gradients", ATTENTION, "all_to_all", numel, 2 * calls) for numel in sizes]
    return [*forward, *(replace(each, needs=BACKWARD) for each in backward)]


def _experts(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the traffic of tokens to their experts and back, as in Megatron's all-to-all dispatcher.

    Expert-parallel ranks exchange tokens. Each expert is divided among the tensor-parallel ranks, which gather and sum.
    """
    if not model.experts:
        return []
    numel = layout.tokens(model) * model.experts_per_token * model.hidden
    again = 2 if layout.recompute else 1
    calls = model.layers // layout.pp * layout.accumulation
    across = group_of(layout.tp, layout.ep, cluster.ranks_per_node)
    inside = group_of(1, layout.tp, cluster.ranks_per_node)

    def both(kind: str, calls: float, needs: str | None = None) -> list[Traffic]:
        """Return the traffic in both directions."""

        def of(kind: str, collective: Kind, numel: float, group: Group) -> Traffic:
            item = layout.itemsize
            return Traffic(kind, EXPERT, collective, numel, item, calls, group, every_batch=True, needs=needs)

        exchange = of(kind, "all_to_all", numel / layout.tp, across)
        gather = of(f"{kind}, TP", "all_gather", numel, inside)
        scatter = of(f"{kind}, TP", "reduce_scatter", numel, inside)
        return [exchange, gather, scatter, exchange]

    return [*both("EP forward", calls * again), *both("EP gradients", calls, BACKWARD)]


def _pipeline(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the sends of activations to the next stage and of gradients back, which do not overlap."""
    if layout.pp == 1:
        return []
    numel = layout.tokens(model) * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    together = layout.ranks <= cluster.ranks_per_node
    group = Group(2, 2 if together else 1)
    return [
        Traffic(f"PP send, {what}", field, "send", numel, layout.itemsize, layout.accumulation, group, every_batch=True)
        for what, field in (("activations", PIPELINE), ("gradients", PIPELINE_BACKWARD))
    ]


def _data(model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the traffic of gradients, and with ZeRO of parameters.

    All ranks of data and context parallelism share the dense parameters; fewer share an expert. The first or last call
    of a row does not overlap.
    """
    ranks, node = layout.cp * layout.dp, cluster.ranks_per_node
    shared = model.parameters - model.expert_parameters
    parts: list[tuple[str, float, Group]] = [("", shared, group_of(layout.tp, ranks, node))]
    if model.experts:
        group = group_of(layout.tp * layout.ep, ranks // layout.ep, node)
        parts.append((" of experts", model.expert_parameters / layout.ep, group))
    found: list[Traffic] = []
    for of, numel, group in parts:
        found += _data_of(of, numel / (layout.tp * layout.pp), group, model, cluster, layout)
    return found


def _data_of(of: str, numel: float, group: Group, model: Model, cluster: Cluster, layout: Layout) -> list[Traffic]:
    """Return the traffic of `numel` parameters of a rank that the ranks of the group share."""
    share = numel * layout.tp * layout.pp / (model.parameters - model.expert_parameters * (1 - 1 / layout.ep))
    t = times(model, cluster, layout)
    layers, batches = model.layers // layout.pp, layout.accumulation

    def row(kind: str, field: str | None, collective: str, numel: float, item: int, calls: int, repeats: int,
            hide: float, owners: bool = False, differences: bool = False) -> list[Traffic]:  # fmt: skip
        """Return `repeats` rows of `calls` calls. All but one of a row overlap with `hide` seconds of computation."""
        for what in ("gradients", "parameters"):
            kind = kind.replace(what, what + of)
        common = (kind, field, collective, numel, item)
        hide = share * hide if layout.overlap else 0.0
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
    # DeepSpeed gathers flat tensors, in its own buckets, and waits for them.
    calls, hide = (buckets, 0.0) if deepspeed else (layers, t.layer_forward)
    parameters = row(
        "DP parameters", PARAMETERS, "all_gather", numel / calls, layout.itemsize, calls, 1, hide, differences=True
    )
    return [*gradients, *parameters]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of traffic in a step: in full precision, and at the widths."""

    kind: str
    field: str | None
    group: Group
    before: Cost
    after: Cost
    bits: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """The seconds of a step. compute: of all micro-batches. bubble: of the pipeline, in full precision and quantized.

    A quantized step takes at least the host's time of its calls. Other work of the host is not known.
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
    """Predict a step in full precision and with the fields of `widths` quantized to their bits, by `codec` otherwise.

    Calls below min_bytes stay in full precision. `widths` must not have fields that the plugin refuses.
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
    """Return the fields that some traffic of this step has and its framework can set."""
    sent = [t for t in traffic(model, cluster, layout) if t.field and t.group.ranks > 1 and t.calls]
    there = {t.field for t in sent} | {t.needs for t in sent}  # a needed field may have no traffic
    return tuple(field for field in _FIELDS[layout.framework] if field in there)


def widths_at(layout: Layout, fields: Iterable[str], bits: int) -> dict[str, int]:
    """Return these fields at `bits`, except for the parameters of DeepSpeed's stage 3."""
    return {field: VALUE_BITS if layout.zero == 3 and field == PARAMETERS else bits for field in fields}


def advise(model: Model, cluster: Cluster, layout: Layout, bits: int) -> dict[str, int]:
    """Return the fewest fields with a step within WORTH of the fastest at `bits`; none, if full precision is.

    The traffic of the field `bits` has no other switch. If the forward pass stays in full precision, so do all sends of
    modules; if DeepSpeed's gradients do, so does everything.
    """
    fields = quantizable(model, cluster, layout)
    first, others = FORWARD, {BACKWARD, GATHER, ATTENTION, EXPERT}
    if layout.framework == "deepspeed":
        first, others = GRADIENT, set(fields) - {GRADIENT}
    found: list[tuple[float, dict[str, int]]] = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(fields, n) for n in range(len(fields) + 1)):
        if first not in fields or first in chosen or not others & set(chosen):
            widths = widths_at(layout, chosen, bits)
            found.append((predict(model, cluster, layout, widths).after, widths))
    best = min(seconds for seconds, _ in found)
    near = [(len(widths), seconds, widths) for seconds, widths in found if seconds <= best * (1 + WORTH)]
    return min(near, key=lambda each: each[:2])[2]
