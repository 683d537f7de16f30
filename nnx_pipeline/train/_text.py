"""Data to train on: texts, which become tokens, and files of tokens; a part of each is held out."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab._files import MOST_TEXT, local, read_text
from nnx_pipeline.lab.errors import InputError, kind_of, once, unparsed
from nnx_pipeline.train._packing import Packed, Stream, packed
from nnx_pipeline.train._tokenizers import Bytes, Tokenizer, tokenizer_of

MOST_HELD_OUT = 2**20  # characters, lines or tokens, of all files together
BLOCK, BLOCKS = 2**19, 64  # tokens that are read together, and such blocks in a digest
NO_END = "none"
_WHAT = ("to train on", "that are held out")
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


class _Part(NamedTuple):
    """Streams to train on or to hold out, and the number of bytes of their texts."""

    streams: tuple[Stream, ...]
    text_bytes: int | None = None


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
    are_tokens = {_holds_tokens(path) for path in paths}
    if len(are_tokens) != 1:
        raise InputError(
            f"--data {', '.join(paths)} is texts and tokens; give files of one kind"
            if paths
            else "no file to train on is given; name one or more"
        )
    if are_tokens == {True}:
        end = _end_of_tokens(paths[0], tokenizer, end_token)
        _check_end(end, config.model.vocab_size)
        parts, of_bytes = _token_parts(paths, config), False
    else:
        reads = _tokenizer(tokenizer or "bytes", config.model.vocab_size)
        end, of_bytes = _end_of_texts(reads, end_token), isinstance(reads, Bytes)
        _check_end(end, config.model.vocab_size)
        parts = _text_parts(paths, config, reads, end)
    size = config.train.global_batch
    training, held_out = parts
    return Data(
        Packed(training.streams, size, end, seed),
        Packed(held_out.streams, size, end),
        _digest([*training.streams, *held_out.streams], end),
        held_out.text_bytes,
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


def _check_end(end: int | None, vocab_size: int) -> None:
    if end is not None and not 0 <= end < vocab_size:
        raise InputError(
            f"the token {end} is to end documents, and is not in the vocabulary; give --end-token "
            f"from 0 to {vocab_size - 1} (model.vocab_size={vocab_size})"
        )


def _holds_tokens(path: str) -> bool:
    return re.search(r"\.(npy|bin(:\w+)?)$", path) is not None


def _enough(stream: Stream, name: str, what: str) -> Stream:
    if not len(stream):
        needed = "a document 2" if stream.pieces else f"a sequence {stream.length}"
        raise InputError(
            f"{name} has {len(stream.tokens)} tokens {what}, and {needed} or more; the last tenth "
            "of each file is held out: give more text, or lower train.sequence_length"
        )
    return stream


def _held_out(count: int, files: int, length: int) -> int:
    """How many of so many characters, lines or tokens at the end of a file are held out."""
    return min(count // 10, max(MOST_HELD_OUT // files, length))


def _text_parts(
    paths: Sequence[str], config: Config, tokenizer: Tokenizer, end: int | None
) -> tuple[_Part, _Part]:
    length = config.train.sequence_length + 1
    documents: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sizes = [0, 0]
    for path in paths:
        for part, texts in enumerate(_texts_of(path, len(paths), length)):
            found = _tokens_of(path, texts, tokenizer, end, config.model.vocab_size)
            documents[part].extend(found)
            sizes[part] += sum(len(text.encode()) for text in texts)
    if end is None:
        joined = (np.concatenate([np.zeros(0, np.uint8), *arrays]) for arrays in documents)
        streams = [Stream(tokens, length) for tokens in joined]
    else:
        streams = [packed(arrays, length) for arrays in documents]
    for stream, what in zip(streams, _WHAT, strict=True):
        _enough(stream, "--data", what)
    return _Part((streams[0],), sizes[0]), _Part((streams[1],), sizes[1])


def _texts_of(path: str, files: int, length: int) -> tuple[list[str], list[str]]:
    """The documents of a file to train on, and those to hold out: lines, or the end of a text."""
    text = read_text(path, MOST_TEXT)
    if not path.endswith(".jsonl"):
        cut = len(text) - _held_out(len(text), files, length)
        return [text[:cut]], [text[cut:]]
    lines = enumerate(text.split("\n"), 1)
    texts = [_text_of_line(f"line {at} of {path}", line) for at, line in lines if line.strip()]
    cut = len(texts) - _held_out(len(texts), files, length)
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
        if end is None:
            yield tokens.astype(dtype)
            continue
        if len(tokens) and tokens[-1] == end:  # some tokenizers put it there
            tokens = tokens[:-1]
        if end in tokens:
            raise InputError(
                f"{path} contains the token {end} in a text, which is the one that ends a "
                "document; remove it, or give another --end-token"
            )
        yield np.append(tokens, end).astype(dtype)


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


def _token_parts(paths: Sequence[str], config: Config) -> tuple[_Part, _Part]:
    length, training, held_out = config.train.sequence_length + 1, [], []
    for path in paths:
        tokens = _mapped(path)
        for block in _blocks(tokens):
            low, high = int(block.min(initial=0)), int(block.max(initial=0))
            if low < 0 or high >= config.model.vocab_size:
                raise InputError(
                    f"{path} has the token {low if low < 0 else high}, which is not in the "
                    "vocabulary; is it of that dtype and without a header? Else give "
                    f"model.vocab_size={config.model.vocab_size} another value"
                )
        cut = len(tokens) - _held_out(len(tokens), len(paths), length)
        training.append(_enough(Stream(tokens[:cut], length), path, _WHAT[0]))
        held_out.append(_enough(Stream(tokens[cut:], length), path, _WHAT[1]))
    return _Part(tuple(training)), _Part(tuple(held_out))


def _mapped(path: str) -> np.ndarray:
    """The tokens of a file, which are read as they are needed."""
    name, _, dtype = path.rpartition(":") if ".bin:" in path else (path, "", "")
    if not name.endswith(".npy") and dtype not in ("uint16", "uint32"):
        raise InputError(
            f"--data {path} has numbers of unknown size; give {name}:uint16 or {name}:uint32, "
            "whichever they were written as"
        )
    file = local(name)
    try:
        if not file.is_file():
            raise InputError(f"{name} cannot be read: it is no regular file; name another file")
        if not dtype:
            tokens: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        elif file.stat().st_size % np.dtype(dtype).itemsize:
            raise ValueError(f"its {file.stat().st_size} bytes are no whole number of {dtype}")
        else:
            tokens = np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {unparsed(error)}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"{path} holds {kind_of(tokens)}; give one row of integers")
    if dtype == "uint16" and len(tokens) > 2 and not tokens[1:BLOCK:2].any():
        raise InputError(f"every other number of {path} is 0, as in uint32; give {name}:uint32")
    return tokens


def _blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """All of an array in blocks, or of a large one the first, the last and some between them."""
    last = max(len(tokens) - BLOCK, 0)
    for begin in (*range(0, last, max(BLOCK, -(-len(tokens) // BLOCKS))), last):
        yield tokens[begin : begin + BLOCK]


def _digest(streams: list[Stream], end: int | None) -> str:
    digest = hashlib.sha256(f"packed {end}".encode())
    for stream in streams:
        whole = not isinstance(stream.tokens, np.memmap)
        digest.update(f" {len(stream.tokens)} {stream.tokens.dtype} {whole}".encode())
        arrays = [stream.tokens] if whole else _blocks(stream.tokens)
        for array in (*arrays, *(stream.pieces or ())):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
