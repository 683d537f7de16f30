"""Data to train on: texts, which become tokens, or files of tokens; a part of each is held out."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab._files import MOST_TEXT, read_text
from nnx_pipeline.lab.errors import InputError, once, unparsed
from nnx_pipeline.train._packing import Packed, Stream, packed
from nnx_pipeline.train._token_files import (
    Parts,
    blocks,
    enough,
    held_out_of,
    holds_tokens,
    parts_of_tokens,
)
from nnx_pipeline.train._tokenizers import Bytes, Tokenizer, tokenizer_of

NO_END = "none"
EndToken = int | Literal["none"] | None


@dataclass(frozen=True)
class Data:
    """What `read_data` has read.

    - `training`: a `Source`; an epoch visits each sequence once, in an order of its own.
    - `held_out`: the sequences of the part that is not trained on, once.
    - `digest`: SHA-256 of what decides the sequences; of a large file of tokens it sees its size
      and some blocks.
    - `held_out_bytes`: of the texts that are held out; None for tokens of unknown texts.
    - `tokens_are_bytes`: whether the tokens are the bytes of texts.
    """

    training: Packed
    held_out: Packed
    digest: str
    held_out_bytes: int | None = None
    tokens_are_bytes: bool = False


def read_data(
    paths: Sequence[str],
    config: Config,
    *,
    seed: int = 0,
    tokenizer: str | None = None,
    end_token: EndToken = None,
) -> Data:
    """Reads texts or files of tokens, and packs them into sequences for a config.

    - `paths`: texts in UTF-8, each a document; `.jsonl`, where the `text` of each line is one; or
      tokens: one array of integers in `.npy`, or numbers without a header in `NAME.bin:uint16` or
      `NAME.bin:uint32`, which are mapped into memory.
    - `config`: gives the vocabulary, the batch, and the length of a sequence.
    - `seed`: of the order of the sequences.
    - `tokenizer`: a `tokenizer.json` or its folder; None for the bytes of texts.
    - `end_token`: the one after each document; "none" for documents that run on into each other;
      None for 0 with bytes, and else the one `eos_token_id` beside the tokenizer.

    Raises InputError for what cannot be read or holds no sequence, and where the end of a document
    would be a guess.
    """
    are_tokens = {holds_tokens(path) for path in paths}
    if len(are_tokens) != 1:
        raise InputError(
            f"--data {', '.join(paths)} is texts and tokens; give files of one kind"
            if paths
            else "no file to train on is given; name one or more"
        )
    vocab_size, of_bytes = config.model.vocab_size, False
    if are_tokens == {True}:
        end = _checked_end(_end_of_tokens(paths[0], tokenizer, end_token), vocab_size)
        parts = parts_of_tokens(paths, config)
    else:
        reads = _tokenizer("bytes" if tokenizer is None else tokenizer, vocab_size)
        end = _checked_end(_end_of_texts(reads, end_token), vocab_size)
        parts, of_bytes = _parts_of_texts(paths, config, reads, end), isinstance(reads, Bytes)
    size = config.train.global_batch
    held_out = Packed(parts.held_out, size, end)
    if not held_out.targets:
        raise InputError(
            f"--data {', '.join(paths)}: no token of the last tenth of each file, which is held "
            f"out, follows another one of its document (they end with {end}); give other data"
        )
    return Data(
        Packed(parts.training, size, end, seed),
        held_out,
        _digest(parts, end),
        parts.held_out_bytes,
        of_bytes,
    )


def _tokenizer(name: str, vocab_size: int) -> Tokenizer:
    found = tokenizer_of(name)
    if found.vocab_size > vocab_size:
        raise InputError(
            f"--data is read as {found.vocab_size} different tokens (--tokenizer {name}), and "
            f"model.vocab_size={vocab_size} has no place for some of them; --set "
            f"model.vocab_size={found.vocab_size}"
        )
    return found


def _checked_end(end: int | None, vocab_size: int) -> int | None:
    if end is not None and not 0 <= end < vocab_size:
        raise InputError(
            f"the token {end} is to end documents, and is not in the vocabulary; give --end-token "
            f"from 0 to {vocab_size - 1} (model.vocab_size={vocab_size})"
        )
    return end


def _parts_of_texts(
    paths: Sequence[str], config: Config, tokenizer: Tokenizer, end: int | None
) -> Parts:
    length, held_out_bytes = config.train.sequence_length + 1, 0
    documents: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for path in paths:
        halves = _texts_of(path, len(paths), length)
        for found, texts in zip(documents, halves, strict=True):
            found.extend(_tokens_of(path, texts, tokenizer, end, config.model.vocab_size))
        held_out_bytes += sum(len(text.encode()) for text in halves[1])
    if end is None:
        joined = (np.concatenate([np.zeros(0, np.uint8), *arrays]) for arrays in documents)
        streams = [Stream(tokens, length) for tokens in joined]
    else:
        streams = [packed(arrays, length) for arrays in documents]
    training = enough(streams[0], "--data", "to train on")
    held_out = enough(streams[1], "--data", "that are held out")
    return Parts((training,), (held_out,), held_out_bytes)


def _texts_of(path: str, files: int, length: int) -> tuple[list[str], list[str]]:
    """The documents of a file to train on, and those to hold out: lines, or the end of a text."""
    text = read_text(path, MOST_TEXT)
    if not path.endswith(".jsonl"):
        cut = len(text) - held_out_of(len(text), files, length)
        return [text[:cut]], [text[cut:]]
    lines = enumerate(text.split("\n"), 1)
    texts = [_text_of_line(f"line {at} of {path}", line) for at, line in lines if line.strip()]
    cut = len(texts) - held_out_of(len(texts), files, length)
    return texts[:cut], texts[cut:]


def _text_of_line(where: str, line: str) -> str:
    try:
        values = json.loads(line, object_pairs_hook=once)
        text = values["text"] if isinstance(values, dict) else None
        if not isinstance(text, str):
            raise KeyError
        text.encode()
    except KeyError:
        raise InputError(
            f'{where} has no text; each line of a .jsonl is an object {{"text": "…"}}'
        ) from None
    except UnicodeError as error:
        raise InputError(f"{where} is not text in UTF-8; correct the line") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {unparsed(error)}") from error
    return text


def _tokens_of(
    path: str, texts: list[str], tokenizer: Tokenizer, end: int | None, vocab_size: int
) -> Iterator[np.ndarray]:
    """The tokens of each text, and the end token after them."""
    dtype = np.min_scalar_type(vocab_size - 1)
    for tokens in tokenizer.arrays(texts):
        if tokens.max(initial=0) >= vocab_size:
            raise InputError(
                f"{path} becomes the token {tokens.max()}, and model.vocab_size={vocab_size} has "
                "tokens below that; set it to more, or give another --tokenizer"
            )
        tokens = tokens.astype(dtype, copy=False)
        if end is None:
            yield tokens
            continue
        if len(tokens) and tokens[-1] == end:  # some tokenizers put it there
            tokens = tokens[:-1]
        if end in tokens:
            raise InputError(
                f"{path} contains the token {end} in a text, which is the one that ends a "
                "document; remove it, or give another --end-token"
            )
        yield np.append(tokens, dtype.type(end))


def _end_of_texts(tokenizer: Tokenizer, given: EndToken) -> int | None:
    if given == NO_END:
        return None
    if given is not None:
        return int(given)
    if len(tokenizer.end_tokens) != 1:
        ends = ", ".join(map(str, tokenizer.end_tokens)) or "none"
        raise InputError(
            f"the files beside --tokenizer say eos_token_id: {ends}, and one token ends a "
            "document; give it as --end-token ID, or none where documents run on into each other"
        )
    return tokenizer.end_tokens[0]


def _end_of_tokens(path: str, tokenizer: str | None, given: EndToken) -> int | None:
    if tokenizer is not None:
        raise InputError(
            f"--tokenizer {tokenizer} is for texts, and --data {path} holds tokens; leave it out"
        )
    if given is None:
        raise InputError(
            f"--data {path} does not say which of its tokens ends a document; give --end-token "
            "ID, or none where documents run on into each other"
        )
    return None if given == NO_END else int(given)


def _digest(parts: Parts, end: int | None) -> str:
    digest = hashlib.sha256(f"packed {end}".encode())
    total = sum(len(stream.tokens) for stream in (*parts.training, *parts.held_out))
    for stream in (*parts.training, *parts.held_out):
        whole = not isinstance(stream.tokens, np.memmap)
        digest.update(f" {len(stream.tokens)} {stream.tokens.dtype} {whole}".encode())
        arrays = [stream.tokens] if whole else blocks(stream.tokens, total)
        for array in (*arrays, *(stream.pieces or ())):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
