"""The file of memory budgets, and what exceeds one."""

import tomllib
from pathlib import Path
from platform import machine

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.pytest_plugin import _budgets as budgets
from nnx_pipeline.lab.pytest_plugin._budgets import Change, Key

STEP = Key("tests/test_a.py::test_step", "", "tpu:v5p:2x2x2", "jaxlib 1.0, libtpu 2.0")
FIGURES = {"temp_bytes": 1_000, "heap_bytes": 900, "peak_bytes": 2_000}

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
KEYS = st.builds(Key, TEXTS, st.one_of(st.just(""), TEXTS), TEXTS, TEXTS)
ANY_BYTES = st.dictionaries(st.sampled_from(budgets.BYTES), st.integers(0, 10**15))
# As `figures_of` rounds them: whole nanoseconds.
ANY_SECONDS = st.dictionaries(
    st.sampled_from(budgets.SECONDS), st.integers(0, 10**12).map(lambda ns: round(ns / 1e9, 9))
)
ANY_FIGURES = st.builds(lambda sizes, times: {**sizes, **times}, ANY_BYTES, ANY_SECONDS)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, ANY_FIGURES, max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, given: dict) -> None:
    path = tmp_path_factory.mktemp("budgets") / budgets.FILE
    budgets.write_budgets(path, given)
    assert budgets.read_budgets(path) == given
    in_another_order = dict(reversed(given.items()))
    assert budgets.to_toml(in_another_order) == path.read_text(encoding="utf-8")


def test_the_text() -> None:
    other = STEP._replace(name="small", platform="cpu", compiler="jaxlib 1.0")
    text = budgets.to_toml({other: {"temp_bytes": 5}, STEP: {**FIGURES, "step_seconds": 1.2e-5}})
    assert text == (
        "# Budgets of tests, per device: bytes as a compiler of this version gave them, and the "
        "seconds of a\n"
        "# step as estimated from the program that it made.\n"
        "# Written by `pytest --update-memory-budgets`; comments are not kept.\n"
        "\n"
        "[[budget]]\n"
        'test = "tests/test_a.py::test_step"\n'
        'platform = "tpu:v5p:2x2x2"\n'
        'compiler = "jaxlib 1.0, libtpu 2.0"\n'
        "temp_bytes = 1_000\n"
        "heap_bytes = 900\n"
        "peak_bytes = 2_000\n"
        "step_seconds = 0.000012000\n"
        "\n"
        "[[budget]]\n"
        'test = "tests/test_a.py::test_step"\n'
        'name = "small"\n'
        'platform = "cpu"\n'
        'compiler = "jaxlib 1.0"\n'
        "temp_bytes = 5\n"
    )
    assert len(tomllib.loads(text)["budget"]) == 2


def test_no_file_is_no_budget(tmp_path: Path) -> None:
    assert budgets.read_budgets(tmp_path / budgets.FILE) == {}


ENTRY = '[[budget]]\ntest = "a"\nplatform = "cpu"\ncompiler = "jaxlib 1"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[budget]\n", "cannot be read: .*line 1"),
        ("[budget]\na = 1\n", r"holds \[\[budget\]\] entries only and has 'budget'"),
        ("[[budgets]]\ntest = 1\n", r"holds \[\[budget\]\] entries only and has 'budgets'"),
        ("budget = [3]\n", "budget 1 is 3 and not a table"),
        ('[[budget]]\ntest = "a"\n', "budget 1 has no 'compiler'"),
        (ENTRY.replace('"cpu"', "3"), "budget 1 has platform = 3; strings are"),
        (f'{ENTRY}temp_bytes = "3"\n', "budget 1 has temp_bytes = '3'"),
        (f"{ENTRY}temp_bytes = -3\n", "budget 1 has temp_bytes = -3"),
        (f"{ENTRY}temp_bytes = true\n", "budget 1 has temp_bytes = True"),
        (f"{ENTRY}temp = 3\n", "budget 1 has temp = 3; .*whole numbers of bytes are temp_bytes"),
        (f"{ENTRY}temp_bytes = 3.0\n", "budget 1 has temp_bytes = 3.0"),
        (f"{ENTRY}step_seconds = -0.1\n", "budget 1 has step_seconds = -0.1; .*number of seconds"),
        (f"{ENTRY}step_seconds = nan\n", "budget 1 has step_seconds = nan"),
        (f"{ENTRY}step_seconds = inf\n", "budget 1 has step_seconds = inf"),
        (f"{ENTRY}step_seconds = true\n", "budget 1 has step_seconds = True"),
        (f'{ENTRY}step_seconds = "3"\n', "budget 1 has step_seconds = '3'"),
        (ENTRY * 2, "budget 2 is a second one for a on cpu"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / budgets.FILE
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        budgets.read_budgets(path)
    assert str(path) in str(error.value)
    assert str(error.value).endswith("delete it and run `pytest --update-memory-budgets`")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / budgets.FILE
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        budgets.read_budgets(path)


def test_above_and_below() -> None:
    measured = {"temp_bytes": 1_011, "heap_bytes": 908, "peak_bytes": 1_000}
    assert budgets.above(measured, FIGURES, 0.01) == [Change("temp_bytes", 1_000, 1_011)]
    assert budgets.above(measured, FIGURES, 0.02) == []
    assert budgets.below(measured, FIGURES, 0.01) == [Change("peak_bytes", 2_000, 1_000)]
    assert budgets.above(measured, {}, 0) == []


def test_an_entry_without_a_time_is_not_checked_on_it() -> None:
    """As entries are that an older version wrote, and one of a step that has become too long."""
    slow = {**FIGURES, "step_seconds": 2.0}
    assert budgets.above(slow, FIGURES, 0) == budgets.below(slow, FIGURES, 0) == []
    limit = {**FIGURES, "step_seconds": 1.9}
    assert budgets.above(slow, limit, 0.01) == [Change("step_seconds", 1.9, 2.0)]
    assert budgets.above(slow, limit, 0.06) == []


def test_a_figure_that_is_no_more_given_exceeds_its_budget() -> None:
    measured = {**FIGURES, "heap_bytes": None}
    (change,) = budgets.above(measured, FIGURES, 0.01)
    assert str(change) == "heap has a budget of 900 bytes and the compiler gives no figure"
    assert budgets.below(measured, FIGURES, 0.01) == []


def test_changes_in_words() -> None:
    above = "temp 1,500 bytes is 500 (+50.0%) above its budget of 1,000"
    assert str(Change("temp_bytes", 1_000, 1_500)) == above
    assert str(Change("peak_bytes", 1_000, 900)).endswith("100 (-10.0%) below its budget of 1,000")
    assert str(Change("heap_bytes", 0, 9)) == "heap 9 bytes is 9 above its budget of 0"
    slower = "estimated step 1.500 ms is 0.600 (+66.7%) above its budget of 0.900"
    assert str(Change("step_seconds", 9e-4, 1.5e-3)) == slower
    shorter = "estimated step 12.000 µs is 3.000 (-20.0%) below its budget of 15.000"
    assert str(Change("step_seconds", 1.5e-5, 1.2e-5)) == shorter
    unknown = "estimated step has a budget of 2,000.000 ms and there is no estimate"
    assert str(Change("step_seconds", 2.0, None)) == unknown


VERSIONS = {"jaxlib": "1.0", "libtpu": "2.0", "jax-cuda13-pjrt": "1.0.1", "flax": "3.0"}


@pytest.mark.parametrize(
    ("platform", "compiler"),
    [
        ("cpu", f"jaxlib 1.0, {machine()}"),
        ("tpu:v5p:2x2x2", "jaxlib 1.0, libtpu 2.0"),
        ("cuda:h100:8", "jaxlib 1.0, jax-cuda13-pjrt 1.0.1"),
    ],
)
def test_compilers(platform: str, compiler: str) -> None:
    assert budgets.compiler_of(platform, VERSIONS) == compiler


def test_the_devices_of_a_machine_have_no_budget() -> None:
    with pytest.raises(InputError, match=r"'local' cannot have a budget.*tpu:v5p:2x2x2"):
        budgets.compiler_of("local", VERSIONS)


def test_an_update_keeps_what_it_knows_nothing_of() -> None:
    older = STEP._replace(compiler="jaxlib 0.9, libtpu 1.0")
    unasked = STEP._replace(name="unasked")
    elsewhere = STEP._replace(platform="cpu")
    other, gone = STEP._replace(test="tests/test_b.py::test"), STEP._replace(test="c.py::test")
    old = {key: {"temp_bytes": 1} for key in (STEP, older, unasked, elsewhere, other, gone)}
    new = budgets.updated(old, {STEP.test: {STEP: FIGURES}}, lambda test: test == gone.test)
    assert new == {STEP: FIGURES, older: {"temp_bytes": 1}, other: {"temp_bytes": 1}}
    assert budgets.same_elsewhere(old, STEP) == [older.compiler]


def test_a_test_that_asks_for_nothing_has_no_budget() -> None:
    assert budgets.updated({STEP: FIGURES}, {STEP.test: {}}, lambda test: False) == {}
