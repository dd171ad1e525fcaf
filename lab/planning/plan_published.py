"""Second half of lab/planning/plan_check.py: predictions for set-ups of published figures. Nothing is tuned.

A prediction is a range. For a call: the codec's kernels and the link one after the other, and overlapped. For a
training step: without any overlap with computation, and with all possible overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_allreduce_plugin.cli.plan import presets as presets
from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Group, Kind, Model, Traffic, cost
from flash_allreduce_plugin.cli.plan.inputs import cluster_of
from flash_allreduce_plugin.cli.plan.step_model import Layout, predict, quantizable, times
from flash_allreduce_plugin.codec.format import Format

FLASH, ZEROPP, COCCL, TACO = "arXiv 2412.04964", "arXiv 2306.10209 and its blog", "COCCL's README", "arXiv 2604.24088"
QUICKREDUCE, EGOVERSE = "QuickReduce", "EgoVerse #667"
INT8, INT4 = Format(8, 128), Format(4, 128)
#: Published figures without a set-up: (source, subject, figure).
UNKNOWN = (
    ("Flash Communication V2", "all_reduce, INT2 to INT8, up to", 3.2),
    ("SDP4Bit, arXiv 2410.15526", "training of GPT, 128 GPUs, up to", 4.08),
    ("TAH-Quant, arXiv 2506.01352", "pipeline stages over slow networks, 3 to 4 bits against fp32, up to", 4.3),
    ("vLLM PR 39783", "time to first token, INT8 and FP8 over NVLink", 1.08),
    ("EQuARX (XLA)", "all_reduce, INT8 against bf16, TPU", 1.8),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Speed-ups from low to high, a single number twice. predicted: None if the set-up is not known."""

    source: str
    what: str
    published: tuple[float, float]
    predicted: tuple[float, float] | None
    note: str

    @property
    def difference(self) -> float | None:
        """The difference of the nearest ends, as a share of the published one; 0 if the ranges overlap."""
        if self.predicted is None:
            return None
        (low, high), (least, most) = self.published, self.predicted
        return least / high - 1 if least > high else most / low - 1 if most < low else 0.0


def rows() -> list[Row]:
    return [*_flash_communication(), *_zeropp(), *_coccl(), *_quickreduce(), *_egoverse(), *_taco(), *_unknown()]


def _single(value: float) -> tuple[float, float]:
    return value, value


def _seconds(t: Traffic, c: Cluster) -> tuple[float, float, float]:
    """Return the seconds of a call: full precision; INT4 without and with overlap, and at least the host's time."""
    narrow = cost(t, c, INT4)
    in_turn = narrow.seconds + min(narrow.link, narrow.busy)
    return cost(t, c).seconds, max(in_turn, narrow.host), max(narrow.seconds, narrow.host)


def _ratio(t: Traffic, c: Cluster) -> tuple[float, float]:
    full, in_turn, at_once = _seconds(t, c)
    return full / in_turn, full / at_once


def _flash_communication() -> list[Row]:
    """Return Flash Communication's rows: 4 ranks, LLaMA-3-70B, prefill of 8 x 1024 tokens, bf16, 160 all-reduces."""
    found = []
    group = Group(4, 4)
    l40, _ = cluster_of("l40-4x1")
    ratio = _ratio(Traffic("call", None, "all_reduce", 1 << 27, 2, 1, group), l40)
    note = "24 GB/s a rank assumed; kernels and link in turn, and at once"
    found.append(Row(FLASH, "all_reduce of 256 MiB bf16, 4 x L40, INT4", _single(3.18), ratio, note))
    model = replace(presets.MODELS["llama-3-70b"].model, sequence=1024)
    tokens = 8 * 1024
    # The shares are from the paper ("up to 65 %", "20 %" of the prefill).
    for name, published, share in (("l40", 2.06, 0.65), ("a100", 1.19, 0.20)):
        c, _ = cluster_of(f"{name}-4x1")
        t = Traffic("prefill", None, "all_reduce", tokens * model.hidden, 2, 2 * model.layers, group)
        compute = model.forward_flops(tokens) / 4 / c.flops
        full, in_turn, at_once = _seconds(t, c)
        what = f"time to first token, LLaMA-3-70B, TP 4, {name.upper()}, INT4"
        mine = full / (compute + full)
        gains = ((compute + full) / (compute + in_turn), (compute + full) / (compute + at_once))
        note = f"from presets: communication {mine:.0%} of the prefill, in the paper {share:.0%}"
        found.append(Row(FLASH, what, _single(published), gains, note))
        gains = (1 / (1 - share + share * in_turn / full), 1 / (1 - share + share * at_once / full))
        note = "the paper's share of communication as an input, the calls from presets"
        found.append(Row(FLASH, what, _single(published), gains, note))
    return found


def zeropp_steps(c: Cluster, tokens: int, overlap: bool) -> tuple[float, float, float]:
    """Return the seconds of a micro-batch of ZeRO-3, of ZeRO++ and of ZeRO-3 with this plugin; fp16, 18 G params.

    ZeRO++: INT8 parameters forward, gathered backward inside the node, INT4 gradients. This plugin: INT8 parameters
    forward and backward, INT4 gradients.
    """
    model = Model(40, 6144, 48, 48, 4 * 6144, 50257, tokens)
    layout = Layout(dp=384, zero=3, framework="deepspeed", recompute=True)
    t = times(model, c, layout)
    all_ranks, node = Group(384, c.ranks_per_node), Group(c.ranks_per_node, c.ranks_per_node)

    def passes(
        forward: Format | None, backward: Group, gathered_again: Format | None, gradients: Format | None
    ) -> float:
        def whole(collective: Kind, group: Group, codec: Format | None) -> float:
            return cost(Traffic("", None, collective, model.parameters, 2, 1, group), c, codec).seconds

        gathered = whole("all_gather", all_ranks, forward)
        back = whole("all_gather", backward, gathered_again) + whole("reduce_scatter", all_ranks, gradients)
        if not overlap:
            return t.forward + t.backward + gathered + back
        return max(t.forward, gathered) + max(t.backward, back)

    return (
        passes(None, all_ranks, None, None),
        passes(INT8, node, None, INT4),
        passes(INT8, all_ranks, INT8, INT4),
    )


def _zeropp() -> list[Row]:
    found = []
    for adapters, tokens, published in (
        (1, 1024, (2.0, 2.2)), (1, 2048, (2.0, 2.2)), (4, 1024, (1.28, 1.36)), (4, 2048, (1.24, 1.29)),
    ):  # fmt: skip
        c, _ = cluster_of("v100-16x24", inter="infiniband-100g", adapters=adapters)
        steps = [zeropp_steps(c, tokens, overlap) for overlap in (True, False)]
        gains = sorted(before / after for before, after, _ in steps)
        ours = sorted(before / after for before, _, after in steps)
        note = f"this plugin, parameters at INT8 in both passes, gradients at INT4: {ours[0]:.2f} to {ours[1]:.2f} x"
        what = f"ZeRO++ over ZeRO-3, 384 V100, {100 * adapters} Gbit/s a node, {tokens // 1024}k tokens a GPU"
        found.append(Row(ZEROPP, what, published, (gains[0], gains[1]), note))
    return found


def _coccl() -> list[Row]:
    """Return the rows of COCCL: 32 H800 in four nodes, SDP4Bit (4 bits between nodes, 8 inside) against NCCL's fp32."""
    found = []
    c, _ = cluster_of("h800-8x4")
    group = Group(32, 8)
    calls: tuple[tuple[Kind, float], ...] = (
        ("all_reduce", 2.60),
        ("reduce_scatter", 2.58),
        ("all_gather", 5.66),
        ("all_to_all", 4.92),
    )
    for collective, published in calls:
        ratio = _ratio(Traffic("call", None, collective, 1 << 28, 4, 1, group), c)
        note = "1 GiB; four adapters of 400 Gbit/s a node assumed; kernels and link in turn, and at once"
        found.append(Row(COCCL, f"{collective} over fp32, 32 H800", _single(published), ratio, note))
    for size, published in (("2.7b", 1.06), ("6.7b", 1.10), ("13b", 1.24)):
        model = presets.MODELS[f"gpt3-{size}"].model
        gains = []
        for overlap in (True, False):
            layout = Layout(
                tp=2, pp=4, dp=4, zero=1, micro_batch=8, accumulation=8, gradient_itemsize=4, overlap=overlap
            )
            widths = {field: 4 if field == "grad_bits" else 8 for field in quantizable(model, c, layout)}
            gains.append(predict(model, c, layout, widths).speedup)
        note = "TP 2, PP 4, batch 256, as their script for 350M; the layout of these rows is not published"
        found.append(Row(COCCL, f"GPT {size.upper()}, 32 H800, 3D", _single(published), (min(gains), max(gains)), note))
    return found


def _taco() -> list[Row]:
    """Return the rows of TACO, without a set-up: the share of communication at which 8.25 bits give 1.87 x."""
    gain = 1.87
    shares = [(1 - 1 / gain) / (1 - INT8.bits_per_element / full) for full in (16, 32)]
    note = (
        f"set-up not known here. 8 bits give {gain} x only where communication is {shares[0]:.0%} of a bf16 step or "
        f"{shares[1]:.0%} of one that sends fp32"
    )
    return [Row(TACO, "GPT and Qwen, 3D, FP8", _single(gain), None, note)]


def _quickreduce() -> list[Row]:
    """Return the rows of QuickReduce: two MI300X, INT4 with 4.5 bits an element."""
    found = []
    c, _ = cluster_of(None, peak_flops="1307T", ranks_per_node=2, intra="48GB/s", inter="48GB/s", codec="4TB/s")
    codec = Format(4, 32, compact=True)
    for mib, published in ((64, 3.04), (512, 3.18)):
        t = Traffic("call", None, "all_reduce", mib << 19, 2, 1, Group(2, 2))
        narrow = cost(t, c, codec)
        full, in_turn = cost(t, c).seconds, narrow.seconds + min(narrow.link, narrow.busy)
        note = "48 of 64 GB/s of one xGMI link, 4 TB/s of memory assumed; kernels and link in turn, and at once"
        what = f"all_reduce of {mib} MiB fp16, 2 x MI300X, INT4"
        found.append(Row(QUICKREDUCE, what, _single(published), (full / in_turn, full / narrow.seconds), note))
    return found


def _egoverse() -> list[Row]:
    """Return the rows of DDP on 8 A40: a step of 1.4 s on one GPU, 6.4 s on eight, 3.6 s with the bf16 hook.

    The first two give the link.
    """
    alone, fp32 = 1.4, 6.4
    exposed = fp32 - alone
    at = {bits: alone + exposed * bits / 32 for bits in (16.0, INT8.bits_per_element, INT4.bits_per_element)}
    ours = ", ".join(f"{fp32 / seconds:.1f} x at {bits:.2f}" for bits, seconds in at.items() if bits < 16)
    note = f"all of 5 s on the link, as many bytes less; bits an element of this plugin: {ours}"
    return [
        Row(
            EGOVERSE, "a step of DDP on 8 A40, bf16 hook over fp32", _single(fp32 / 3.6), _single(fp32 / at[16.0]), note
        )
    ]


def _unknown() -> list[Row]:
    note = "set-up not known here: nothing to predict"
    return [Row(source, what, _single(published), None, note) for source, what, published in UNKNOWN]
