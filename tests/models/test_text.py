"""Texts and files of tokens as training data, and the loss on what is held out of them."""

import itertools
import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import Run, mesh_of, missing, new_model, small_config

from linen_compat.checkpoints import _offered as linen_checkpoints
from nnx_pipeline import Config, InputError
from nnx_pipeline.train import _token_files as reading
from nnx_pipeline.train import read_data
from nnx_pipeline.train._held_out import bigram_entropy, bigram_of, entropy_of
from nnx_pipeline.train._packing import Packed, Stream

OF_BYTES = small_config(model={"vocab_size": 256, "num_layers": 1})
WORDS = ["?", "<s>", "a", "b", "c", "</s>"]


def text_of(source: Packed) -> bytes:
    return source.streams[0].tokens.astype(np.uint8).tobytes()


def tokenizer_in(folder: Path, ends: str = "5", words: list[str] = WORDS) -> str:
    """A tokenizer of words, which begins each text with `<s>`, and the file that names its end."""
    folder.mkdir(exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(words)}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    values = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequence],
            "pair": [begin, sequence, sequence],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(f'{{"eos_token_id": {ends}}}')
    return str(folder)


def lines_in(file: Path, *texts: str) -> str:
    file.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n")
    return str(file)


def test_the_last_tenth_of_each_file_is_held_out(tmp_path: Path) -> None:
    """Of characters of a text, and of lines of a .jsonl, whose texts are documents."""
    (tmp_path / "a").write_text("é" * 30 + "x" * 40)
    (tmp_path / "b").write_text("0123456789" * 2)
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    files.append(lines_in(tmp_path / "c.jsonl", *"cdefghijkl", "end\u2028"))
    found = read_data(files, OF_BYTES)
    heads = ["é" * 30 + "x" * 33, "012345678901234567", *"cdefghijkl"]
    tails = ["x" * 7, "89", "end\u2028"]
    assert text_of(found.training) == "".join(f"{head}\0" for head in heads).encode()
    assert text_of(found.held_out) == "".join(f"{tail}\0" for tail in tails).encode()
    assert found.held_out_bytes == 7 + 2 + 6
    joined = read_data(files, OF_BYTES, end_token="none")
    assert text_of(joined.training) == "".join(heads).encode()
    rows = joined.training.numbered([0])
    assert (rows.segment_ids, rows.tokens.shape) == (None, (1, 9))


def test_no_more_is_held_out_than_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_HELD_OUT", 24)
    for name in ("a", "b"):
        (tmp_path / name).write_text("x" * 500)
    found = read_data([str(tmp_path / "a"), str(tmp_path / "b")], OF_BYTES)
    assert text_of(found.held_out) == (b"x" * 12 + b"\0") * 2


def test_texts_become_tokens_by_a_file(tmp_path: Path) -> None:
    """With the token that begins a text, as `generate` begins one, and the end said beside it."""
    pytest.importorskip("tokenizers")
    texts = lines_in(tmp_path / "a.jsonl", *["a b c", "c nothing"] * 5, "b")
    config = small_config(model={"vocab_size": 6})
    found = read_data([texts], config, tokenizer=tokenizer_in(tmp_path / "words"))
    assert found.training.streams[0].tokens.tolist() == [1, 2, 3, 4, 5, 1, 4, 0, 5] * 5
    assert found.held_out.streams[0].tokens.tolist() == [1, 3, 5]
    assert (found.held_out_bytes, found.tokens_are_bytes) == (1, False)
    other = tokenizer_in(tmp_path / "others", words=["?", "<s>", "a", "c", "b", "</s>"])
    assert read_data([texts], config, tokenizer=other).digest != found.digest
    with pytest.raises(InputError, match="contains the token 4 in a text, which is the one that"):
        read_data([texts], config, tokenizer=other, end_token=4)
    with pytest.raises(InputError, match=r"read as 6 different tokens .* model.vocab_size=6"):
        read_data([texts], small_config(model={"vocab_size": 5}), tokenizer=other)
    for ends, said in (("[5, 3]", "5, 3"), ("null", "none")):
        with pytest.raises(InputError, match=f"eos_token_id: {said}, .* give it as --end-token ID"):
            read_data([texts], config, tokenizer=tokenizer_in(tmp_path / "words", ends))
    again = read_data([texts], config, tokenizer=str(tmp_path / "words"), end_token=5)
    assert again.digest == found.digest
    file = tmp_path / "words" / "tokenizer.json"
    file.write_text(file.read_text().replace('"b": 3', '"b": 9'))
    with pytest.raises(InputError, match=r"becomes the token 9, and model.vocab_size=6 has tokens"):
        read_data([texts], config, tokenizer=str(file), end_token=5)


TOKENS = np.arange(400, dtype=np.uint32) % 200


def written(folder: Path, tokens: np.ndarray, name: str) -> str:
    if name == "a.npy":
        np.save(folder / name, tokens)
    else:
        (folder / "a.bin").write_bytes(tokens.astype(f"<{name[-2:]}").tobytes())
    return str(folder / name).replace("u2", "uint16").replace("u4", "uint32")


@pytest.mark.parametrize("name", ["a.npy", "a.bin:u2", "a.bin:u4"])
def test_files_of_tokens_are_mapped(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, TOKENS, name)
    found = read_data([file], OF_BYTES, end_token=7)
    for part, want in ((found.training, TOKENS[:360]), (found.held_out, TOKENS[360:])):
        (stream,) = part.streams
        assert isinstance(stream.tokens, np.memmap)
        np.testing.assert_array_equal(stream.tokens, want)
    np.testing.assert_array_equal(found.held_out.numbered([1]).tokens, [TOKENS[368:377]])
    assert found.training.numbered([0]).segment_ids.tolist() == [[1] * 8]
    assert found.training.numbered([25]).segment_ids.tolist() == [[1] * 8]
    digests = {found.digest, read_data([file], OF_BYTES, end_token="none").digest}
    written(tmp_path, TOKENS[::-1], name)
    assert len({*digests, read_data([file], OF_BYTES, end_token=7).digest}) == 3


def test_a_tokenizer_cuts_and_fills_no_text(tmp_path: Path) -> None:
    """Whatever its file says for the batches of a model."""
    from tokenizers import Tokenizer

    config = small_config(model={"vocab_size": 8}, train={"sequence_length": 8})
    texts = lines_in(tmp_path / "a.jsonl", *["a b c a b c a b c", "a b"] * 20)
    folder = tokenizer_in(tmp_path / "words")
    plain = read_data([texts], config, tokenizer=folder)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=4, length=12)
    tokenizer.save(f"{folder}/tokenizer.json")
    assert read_data([texts], config, tokenizer=folder).digest == plain.digest


def test_what_the_digest_sees_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length, both ends and blocks between them, of a file that has more than these."""
    monkeypatch.setattr(reading, "BLOCK", 10)
    monkeypatch.setattr(reading, "BLOCKS", 4)
    tokens = np.ones(1000, np.uint16)
    digests = []
    for at in (0, 9, 225, 899, 999, 500, 10):
        changed = tokens.copy()
        changed[at] = 2
        file = written(tmp_path, changed, "a.bin:u2")
        digests.append(read_data([file], OF_BYTES, end_token=0).digest)
    assert len(set(digests)) == 6
    assert digests[-1] == digests[-2], "neither 500 nor 10 is in a block"
    file = written(tmp_path, tokens[1:], "a.bin:u2")
    assert read_data([file], OF_BYTES, end_token=0).digest not in digests
    blocks = list(reading.blocks(np.arange(1000), 7000))
    assert [block[0] for block in blocks] == [0, 990], "of many files the ends alone"
    whole = np.concatenate(list(reading.blocks(np.arange(30), 40)))
    assert whole.tolist() == list(range(30)), "where all files are no more than the blocks"


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (b"a" * 500, small_config(), "--set model.vocab_size=256"),
        (b"a" * 9, OF_BYTES, "--data has 1 tokens that are held out, and a document 2 or more"),
        (b"", OF_BYTES, "has 1 tokens to train on"),
        (b"a" * 500 + b"\0a", OF_BYTES, "contains the token 0 in a text"),
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
        read_data([str(path)], config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 of .*a.jsonl is not JSON"),
        ("[1]", 'line 2 of .*a.jsonl has no text; each line .* is an object {"text": "…"}'),
        ('{"txt": "a"}', "line 2 .* has no text"),
        ('{"text": 1}', "line 2 .* has no text"),
        ('{"text": "\\ud800"}', "line 2 .* is not text in UTF-8"),
    ],
)
def test_lines_that_hold_no_text(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(InputError, match=message):
        read_data([str(file)], OF_BYTES)


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("a.bin", TOKENS, "has numbers of unknown size; give .*a.bin:uint16 or .*a.bin:uint32"),
        ("a.bin:int64", TOKENS, "has numbers of unknown size"),
        (
            "a.bin:uint16",
            TOKENS,
            "every other number of .*a.bin:uint16 is 0 or less, as in uint32",
        ),
        ("a.bin:uint32", TOKENS.astype(np.uint16), "has the token .*, which is not in the vocab"),
        ("a.bin:uint32", TOKENS.astype(np.uint16)[1:], "its 798 bytes are no whole number of"),
        ("a.bin:uint32", TOKENS[:80], "has 8 tokens that are held out, and a sequence 9 or more"),
        ("a.bin:uint16", TOKENS[:0], "cannot be read"),
        ("no.bin:uint16", TOKENS, "is no regular file"),
        ("a.npy", TOKENS.reshape(2, 200), r"holds uint32\[2, 200\]; give one row of integers"),
        ("a.npy", TOKENS.astype(float), r"holds float64\[400\]; give one row of integers"),
        ("a.npy", TOKENS.astype(int) - 1, "has the token -1, which is not in the vocabulary"),
        ("a.npy", TOKENS[:0], "has 0 tokens to train on|cannot be read"),
        ("a.npy", None, "a.npy cannot be read"),
        ("empty.npy", TOKENS, "empty.npy cannot be read"),
        ("several.npy", TOKENS, "several.npy holds NpzFile; give one row of integers"),
        ("a.npy", TOKENS * (np.arange(400) < 350), r"follows another one of its document \(.* 0\)"),
    ],
)
def test_files_that_hold_no_tokens(
    tmp_path: Path, name: str, tokens: np.ndarray | None, message: str
) -> None:
    file = tmp_path / "a"
    if tokens is None:
        file.with_suffix(".npy").write_bytes(b"no array")
    else:
        np.save(file.with_suffix(".npy"), tokens)
        file.with_suffix(".bin").write_bytes(tokens.tobytes())
    (tmp_path / "empty.npy").touch()
    with (tmp_path / "several.npy").open("wb") as several:
        np.savez(several, TOKENS, TOKENS)
    with pytest.raises(InputError, match=message):
        read_data([str(tmp_path / name)], OF_BYTES, end_token=0)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a.npy", "text"], {}, "a.npy, .*text is texts and tokens; give files of one kind"),
        ([], {}, "no file to train on is given"),
        (["a.npy"], {}, "a.npy does not say which of its tokens ends a document; give --end-token"),
        (["a.npy"], {"tokenizer": "x"}, "--tokenizer x is for texts, and --data .*a.npy holds"),
        (["a.npy"], {"end_token": 256}, "the token 256 is to end documents, and is not in the"),
        (["text"], {"tokenizer": "x"}, "--tokenizer x is neither 'bytes' nor a tokenizer.json"),
    ],
)
def test_what_would_be_a_guess(
    tmp_path: Path, names: list[str], options: dict[str, Any], message: str
) -> None:
    np.save(tmp_path / "a.npy", TOKENS)
    (tmp_path / "text").write_text("a" * 100)
    with pytest.raises(InputError, match=message):
        read_data([str(tmp_path / name) for name in names], OF_BYTES, **options)


def test_the_loss_of_a_text_is_that_of_its_sequences() -> None:
    """Ten sequences of eight in batches of four: the last batch is half empty."""
    config = small_config(model={"vocab_size": 256, "num_layers": 1}, train={"global_batch": 4})
    model = new_model(config)
    text = np.random.default_rng(0).integers(1, 256, size=10 * 8 + 5).astype(np.int32)
    logits = model(text[:80].reshape(10, 8))
    likely = np.asarray(jax.nn.log_softmax(logits)).reshape(80, 256)
    want = -np.mean(likely[np.arange(80), text[1:81]])
    held_out = Packed((Stream(text, 9),), 4, None)
    assert entropy_of(model, held_out, mesh_of("")) == pytest.approx(float(want), rel=1e-5)


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
    found = bigram_entropy(tokens[0], tokens[1][:-1], tokens[1][1:])
    assert found == pytest.approx(want, rel=1e-9)
    assert entropy(1.0) > want, "the smoothing is chosen"
    parts = [Packed((Stream(part, 6),), 8, None) for part in tokens]
    assert bigram_of(*parts) == pytest.approx(want, rel=1e-9)


@pytest.fixture
def own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnx_pipeline.train._cli.saving.checkpoints", lambda: linen_checkpoints)


@pytest.mark.usefixtures("own_checkpoints")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "no-such"), "no-such cannot be read"),
        (("--data", "text", "--set", "model.vocab_size=128"), "--set model.vocab_size=256"),
        (("--data", "text", "--end-token", "x"), "--end-token 'x' is no token id; give a whole"),
        (("--tokenizer", "x"), "--tokenizer is about texts, and sequences are generated; give a"),
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
    Path("text").write_text("abc " * 300)
    small = ("--model", "tiny", "--set", "model.vocab_size=256", "--steps", "1")
    ended = run("train", *small, *options)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err


@pytest.mark.usefixtures("own_checkpoints")
def test_a_tokenizer_without_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("a b c " * 40)
    words = ("--data", tmp_path / "text", "--tokenizer", tokenizer_in(tmp_path / "words"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    ended = run("train", "--model", "tiny", "--steps", 1, *words)
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (2, "", 1)
    assert "pip install 'nnx-pipeline[huggingface]'" in ended.err


@pytest.mark.usefixtures("own_checkpoints")
@pytest.mark.skipif(missing("tokenizers"), reason="tokenizers is not installed")
def test_a_resume_sees_the_batches_it_would_have_seen(run: Run, tmp_path: Path) -> None:
    """Packed documents by a tokenizer, over more than an epoch: to the bit; or it is refused."""
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(["a", "b", "c"], size=size)) for size in range(2, 22)]
    data = ("--data", lines_in(tmp_path / "a.jsonl", *texts))
    by = ("--tokenizer", tokenizer_in(tmp_path / "words"))
    sizes = {**vars(OF_BYTES.model), "vocab_size": 6}, vars(OF_BYTES.train)
    small = [
        word
        for section, values in zip(("model", "train"), sizes, strict=True)
        for name, value in values.items()
        for word in ("--set", f"{section}.{name}={value}")
    ]
    words = ("train", "--model", "tiny", *small, *data, "--checkpoint-dir")
    whole, part = tmp_path / "whole", tmp_path / "part"
    ended = run(*words, whole, *by, "--steps", 6, "--save-every", 2, "--json", "-")
    assert ended.code == 0, ended.err
    held_out = ended.json["held_out"]
    tokens, size = held_out["tokens"], held_out["bytes"]
    assert (tokens, size) == (20 + 21 + 2 * 2, 2 * (20 + 21) - 2)
    # All but the two tokens that begin the documents are predicted.
    assert held_out["loss_per_byte"] == pytest.approx(held_out["loss"] * (tokens - 2) / size)
    assert held_out["bigram_loss"] is None
    for mesh, tolerance in (("", 0.0), ("data=2,fsdp=2", 1e-5)):
        shutil.copytree(whole, part)
        for step in ("4", "6"):
            shutil.rmtree(part / step)
        on = ("--steps", 6, "--resume", "--mesh", mesh)
        again = run(*words, part, *by, *on, "--json", "-")
        assert again.code == 0, again.err
        assert again.json["losses"] == pytest.approx(ended.json["losses"][2:], abs=tolerance, rel=0)
        shutil.rmtree(part)
    others = tokenizer_in(tmp_path / "others", words=["?", "<s>", "c", "b", "a", "</s>"])
    ended = run(*words, whole, "--tokenizer", others, *on)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert "in the same order, with the same --tokenizer and --end-token" in ended.err
    said = run(*words, whole, *by, *on)
    assert (
        f"loss {held_out['loss']:.4f} in nats per token, {held_out['loss_per_byte']:.4f} in"
        in said.out
    )
