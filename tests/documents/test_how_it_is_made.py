"""The two tables of docs/how_it_is_made.md name functions in the order in which they are called."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from documents import PAGES, ROOT
from maxtext_data import checkpoint, config_of

import linen_compat
from nnx_pipeline import lab

PAGE = PAGES["docs/how_it_is_made.md"]


def listed(heading: str) -> list[tuple[str, str]]:
    """The files and functions of the table below a heading, in their order."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = []
    for line in table.splitlines():
        if row := re.match(r"\| \[[\w/.]+\]\(\.\./([\w/.]+)\) \| (.+?) \|", line):
            found += [(row[1], name.rpartition(".")[2]) for name in re.findall(r"`(.+?)`", row[2])]
    return found


def is_way_through(job: Callable[[], Any], way: list[tuple[str, str]]) -> bool:
    """Whether a job calls these functions one after the other, others between them or not."""
    left = iter(way)
    wanted = [next(left)]

    def note(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not wanted or code.co_name != wanted[0][1]:
            return
        if Path(code.co_filename) == ROOT / wanted[0][0]:
            wanted[:] = [one for one in (next(left, None),) if one]

    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
    return not wanted


def test_the_way_of_a_leaf() -> None:
    way = listed("The way of a leaf")
    assert len(way) >= 8
    assert is_way_through(lambda: linen_compat.load(checkpoint("unscanned"), config_of()), way)
    assert not is_way_through(lambda: None, way)


def test_the_way_of_a_compiled_program() -> None:
    way = listed("The way of a compiled program")
    assert len(way) >= 8
    gradient = jax.grad(lambda x: jnp.sum(x @ x))
    assert is_way_through(lambda: lab.measure(gradient, jnp.ones((8, 8))), way)
    assert not is_way_through(lambda: lab.measure(gradient, jnp.ones((8, 8))), way[::-1])
