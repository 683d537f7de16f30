"""Adapters of PEFT, merged while a model is read: the logits of peft, from every format."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, replace
from huggingface_reference import ADAPTERS, FOLDER, OF_PEFT
from maxtext_data import DATA, checkpoint
from safetensors.numpy import load_file, save_file

from linen_compat import config_from_huggingface, load
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._in_memory import parameter_paths
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError, Mixtral
from nnx_pipeline.lab.errors import Note

BASE, ADAPTER = FOLDER / "llama", OF_PEFT / "patterns"
ENDS = ("weight", "base_layer.weight")
MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def logits(model: Mixtral, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))


def assert_same_logits(found: np.ndarray, expected: np.ndarray) -> None:
    """To the rounding of float32: processors add in other orders, and an AMD EPYC is 1.07e-5 off at
    logits of up to 3.4."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def values_of(model: Mixtral) -> dict[str, np.ndarray]:
    return {path: np.asarray(array) for path, array in parameter_paths(model).items()}


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_peft(name: str) -> None:
    of, _ = ADAPTERS[name]
    reference = np.load(OF_PEFT / name / "reference.npz")
    found = logits(load(FOLDER / of, adapter=OF_PEFT / name), reference["tokens"])
    assert_same_logits(found, reference["logits"])
    without = np.load(FOLDER / of / "reference.npz")["logits"]
    assert np.abs(without - reference["logits"]).max() > 0.1


@pytest.mark.parametrize("format", ["maxtext:scanned", "nnx", "huggingface"])
def test_merged_and_converted_before_or_after(format: str, tmp_path: Path) -> None:
    """Merged in a conversion, or into what the model alone was converted to."""
    reference = np.load(ADAPTER / "reference.npz")
    config = config_from_huggingface(BASE)
    # In MaxText's formats the query kernels contain head_dim^-0.5.
    scale = 1.0 if format.startswith("maxtext") else config.model.attention_scale
    config = replace(config, "model", attention_scale=scale)
    plan(From(BASE, config=config, adapter=ADAPTER), To(tmp_path / "merged", format)).run()
    plan(From(BASE, config=config), To(tmp_path / "plain", format)).run()
    for model in (
        load(tmp_path / "merged", config),
        load(tmp_path / "plain", config, adapter=ADAPTER),
    ):
        assert_same_logits(logits(model, reference["tokens"]), reference["logits"])


def test_each_device_reads_its_part(tmp_path: Path) -> None:
    """Of the joint tensors too, and of pairs that are reordered."""
    for name, changes in (("joint", {}), ("patterns", {"rope_interleaved": True})):
        of, adapter = FOLDER / ADAPTERS[name][0], OF_PEFT / name
        config = replace(config_from_huggingface(of), "model", **changes)
        whole = values_of(load(of, config, adapter=adapter))
        parts = values_of(load(of, config, adapter=adapter, mesh=mesh_of("fsdp=2,tensor=2")))
        for path, array in whole.items():
            np.testing.assert_allclose(parts[path], array, rtol=0, atol=1e-6)


def test_one_of_another_model() -> None:
    with pytest.raises(Mismatch, match=r"for model.layers.0.mlp.down_proj.weight, which the model"):
        load(FOLDER / "mixtral", adapter=ADAPTER)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))


def test_an_expert_without_a_pair_stays(adapter: Path) -> None:
    """One of several has one; the weights have the dtype of the model, which is bfloat16."""
    folder, at = FOLDER / "mixtral_sharded", "model.layers.1.block_sparse_moe.experts.2.w1"
    a, b = (np.random.default_rng(0).normal(size=shape) for shape in ((4, 16), (12, 4)))
    pair = {f"base_model.model.{at}.lora_{name}.weight": x for name, x in (("A", a), ("B", b))}
    of_mixtral(adapter, {name: x.astype(np.float32) for name, x in pair.items()}, ["w1"])
    before, after = values_of(load(folder)), values_of(load(folder, adapter=adapter))
    path = "pipeline.layers.feed_forward.gate"
    changed = {name for name, array in before.items() if not np.array_equal(array, after[name])}
    assert changed == {path}
    old, new = (x[path].reshape(-1, *x[path].shape[3:]).astype(np.float32) for x in (before, after))
    expected = np.asarray(old[1, 2] + (b @ a).T * 1.5, jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(new[1, 2], expected, rtol=1e-2)
    new[1, 2] = old[1, 2]
    assert np.array_equal(old, new)


def of_mixtral(folder: Path, tensors: dict[str, np.ndarray], targets: list[str]) -> None:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")


def change(**keys: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "adapter_config.json"
        values = {**json.loads(file.read_text()), **keys}
        file.write_text(json.dumps({k: v for k, v in values.items() if v != "removed"}))

    return write


def change_tensors(edit: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return write


REFUSED: dict[str, tuple[Callable[[Path], object], type[InputError], str]] = {
    "no folder": (shutil.rmtree, InputError, "does not exist; give a run"),
    "a pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        InputError,
        "holds no adapter_model.safetensors; give the folder of an adapter as PEFT saves it",
    ),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        InputError,
        "cannot be read as JSON",
    ),
    "no safetensors": (
        lambda folder: (folder / "adapter_model.safetensors").write_text("{"),
        Mismatch,
        "is damaged or is not a safetensors file",
    ),
    "another kind": (change(peft_type="IA3"), InputError, "peft_type='IA3' is not supported"),
    "no kind": (change(peft_type="removed"), InputError, "peft_type is missing"),
    "DoRA": (change(use_dora=True), InputError, "use_dora=True is not supported, only False"),
    "PiSSA": (change(init_lora_weights="pissa"), InputError, "init_lora_weights='pissa' is not"),
    "text for a switch": (change(use_rslora="false"), InputError, "use_rslora='false' is not"),
    "a vector": (
        change_tensors(lambda tensors: tensors.update({FIRST: np.ones(4, np.float32)})),
        Mismatch,
        "is not of rank 4",
    ),
    "a tensor twice": (
        change_tensors(
            lambda tensors: tensors.update(
                {f"base_model.model.lm_head.{end}": np.ones((24, 16), np.float32) for end in ENDS}
            )
        ),
        Mismatch,
        "is there twice, with base_layer and without",
    ),
    "an unknown key": (change(new_key=1), InputError, "new_key=1 is not a known key of LoRA"),
    "experts": (change(target_parameters=["a"]), InputError, r"target_parameters=\['a'\] is not"),
    "rows of the table": (
        change(trainable_token_indices=[1]),
        InputError,
        r"trainable_token_indices=\[1\] is not supported",
    ),
    "a rank of text": (change(r="4"), InputError, "r='4' is not a whole number"),
    "no rank": (change(r="removed"), InputError, "r=None is not a whole number"),
    "a rank of 0": (change(rank_pattern={"q_proj": 0}), InputError, r"q_proj=0 is not a whole"),
    "an infinite factor": (change(lora_alpha=1e999), InputError, "lora_alpha=inf is not a number"),
    "a list of patterns": (change(alpha_pattern=[1]), InputError, "is not an object"),
    "a broken pattern": (change(rank_pattern={"(": 4}), InputError, r"rank_pattern has '\('"),
    "another rank": (change(r=5), Mismatch, "is not of rank 5, as adapter_config.json says"),
    "broken targets": (change(target_modules="("), InputError, r"target_modules='\('"),
    "a number of targets": (change(target_modules=4), InputError, "target_modules=4 is no list"),
    "other targets": (change(target_modules=["k_proj"]), Mismatch, "not among its target_modules"),
    "half a pair": (
        change_tensors(lambda tensors: tensors.pop(FIRST)),
        Mismatch,
        r"q_proj.lora_B.weight in .* has no second matrix",
    ),
    "magnitudes": (
        change_tensors(lambda tensors: tensors.update({MAGNITUDE: np.ones(24, np.float32)})),
        Mismatch,
        "lora_magnitude_vector.weight in .* is no tensor of LoRA",
    ),
    "wide numbers": (
        change_tensors(lambda tensors: tensors.update({FIRST: np.ones((4, 16))})),
        Mismatch,
        "has dtype F64; only F32, F16, BF16 are read",
    ),
    "a tensor of another model": (
        change_tensors(lambda tensors: tensors.update(x=np.ones(4, np.float32))),
        Mismatch,
        "x in .* is no tensor of LoRA that is merged here",
    ),
    "another width": (
        change_tensors(lambda tensors: tensors.update({FIRST: np.ones((4, 7), np.float32)})),
        Mismatch,
        r"is for .*q_proj.weight of shape \[24, 7\], the model has \[24, 16\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_adapter_is_refused_in_a_line(
    name: str, adapter: Path, bridge: Any
) -> None:
    edit, kind, message = REFUSED[name]
    edit(adapter)
    with pytest.raises(kind, match=message) as found:
        load(BASE, adapter=adapter)
    ended = bridge("check", BASE, "--config", BASE, "--adapter", adapter)
    assert ended.code == (1 if kind is Mismatch else 2)
    assert "Traceback" not in ended.err
    assert "\n" not in str(found.value)


def test_tied_embeddings_have_no_adapter(adapter: Path) -> None:
    table = "base_model.model.model.embed_tokens.weight"
    of_mixtral(adapter, {table: np.ones((24, 16), np.float32)}, [])
    with pytest.raises(Mismatch, match=r"embed_tokens.weight changes one of two tied embeddings"):
        load(FOLDER / "qwen3", adapter=adapter)


def test_check_counts_and_reads_it(adapter: Path, bridge: Any) -> None:
    command = ("check", BASE, "--config", BASE, "--read", "--adapter", adapter, "--json", "-")
    size = sum(array.nbytes for array in load_file(BASE / "model.safetensors").values())
    more = sum(array.nbytes for array in load_file(adapter / "adapter_model.safetensors").values())
    ended = bridge(*command)
    assert ended.code == 0
    assert json.loads(ended.out)["read_bytes"] == size + more
    change_tensors(lambda tensors: tensors[FIRST].__setitem__((0, 0), np.nan))(adapter)
    ended = bridge(*command)
    assert ended.code == 1
    assert f"{FIRST} holds NaN or infinity in 1 of 64 values" in ended.err
    with pytest.raises(Mismatch, match="holds NaN"):
        plan(From(BASE, adapter=adapter), To(adapter / "out", "huggingface")).run()
    assert not (adapter / "out").exists()


def test_an_orbax_checkpoint_needs_a_config_and_no_moments(tmp_path: Path, bridge: Any) -> None:
    """Before any array is read."""
    command = ("convert", checkpoint("unscanned"), tmp_path / "out", "--to", "nnx", "--adapter")
    ended = bridge(*command, ADAPTER)
    assert (ended.code, "--adapter needs --config" in ended.err) == (2, True)
    ended = bridge(*command, ADAPTER, "--config", DATA / "unscanned" / "config.yml")
    assert (ended.code, "moments of the optimizer would no longer fit" in ended.err) == (2, True)


def test_one_beside_the_model_is_named_once_and_not_where_it_is_merged(tmp_path: Path) -> None:
    model = Path(shutil.copytree(BASE, tmp_path / "model"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(ADAPTER / file, model / file)
    with pytest.warns(Note, match=r"model/adapter_config.json is an adapter beside .* --adapter"):
        load(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = load(model, adapter=model)
    with pytest.warns(Note, match="is an adapter beside the model and is not read"):
        apart = load(model, adapter=ADAPTER)
    for path, array in values_of(both).items():
        assert np.array_equal(array, values_of(apart)[path])


def test_an_adapter_is_no_checkpoint(bridge: Any) -> None:
    ended = bridge("convert", ADAPTER, "out", "--to", "nnx")
    assert ended.code == 2
    assert "it is an adapter; give the folder of its model, and this one as --adapter" in ended.err


def test_generate_takes_it(run: Any) -> None:
    command = ("generate", "--checkpoint", BASE, "--tokens", "1,2,3", "--new-tokens", 8,
               "--json", "-")  # fmt: skip
    without = json.loads(run(*command).out)
    with_it = json.loads(run(*command, "--adapter", ADAPTER).out)
    assert (without["adapter"], with_it["adapter"]) == (None, str(ADAPTER))
    assert without["results"] != with_it["results"]
