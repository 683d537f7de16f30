"""Files of tokens, mapped into memory, and what texts have in common with them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab._files import local
from nnx_pipeline.lab.errors import InputError, kind_of, unparsed
from nnx_pipeline.train._packing import Stream

MOST_HELD_OUT = 2**20  # characters, lines or tokens, of all files together
BLOCK, BLOCKS = 2**19, 64  # tokens of a block, and blocks of all files that a digest sees


class Parts(NamedTuple):
    """Streams to train on and to hold out; of texts also the bytes of those that are held out."""

    training: tuple[Stream, ...]
    held_out: tuple[Stream, ...]
    held_out_bytes: int | None = None


def holds_tokens(path: str) -> bool:
    return re.search(r"\.(npy|bin(:\w+)?)$", path) is not None


def enough(stream: Stream, name: str, what: str) -> Stream:
    if not len(stream):
        needed = "a document 2" if stream.pieces else f"a sequence {stream.length}"
        raise InputError(
            f"{name} has {len(stream.tokens)} tokens {what}, and {needed} or more; the last tenth "
            "of each file is held out: give more text, or lower train.sequence_length"
        )
    return stream


def held_out_of(count: int, files: int, length: int) -> int:
    """How many of so many characters, lines or tokens at the end of a file are held out."""
    return min(count // 10, max(MOST_HELD_OUT // files, length))


def parts_of_tokens(paths: Sequence[str], config: Config) -> Parts:
    length, training, held_out = config.train.sequence_length + 1, [], []
    mapped = {path: _mapped(path, config.model.vocab_size) for path in paths}
    total = sum(map(len, mapped.values()))
    for path in paths:
        tokens = mapped[path]
        for block in blocks(tokens, total):
            low, high = int(block.min(initial=0)), int(block.max(initial=0))
            if low < 0 or high >= config.model.vocab_size:
                raise InputError(
                    f"{path} has the token {low if low < 0 else high}, which is not in the "
                    "vocabulary; is it of that dtype and without a header? Else give "
                    f"model.vocab_size={config.model.vocab_size} another value"
                )
        cut = len(tokens) - held_out_of(len(tokens), len(paths), length)
        training.append(enough(Stream(tokens[:cut], length), path, "to train on"))
        held_out.append(enough(Stream(tokens[cut:], length), path, "that are held out"))
    return Parts(tuple(training), tuple(held_out))


def _mapped(path: str, vocab_size: int) -> np.ndarray:
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
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {unparsed(error)}") from error
    if (
        not isinstance(tokens, np.ndarray)
        or tokens.ndim != 1
        or not np.issubdtype(tokens.dtype, np.integer)
    ):
        raise InputError(f"{path} holds {kind_of(tokens)}; give one row of integers")
    upper = (vocab_size - 1) >> 16  # the largest upper half of a token in uint32
    if dtype == "uint16" and len(tokens) > 2 and tokens[1:BLOCK:2].max() <= upper:
        raise InputError(
            f"every other number of {path} is {upper} or less, as in uint32; give {name}:uint32"
        )
    return tokens


def blocks(tokens: np.ndarray, total: int) -> Iterator[np.ndarray]:
    """All of a file in blocks, or the first, the last and some between them.

    Files with so many tokens in `total` share `BLOCKS` by their lengths.
    """
    last, most = max(len(tokens) - BLOCK, 0), max(-(-BLOCKS * len(tokens) // max(total, 1)), 1)
    for begin in (*range(0, last, max(BLOCK, -(-len(tokens) // most))), last):
        yield tokens[begin : begin + BLOCK]
