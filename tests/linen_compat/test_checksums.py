"""What this project writes can be checked to the byte; of the rest, what no training makes."""

import itertools
import json
import re
import shutil
import struct
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import yaml
from maxtext_data import (
    DATA,
    KEPT,
    assert_same_leaves,
    checkpoint,
    config_of,
    full_state,
    lists,
    nested,
    read,
    state_in,
    write,
)

import linen_compat
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats import _intact as checksums
from linen_compat.formats._paths import in_folder
from linen_compat.formats._plausible import suspicion
from linen_compat.formats._streams import Mismatch
from linen_compat.formats.huggingface import _stream as huggingface
from nnx_pipeline import MeshConfig, make_mesh
from nnx_pipeline.lab._files import write_whole

CONFIG = str(DATA / "unscanned" / "config.yml")
LLAMA = DATA.parent / "huggingface" / "llama"
FORMATS = ("maxtext:unscanned", "maxtext:scanned", "maxtext:pipelined", "nnx")
KERNEL = "params/params/decoder/layers_2/self_attention/query/kernel"


def flip(file, place, bit=4):
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("format", FORMATS)
def test_every_chunk_that_is_written_ends_in_its_crc32c(tmp_path, bridge, format):
    stages = ["--stages", "2"] if format == "maxtext:pipelined" else []
    ended = bridge("convert", checkpoint("unscanned"), tmp_path / "out", "--to", format, *stages)
    assert ended.code == 0, ended.err
    base = {"driver": "ocdbt", "base": in_folder(tmp_path / "out")}
    store = ts.KvStore.open(base).result()
    arrays = [key for key in store.list().result() if key.endswith(b"/zarr.json")]
    assert len(arrays) > 30
    for key in arrays:
        codecs = json.loads(store.read(key).result().value)["codecs"]
        assert codecs[-1]["name"] == "crc32c"
    with ocp.PyTreeCheckpointer() as checkpointer:  # which reads it as any other
        assert checkpointer.metadata(tmp_path / "out") is not None
    assert len(read(tmp_path / "out")) == len(arrays)


@pytest.mark.parametrize("format", ["maxtext:scanned", "nnx"])
def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(tmp_path, bridge, format):
    """In arrays, indices and metadata; nothing that was changed is loaded or converted."""
    out = tmp_path / "out"
    source = checkpoint("scanned_params_only_bf16")
    assert bridge("convert", source, out, "--to", format).code == 0
    expected, found = read(out), Counter[Path]()
    files = sorted(path for path in out.rglob("*") if path.is_file())
    places = [(file, n) for file in files for n in range(12)]
    for number, (file, part) in enumerate(places):
        whole = file.read_bytes()
        flip(file, len(whole) * part // 12 + part % 7, bit=number % 8)
        try:
            plan(From(out), To(tmp_path / "b", format)).run(allow_nan=True)
        except Mismatch:
            found[file] += 1
        else:
            assert_same_leaves(read(tmp_path / "b"), expected)
            shutil.rmtree(tmp_path / "b")
        write_whole(str(file), whole)
    # On a slow machine the store leaves files behind that nothing refers to.
    assert len(found) >= 4, found
    assert found.total() > 0.8 * 12 * len(found)


def exchange(folder, first, second):
    """Puts two chunks of one length in each other's place, each with the crc32c that it ends in."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": in_folder(folder)}).result()
    one, other = (store.read(key).result().value for key in (first, second))
    assert len(one) == len(other)
    # On a slow machine the store has written its data in several files: both can be in any of them.
    files = [file for file in folder.rglob("d/*") if file.is_file()]
    whole = b"".join(file.read_bytes() for file in files)
    assert (whole.count(one), whole.count(other)) == (1, 1)
    for file in files:
        content = file.read_bytes()
        places = [(content.find(one), other), (content.find(other), one)]
        for place, value in places:
            if place >= 0:
                content = content[:place] + value + content[place + len(value) :]
        file.write_bytes(content)


def two_of_a_length(folder):
    store = ts.KvStore.open({"driver": "ocdbt", "base": in_folder(folder)}).result()
    found = {}
    for key in store.list().result():
        value = store.read(key).result().value
        content = b"" if b"params.params" not in key or b"zarr.json" in key else value
        other = found.setdefault(len(content), key)
        if len(content) > 1024 and other != key:
            return other, key
    raise AssertionError("no two chunks of one length")


def test_chunks_that_changed_places_are_found_by_all_alike(tmp_path, bridge):
    out, words = tmp_path / "out", ("--to", "maxtext:scanned", "--parameters-only")
    assert bridge("convert", checkpoint("unscanned"), out, *words).code == 0
    exchange(out, *two_of_a_length(out))
    message = r"(params/\S+) in \S+ does not match the checksum that its chunk \d+ was written with"
    mesh = make_mesh(MeshConfig(stage=2, fsdp=2, tensor=2))
    for given in (None, mesh):  # the second reads parts of chunks
        with pytest.raises(Mismatch, match=message):
            linen_compat.load(out, config_of(), mesh=given)
    for ended in (
        bridge("check", out, "--config", CONFIG, "--read"),
        bridge("convert", out, tmp_path / "b", "--to", "nnx"),
    ):
        assert (ended.code, bool(re.search(message, ended.err))) == (1, True), ended.err


@pytest.mark.parametrize("kind", ["of another checkpoint", "a name changed", "checksums lost"])
def test_metadata_belong_to_the_arrays_beside_them(tmp_path, bridge, kind):
    source, own = checkpoint("scanned_params_only_bf16"), tmp_path / "own"
    assert bridge("convert", source, own, "--to", "nnx").code == 0
    file = own / "_METADATA"
    if kind == "of another checkpoint":
        assert bridge("convert", source, tmp_path / "other", "--to", "nnx").code == 0
        shutil.copy(tmp_path / "other" / "_METADATA", file)
    elif kind == "a name changed":
        content = file.read_text()
        file.write_text(content.replace("crc32_of_metadata", "crc32_of_metadatb"))
        assert file.read_text() != content
    else:
        values = json.loads(file.read_text())
        file.write_text(json.dumps({**values, "custom_metadata": {"attention_scale": 1.0}}))
    for words in (
        ("inspect", own),
        ("check", own, "--config", CONFIG, "--read"),
        ("convert", own, tmp_path / "b", "--to", "maxtext:scanned"),
    ):
        ended = bridge(*words)
        assert (ended.code, f"{file} " in ended.err, "damaged" in ended.err) == (1, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral_sharded"])
def test_a_flipped_bit_in_a_folder_of_safetensors(tmp_path, bridge, name):
    out = tmp_path / "out"
    linen_compat.save(linen_compat.load(DATA.parent / "huggingface" / name), out, "huggingface")
    values = json.loads((out / "config.json").read_text())
    config = tmp_path / "own.yml"
    config.write_text(yaml.safe_dump({"model": vars(huggingface.folder_config(out).model)}))
    assert bridge("check", out, "--config", config, "--read").code == 0
    (file,) = sorted(out.glob("*.safetensors"))
    whole = file.read_bytes()
    for at in (len(whole) // 3, len(whole) // 2, len(whole) - 1):
        flip(file, at, bit=0)
        named = r"model\.\S+ in .* does not match the checksum that it was written with|lm_head"
        with pytest.raises(Mismatch, match=named):
            linen_compat.load(out)
        ended = bridge("check", out, "--config", config, "--read")
        assert (ended.code, "written with; restore the folder from" in ended.err) == (1, True)
        assert bridge("convert", out, tmp_path / "b", "--to", "nnx").code == 1
        file.write_bytes(whole)
    (out / "config.json").write_text(json.dumps({**values, "eos_token_id": 3}))
    linen_compat.load(out)  # the model does not depend on it
    (out / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 1e-4}))
    with pytest.raises(Mismatch, match=r"config.json in .* does not match the checksum"):
        linen_compat.load(out)
    (out / checksums.FILE).unlink()
    assert linen_compat.load(out).config.model.norm_epsilon == 1e-4


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"crc32": {}}', '{"crc32": 3, "crc32_of_these": 4}'),
        *([], 5, "x", None),  # whose own checksum is right
        Path("nowhere"),
    ],
)
def test_a_damaged_file_of_checksums(tmp_path, content):
    linen_compat.save(linen_compat.load(LLAMA), tmp_path / "out", "huggingface")
    file = tmp_path / "out" / checksums.FILE
    if isinstance(content, Path):
        file.unlink()
        file.symlink_to(content)
    elif isinstance(content, str) and content != "x":
        file.write_text(content)
    else:
        values = {"crc32": content, "crc32_of_these": checksums.of_values(content)}
        file.write_text(json.dumps(values))
    with pytest.raises(Mismatch, match=f"{checksums.FILE} is damaged; restore the folder"):
        linen_compat.load(tmp_path / "out")


@pytest.mark.parametrize("name", KEPT)
def test_no_false_alarm_on_checkpoints_of_maxtext(bridge, name):
    config = DATA / name / "config.yml"
    for step in sorted(checkpoint(name).iterdir()):
        ended = bridge("check", step, "--config", config, "--read")
        assert ended.code == 0, ended.err


@pytest.mark.parametrize("name", ["llama", "mixtral", "mixtral_fused", "mixtral_sharded"])
def test_no_false_alarm_on_models_of_transformers(tmp_path, bridge, name):
    folder, config = DATA.parent / "huggingface" / name, tmp_path / "own.yml"
    config.write_text(yaml.safe_dump({"model": vars(huggingface.folder_config(folder).model)}))
    ended = bridge("check", folder, "--config", config, "--read")
    assert ended.code == 0, ended.err


def other_bits(value, bit):
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<I", bits ^ (1 << bit)))[0]


def large(array):
    array.reshape(-1)[5] = other_bits(array.reshape(-1)[5], 30)


def zeroed(array):
    array.reshape(-1)[100 : 100 + 128] = 0  # a sector of a disk


def zero(array):
    array[...] = 0


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        (KERNEL, large, "holds a value of magnitude .*, and the median magnitude is"),
        (KERNEL, zeroed, "holds 128 zeros in a row, like a block that was lost"),
        (KERNEL, zero, "holds nothing but zeros"),
        (
            "opt_state/0/mu/params/decoder/decoder_norm/scale",
            large,
            "holds a value of magnitude 1.0e.36, and training does not produce such values",
        ),
        ("params/params/decoder/layers_0/MoeBlock_0/wo", zeroed, "holds 128 zeros in a row"),
        ("params/params/decoder/logits_dense/kernel", zeroed, "holds 1.. zeros in a row"),
    ],
)
def test_what_no_training_makes_is_named_by_read(tmp_path, bridge, leaf, change, message):
    leaves = {name: array.copy() for name, array in full_state().items()}
    change(leaves[leaf])
    write(tmp_path / "items", leaves)
    assert bridge("check", tmp_path, "--config", CONFIG).code == 0
    ended = bridge("check", tmp_path, "--config", CONFIG, "--read", "--json", tmp_path / "found")
    assert ended.code == 1
    assert re.search(f"{leaf} {message}", ended.err), ended.err
    assert "such values suggest a damaged file" in ended.err
    found = json.loads((tmp_path / "found").read_text())
    assert (found["fits"], len(found["problems"])) == (False, 1)


def weights(shape, dtype=np.float32):
    draw = np.random.default_rng(0)
    return (0.02 * draw.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(90, 128), slice(3, 90, 7)])
def test_rows_of_tokens_that_nothing_uses_are_no_alarm(dtype, rows):
    """A vocabulary is padded; a table of tokens has such rows, a head such columns."""
    table = weights((128, 96), dtype)
    table[rows] = 0
    assert suspicion(table, "parameters", rows_may_be_zero=True) is None
    assert suspicion(table.T, "parameters", rows_may_be_zero=True) is None
    assert "zeros in a row" in suspicion(table, "parameters", rows_may_be_zero=False)
    table[5, 10:90] = 0
    assert "80 zeros" in suspicion(table, "parameters", rows_may_be_zero=True)


@pytest.mark.parametrize(("part", "scale"), [*itertools.product(("mu", "nu"), (0.0, 1e-30, 1e3))])
def test_moments_may_be_zero_and_small_and_of_any_spread(part, scale):
    moment = np.abs(weights((64, 64))) * scale
    moment[:32] = 0
    moment[40] *= 1e-20
    assert suspicion(moment, part, rows_may_be_zero=False) is None


def test_long_arrays_are_looked_at_block_by_block():
    array = weights((3 * 2**20,))
    array[2**20 - 30 : 2**20 + 50] = 0  # over the border of two blocks
    assert "80 zeros" in suspicion(array, "parameters", rows_may_be_zero=False)
    array[2**20 - 30 : 2**20 + 50] = 1.0
    array[-1] = 1e5
    assert "magnitude 1.0e+05" in suspicion(array, "parameters", rows_may_be_zero=False)
    assert suspicion(np.zeros(0), "parameters", rows_may_be_zero=False) is None


def test_outliers_as_trained_models_have_them_are_no_alarm():
    array = weights((256, 256))
    array[3, 4], array[5, 6] = 40.0, -90.0
    assert suspicion(array, "parameters", rows_may_be_zero=False) is None


def test_a_scale_is_zero_only_where_there_is_an_offset(tmp_path, bridge):
    zeros = {"rows_may_be_zero": False}
    assert "nothing but zeros" in suspicion(np.zeros(32), "parameters", **zeros)
    assert suspicion(np.zeros(32), "parameters", all_may_be_zero=True, **zeros) is None
    leaves = {k: 0 * v if k.endswith("scale") else v for k, v in state_in("scanned").items()}
    write(tmp_path / "items", leaves)
    offset = tmp_path / "own.yml"
    model = {**vars(config_of().model), "norm_scale_offset": 1.0}
    offset.write_text(yaml.safe_dump({"model": model}))
    for config, code in ((CONFIG, 1), (offset, 0)):
        ended = bridge("check", tmp_path, "--config", config, "--read")
        assert (ended.code, "scale holds nothing but zeros" in ended.err) == (code, bool(code))


def test_a_block_of_zeros_in_a_chunk_that_is_cut_along_the_last_axis(tmp_path, bridge):
    """As a mesh that spreads it leaves an array: the block is scattered over its rows."""
    leaf = "params/params/decoder/layers_1/MoeBlock_0/wi_0"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "items", lists(nested(full_state())))
    folder = tmp_path / "items" / leaf.replace("/", ".")
    array = full_state()[leaf].copy()
    half = array.shape[-1] // 2
    lost = array[..., :half].reshape(-1)
    lost[: lost.size // 2] = 0
    array[..., :half] = lost.reshape(array[..., :half].shape)
    shutil.rmtree(folder)
    layout = {"shape": array.shape, "chunks": [*array.shape[:-1], half], "dtype": "<f4"}
    spec = {"driver": "zarr", "kvstore": in_folder(folder), "metadata": layout}
    ts.open(spec, create=True).result().write(array).result()
    ended = bridge("check", tmp_path, "--config", CONFIG, "--read")
    message = f"{leaf} holds {lost.size // 2} zeros in a row"
    assert (ended.code, message in ended.err) == (1, True), ended.err


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("self_attention/key/kernel", "128 zeros in a row"),
        ("MoeBlock_0/gate/kernel", "128 zeros in a row"),
        ("pre_self_attention_layer_norm/scale", "nothing but zeros"),
    ],
)
def test_a_block_of_zeros_that_is_spread_over_layers(tmp_path, bridge, name, found):
    leaf = f"params/params/decoder/layers/{name}"
    leaves = state_in("scanned")
    leaves[leaf] = np.ascontiguousarray(leaves[leaf])
    start = min(128, leaves[leaf].size - 128)
    leaves[leaf].reshape(-1)[start : start + 128] = 0  # a sector of a disk
    write(tmp_path / "items", leaves)
    ended = bridge("check", tmp_path, "--config", CONFIG, "--read")
    assert (ended.code, f"{leaf} holds {found}" in ended.err) == (1, True), ended.err
