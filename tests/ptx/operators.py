"""The operators of csrc/cuda on CPU tensors: their own host code, with kernels that the machine runs.

    operators.encode(x, payload, 4, 128, 0)     like torch.ops.flash_allreduce.encode of CUDA tensors

A kernel may touch the tensors of its call and nothing else, and write only the tensors that the schema lists.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.ptx.build import build
from tests.ptx.parse import Module, parse
from tests.ptx.translate import Program, packed, translate

_DEFINE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


def ranges_of(t: Tensor) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of a tensor's data: its rows, without the gaps between them."""
    if t.is_contiguous():
        yield t.data_ptr(), t.nbytes
    elif t.numel():
        for row in range(t.shape[0]):
            yield t[row].data_ptr(), t[row].numel() * t.element_size()


class Machine:
    """The library, and the programs of the kernels that were launched."""

    def __init__(self) -> None:
        built = build()
        torch.ops.load_library(str(built.library))
        self.library = ctypes.CDLL(str(built.library))
        self.library.ptx_widths.restype = ctypes.c_char_p
        self.library.ptx_run_streams.restype = ctypes.c_char_p
        self.library.ptx_now.restype = ctypes.c_uint64
        self.modules: list[Module] = [parse(path.read_text()) for path in built.ptx]
        #: name of the kernel, its text -> another text: for tests that plant mistakes.
        self.mutate: Callable[[str, str], str] | None = None
        #: opcode -> how many programs have it.
        self.opcodes: dict[str, int] = {}
        self.launched: set[str] = set()
        self.failed: Exception | None = None
        self._tables: dict[str, ctypes.Array[Any]] = {}
        for module in self.modules:
            for name, values in module.tables.items():
                self._tables[name] = ctypes.create_string_buffer(values, len(values) + 15)
                self.library.ptx_allow(ctypes.c_uint64(self._address(name)), ctypes.c_uint64(len(values)), 0)
        self._callback = _DEFINE(self._define)
        self.library.ptx_define_with(self._callback)

    def _address(self, table: str) -> int:
        return -(-ctypes.addressof(self._tables[table]) // 16) * 16

    @functools.cache  # noqa: B019 - one machine a process
    def widths(self, opcode: str) -> str | None:
        found = self.library.ptx_widths(opcode.encode())
        return None if found is None else found.decode()

    def program_of(self, name: str) -> tuple[Any, Program]:
        module = next(module for module in self.modules if name in module.entries)
        if self.mutate is not None:
            parameters, body, line = module.entries[name]
            module = Module({name: (parameters, self.mutate(name, body), line)}, module.tables)
        kernel = module.kernel(name)
        return kernel, translate(kernel, self.widths, {table: self._address(table) for table in self._tables})

    def _define(self, raw: bytes) -> int:
        name = raw.decode()
        try:
            kernel, program = self.program_of(name)
        except Exception as error:
            self.failed = error
            return 1
        rows, constants, wide = packed(program)
        names = (ctypes.c_char_p * len(program.opcodes))(*(opcode.encode() for opcode in program.opcodes))
        sizes = [number for at_and_size in kernel.parameters.values() for number in at_and_size]
        end = max((at + size for at, size in kernel.parameters.values()), default=0)
        self.library.ptx_define(
            raw, names, rows, ctypes.c_int64(len(program.rows)), constants, wide,
            ctypes.c_int64(len(program.constants)), program.slots, ctypes.c_int64(kernel.shared_bytes),
            (ctypes.c_int32 * len(sizes))(*sizes), len(sizes) // 2, end,
        )  # fmt: skip
        self.launched.add(name)
        for opcode in program.opcodes:
            self.opcodes[opcode] = self.opcodes.get(opcode, 0) + 1
        return 0

    @contextmanager
    def mutated(self, mutate: Callable[[str, str], str]) -> Iterator[None]:
        """Run with kernels of another text inside the block."""
        self.mutate = mutate
        self.library.ptx_forget_kernels()
        try:
            yield
        finally:
            self.mutate = None
            self.library.ptx_forget_kernels()

    @contextmanager
    def may_touch(self, tensors: list[tuple[Tensor, bool]]) -> Iterator[None]:
        """Let kernels touch these tensors inside the block; the second value: True if it may be written."""
        ranges = [(at, size, writable) for t, writable in tensors for at, size in ranges_of(t)]
        for at, size, writable in ranges:
            self.library.ptx_allow(ctypes.c_uint64(at), ctypes.c_uint64(size), int(writable))
        try:
            yield
        finally:
            for at, _, _ in ranges:
                self.library.ptx_forget(ctypes.c_uint64(at))

    @contextmanager
    def multicast(self, address: int, copies: list[Tensor]) -> Iterator[None]:
        """Store multimem instructions at the address to the copies, which have one size. Nothing else may touch it."""
        addresses = (ctypes.c_uint64 * len(copies))(*(copy.data_ptr() for copy in copies))
        self.library.ptx_multicast(ctypes.c_uint64(address), ctypes.c_uint64(copies[0].nbytes), addresses, len(copies))
        try:
            yield
        finally:
            self.library.ptx_multicast(ctypes.c_uint64(address), ctypes.c_uint64(0), addresses, 0)

    @contextmanager
    def queued(self, seed: int) -> Iterator[None]:
        """Let launches inside the block wait in the stream of their rank, for run_streams()."""
        self.library.ptx_seed(seed + 1)
        self.library.ptx_queue(1)
        try:
            yield
        finally:
            self.library.ptx_queue(0)
            self.set_stream(0)

    def set_stream(self, stream: int) -> None:
        self.library.ptx_set_stream(ctypes.c_uint64(stream))

    def hold(self, stream: int, ns: int) -> None:
        """Begin the stream's launches that much later. An instruction of a warp takes a nanosecond."""
        self.library.ptx_hold(ctypes.c_uint64(stream), ctypes.c_uint64(ns))

    def run_streams(self) -> None:
        failed = self.library.ptx_run_streams()
        if failed is not None:
            raise RuntimeError(failed.decode())

    def check(self) -> None:
        """Raise the error of a kernel's definition, which torch cannot report."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed


@functools.cache
def machine() -> Machine:
    return Machine()


class Operators:
    """The operators by name, like torch.ops.flash_allreduce."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        run = machine()
        operator = getattr(torch.ops.flash_allreduce_ptx, name)
        schema = operator.default._schema.arguments

        def call(*arguments: Any) -> Any:
            tensors = [
                (value, argument.alias_info is not None and argument.alias_info.is_write)
                for value, argument in zip(arguments, schema, strict=False)
                if isinstance(value, Tensor)
            ]
            with run.may_touch(tensors):
                try:
                    return operator(*arguments)
                except RuntimeError:
                    run.check()
                    raise

        return call


operators = Operators()
