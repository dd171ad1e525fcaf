"""FlashConfig: one schema for Python, JSON and the environment.

Every mistake raises a ConfigError with one line a problem: the key, the given value, the allowed values, and for an
unknown key the nearest valid one. Nothing is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec.format import GROUP_SIZES, MAX_BITS, MIN_BITS, MIN_CODEBOOK_GROUP_SIZE, Format
from flash_allreduce_plugin.config import presets, strict_json
from flash_allreduce_plugin.config.wording import nearest, parse, printable, sentences, shown, unknown_key, variable
from flash_allreduce_plugin.errors import ConfigError

_WIDTH = f"a whole number from {MIN_BITS} to {MAX_BITS}"
_OR_FULL = f'{_WIDTH} or "full"'
_OR_FULL_OR_NONE = f'{_WIDTH}, "full" or none'
_COUNT = "a whole number, 0 or more"
_BOOL = "true or false"
_PATTERNS = "a list of name patterns (strings)"


def _group_size(given: int) -> int:
    # Not a Literal, which accepts 128.0 for 128.
    if given not in GROUP_SIZES:
        raise ValueError("not a group size")
    return given


Width = Annotated[int, Field(ge=MIN_BITS, le=MAX_BITS)]
GroupSize = Annotated[int, AfterValidator(_group_size)]
Count = Annotated[int, Field(ge=0)]
# JSON has lists only; a frozen, hashable configuration needs tuples.
Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _field(default: Any, expected: str, meaning: str, *, group: str, exclude: bool = False) -> Any:
    return Field(
        default, description=meaning, exclude=exclude, json_schema_extra={"expected": expected, "group": group}
    )


GROUPS = ("width", "format", "feedback", "quality", "places", "advanced")
_width, _format = partial(_field, group="width"), partial(_field, group="format")
_feedback, _quality = partial(_field, group="feedback"), partial(_field, group="quality")
_places, _advanced = partial(_field, group="places"), partial(_field, group="advanced")


class _Frozen(BaseModel):
    model_config = _STRICT

    if not TYPE_CHECKING:  # a type checker would accept any assignment

        def __setattr__(self, name: str, value: Any) -> None:
            raise ConfigError(
                f"{name} cannot be set to {shown(value)}: a configuration is frozen; "
                f"take config.model_copy(update={{{name!r}: ...}})."
            )

        def __delattr__(self, name: str) -> None:
            raise ConfigError(f"{name} cannot be deleted: a configuration is frozen.")


class Hierarchy(_Frozen):
    """Widths inside a node and between nodes, and the number of neighbouring ranks of a node."""

    intra_bits: Width
    inter_bits: Width
    ranks_per_node: Annotated[int, Field(ge=1)]


class FlashConfig(_Frozen):
    """The configuration of quantized collectives. Frozen, hashable, validated; the ranks of a group compare it.

    Values are strict: bits="8" and bits=True are refused; a list is accepted for a tuple. The constructor, from_dict,
    from_env, from_file and model_copy raise ConfigError with every problem of the call, one a line. A preset gives the
    missing values (presets.py). `flash-allreduce tune` chose the defaults of chunk_bytes and min_bytes on gloo at
    1 Gbit/s (docs/decide/benchmarks.md).
    """

    from_env_was_called: ClassVar[bool] = False  # True after a call in this process (autoload.py)
    _of_integration: frozenset[str] = PrivateAttr(frozenset())

    # Width: bits of each tensor.
    preset: Literal["int8", "int4", "thin"] | None = _width(
        None,
        '"int8", "int4", "thin" or none',
        "the best measured setting for a purpose; keys that are given go before it",
        exclude=True,
    )
    enabled: bool | Literal["auto"] | Patterns = _width(
        True,
        'true, false, "auto" or a list of patterns of site names',
        "quantize at all; auto: where it makes the step faster, measured in the first steps; a list: at these sites",
    )
    bits: Width = _width(8, _WIDTH, "width of the codes, both halves of a collective")
    backward_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for the collectives of the backward pass (Megatron)"
    )
    grad_bits: Width | Literal["full"] = _width("full", _OR_FULL, "width for Megatron's data-parallel gradients")
    param_bits: Width | Literal["full"] = _width(
        "full",
        _OR_FULL,
        "width for gathers of parameters: their differences where every rank keeps them, their values elsewhere",
    )
    param_backward_bits: Width | Literal["full"] | None = _width(
        None, _OR_FULL_OR_NONE, "width for gathers of parameters in the backward pass (ZeRO stage 3); none: param_bits"
    )
    sequence_parallel_gather_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for the all-gathers of sequence parallelism (Megatron)"
    )
    expert_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for the hidden states that move between experts"
    )
    attention_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for the exchanges of attention: context parallelism, Ulysses"
    )
    pipeline_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for activations that are sent to the next pipeline stage"
    )
    pipeline_backward_bits: Width | Literal["full"] = _width(
        "full", _OR_FULL, "width for gradients that are sent to the pipeline stage before"
    )

    # Format: the layout and rounding of a group of elements.
    group_size: GroupSize = _format(
        128, f"one of {', '.join(map(str, GROUP_SIZES))}", "elements that share a scale and a zero point"
    )
    compact: bool = _format(False, _BOOL, "scale and zero point in one word: 2 bytes a group instead of 4")
    codebook: bool = _format(
        False, _BOOL, "a scale for every eighth of a group, levels closer near zero; groups of 128 or more"
    )
    range: Literal["min-max", "mse"] = _format(
        "min-max", '"min-max" or "mse"', "mse: of several ranges of each group, the one with the least squared error"
    )

    # Feedback: the rounding error of a gradient.
    error_feedback: bool = _feedback(False, _BOOL, "carry the error over to the next step; gradients only")

    # Quality: measured errors, and decisions by them.
    quality_interval: Count = _quality(0, _COUNT, "measure the error at every n-th call of a site; 0: never")
    target_sqnr_db: float | None = _quality(
        None, "a finite number of dB or none", "every site at the fewest bits with at least this measured SQNR"
    )
    min_sqnr_db: float | None = _quality(
        None, "a finite number of dB or none", "the guard: below it, more bits, then full precision"
    )

    # Places: the calls that are quantized.
    include: Patterns = _places((), _PATTERNS, "fnmatch patterns of module or parameter names to quantize")
    exclude: Patterns = _places((), _PATTERNS, "fnmatch patterns of module or parameter names to leave out")
    warmup_steps: Count = _places(0, _COUNT, "full precision for so many first steps")
    min_bytes: Count = _places(
        1 << 20, "a whole number of bytes, 0 or more", "tensors of fewer bytes go in full precision"
    )
    hierarchical: Literal["off", "auto"] | Hierarchy = _places(
        "off",
        '"off", "auto" or {"intra_bits": 2 to 8, "inter_bits": 2 to 8, "ranks_per_node": 1 or more}',
        "fewer bits on the slow link between nodes than inside one",
    )

    # Advanced: few people need these.
    reduce_bits: Width | None = _advanced(None, f"{_WIDTH} or none", "width of the half before the sum")
    gather_bits: Width | None = _advanced(None, f"{_WIDTH} or none", "width of the half after the sum")
    expert_combine_bits: Width | Literal["full"] | None = _advanced(
        None, _OR_FULL_OR_NONE, "width for the way back from the experts; none: expert_bits"
    )
    symmetric: bool = _advanced(False, _BOOL, "a scale without a zero point: 2 bytes a group instead of 4")
    rounding: Literal["nearest", "stochastic"] = _advanced(
        "nearest", '"nearest" or "stochastic"', "how a code is chosen between its two neighbours"
    )
    backward_rounding: Literal["nearest", "stochastic"] | None = _advanced(
        None,
        '"nearest", "stochastic" or none',
        "the same for tensors of backward_bits, stochastic in plain groups; none: rounding",
    )
    seed: Count = _advanced(0, _COUNT, "of the random numbers of stochastic rounding")
    spike_reserving: bool = _advanced(
        False,
        _BOOL,
        "with codebook: the two greatest elements of a group are sent as floats too; without: its extremes, as bf16",
    )
    hadamard: bool = _advanced(False, _BOOL, "rotate each group before quantizing")
    error_feedback_momentum: Annotated[float, Field(ge=0, lt=1)] = _advanced(
        0.8,
        "a number, 0 or more and below 1",
        "share of the residual that stays at a step; 0: none, all of it is added",
    )
    error_feedback_bits: Literal[8, 16] = _advanced(8, "8 or 16", "of an element that is carried over; 16: bf16")
    error_feedback_reset_interval: Count = _advanced(
        0, _COUNT, "drop the residuals of error feedback every n steps; 0: never"
    )
    quality_measure: Literal["local", "exact"] = _advanced(
        "local",
        '"local" or "exact"',
        "local: from every rank's errors; exact: against the same call in full precision",
    )
    chunk_bytes: Annotated[int, Field(ge=4096)] = _advanced(
        1 << 20, "a whole number of bytes, 4096 or more", "payload bytes of one chunk in flight"
    )
    quantize_embedding: bool = _advanced(False, _BOOL, "quantize the reduction of the embedding too (Megatron)")
    quantize_layernorm: bool = _advanced(
        False, _BOOL, "quantize the layer norms' gradients of sequence parallelism too (Megatron)"
    )
    quantize_frozen: bool = _advanced(False, _BOOL, "gather frozen parameters at param_bits too (ZeRO stage 3, FSDP2)")
    quantize_evaluation: bool = _advanced(
        True, _BOOL, "false: modules in evaluation mode go in full precision (Megatron)"
    )
    auto_interval: Count = _advanced(0, _COUNT, 'with enabled "auto": measure again every so many steps; 0: never')
    check_ranks: bool = _advanced(True, _BOOL, "compare the configuration across the group at first use")

    # A type checker keeps the constructor that pydantic derives from the fields, with their names and types.
    if not TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None:
            self._fill(values)

    def _fill(self, values: dict[str, Any], spelled: Callable[[str], str] = str, problems: Iterable[str] = ()) -> None:
        """Validate `values` into self.

        spelled: returns a key as its user wrote it. problems: found before, and raised with the rest.
        """
        lines, resolved, fields = list(problems), presets.resolved(values), type(self).model_fields
        known = {key: value for key, value in resolved.items() if key in fields}
        try:
            super().__init__(**known)
        except ValidationError as error:
            lines += sentences(error, known, spelled, fields)
        # pydantic would not name a key that UTF-8 cannot encode.
        lines += [unknown_key(key, value, spelled, fields) for key, value in resolved.items() if key not in fields]
        if lines:
            raise ConfigError("\n".join(lines))
        self.model_fields_set.intersection_update(values)
        _ = self.text

    def given(self) -> dict[str, Any]:
        """Return the keys that were given, `preset` included, without those of the preset and the defaults."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}

    def __eq__(self, other: object) -> bool:
        """Return True if every field but `preset` is equal: the values of a preset count, not its name."""
        return isinstance(other, FlashConfig) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @field_validator("auto_interval", mode="after")
    @classmethod
    def _refuse_an_interval_of_nothing(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("enabled", "auto") != "auto":
            raise PydanticCustomError(
                "combination", 'has no effect: enabled is not "auto"; set it, or drop auto_interval'
            )
        return value

    @field_validator("symmetric", mode="after")
    @classmethod
    def _refuse_two_layouts(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("compact"):
            raise PydanticCustomError(
                "combination", "excludes compact=True, which has a zero point; drop one of the two"
            )
        return value

    @field_validator("codebook", mode="after")
    @classmethod
    def _refuse_other_metadata(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("compact"):
            raise PydanticCustomError("combination", "excludes compact=True, another way to scale; drop one of the two")
        if value and info.data.get("group_size", MIN_CODEBOOK_GROUP_SIZE) < MIN_CODEBOOK_GROUP_SIZE:
            raise PydanticCustomError(
                "combination",
                f"excludes group_size={info.data['group_size']}, too small for eight parts; "
                f"expected {MIN_CODEBOOK_GROUP_SIZE} or more",
            )
        return value

    @field_validator("symmetric", "rounding", mode="after")
    @classmethod
    def _refuse_beside_codebook(cls, value: Any, info: ValidationInfo) -> Any:
        if value in (True, "stochastic") and info.data.get("codebook"):
            raise PydanticCustomError(
                "combination", "excludes codebook=True, which has other scales and levels; drop one of the two"
            )
        return value

    @field_validator("rounding", mode="after")
    @classmethod
    def _refuse_biased(cls, value: str, info: ValidationInfo) -> str:
        if value == "stochastic" and info.data.get("range") == "mse":
            raise PydanticCustomError(
                "combination",
                'excludes range="mse": outside of its ranges nothing is rounded without a bias; drop one of the two',
            )
        return value

    @field_validator("backward_rounding", mode="after")
    @classmethod
    def _refuse_nothing_to_round(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("backward_bits") == "full":
            raise PydanticCustomError(
                "combination", 'has no effect: backward_bits is "full"; set it, or drop backward_rounding'
            )
        return value

    @field_validator("hierarchical", mode="after")
    @classmethod
    def _refuse_residuals_of_nodes(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "off" and info.data.get("error_feedback"):
            raise PydanticCustomError(
                "combination", "excludes error_feedback=True, which knows no sums of nodes; drop one of the two"
            )
        return value

    @field_validator("min_sqnr_db", mode="after")
    @classmethod
    def _refuse_floor_above_target(cls, value: float | None, info: ValidationInfo) -> float | None:
        target = info.data.get("target_sqnr_db")
        if value is not None and target is not None and value > target:
            raise PydanticCustomError(
                "combination",
                f"is above target_sqnr_db={target}, which would keep every site below the floor; "
                "expected the target or less",
            )
        return value

    @field_validator("target_sqnr_db", "min_sqnr_db", mode="after")
    @classmethod
    def _refuse_unmeasured(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("quality_interval") == 0:
            raise PydanticCustomError(
                "combination",
                "needs measurements, and quality_interval is 0: never; set it, for example to 100",
            )
        return value

    def format(self, bits: int | None = None) -> Format:
        """Return the format of elements at `bits`, default `self.bits`. policy/plan.py has the exceptions."""
        return Format(
            self.bits if bits is None else bits,
            self.group_size,
            self.symmetric,
            spikes=self.spike_reserving,
            hadamard=self.hadamard,
            mse=self.range == "mse",
            stochastic=self.rounding == "stochastic",
            compact=self.compact,
            codebook=self.codebook,
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> FlashConfig:
        """Return a copy with `update` applied and validated (pydantic's own copy would not validate it)."""
        copy = type(self).from_dict({**self.given(), **(update or {})})
        BaseModel.__setattr__(copy, "_of_integration", self._of_integration.difference(update or ()))
        return copy

    def for_integration(self, update: Mapping[str, Any]) -> FlashConfig:
        """Return a copy with `update`: an integration's values for its preset, which the user did not give."""
        copy = self.model_copy(update=update)
        BaseModel.__setattr__(copy, "_of_integration", copy._of_integration.union(update))
        return copy

    def by_hand(self) -> dict[str, Any]:
        """Return the keys and values that the user gave."""
        return {key: value for key, value in self.given().items() if key not in self._of_integration}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FlashConfig:
        """Create one from a mapping of JSON types or the fields' own types. Missing keys take their defaults."""
        return cls._from_mapping(values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], base: FlashConfig | None = None) -> FlashConfig:
        """Create one from a JSON file of one object, on top of `base` (default: the default configuration).

        Every problem names the file.
        """
        source = printable(str(path))
        try:
            values = strict_json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read ({error.strerror}).") from error
        except strict_json.DuplicateKeyError as error:
            raise ConfigError(f"{source}: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: expected one JSON object ({error}).") from error
        return cls._from_mapping(values, source=f"{source}: ", base=base)

    @classmethod
    def from_env(cls, base: FlashConfig | None = None) -> FlashConfig:
        """Create one from FLASH_ALLREDUCE_<FIELD> variables.

        They override the JSON file of FLASH_ALLREDUCE_CONFIG, which overrides `base` (default: the default
        configuration). Values are JSON (8, true, null) or the words true, false, none, full; 1 and 0 are true and
        false; include and exclude are names separated by commas. An empty variable is not set. Another variable with
        the prefix, neither a field nor a switch of the package, is refused.
        """
        FlashConfig.from_env_was_called = True
        texts = {}
        keys = {variable(key): key for key in cls.model_fields}
        unknown = []
        for name, text in sorted(os.environ.items()):
            if not name.startswith(environment.PREFIX) or name in environment.VARIABLES:
                continue
            if name not in keys:
                closest = nearest(name.upper(), [*keys, *environment.VARIABLES])
                unknown.append(f"{printable(name)}={shown(text)} is not a known variable; the nearest is {closest}.")
            elif text.strip():
                texts[keys[name]] = text
        file = os.environ.get(environment.CONFIG, "").strip()
        if file:
            base = cls.from_file(file, base)
        return cls.from_texts(texts, spelled=variable, base=base, problems=unknown)

    @classmethod
    def from_texts(
        cls,
        texts: Mapping[str, str],
        spelled: Callable[[str], str] = str,
        base: FlashConfig | None = None,
        problems: Iterable[str] = (),
    ) -> FlashConfig:
        """Create one from fields as text, in the forms of `from_env`, on top of `base`.

        spelled: returns the name of a field in a problem, such as the user's flag.
        problems: lines found before, and raised with the rest.
        """
        values = {} if base is None else base.given()
        problems = list(problems)
        for key, text in texts.items():
            try:
                values[key] = parse(text.strip(), cls.model_fields[key].default)
            except strict_json.DuplicateKeyError as error:
                problems.append(f"{spelled(key)}={shown(text)}: {error}.")
        config = cls.__new__(cls)
        config._fill(values, spelled=spelled, problems=problems)
        return config

    @classmethod
    def describe(cls, key: str) -> str:
        """Return a field's meaning, values and default, in one line."""
        field = cls.model_fields[key]
        assert isinstance(field.json_schema_extra, dict)
        default = "none" if field.default is None else json.dumps(field.default)
        return f"{field.description}; {field.json_schema_extra['expected']} (default: {default})"

    @classmethod
    def group_of(cls, key: str) -> str:
        """Return the group of a field, one of GROUPS."""
        extra = cls.model_fields[key].json_schema_extra
        assert isinstance(extra, dict)
        return str(extra["group"])

    @classmethod
    def _from_mapping(cls, values: Any, source: str = "", base: FlashConfig | None = None) -> FlashConfig:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}expected keys and values, got {shown(values)}.")
        named = {key: value for key, value in values.items() if isinstance(key, str)}
        unnamed = [
            f"{source}{shown(key)}={shown(values[key])} is not a known key; keys are strings."
            for key in values
            if key not in named
        ]
        config = cls.__new__(cls)
        if base is not None:
            named = {**base.given(), **named}
        config._fill(named, spelled=lambda key: source + key, problems=unnamed)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return every field but `preset`, with the preset's values, in JSON types. from_dict of it equals self."""
        return self.model_dump(mode="json")

    @cached_property
    def text(self) -> str:
        """The JSON of the fields that differ from their defaults.

        Computed at creation: torch.compile reads it as a constant, and could not trace its computation.
        """
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True))

    def digest(self) -> bytes:
        """The SHA-256 of the canonical JSON form, 32 bytes: equal on ranks with equal configurations."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()
