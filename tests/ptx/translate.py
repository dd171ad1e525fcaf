"""A kernel of parse.py -> a program of the machine (machine.h): rows of numbers.

    shl.b32  %r3, %r1, 2;          ->  opcode of "shl.b32" | no guard | line | slot of %r3, slot of %r1, constant 2

PTX has thousands of registers, each written in few places. Most live in one run of instructions between two branches,
and share slots there; the others have one each. So the registers of a warp stay in the caches of a CPU.

An opcode missing in opcodes.cpp is an UnknownInstruction, which names it: nothing is skipped in silence.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.ptx.parse import SIZES, Instruction, Kernel

#: Parts of an opcode that say how memory is ordered or cached. The machine does one thing after the other.
_ORDERS = {"volatile", "relaxed", "acquire", "release", "weak", "sys", "gpu", "cta", "nc"}
_SPECIAL = {"%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%globaltimer"}
_JUMPS = ("bra", "ret", "exit")
#: name -> bytes of its operands, a digit each; None: not known. opcodes.cpp's.
Widths = Callable[[str], str | None]


class UnknownInstruction(Exception):
    """A kernel has an instruction that the machine cannot run."""


@dataclass
class Program:
    opcodes: list[str] = field(default_factory=list)  # by their numbers in rows
    rows: list[tuple[int, ...]] = field(default_factory=list)  # opcode, guard, negated, line, 8 operands
    constants: list[tuple[int, bool]] = field(default_factory=list)  # value, whether it has 64 bits
    slots: int = 0


def _names(operands: Iterable[str]) -> Iterator[str]:
    for operand in operands:
        for name in re.findall(r"%[a-z]\w*(?:\.x)?", operand):
            if name not in _SPECIAL:
                yield name


def _registers(i: Instruction) -> Iterator[str]:
    yield from _names((*i.operands, i.guard or ""))


def _sets(i: Instruction) -> set[str]:
    """Return registers that hold another value after the instruction, whatever they held before."""
    if i.guard is not None or i.opcode.split(".")[0] in ("st", "multimem", *_JUMPS):
        return set()
    return set(_names(i.operands[:1])) - set(_names(i.operands[1:]))


def _slots(kernel: Kernel) -> tuple[list[dict[str, int]], int]:
    """Return the slots of each instruction's registers, and the number of slots."""
    starts = set(kernel.labels.values())
    run, last, runs, alone = 0, dict[str, int](), dict[str, int](), dict[str, int]()
    for number, i in enumerate(kernel.instructions):
        if number in starts or (number and kernel.instructions[number - 1].opcode.split(".")[0] in _JUMPS):
            run += 1
        for name in _registers(i):
            if name not in last:
                kernel.type_of(name)  # it is declared
            # A value that a run reads before setting it comes from elsewhere, or from the earlier pass of a loop.
            if runs.setdefault(name, run) != run or (name not in last and name not in _sets(i)):
                alone.setdefault(name, len(alone))
            last[name] = number
    # One pool for each width: lanes that have parted are at different instructions, and a lane's 64 bits lie where
    # two lanes have 32 each.
    count, free, local = len(alone), (list[int](), list[int]()), dict[str, int]()
    slots = []
    for number, i in enumerate(kernel.instructions):
        names = list(dict.fromkeys(_registers(i)))
        for name in names:
            if name not in alone and name not in local:
                pool = free[SIZES[kernel.type_of(name)] == 64]
                if not pool:
                    pool.append(count)
                    count += 1
                local[name] = pool.pop()
        slots.append({name: alone[name] if name in alone else local[name] for name in names})
        for name in names:
            if name in local and last[name] == number:
                free[SIZES[kernel.type_of(name)] == 64].append(local.pop(name))
    return slots, count


class _Translator:
    def __init__(self, kernel: Kernel, widths: Widths, addresses: dict[str, int]) -> None:
        self._kernel = kernel
        self._widths = widths
        #: The value of a symbol: parameters and shared memory by their offsets, constant tables by address.
        self._symbols = {name: at for name, (at, _) in kernel.parameters.items()} | kernel.shared | addresses
        self._numbers: dict[str, int] = {}
        self._constants: dict[tuple[int, bool], int] = {}
        self._slots: dict[str, int] = {}
        self.program = Program()

    def run(self) -> Program:
        slots, self.program.slots = _slots(self._kernel)
        first_row, jumps = [], []
        for i, of_instruction in zip(self._kernel.instructions, slots, strict=True):
            self._slots = of_instruction
            first_row.append(len(self.program.rows))
            try:
                for name, operands in self._rows(i):
                    if name == "bra":
                        jumps.append((len(self.program.rows), i.operands[0]))
                    self._add(i, name, operands)
            except (UnknownInstruction, KeyError, ValueError) as error:
                text = f"{i.opcode} {', '.join(i.operands)}"
                raise UnknownInstruction(f"{text}, line {i.line} of {self._kernel.name}: {error}") from error
        for row, label in jumps:
            to = first_row[self._kernel.labels[label]]
            self.program.rows[row] = (*self.program.rows[row][:4], to, *self.program.rows[row][5:])
        self.program.opcodes = list(self._numbers)
        self.program.constants = list(self._constants)
        return self.program

    def _add(self, i: Instruction, name: str, operands: Iterable[int]) -> None:
        if self._widths(name) is None:
            raise UnknownInstruction(f"no opcode {name}")
        number = self._numbers.setdefault(name, len(self._numbers))
        guard = -1 if i.guard is None else self._slots[i.guard]
        at = (*operands, *[0] * 8)[:8]
        self.program.rows.append((number, guard, int(i.negated), i.line, *at))

    def _rows(self, i: Instruction) -> Iterator[tuple[str, list[int]]]:
        """Yield (name, operands) of an instruction in the machine's form: one, or one for each half."""
        name, at = i.opcode, i.operands
        kind, *parts = name.split(".")
        if kind == "bra":
            yield "bra", [0]  # known when all rows are
        elif kind in ("ld", "st", "multimem"):
            yield self._access(kind, parts, at)
        elif kind == "bar" and parts[0] in ("sync", "red"):
            if at[1 if parts[0] == "red" else 0] != "0" or len(at) != (3 if parts[0] == "red" else 1):
                raise UnknownInstruction("a barrier of some threads")
            how = {"sync": 0, "red.and.pred": 1, "red.or.pred": 2}[".".join(parts)]
            yield name, [*self._values(name, (at[0], at[2])), how] if how else [0, 0, 0]
        elif kind == "mov" and at[1] in _SPECIAL:
            name = at[1].removeprefix("%")
            yield name, self._values(name, at[:1])
        elif kind == "mov" and at[1].startswith("{"):
            yield f"pack.{parts[0]}", self._values(f"pack.{parts[0]}", (at[0], *_halves(at[1])))
        elif kind == "mov" and at[0].startswith("{"):
            for half, part in zip(_halves(at[0]), ("low", "high"), strict=True):
                if half != "_":
                    yield f"{part}.{parts[0]}", self._values(f"{part}.{parts[0]}", (half, at[1]))
        elif kind == "shfl":
            yield name, self._values(name, (at[0].split("|")[0], *at[1:]))
        elif kind == "atom":
            base, wide, offset = self._address(at[1])
            if not wide:
                raise UnknownInstruction("an address of 32 bits")
            yield name, [self._value(at[0], "4"), base, offset, self._value(at[2], "4")]
        elif self._widths(name) is None:
            raise UnknownInstruction(f"no opcode {name}")
        elif kind == "cvt" and SIZES[parts[-1]] < 64 and SIZES[self._kernel.type_of(at[1])] == 64:
            yield f"{name}.wide", self._values(f"{name}.wide", at)
        else:
            yield name, self._values(name, at)

    def _access(self, kind: str, parts: list[str], at: tuple[str, ...]) -> tuple[str, list[int]]:
        kept = [part for part in parts if part not in _ORDERS and not part.startswith(("L1", "L2"))]
        memory, given = (at[1], at[0]) if kind == "ld" else (at[0], at[1])
        values = _halves(given) if given.startswith("{") else [given]
        bits, base, wide, offset = SIZES[kept[-1]], *self._address(memory)
        registers = {SIZES[self._kernel.type_of(value)] for value in values if value.startswith("%")} or {bits}
        if len(registers) > 1 or min(registers) < bits:
            raise UnknownInstruction(f"{bits} bits and registers of {registers}")
        if bits < 64 and registers == {64}:
            kept.append("wide")
        digit = "8" if registers == {64} else "?"
        return ".".join([kind, *kept]), [base, wide, offset, *(self._value(value, digit) for value in values)]

    def _address(self, text: str) -> tuple[int, int, int]:
        """Return the slot of the base, True if it has 64 bits, and the offset."""
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", text)
        if found is None:
            raise UnknownInstruction(f"an address {text}")
        wide = not found[1].startswith("%") or SIZES[self._kernel.type_of(found[1])] == 64
        return self._value(found[1], "8" if wide else "4"), int(wide), int(found[2] or 0)

    def _values(self, name: str, at: Iterable[str]) -> list[int]:
        widths, operands = self._widths(name), list(at)
        if widths is None or len(widths) != len(operands):
            raise UnknownInstruction(f"{name} of {len(operands)} operands")
        return [self._value(operand, width) for operand, width in zip(operands, widths, strict=True)]

    def _value(self, operand: str, width: str) -> int:
        """Return a slot, or ~number of a constant. width: bytes; 0: a predicate; 1 and ?: 32 bits or fewer."""
        if operand.startswith("%"):
            bits = SIZES[self._kernel.type_of(operand)]
            fits = {"0": bits == 1, "1": bits in (16, 32), "?": bits < 64}.get(width, str(bits // 8) == width)
            if not fits:
                raise UnknownInstruction(f"{operand} of {bits} bits where {width} bytes are meant")
            return self._slots[operand]
        if operand in self._symbols:
            value = self._symbols[operand]
        elif operand.startswith("0f"):
            value = int(operand[2:], 16)
        else:
            value = int(operand, 0)
        bits = 64 if width == "8" else 16 if width == "2" else 32
        constant = value & ((1 << bits) - 1), width == "8"
        return ~self._constants.setdefault(constant, len(self._constants))


def _halves(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{}").split(",")]


def translate(kernel: Kernel, widths: Widths, addresses: dict[str, int] | None = None) -> Program:
    """Translate a kernel. addresses: of the constant tables that it reads."""
    return _Translator(kernel, widths, addresses or {}).run()


def packed(program: Program) -> tuple[bytes, bytes, bytes]:
    """Return rows, constants, and which constants have 64 bits, as ptx_define takes them."""
    rows = b"".join(struct.pack("<12i", *row) for row in program.rows)
    constants = struct.pack(f"<{len(program.constants)}Q", *(value for value, _ in program.constants))
    return rows, constants, bytes(wide for _, wide in program.constants)
