"""Folders of safetensors that are not what they should be, and files as the library writes them."""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import replace
from huggingface_reference import FOLDER
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from linen_compat import load, save
from linen_compat.formats._streams import ArraySpec, Mismatch, not_finite
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.formats.huggingface._folder import NewTensorFolder, TensorFolder
from linen_compat.formats.huggingface._stream import HuggingFaceDestination, HuggingFaceSource
from linen_compat.formats.huggingface.config import config_from_huggingface
from nnx_pipeline import InputError
from nnx_pipeline.lab.errors import Note

QUERY = "model.layers.2.self_attn.q_proj.weight"
Damage = Callable[[Path], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of one file, to be damaged."""
    return Path(shutil.copytree(FOLDER / "mixtral", tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of several files with an index, to be damaged."""
    return Path(shutil.copytree(FOLDER / "mixtral_sharded", tmp_path / "sharded"))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Writes the one file of a folder again, with other tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def as_renamed(tensors: dict[str, np.ndarray]) -> None:
    tensors[QUERY.replace("q_proj", "query_proj")] = tensors.pop(QUERY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUERY), f"{QUERY} is missing"),
        (lambda t: t.update(other=t[QUERY]), "other has no place in the model"),
        (
            as_renamed,
            f"{QUERY} is missing .the checkpoint has 'model.layers.2.self_attn.query_proj.weight'",
        ),
        (lambda t: t.update({QUERY: t[QUERY].T.copy()}), rf"{QUERY} is \[16, 24\] instead of \[24"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int32)}), f"{QUERY} in .* has dtype I32"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.float16)}), f"{QUERY} is float16 and"),
    ],
)
def test_tensors_that_do_not_fit_are_named(model: Path, change: Any, message: str) -> None:
    change_tensors(model, change)
    with pytest.raises(Mismatch, match=message):
        load(model)


def test_buffers_of_old_versions_are_ignored(model: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(model, lambda tensors: tensors.update({name: np.ones(3, np.float32)}))
    comparison = huggingface.compare_folder(model, config_from_huggingface(model).model)
    assert comparison.ignored == [name]
    assert not comparison.problems
    load(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 48}, r"model.embed_tokens.weight is \[24, 16\] instead of \[48, 16\]"),
        ({"num_layers": 5}, r"num_layers=4, the model 5; model.layers.4.self_attn.* is missing"),
        ({"num_layers": 3}, r"num_layers=4, the model 3; model.layers.3.* has no place"),
        ({"num_experts": 2}, r"num_experts=4, the model 2; .*gate.weight is \[4, 16\] instead of"),
        ({"num_heads": 8, "head_dim": 3 * 2}, r"config.json has num_heads=4, the model 8"),
        ({"rope_theta": 1e4}, r"config.json has rope_theta=100.0, the model 10000.0"),
        ({"norm_epsilon": 1e-6}, r"config.json has norm_epsilon=1e-05, the model 1e-06"),
        ({"num_experts_per_token": 1}, r"config.json has num_experts_per_token=2, the model 1"),
        ({"norm_scale_offset": 1.0}, r"config.json has norm_scale_offset=0.0, the model 1.0"),
        ({"sliding_window": 5}, r"config.json has sliding_window=None, the model 5"),
        ({"logits_soft_cap": 30.0}, r"config.json has logits_soft_cap=None, the model 30.0"),
    ],
)
def test_another_config_than_that_of_the_folder(changes: dict, message: str) -> None:
    own = config_from_huggingface(FOLDER / "mixtral")
    with pytest.raises(Mismatch, match=message):
        load(FOLDER / "mixtral", replace(own, "model", **changes))


def test_the_comparison_lists_what_will_be_cast() -> None:
    own = config_from_huggingface(FOLDER / "mixtral_sharded")
    model = replace(own, "model", param_dtype="float32").model
    comparison = huggingface.compare_folder(FOLDER / "mixtral_sharded", model)
    assert len(comparison.recast) == len(comparison.matched) == 4 * 19 + 3
    assert {(d.found, d.expected) for d in comparison.recast} == {("bfloat16", "float32")}


def test_a_llama_is_no_mixtral(model: Path) -> None:
    shutil.copy(FOLDER / "llama" / "model.safetensors", model)
    with pytest.raises(
        Mismatch,
        match=r"layers.0.block_sparse_moe.\S* is missing .the checkpoint has 'model.layers.0.mlp",
    ):
        load(model)


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


@pytest.mark.parametrize("length", [0, 4, 500, 50_000])
def test_a_truncated_file_is_named(model: Path, length: int) -> None:
    cut(model / "model.safetensors", length)
    with pytest.raises(
        Mismatch, match=r"model/model.safetensors is damaged or is not a safetensors"
    ):
        load(model)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    cut(sharded / "model-00002-of-00003.safetensors", 9000)
    with pytest.raises(Mismatch, match=r"model-00002-of-00003.safetensors is damaged"):
        load(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(Mismatch, match=r"model-00003-of-00003.safetensors is missing; it holds "):
        load(sharded)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), f"{INDEX} has no weight_map"),
        (lambda index: index["weight_map"].update(x="../x"), f"{INDEX} places x in '../x'"),
        (lambda index: index["weight_map"].pop(QUERY), f"{QUERY} is in .* does not place it there"),
        (
            lambda index: index["weight_map"].update({"x": "model-00001-of-00003.safetensors"}),
            f"x is not in .*model-00001-of-00003.safetensors, where {INDEX} places it",
        ),
    ],
)
def test_a_wrong_index_is_named(sharded: Path, change: Any, message: str) -> None:
    change_json(sharded / INDEX, change)
    with pytest.raises(Mismatch, match=message):
        load(sharded)


def test_a_broken_index_is_named(sharded: Path) -> None:
    cut(sharded / INDEX, 100)
    with pytest.raises(InputError, match=f"{INDEX} cannot be read as JSON"):
        load(sharded)


def test_a_folder_without_safetensors(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"holds neither model.safetensors nor model.safetensors"):
        load(model)


def test_a_folder_that_is_not_empty_is_not_written_to(model: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        save(load(model), model, "huggingface")


@pytest.mark.parametrize("when", ["begin", "write", "commit"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    where = {"begin": (NewTensorFolder, "_begin"), "write": (NewTensorFolder, "write")}
    monkeypatch.setattr(*where.get(when, (HuggingFaceDestination, "commit")), fail)
    with pytest.raises(OSError, match="no space"):
        save(load(FOLDER / "llama"), tmp_path / "new" / "model", "huggingface")
    assert not list(tmp_path.rglob("*model*"))


def test_a_value_that_is_no_number_is_named(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors[QUERY].__setitem__((0, 0), np.nan))
    source = HuggingFaceSource(model)
    config = config_from_huggingface(model)
    with pytest.raises(Mismatch, match=r"(attention.query of layer 2|q_proj.weight) holds"):
        huggingface.write_huggingface(source, model.parent / "copy", config, allow_nan=False)
    assert not (model.parent / "copy").exists()
    huggingface.write_huggingface(source, model.parent / "copy", config, allow_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_load_says_that_a_value_is_no_number(model: Path, dtype: Any, value: float) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(dtype)
        for name in ("lm_head.weight", QUERY):
            tensors[name][3, 2] = value

    change_json(model / "config.json", lambda values: values.update(dtype=np.dtype(dtype).name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model)
    change_tensors(model, change)
    said = rf"^({QUERY}|lm_head.weight) and 1 other hold NaN or infinity, as was stored"
    with pytest.warns(Note, match=said):
        load(model)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.float64, np.int32])
def test_how_many_values_are_no_number(dtype: Any) -> None:
    """As `math.isfinite` says of each, in every order of axes, and of nothing too."""
    values = np.random.default_rng(0).normal(size=(7, 5, 9)) * 1e3
    if dtype != np.int32:
        values[1:3, 2, ::4] = np.nan
        values[3, :, 1] = [np.inf, -np.inf, 0.0, -0.0, 65504.0]
    array = values.astype(dtype)
    for one in (array, array.T, array[:, ::2, 1:], array[0, 0, 0], array[:0]):
        expected = sum(not math.isfinite(value) for value in one.reshape(-1).tolist())
        assert not_finite(one) == expected


def test_an_adapter_beside_the_model_is_mentioned(model: Path, bridge: Any) -> None:
    """Once, though it has two files."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).write_text("{}")
    with pytest.warns(Note, match=r"model/adapter_config.json is an adapter beside .* merge it"):
        load(model)
    ended = bridge("check", model, "--config", model)
    assert ended.code == 0
    assert f"linen-compat: note: {model / 'adapter_config.json'} is an adapter" in ended.err
    assert ended.err.count("note:") == 1


def test_moments_have_no_place(tmp_path: Path) -> None:
    source = HuggingFaceSource(FOLDER / "llama")
    config = config_from_huggingface(FOLDER / "llama")
    destination = HuggingFaceDestination(tmp_path, config, source.arrays)
    with pytest.raises(InputError, match="no place for mu"):
        destination.write("head", None, source.read("head", None), "mu")


def test_a_tensor_that_was_announced_otherwise_or_never_came(tmp_path: Path) -> None:
    folder = NewTensorFolder(tmp_path, {"a": ArraySpec((2,), np.dtype(np.float32))})
    with pytest.raises(RuntimeError, match=r"a is .* instead of"):
        folder.write("a", np.zeros(3, np.float32))
    with pytest.raises(RuntimeError, match="a was never written"):
        folder.finish()


@settings(max_examples=25)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6
    ),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=6, max_size=6),
    limit=st.integers(1, 200),
    order=st.randoms(use_true_random=False),
)
def test_any_tensors_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list,
    dtypes: list,
    limit: int,
    order: Any,
) -> None:
    """What the library reads is what was written, and no file of several tensors is too large."""
    folder = tmp_path_factory.mktemp("tensors")
    arrays = {
        f"tensor.{number}": np.random.default_rng(number)
        .normal(size=shape)
        .astype(jnp.dtype(dtype))
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    specs = {name: ArraySpec(array.shape, array.dtype) for name, array in arrays.items()}
    new = NewTensorFolder(folder, specs, shard_bytes=limit)
    names = list(arrays)
    order.shuffle(names)
    for name in names:
        new.write(name, arrays[name])
    new.finish()
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit
        found |= held
    assert found.keys() == arrays.keys()
    ours = TensorFolder(folder)
    for name, array in arrays.items():
        for read in (found[name], ours.read(name, (slice(None),) * array.ndim)):
            assert (read.shape, read.dtype) == (array.shape, array.dtype)
            assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_file_is_that_of_the_library_byte_for_byte(tmp_path: Path, dtype: str) -> None:
    arrays = {
        name: np.arange(size, dtype=np.float32).astype(jnp.dtype(dtype)).reshape(-1, 2)
        for name, size in (("b", 6), ("a", 4), ("c.weight", 10))
    }
    specs = {name: ArraySpec(array.shape, array.dtype) for name, array in arrays.items()}
    new = NewTensorFolder(tmp_path, specs)
    for name, array in arrays.items():
        new.write(name, array)
    new.finish()
    save_file(arrays, tmp_path / "library", metadata={"format": "pt"})
    written = (tmp_path / "model.safetensors").read_bytes()
    assert written == (tmp_path / "library").read_bytes()
    assert [file.name for file in tmp_path.glob("*.json")] == []
