"""Makes "cuda" mean the CPU, so that an unmodified Megatron-LM script trains here. For tests only.

test_launch.py copies this file as sitecustomize.py into a folder on PYTHONPATH: Python runs it in every rank before
the script, which knows nothing of it. Devices in arguments become "cpu", torch.cuda answers as one idle GPU would,
and Megatron-LM compiles nothing.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flash_allreduce_plugin.autoload import AfterImport

CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return CPU if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


class CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device:  # Megatron-FSDP says f"cuda:{torch.cuda.current_device()}"
            args = tuple(map(on_cpu, args))
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            args = (args[0], on_cpu(args[1]), *args[2:])
        answer = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(answer, str):  # Megatron-LM looks for "torch.cuda.HalfTensor"
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


class Inert:
    """A stream or an event on a device that does nothing asynchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Inert()


class Properties:
    major, minor, total_memory, name, multi_processor_count = 0, 0, 1 << 34, "cpu", 1


class Generator:
    """The random numbers of "cuda": Megatron's forks draw from them, everything else draws from the CPU's."""

    here = torch.Generator()

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls.here.manual_seed(int(seed))

    @classmethod
    def get_state(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cls.here.get_state()

    @classmethod
    def set_state(cls, state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        cls.here.set_state(state)

    @classmethod
    @contextlib.contextmanager
    def is_default(cls) -> Iterator[None]:
        """Let operators draw from this generator: exchange its state with the CPU's until the end."""
        default, own = torch.default_generator, cls.here
        if own is default:  # a fork within a fork
            yield
            return
        cpu = default.get_state()
        default.set_state(own.get_state())
        cls.here = default
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(cpu)
            cls.here = own


def stub_torch() -> None:
    cuda: Any = torch.cuda
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "ipc_collect"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("reset_peak_memory_stats", "set_per_process_memory_fraction"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    cuda.get_device_capability = lambda *args, **kwargs: (0, 0)
    cuda.manual_seed = cuda.manual_seed_all = Generator.manual_seed
    cuda.get_rng_state, cuda.set_rng_state = Generator.get_state, Generator.set_state
    cuda.get_device_properties = lambda *args, **kwargs: Properties()
    cuda.get_device_name = lambda *args, **kwargs: "cpu"
    cuda.Stream = cuda.Event = Inert
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Inert()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    stub_meshes()
    stub_sends()
    CudaIsCpu().__enter__()


def stub_meshes() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    own: Any = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(  # type: ignore[method-assign, assignment]
        lambda groups, device_type, *args, **kwargs: own(groups, "cpu", *args, **kwargs)
    )


def stub_sends() -> None:
    """Keep the memory of a tensor that is sent: Megatron frees it before gloo has, which CUDA's allocator permits."""
    import torch.distributed as dist

    own = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(tensor.detach(), *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = isend  # P2POp compares the one with the other


def stub_datasets() -> None:
    """Use the compiled index builder of the installed megatron-core, instead of running make in the checkout."""
    package = sys.modules["megatron.core.datasets"]
    package.__path__.append(str(Path(sysconfig.get_path("purelib"), "megatron", "core", "datasets")))


def stub_compile() -> None:
    sys.modules["megatron.core.datasets.utils"].compile_helpers = lambda: None  # type: ignore[attr-defined]


def stub_fused_kernels() -> None:
    sys.modules["megatron.legacy.fused_kernels"].load = lambda args: None  # type: ignore[attr-defined]


def stub_rng() -> None:
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state, random._set_cuda_rng_state = Generator.get_state, Generator.set_state
    own = random.CudaRNGStatesTracker.fork

    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with Generator.is_default(), own(self, *args, **kwargs):
            yield

    random.CudaRNGStatesTracker.fork = fork


def stub_norms() -> None:
    """Give torch's layer norm the mark of sequence parallelism. apex's has the mark. Megatron's wrapper refuses it."""
    norms: Any = sys.modules["megatron.core.transformer.torch_norm"]
    own = norms.WrappedTorchNorm

    class MarkedTorchNorm(own):  # type: ignore[misc]
        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            unmarked = copy.copy(config)
            unmarked.sequence_parallel = False
            norm = own(unmarked, *args, **kwargs)
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

    norms.WrappedTorchNorm = MarkedTorchNorm


def stub_attention() -> None:
    """Give attention the head sizes of latent attention. Only Transformer Engine's has an argument for them."""
    attention: Any = sys.modules["megatron.core.transformer.dot_product_attention"]
    own = attention.DotProductAttention

    class WithHeadSizes(own):  # type: ignore[misc]
        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.DotProductAttention = WithHeadSizes


def stub_latent_attention() -> None:
    """Report that Transformer Engine is missing: without it core_v0.16.1 ends at isinstance(linear_proj, None)."""
    sys.modules["megatron.core.transformer.multi_latent_attention"].HAVE_TE = False  # type: ignore[attr-defined]


def stub_experts() -> None:
    """Stand in for Transformer Engine's te_general_gemm, and for the copy of split sizes that needs CUDA."""
    moe: Any = sys.modules["megatron.core.transformer.moe.moe_utils"]
    moe.te_general_gemm = None

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe.maybe_move_tensor_to_cpu = on_host


if "RANK" in os.environ:  # a rank, not torchrun itself
    stub_torch()
    for module, stub in {
        "megatron.core.datasets": stub_datasets,
        "megatron.core.datasets.utils": stub_compile,
        "megatron.legacy.fused_kernels": stub_fused_kernels,
        "megatron.core.tensor_parallel.random": stub_rng,
        "megatron.core.transformer.torch_norm": stub_norms,
        "megatron.core.transformer.dot_product_attention": stub_attention,
        "megatron.core.transformer.multi_latent_attention": stub_latent_attention,
        "megatron.core.transformer.moe.moe_utils": stub_experts,
    }.items():
        AfterImport([module], stub).install()
