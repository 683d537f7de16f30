"""Everything that README.md and docs/ show is run: code, commands, and the output below them."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import command_reference
import field_reference
import pytest
from documents import BLOCKS, MODULES, PAGES, ROOT, TEXT, WORDS, table
from helpers import INTERRUPTIBLE, Ended, pytest_in, run_fresh, user_environment

# The blocks of these pages belong together, and run in their order in one folder.
IN_ORDER = ["docs/checkpoints.md"]
ALONE = [block for block in BLOCKS if block.page not in IN_ORDER]
BLOCKS_OF_PYTHON = [block for block in ALONE if block.language == "python"]
TESTS = [block for block in BLOCKS_OF_PYTHON if "def test_" in block.text]
PYTHON = [block for block in BLOCKS_OF_PYTHON if block not in TESTS]
SHELL = [(line, block) for block in ALONE if block.language == "sh" for line in block.lines]
SETUP = [line for line, _ in SHELL if line.startswith("python3 -m venv")]
TRAINING = "nnx-pipeline train --model tiny --mesh stage=4,fsdp=2 --steps 50"
# It needs a package registry and another Python; tests/lab/test_across.py runs what it does.
ACROSS = [line for line, _ in SHELL if "--across" in line]
# They belong together, in this order: one trains on a text, and the others continue prompts.
TEXTS = [line for line, _ in SHELL if "--data" in line] + [
    line for line, _ in SHELL if "nnx-pipeline generate" in line
]
# Each once, with the output that a page shows of it.
COMMANDS = {line: block.shown for line, block in SHELL if line not in (*SETUP, *ACROSS, *TEXTS)}
RUN = "from {} import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=[f"{Path(one.page).stem}" for one in PYTHON])
def test_python_blocks_run(block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block.text)
    done = run_fresh(script, folder=tmp_path)
    assert done.code == 0, done.err
    assert block.shown in ("", done.out)


@pytest.mark.slow
@pytest.mark.parametrize("page", IN_ORDER)
def test_blocks_run_one_after_the_other(page, tmp_path):
    run = ("python", "sh")
    for block in (block for block in BLOCKS if block.page == page and block.language in run):
        if block.language == "python":
            calls = [[block.text]]
        else:
            split = map(shlex.split, block.lines)
            calls = [[RUN.format(MODULES[name]), *rest] for name, *rest in split]
        for call in calls:
            done = run_fresh(*call, folder=tmp_path)
            assert done.code == 0, (call[1:], done.err)


@pytest.mark.slow
def test_the_budget_is_recorded_and_then_exceeded(tmp_path):
    """As the text beside it says, down to the figures of the message."""
    code, _ = TESTS
    file = tmp_path / code.file
    file.write_text(code.text)
    recorded = pytest_in(tmp_path, "--update-memory-budgets")
    if "1 skipped" in recorded.out:
        pytest.skip("the TPU compiler is not installed")
    assert "1 passed" in recorded.out, recorded.out
    changed = code.text.replace("    @jax.checkpoint\n", "")
    assert changed != code.text
    file.write_text(changed)
    exceeded = pytest_in(tmp_path).out
    (shown,) = (block.text for block in BLOCKS if block.text.startswith("MemoryExceeded"))
    (version,) = re.findall(r"\(libtpu (\S+)\):\n\n```text\nMemoryExceeded", TEXT)
    assert re.search("test_memory.py:7 +saved residual", exceeded), exceeded
    if f"libtpu {version}," in exceeded:
        missing = [line for line in shown.splitlines() if line not in exceeded]
        assert not missing, exceeded


@pytest.mark.slow
def test_a_marked_test_holds_its_limit(tmp_path):
    _, code = TESTS
    file = tmp_path / "test_product.py"
    file.write_text(code.text)
    done = pytest_in(tmp_path)
    if "1 skipped" in done.out:
        pytest.skip("the TPU compiler is not installed")
    assert "1 passed" in done.out, done.out
    file.write_text(code.text.replace("40 MB", "4 MB"))
    assert re.search(
        r"::test_a_product - account [\d.]+ MB, limit 4\.0 MB", pytest_in(tmp_path).out
    )


def write_modules(folder):
    """The examples, what the text names before its code, such as `my_step.py`:, and `error.log`."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for block in BLOCKS:
        if block.file:
            file = folder / block.file
            assert not file.exists() or file.read_text() == block.text, f"{file.name} is two files"
            file.write_text(block.text)
    text = (ROOT / "tests" / "data" / "explain" / "tpu_v4_scores.txt").read_text("utf-8")
    (folder / "error.log").write_text(text)


def test_setup_commands_name_what_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    job, tests = SETUP
    assert all(line in PAGES["README.md"] for line in SETUP)
    for line in SETUP:
        named = re.search(r"\.\[([\w,]+)\]", line)
        assert named is not None
        assert set(named[1].split(",")) <= set(extras)
    assert job.endswith(STEP_OF_THE_READER)
    assert TRAINING in COMMANDS
    ci = (ROOT / ".ci" / "run").read_text().replace('"', "")
    assert f"/{tests.split('/')[-1]}\n" in ci
    assert tests in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


STEP_OF_THE_READER = (
    ".venv/bin/nnx-pipeline memory examples/my_step.py:step --inputs examples/my_step.py:inputs "
    "--platform cuda:h100:1"
)
EXPERIMENT = (
    "nnx-pipeline compare tiny loss-chunks --platform cuda:h100:2 --gemm triton --mesh fsdp=2 "
    "--set model.num_layers=1"
)
# The CPU compiler takes a third of the time, and what is compiled for a GPU is the same.
QUICKLY = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def test_the_step_of_the_reader(tmp_path):
    """The first command of README says which line holds the logits, and that all of it fits."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA compiler is not installed")
    write_modules(tmp_path)
    done = run_fresh(
        RUN.format(MODULES["nnx-pipeline"]),
        *shlex.split(STEP_OF_THE_READER)[1:],
        folder=tmp_path,
        environment=user_environment(),
    )
    assert done.code == 0, done.err
    assert re.search(r"1,048\.6 .* logits .*examples/my_step\.py:1", done.out), done.out
    assert "of 84.94 GB: fits" in done.out


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Empty before the first command; the others find what it measured, as for a user."""
    return tmp_path_factory.mktemp("cache")


def experiment(cache: Path, *, interrupted_at: str | None = None) -> Ended:
    """An experiment in a process of its own; interrupted where it says that."""
    script = "from nnx_pipeline.lab._cli.console import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + script, *shlex.split(EXPERIMENT)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Nothing else of what conftest.py sets: a user has none of it.
        env={**user_environment(), **QUICKLY, "NNX_PIPELINE_CACHE": str(cache)},
    )
    said = ""
    if interrupted_at:
        for line in process.stderr:
            said += line
            if interrupted_at in line:
                process.send_signal(signal.SIGINT)
                break
    out, err = process.communicate()
    return Ended(process.returncode, out, said + err)


def numbers_in(cache: Path) -> list[Path]:
    """The entries of the cache about compared losses."""
    return [path for path in cache.iterdir() if "max_abs_diff" in path.read_text()]


def test_an_experiment_runs_again_and_again(cache):
    """Interrupted, it keeps what it has measured; run again, it compiles nothing a second time."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA compiler is not installed")
    interrupted = experiment(cache, interrupted_at="comparing losses")
    assert interrupted.code == 130
    assert "compiling for" in interrupted.err
    assert "Traceback" not in interrupted.err
    assert numbers_in(cache) == []
    first = experiment(cache)
    assert first.code == 0, first.err
    assert "same numbers: to" in first.out
    assert "cuda13" in first.out
    assert not re.search("compiling|measuring", first.err)
    (numbers,) = numbers_in(cache)
    written = numbers.stat().st_mtime_ns
    again = experiment(cache)
    assert again.code == 0, again.err
    assert "same numbers: to" in again.out
    assert not re.search("compiling|measuring", again.err)
    assert [path.stat().st_mtime_ns for path in numbers_in(cache)] == [written]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, cache, tmp_path):
    program, *arguments = shlex.split(command)
    assert program == "nnx-pipeline"
    write_modules(tmp_path)
    if "cuda" in command:
        pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA compiler is not installed")
    # The CPU compiler is as fast here as in other tests, but for what then runs for long; TPU
    # figures are those a user has.
    as_a_user = "tpu" in command or command == TRAINING
    environment = user_environment() if as_a_user else os.environ
    done = run_fresh(
        RUN.format(MODULES["nnx-pipeline"]),
        *arguments,
        folder=tmp_path,
        environment={**environment, "NNX_PIPELINE_CACHE": str(cache)},
    )
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    if command == TRAINING:  # from log(128) or more it comes near what the rule leaves to guess
        first, last = map(float, re.findall(r"loss ([\d.]+) at step 1, ([\d.]+) at", done.out)[0])
        assert first > math.log(128)
        assert last < 0.25 * first
    if COMMANDS[command]:
        lines = [line for line in COMMANDS[command].splitlines() if line != "…"]
        if lines[0].split("jax ")[0] in done.out:  # the same compiler
            found = {_without_numbers_of_lines(line) for line in done.out.splitlines()}
            assert [one for one in lines[1:] if _without_numbers_of_lines(one) not in found] == []


def _without_numbers_of_lines(shown: str) -> str:
    """A line of a table, in which numbers of lines of code change with each edit of a file."""
    return " ".join(re.sub(r"(?<=\.py:)\d+|(?<=[‹→] )\d+", "N", shown).split())


@pytest.mark.slow
def test_a_model_learns_the_text_of_this_repository(tmp_path):
    """Better than a bigram model, as the text says, and what it makes are words of that text."""
    for path in (*PAGES, "migration_guide.md"):
        copy = tmp_path / path
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / path).read_text("utf-8"), "utf-8")
    said = []
    for command in TEXTS:
        done = run_fresh(
            RUN.format(MODULES["nnx-pipeline"]),
            *shlex.split(command)[1:],
            folder=tmp_path,
            environment=user_environment(),  # as fast as for a user
        )
        assert done.code == 0, done.err
        said.append(done.out)
    trained, greedy, drawn = said
    loss, bigram = map(float, re.findall(r"([\d.]+) in nats per byte, .* ([\d.]+)\n", trained)[0])
    assert loss < bigram - 0.5
    shown = re.search(r"about ([\d.]+) nats per byte .*?a loss of about ([\d.]+) there", WORDS)
    assert shown is not None
    assert [loss, bigram] == pytest.approx(list(map(float, shown.groups())), abs=0.1)
    assert greedy.startswith("The pipeline")
    assert "\nA microbatch is" in greedy
    assert drawn.startswith("The pipeline")
    assert len(drawn) == len("The pipeline") + 40 + len("\n")
    made = set(re.findall(r"[a-z]{2,}", greedy[len("The pipeline") :]))
    assert made & set(re.findall(r"[a-z]{2,}", TEXT)) - {"microbatch", "is"}


LONGEST_README, MOST_TERMS, LANGUAGES = 150, 25, {"python", "sh", "text", "yaml"}
LINKED = {
    **PAGES,
    **{
        name: (ROOT / name).read_text("utf-8")
        for name in ("migration_guide.md", "CONTRIBUTING.md", "CHANGELOG.md")
    },
}


def test_readme_is_short_and_names_the_pages():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= LONGEST_README
    assert set(PAGES) - {"README.md"} <= set(re.findall(r"\]\((docs/\w+\.md)", readme))
    files = re.findall(r"^\d\. \[([\w/.]+)\]\(\1\)", readme, re.MULTILINE)
    assert len(files) == 6


def test_every_block_is_of_a_kind_that_is_run():
    """Output that is shown below no code is that of the budget, `train`, `explain` and `--try`.

    Their own tests read them: the one below, test_resume.py, test_tries.py and test_explain.py,
    which also makes a dump as the flags of XLA do. The commands and scripts for several hosts
    are no blocks that are run: test_train_processes.py and test_two_processes.py read them and run
    their like. So is the block of commands with addresses of stores: test_object_stores.py runs it.
    """
    assert {block.language for block in BLOCKS} <= LANGUAGES
    alone = [block.text.split()[0] for block in BLOCKS if block.language == "text"]
    flags = 'XLA_FLAGS="--xla_dump_to=dump'
    hosts = ["#!/bin/sh", "host0$", "nnx-pipeline:"]
    others = ["$", "MemoryExceeded:", flags, "change", "from", "line", "pip"]
    assert sorted(alone) == sorted([*hosts, *others])
    shown = sum(1 for block in BLOCKS if block.shown)
    assert TEXT.count("```") == 2 * (len(BLOCKS) + shown)


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", LINKED[page])
    for link in links:
        file, _, anchor = link.partition("#")
        if file.startswith("https://"):
            continue
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.is_file(), link
        if anchor:
            assert anchor in headings(path.read_text("utf-8")), link


def test_commands_are_written_as_they_are_today():
    results = (path.read_text("utf-8") for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    text = "\n".join([*LINKED.values(), *results])
    assert re.findall(r"nnx-pipeline (?:ab|compile)\b", text) == []


def test_terms_are_few_and_each_once():
    terms = [term for term, _ in table("# Glossary", PAGES["docs/glossary.md"])]
    assert 10 <= len(terms) == len(set(terms)) <= MOST_TERMS


def test_the_page_of_fields_is_that_of_the_configs():
    assert PAGES["docs/fields.md"] == field_reference.document()


def test_the_page_of_commands_is_that_of_the_commands():
    assert PAGES["docs/commands.md"] == command_reference.document()
