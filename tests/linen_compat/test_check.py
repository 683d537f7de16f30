"""`linen-compat check`: what a model would take, and what would stay randomly initialised."""

import json

import numpy as np
import pytest
import yaml
from helpers import Ended
from maxtext_data import (
    DATA,
    KEPT,
    PIPELINES,
    checkpoint,
    full_state,
    laid_out,
    parameters,
    prompts_of_reference,
    state_in,
    write,
)

from linen_compat._cli import main as cli
from linen_compat.checkpoints import _check as doctor
from linen_compat.checkpoints import _reference as reference
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.maxtext.config import config_from_yaml

CONFIG = str(DATA / "unscanned" / "config.yml")
GATE = "params/params/decoder/layers_2/MoeBlock_0/gate/kernel"


@pytest.fixture
def check(monkeypatch, capsys):
    """The command, in this process."""

    def check(folder, *arguments, config=CONFIG):
        words = ["linen-compat", "check", folder, "--config", config, *arguments]
        monkeypatch.setattr("sys.argv", list(map(str, words)))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return Ended(exit_.value.code or 0, *capsys.readouterr())

    return check


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_what_fits(check, name):
    config = DATA / name / "config.yml"
    ended = check(checkpoint(name), "--read", "--numerics", "--json", "-", config=config)
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["fits"]
    assert not any(found[kind] for kind in ("missing", "extra", "reshaped", "fresh", "problems"))
    assert (len(found["recast"]) > 0) == name.endswith("bf16")
    assert (len(found["ignored"]) > 0) == (name == "scanned_nnx")
    assert found["read_bytes"] > 200_000
    assert found["numerics"]["place"] is None
    assert found["numerics"]["largest"] < 1e-5


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("stages", "repeats"), PIPELINES)
def test_every_layout_by_its_names(tmp_path, check, stages, repeats):
    write(tmp_path / "items", state_in("pipelined", stages, repeats))
    ended = check(tmp_path, "--numerics", "--json", "-")
    assert ended.code == 0, ended.err
    layout = ended.json["layout"], ended.json["stages"], ended.json["repeats"]
    assert layout == ("maxtext:pipelined", stages, repeats)


def with_leaf(**leaves):
    return {k: v for k, v in {**full_state(), **leaves}.items() if v is not None}


@pytest.mark.parametrize(
    ("leaves", "kind", "fresh"),
    [
        ({GATE: None}, "missing", True),
        ({GATE: np.zeros((32, 3), np.float32)}, "reshaped", True),
        ({"params/params/decoder/other": np.zeros(3)}, "extra", False),
        ({GATE: None, f"{GATE}s": np.zeros((32, 4), np.float32)}, "missing", True),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, check, leaves, kind, fresh):
    write(tmp_path / "items", with_leaf(**leaves))
    ended = check(tmp_path, "--read", "--numerics", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.code == 1
    named = GATE if GATE in leaves else "params/params/decoder/other"
    assert named in ended.err
    assert named in ended.out
    listed = [item if isinstance(item, str) else item["leaf"] for item in found[kind]]
    assert listed == [named]
    assert (GATE in found["fresh"]) == fresh
    assert not found["fits"]
    assert found["read_bytes"] is None  # what does not fit is not read


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 256, "embedding is [128, 32] instead of [256, 32]"),
        ("base_num_decoder_layers", 6, "decoder/layers_4"),
        ("base_num_decoder_layers", 2, "decoder/layers_2/MoeBlock_0/gate/kernel has no place"),
        ("base_emb_dim", 64, "instead of"),
    ],
)
def test_another_model(tmp_path, check, key, value, message):
    values = yaml.safe_load((DATA / "unscanned" / "config.yml").read_text())
    (tmp_path / "other.yml").write_text(yaml.safe_dump({**values, key: value}))
    ended = check(checkpoint("unscanned"), config=tmp_path / "other.yml")
    assert ended.code == 1
    assert message in f"{ended.err} {ended.out}"


def test_a_checkpoint_of_another_kind(tmp_path, check):
    write(tmp_path / "items", {"params/blocks/kernel": np.zeros((3, 4))})
    ended = check(tmp_path)
    assert ended.code == 1
    assert "checkpoint of another model" in ended.err


@pytest.mark.parametrize("kept", ["nothing", "metadata"])
def test_damaged_files(tmp_path, check, kept):
    write(tmp_path / "items", full_state())
    if kept == "nothing":
        (tmp_path / "items" / "_METADATA").write_text("{")
        ended = check(tmp_path)
    else:
        for path in (tmp_path / "items" / "ocdbt.process_0" / "d").iterdir():
            path.write_bytes(path.read_bytes()[:-2000])
        ended = check(tmp_path, "--read")
    assert ended.code == 1
    assert "cannot be read" in ended.err


def test_nan_with_read_alone(tmp_path, check):
    gate = full_state()[GATE].copy()
    gate[1, 2] = np.nan
    write(tmp_path / "items", with_leaf(**{GATE: gate}))
    assert check(tmp_path).code == 0
    ended = check(tmp_path, "--read")
    assert ended.code == 1
    assert f"{GATE} holds NaN" in ended.err
    assert check(tmp_path, "--read", "--allow-nan").code == 0


def test_numerics_name_the_first_layer_that_differs(tmp_path, check, monkeypatch):
    """A loader that takes layers in another order is found out."""
    folder = write(
        tmp_path / "items",
        {f"params/params/{k}": v for k, v in laid_out(parameters(), "pipelined", 2, 2).items()},
    )
    slot = reference.slot_of

    def swapped(found, layer):
        return slot(found, {1: 2, 2: 1}.get(layer, layer))

    monkeypatch.setattr(reference, "slot_of", swapped)
    ended = check(folder, "--numerics", "--json", "-")
    assert ended.code == 1
    assert "layer 1 (decoder/pipeline_module/layers[1, 0]) differs" in ended.err
    assert ended.json["numerics"]["largest"] > 1e-2


@pytest.mark.slow
def test_numerics_of_a_dense_model(tmp_path):
    import jax
    from flax import nnx
    from helpers import small_config

    import linen_compat
    from nnx_pipeline import Mixtral

    config = small_config(model={"num_experts": 1, "num_experts_per_token": 1})
    with jax.default_matmul_precision("highest"):
        linen_compat.save(Mixtral(config, rngs=nnx.Rngs(0)), tmp_path / "out")
        found = doctor.compare_with_maxtext(tmp_path / "out", config)
    assert found.place is None
    assert found.largest < 1e-5
    assert inspect(tmp_path / "out").layout.format == "maxtext:scanned"


def test_own_config_files_and_presets(tmp_path, check):
    own = tmp_path / "own.yml"
    values = config_from_yaml(CONFIG).model
    own.write_text(yaml.safe_dump({"model": vars(values), "train": {"sequence_length": 32}}))
    assert check(checkpoint("unscanned"), config=own).code == 0
    assert check(checkpoint("unscanned"), config="tiny").code == 1


def test_hugging_face_folders_too(check):
    ended = check(DATA.parent / "huggingface" / "mixtral", "--json", "-", config="tiny")
    assert ended.code == 1
    assert ended.json["layout"] == "huggingface"


def test_a_config_of_hugging_face_has_the_scale_of_the_checkpoint(tmp_path, check):
    """It says none, and MaxText folds that of the model into the query kernels."""
    source = DATA.parent / "huggingface" / "mixtral"
    for layout, name in (("maxtext:scanned", "scanned"), ("nnx", "own")):
        plan(From(source), To(tmp_path / name, layout)).run()
        for config in (source, source / "config.json"):
            ended = check(tmp_path / name, config=config)
            assert ended.code == 0, ended.err
    assert check(tmp_path / "scanned", "--numerics", config=source).code == 0


@pytest.mark.parametrize(
    ("folder", "arguments", "message"),
    [
        ("empty", ["--config", CONFIG], "holds no Orbax checkpoint"),
        ("none", ["--config", CONFIG], "none does not exist; give a run"),
        ("empty", ["--config", "nothing"], "neither a file nor a preset"),
        (
            "empty",
            ["--config", "."],
            ". is a folder and holds no config.json; give the folder of a Hugging Face model",
        ),
        ("empty", ["--config", ""], "an empty name is neither a file nor a preset"),
        ("", ["--config", CONFIG], "the checkpoint's name is empty"),
        ("empty", [], "Missing option '--config'"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, monkeypatch, capsys, folder, arguments, message):
    (tmp_path / "empty").mkdir()
    words = ["linen-compat", "check", folder and str(tmp_path / folder), *arguments]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_weights_that_are_not_floating(tmp_path, check):
    leaves = full_state()
    leaves[GATE] = leaves[GATE].astype(np.int8)
    write(tmp_path / "items", leaves)
    ended = check(tmp_path)
    assert ended.code == 1
    assert f"{GATE} is int8, but weights must be floating-point" in ended.err


def test_what_cannot_be_compared_is_said_once(tmp_path, check):
    write(tmp_path / "items", {"params/blocks/kernel": np.zeros((3, 4))})
    ended = check(tmp_path, "--json", tmp_path / "found.json")
    assert (ended.code, ended.out, ended.err.count("another model")) == (1, "", 1)
    assert "another model" in json.loads((tmp_path / "found.json").read_text())["problems"][0]


def test_norms_of_queries_that_are_not_there_are_named_before_the_scale(check, tmp_path):
    """Their scale differs because they are there, so that it is not what is wrong."""
    own = tmp_path / "own.yml"
    model = {**vars(config_from_yaml(CONFIG).model), "qk_norm": True, "attention_scale": 8**-0.5}
    own.write_text(yaml.safe_dump({"model": model}))
    ended = check(checkpoint("unscanned"), config=own)
    assert (ended.code, "query_norm/scale is missing" in ended.err) == (1, True)
    assert "attention_scale" not in ended.err


def test_a_hugging_face_folder_without_its_config_is_no_config(check, tmp_path):
    (tmp_path / "model.safetensors").touch()
    ended = check(checkpoint("unscanned"), config=tmp_path)
    assert (ended.code, f"{tmp_path} is a folder and holds no config.json" in ended.err) == (
        2,
        True,
    )


def test_a_leaf_that_is_there_twice(tmp_path, check):
    leaves = full_state()
    leaves["params/decoder/decoder_norm/scale"] = leaves["params/params/decoder/decoder_norm/scale"]
    write(tmp_path / "items", leaves)
    ended = check(tmp_path)
    assert ended.code == 1
    assert "holds decoder/decoder_norm/scale twice" in ended.err


def test_allow_nan_is_for_read(check):
    ended = check(checkpoint("unscanned"), "--allow-nan")
    assert (ended.code, "add --read" in ended.err) == (2, True)


@pytest.mark.parametrize("as_a_list", [False, True])
def test_given_logits(tmp_path, check, as_a_list):
    """In lines as MaxText reads them, and in one list as it writes them."""
    prompts, file = prompts_of_reference(), tmp_path / "logits.jsonl"
    lines = [json.dumps(prompts)] if as_a_list else [*map(json.dumps, prompts), ""]
    file.write_text("\n".join(lines))
    ended = check(checkpoint("unscanned"), "--logits", file, "--json", "-")
    assert ended.code == 0, ended.err
    found = ended.json["logits"]
    assert found["prompts"] == len(prompts) > 1
    assert found["positions"] == sum(len(prompt["tokens"]) for prompt in prompts)
    assert found["compared"] == len(prompts[0]["logits"][0])
    assert 0 < found["largest"] < 1e-6
    assert abs(found["divergence"]) < 1e-9


def test_changed_logits(tmp_path, check):
    """The place of the largest difference, and Σ p log(p / q), of the compared tokens alone; rows
    of later positions may be left out."""
    prompts, file = prompts_of_reference(), tmp_path / "logits.jsonl"
    vocabulary = len(prompts[0]["logits"][0])
    ours = np.float64(prompts[1]["logits"][2])
    prompts[1]["logits"][2] = [0.0] * vocabulary
    for prompt in prompts:
        prompt["logits"] = prompt["logits"][:4]
    largest = max(np.max(np.abs(prompt["logits"])) for prompt in prompts)
    for prompt in prompts:
        prompt["logits"] = [[*row, 9.0] for row in prompt["logits"]]  # a padded table
    file.write_text("\n".join(map(json.dumps, prompts)))
    ended = check(checkpoint("unscanned"), "--logits", file, "--json", "-")
    found = ended.json["logits"]
    assert (ended.code, found["prompt"], found["position"]) == (1, 1, 2)
    expected = -np.mean(ours - np.log(np.sum(np.exp(ours)))) - np.log(vocabulary)
    assert found["divergence"] == pytest.approx(expected, rel=1e-4)
    assert found["largest"] == pytest.approx(np.max(np.abs(ours)) / largest, rel=1e-4)
    assert found["compared"] == vocabulary
    assert found["positions"] == sum(len(prompt["logits"]) for prompt in prompts)
    assert "at position 2 of prompt 1 its logits are off by" in ended.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts_per_tok", 3),
        ("normalization_layer_epsilon", 1e-2),
        ("rope_max_timescale", 10_000),
    ],
)
def test_logits_of_another_model(tmp_path, check, key, value):
    """Whose weights have the same names and shapes; what bfloat16 may be off is more."""
    file, config = tmp_path / "logits.jsonl", tmp_path / "config.yml"
    file.write_text("\n".join(map(json.dumps, prompts_of_reference())))
    text = (DATA / "unscanned" / "config.yml").read_text()
    config.write_text(yaml.safe_dump({**yaml.safe_load(text), key: value}))
    ended = check(checkpoint("unscanned"), "--logits", file, config=config)
    assert (ended.code, "and --within 0.001 allows less" in ended.err) == (1, True)
    assert check(checkpoint("unscanned"), "--logits", file, "--within", 1, config=config).code == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty; give lines of JSON"),
        ("logits", "line 1 is not JSON: "),
        ("[3]", "line 1 has no tokens [seq] and logits [seq, vocab]; give both"),
        ('{"tokens": [1, 2]}', "line 1 has no tokens"),
        ('\n{"tokens": [1, 2], "logits": [[1], [1, 2]]}', "line 2 has no tokens"),
        ('{"tokens": [1.5], "logits": [[1]]}', "line 1 has no tokens"),
        ('{"tokens": [1], "logits": [[1], [2]]}', "logits of 2 positions for 1 tokens"),
        ('{"tokens": [1], "logits": [[NaN]]}', "or some that are not finite"),
        ('{"tokens": [1], "logits": [[1e308]]}', "or above 1e+06"),
        ('{"tokens": [1], "logits": [["1"]]}', "line 1 has no tokens"),
        ('{"tokens": [1], "logits": [[true]]}', "line 1 has no tokens"),
        ('{"tokens": [1], "logits": [[]]}', "line 1 has no tokens"),
        (f'{{"tokens": [1], "logits": [[{10**400}]]}}', "line 1 has no tokens"),
        ('{"tokens": [-1], "logits": [[1]]}', "tokens from -1 to -1, and the vocabulary"),
        ('{"prompt": "\u2028", "tokens": [1], "logits": [[1]]}', "of first positions alone"),
        ('{"tokens": [1, 1], "logits": [[1], [1]]}', "logits for 1 tokens, and the model has mod"),
    ],
)
def test_logits_that_cannot_be(tmp_path, check, text, told):
    (tmp_path / "logits.jsonl").write_text(text, encoding="utf-8")
    ended = check(checkpoint("unscanned"), "--logits", tmp_path / "logits.jsonl")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert told in ended.err


def test_no_file_of_logits(tmp_path, check):
    ended = check(checkpoint("unscanned"), "--logits", tmp_path / "none")
    assert (ended.code, "cannot be read: " in ended.err) == (2, True)


def test_a_bound_without_logits(check):
    ended = check(checkpoint("unscanned"), "--within", 1)
    assert (ended.code, "--within has no effect without --logits" in ended.err) == (2, True)
