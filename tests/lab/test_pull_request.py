"""What a pull request needs of a comparison: the comment, other tools' JSON, and an exit code."""

import dataclasses
import re
from typing import Any

import pytest
from helpers import Run
from page_examples import TIME, attribution, measurement, outcome

from nnx_pipeline.lab._report.benchmarks import benchmark_json
from nnx_pipeline.lab._report.markdown import LONGEST, MARKER, outcomes_markdown
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.comparison.limit import parse_limit
from nnx_pipeline.lab.comparison.outcome import Outcome, Question, compare_measurements
from nnx_pipeline.lab.errors import InputError

TITLE = "two programs | on one device"


def of_two(factor: float = 1.5, seconds: float | None = 0.05, **changes: Any) -> Outcome:
    """As `compare` of two functions makes it: b holds more, and takes longer."""
    a = dataclasses.replace(measurement(attribution()), time=TIME, device_memory_bytes=10**9)
    time = dataclasses.replace(TIME, step_seconds=seconds)
    b = dataclasses.replace(a, attribution=attribution(factor), time=time, hlo="ENTRY %b")
    heap = b.attribution.heap_bytes if b.attribution else None
    b = dataclasses.replace(b, memory=dataclasses.replace(b.memory, heap_bytes=heap), **changes)
    question = Question(
        name="compare",
        claim="",
        difference="two functions",
        labels=("m:one", "m:o`t|her"),
        judged_by="account",
    )
    return compare_measurements(question, a, b)


def rows_of(text: str) -> list[list[str]]:
    """The cells of all tables, as GitHub divides them: at bars that have no backslash."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_comment() -> None:
    made = of_two()
    text = outcomes_markdown(TITLE, [[made]], link="https://example.org/page", command="a 'b c'")
    first, _, second, *_ = text.splitlines()
    assert first == MARKER
    assert second.startswith("**More memory**: the account rises from ")
    assert "and the estimated step rises from 46.25 ms to 50.00 ms (+8.1%)." in second
    rows = {row[0]: row[1:] for row in rows_of(text)}
    before, after = made.bytes_of("account")
    assert before
    assert after
    change = f"+{megabytes(after - before)}"
    assert rows["account, MB"][:3] == [megabytes(before), megabytes(after), change]
    shares = [f"{size / 10**9:.1%}" for size in (before, after)]
    assert rows["of the 1.0 GB of a device"][:2] == shares
    assert rows["estimated step, ms"] == ["46.25", "50.00", "+3.75", "+8.1%"]
    assert "the step is an estimate; measured steps of" in text
    assert "- b: ``m:o`t\\|her``" in text
    assert "[The page of this comparison](https://example.org/page)" in text
    assert "```sh\na 'b c'\n```" in text
    assert "To try, for what grew:" in text
    assert "- jax.checkpoint, so that" in text
    assert {len(row) for row in rows_of(text)} == {5, 7}, "no name makes a further column"
    assert not re.search(r"<(?!/?(details|summary)>|!-- nnx)", re.sub("`[^`\n]+`", "", text))


def test_lines_that_a_change_touches_come_first() -> None:
    made = of_two(0.9)
    rows = [row for row in rows_of(outcomes_markdown(TITLE, [[made]])) if len(row) == 7][2:]
    assert [row[3] for row in rows] == ["scan carry", "saved residual"]
    role = "saved residual"
    path = f"nnx_pipeline/<b>{role}</b>.py"
    for file, lines, mark in (
        (path, range(1, 2), True),
        (f"<b>{role}</b>.py", range(1, 9), True),
        (path, range(1, 1), True),  # a line was removed there
        (path, range(2, 9), False),
        (f"other/{path}", range(1, 2), False),
    ):
        text = outcomes_markdown(TITLE, [[made]], changed={file: [range(50, 60), lines]})
        rows = [row for row in rows_of(text) if len(row) == 7][2:]
        marked = [row[3] for row in rows if "●" in row[4]]
        assert (marked, rows[0][3]) == (([role], role) if mark else ([], "scan carry"))
        assert ("● lines that the change touches" in text) == mark


def test_several_comparisons_and_the_longest_comment() -> None:
    few = outcomes_markdown(TITLE, [[outcome("stage-shift"), of_two()]])
    assert "**2 comparisons**" in few
    assert few.count("<details>") == few.count("</details>") == 3
    assert "| compare | more memory by the account |" in few
    many = outcomes_markdown(TITLE, [[of_two()] * 60])
    assert len(many) < LONGEST
    shown = many.count("<summary>compare: more memory by the account</summary>")
    assert f"{60 - shown} more are too long for a comment." in many
    assert many.count("<details>") == many.count("</details>") == shown + 1


def test_the_other_kind_of_matrix_products_is_a_comparison_of_its_own() -> None:
    made = of_two()
    assert "**2 comp" not in outcomes_markdown(TITLE, [[made], [made]])
    text = outcomes_markdown(TITLE, [[made], [of_two(0.5)]])
    assert "| compare, cuBLASLt | less memory by the account |" in text


def test_an_arm_that_did_not_compile() -> None:
    broken = compare_measurements(of_two().question, measurement(attribution()), "it @broke <b>")
    text = outcomes_markdown(TITLE, [[broken]])
    assert "**Not applicable, failed**" in text
    assert "did not compile: it `@`broke &lt;b&gt;" in text


def test_words_of_a_verdict_where_nobody_claims_anything() -> None:
    found = {factor: outcomes_markdown(TITLE, [[of_two(factor)]]) for factor in (0.5, 1.0, 1.5)}
    words = [re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)[0] for text in found.values()]
    assert words == ["Less memory", "Same memory", "More memory"]
    assert [of_two(factor).verdict for factor in found] == ["holds", "no effect", "opposite"]
    assert "**Holds by temp**" in outcomes_markdown(TITLE, [[outcome()]])


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("5%", "the account rises from"),
        ("50%", ""),
        ("account=0%", "the account rises from"),
        ("step=8%", "the estimated step rises from 46.250 ms to 50.000 ms (+8.11%)"),
        ("step=8.2%", ""),
        ("heap=60%", ""),
        ("account=1kB", "the account rises from"),
        ("account=1TB", ""),
        ("peak=5%", "the peak is not known"),
    ],
)
def test_a_limit_on_what_is_worse(text: str, broken: str) -> None:
    found = parse_limit("--fail-above", text).broken_by(of_two(), "--fail-above")
    assert found.startswith(f"compare: {broken}") if broken else not found


def test_what_is_not_known_is_worse() -> None:
    limit = parse_limit("--fail-above", "step=1000%")
    time = dataclasses.replace(TIME, is_lower_bound=True)
    assert "is not known" in limit.broken_by(of_two(time=time), "--fail-above")
    assert "is not known" in limit.broken_by(of_two(time=None), "--fail-above")
    assert "is not known" in limit.broken_by(of_two(seconds=None), "--fail-above")
    assert not limit.broken_by(of_two(), "--fail-above")
    assert not parse_limit("--fail-above", "0%").broken_by(of_two(0.9), "--fail-above"), (
        "less is not worse"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5", "--fail-above '5' is no limit; write 5%"),
        ("-5%", "is no limit"),
        ("step=", "is no limit"),
        ("1.2.3%", "is no limit"),
        ("stp=5%", "there is no figure 'stp'; did you mean 'step'?"),
    ],
)
def test_a_limit_that_is_none(text: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        parse_limit("--fail-above", text)


def test_json_of_other_tools() -> None:
    made = of_two()
    assert made.b
    assert made.a
    named = [("m:one, a", made.a), ("m:o`t|her, b", made.b)]
    rows: Any = benchmark_json("github-action-benchmark", named)
    assert {tuple(row) for row in rows} == {("name", "unit", "value", "extra")}
    figures = {row["name"]: (row["value"], row["unit"]) for row in rows}
    assert len(figures) == len(rows) == 2 * 4, "the peak is not known"
    name = "m:o`t|her, b, cuda:h100:8"
    assert figures[f"{name}: step"] == (50.0, "ms")
    account = made.b.memory.account_bytes
    assert account
    assert figures[f"{name}: account"] == (account / 1e6, "MB")
    bencher: Any = benchmark_json("bencher", named)
    assert bencher[name]["account-bytes"] == {"value": account}
    assert bencher[name]["step-seconds"] == {"value": 0.05}
    assert "peak-bytes" not in bencher[name]


def test_names_of_a_history_are_different() -> None:
    made = measurement(attribution())
    kinds = [dataclasses.replace(made, gemm=gemm) for gemm in (None, "triton", "cublas")]
    names: Any = benchmark_json("bencher", [("step", one) for one in kinds])
    assert len(names) == 3


ARGUMENTS = ("--inputs", "own_functions:inputs", "--platform", "cpu")
LEAN = ("compare", "own_functions:lean", "own_functions:lean", *ARGUMENTS)
WORSE = ("compare", "own_functions:lean", "own_functions:scaled", *ARGUMENTS)


def test_a_preset_has_its_name_in_a_history(run: Run) -> None:
    small = ("--set", "model.num_layers=1", "--set", "train.sequence_length=16")
    words = ("compare", "tiny", *small, "--mesh", "data=1", "--platform", "cpu")
    setting = ("--xla-b", "xla_cpu_enable_fast_math=true")
    ended = run(*words, *setting, "--json", "-", "--format", "bencher")
    titles = [name.partition(":")[0] for name in ended.json]
    assert titles == 2 * ["step, one training step of tiny on one device"]


def test_on_the_command_line(run: Run) -> None:
    ended = run(*WORSE, "--json", "-", "--format", "bencher")
    names = [f"{WORSE[1]}, a, cpu", f"{WORSE[2]}, b, cpu"]
    assert list(ended.json) == names
    ended = run(*WORSE, "--markdown", "-")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{MARKER}\n\n**More memory**")
    assert "nnx-pipeline compare own_functions:lean own_functions:scaled" in ended.out
    assert "--markdown" not in ended.out


def test_the_exit_code_of_worse(run: Run) -> None:
    assert run(*LEAN, "--fail-above", "0%").code == 0
    ended = run(*WORSE, "--fail-above", "5%", "--fail-above", "heap=1.2.3%", "--json", "-")
    assert ended.code == 2
    ended = run(*WORSE, "--fail-above", "5%", "--fail-above", "step=10%", "--json", "-")
    assert ended.code == 1
    assert ended.json["experiments"][0]["verdict"] == "opposite"
    (line,) = [line for line in ended.err.splitlines() if line.startswith("nnx-pipeline: ")]
    assert "the account rises" in line
    assert "the estimated step is not known" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "bencher"), "--format bencher is a form of --json; add --json PATH"),
        (("--link", "https://a.b"), "--link https://a.b is put into --markdown; add --markdown"),
        (("--markdown", "-", "--link", "a.b"), "--link a.b is no address of a page"),
        (("--markdown", "-", "--json", "-"), "--json and --markdown both write -"),
        (("--platform", "local", "--markdown", "-"), "cannot be combined"),
    ],
)
def test_options_that_do_not_fit(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run(*LEAN, *arguments)
    assert ended.code == 2
    assert message in ended.err


def test_a_sweep_has_no_comment(run: Run) -> None:
    sweep = ("compare", "tiny", "--sweep", "pipeline.num_microbatches=4,8", "--platform", "cpu")
    ended = run(*sweep, "--fail-above", "5%")
    assert ended.code == 2
    assert "--sweep cannot be combined with --fail-above; leave it out" in ended.err


@pytest.mark.parametrize("form", ["bencher", "github-action-benchmark"])
def test_measure_in_the_form_of_another_tool(run: Run, form: str) -> None:
    ended = run("measure", "own_functions:lean", *ARGUMENTS, "--json", "-", "--format", form)
    assert ended.code == 0, ended.err
    name = "own_functions:lean on one device, cpu"
    if form == "bencher":
        assert ended.json[name]["account-bytes"]["value"] > 0
    else:
        assert ended.json[0]["name"] == f"{name}: account"
