"""Texts as tokens: their bytes, or what a `tokenizer.json` says."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nnx_pipeline.lab._files import place, read_regular
from nnx_pipeline.lab.errors import InputError, once, optional, unparsed

BYTE_VALUES = 256  # token ids of text: one for each value of a byte
END = 0  # the byte that ends a document; no text has it
FILE = "tokenizer.json"
_AT_ONCE = 1000  # texts that are encoded at the same time
# Where Hugging Face folders say which tokens end a text, the first that says so.
_END_TOKEN_FILES = ("generation_config.json", "config.json")


class Tokenizer(Protocol):
    """Turns texts into tokens, whose ids are below `vocab_size`, and back."""

    vocab_size: int
    end_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, and before them the tokens that begin every text."""

    def arrays(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The tokens of each text, as of `encode`."""

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens; end tokens and other special ones are left out."""


class Bytes:
    """The bytes of a text in UTF-8, as `nnx-pipeline train --data` reads texts."""

    vocab_size: int = BYTE_VALUES
    end_tokens: tuple[int, ...] = (END,)

    def encode(self, text: str) -> list[int]:
        tokens = list(text.encode("utf-8", "surrogateescape"))
        if END in tokens:
            raise InputError("the prompt contains a byte 0, which ends a document; remove it")
        return tokens

    def arrays(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD, as do tokens that are no byte."""
        shown = (token for token in tokens if token != END)
        parts = (bytes([token]) if token < BYTE_VALUES else b"\xff" for token in shown)
        return b"".join(parts).decode("utf-8", "replace")


class FromFile:
    """A `tokenizer.json`, by the package `tokenizers`; files beside it name the end tokens."""

    def __init__(self, path: Path) -> None:
        tokenizers = optional("tokenizers", "huggingface", str(path))
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the package raises Exception itself
            raise InputError(f"{path} is not a tokenizer: {error}; name another file") from error
        # What a file says of these is for batches of a model that sees so much at once.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.end_tokens = _end_tokens(path.parent)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def arrays(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        for first in range(0, len(texts), _AT_ONCE):
            for encoded in self._tokenizer.encode_batch(texts[first : first + _AT_ONCE]):
                yield np.array(encoded.ids, np.int64)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def tokenizer_for(name: str | None, checkpoint: str, vocab_size: int) -> Tokenizer:
    """The tokenizer for the model of a checkpoint; raises InputError where there is none that fits.

    - `name`: `bytes`, or a `tokenizer.json` or the folder of one; None for the `tokenizer.json` of
      the checkpoint, or where there is none for bytes if the vocabulary is that of bytes.
    """
    if name is None and (place(checkpoint) / FILE).is_file():
        name = checkpoint
    if name is None and vocab_size != BYTE_VALUES:
        raise InputError(
            f"{checkpoint} has no {FILE}, and with model.vocab_size={vocab_size} its tokens are "
            "not bytes; give --tokenizer FILE, or the prompt as --tokens"
        )
    tokenizer = tokenizer_of(name or "bytes")
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {vocab_size} "
            "(model.vocab_size); give --tokenizer with that of the model, or --tokens"
        )
    return tokenizer


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of `--tokenizer`: `bytes`, or a `tokenizer.json` or the folder of one."""
    if name == "bytes":
        return Bytes()
    path = place(name)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise InputError(
            f"--tokenizer {name} is neither 'bytes' nor a {FILE} nor a folder with one; "
            "name another file"
        )
    return FromFile(path)


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """The `eos_token_id` of a Hugging Face folder, which may be several; none where it has none.

    A file that says something else there is refused: texts would go on after their end.
    """
    for path in (folder / name for name in _END_TOKEN_FILES):
        if not path.is_file():
            continue
        try:
            values = json.loads(read_regular(path), object_pairs_hook=once)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {unparsed(error)}") from error
        if not isinstance(values, dict):
            raise InputError(f"{path} holds no object with named values; restore the file")
        said = values.get("eos_token_id")
        if said is None:
            continue
        ids = said if isinstance(said, list) else [said]
        if any(type(token) is not int for token in ids):
            raise InputError(
                f"{path} has the eos_token_id {said!r}, and not a token id or a list of them; "
                "correct the file"
            )
        return tuple(ids)
    return ()
