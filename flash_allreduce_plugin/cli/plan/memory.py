"""The memory of a training step on one GPU: an estimate, to find layouts that cannot fit."""

from __future__ import annotations

from dataclasses import dataclass

from flash_allreduce_plugin.cli.plan.cost_model import Model
from flash_allreduce_plugin.cli.plan.step_model import Layout

OPTIMIZER_BYTES = 12  # Adam's two moments and the master copy of a parameter, fp32
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of one GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def estimate(model: Model, layout: Layout) -> Memory:
    """Estimate the bytes of a GPU of the first pipeline stage.

    Model states are those of mixed-precision Adam, which ZeRO divides among the data-parallel ranks (Rajbhandari et
    al., arXiv 1910.02054, section 3), context-parallel ranks included, experts among DP / EP of them. With P =
    parameters / (TP x PP), experts / (TP x PP x EP):

        parameters   itemsize x P            / DP with ZeRO-3
        gradients    gradient itemsize x P   / DP with ZeRO-2 and 3
        optimizer    12 x P                  / DP with ZeRO-1, 2 and 3

    Activations follow Korthikanti et al. (arXiv 2205.05198, section 4), with the columns of the model's matrices in
    place of GPT's. For one layer and token:

        kept by every tensor-parallel rank   10 x hidden                               / TP with sequence parallelism
        divided among them                   2 x (columns of q, k, v + of attention + of the MLP's matrices) / TP

    For GPT this is the paper's hidden x (10 + 24 / TP). The scores of attention, its 5 a s / h, are ignored: flash
    attention does not keep them. With recompute a layer keeps only its input, 2 x hidden, and one layer is whole. The
    first stage holds min(PP, micro-batches) micro-batches of its layers (1F1B). Without pipeline stages the logits are
    added, in fp32.

    Ignored: buffers of collectives, fragmentation, the CUDA context, the first stage's larger share of the embedding.
    """
    everywhere, experts = model.parameters - model.expert_parameters, model.expert_parameters
    share = (everywhere + experts / layout.ep) / (layout.tp * layout.pp)
    divided = model.parameters / layout.ranks  # by ZeRO
    tokens = layout.tokens(model)
    spread = layout.tp if layout.sequence_parallel else 1
    mlp = (model.ffn_columns + model.ffn) * (model.experts_per_token if model.experts else 1)
    columns = model.qkv_columns + model.attention_size + mlp
    layer = tokens * (10 * model.hidden / spread + 2 * columns / layout.tp)
    held = model.layers // layout.pp * min(layout.pp, layout.accumulation)
    activations = held * layer
    if layout.recompute:
        activations = held * tokens * 2 * model.hidden / spread + layer
    if layout.pp == 1:
        activations += LOGIT_BYTES * tokens * model.vocabulary / layout.tp
    return Memory(
        parameters=layout.itemsize * (divided if layout.zero >= 3 else share),
        gradients=layout.gradient_itemsize * (divided if layout.zero >= 2 else share),
        optimizer=OPTIMIZER_BYTES * (divided if layout.zero >= 1 else share),
        activations=activations,
    )
