"""Faults that are planted in programs of other people's styles: those of benchmarks/planted."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from nnx_pipeline import lab
from nnx_pipeline.lab.lint import Finding, lint

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planted"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"planted_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def marked(name: str, *marks: str) -> set[int]:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if line.endswith(tuple(f"# {m}" for m in marks))}


def findings(module: ModuleType, function: str) -> list[Finding]:
    sizes = dict(part.split("=") for part in getattr(module, "MESH", "one=1").split(","))
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(map(int, sizes.values())), tuple(sizes), axis_types=kinds)
    given: Any = getattr(module, "good_inputs", module.inputs)
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(mesh):
        arguments = (module.inputs if function == "step" else given)()
    with jax.numpy_dtype_promotion("standard"):
        return lint(getattr(module, function), *arguments, mesh=mesh)


@pytest.mark.parametrize("name", NAMES)
def test_lint_names_the_line_and_the_cure(name: str) -> None:
    module, lines = program(name), marked(name, "planted", "caller")
    found = [
        one
        for one in findings(module, "step")
        if one.location.line in lines
        or any(f"{name}.py:{line} " in one.location.caller for line in lines)
    ]
    assert [one for one in found if re.search(module.CURE, one.cure)]


@pytest.mark.parametrize("name", NAMES)
def test_lint_finds_nothing_in_the_good_version(name: str) -> None:
    assert findings(program(name), "good") == []


def test_the_path_of_a_buffer_leads_to_the_scan_that_stacks_it() -> None:
    module = program("accumulate_optax")
    with jax.numpy_dtype_promotion("standard"):
        measured = lab.measure(module.step, *module.inputs(), platform="cpu")
    assert measured.attribution
    (line,) = marked("accumulate_optax", "planted")
    first = measured.attribution.buffers[0]
    assert first.shape == "f32[8,30522,768]"
    assert any(place.endswith(f"accumulate_optax.py:{line}") for place in first.path)
    largest = measured.attribution.arguments[0]
    assert largest.role == "argument"
    assert largest.bytes == 30522 * 768 * 4
