"""`linen-compat convert`: from any format to any other, and what it refuses."""

import itertools
import os
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import script, user_environment
from huggingface_reference import FOLDER
from maxtext_data import (
    DATA,
    assert_same_leaves,
    checkpoint,
    full_state,
    read,
    state_in,
    write,
)

import linen_compat
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.checkpoints._named_config import read_config
from linen_compat.formats._orbax.stream import OrbaxSource
from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats.huggingface._folder import TensorFolder

CONFIG = str(DATA / "unscanned" / "config.yml")
TARGETS = {
    "maxtext:unscanned": [],
    "maxtext:scanned": [],
    "maxtext:pipelined": ["--stages", "2", "--repeats", "2"],
    "nnx": [],
}
FIRST = ("params/params/decoder/layers_2/MoeBlock_0/wi_1", (1, 2, 3))


# A walk from format to format that takes each of the 16 pairs once.
WALK = (
    *("maxtext:unscanned", "maxtext:unscanned"),
    *("maxtext:scanned", "maxtext:scanned", "maxtext:unscanned"),
    *("maxtext:pipelined", "maxtext:pipelined", "maxtext:scanned", "maxtext:pipelined"),
    *("maxtext:unscanned", "nnx", "nnx", "maxtext:scanned", "nnx"),
    *("maxtext:pipelined", "nnx", "maxtext:unscanned"),
)


def changing(monkeypatch, file):
    """The file is written again, with as many bytes, when the third array is read."""
    count = itertools.count()

    def change(read):
        def reads(*args, **kwargs):
            if next(count) == 3:
                file.write_bytes(file.read_bytes())
            return read(*args, **kwargs)

        return reads

    for kind in (TensorFolder, OrbaxSource):
        monkeypatch.setattr(kind, "read", change(kind.read))


@pytest.mark.parametrize("form", ["huggingface", "maxtext"])
@pytest.mark.parametrize("how", ["load", "convert", "check"])
def test_a_source_that_changes_while_it_is_read(tmp_path, bridge, monkeypatch, form, how):
    source = shutil.copytree(
        FOLDER / "mixtral" if form == "huggingface" else checkpoint("unscanned") / "2" / "items",
        tmp_path / "source",
    )
    kept = CONFIG if form == "maxtext" else str(source)
    config, out = read_config(kept), tmp_path / "out"
    large = max((path for path in source.rglob("*") if path.is_file()), key=os.path.getsize)
    changing(monkeypatch, large)
    said = f"{re.escape(str(large))} changed while it was read; read it again"
    if how == "load":
        with pytest.raises(Mismatch, match=said):
            linen_compat.load(source, config)
        return
    last = ["--read"] if how == "check" else [out, "--to", "maxtext:scanned"]
    ended = bridge(how, source, *last, "--config", kept)
    assert (ended.code, bool(re.search(said, ended.err)), out.exists()) == (1, True, False)


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "tokenizer.json", "adapter_model.safetensors"]
)
def test_a_file_beside_the_source_that_is_not_read_may_change(tmp_path, bridge, monkeypatch, name):
    source = shutil.copytree(FOLDER / "mixtral_sharded", tmp_path / "source")
    (source / name).write_text("{}")
    changing(monkeypatch, source / name)
    ended = bridge("convert", source, tmp_path / "out", "--to", "nnx")
    assert ended.code == 0, ended.err
    shard = min(source.glob("model-*.safetensors"))  # and what is read may not
    changing(monkeypatch, shard)
    with pytest.raises(Mismatch, match=f"{shard.name} changed while it was read"):
        linen_compat.load(source)


@pytest.mark.slow
def test_from_every_format_into_every_format_to_the_bit(tmp_path, bridge):
    """Parameters, moments, counts and step, on a walk that comes by every known state again."""
    assert {*itertools.pairwise(WALK)} == {*itertools.product(TARGETS, TARGETS)}
    expected = {
        "maxtext:unscanned": full_state(),
        "maxtext:scanned": state_in("scanned"),
        "maxtext:pipelined": state_in("pipelined", 2, 2),
    }
    source = checkpoint("unscanned") / "2"
    for number, (before, after) in enumerate(itertools.pairwise(WALK)):
        into = tmp_path / str(number)
        ended = bridge("convert", source, into, "--from", before, "--to", after, *TARGETS[after])
        assert ended.code == 0, ended.err
        if after in expected:
            assert_same_leaves(read(into), expected[after])
        source = into


def test_bfloat16_stays_and_what_is_left_behind_is_listed(tmp_path, bridge):
    source = checkpoint("scanned_params_only_bf16")
    ended = bridge(
        "convert", source, tmp_path / "out", "--to", "maxtext:unscanned", "--config", CONFIG
    )
    assert ended.code == 0, ended.err
    found = read(tmp_path / "out")
    assert {str(leaf.dtype) for leaf in found.values()} == {"bfloat16", "int64"}
    ended = bridge("convert", checkpoint("scanned_nnx"), tmp_path / "b", "--to", "maxtext:scanned")
    assert "left behind: nnx_aux/model/decoder" in " ".join(ended.out.split())
    assert "(24 in all)" in " ".join(ended.out.split())


def test_to_hugging_face_and_back(tmp_path, bridge):
    source = checkpoint("unscanned")
    to = ["--to", "huggingface"]
    assert bridge("convert", source, tmp_path / "hf", *to, "--config", CONFIG).code == 0
    ended = bridge("convert", tmp_path / "hf", tmp_path / "back", "--to", "maxtext:unscanned")
    assert ended.code == 0, ended.err
    expected = {k: v for k, v in full_state().items() if k.startswith("params/")}
    found = read(tmp_path / "back")
    for name, leaf in expected.items():
        if name.endswith("query/kernel"):
            np.testing.assert_array_max_ulp(found[name], leaf, 1)
        else:
            np.testing.assert_array_equal(found[name], leaf, err_msg=name)
    ended = bridge("convert", source, tmp_path / "none", *to)
    assert ended.code == 2
    assert "--to huggingface needs --config" in ended.err


def test_one_array_of_one_layer_at_a_time(tmp_path, monkeypatch):
    read_array, sizes = OrbaxSource.read, []

    def spy(self, *arguments, **options):
        array = read_array(self, *arguments, **options)
        sizes.append(array.nbytes)
        return array

    monkeypatch.setattr(OrbaxSource, "read", spy)
    prepared = plan(From(checkpoint("scanned_nnx")), To(tmp_path / "out", "maxtext:unscanned"))
    prepared.run()
    largest_of_a_layer = ArraySpec((4, 32, 64), np.dtype(np.float32)).nbytes
    assert max(sizes) == largest_of_a_layer
    assert sum(sizes) == prepared.nbytes


@pytest.mark.parametrize("wide", ["params/", "opt_state/"])
def test_the_bytes_to_be_copied_are_those_of_each_part(tmp_path, wide):
    """Parameters and moments may be stored in different dtypes."""
    leaves = {
        name: leaf if name.startswith(wide) or not leaf.ndim else leaf.astype(ml_dtypes.bfloat16)
        for name, leaf in full_state().items()
    }
    prepared = plan(From(write(tmp_path / "in", leaves)), To(tmp_path / "out", "nnx"))
    copied = []
    prepared.run(progress=lambda name, nbytes: copied.append(nbytes))
    assert sum(copied) == prepared.nbytes
    assert prepared.nbytes == sum(leaf.nbytes for leaf in leaves.values() if leaf.ndim)


def damaged(tmp_path, leaf, place, value):
    leaves = full_state()
    array = leaves[leaf].copy()
    array[place] = value
    return write(tmp_path / "items", {**leaves, leaf: array})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("leaf", "place"), [FIRST, ("opt_state/0/nu/params/decoder/decoder_norm/scale", 3)]
)
def test_nan_is_refused_by_name(tmp_path, bridge, leaf, place, value):
    source, out = damaged(tmp_path, leaf, place, value), tmp_path / "run" / "out"
    ended = bridge("convert", source, out, "--to", "nnx")
    assert ended.code == 1
    assert f"{leaf} holds NaN or infinity in 1 of" in ended.err
    assert not out.parent.exists()
    assert bridge("convert", source, out, "--to", "maxtext:unscanned", "--allow-nan").code == 0
    np.testing.assert_array_equal(read(out)[leaf][place], value)


def change(leaves, **changes):
    """Leaves without those whose value is None, and with others."""
    return {k: v for k, v in {**leaves, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FIRST[0]: None}, f"{FIRST[0]} is missing"),
        ({FIRST[0]: np.zeros((4, 32, 65), np.float32)}, f"{FIRST[0]} is [4, 32, 65] instead of"),
        ({"params/params/decoder/other": np.zeros(3)}, "decoder/other has no place"),
        ({FIRST[0]: np.zeros((4, 32, 64), np.float16)}, "can only have one dtype"),
    ],
)
def test_a_checkpoint_that_is_not_consistent_in_itself(tmp_path, bridge, changes, message):
    write(tmp_path / "items", change(full_state(), **changes))
    ended = bridge("convert", tmp_path, tmp_path / "out", "--to", "maxtext:scanned")
    assert ended.code == 1
    assert message in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["items"]


def test_the_cure_for_layers_of_two_dtypes_works(tmp_path, bridge):
    half = np.asarray(full_state()[FIRST[0]], np.float16)
    write(tmp_path / "items", change(full_state(), **{FIRST[0]: half}))
    ended = bridge("convert", tmp_path, tmp_path / "out", "--to", "maxtext:scanned")
    assert "use linen_compat.load, which casts to model.param_dtype, and linen_compat" in ended.err
    config = linen_compat.config_from_maxtext(CONFIG)
    linen_compat.save(linen_compat.load(tmp_path, config), tmp_path / "out")
    layers = read(tmp_path / "out")["params/params/decoder/layers/MoeBlock_0/wi_1"]
    np.testing.assert_array_equal(layers[:, 2], half.astype(np.float32))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "maxtext:scanned", "--from", "maxtext:unscanned"],
        ["--to", "maxtext:pipelined", "--stages", "2"],
        ["--to", "huggingface", "--config", CONFIG],
    ],
)
def test_what_these_errors_ask_for_works(tmp_path, bridge, arguments):
    assert bridge("convert", checkpoint("unscanned"), tmp_path / "out", *arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "maxtext:scan"], 2, "did you mean 'maxtext:scanned'"),
        (["--to", "nnx", "--from", "orbax"], 2, "--from='orbax' is not known"),
        (["--to", "nnx", "--from", "maxtext:scanned"], 1, "is maxtext:unscanned; pass --from"),
        (["--to", "maxtext:pipelined"], 2, "needs --stages"),
        (["--to", "maxtext:pipelined", "--stages", "3"], 2, "do not split into 3 stages"),
        (["--to", "maxtext:scanned", "--stages", "2"], 2, "leave them out"),
        (["--to", "huggingface", "--repeats", "2"], 2, "leave them out"),
        (["--to", "nnx", "--config", "no.yml"], 2, "neither a file nor a preset"),
        (["--to", "nnx", "--config", "tiny"], 1, "does not fit"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, bridge, arguments, code, message):
    ended = bridge("convert", checkpoint("unscanned"), tmp_path / "out", *arguments)
    assert (ended.code, len(ended.err.strip().splitlines())) == (code, 1)
    assert message in ended.err
    assert not list(tmp_path.iterdir())


def test_a_destination_that_is_there(tmp_path, bridge):
    (tmp_path / "notes.txt").write_text("mine")
    ended = bridge("convert", checkpoint("unscanned"), tmp_path, "--to", "nnx")
    assert ended.code == 2
    assert "exists already" in ended.err


@pytest.mark.parametrize("name", ["/dev/null/x", "/proc/x", "file/x", ""])
def test_a_destination_that_cannot_be(tmp_path, bridge, name):
    """The name is the one that was given, and none of our own."""
    (tmp_path / "file").touch()
    given = str(tmp_path / name) if name else name
    ended = bridge("convert", checkpoint("scanned_params_only_bf16"), given, "--to", "nnx")
    message = f"{given} cannot be made" if name else "the destination's name is empty"
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert not re.search(r"incomplete|Errno", ended.err)


def test_a_destination_by_way_of_a_folder_that_is_not_there(tmp_path, bridge):
    """What `..` takes back is not made."""
    source, given = checkpoint("scanned_params_only_bf16"), tmp_path / "none" / ".." / "out"
    assert bridge("convert", source, given, "--to", "nnx").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_source(tmp_path, bridge):
    for source in (tmp_path, tmp_path / "none"):
        ended = bridge("convert", source, tmp_path / "out", "--to", "nnx")
        assert ended.code == 2


def test_a_link_is_no_destination(tmp_path, bridge):
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    source = checkpoint("scanned_params_only_bf16")
    ended = bridge("convert", str(source), str(tmp_path / "out"), "--to", "maxtext:unscanned")
    assert (ended.code, "is a symlink" in ended.err) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("linen-compat", {}, "glibc.malloc.hugetlb=1"),
        ("linen-compat", {"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0"),
        ("mine.py", {}, "None"),
    ],
)
def test_pages_of_2_mb(tmp_path, name, given, told):
    """The installed command asks glibc for them, unless somebody has told glibc something else; a
    program that calls it is not begun anew."""
    program = tmp_path / name
    ask = "import os; print(os.environ.get('GLIBC_TUNABLES'))"
    program.write_text(f"{ask}\n{script('linen_compat')}")
    command = [sys.executable, str(program), "convert", "--help"]
    said = subprocess.check_output(command, env={**user_environment(), **given}, text=True)
    assert f"{told}\nUsage: linen-compat convert" in said
