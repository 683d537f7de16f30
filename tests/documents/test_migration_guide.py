"""Everything migration_guide.md shows is run, in its order, on a kept checkpoint of MaxText."""

import dataclasses
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from documents import MODULES
from helpers import run_fresh
from maxtext_data import DATA, prompts_of_reference

from linen_compat.formats._names import (
    ATTENTION,
    EXPERTS,
    EXPERTS_OF_DEEPSEEK,
    EXPERTS_OF_QWEN3,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    OUTSIDE,
    QK_NORMS,
)

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "migration_guide.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose head begins so, without the head."""
    body = GUIDE.split(f"| {heading} |", 1)[1].split("|---", 1)[1].split("\n\n", 1)[0]
    return [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in body.splitlines()[1:]
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the guide names."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("checkpoint", "config.yml", "reference.npz"):
        source = DATA / "unscanned" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    lines = map(json.dumps, prompts_of_reference())
    (folder / "logits.jsonl").write_text("\n".join(lines))
    return folder


def run(script: str, place: Path, *arguments: str) -> str:
    done = run_fresh(script, *arguments, folder=place)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_python_blocks_run_one_after_the_other(place: Path) -> None:
    run("\n".join(text for language, text in BLOCKS if language == "python"), place)


@pytest.mark.slow
def test_commands_run_one_after_the_other(place: Path) -> None:
    commands = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    programs = [command.split()[0] for command in commands]
    assert (programs.count("linen-compat"), programs.count("nnx-pipeline")) == (8, 1)
    said = ""
    for command in commands:
        program, *arguments = shlex.split(command)
        said += run(f"from {MODULES[program]} import main; main()", place, *arguments)
    (shown,) = (text for language, text in BLOCKS if text.startswith("logits: "))
    about, _, _ = shown.partition("off by")  # the figures are rounding
    assert about in " ".join(said.split())


def test_the_table_of_parameters_is_that_of_the_code() -> None:
    names = (*OUTSIDE, *NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *EXPERTS_OF_QWEN3, *MLP)
    names += (*LATENT_ATTENTION, *EXPERTS_OF_DEEPSEEK)
    expected = [[name.linen, name.nnx, name.huggingface] for name in names]
    assert table("parameter in Linen") == expected


MADE_WITH = {
    "config": "Config",
    "config.model": "ModelConfig",
    "config.pipeline": "PipelineConfig",
}


def test_the_table_of_classes_names_what_there_is() -> None:
    import linen_compat
    import nnx_pipeline

    for linen, nnx, made_with, called_with in table("Linen (`linen_compat`)"):
        for name in re.findall(r"\w+", linen):
            found = getattr(linen_compat, name)
            first, *_ = dataclasses.fields(found)
            assert first.type.__name__ == MADE_WITH[made_with.partition(",")[0].strip("`")]
            given = inspect.signature(found.__call__).parameters
            wanted = ["embedding"] if "Embed" in called_with else []
            wanted.append("tokens" if "tokens" in called_with else "x")
            needed = [name for name, one in given.items() if one.kind == one.POSITIONAL_OR_KEYWORD]
            # `real` of the blocks of experts, which may be left out, says which tokens are padding.
            assert [name for name in needed if name != "real"] == ["self", *wanted]
        if "of" not in nnx:
            assert all(hasattr(nnx_pipeline, name) for name in re.findall(r"\w+", nnx))


def test_the_price_is_the_measured_one() -> None:
    measured = (ROOT / "benchmarks" / "results" / "overhead.md").read_text()
    for style, *ratios in table("style"):
        name = style.split(" (")[0]
        rows = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", measured, re.MULTILINE)
        assert [row.split("|")[3].strip() for row in rows] == ratios
