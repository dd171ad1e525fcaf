"""nvcc's PTX as C++: a function a kernel, a register a variable, an instruction a statement. runtime.h runs it.

PTX is what nvcc makes of a kernel before it is fitted to a GPU: inlined, unrolled, with every address and shuffle. What
is left out after it is the last step to machine code. Known are the instructions that the codec's kernels have; any
other one is an error, so that nothing is skipped in silence.

Registers hold bits: a float is looked at as one by the instructions that are about floats, so that a NaN that is only
moved stays the NaN that it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIZES = {"pred": 1, "u8": 8, "u16": 16, "s16": 16, "b16": 16, "u32": 32, "s32": 32, "b32": 32, "f32": 32}
_SIZES |= {"u64": 64, "s64": 64, "b64": 64}
_KERNEL = re.compile(r"\.entry (\w+)\(\n(.*?)\n\).*?\n\{\n(.*?)\n\}\n", re.DOTALL)
_SPECIAL = {"%tid.x": "t.index", "%ctaid.x": "t.block", "%nctaid.x": "t.blocks"}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class UnknownInstruction(Exception):
    """The kernels have something that no line here is about."""


def _c_type(kind: str) -> str:
    if kind == "pred":
        return "bool"
    if kind == "f32":
        return "float"
    return f"{'' if kind[0] == 's' else 'u'}int{_SIZES[kind]}_t"


def _register(name: str) -> str:
    return "r_" + name.removeprefix("%")


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[]+)+", text)]


class _Kernel:
    def __init__(self, name: str, parameters: str, body: str) -> None:
        self.name = name
        self.parameters = re.findall(r"(\w+)(?:\[\d+\])?,?$", parameters, re.MULTILINE)
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        self.sites = 0
        self.lines = [line for raw in body.split("\n") for line in self._line(raw.split("//")[0].strip())]

    def text(self) -> str:
        return f"static void {self.name}(Thread& t) {{\n" + "\n".join(self.lines) + "\n}\n"

    def _line(self, line: str) -> list[str]:
        if line.startswith("{ ") or line.endswith("; }"):  # an instruction that nvcc writes as several
            inner = line.removeprefix("{ ").removesuffix(" }")
            return ["{"] * line.startswith("{ ") + self._line(inner) + ["}"] * line.endswith("; }")
        if not line or line.startswith(".pragma"):
            return []
        if line in "{}":
            return [line]
        declared = re.match(r"\.reg \.(\w+)\s+%(\w+?)(?:<(\d+)>)?;", line)
        if declared:
            kind = _c_type(declared[1].replace("f32", "b32"))
            names = [declared[2]] if declared[3] is None else [f"{declared[2]}{i}" for i in range(int(declared[3]))]
            return [f"{kind} " + ", ".join(f"{_register(name)} = 0" for name in names) + ";"]
        array = re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", line)
        if array:
            align = int(array[1])
            self.shared[array[2]] = -(-self.shared_bytes // align) * align
            self.shared_bytes = self.shared[array[2]] + int(array[3])
            return []
        label = re.match(r"(\$\w+):$", line)
        if label:
            return [f"{label[1].replace('$', 'at_')}:;"]
        found = re.match(r"(?:@(!?)%(\w+)\s+)?([\w.:]+)\s*(.*);$", line)
        if found is None:
            raise UnknownInstruction(line)
        condition = f"if ({found[1]}{_register(found[2])}) " if found[2] else ""
        name, *parts = found[3].split(".")
        statement = self._statement(name, parts, _operands(found[4]))
        if statement is None:
            raise UnknownInstruction(line)
        return [f"{condition}{{ {statement} }}"]

    def _value(self, operand: str, kind: str) -> str:
        """C++ for an operand as a value of a type."""
        if operand.startswith("!"):
            return f"!{self._value(operand[1:], kind)}"
        if operand in _SPECIAL:
            return _SPECIAL[operand]
        if operand.startswith("%"):
            return f"as_float({_register(operand)})" if kind == "f32" else f"(({_c_type(kind)}){_register(operand)})"
        if operand.startswith("0f"):
            return f"as_float(0x{operand[2:]}u)" if kind == "f32" else f"0x{operand[2:]}u"
        if operand in self.shared:
            return f"(({_c_type(kind)}){self.shared[operand]})"
        return f"(({_c_type(kind)}){operand}{'' if operand.startswith('-') else 'ull'})"

    def _set(self, register: str, value: str, kind: str) -> str:
        return f"{_register(register)} = " + (f"as_bits({value});" if kind == "f32" else f"{value};")

    def _address(self, operand: str, space: str, size: int, writes: bool) -> str:
        found = re.match(r"\[([%\w]+)(?:\+(-?\d+))?\]$", operand)
        assert found is not None, operand
        base, offset = found[1], int(found[2] or 0)
        if space == "param":
            return f"t.parameters[{self.parameters.index(base)}] + {offset}"
        if space == "shared":
            return f"t.shared({self._value(base, 'u32')} + {offset}, {size})"
        return f"t.global({self._value(base, 'u64')} + {offset}, {size}, {int(writes)})"

    def _site(self) -> int:
        """Where lanes and threads meet: they must all be at the same."""
        self.sites += 1
        return self.sites

    def _statement(self, name: str, parts: Sequence[str], at: Sequence[str]) -> str | None:
        kind = parts[-1] if parts else ""
        if name == "ret":
            return "return;"
        if name == "bra":
            return f"goto {at[0].replace('$', 'at_')};"
        if name in ("ld", "st"):
            memory, registers = (at[1], at[0]) if name == "ld" else (at[0], at[1])
            names = [r.strip() for r in registers.strip("{}").split(",")]
            moved, size = "b32" if kind == "f32" else kind, _SIZES[kind] // 8
            text = f"uint8_t* p = {self._address(memory, parts[0], size * len(names), name == 'st')};"
            for i, register in enumerate(names):
                if name == "ld":
                    text += f" {_register(register)} = read<{_c_type(moved)}>(p + {i * size});"
                else:
                    text += f" write<{_c_type(moved)}>(p + {i * size}, {self._value(register, moved)});"
            return text
        if name == "mov" and at[1].startswith("{"):  # two halves, the lower first
            low, high = (self._value(half, "b16") for half in _operands(at[1].strip("{}")))
            return self._set(at[0], f"{low} | (uint32_t){high} << 16", kind) if kind == "b32" else None
        if name == "mov" and at[0].startswith("{"):
            halves = _operands(at[0].strip("{}"))
            texts = [
                self._set(half, f"{self._value(at[1], 'b32')} >> {16 * i}", "b16") for i, half in enumerate(halves)
            ]
            return " ".join(texts) if kind == "b32" else None
        if name in ("mov", "selp"):
            kind = "b32" if kind == "f32" else kind
            value = self._value(at[1], kind)
            if name == "selp":
                value = f"{self._value(at[3], 'pred')} ? {value} : {self._value(at[2], kind)}"
            return self._set(at[0], value, kind)
        if name == "cvta":  # an address in shared memory is known by its offset
            return self._set(at[0], self._value(at[1], "u64"), "u64")
        if name == "cvt":
            to, source = parts[-2], parts[-1]
            if source == "f32" or (to == "f32" and "rn" not in parts):
                return None
            value = self._value(at[1], source)
            return self._set(at[0], f"(float){value}" if to == "f32" else f"({_c_type(to)}){value}", to)
        if name in ("mul", "mad") and kind != "f32":
            if "wide" in parts:
                wide = kind[0] + str(2 * _SIZES[kind])
                value = f"({_c_type(wide)}){self._value(at[1], kind)} * ({_c_type(wide)}){self._value(at[2], kind)}"
            elif "lo" in parts:
                wide = "u" + str(_SIZES[kind])
                value = f"{self._value(at[1], wide)} * {self._value(at[2], wide)}"
            else:
                return None
            return self._set(at[0], value + (f" + {self._value(at[3], wide)}" if name == "mad" else ""), wide)
        if name in _ARITHMETIC:
            if kind == "f32" and "rn" not in parts:
                return None
            if name in ("add", "sub") and kind[0] == "s":
                kind = "u" + kind[1:]  # wraps
            return self._set(at[0], f"{self._value(at[1], kind)} {_ARITHMETIC[name]} {self._value(at[2], kind)}", kind)
        if name == "rcp" and "rn" in parts:
            return self._set(at[0], f"1.0f / {self._value(at[1], kind)}", kind)
        if name == "neg":
            if kind == "f32":
                return self._set(at[0], f"{self._value(at[1], 'b32')} ^ 0x80000000u", "b32")
            return self._set(at[0], f"0 - {self._value(at[1], 'u' + kind[1:])}", "u" + kind[1:])
        if name == "not":
            return self._set(at[0], f"{'!' if kind == 'pred' else '~'}{self._value(at[1], kind)}", kind)
        if name in ("min", "max") and kind != "f32":
            a, b = self._value(at[1], kind), self._value(at[2], kind)
            return self._set(at[0], f"{a} {'<' if name == 'min' else '>'} {b} ? {a} : {b}", kind)
        if name in ("shl", "shr"):
            value, by, size = self._value(at[1], kind), self._value(at[2], "u32"), _SIZES[kind]
            if name == "shr" and kind[0] == "s":
                return self._set(at[0], f"{value} >> ({by} < {size} ? {by} : {size - 1})", kind)
            shifted = f"({_c_type(kind)})({value} {'<<' if name == 'shl' else '>>'} ({by} & {size - 1}))"
            return self._set(at[0], f"{by} < {size} ? {shifted} : 0", kind)
        if name == "setp":
            return self._comparison(parts, at)
        if name == "prmt":
            return self._set(at[0], f"permuted({', '.join(self._value(x, 'b32') for x in at[1:])})", "b32")
        if name == "bfi":
            return self._set(at[0], f"inserted({', '.join(self._value(x, 'b32') for x in at[1:])})", "b32")
        if name == "shfl" and parts[0] == "sync":
            from_lane = {"bfly": "t.lane() ^ {}", "idx": "{}"}[parts[1]].format(self._value(at[2], "u32"))
            all_lanes = f"{self._value(at[3], 'u32')} == 31 && {self._value(at[4], 'u32')} == 0xffffffffu"
            target = at[0].split("|")[0]
            value = f"t.shuffle({self._site()}, {self._value(at[1], 'b32')}, {from_lane}, {all_lanes})"
            return self._set(target, value, "b32")
        if name == "bar" and parts[0] == "warp":
            return f"t.shuffle({self._site()}, 0, 0, {self._value(at[0], 'u32')} == 0xffffffffu);"
        if name == "bar" and parts[0] == "sync":
            return f"t.barrier({self._site()});"
        return None

    def _comparison(self, parts: Sequence[str], at: Sequence[str]) -> str | None:
        kind, how = parts[-1], parts[0]
        a, b = self._value(at[1], kind), self._value(at[2], kind)
        unordered = f"({a} != {a} || {b} != {b})"
        if how in ("nan", "num"):
            value = unordered if how == "nan" else f"!{unordered}"
        elif kind == "f32" and how.endswith("u"):
            value = f"({unordered} || {a} {_COMPARISONS[how[:-1]]} {b})"
        elif how == "ne" and kind == "f32":
            value = f"({a} < {b} || {a} > {b})"
        else:
            value = f"({a} {_COMPARISONS[how]} {b})"
        if len(parts) != 2:
            return None
        return self._set(at[0], value, "pred")


def translate(ptx: str, wanted: str) -> str:
    """C++ of the kernels whose names match a pattern, and their table; runtime.h goes before it."""
    kernels = [_Kernel(*found) for found in _KERNEL.findall(ptx) if re.search(wanted, found[0])]
    rows = "".join(f'{{"{k.name}", {k.name}, {k.shared_bytes}}},\n' for k in kernels)
    return "".join(k.text() for k in kernels) + f"const std::vector<Kernel> kernels = {{\n{rows}}};\n"
