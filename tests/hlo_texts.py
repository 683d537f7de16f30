"""Random HLO programs as text, and texts of real ones with line breaks put into them."""

import random
import re
from pathlib import Path
from typing import NamedTuple

from nnx_pipeline.lab._hlo.cost import products_of
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import Module

SPLASH = (Path(__file__).parent / "data/hlo/splash_attention.txt").read_text(encoding="utf-8")


def matmul_flops(module: Module) -> int | None:
    """Operations of all matrix products per device and step; None where one cannot be counted."""
    products = products_of(module, executions(module))
    return None if products.unknown else products.known


class Printed(NamedTuple):
    """What a random program says, and how it is written."""

    text: str
    shapes: dict[str, list[tuple[str, tuple[int, ...]]]]
    operands: dict[str, tuple[str, ...]]
    attributes: dict[str, dict[str, str]]
    roots: dict[str, str]


QUOTED = [
    *('""', '"a b"', r'"\"}{"', '"two\nlines"', r'"a\\"'),
    *('"/* no comment"', '"%x = f32[] add("'),
]
WORDS = [
    *("1", "-3", "true", "%name.1", "3x3", "0_1x2_3"),
    *("b01f_01io->b01f", "[4,2]<=[8]T(1,0)", "a/b"),
]
GAPS = ["", "", " ", "\n", "\n    ", ' /* }\n{ " */ ']


class Printer:
    """Writes random instructions, with white space and comments wherever brackets are open."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def gap(self) -> str:
        return self.random.choice(GAPS)

    def dims(self) -> tuple[int, ...]:
        return tuple(self.random.randrange(1, 9) for _ in range(self.random.randrange(3)))

    def array(self) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
        dtype, dims = self.random.choice(["f32", "bf16", "s8", "pred"]), self.dims()
        layout = self.random.choice(["", "{1,0}", "{1,0:T(8,128)(2,1)S(1)}", "{:T(128)}"])
        return f"{dtype}[{','.join(map(str, dims))}]{layout}", [(dtype, dims)]

    def type(self, depth: int = 0) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
        if depth == 2 or self.random.random() < 0.6:
            return self.array()
        parts = [self.type(depth + 1) for _ in range(self.random.randrange(4))]
        inside = f",{self.gap()}".join(f"{self.gap()}{text}" for text, _ in parts)
        return f"({inside}{self.gap()})", [shape for _, shapes in parts for shape in shapes]

    def value(self, depth: int = 0) -> str:
        kind = self.random.random()
        if kind < 0.3:
            return self.random.choice(QUOTED)
        if kind < 0.5 or depth == 4:
            return self.random.choice(WORDS)
        left, right = self.random.choice(["{}", "()", "[]"])
        inside = [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        joined = self.random.choice([",", ", ", ":", "="]).join(
            f"{self.gap()}{part}{self.gap()}" for part in inside
        )
        return f"{left}{self.gap()}{joined}{right}"

    def instruction(self, name: str, before: list[str], known: Printed) -> str:
        text, known.shapes[name] = self.type()
        operands = self.random.choices(before, k=self.random.randrange(4)) if before else []
        written = [
            self.gap() + self.random.choice(["", "%", "/*index=5*/%", "f32[2]{0} %"]) + operand
            for operand in operands
        ]
        keys = self.random.sample(["a", "b_c", "d-e", "f", "g1"], self.random.randrange(5))
        found = {key: self.value() for key in keys}
        known.operands[name], known.attributes[name] = tuple(operands), found
        opcode = self.random.choice(["add", "all-gather-start", "rng-bit-generator"])
        behind = "".join(
            f",{self.random.choice([' ', '', chr(10)])}{key}={self.random.choice(['', ' '])}{value}"
            for key, value in found.items()
        )
        percent = self.random.choice(["%", ""])
        return f"{percent}{name} = {text} {opcode}({','.join(written)}{self.gap()}){behind}"

    def program(self) -> Printed:
        known = Printed("", {}, {}, {}, {})
        texts = [f"HloModule random, layout={{{self.gap()}({self.gap()})->f32[]{self.gap()}}}"]
        for number in range(self.random.randrange(1, 4)):
            names = [f"{number}.x.{place}" for place in range(self.random.randrange(1, 6))]
            root = self.random.choice(names)
            lines = [
                f"  {'ROOT ' if name == root else ''}"
                + self.instruction(name, names[:place], known)
                for place, name in enumerate(names)
            ]
            known.roots[f"c.{number}"] = root
            signature = self.random.choice(["", f"(a: (f32[2]{{0}},{self.gap()}s32[])) -> f32[2] "])
            head = f"{'ENTRY ' if number == 0 else ''}%c.{number} {signature}{{"
            texts.append("\n".join([head, *lines, "}"]))
        return known._replace(text="\n\n".join(texts) + "\n")


def with_line_breaks(text: str) -> str:
    """A program's text with a line break behind and before each brace of its instructions."""
    start = re.search(r"^(ENTRY |%)", text, re.MULTILINE)
    assert start is not None, "no computation"

    def broken(found: re.Match[str]) -> str:
        quoted, opening, closing = found.groups()
        return quoted or (f"{opening}\n" if opening else f"\n{closing}")

    lines = [
        re.sub(r'("(?:[^"\\]|\\.)*")|([{(])|([})])', broken, line)
        if re.match(r"\s+(ROOT )?%\S+ = ", line)
        else line
        for line in text[start.start() :].split("\n")
    ]
    return text[: start.start()] + "\n".join(lines)
