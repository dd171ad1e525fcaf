"""The demo's model: a byte-level GPT of megatron-core on CPU, and the steps of Megatron's trainer around it.

megatron-core assumes CUDA in three places that its local (non Transformer Engine) layers use. `prepare_cpu` replaces
them in the calling process, which must be one of the demo's ranks:

- `torch.cuda.current_device()` decides the device of buffers: it returns the CPU.
- Dropout forks the CUDA random number tracker: the tracker for inference does not (dropout is 0 here).
- The only layer norm that marks its parameters for sequence parallelism needs apex: torch's with the same mark.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 256  # bytes
_OFF = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion")
#: Settings of megatron-core without dropout and without kernels that need CUDA.
_ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,  # marks the weights that the ranks share
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    **dict.fromkeys((*_OFF, "apply_rope_fusion", "persist_layer_norm"), False),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of the model. sequence: in bytes. batch: in sequences a step."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    sequence: int = 256
    batch: int = 4


class _LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm with Megatron's constructor and its mark for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def prepare_cpu() -> None:
    """Make megatron-core's local layers work in this process without CUDA (see the module's docstring)."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import transformer_block

    initialize_rng_tracker(inference_rng_tracker=True)
    backends.LNImpl = backends.WrappedTorchNorm = _LayerNorm
    gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = _LayerNorm


def build_model(size: ModelSize, *, tensor_parallel: int, sequence_parallel: bool, seed: int) -> torch.nn.Module:
    """Return a GPT with tied embeddings. The seed alone determines the weights, for any ranks."""
    torch.manual_seed(seed)
    settings = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": sequence_parallel,
    }
    return gpt(settings, vocab_size=VOCABULARY, max_sequence_length=size.sequence)


def gpt(settings: dict[str, Any], spec: Any = None, *, tied: bool = True, **model: Any) -> torch.nn.Module:
    """Return this rank's part of a GPT of megatron-core with rotary positions and local layers.

    Args:
        settings: fields of TransformerConfig, in addition to those that a CPU needs.
        spec: layer specification; by default Megatron's local one.
        tied: share the weights of the embedding and of the output layer.
        model: further arguments of GPTModel.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    return GPTModel(
        TransformerConfig(**_ON_CPU, **settings),
        spec or get_gpt_layer_local_spec(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **model,
    )


def loss_of(model: torch.nn.Module, data: torch.Tensor, starts: torch.Tensor, sequence: int) -> torch.Tensor:
    """Return the mean cross entropy, in nats a byte, of the bytes that follow each of `starts` in `data` (int64)."""
    windows = torch.stack([data[start : start + sequence + 1] for start in starts.tolist()])
    return forward(model, windows).float().mean()


def forward(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Call a GPT with ids [batch, sequence + 1]. Return the tokens' losses, or the output of a pipeline stage."""
    length = ids.shape[1] - 1
    positions = torch.arange(length, device=ids.device).expand(len(ids), -1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)[None, None]
    output: torch.Tensor = model(ids[:, :-1], positions, hidden, labels=ids[:, 1:].contiguous())
    return output


def finish_gradients(model: torch.nn.Module, group: dist.ProcessGroup, clip: float) -> float:
    """Complete the sequence-parallel gradients, clip to a total norm of `clip`, and return the norm before.

    Parameters outside tensor parallelism see one part of the sequence on each rank, so Megatron sums their gradients
    after the backward pass. The norm counts a split parameter on every rank and a replicated one once.
    """
    split: list[torch.Tensor] = []
    replicated: list[torch.Tensor] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=group)
        (split if getattr(parameter, "tensor_model_parallel", False) else replicated).append(parameter.grad)
    square = _square_norm(split)
    dist.all_reduce(square, group=group)
    norm = float((square + _square_norm(replicated)).sqrt())
    for gradient in split + replicated:
        gradient.mul_(min(1.0, clip / (norm + 1e-6)))
    return norm


def _square_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()


def replicas_equal(model: torch.nn.Module, group: dist.ProcessGroup) -> bool:
    """Return True if the parameters outside tensor parallelism have the same bits on every rank of `group`."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not getattr(parameter, "tensor_model_parallel", False):
            digest.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, mine, group=group)  # not the form for objects, which unpickles received data
    return all(torch.equal(one, mine) for one in everybodys)
