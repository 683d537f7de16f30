"""`fit`: the largest number with which a function or a preset fits, and what is refused."""

import json
import re
import signal
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import LONGEST, Run, script, started

from nnx_pipeline import lab
from nnx_pipeline.lab._report.largest import largest_view
from nnx_pipeline.lab._report.output import as_text
from nnx_pipeline.lab.compile._compiler import bytes_needed, is_too_large
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.largest import Largest, NotUsable, Tried, find_largest
from nnx_pipeline.lab.search.over import MemoryLimit, Over

OWN = """
import jax, jax.numpy as jnp

def f(x):
    return jnp.tanh(x @ x.T) @ x

def inputs(rows=8):
    return jax.ShapeDtypeStruct((rows, 64), "float32")

def same(rows=8):
    return jax.ShapeDtypeStruct((8, 64), "float32")

def nothing():
    return jax.ShapeDtypeStruct((8, 64), "float32")

def eights(rows):
    if rows % 8:
        raise ValueError("rows are not in tiles")
    return inputs(rows)

def fours(x):
    return x.reshape(4, -1, 64).sum(0) @ x.T

def number(rows):
    return inputs(), rows

def some(rows):
    if rows in (900, 905):
        raise ValueError("there are no data of this size")
    return inputs(rows)

def scaled(x, number):
    return x * number

def odd(x):
    if x.shape[0] in (900, 901):
        raise RuntimeError("a kernel for this is missing")
    return f(x)
"""
FIT = ("fit", "own.py:f", "--inputs", "own.py:inputs", "--platform", "cpu")
# A program of few rows: what is needed of n rows is known from a compile of each.
OVER, LIMIT = "rows=1..1000", "1MB"
LIMITS = (LIMIT, LIMIT, "900kB")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path / "cache"))


def function(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x.T) @ x


def inputs(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, 64), "float32")


def needed(rows: int) -> int:
    return lab.measure(function, inputs(rows), platform="cpu").needed_bytes


def test_what_it_says_fits_compiles_under_the_limit_and_the_next_does_not(run: Run) -> None:
    answer = run(*FIT, "--over", OVER, "--limit", LIMIT, "--json", "-").json
    assert needed(answer["largest"]) <= answer["limit"]["bytes"] == 10**6
    assert needed(answer["too_large"]) > 10**6
    assert answer["too_large"] == answer["largest"] + 1
    rows = answer["tried"]
    assert [one["value"] for one in rows] == sorted(one["value"] for one in rows)
    assert all(one["needed_bytes"] == needed(one["value"]) for one in rows)
    assert answer["compiles"] == len(rows) <= 15
    assert (
        lab.fit_largest(function, inputs, OVER, platform="cpu", limit=LIMIT).value
        == (answer["largest"])
    )


def test_the_table_and_what_it_goes_on_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # From one line, which is part of what a program is known by.
    first, again, other = (run(*FIT, "--over", OVER, "--limit", one) for one in LIMITS)
    assert "15 compiles at most; how long one takes is not known yet" in first.err
    assert max(map(len, first.out.splitlines())) <= 80
    shown = " ".join(first.out.split())
    said = r"rows=\d+ fits with ([\d.]+) of (1\.0+) MB; rows=\d+ does not: it needs ([\d.]+) MB"
    sizes = re.search(said, shown)
    assert sizes, shown
    assert float(sizes[1]) < float(sizes[2]) < float(sizes[3]), "as far as they are shown"
    assert "largest in the heap" in shown
    assert "own.py:5" in first.out
    assert "the last such took" in again.err
    assert re.search(r"0 compiles, [4-9] taken from earlier runs", again.out), again.out
    assert re.search(r"[1-4] compiles?, [1-6] taken from earlier runs", other.out), other.out


def test_the_ends_of_a_range(run: Run) -> None:
    whole = run(*FIT, "--over", "rows=8..64:8", "--limit", LIMIT)
    assert (whole.code, "the highest value fits: rows=64" in whole.out) == (0, True)
    one = run(*FIT, "--over", "rows=8..8:100", "--limit", LIMIT)
    assert "checking rows=8..8\n" in one.err
    assert (one.code, "the highest value fits: rows=8" in one.out) == (0, True)
    none = run(*FIT, "--over", "rows=900..990", "--limit", LIMIT)
    assert none.code == 1
    assert re.search(r"rows=900 does not fit: it needs [\d.]+ MB, and the limit is 1\.0", none.err)
    steps = run(*FIT, "--over", "rows=8..1000:8", "--limit", LIMIT, "--json", "-").json
    assert (steps["largest"] % 8, steps["too_large"] - steps["largest"]) == (0, 8)


REFUSED = {
    "--over rows=9..1 --limit 1MB": "the range is empty, as 9 is above 1; write rows=1..9",
    "--over rows --limit 1MB": "is no range of a number; write batch=1..512",
    "--over rows=1..9:0 --limit 1MB": "the step is 0; give 1 or more",
    "--over rows=1..99999999999999999999 --limit 1MB": "has a number above",
    "--over rows=1..1000000000 --limit 1MB": "more than 1,000,000; give a step, such as rows=1..",
    "--over row=1..9 --limit 1MB": "takes no 'row'; did you mean 'rows'?",
    "--over rows=1..9": "the memory of a device of cpu is not known; give bytes",
    "--over rows=1..9 --over rows=1..5 --limit 1MB": "--over rows=1..9 --over rows=1..5: fit "
    "searches one thing; give it once",
    "--over rows=1..9 --limit many": "is no limit of memory; write 95% of a device, or 76GB",
    "--over rows=1..9 --limit 0GB": "leaves nothing",
    "--over rows=1..9 --limit 20ms": "is no limit of memory",
    "--over rows=1..9 --limit 101%": "is no share of a device",
    "--over rows=1..9 --limit 85GB --platform cuda:h100:1": "more than a program may use",
    "--over rows=1..9 --platform cuda:h100:1 --gemm both": "write --gemm triton or --gemm cublas",
    "--over rows=100..200 --limit 1kB": "is below the arguments, 0.0256 MB with rows=100",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_one_line(run: Run, words: str) -> None:
    platform = () if "--platform" in words else FIT[-2:]
    done = run(*FIT[:4], *platform, *words.split())
    assert done.code == 2, done.out
    assert REFUSED[words] in done.err.splitlines()[-1]
    assert (done.out, "Traceback" in done.err) == ("", False)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("own.py:f --inputs own.py:same", 2, "returns the same arguments for rows=1 and rows=99"),
        ("own.py:f --inputs own.py:nothing", 2, "takes no 'rows'; write def nothing.rows.:"),
        ("own.py:f --inputs own.py:eights", 2, "not in tiles .*; write --over rows=8..96:8"),
        ("own.py:fours --inputs own.py:inputs", 1, "cannot reshape .*; write --over rows=4..96:4"),
        (
            "own.py:f --inputs none.py:inputs",
            2,
            "^nnx-pipeline: 'none.py:inputs': there is no file",
        ),
        ("own.py:g --inputs own.py:inputs", 2, "^nnx-pipeline: 'own.py:g': there is no 'g'"),
        ("own.py:f", 2, "needs --inputs MODULE:FUNCTION, a function that takes rows"),
        ("tiny", 2, "there is no config field 'rows'; choose one of: model.vocab_size"),
    ],
)
def test_a_value_that_cannot_be_used(run: Run, words: str, code: int, said: str) -> None:
    done = run("fit", *words.split(), *FIT[-2:], "--over", "rows=1..99", "--limit", LIMIT)
    assert done.code == code, done.err
    assert re.search(said, done.err.splitlines()[-1]), done.err
    assert (done.out, "Traceback" in done.err) == ("", False)


def test_what_memory_may_not_depend_on_is_said(run: Run) -> None:
    words = ("fit", "own.py:scaled", "--inputs", "own.py:number", *FIT[-2:], "--limit", LIMIT)
    done = run(*words, "--over", "rows=1..99")
    assert done.code == 0, done.err
    assert "all 2 programs need the same memory: it may not depend on rows" in done.out
    assert "need the same memory" not in run(*FIT, "--over", OVER, "--limit", LIMIT).out


def test_a_preset_over_a_field_of_its_config(run: Run) -> None:
    words = ("fit", "tiny", "--platform", "cpu", "--mesh", "stage=2", "--limit", "200MB")
    words = (*words, "--set", "model.num_layers=2", "--set", "train.sequence_length=16")
    wrong = run(*words, "--over", "train.global_batch=1..8")
    assert wrong.code == 2
    assert "write --over train.global_batch=2..8:2" in wrong.err.splitlines()[-1]
    twice = run(*words, "--over", "train.global_batch=2..8:2", "--set", "train.global_batch=8")
    assert (twice.code, "leave one of them out" in twice.err) == (2, True)
    right = run(*words, "--over", "train.global_batch=2..8:2", "--json", "-").json
    assert right["largest"] is not None
    assert {one["value"] % 2 for one in right["tried"]} == {0}
    config = [one["result"]["config"]["train"]["global_batch"] for one in right["tried"]]
    assert config == [one["value"] for one in right["tried"]]


def test_what_does_not_compile_is_passed_over(run: Run) -> None:
    words = ("fit", "own.py:odd", *FIT[2:], "--over", "rows=899..905", "--limit", "20MB")
    done = run(*words)
    assert done.code == 0, done.err
    assert "the highest value fits: rows=905" in done.out
    low = run("fit", "own.py:odd", *FIT[2:], "--over", "rows=899..905", "--limit", "3.71MB")
    assert low.code == 0, low.err
    assert "passed over: rows=900: RuntimeError: a kernel for this is missing" in " ".join(
        low.out.split()
    )


def test_a_value_for_which_the_inputs_raise_is_passed_over(run: Run) -> None:
    """Wherever it is but at the beginning, as one for which the function itself does."""
    words = ("fit", "own.py:f", "--inputs", "own.py:some", *FIT[4:], "--over", "rows=899..905")
    for limit, said in (("20MB", "905"), ("3.7MB", "900")):
        done = run(*words, "--limit", limit)
        assert done.code == 0, done.err
        assert f"passed over: rows={said}: own.py:some raised ValueError" in done.out
    low = run(*words[:-1], "rows=900..905", "--limit", "20MB")
    assert (low.code, "rows=900 cannot be used: own.py:some raised" in low.err) == (2, True)


def test_its_help_names_the_matrix_products_that_it_takes(run: Run) -> None:
    shown = " ".join(run("fit", "--help").out.split())
    assert "--gemm triton|cublas What computes" in shown
    assert "here the default is triton" in shown


def limited(size: int) -> MemoryLimit:
    return MemoryLimit(bytes=size, share=None, device_bytes=None)


def test_a_small_share_of_a_device_is_not_0() -> None:
    most = MemoryLimit(bytes=32 * 10**6, share=None, device_bytes=85 * 10**9)
    found = Largest(Over.parse("rows=8..8"), most, "cuda:h100:1")
    found.tried = {8: Tried(value=8, fits=True, needed_bytes=10**6)}
    assert "the limit: 32.0 MB is 0.04% of the 85,000.0" in as_text(largest_view("", found))


def fake(size: int) -> Measurement:
    found = lab.measure(jnp.tanh, jax.ShapeDtypeStruct((size,), "uint8"), platform="cpu")
    assert isinstance(found, Measurement)
    return found


def test_a_compiler_that_runs_out_of_memory_says_that_it_does_not_fit() -> None:
    """Whether or not it has placed the buffers."""
    text = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 19.32G of 15.48G hbm. Exceeded hbm capacity by 3.84G."
    )
    error = jax.errors.JaxRuntimeError(text)
    assert (is_too_large(error), bytes_needed(error)) == (True, round(19.32 * 2**30))
    on_chip = jax.errors.JaxRuntimeError(text.replace("space hbm", "space vmem"))
    assert (is_too_large(on_chip), bytes_needed(on_chip)) == (False, None)
    assert not is_too_large(ValueError(text))

    def make(value: int) -> Measurement:
        if value > 70:
            raise error
        return lab.measure(function, inputs(value), platform="cpu")

    found = Largest(Over.parse("rows=1..100"), limited(10**9), "cpu")
    find_largest(found, make, Effort(what="", most=0))
    assert found.bracket == (70, 71)
    assert found.tried[71].needed_bytes == round(19.32 * 2**30)


def test_too_many_that_do_not_compile_end_the_search() -> None:
    def make(value: int) -> Measurement:
        if value > 1:
            raise RuntimeError("no")
        return lab.measure(function, inputs(value), platform="cpu")

    found = Largest(Over.parse("rows=1..100"), limited(10**9), "cpu")
    with pytest.raises(NotUsable, match="RuntimeError: no"):
        find_largest(found, make, Effort(what="", most=0))
    assert len(found.passed_over) == 4


def test_limits() -> None:
    h100 = Platform.parse("cuda:h100:1")
    size = h100.memory_bytes()
    assert size is not None
    share = MemoryLimit.parse("95%", h100)
    assert share == MemoryLimit(bytes=int(0.95 * size), share=0.95, device_bytes=size)
    assert share.kept_back == size - share.bytes
    assert MemoryLimit.parse("70GiB", h100).bytes == 70 * 2**30
    with pytest.raises(InputError, match="is no range"):
        lab.fit_largest(function, inputs, "rows", platform="cpu", limit="1MB")
    with pytest.raises(InputError, match="rows=1 cannot be used"):
        lab.fit_largest(lambda x: x["no"], inputs, OVER, platform="cpu", limit="1MB")


def test_an_interruption_shows_what_there_is(tmp_path: Path) -> None:
    code = f"""
import time
from nnx_pipeline.lab._cli import fitted
real = fitted.measure
def slowly(*arguments, **options):
    time.sleep(1)
    return real(*arguments, **options)
fitted.measure = slowly
{script("nnx_pipeline")}"""
    words = (*FIT, "--over", OVER, "--limit", LIMIT, "--json", "x.json")
    environment = {"stdout": subprocess.PIPE}
    with started(tmp_path, code, *words, **environment) as process:
        for line in process.stderr:
            if " 3 of at most" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    assert "run the same command again to continue" in err.splitlines()[-1]
    assert "so far rows=" in out
    assert "the search is not finished" in out
    answer = json.loads((tmp_path / "x.json").read_text())
    assert answer["ended"] is None
    assert len(answer["tried"]) >= 2


def test_the_json_is_whole(run: Run, tmp_path: Path) -> None:
    done = run(*FIT, "--over", "rows=8..64:8", "--limit", LIMIT, "--json", "x.json")
    assert done.code == 0
    answer = json.loads((tmp_path / "x.json").read_text())
    assert answer["over"] == {"name": "rows", "low": 8, "high": 64, "step": 8}
    assert answer["too_large"] is None
    assert answer["limit"] == {
        "bytes": 10**6,
        "share": None,
        "device_memory_bytes": None,
        "kept_back_bytes": None,
    }
