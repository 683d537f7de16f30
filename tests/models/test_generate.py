"""Generation: the cache, sampling, the loop, and the command."""

import contextlib
import json
import re
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers import ROOT, Run, float_rows, mesh_of, missing, model_on_mesh, new_model, small_config
from jax.sharding import PartitionSpec as P

import linen_compat
from nnx_pipeline import Config, InputError, Mixtral
from nnx_pipeline.config.config import to_dict
from nnx_pipeline.generate import Request, Sampling, generate
from nnx_pipeline.generate.loop import cached_model
from nnx_pipeline.generate.sampling import keys_of, next_tokens, restricted
from nnx_pipeline.ops._attention import Options, cached_attention, dot_product_attention, in_slots
from nnx_pipeline.train._cli import checkpoints as offered
from nnx_pipeline.train._tokenizers import tokenizer_for

LATENT = {"num_kv_heads": 4, "kv_lora_rank": 8, "rope_head_dim": 2, "value_head_dim": 6}
DEEPSEEK = {
    **LATENT,
    "num_layers": 6,
    "num_dense_layers": 2,
    "dense_mlp_dim": 24,
    "router_score": "sigmoid",
    "router_bias": True,
}
PROMPTS = ((3, 14, 15, 9, 2, 6, 5), (27, 18), (31,))  # of different lengths, in one batch


def greedy(config: Config, mesh: str = "", *, new_tokens: int = 6) -> list[list[int]]:
    """What a model of a config makes of `PROMPTS` on a mesh, from weights that do not depend on it.

    The model is given with options for training, which it does not need here.
    """
    source = new_model(Config(model=config.model))
    grid = mesh_of(mesh, config.pipeline.sharding) if mesh else None
    with jax.set_mesh(grid) if grid else contextlib.nullcontext():
        model = model_on_mesh(source, config, grid) if grid else source
        return generate(model, Request(prompts=PROMPTS, new_tokens=new_tokens))


def full_forward(model: Mixtral, sequences: list[list[int]]) -> np.ndarray:
    """The logits of whole sequences, `[sequences, longest, vocab]`, without a cache or a mesh."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("mesh", "model", "pipeline"),
    [
        ("", {}, {}),
        ("", {"experts": "grouped", "sliding_window": 3}, {}),
        ("", {"num_experts": 1, "num_experts_per_token": 1, "sliding_window": 4}, {}),
        ("", {"qk_norm": True, "tied_embeddings": True, "attention_scale": 0.5}, {}),
        ("", {"sliding_window": 2, "full_attention_every": 2, "attention_soft_cap": 0.5}, {}),
        ("stage=2,fsdp=2", DEEPSEEK, {}),
        ("fsdp=2,tensor=2", DEEPSEEK, {"sharding": "auto"}),
        ("stage=2,fsdp=2", {"experts": "grouped"}, {"num_repeats": 2, "schedule": "1f1b"}),
        ("tensor=2,data=2,expert=2", {}, {"sharding": "auto"}),
        ("stage=2,tensor=2", {"vocab_size": 33}, {}),
        ("tensor=2", {"vocab_size": 33, "tied_embeddings": True}, {"sharding": "auto"}),
    ],
    ids=[
        "dense",
        "grouped",
        "llama",
        "tied",
        "windows",
        "deepseek",
        "deepseek auto",
        "stages",
        "auto",
        "odd",
        "odd auto",
    ],
)
def test_greedy_is_the_argmax_of_the_full_forward_pass(mesh, model, pipeline) -> None:
    """Token by token: each is the likeliest after all tokens before it, its own ones included."""
    config = small_config(model=model, pipeline=pipeline)
    found = greedy(config, mesh)
    sequences = [[*prompt, *new] for prompt, new in zip(PROMPTS, found, strict=True)]
    logits = full_forward(new_model(Config(model=config.model)), sequences)
    for prompt, sequence, row in zip(PROMPTS, sequences, logits, strict=True):
        assert len(sequence) == len(prompt) + 6
        likeliest = row.argmax(axis=-1)[len(prompt) - 1 : len(sequence) - 1]
        assert sequence[len(prompt) :] == likeliest.tolist()
    assert len({token for new in found for token in new}) > 3, "they would be equal by chance"


@pytest.mark.slow
def test_a_prompt_does_not_depend_on_the_others_and_ends_with_its_end_token() -> None:
    model = new_model(small_config())
    together = generate(model, Request(prompts=PROMPTS, new_tokens=6))
    end = together[1][2]
    alone = generate(model, Request(prompts=PROMPTS[1:2], new_tokens=6, end_tokens=(30, end)))
    first = together[1].index(end)
    assert alone == [together[1][: first + 1]]


def test_attention_over_a_cache_is_the_last_row_of_attention() -> None:
    """With a window and without; what is in the slots behind a token does not count."""
    query, key, value = (float_rows(2, 7, n, 4, seed=n) for n in (4, 2, 2))
    lengths = jnp.asarray([[6], [3]])  # the position of the new token in each sequence
    behind = (jnp.arange(9)[None] > lengths)[:, :, None, None]
    cache = [jnp.where(behind, jnp.float32(1e4), _padded(x)) for x in (key, value)]
    last = jnp.take_along_axis(query, lengths[:, :, None, None], axis=1)
    for window in (None, 3):
        options = Options(scale=0.7, window=window)
        whole = dot_product_attention(query, key, value, grouped=P(*[None] * 5), options=options)
        want = jnp.take_along_axis(whole, lengths[:, :, None, None], axis=1)
        found = cached_attention(last, *cache, lengths, grouped=P(*[None] * 5), options=options)
        np.testing.assert_allclose(found, want, atol=1e-6)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 2), (0, 0), (0, 0)))


def test_each_sequence_writes_its_own_slot() -> None:
    stored, new = float_rows(2, 5, 2, 4), float_rows(2, 1, 2, 4, seed=1)
    found = np.asarray(in_slots(stored, new, jnp.asarray([[4], [1]])))
    want = np.array(stored)
    want[0, 4], want[1, 1] = new[0, 0], new[1, 0]
    np.testing.assert_array_equal(found, want)


# ---- sampling ----------------------------------------------------------------------------------


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    shares = np.array([[0.4, 0.1, 0.3, 0.2], [0.05, 0.05, 0.1, 0.8]], np.float32)
    logits = jnp.log(shares)

    def kept(**how: Any) -> list[list[int]]:
        left = np.isfinite(restricted(logits, Sampling(temperature=1.0, **how)))
        return [np.flatnonzero(row).tolist() for row in left]

    assert kept() == [[0, 1, 2, 3]] * 2
    assert kept(top_k=2) == [[0, 2], [2, 3]]
    assert kept(top_k=9) == [[0, 1, 2, 3]] * 2
    assert kept(top_k=3) == [[0, 2, 3], [0, 1, 2, 3]], "of equal ones none is preferred"
    assert kept(top_p=0.65) == [[0, 2], [3]]
    assert kept(top_p=0.75) == [[0, 2, 3], [3]]
    assert kept(top_p=1e-9) == [[0], [3]]
    # Among the two that top_k leaves, the first has 4/7.
    assert kept(top_k=2, top_p=0.5) == [[0], [3]]


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_of_a_large_vocabulary(spread: float) -> None:
    """As many as a sum in float64 needs, but for rounding of what is left out; with 1.0 all."""
    logits = spread * np.random.default_rng(0).normal(size=32_000).astype(np.float32)
    likely = np.sort(np.exp(logits.astype(np.float64)))[::-1]
    rest = np.cumsum(likely[::-1])[::-1] / np.sum(likely)  # of each token and all less likely ones
    for top_p in (0.1, 0.5, 0.9, 0.999, 0.999999, 1.0):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        kept = int(np.sum(np.isfinite(restricted(jnp.asarray(logits)[None], sampling))))
        assert rest[kept - 1] > (1 - top_p) * (1 - 1e-5)
        assert kept == 32_000 or rest[kept] <= (1 - top_p) * (1 + 1e-5)
        assert kept == 32_000 or top_p < 1


def test_draws_have_the_probabilities_of_the_temperature() -> None:
    logits = jnp.asarray([0.0, 1.0, 2.0, -1.0])
    rows = jnp.broadcast_to(logits, (20_000, 4))
    how = Sampling(temperature=2.0, seed=7)
    positions = jnp.full(len(rows), 5)
    drawn = next_tokens(rows, how, keys_of(7, len(rows)), positions)
    found = np.bincount(np.asarray(drawn), minlength=4) / len(rows)
    want = np.exp(np.asarray(logits) / 2)
    np.testing.assert_allclose(found, want / want.sum(), atol=0.015)
    few = next_tokens(rows[:50], how, keys_of(7, 50), positions[:50])
    assert few.tolist() == drawn[:50].tolist(), "a sequence does not depend on how many there are"
    assert few.tolist() != next_tokens(rows[:50], how, keys_of(8, 50), positions[:50]).tolist()
    assert few.tolist() != next_tokens(rows[:50], how, keys_of(7, 50), positions[:50] + 1).tolist()


@pytest.mark.slow
def test_each_new_token_has_random_numbers_of_its_own() -> None:
    """Where all tokens are equally likely, what is drawn depends on sequence and place alone."""
    model = new_model(small_config(model={"num_layers": 1}))
    model.head[...] = jnp.zeros_like(model.head[...])
    how = Sampling(temperature=1.0, seed=3)
    request = Request(prompts=PROMPTS, new_tokens=4, sampling=how)
    places = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
    alike, keys = jnp.zeros((len(PROMPTS), 32)), keys_of(3, len(PROMPTS))
    want = [next_tokens(alike, how, keys, places + number) for number in range(4)]
    assert generate(model, request) == np.stack(want, axis=1).tolist()
    assert len({tuple(tokens.tolist()) for tokens in want}) == 4


def test_a_low_temperature_draws_the_likeliest() -> None:
    """The lowest one divides most float32 logits to infinity."""
    logits = jnp.asarray([[10.0, 30.0, 20.0], [-5.0, 7.0, 7.5]])
    for temperature in (1e-3, 1e-20, 1.2e-38):
        how = Sampling(temperature=temperature)
        drawn = next_tokens(logits, how, keys_of(0, 2), jnp.zeros(2, jnp.int32))
        assert drawn.tolist() == [1, 2], temperature


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=-0.5), "temperature=-0.5 is out of range"),
        (lambda: Sampling(temperature=1e-39), "temperature=1e-39 is below 1.2e-38"),
        (lambda: Sampling(temperature=1.0, top_p=0.0), "top_p=0.0 is out of range"),
        (lambda: Sampling(top_k=3), "top_k=3 has no effect with temperature=0"),
        (lambda: Sampling(seed=-1), "seed=-1 is not a whole number"),
        (lambda: Request(prompts=(), new_tokens=1), "there is no prompt"),
        (lambda: Request(prompts=((1,), ()), new_tokens=1), "prompt 2 has no tokens"),
        (lambda: generate_with(prompts=((1.7, 2),)), r"prompt 1 is \(1.7, 2\), and not a tuple of"),
        (lambda: generate_with(prompts=((1,), "ab")), "prompt 2 is 'ab', and not a tuple of token"),
        (lambda: generate_with(prompts=(5,)), "prompt 1 is 5, and not a tuple of token ids"),
        (lambda: generate_with(end_tokens=7), "end_tokens is 7, and not a tuple of token ids"),
        (lambda: generate_with(prompts=((1, 32),)), "token 32 is not in the model's vocabulary"),
        (lambda: generate_with(end_tokens=(40,)), "token 40 is not in the model's vocabulary"),
        (lambda: generate_with({"max_position_embeddings": 7}), "a prompt of 2 tokens and 6 new"),
        (
            lambda: generate_with(new_tokens=10**9),
            "are 1000000002, and caches are made for 16777216",
        ),
        (lambda: generate_with({"experts": "capacity"}), "model.experts='capacity' drops tokens"),
        (lambda: call_cached({"segment_ids": jnp.ones((1, 4), int)}), "called with segment ids"),
        (lambda: call_cached({"positions": jnp.zeros((1, 4), int)}), "positions of 4 tokens"),
        (lambda: call_cached({}, slots=3), "a cache with 3 slots was given 4 tokens"),
    ],
)
def test_what_cannot_be_asked_for(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def generate_with(model: dict | None = None, **request: Any) -> None:
    given = {"prompts": ((1, 2),), "new_tokens": 6, **request}
    generate(new_model(small_config(model={"num_layers": 1, **(model or {})})), Request(**given))


def call_cached(side: dict, *, slots: int = 8) -> None:
    model = new_model(small_config(model={"num_layers": 1}))

    def call(model: Mixtral) -> jax.Array:
        return cached_model(model, batch=1, slots=slots)(jnp.zeros((1, 4), jnp.int32), **side)

    jax.eval_shape(call, model)


# ---- the command -------------------------------------------------------------------------------


def test_the_entry_point_offers_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (value,) = declared[offered.GROUP].values()
    module = import_module(value)
    needed = [name for name in vars(offered.Checkpoints) if not name.startswith("_")]
    assert len(needed) == 13
    assert [name for name in needed if not callable(getattr(module, name))] == []
    monkeypatch.setattr(offered, "entry_points", lambda group: [])
    with pytest.raises(InputError, match="no installed package offers checkpoints"):
        offered.checkpoints()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as pyproject.toml declares it, even where an older state is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in declared[group].items()]

    monkeypatch.setattr(offered, "entry_points", entry_points)


@pytest.fixture
def only_config(tmp_path: Path) -> Path:
    """A run without a checkpoint in it: what is refused before anything is loaded."""
    config = small_config(model={"vocab_size": 256, "max_position_embeddings": 100})
    (tmp_path / "config.yml").write_text(yaml.safe_dump(to_dict(config)))
    return tmp_path


HOT = ("--prompt", "a", "--temperature", "1")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--checkpoint", "no-such"), "no-such does not exist; give a run"),
        (("--prompt", "a", "--checkpoint", str(ROOT)), "does not hold the config of its model"),
        ((), "give either --prompt or --tokens"),
        (("--prompt", "a", "--tokens", "1"), "give either --prompt or --tokens"),
        (("--prompt", ""), "prompt 1 has no tokens"),
        (("--tokens", "1,x"), "--tokens '1,x' is not a list of token ids"),
        (("--tokens", "256"), "token 256 is not in the model's vocabulary"),
        (("--prompt", "a", "--end-token", "-3"), "--end-token '-3' is not a list"),
        ((*HOT[:3], "-1"), "temperature=-1.0 is out of range"),
        ((*HOT, "--top-p", "1.5"), "top_p=1.5 is out of range"),
        ((*HOT, "--top-k", "0"), "top_k=0 is not a whole number of 1 or more"),
        ((*HOT, "--new-tokens", "0"), "0 is not in the range"),
        (("--prompt", "a" * 40), "a prompt of 40 tokens and 64 new ones are 104"),
        ((*HOT, "--mesh", "stage=3"), "num_layers=4 does not split"),
        ((*HOT, "--mesh", "context=2"), "context=2 is not supported"),
        ((*HOT, "--platform", "tpu:v5p:2x2x2"), "has no devices to run on"),
        ((*HOT, "--set", "model.experts=capacity"), "drops tokens"),
        ((*HOT, "--set", "model.attention=flash"), "set model.attention='chunked'"),
        ((*HOT, "--model", "tiny"), "its tokens are not bytes"),
        ((*HOT, "--model", "tiny", "--config", "tiny"), "leave one of them out"),
        ((*HOT, "--set", "model.vocab_size=99", "--tokenizer", "bytes"), "has 256 tokens"),
        ((*HOT, "--tokenizer", "no.json"), "is neither 'bytes' nor a tokenizer.json"),
    ],
)
def test_wrong_input_ends_in_one_line(
    run: Run, only_config: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = run("generate", "--checkpoint", only_config, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face model that was never trained."""
    if missing("safetensors"):
        pytest.skip("safetensors is not installed")
    sizes = {"num_layers": 2, "attention_scale": 4**-0.5, "max_position_embeddings": 32}
    config = small_config(model=sizes)
    path = tmp_path_factory.mktemp("model") / "folder"
    linen_compat.save(new_model(config), path, format="huggingface")
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_hugging_face_folder_by_token_ids(run: Run, folder: Path) -> None:
    """The command makes what `generate` makes of the same model, on a mesh too."""
    model = linen_compat.load(folder)
    request = Request(
        prompts=PROMPTS[:2],
        new_tokens=4,
        sampling=Sampling(temperature=0.8, top_k=9, top_p=0.95, seed=5),
    )
    want = generate(model, request)
    words = [word for ids in request.prompts for word in ("--tokens", ",".join(map(str, ids)))]
    drawing = ["--temperature=0.8", "--top-k=9", "--top-p=0.95", "--seed=5", "--new-tokens=4"]
    for mesh in ("", "fsdp=2"):
        ended = run("generate", "--checkpoint", folder, *words, *drawing, "--mesh", mesh)
        assert ended.code == 0, ended.err
        assert ended.out.splitlines() == [",".join(map(str, tokens)) for tokens in want]
    ended = run("generate", "--checkpoint", folder, *words, *drawing, "--json", "-")
    assert [one["tokens"] for one in ended.json["results"]] == want
    assert [one["text"] for one in ended.json["results"]] == [None, None]
    assert "where the checkpoint" not in ended.err
    ended = run(
        "generate", "--checkpoint", folder, *words, *drawing, "--set", "model.sliding_window=2"
    )
    assert "model.sliding_window is 2, where the checkpoint's config says null" in ended.err
    assert len(re.findall("where the checkpoint", ended.err)) == 1


def test_a_tokenizer_of_a_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {word: number for number, word in enumerate(["?", "a", "b", "</s>"])}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
            }
        )
    )
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(InputError, match=r"pip install 'nnx-pipeline\[huggingface\]'"):
            tokenizer_for(None, str(tmp_path), 32)
    pytest.importorskip("tokenizers")
    found = tokenizer_for(None, str(tmp_path), 32)
    assert found.encode("b a nothing") == [2, 1, 0]
    assert found.decode([2, 1]) == "b a"
    assert found.end_tokens == (3,)
    for text, message in (
        ('{"eos_token_id": "b"}', "has the eos_token_id 'b', and not a token id or a list"),
        ('{"eos_token_id": [3, null]}', r"has the eos_token_id \[3, None\], and not a token id"),
        ('{"eos_token_id": 3', "generation_config.json is not JSON"),
        ('{"eos_token_id": 3, "eos_token_id": 4}', "'eos_token_id' stands there twice"),
        ("[3]", "generation_config.json holds no object with named values"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            tokenizer_for(None, str(tmp_path), 32)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert tokenizer_for(None, str(tmp_path), 32).end_tokens == (3, 1)
    with pytest.raises(InputError, match="the tokenizer has 4 tokens and the model 3"):
        tokenizer_for(None, str(tmp_path), 3)
    path.write_text("{")
    with pytest.raises(InputError, match="is not a tokenizer"):
        tokenizer_for(str(path), "", 32)


def test_bytes_of_a_text() -> None:
    bytes_of = tokenizer_for(None, "no-such", 256)
    text = "naïve – 1"
    assert bytes_of.encode(text) == list(text.encode())
    assert bytes_of.decode([*text.encode(), 0, 195]) == f"{text}\ufffd"
    with pytest.raises(InputError, match="contains a byte 0"):
        bytes_of.encode("a\0")
