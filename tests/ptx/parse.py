"""PTX as text -> its kernels, each a list of instructions.

    .visible .entry name( .param .u64 name_param_0, ... )   the parameters of a launch
    { .reg .b32 %r<2424>;                                   registers, by the first letters of their names
      .shared .align 16 .b8 image[10752];
      @%p1 bra $L__BB0_2;                                   guard, opcode, operands
      ...
    }

PTX is nvcc's output for a kernel before it is fitted to a GPU: inlined, unrolled, with every address and shuffle.
Nothing is looked up here: translate.py and opcodes.cpp define the effect of an opcode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: Bytes of the types. Predicates and types with fewer than 32 bits take a word each in the machine.
SIZES = {"pred": 1, "b8": 8, "b16": 16, "f16": 16, "b32": 32, "b64": 64, "f32": 32}
SIZES |= {f"{sign}{bits}": bits for sign in "us" for bits in (8, 16, 32, 64)}

_ENTRY = re.compile(r"\.entry (\w+)\(\n(.*?)\n\)(.*?)\n\{\n(.*?)\n\}\n", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+?)(?:<(\d+)>)?;")
_SHARED = re.compile(r"\.shared \.align (\d+) \.\w+ (\w+)\[(\d+)\];")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*([^;]*);")
_LABEL = re.compile(r"(\$\w+):")
_TABLE = re.compile(r"^\.(?:global|const) \.align \d+ \.b8 (\w+)\[\d+\] = \{([\d, ]+)\};", re.MULTILINE)


class UnknownText(Exception):
    """A line is neither an instruction nor a declaration that is known here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str  # as it stands there: "ld.global.nc.u16"
    operands: tuple[str, ...]  # "%r1", "[%rd2+4]", "{%r1, %r2}", "0f3F800000", "-1", "$L__BB0_2"
    line: int  # of the text, from 1
    guard: str | None = None  # a predicate
    negated: bool = False


@dataclass
class Kernel:
    name: str
    #: name -> offset among all parameters, bytes
    parameters: dict[str, tuple[int, int]]
    registers: dict[str, str] = field(default_factory=dict)  # prefix or name -> type: "%rd" -> "b64"
    shared: dict[str, int] = field(default_factory=dict)  # name -> offset
    shared_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # -> number of the instruction behind it

    def type_of(self, register: str) -> str:
        found = self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))
        if found is None:
            raise UnknownText(f"{register} is not declared in {self.name}")
        return found


def operands_of(text: str) -> tuple[str, ...]:
    """Return the parts between commas, those in brackets whole."""
    return tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[]+)+", text))


def _up_to(size: int, align: int) -> int:
    return -(-size // align) * align


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    found, end = {}, 0
    for align, kind, name, count in _PARAMETER.findall(text):
        size = SIZES[kind] // 8 * int(count or 1)
        offset = _up_to(end, int(align or size))
        found[name] = offset, size
        end = offset + size
    return found


def _renamed(operand: str, names: dict[str, str]) -> str:
    return re.sub(r"%\w+", lambda found: names.get(found[0], found[0]), operand) if names else operand


def _add_line(kernel: Kernel, text: str, line: int, scopes: list[dict[str, str]]) -> None:
    while text := text.strip():
        scoped = scopes[-1]
        if text[0] == "{":  # nvcc writes some instructions as several, with registers of their own
            scopes.append({**scoped})
            text = text[1:]
        elif text[0] == "}":  # the names outside of it have their earlier meaning again
            scopes.pop()
            text = text[1:]
        elif match := _REGISTERS.match(text):
            name = match[2]
            if match[3] is None:  # of the braces around it: another pair may have one of this name and another type
                name = scoped[match[2]] = f"{match[2]}_{match[1]}"
            kernel.registers[name] = match[1]
            text = text[match.end() :]
        elif match := _SHARED.match(text):
            kernel.shared[match[2]] = _up_to(kernel.shared_bytes, int(match[1]))
            kernel.shared_bytes = kernel.shared[match[2]] + int(match[3])
            text = text[match.end() :]
        elif text.startswith(".pragma"):
            text = text[text.index(";") + 1 :]
        elif match := _LABEL.match(text):
            kernel.labels[match[1]] = len(kernel.instructions)
            text = text[match.end() :]
        elif match := _INSTRUCTION.match(text):
            operands = tuple(_renamed(operand, scoped) for operand in operands_of(match[4]))
            guard = scoped.get(match[2], match[2])
            kernel.instructions.append(Instruction(match[3], operands, line, guard, bool(match[1])))
            text = text[match.end() :]
        else:
            raise UnknownText(f"line {line} of {kernel.name}: {text}")


def parse_kernel(name: str, parameters: str, body: str, line: int = 1) -> Kernel:
    kernel, scopes = Kernel(name, _parameters(parameters)), [dict[str, str]()]
    for number, text in enumerate(body.split("\n"), line):
        _add_line(kernel, text.split("//")[0], number, scopes)
    return kernel


@dataclass(frozen=True, slots=True)
class Module:
    """A file of PTX. Kernels are parsed when they are asked for: there are many, and each is long."""

    entries: dict[str, tuple[str, str, int]]  # name -> parameters, body, line of the body
    tables: dict[str, bytes]  # constant data of all kernels

    def kernel(self, name: str) -> Kernel:
        return parse_kernel(name, *self.entries[name])


def parse(text: str) -> Module:
    entries = {}
    for match in _ENTRY.finditer(text):
        entries[match[1]] = match[2], match[4], text.count("\n", 0, match.start(4)) + 1
    tables = {name: bytes(map(int, values.split(","))) for name, values in _TABLE.findall(text)}
    return Module(entries, tables)
