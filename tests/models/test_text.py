"""Texts as training data, and the bigram model that a trained one is measured against."""

import itertools
import math
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import Run, mesh_of, new_model, small_config

from linen_compat.checkpoints import _offered as linen_checkpoints
from nnx_pipeline import Config, InputError
from nnx_pipeline.train._text import Windows, bigram_entropy, entropy_of, read_texts
from nnx_pipeline.train.data import batches

OF_BYTES = small_config(model={"vocab_size": 256, "num_layers": 1})


def test_the_last_tenth_of_each_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("é" * 30 + "x" * 40)  # 100 bytes
    (tmp_path / "b").write_text("0123456789" * 2)
    found = read_texts([str(tmp_path / "a"), str(tmp_path / "b")], OF_BYTES)
    assert (
        bytes(found.training.astype(np.uint8))
        == ("é" * 30 + "x" * 30 + "\0" + "012345678901234567" + "\0").encode()
    )
    assert bytes(found.held_out.astype(np.uint8)) == b"x" * 10 + b"\0" + b"89" + b"\0"


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (b"a" * 500, small_config(), "--set model.vocab_size=256"),
        (b"a" * 70, OF_BYTES, "makes 8 tokens, and a sequence needs 9"),
        (b"", OF_BYTES, "makes 1 tokens, and"),
        (b"a" * 500 + b"\0", OF_BYTES, "contains a byte 0"),
        (b"\xff" * 500, OF_BYTES, "it is not text in UTF-8"),
        (None, OF_BYTES, "No such file"),
    ],
)
def test_text_that_cannot_be_used(
    tmp_path: Path, content: bytes | None, config: Config, message: str
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_texts([str(path)], config)


def test_one_sequence_with_its_targets_is_enough(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 80)
    assert len(read_texts([str(tmp_path / "text")], OF_BYTES).held_out) == 9


def test_batches_are_windows_of_the_text_and_the_same_on_every_mesh() -> None:
    text = np.arange(100, dtype=np.int32)
    starts = set()
    for mesh in ("", "stage=2,fsdp=2"):
        given = batches(OF_BYTES, mesh_of(mesh), Windows(text, seed=3))
        found = [next(given) for _ in range(2)]
        for batch in found:
            tokens = np.asarray(batch.tokens)
            np.testing.assert_array_equal(tokens, tokens[:, :1] + np.arange(8))
            np.testing.assert_array_equal(batch.targets, tokens + 1)
        starts.add(tuple(int(row[0]) for batch in found for row in np.asarray(batch.tokens)))
    (drawn,) = starts
    assert len(set(drawn)) > 8
    whole = Windows(text, seed=3)
    np.testing.assert_array_equal(
        whole.sequences(1, range(2, 4), 9), whole.sequences(1, range(8), 9)[2:4]
    )
    assert {int(row[0]) for row in Windows(text[:10], 0).sequences(0, range(40), 9)} == {0, 1}


def test_the_entropy_of_a_text_is_that_of_its_sequences() -> None:
    """Ten sequences of eight in batches of four: the last batch is half empty."""
    config = small_config(model={"vocab_size": 256, "num_layers": 1}, train={"global_batch": 4})
    model = new_model(config)
    text = np.random.default_rng(0).integers(1, 256, size=10 * 8 + 5).astype(np.int32)
    logits = model(text[:80].reshape(10, 8))
    likely = np.asarray(jax.nn.log_softmax(logits)).reshape(80, 256)
    want = -np.mean(likely[np.arange(80), text[1:81]])
    assert entropy_of(model, text, mesh_of("")) == pytest.approx(float(want), rel=1e-5)


def test_the_bigram_model_by_counting() -> None:
    training, held_out = b"abracadabra, abracadabra\0", b"a cabra barb\0dab"
    pairs, single = Counter(itertools.pairwise(training)), Counter(training)
    before = Counter(training[:-1])

    def entropy(k: float) -> float:
        total = 0.0
        for first, second in itertools.pairwise(held_out):
            share = (single[second] + 1) / (len(training) + 256)
            total -= math.log((pairs[first, second] + k * share) / (before[first] + k))
        return total / 15

    tokens = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (training, held_out)]
    want = min(entropy(2.0**power) for power in range(8))
    assert bigram_entropy(*tokens, length=5) == pytest.approx(want, rel=1e-9)
    assert entropy(1.0) > want, "the smoothing is chosen"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "no-such"), "no-such cannot be read"),
        (("--data", "text", "--set", "model.vocab_size=128"), "--set model.vocab_size=256"),
        (("--data", "text", "--set", "train.sequence_length=4096"), "or lower train.sequence"),
        (("--checkpoint-dir", "."), ". exists already"),
        (("--checkpoint-dir", ""), "the destination's name is empty"),
    ],
)
def test_training_refuses_before_it_begins(
    run: Run,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nnx_pipeline.train._cli.saving.checkpoints", lambda: linen_checkpoints)
    Path("text").write_text("abc " * 300)
    small = ("--model", "tiny", "--set", "model.vocab_size=256", "--steps", "1")
    ended = run("train", *small, *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err
