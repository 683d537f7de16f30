"""`check` never says that what `load`, `load_train_state` or `convert` then refuses fits."""

import json
import shutil

import numpy as np
import pytest
import yaml
from maxtext_data import DATA, checkpoint, full_state, read, state_in, write
from safetensors.numpy import load_file, save_file

import linen_compat
from linen_compat.checkpoints import _check as doctor
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.formats._streams import Mismatch
from linen_compat.formats.huggingface._stream import folder_config
from linen_compat.maxtext.config import config_from_yaml
from nnx_pipeline import InputError

CONFIG = str(DATA / "unscanned" / "config.yml")
LLAMA = DATA.parent / "huggingface" / "llama"
MIXTRAL = DATA.parent / "huggingface" / "mixtral"


@pytest.fixture
def llama(tmp_path):
    """A Hugging Face folder to be changed, and a file with the config that fits it."""
    config = tmp_path / "own.yml"
    config.write_text(yaml.safe_dump({"model": vars(folder_config(LLAMA).model)}))
    shutil.copytree(LLAMA, tmp_path / "llama")
    return tmp_path / "llama", config


def change_json(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_attention_scale_of_an_nnx_checkpoint(tmp_path, bridge, llama):
    folder, config = llama
    assert bridge("convert", folder, tmp_path / "nnx", "--to", "nnx").code == 0
    assert bridge("check", tmp_path / "nnx", "--config", config).code == 0
    values = yaml.safe_load(config.read_text())
    values["model"]["attention_scale"] = 1.0
    config.write_text(yaml.safe_dump(values))
    ended = bridge("check", tmp_path / "nnx", "--config", config)
    assert ended.code == 1
    assert "model.attention_scale=1.0 does not suit the query kernels of" in ended.err
    with pytest.raises(
        Mismatch, match=r"model.attention_scale=1.0 does not suit the query kernels of"
    ):
        linen_compat.load(tmp_path / "nnx", config_from_yaml(str(config)))


def test_tensors_of_one_kind_with_several_dtypes(tmp_path, bridge, llama):
    folder, config = llama
    assert bridge("check", folder, "--config", config).code == 0
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = f"{name} is float16 and model.layers.0.mlp.up_proj.weight is float32"
    ended = bridge("check", folder, "--config", config)
    assert (ended.code, message in ended.err) == (1, True)
    ended = bridge("convert", folder, tmp_path / "out", "--to", "nnx")
    assert (ended.code, message in ended.err) == (1, True)
    with pytest.raises(Mismatch, match=message):
        linen_compat.load(folder)


def test_counts_of_the_optimizer(tmp_path, bridge):
    leaves = {**full_state(), "opt_state/2/count": np.asarray(9, np.int32)}
    write(tmp_path / "items", leaves)
    ended = bridge("check", tmp_path, "--config", CONFIG)
    assert ended.code == 1
    assert "counts 3 steps of Adam and 9 of its learning rate" in ended.err


def test_a_count_that_cannot_be_read(tmp_path, bridge, monkeypatch):
    def read_scalars(found):
        raise Mismatch("opt_state/0/count cannot be read")

    monkeypatch.setattr(doctor, "read_scalars", read_scalars)
    ended = bridge("check", checkpoint("unscanned"), "--config", CONFIG)
    assert (ended.code, "opt_state/0/count cannot be read" in ended.err) == (1, True)


@pytest.mark.parametrize(
    ("key", "ours"),
    [("vocab_size", "vocab_size"), ("intermediate_size", "mlp_dim")],
)
def test_a_config_json_beside_other_tensors(bridge, llama, key, ours):
    folder, config = llama
    right = json.loads((folder / "config.json").read_text())[key]
    change_json(folder, **{key: right + 1})
    ended = bridge("check", folder, "--config", config)
    assert ended.code == 1
    assert f"config.json has {ours}={right + 1}, the model {right}" in ended.err
    with pytest.raises(Mismatch):
        linen_compat.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "is not supported"),
        ({"new_kind_of_attention": 3}, "is not a known key"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_a_folder_of_another_architecture_does_not_fit(tmp_path, bridge, llama, changes, message):
    folder, config = llama
    change_json(folder, **changes)
    for words in (("check", "--config", config), ("convert", tmp_path / "out", "--to", "nnx")):
        command, *rest = words
        ended = bridge(command, folder, *rest)
        assert (ended.code, message in ended.err) == (1, True)
        assert str(folder) in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", ["tensors", "index"])
def test_a_folder_without_its_tensors_does_not_fit(bridge, llama, lost):
    folder, config = llama
    (folder / "model.safetensors").unlink()
    if lost == "index":
        (folder / "model.safetensors.index.json").write_text("{")
    ended = bridge("check", folder, "--config", config)
    assert ended.code == 1
    assert ("cannot be read as JSON" if lost == "index" else "holds neither") in ended.err


def test_where_no_model_is_the_argument_cannot_be_used(tmp_path, bridge):
    ended = bridge("convert", tmp_path, tmp_path / "out", "--from", "huggingface", "--to", "nnx")
    assert (ended.code, "holds no config.json" in ended.err) == (2, True)


@pytest.mark.parametrize("kind", ["nnx", "huggingface"])
def test_numerics_are_refused_before_any_work(tmp_path, bridge, llama, monkeypatch, kind):
    folder, config = llama
    if kind == "nnx":
        bridge("convert", folder, tmp_path / "nnx", "--to", "nnx")
        folder = tmp_path / "nnx"
    reading = "linen_compat._cli.checking.read_everything"
    monkeypatch.setattr(reading, lambda *arguments, **options: pytest.fail("read"))
    ended = bridge("check", folder, "--config", config, "--read", "--numerics")
    assert (ended.code, ended.out) == (2, "")
    assert "--numerics works on MaxText's formats only" in ended.err
    assert "convert it to maxtext:unscanned first" in ended.err
    monkeypatch.undo()
    cure = ("convert", folder, tmp_path / "out", "--to", "maxtext:unscanned", "--config", config)
    assert bridge(*cure).code == 0
    ended = bridge("check", tmp_path / "out", "--config", config, "--numerics")
    assert "set it to 1.0" in ended.err  # MaxText's query kernels hold the scale
    values = yaml.safe_load(config.read_text())
    values["model"]["attention_scale"] = 1.0
    config.write_text(yaml.safe_dump(values))
    ended = bridge("check", tmp_path / "out", "--config", config, "--numerics")
    assert (ended.code, ended.err) == (0, "")


def scaled_state(tmp_path, bridge):
    """A training state of this project whose attention scale is not MaxText's."""
    bridge("convert", checkpoint("unscanned"), tmp_path / "one", "--to", "nnx")
    write(tmp_path / "nnx", read(tmp_path / "one"))  # by Orbax, without our checksums
    file = tmp_path / "nnx" / "_METADATA"
    metadata = json.loads(file.read_text())
    metadata["custom_metadata"] = {"attention_scale": 0.5}
    file.write_text(json.dumps(metadata))
    return tmp_path / "nnx"


def test_parameters_only_where_moments_cannot_go_along(tmp_path, bridge):
    state, to = scaled_state(tmp_path, bridge), ["--to", "maxtext:scanned"]
    ended = bridge("convert", state, tmp_path / "out", *to)
    assert ended.code == 2
    assert "convert the parameters alone with --parameters-only" in ended.err
    ended = bridge("convert", state, tmp_path / "out", *to, "--parameters-only")
    assert ended.code == 0, ended.err
    left = "optimizer/mu, optimizer/nu, optimizer/count, optimizer/schedule_count"
    assert f"left behind: {left}, as --parameters-only asks" in " ".join(ended.out.split())
    expected = {
        name: leaf * 0.5 if "query/kernel" in name else leaf
        for name, leaf in state_in("scanned").items()
        if name.startswith("params/") or name == "step"
    }
    found = read(tmp_path / "out")
    assert sorted(found) == sorted(expected)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_parameters_only_of_a_state_that_could_go_along(tmp_path, bridge):
    words = ["--to", "maxtext:unscanned", "--parameters-only"]
    assert bridge("convert", checkpoint("unscanned"), tmp_path / "out", *words).code == 0
    state = full_state()
    expected = [name for name in state if name.startswith("params/") or name == "step"]
    assert sorted(read(tmp_path / "out")) == sorted(expected)
    assert read(tmp_path / "out")["step"] == state["step"]


def test_the_stages_given_are_those_written(tmp_path, bridge):
    """With --stages alone, a circular source does not bring its repeats."""
    to = ["--to", "maxtext:pipelined"]
    given = ["--stages", "2", "--repeats", "2"]
    assert bridge("convert", checkpoint("unscanned"), tmp_path / "a", *to, *given).code == 0
    assert bridge("convert", tmp_path / "a", tmp_path / "b", *to, "--stages", "4").code == 0
    assert inspect(tmp_path / "b").layout.repeats == 1
    ended = bridge(
        "convert", tmp_path / "a", tmp_path / "c", *to, "--stages", "4", "--repeats", "2"
    )
    assert ended.code == 2
    assert "4 layers do not split into 4 stages × 2 repeats" in ended.err
    assert "choose --stages and --repeats (or stages, repeats) whose product divides 4" in ended.err


def test_no_stages_are_not_the_models_own(tmp_path):
    model = linen_compat.load(checkpoint("unscanned"), config_from_yaml(CONFIG))
    with pytest.raises(InputError, match=r"stages=0 .* each of them must be 1 or more"):
        linen_compat.save(model, tmp_path / "out", "maxtext:pipelined", stages=0)
    assert not list(tmp_path.iterdir())
