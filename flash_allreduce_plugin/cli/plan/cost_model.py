"""Estimate the communication of a training step, in full precision and quantized (docs/decide/planning.md).

A collective takes the longer of link and busy, because chunks in flight use both together, and start:

    link    the bytes that a rank sends, over the speed of their link (+ the latency of each exchange)
    busy    the time of the device: the codec's kernels, on a CPU also the sending
    start   of a quantized call: the time before its first byte is on the wire and after its last one has arrived
    host    the host's time of a quantized call. The host runs ahead of the device; a step is never shorter

Computation of the training can hide the link, but not the busy time:

    hidden  = min(computing time, link - busy)             exposed = start + max(link, busy) - hidden

Full precision is a ring. Quantized is the two-step exchange: flat or in two levels (docs/use/clusters.md), whichever is
faster. An all-to-all has one level.

The model ignores contention inside a switch or between sockets, kernels and transfers that slow down computation,
stragglers, messages too small to fill a link, trees and reductions in the network. Speeds are bytes a second in one
direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flash_allreduce_plugin.codec.format import MAX_BITS, Format
from flash_allreduce_plugin.collectives.chunks import queued_chunk_bytes

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
Way = Literal["ring", "flat", "two levels", "send"]
Kernel = Literal["encode", "decode", "decode_sum", "decode_sum_encode"]
HALVES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
#: Most passes over the weights of a gather by differences, besides the codec's: two for the checksums, before and
#: after, and five for the addition in float32, through a buffer larger than the cache (a CPU's fits: three in all). The
#: owner's subtraction, of one rank's part, is ignored.
DIFFERENCE_PASSES = 7


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer.

    ffn: inner size of the MLP, or of an expert. gated: the MLP has three matrices, not two. tied: one embedding for
    input and output. positions: learned position embeddings. head_size: 0 for hidden / heads. experts: of every layer,
    0 for a dense model. experts_per_token: experts that compute a token.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    gated: bool = False
    tied: bool = True
    positions: int = 0
    head_size: int = 0
    experts: int = 0
    experts_per_token: int = 1

    @property
    def attention_size(self) -> int:
        """The columns of all heads."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def qkv_columns(self) -> int:
        return self.attention_size * (self.heads + 2 * self.kv_heads) // self.heads

    @property
    def ffn_columns(self) -> int:
        """The columns of the MLP's first matrix, or first two."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def mlp_parameters(self) -> int:
        """The parameters of one MLP or expert."""
        return self.hidden * (self.ffn_columns + self.ffn)

    @property
    def expert_parameters(self) -> int:
        """The parameters of all experts of all layers."""
        return self.layers * self.experts * self.mlp_parameters

    @property
    def parameters(self) -> int:
        """The parameters of all matrices. Biases and norms, less than 0.1 %, and the routers are ignored."""
        embeddings = self.hidden * (self.vocabulary * (1 if self.tied else 2) + self.positions)
        layer = self.hidden * (self.qkv_columns + self.attention_size) + max(1, self.experts) * self.mlp_parameters
        return self.layers * layer + embeddings

    def layer_flops(self, tokens: float) -> float:
        """Return the FLOPs of one layer's forward pass: 2 a parameter and token, and attention to all tokens."""
        mlp = (self.experts_per_token if self.experts else 1) * self.mlp_parameters
        matrices = self.hidden * (self.qkv_columns + self.attention_size) + mlp
        return tokens * (2.0 * matrices + self.attention_flops)

    @property
    def attention_flops(self) -> float:
        """The FLOPs of a token's attention to the whole sequence, without its matrices, in one layer's forward pass."""
        return 4.0 * self.sequence * self.attention_size

    def forward_flops(self, tokens: float) -> float:
        """Return the FLOPs of the model with its output layer (Korthikanti et al., arXiv 2205.05198, appendix A)."""
        return self.layers * self.layer_flops(tokens) + 2.0 * tokens * self.hidden * self.vocabulary


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of Cluster.codec that each of the codec's kernels reaches, by operator."""

    encode: float = 1.0
    decode: float = 1.0
    decode_sum: float = 1.0
    decode_sum_encode: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """One rank's share of a machine, in reached speeds, not those of the data sheet.

    flops: of the training's arithmetic. codec: bytes that the codec's kernels read and write together. shares: of
    codec, by width and kernel. intra, inter: the link to ranks of the same node and of others. latency, far: seconds of
    one exchange inside a node and between nodes. start: seconds of a quantized call of any size. host: seconds of the
    host for a quantized call of one chunk, and for each further chunk. transport: bytes a second that the device sends;
    inf: adapters send. backend: gloo's full-precision reduce-scatter sends as much as its all-reduce. sources: of these
    numbers. memory: bytes; inf: not known.
    """

    name: str
    flops: float
    codec: float
    ranks_per_node: int
    intra: float
    inter: float
    latency: float = 0.0
    far: float = 0.0
    start: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)
    transport: float = math.inf
    backend: Literal["nccl", "gloo"] = "nccl"
    sources: tuple[str, ...] = ()
    memory: float = math.inf
    shares: Mapping[int, Shares] = field(default_factory=dict)

    def kernel(self, name: Kernel, bits: int, nbytes: float) -> float:
        """Return the seconds of a kernel that reads and writes `nbytes` bytes."""
        return nbytes / (self.codec * getattr(self.shares.get(bits, Shares()), name))


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective, `per_node` of them on each node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


@dataclass(frozen=True, slots=True)
class Traffic:
    """`calls` calls of one collective in a step. numel: elements of the whole tensor.

    kind: its name in a table. field: the field of FlashConfig with its width; None: never quantized. hide: seconds of
    computation during each call. every_batch: True if the calls are part of the time of a micro-batch, and so of a
    pipeline's bubble. owners: True if a quantized all_reduce is sent as the reduce_scatter that the framework needs
    (DeepSpeed's stages 1 and 2). needs: a second field that needs a width too. differences: True if the quantized
    gather is added to the weights of every rank, after the ranks have compared checksums.
    """

    kind: str
    field: str | None
    collective: Kind
    numel: float
    itemsize: int
    calls: float
    group: Group
    hide: float = 0.0
    every_batch: bool = False
    owners: bool = False
    needs: str | None = None
    differences: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of all calls of a Traffic, in a step and a rank. way: kind of exchange. host: of quantized calls."""

    bytes_sent: float
    link: float
    busy: float
    hidden: float
    exposed: float
    way: Way
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.hidden + self.exposed


def _latency(t: Traffic, c: Cluster) -> float:
    return c.far if t.group.nodes > 1 else c.latency


def _over(nbytes: float, speed: float) -> float:
    return nbytes / speed if nbytes else 0.0


def full_precision(t: Traffic, c: Cluster) -> tuple[float, float, Way]:
    """Return bytes a rank sends and link seconds of one call in a ring (nccl-tests' bus bandwidth).

    Between nodes a ring uses the links of all its ranks on a node. In an all-to-all each rank uses its own link.
    """
    nbytes, n, node = t.numel * t.itemsize, t.group.ranks, min(t.group.per_node, t.group.ranks)
    if t.collective == "send":
        return nbytes, _over(nbytes, c.inter if t.group.nodes > 1 else c.intra) + _latency(t, c), "send"
    halves = HALVES[t.collective]
    if t.collective == "all_to_all":
        inside, between = (node - 1) / n * nbytes, (n - node) / n * nbytes
        return inside + between, max(_over(inside, c.intra), _over(between, c.inter)) + _latency(t, c), "flat"
    if c.backend == "gloo" and t.collective == "reduce_scatter":
        halves = 2
    sent = halves * (n - 1) / n * nbytes
    inside = _over(sent, c.intra) if node > 1 else 0.0
    between = _over(sent, node * c.inter) if t.group.nodes > 1 else 0.0
    return sent, max(inside, between) + halves * _latency(t, c), "ring"


def flat(t: Traffic, c: Cluster, codec: Format) -> tuple[float, float, float]:
    """Return bytes a rank sends, link seconds and kernel seconds of one call in one level.

    Each half sends every other rank its shard of the payload: over intra inside the node, over inter to other nodes. A
    send has the kernels of both ends.
    """
    payload, tensor, n = _payload(codec, t.numel), t.numel * t.itemsize, t.group.ranks
    if t.collective == "send":
        link = _over(payload, c.inter if t.group.nodes > 1 else c.intra) + _latency(t, c)
        ends: tuple[Kernel, Kernel] = "encode", "decode"
        return payload, link, sum(c.kernel(end, codec.bits, tensor + payload) for end in ends)
    node = min(t.group.per_node, n)
    collective = _quantized_collective(t)
    halves = HALVES[collective]
    inside, between = payload * (node - 1) / n, payload * (n - node) / n
    link = halves * (max(_over(inside, c.intra), _over(between, c.inter)) + _latency(t, c))
    parts: dict[str, list[tuple[Kernel, float]]] = {
        "all_reduce": [
            ("encode", tensor + payload),
            ("decode_sum_encode", payload + payload / n),
            ("decode", payload + tensor),
        ],
        "reduce_scatter": [("encode", tensor + payload), ("decode_sum", payload + tensor / n)],
        "all_gather": [("encode", (tensor + payload) / n), ("decode", payload + tensor)],
        "all_to_all": [("encode", tensor + payload), ("decode", payload + tensor)],
    }
    kernels = sum(c.kernel(name, codec.bits, nbytes) for name, nbytes in parts[collective])
    return halves * (inside + between), link, kernels


def two_levels(t: Traffic, c: Cluster, codec: Format) -> tuple[float, float, float]:
    """Return the same for two levels: INT8 inside a node before the sum, `codec` between (docs/use/clusters.md)."""
    node, nodes, n = t.group.per_node, t.group.nodes, t.group.ranks
    wide, narrow = _payload(replace(codec, bits=MAX_BITS), t.numel), _payload(codec, t.numel)
    tensor, collective = t.numel * t.itemsize, _quantized_collective(t)
    up, down = collective != "all_gather", collective != "reduce_scatter"
    inside = (node - 1) / node * (up * wide + down * narrow)
    between = (up + down) * (nodes - 1) / nodes * narrow / node
    kernels, bits = 0.0, codec.bits
    if up:  # encode; sum inside and encode; sum between nodes, and encode if it is sent back
        kernels += c.kernel("encode", MAX_BITS, tensor + wide)
        kernels += c.kernel("decode_sum_encode", MAX_BITS, wide + narrow / node)
        if down:
            kernels += c.kernel("decode_sum_encode", bits, narrow / node + narrow / n)
        else:
            kernels += c.kernel("decode_sum", bits, narrow / node + tensor / n)
    else:
        kernels += c.kernel("encode", bits, (tensor + narrow) / n)
    if down:
        kernels += c.kernel("decode", bits, narrow + tensor)
    link = max(_over(inside, c.intra), _over(between, c.inter)) + (up + down) * (c.latency + c.far)
    return inside + between, link, kernels


def cost(t: Traffic, c: Cluster, codec: Format | None = None) -> Cost:
    """Return the cost of all calls of `t`. codec: None: full precision. A group of one rank costs nothing."""
    if t.group.ranks == 1 or not t.calls or not t.numel:
        return Cost(0.0, 0.0, 0.0, 0.0, 0.0, "ring")
    if codec is None:
        sent, link, way = full_precision(t, c)
        return _calls(t, c, sent, link, 0.0, 0.0, way)
    ways: list[tuple[Way, tuple[float, float, float]]] = [("flat", flat(t, c, codec))]
    if 1 < t.group.per_node < t.group.ranks and t.collective != "all_to_all":  # it has nothing to sum in a node
        ways.append(("two levels", two_levels(t, c, codec)))
    start, more = c.start, 0.0
    if t.differences:
        start, more = start + _latency(t, c), DIFFERENCE_PASSES * t.numel * t.itemsize / c.codec
    costs = [_calls(t, c, sent, link, kernels + more, start, way) for way, (sent, link, kernels) in ways]
    found = min(costs, key=lambda each: (each.exposed, each.seconds))
    return replace(found, host=t.calls * host_seconds(c.host, _payload(codec, t.numel)))


def host_seconds(host: tuple[float, float], payload: float) -> float:
    """Return the seconds of Cluster.host for a call with `payload` bytes."""
    chunks = math.ceil(payload / queued_chunk_bytes(0, int(payload)))
    return host[0] + (chunks - 1) * host[1]


def _calls(t: Traffic, c: Cluster, sent: float, link: float, kernels: float, start: float, way: Way) -> Cost:
    busy = kernels + _over(sent, c.transport)
    hidden = min(t.hide, max(0.0, link - busy))
    exposed = start + max(link, busy) - hidden
    return Cost(t.calls * sent, t.calls * link, t.calls * busy, t.calls * hidden, t.calls * exposed, way)


def _quantized_collective(t: Traffic) -> Kind:
    return "reduce_scatter" if t.owners else t.collective


def _payload(codec: Format, numel: float) -> float:
    return numel * codec.bits_per_element / 8


def dp_ratio(bytes_per_parameter: float, tokens: float, dp: int, flops: float, link: float) -> float:
    """Return t_comm / t_compute of data parallelism. Up to 1 the communication can be hidden.

    Gradients: bytes 2 (DP-1)/(DP link) against the backward pass, 4 tokens params / flops. ZeRO-3, a block's parameters
    behind another's forward pass: 16 h^2 bytes (DP-1)/(DP link) against 32 tokens h^2 / flops. The same ratio.

    Source of this function and the next two: The Ultra-Scale Playbook (Hugging Face, nanotron/ultrascale-playbook),
    "compute / communication overlap", with the bytes of an element written out.
    """
    return bytes_per_parameter / (2 * tokens) * (dp - 1) / dp * flops / link


def tp_ratio(bytes_per_element: float, hidden: int, tp: int, flops: float, link: float) -> float:
    """Return the ratio of a layer's exchange to an h x h GEMM: tokens h (TP-1)/(TP link), 2 tokens h^2 / (TP flops)."""
    return bytes_per_element * (tp - 1) / (2 * hidden) * flops / link


def pp_ratio(bytes_per_element: float, hidden: int, layers_per_stage: int, flops: float, link: float) -> float:
    """Return the ratio of a micro-batch's send to a stage's forward: tokens h / link, 32 tokens h^2 layers / flops."""
    return bytes_per_element * flops / (32 * hidden * layers_per_stage * link)
