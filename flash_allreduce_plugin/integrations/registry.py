"""The integrations, one row each, and nothing that needs torch: `import torch` reads this table (autoload.py).

Everything that lists integrations reads these rows: the names of the package, FLASH_ALLREDUCE_ATTACH, `run --help`,
`doctor`, the refusals, the matrix of docs/use/configuration.md, and the tests that every integration can be undone.
A new integration is its module, its row here, its test and its page (docs/inside/add_an_integration.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_BUCKETS = dict.fromkeys(("include", "exclude"), "where a bucket holds many parameters")
_NO_MODULES = dict.fromkeys(("include", "exclude"), "which does not know modules")
_PARAMETERS = ("param_bits", "param_backward_bits", "quantize_frozen")
_NO_PARAMETERS = dict.fromkeys(_PARAMETERS, "where no parameters are gathered")
_TORCH = "torch 2.11 to 2.13"


class Row(NamedTuple):
    """One integration.

    name: fap.<name>, and the module integrations.<name>.
    title: its name in sentences.
    package: the distribution with the replaced functions. fits: its releases.
    quantizes: one line for lists.
    page: its documentation.
    acts: the fields of config.refusals.OF_MEGATRON that have an effect. Fields outside of that tuple act everywhere,
        unless this row says why not.
    refused: fields that have no effect, and why. The environment may not set them either.
    elsewhere: more fields that a configuration given by hand may not set. The environment may: it may serve another
        integration in the same job. why: the reason for these, and for the rest of OF_MEGATRON; "": refusals.AT_BITS.
    waits_for: the modules after whose import FLASH_ALLREDUCE_ATTACH attaches; empty: it cannot name this integration.
    attach: the module whose by_environment attaches; the integration's own if empty.
    probe: the module that `doctor` imports, in a process of its own, before it verifies the seams.
    """

    name: str
    title: str
    package: str
    fits: str
    quantizes: str
    page: str
    probe: str
    acts: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    elsewhere: tuple[str, ...] = ()
    why: str = ""
    waits_for: tuple[str, ...] = ()
    attach: str = ""

    @property
    def module(self) -> str:
        return f"flash_allreduce_plugin.integrations.{self.name}"

    @property
    def attach_module(self) -> str:
        return f"flash_allreduce_plugin.integrations.{self.attach or self.name}"


_MEGATRON = (
    *("backward_bits", "backward_rounding", "grad_bits", "sequence_parallel_gather_bits", "expert_bits"),
    *("expert_combine_bits", "attention_bits", "pipeline_bits", "pipeline_backward_bits"),
    *("quantize_embedding", "quantize_layernorm", "quantize_evaluation"),
)
_OTHER_TRAFFIC = (*_PARAMETERS, "error_feedback")
ROWS = (
    Row(
        "ddp",
        "DistributedDataParallel",
        package="torch",
        fits=_TORCH,
        quantizes="gradients of torch's DistributedDataParallel",
        page="docs/use/torch.md",
        refused={**_BUCKETS, **_NO_PARAMETERS},
        waits_for=("torch.nn.parallel.distributed",),
        probe="torch.nn.parallel.distributed",
    ),
    Row(
        "fsdp",
        "FSDP",
        package="torch",
        fits=_TORCH,
        quantizes="gradients of torch's FSDP2, HSDP and FSDP1, and FSDP2's gathers of parameters",
        page="docs/use/torch.md",
        refused={
            **dict.fromkeys(("include", "exclude"), "which torch does not tell the module"),
            "param_backward_bits": "which gathers parameters at `param_bits` in both passes",
        },
        waits_for=("torch.distributed.fsdp",),
        probe="torch.distributed.fsdp",
    ),
    Row(
        "megatron",
        "Megatron",
        package="megatron-core",
        fits="megatron-core 0.13 to 0.19",
        quantizes="Megatron's tensor, sequence, expert, context, pipeline and data parallelism",
        page="docs/use/megatron.md",
        acts=_MEGATRON,
        refused={
            "param_backward_bits": "which gathers no parameters for the backward pass alone",
            "quantize_frozen": "which gathers frozen parameters in full precision",
        },
        waits_for=("megatron.core.parallel_state", "megatron.core.transformer.module"),
        attach="megatron.attach",
        probe="megatron.core",
    ),
    Row(
        "megatron_fsdp",
        "megatron_fsdp",
        package="megatron-fsdp",
        fits="megatron-fsdp 0.3.1 to 0.6",
        quantizes="gradients and parameters of Megatron-FSDP without megatron-core",
        page="docs/use/megatron.md",
        acts=("grad_bits",),
        refused={
            **_BUCKETS,
            "param_backward_bits": "which gathers parameters at `param_bits` in both passes",
        },
        why="where gradients and parameters are sent, and nothing else",
        waits_for=("megatron_fsdp.fully_shard",),
        probe="megatron_fsdp",
    ),
    Row(
        "deepspeed",
        "DeepSpeed",
        package="deepspeed",
        fits="deepspeed 0.17.6 to 0.19",
        quantizes="gradients and parameters of ZeRO, AutoTP, pipelines, Ulysses, experts: by the JSON section",
        page="docs/use/deepspeed.md",
        acts=(
            *("pipeline_bits", "pipeline_backward_bits", "attention_bits", "expert_bits", "expert_combine_bits"),
            *("backward_bits", "backward_rounding", "quantize_embedding", "quantize_evaluation"),
        ),
        waits_for=("deepspeed.inference.engine",),
        attach="deepspeed.inference",  # engines of deepspeed.initialize have the section
        probe="deepspeed",
    ),
    Row(
        "apex",
        "fap.apex",
        package="apex",
        fits="NVIDIA's apex 23.05 to 25.05, and AMD's",
        quantizes="gradients of apex.parallel: DistributedDataParallel and Reducer",
        page="docs/use/torch.md",
        refused={**_BUCKETS, **_NO_PARAMETERS},
        probe="apex.parallel",
    ),
    Row(
        "context_parallel",
        "context_parallel",
        package="torch",
        fits=_TORCH,
        quantizes="keys, values and their gradients in torch's context parallelism",
        page="docs/use/torch.md",
        acts=("attention_bits", "backward_bits", "backward_rounding"),
        refused=_NO_MODULES,
        elsewhere=_OTHER_TRAFFIC,
        why="where attention alone exchanges anything",
        waits_for=("torch.distributed.tensor.experimental._context_parallel._attention",),
        probe="torch.distributed.tensor.experimental._context_parallel._attention",
    ),
    Row(
        "tensor_parallel",
        "tensor_parallel",
        package="torch",
        fits="torch 2.11 to 2.14",
        quantizes="activations and their gradients in torch's tensor parallelism (DTensor), with sequence parallelism",
        page="docs/use/torch.md",
        acts=(
            *("backward_bits", "backward_rounding", "sequence_parallel_gather_bits"),
            *("quantize_embedding", "quantize_evaluation"),
        ),
        elsewhere=_OTHER_TRAFFIC,
        why="where activations and their gradients travel, and nothing else",
        waits_for=("torch.distributed.tensor.parallel",),
        probe="torch.distributed.tensor.parallel",
    ),
    Row(
        "pipelining",
        "pipelining",
        package="torch",
        fits=_TORCH,
        quantizes="activations and gradients between the stages of torch's pipelines",
        page="docs/use/torch.md",
        acts=("pipeline_bits", "pipeline_backward_bits", "quantize_evaluation"),
        refused=_NO_MODULES,
        elsewhere=_OTHER_TRAFFIC,
        why="where stages send, and nothing else",
        waits_for=("torch.distributed.pipelining.schedules",),
        probe="torch.distributed.pipelining.schedules",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
#: The rows that FLASH_ALLREDUCE_ATTACH may name.
ATTACHABLE = {row.name: row for row in ROWS if row.waits_for}
