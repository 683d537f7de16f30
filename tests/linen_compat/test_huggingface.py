"""Hugging Face's Mixtral, Llama and Qwen3: the same logits, and back to the bit.

The kept folders were written by transformers; with transformers and torch installed other random
models are compared directly.
"""

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_placement, mesh_of, missing, replace
from huggingface_reference import (
    FOLDER,
    KEPT,
    LLAMA3_1,
    OWN_HEAD,
    logits_of,
    random_model,
    random_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from linen_compat import load, save
from linen_compat.checkpoints._check import diagnose
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.checkpoints.loading import open_source
from linen_compat.checkpoints.saving import write_orbax
from linen_compat.formats._in_memory import ModelSource, parameter_paths
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.formats._orbax.layouts import SCANNED, TreeLayout
from linen_compat.formats._streams import PARAMETERS, ArraySpec, Mismatch, times_ratio
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.formats.huggingface._stream import HuggingFaceSource
from linen_compat.formats.huggingface.config import config_from_huggingface
from nnx_pipeline import Config, Mixtral
from nnx_pipeline.lab.errors import Note
from nnx_pipeline.train import abstract_state

each_folder = pytest.mark.parametrize("name", KEPT)
with_transformers = pytest.mark.skipif(
    missing("transformers", "torch"), reason="transformers and torch are not installed"
)


def in_float32(name: str) -> Config:
    """The config of a kept folder that computes as the reference was computed."""
    return replace(
        config_from_huggingface(FOLDER / name), "model", dtype="float32", param_dtype="float32"
    )


def logits(model: Mixtral, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the library."""
    found: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_tensors(actual: Path, expected: Path) -> None:
    a, b = tensors(actual), tensors(expected)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), f"{name} differs"


@pytest.mark.slow(but=26)
@each_folder
def test_logits_are_those_of_transformers(name: str) -> None:
    reference = np.load(FOLDER / name / "reference.npz")
    model = load(FOLDER / name, in_float32(name))
    np.testing.assert_allclose(
        logits(model, reference["tokens"]), reference["logits"], rtol=0, atol=1e-5
    )
    assert np.std(reference["logits"]) > 0.3


def test_biases_of_queries_are_scaled_as_their_kernels_are() -> None:
    """For a model whose factor on scores is 1, and which has biases."""
    reference = np.load(FOLDER / "llama_yarn" / "reference.npz")
    config = replace(in_float32("llama_yarn"), "model", attention_scale=1.0)
    found = logits(load(FOLDER / "llama_yarn", config), reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=1e-5)


def test_another_head_than_the_table_that_the_config_names(tmp_path: Path) -> None:
    """transformers 5 computes with it, so it is never dropped in silence; both cures give that."""
    folder = Path(shutil.copytree(FOLDER / OWN_HEAD, tmp_path / "model"))
    reference = np.load(folder / "reference.npz")
    config = config_from_huggingface(folder)
    for attempt in (
        lambda: load(folder),
        lambda: load(folder, config),
        lambda: plan(From(folder), To(tmp_path / "out", SCANNED)),
    ):
        with pytest.raises(Mismatch, match=r"lm_head.weight differs .* set tie_word_embeddings to"):
            attempt()
    (problem,) = diagnose(folder, config).comparison.problems
    assert problem.startswith("lm_head.weight differs from model.embed_tokens.weight")
    untied = load(folder, replace(config, "model", tied_embeddings=False))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    for model in (untied, load(folder)):
        np.testing.assert_allclose(
            logits(model, reference["tokens"]), reference["logits"], rtol=0, atol=1e-4
        )


@with_transformers
def test_transformers_computes_with_that_head() -> None:
    from transformers import AutoModelForCausalLM

    reference = np.load(FOLDER / OWN_HEAD / "reference.npz")
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER / OWN_HEAD)
    found = logits_of(theirs, reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=1e-4)
    theirs.lm_head.weight = theirs.model.embed_tokens.weight
    assert np.abs(logits_of(theirs, reference["tokens"]) - found).max() > 1.0


@with_transformers
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mixtral", {}),
        ("Mixtral", {"num_key_value_heads": 4, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3}),
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 8, "rope_theta": 10.0}),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 5}),
        ("Qwen3", {"rope_scaling": LLAMA3_1}),
        ("DeepseekV2", {"q_lora_rank": 12, "first_k_dense_replace": 1, "n_shared_experts": 1}),
        ("DeepseekV3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3", {"first_k_dense_replace": 0, "norm_topk_prob": False, "q_lora_rank": None}),
    ],
)
def test_logits_of_other_models(tmp_path: Path, kind: str, changes: dict) -> None:
    theirs = random_model(kind, seed=2, **changes)
    theirs.save_pretrained(tmp_path / "model")
    tokens = random_tokens(seed=3)
    ours = load(tmp_path / "model")
    np.testing.assert_allclose(logits(ours, tokens), logits_of(theirs, tokens), rtol=0, atol=1e-4)


@with_transformers
@each_folder
def test_transformers_loads_what_is_written(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = load(FOLDER / name)
    source = ModelSource(model, {PARAMETERS: model}, {})
    huggingface.write_huggingface(source, tmp_path / "model", model.config, shard_bytes=20_000)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.dtype == getattr(torch, KEPT[name][1])
    own = AutoModelForCausalLM.from_pretrained(FOLDER / name)
    tokens = np.load(FOLDER / name / "reference.npz")["tokens"]
    np.testing.assert_array_equal(logits_of(loaded, tokens), logits_of(own, tokens))


def test_the_default_config_is_that_of_the_folder() -> None:
    model = load(FOLDER / "mixtral_sharded")
    assert model.config == config_from_huggingface(FOLDER / "mixtral_sharded")
    assert model.head.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "repeats"),
    [
        ("mixtral", "stage=2,expert=4", 1),
        ("mixtral_fused", "stage=2,expert=2,tensor=2", 2),
        ("llama", "fsdp=4,tensor=2", 1),
    ],
)
def test_on_a_mesh_every_parameter_has_its_sharding(name: str, mesh: str, repeats: int) -> None:
    config = replace(in_float32(name), "pipeline", num_repeats=repeats)
    reference = np.load(FOLDER / name / "reference.npz")
    tokens = np.tile(reference["tokens"], (8, 1))
    config = replace(config, "train", global_batch=len(tokens))
    devices = mesh_of(mesh)
    model = load(FOLDER / name, config, mesh=devices)
    with jax.set_mesh(devices):
        assert_same_placement(model, abstract_state(config, devices).model)
        found = logits(model, tokens)
    expected = np.tile(reference["logits"], (8, 1, 1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


TO_THE_BIT = [
    "mixtral",
    "mixtral_sharded",
    "llama",
    "phi3",
    "granite_moe",
    "gemma2",
    "glm4_moe",
    "gpt_oss",
]


@pytest.mark.parametrize("name", TO_THE_BIT)
def test_there_and_back_to_the_bit(tmp_path: Path, name: str) -> None:
    save(load(FOLDER / name), tmp_path / "model", "huggingface")
    assert_same_tensors(tmp_path / "model", FOLDER / name)
    if name != "mixtral_sharded":  # one file: transformers' own, byte for byte
        file = "model.safetensors"
        assert (tmp_path / "model" / file).read_bytes() == (FOLDER / name / file).read_bytes()


def change_folder(folder: Path, tensors: dict[str, np.ndarray], **keys: object) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **keys}))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_modules_for_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    """They follow the layers, and are named; without the key that says so they are refused."""
    folder = Path(shutil.copytree(FOLDER / name, tmp_path / "model"))
    whole = tensors(folder)
    more = {
        key.replace("layers.3.", "layers.4."): value
        for key, value in whole.items()
        if "layers.3." in key
    }
    more["model.layers.4.eh_proj.weight"] = np.ones((16, 32), np.float32)
    change_folder(folder, whole | more, num_nextn_predict_layers=1, num_mtp_layers=1)
    with pytest.warns(Note, match=r"model.layers.4.* other tensors are of modules that pred"):
        model = load(folder)
    assert_same_arrays(model, load(FOLDER / name))
    change_folder(folder, whole | more, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(Mismatch, match=r"model.layers.4.\S+ has no place in the model"):
        load(folder)


def assert_same_arrays(one: Mixtral, other: Mixtral) -> None:
    a, b = parameter_paths(one), parameter_paths(other)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


def test_weights_of_8_bits_are_read(tmp_path: Path) -> None:
    """Times the scale of their block, as those that were dequantized before."""
    narrow = Path(shutil.copytree(FOLDER / "moonlight", tmp_path / "narrow"))
    wide = Path(shutil.copytree(FOLDER / "moonlight", tmp_path / "wide"))
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for key, value in tensors(narrow).items():
        if not key.endswith("proj.weight"):
            stored[key] = plain[key] = value
            continue
        blocks = [-(-size // 8) for size in value.shape]
        scales = np.random.default_rng(0).uniform(0.5, 2, size=blocks).astype(np.float32)
        whole = np.kron(scales, np.ones((8, 8), np.float32))[: value.shape[0], : value.shape[1]]
        stored[key] = (value / whole).astype(jnp.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scales
        plain[key] = (stored[key].astype(np.float32) * whole).astype(jnp.bfloat16)
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    change_folder(narrow, stored, quantization_config=form)
    change_folder(wide, plain)
    assert_same_arrays(load(narrow), load(wide))
    source = HuggingFaceSource(narrow)
    array = source.read("attention.kv_up", 0)
    cut = (slice(1, 5), slice(1, 3), slice(3, 11))
    np.testing.assert_array_equal(source.read("attention.kv_up", 0, index=cut), array[cut])
    del stored[next(key for key in stored if key.endswith("_scale_inv"))]
    change_folder(narrow, stored)
    with pytest.raises(Mismatch, match="has dtype F8_E4M3 and no "):
        load(narrow)


def test_weights_of_4_bits_are_read(tmp_path: Path) -> None:
    """MXFP4: two numbers in a byte, the lower half first, and a power of 2 for each 32 numbers."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    folder = Path(shutil.copytree(FOLDER / "gpt_oss", tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    changes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({**values, **changes, "layer_types": None}))
    generator, stored, expected = np.random.default_rng(0), {}, {}
    config = config_from_huggingface(folder)
    huggingface.write_huggingface(Zeros(config), tmp_path / "zeros", config)
    for key, value in tensors(tmp_path / "zeros").items():
        if not key.endswith("proj") or "experts" not in key:
            stored[key] = value
            continue
        experts, inputs, outputs = value.shape
        blocks = generator.integers(256, size=(experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = generator.integers(120, 130, size=blocks.shape[:-1], dtype=np.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        wide = np.zeros(value.shape, np.float32)
        for at in np.ndindex(*value.shape):
            expert, row, column = at
            byte = blocks[expert, column, row // 32, row % 32 // 2]
            half = byte // 16 if row % 2 else byte % 16
            sign = -1 if half >= 8 else 1
            wide[at] = (
                sign * numbers[half % 8] * 2.0 ** (int(scales[expert, column, row // 32]) - 127)
            )
        expected[key] = wide
    change_folder(folder, stored, quantization_config={"quant_method": "mxfp4"})
    source = HuggingFaceSource(folder)
    joint = expected["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(source.read("feed_forward.gate", 0), joint[..., ::2])
    np.testing.assert_array_equal(source.read("feed_forward.up", 0), joint[..., 1::2])
    down = expected["model.layers.0.mlp.experts.down_proj"]
    cut = (slice(1, 3), slice(5, 40), slice(2, 20))
    np.testing.assert_array_equal(source.read("feed_forward.down", 0, index=cut), down[cut])


def test_fused_experts_come_back_apart(tmp_path: Path) -> None:
    save(load(FOLDER / "mixtral_fused"), tmp_path / "model", "huggingface")
    assert_same_tensors(tmp_path / "model", FOLDER / "mixtral")  # of the same seed


def test_config_comes_back(tmp_path: Path) -> None:
    save(load(FOLDER / "llama"), tmp_path / "model", "huggingface")
    assert config_from_huggingface(tmp_path / "model") == config_from_huggingface(FOLDER / "llama")


def longest(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["max_position_embeddings"]


def test_the_longest_sequence_comes_back(tmp_path: Path) -> None:
    """Whatever config the model is read with, unless that says another."""
    folder = FOLDER / "llama"
    assert longest(folder) == 64
    silent = replace(in_float32("llama"), "model", max_position_embeddings=None)
    other = replace(silent, "model", max_position_embeddings=32)
    for number, (config, expected) in enumerate(((None, 64), (silent, 64), (other, 32))):
        saved, converted = tmp_path / f"saved{number}", tmp_path / f"converted{number}"
        save(load(folder, config), saved, "huggingface")
        plan(From(folder, config=config), To(converted, "huggingface")).run()
        assert (longest(saved), longest(converted)) == (expected, expected)


def test_a_stream_keeps_stored_dtypes(tmp_path: Path) -> None:
    source = HuggingFaceSource(FOLDER / "mixtral_sharded")
    huggingface.write_huggingface(source, tmp_path / "model", in_float32("mixtral_sharded"))
    assert_same_tensors(tmp_path / "model", FOLDER / "mixtral_sharded")
    config = config_from_huggingface(tmp_path / "model")
    assert config.model.param_dtype == "bfloat16"


def test_parts_of_arrays_are_those_of_the_whole() -> None:
    for name in KEPT:
        source = HuggingFaceSource(FOLDER / name)
        for path, spec in source.arrays.items():
            outside = path in ("embedding.embedding", "norm.scale", "head")
            layer = None if outside else source.order(path)[-1]
            whole = source.read(path, layer)
            assert (whole.shape, whole.dtype) == (spec.shape, spec.dtype)
            cut = tuple(slice(size // 4, size - size // 3) for size in spec.shape)
            part = source.read(path, layer, index=cut)
            assert np.array_equal(part, whole[cut]), f"{name}: {path}"


def units_apart(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance in units in the last place."""
    assert a.dtype == b.dtype
    integers = {2: np.int16, 4: np.int32}[a.dtype.itemsize]
    return int(np.max(np.abs(a.view(integers).astype(np.int64) - b.view(integers)), initial=0))


@pytest.mark.parametrize("name", ["mixtral", "mixtral_sharded"])
def test_crossing_scales_the_query_kernels_only(tmp_path: Path, name: str) -> None:
    own = config_from_huggingface(FOLDER / name)
    folded = load(FOLDER / name, replace(own, "model", attention_scale=1.0))
    plain = parameter_paths(load(FOLDER / name))
    for path, array in parameter_paths(folded).items():
        expected = np.asarray(plain[path])
        if path.endswith("attention.query"):
            expected = (expected.astype(np.float64) * 6**-0.5).astype(expected.dtype)
        assert np.array_equal(np.asarray(array), expected), path
    save(folded, tmp_path / "back", "huggingface")
    before, after = tensors(FOLDER / name), tensors(tmp_path / "back")
    for key in before:
        units = units_apart(before[key], after[key])
        assert units <= (1 if "q_proj" in key else 0), f"{key}: {units} units"


def test_through_a_checkpoint_of_maxtext_and_back(tmp_path: Path) -> None:
    """As streams, without a model in between; the Orbax checkpoint holds the scaled kernels."""
    config = config_from_huggingface(FOLDER / "mixtral")
    maxtext = replace(config, "model", attention_scale=1.0)
    write_orbax(HuggingFaceSource(FOLDER / "mixtral"), tmp_path / "maxtext", TreeLayout(SCANNED, 4))
    source = open_source(inspect(tmp_path / "maxtext"), maxtext)
    huggingface.write_huggingface(source, tmp_path / "back", config)
    before, after = tensors(FOLDER / "mixtral"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key in before:
        units = units_apart(before[key], after[key])
        assert units <= (1 if "q_proj" in key else 0), f"{key}: {units} units"
    reference = np.load(FOLDER / "mixtral" / "reference.npz")
    found = logits(load(tmp_path / "maxtext", maxtext), reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=1e-4)


def test_the_crossed_model_computes_the_same() -> None:
    config = replace(in_float32("mixtral"), "model", attention_scale=1.0)
    reference = np.load(FOLDER / "mixtral" / "reference.npz")
    found = logits(load(FOLDER / "mixtral", config), reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=1e-4)


@settings(max_examples=30)
@given(
    head_dim=st.integers(1, 256).map(lambda half: 2 * half),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_there_and_back_is_one_unit_at_most(head_dim: int, dtype: str, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=5000).astype(jnp.dtype(dtype))
    for ratio in (head_dim**0.5, head_dim**-0.5):
        assert units_apart(times_ratio(times_ratio(values, ratio), 1 / ratio), values) <= 1


def test_streaming_holds_two_arrays_at_most(tmp_path: Path) -> None:
    """Of a model of 64 such arrays. Pages of mapped files are not counted here."""
    sizes = {"num_layers": 8, "embed_dim": 64, "mlp_dim": 1024, "num_experts": 4}
    config = Config(model=dataclasses.replace(in_float32("mixtral").model, **sizes))
    source = Zeros(config)
    huggingface.write_huggingface(source, tmp_path / "large", config)
    largest = 4 * 64 * 1024 * 4
    huggingface.write_huggingface(HuggingFaceSource(tmp_path / "large"), tmp_path / "warm", config)
    tracemalloc.start()
    huggingface.write_huggingface(HuggingFaceSource(tmp_path / "large"), tmp_path / "copy", config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * largest + 500_000
    assert sum(file.stat().st_size for file in (tmp_path / "copy").iterdir()) > 20 * largest


class Zeros:
    """A source of zeros for every array of a model."""

    parts: tuple[str, ...] = ("parameters",)

    def __init__(self, config: Config) -> None:
        self.scalars: dict[str, np.ndarray] = {}
        from linen_compat.formats._shapes import model_arrays

        self.arrays: dict[str, ArraySpec] = model_arrays(config.model)
        self.num_layers = config.model.num_layers
        self.attention_scale = config.model.attention_scale

    def hold(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def order(self, path: str) -> range:
        return range(self.num_layers)

    def dtype(self, path: str, part: str = "parameters") -> np.dtype:
        return self.arrays[path].dtype

    def name(self, path: str, layer: int | None, part: str = "parameters") -> str:
        return path

    def read(self, path: str, layer: int | None, part: str = "parameters") -> np.ndarray:
        return np.zeros(self.arrays[path].shape, self.arrays[path].dtype)
