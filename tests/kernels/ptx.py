"""The arithmetic of a PTX kernel's main loop, as expressions: two kernels with equal ones compute the same bits.

An expression says which loads and which values of the loop before it a stored value is made of, and by which of mul,
add and fma (their commuting operands sorted). It does not say how addresses are computed, nor in which order.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

# what a value that comes from the turn before, or from either side of a branch, passes through
_MOVES = ("mov", "cvt.f32.bf16", "ld", "prmt", "shl", "and")


class Definition(NamedTuple):
    line: int
    op: str
    inputs: list[str]


class Store(NamedTuple):
    line: int
    registers: list[str]


def _longest_loop(ptx: str) -> list[str]:
    lines = [re.sub(r"//.*", "", line).strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith((".loc", ".file"))]
    at = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$L__\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        match = re.search(r"\bbra(?:\.uni)?\s+(\$L__\w+)", line)
        if match and at[match[1]] < i:
            loops.append(lines[at[match[1]] : i + 1])
    return max(loops, key=len)


def _read(loop: list[str]) -> tuple[dict[str, list[Definition]], list[Store]]:
    """(definitions of every register in the loop, the stores)."""
    definitions: dict[str, list[Definition]] = {}
    stores = []
    for at, line in enumerate(loop):
        match = re.match(r"(?:@!?%p\d+\s+)?([\w.:]+)\s+(.*);$", line)
        if not match:
            continue
        op, arguments = match[1], match[2]
        if op.startswith("st."):
            registers = re.findall(r"%\w+", arguments.split("]")[1])
            stores.append(Store(at, registers))
            continue
        head, braces, tail = arguments.partition("}")
        if not braces or not head.startswith("{"):
            head, _, tail = arguments.partition(",")
        targets = re.findall(r"%\w+", head)
        inputs = [part.strip() for part in re.sub(r"[{}]", "", tail).split(",") if part.strip()]
        for i, target in enumerate(targets):
            name = f"{op}[{i}]" if len(targets) > 1 else op
            definitions.setdefault(target, []).append(Definition(at, name, inputs))
    return definitions, stores


class _Expressions:
    def __init__(self, definitions: dict[str, list[Definition]], places: dict[str, str]) -> None:
        self._definitions, self._places = definitions, places
        self._known: dict[tuple[str, int], str] = {}

    def of(self, value: str, line: int) -> str:
        """What a register or constant holds at a line of the loop, by its last definition above."""
        if not value.startswith("%"):
            return value
        every = self._definitions.get(value)
        if every is None:
            return "outside"
        above = [definition for definition in every if definition.line < line]
        if not above or (len(every) > 1 and above[-1].op.startswith(_MOVES)):
            return self._places.get(value, "carried")
        key = (value, above[-1].line)
        if key not in self._known:
            text = self._made_by(above[-1])
            self._known[key] = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()
        return self._known[key]

    def _made_by(self, definition: Definition) -> str:
        line, op, inputs = definition
        if op.startswith("div"):
            # x / n is x * (1 / n) in hardware: SGLang 0.5.17 writes the first, 0.5.23 the second
            numerator = self.of(inputs[0], line)
            return "1/" if numerator.startswith("0f") else self._call("mul", [numerator, "1/"])
        for leaf in ("ld", "ex2", "lg2", "sqrt", "selp"):
            if op.startswith(leaf):
                return leaf + op[op.index("[") :] if "[" in op else leaf
        read = [self.of(value, line) for value in inputs]
        if read == ["carried"] and op.startswith(_MOVES):
            return "carried"
        if op.startswith("mov"):
            return read[0] + (op[op.index("[") :] if "[" in op else "")
        return self._call(op.split(".")[0] if op.startswith(("mul", "add", "fma", "sub", "shfl")) else op, read)

    @staticmethod
    def _call(name: str, inputs: list[str]) -> str:
        commuting = {"mul": 2, "add": 2, "fma": 2}.get(name, 0)
        return f"{name}({', '.join(sorted(inputs[:commuting]) + inputs[commuting:])})"


def stored_values(ptx: str) -> list[str]:
    """An expression for each value that the kernel's longest loop stores, in order.

    A value that the loop stores and carries to its next turn is named there by its place among the stores.
    """
    definitions, stores = _read(_longest_loop(ptx))
    places = {
        register: f"stored[{i}][{j}]" for i, store in enumerate(stores) for j, register in enumerate(store.registers)
    }
    expressions = _Expressions(definitions, places)
    return [expressions.of(register, store.line) for store in stores for register in store.registers]
