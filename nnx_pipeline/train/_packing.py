"""Tokens as sequences of one length, and the order in which a training visits them."""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nnx_pipeline.train.data import Sequences

_ROUNDS = 6


class Pieces(NamedTuple):
    """Which pieces of a stream each sequence holds: those from `first[i]` to `first[i + 1]`.

    A piece is `sizes` tokens from `begins` on.
    """

    first: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class Stream:
    """Tokens one after the other, in memory or mapped from a file.

    - `length`: tokens of a sequence, the target of the last one among them.
    - `pieces`: None where the stream is cut into sequences one after the other.
    """

    tokens: np.ndarray
    length: int
    pieces: Pieces | None = None

    def __len__(self) -> int:
        """The number of sequences; what the last one would lack is left out."""
        if self.pieces is None:
            return max(len(self.tokens) - 1, 0) // (self.length - 1)
        return len(self.pieces.first) - 1

    def of(self, sequence: int) -> list[np.ndarray]:
        """The pieces of a sequence."""
        if self.pieces is None:
            begin = sequence * (self.length - 1)  # the target of the last token is the next first
            return [self.tokens[begin : begin + self.length]]
        here = slice(*self.pieces.first[sequence : sequence + 2])
        places = zip(self.pieces.begins[here], self.pieces.sizes[here], strict=True)
        return [self.tokens[begin : begin + size] for begin, size in places]


def packed(documents: list[np.ndarray], length: int) -> Stream:
    """A stream of documents, each whole in one sequence where it is not longer than that.

    A longer one is cut into pieces of `length` tokens, each of which begins with the last token of
    the one before it, so that every token but the first is a target once.
    """
    whole = np.array([len(document) for document in documents], int)
    counts = -(-np.maximum(whole - 1, 0) // (length - 1))
    owner = np.repeat(np.arange(len(whole)), counts)
    cuts = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * (length - 1)
    begins = (np.cumsum(whole) - whole)[owner] + cuts
    sizes = np.minimum(whole[owner] - cuts, length)
    sequences = best_fit(sizes, length)
    order = np.argsort(sequences, kind="stable")
    first = np.searchsorted(sequences[order], np.arange(sequences.max(initial=-1) + 2))
    tokens = np.concatenate([np.zeros(0, np.uint8), *documents])
    return Stream(tokens, length, Pieces(first, begins[order], sizes[order]))


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The sequence of each piece: the largest piece first, where it leaves the least room."""
    found, count = np.zeros(len(sizes), int), 0
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit n: whether a sequence has room for n tokens
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        wide = rooms >> size
        if wide:
            room = size + (wide & -wide).bit_length() - 1
            sequence = with_room[room].pop()
            rooms ^= (not with_room[room]) << room
        else:
            room, sequence, count = length, count, count + 1
        found[piece] = sequence
        with_room[room - size].append(sequence)
        rooms |= 1 << (room - size)
    return found


def shuffled(place: int, count: int, key: str) -> int:
    """Where a place goes in an order of 0 … count - 1 that a key decides: no array is needed.

    A Feistel network permutes the numbers below the next power of 4; one that is not below `count`
    goes on to its own place.
    """
    half = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for number in range(_ROUNDS):
            mixed = hashlib.blake2b(f"{key} {number} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed) & ((1 << half) - 1))
        place = left << half | right
        if place < count:
            return place


@dataclass(frozen=True)
class Packed:
    """Sequences of streams, as a source of batches that are functions of their number alone.

    - `streams`: their sequences, one stream after the other.
    - `batch_size`: `train.global_batch`.
    - `end`: the token that ends each document; None where a sequence is one segment.
    - `seed`: of the order, another one in each epoch; None for the given order and one epoch, after
      which all is padding.
    """

    streams: tuple[Stream, ...]
    batch_size: int
    end: int | None
    seed: int | None = None

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.streams)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @functools.cached_property
    def targets(self) -> int:
        """How many tokens are predicted in all sequences, which are read for it."""
        weights = self.numbered(range(len(self))).weights
        assert weights is not None, "sequences of this source have weights"
        return int(np.count_nonzero(weights))

    def sequences(self, batch: int, rows: range, length: int) -> Sequences:
        return self.numbered(self._number(batch * self.batch_size + row) for row in rows)

    def _number(self, visit: int) -> int:
        if self.seed is None:
            return visit
        epoch, place = divmod(visit, len(self))
        return shuffled(place, len(self), f"{self.seed} {epoch}")

    def numbered(self, numbers: Iterable[int]) -> Sequences:
        """The sequences of these numbers, which attend and count positions within a document.

        No target belongs to another document than its token: it has weight 0 there, as in padding.
        """
        numbers = list(numbers)
        shape = (len(numbers), self.streams[0].length)
        tokens = np.zeros(shape, np.int64)
        is_filled, begins = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, number in enumerate(numbers):
            at = 0
            for piece in self._pieces(number):
                begins[row, at], is_filled[row, at : at + len(piece)] = True, True
                tokens[row, at : at + len(piece)] = piece
                at += len(piece)
        if self.end is None:
            return Sequences(tokens, is_filled[:, 1:])
        begins[:, 1:] |= tokens[:, :-1] == self.end
        is_target = is_filled[:, 1:] & ~begins[:, 1:]
        places = np.arange(shape[1] - 1)
        positions = places - np.maximum.accumulate(np.where(begins[:, :-1], places, 0), axis=1)
        documents = np.cumsum(begins, axis=1) * is_filled
        return Sequences(tokens, is_target, positions, documents[:, :-1])

    def _pieces(self, number: int) -> list[np.ndarray]:
        if number >= len(self):
            return []
        stream = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.streams[stream].of(number - int(self._firsts[stream]))
