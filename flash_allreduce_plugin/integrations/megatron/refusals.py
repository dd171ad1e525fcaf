"""Megatron's options that replace or bypass the collectives that we quantize, and our fields that have no effect in
Megatron: they are refused with an error.

1. The launch flags check Megatron-LM's arguments.
2. While enabled, the options of every configuration that is built are checked.
3. Fields that depend on the layout (pipeline, context and expert parallelism) are judged by a model that trains: when
   Megatron wraps it for data parallelism, or after the first step where nothing wraps it. A program may make groups
   of one rank before, to convert weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config import refusals as keys
from flash_allreduce_plugin.config.refusals import by_hand
from flash_allreduce_plugin.config.wording import variable
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import process_groups, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import CurrentConfig
from flash_allreduce_plugin.integrations.patching import Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry import notices

Spelling = Callable[..., str]

# The options with which gradients and parameters pass other buffers than those of Megatron's DistributedDataParallel.
_FSDP = "use_megatron_fsdp"
OTHER_BUFFERS = ("use_torch_fsdp2", _FSDP, "use_custom_fsdp")
NO_GATHER = (
    "has no effect with data_parallel_sharding_strategy no_shard, where no parameters are gathered; leave it at full."
)
OTHER_GRADIENTS = (
    "gradients and parameters do not pass through Megatron's own data-parallel buffers, and stay in full precision "
    "whatever the preset says"
)
IN_FP8 = "in fp8 or fp4, which are gathered in a format of Transformer Engine's"
GATHERS_NOTHING = "has no effect without the distributed optimizer, where no parameters are gathered; leave it at full."
_BASE, _WRAPPER = "megatron.core.distributed.data_parallel_base", "_BaseDataParallel"
_MODULE = "megatron.core.transformer.module"
_OF_LAYOUT = ("attention_bits", "expert_bits", "expert_combine_bits", "pipeline_bits", "pipeline_backward_bits")
_NO_EXPERTS = "has no effect: there is no expert parallelism here; leave it out."
# Layers that exchange by themselves, whatever cp_comm_type says of attention's.
_OWN_EXCHANGES = (
    "is_hybrid_model",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "experimental_attention_variant",
)


def of_fields(config: FlashConfig, spelled: Callable[[str], str] = str) -> list[str]:
    """One line for each field that was given and has no effect in Megatron; spelled: names it as its user wrote it."""
    lines = keys.refusals(config.given(), "Megatron", BY_NAME["megatron"].refused, spelled)
    if config.quantize_layernorm and config.grad_bits == "full":
        given = f"{spelled('quantize_layernorm')}={config.quantize_layernorm}"
        lines.append(f"{given} has no effect while {spelled('grad_bits')} is full; set that too, or leave it out.")
    return lines


def refusals(settings: Any, spelled: Spelling, plugin: str) -> list[str]:
    """Return one line for each option of `settings` that excludes this plugin.

    settings: Megatron-LM's arguments or a ModelParallelConfig. spelled(name) and spelled(name, value) write an option
    as its user did; `plugin` is the user's text for the plugin.
    """
    if getattr(settings, "tensor_model_parallel_size", None) == 1:
        return []  # there is no tensor-parallel collective to bypass
    lines = []

    def refuse(option: str, why: str) -> None:
        lines.append(f"{option} and {plugin} exclude each other: {why}")

    if getattr(settings, "tp_comm_overlap", False):
        refuse(
            spelled("tp_comm_overlap"),
            "Transformer Engine's overlapped GEMMs communicate inside their own kernels; drop one of the two.",
        )
    symmetric = getattr(settings, "symmetric_ar_type", None)
    if symmetric is not None:
        refuse(
            spelled("symmetric_ar_type", symmetric),
            "both replace the tensor-parallel all-reduce; drop one of the two.",
        )
    if getattr(settings, "use_transformer_engine_op_fuser", False):
        refuse(
            spelled("use_transformer_engine_op_fuser"),
            "Transformer Engine's fused operations have collectives of their own; drop one of the two.",
        )
    if getattr(settings, "transformer_impl", None) == "inference_optimized":
        refuse(
            spelled("transformer_impl", "inference_optimized"),
            f"its layers reduce with NVLS kernels of their own; take {spelled('transformer_impl', 'local')}.",
        )
    return lines


def of_parameters(settings: Sequence[Any], spelled: Spelling, ours: str) -> list[str]:
    """Return a line for each option with which parameters are not gathered from the distributed optimizer's copies.

    settings: Megatron-LM's arguments, or configurations of an optimizer and of DistributedDataParallel. ours: what the
    user wrote for param_bits.
    """
    on = {name for one in settings for name, value in vars(one).items() if value is True}
    whys = {
        **dict.fromkeys(
            other_buffers(*settings), "the parameters do not pass through Megatron's own data-parallel buffers"
        ),
        **dict.fromkeys(("fp8_param_gather", "fp4_param", "fp4_param_gather"), f"it is not for parameters {IN_FP8}"),
        "use_precision_aware_optimizer": "the exact values lie inside of Transformer Engine's optimizer",
    }
    lines = [
        f"{spelled(name)} and {ours} exclude each other: {why}; leave {ours} at full."
        for name, why in whys.items()
        if name in on
    ]
    if not lines and any(map(in_fsdp, settings)):
        strategies = [getattr(one, "data_parallel_sharding_strategy", None) for one in settings]
        return [f"{ours} {NO_GATHER}"] * ("no_shard" in strategies)
    if not lines and "use_distributed_optimizer" not in on:
        lines.append(f"{ours} {GATHERS_NOTHING}")
    return lines


def other_buffers(*settings: Any) -> list[str]:
    """Return the options of `settings` with which gradients and parameters pass buffers without seams."""
    # Megatron-LM sets use_custom_fsdp, its older name, with use_megatron_fsdp.
    served = (_FSDP, "use_custom_fsdp") if any(map(in_fsdp, settings)) else ()
    on = (name for name in OTHER_BUFFERS if any(getattr(one, name, False) for one in settings))
    return [name for name in on if name not in served]


def in_fsdp(settings: Any) -> bool:
    """Return True if Megatron-FSDP shards the model, and has seams."""
    from flash_allreduce_plugin.integrations import megatron  # which imports this module

    return bool(getattr(settings, _FSDP, False)) and megatron.serves_fsdp()


_said: set[str] = set()


def leave_out(config: FlashConfig, key: str, lines: Sequence[str]) -> None:
    """Print once for each of `lines`, why a key has no effect, that a preset leaves it out.

    Raises ConfigError with the lines if the key was given, or ends the program (scopes.Source).
    """
    if lines and by_hand(config, key):
        scopes.source().refuse(ConfigError("\n".join(lines)))
    for line in lines:
        _say_once(f"preset {config.preset} without {key}: {line}")


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        notices.say(line)


def of_attention(settings: Any, spelled: Spelling, ours: str) -> list[str]:
    """Return one line if no exchange of attention is reached.

    settings: Megatron-LM's arguments or a ModelParallelConfig. ours: the user's text for attention_bits.
    """
    if _ranks(settings, "context_parallel_size") == 1:
        return [f"{ours} {_no_context(spelled)}"]
    kinds = getattr(settings, "cp_comm_type", None) or []
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind is not None]
    reached = any("a2a" in kind for kind in kinds) or any(getattr(settings, name, None) for name in _OWN_EXCHANGES)
    if reached or not kinds:
        return []
    return [
        f"{ours} has no effect: {spelled('cp_comm_type', kinds[0])} runs in functions of Transformer Engine's own, "
        f"which are not reached; take {spelled('cp_comm_type', 'a2a')}, or leave it at full."
    ]


def of_experts(settings: Any, config: FlashConfig, spelled: Spelling, ours: Callable[[str], str] = str) -> list[str]:
    """One line for each width of experts' exchanges that was given and is of none that are reached.

    settings: Megatron-LM's arguments or a ModelParallelConfig. ours: names a key as its user wrote it.
    """
    keys_of_experts = by_hand(config, "expert_bits", "expert_combine_bits")
    if getattr(settings, "moe_token_dispatcher_type", None) == "flex":
        why = f"{spelled('moe_token_dispatcher_type', 'flex')} moves tokens in kernels of its own"
        if config.expert_bits != "full" and not keys_of_experts:
            leave_out(config, "expert_bits", [f"{why}, in full precision; alltoall is served."])
        return [f"{ours(key)} has no effect: {why}; take alltoall, or leave it out." for key in keys_of_experts]
    if not keys_of_experts or _group_ranks("expert_tensor_and_model_parallel") > 1:
        return []
    whole: int = getattr(settings, "tensor_model_parallel_size", 1)
    tensor: int | None = getattr(settings, "expert_tensor_parallel_size", None)
    ranks = int(getattr(settings, "expert_model_parallel_size", 1)) * (tensor or whole)
    return [f"{ours(key)} {_NO_EXPERTS}" for key in keys_of_experts if ranks == 1]


def of_layout(settings: Any, config: FlashConfig, ours: Callable[[str], str] = str) -> list[str]:
    """One line for each width that was given, of a parallelism that a model that trains does not have.

    settings: the model's configuration. ours: names a key as its user wrote it.
    """
    lines = []
    for key in by_hand(config, "attention_bits"):
        lines += of_attention(settings, field, ours(key))
    if not lines and config.attention_bits != "full" and _ranks(settings, "context_parallel_size") > 1:
        leave_out(config, "attention_bits", of_attention(settings, field, "attention_bits"))
    lines += of_experts(settings, config, field, ours)
    return lines + of_pipeline(config, _ranks(settings, "pipeline_model_parallel_size"), ours)


def judge(models: Collection[Any], config: FlashConfig) -> None:
    """Judge the fields that depend on the layout by the configurations of models that train.

    Raises ConfigError if no model has the parallelism of a field, or ends the program, as scopes.Source says.
    """
    source = scopes.source()
    if lines := _of_all(models, config, source.spelled):
        source.refuse(ConfigError("\n".join(lines)))
    scopes.judged()
    alone = all(_ranks(each, "tensor_model_parallel_size") == 1 for each in models)
    if models and alone and _tells(source, config):
        _say_once(nothing_to_quantize("tensor_model_parallel_size", source.where))


def _tells(source: scopes.Source, config: FlashConfig) -> bool:
    """Return True if a model without tensor parallelism deserves a line: launch flags have printed it before."""
    return source.where is variable and only_tensor_parallel(config)


def only_tensor_parallel(config: FlashConfig) -> bool:
    """Return True if a configuration quantizes nothing but collectives of tensor parallelism."""
    others = (config.grad_bits, config.param_bits, config.attention_bits, config.expert_bits)
    sends = (config.expert_combine_bits, config.pipeline_bits, config.pipeline_backward_bits)
    return {*others, *sends} <= {"full", None}


def nothing_to_quantize(option: str, where: Callable[[str], str]) -> str:
    return (
        f"{option} is 1: there is no tensor-parallel collective to quantize. For gradients and parameters set "
        f"{where('grad_bits')} and {where('param_bits')}."
    )


def of_wrapped_models(config: FlashConfig, ours: Callable[[str], str]) -> list[str]:
    """Return the lines of `of_layout` for the models that Megatron has wrapped for data parallelism already."""
    if not by_hand(config, *_OF_LAYOUT):
        return []  # a look at all live objects takes 0.1 s
    return _of_all(_settings(_BASE, _WRAPPER), config, ours)


def judge_models(config: FlashConfig) -> None:
    """Judge by the live models of megatron-core, after the first step of one that nothing wraps."""
    if _tells(scopes.source(), config) or by_hand(config, *_OF_LAYOUT):
        judge(_settings(_MODULE, "MegatronModule"), config)


def _settings(module: str, kind: str) -> list[Any]:
    """Return the configurations of all live models of a class, once they are built."""
    found = [getattr(one, "config", None) for one in process_groups.alive(module, kind)]
    return [one for one in found if one is not None]


def _of_all(models: Collection[Any], config: FlashConfig, ours: Callable[[str], str]) -> list[str]:
    """Return the lines of `of_layout` if no model has the parallelism of a field."""
    lines = [of_layout(each, config, ours) for each in models]
    return lines[0] if lines and all(lines) else []


def _ranks(settings: Any, size: str) -> int:
    """Return the ranks of a parallelism: the model's own number, or that of Megatron's groups if it is larger.

    Groups may be others than the model's, and a configuration may leave the number at 1.
    """
    return max(int(getattr(settings, size, None) or 1), _group_ranks(size.removesuffix("_size")))


def _group_ranks(parallelism: str) -> int:
    """Return the ranks of a parallelism by parallel_state; 1 as long as Megatron has made no groups."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    return int(getattr(state, f"get_{parallelism}_world_size")())


def _no_context(spelled: Spelling) -> str:
    alone = spelled("context_parallel_size", 1)
    return f"has no effect: there is no context parallelism here ({alone}); leave it at full."


def of_pipeline(config: FlashConfig, stages: int | None, spelled: Callable[[str], str] = str) -> list[str]:
    """One line for each width that was given for sends between pipeline stages where there is one stage.

    stages: None where nobody knows yet. A width that only a preset has set is no mistake.
    """
    found = by_hand(config, "pipeline_bits", "pipeline_backward_bits") if stages == 1 else []
    return [
        f"{spelled(key)}={getattr(config, key)} has no effect: there is no pipeline here; leave it out."
        for key in found
    ]


def of_ring_exchange(
    settings: Any, config: FlashConfig, spelled: Spelling, ours: Callable[[str], str] = str
) -> list[str]:
    """Return a line if the stages send by a function that only NVIDIA's own torch has."""
    if not getattr(settings, "use_ring_exchange_p2p", False):
        return []
    if config.pipeline_bits == config.pipeline_backward_bits == "full":
        return []
    option, width = spelled("use_ring_exchange_p2p"), ours("pipeline_bits")
    return [f"{option} and {width} exclude each other: its sends are of one function; drop one of the two."]


def helpers(config: CurrentConfig) -> list[Seam]:
    """The seams that ask every configuration, and every model that is wrapped; they move nothing."""
    return [
        Seam(
            "megatron.config",
            "megatron.core.model_parallel_config",
            "ModelParallelConfig.__post_init__",  # TransformerConfig and its heirs pass here
            ("self",),
            functools.partial(_checked, config=config),
            "refuses options that bypass the collectives",
        ),
        Seam(
            "megatron.model",
            _BASE,
            f"{_WRAPPER}.__init__",  # of every wrapper for data parallelism
            ("self", "config", "module"),
            functools.partial(_judged, current=config),
            "refuses widths of a parallelism that the model does not have",
        ),
    ]


def _checked(original: Callable[..., Any], config: CurrentConfig) -> Callable[..., Any]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        original(self)
        source = scopes.source()
        lines = refusals(self, field, source.plugin) + of_ring_exchange(self, config(), field, source.spelled)
        if lines:
            source.refuse(ConfigError("\n".join(lines)))

    return __post_init__


def _judged(original: Callable[..., Any], current: CurrentConfig) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, module: Any) -> None:
        judge([config], current())
        original(self, config, module)

    return __init__


def field(name: str, value: Any = None) -> str:
    """An option as it stands in Python."""
    return name if value is None else f"{name}={value!r}"
