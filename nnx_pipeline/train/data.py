"""Batches on a mesh, and generated sequences with a rule that a model can learn."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.errors import InputError, counted, divides, kind_of
from nnx_pipeline.sharding.layout import Layout
from nnx_pipeline.train.step import Batch, batch_sharding

FOLLOWS_RULE = 0.9  # the share of tokens that follow the rule; the others are drawn uniformly


class Sequences(NamedTuple):
    """Sequences of `length` tokens, the last of which is a target alone.

    - `tokens`: ids below `model.vocab_size`, integers `[rows, length]`.
    - `weights`, `positions`, `segment_ids`: `[rows, length - 1]`, of the tokens but the last, as in
      `Batch`; None for weights of 1, and for what a batch has without the others.
    """

    tokens: np.ndarray
    weights: np.ndarray | None = None
    positions: np.ndarray | None = None
    segment_ids: np.ndarray | None = None


class Source(Protocol):
    """Where the sequences of batches come from."""

    def sequences(self, batch: int, rows: range, length: int) -> np.ndarray | Sequences:
        """These rows of a batch, or their tokens alone.

        Each sequence depends on the numbers of batch and row alone, which are counted from 0.
        """


def batches(
    config: Config,
    mesh: Mesh,
    source: Source,
    *,
    first: int = 0,
    layout: Layout = Layout(),
    segment_ids: bool = False,
) -> Iterator[Batch]:
    """Endless batches of a source, in which the target of a token is the one after it.

    - `config`: gives the number of sequences and their length.
    - `mesh`: where batches are placed; each process makes the sequences of its own devices alone.
    - `source`: it decides what is in the sequences, and the mesh does not.
    - `first`: the number of the first batch. A batch depends on its number alone, so that training
      goes on after k steps with batch k.
    - `layout`: its `whole_batch` says which mesh axes the batch is sharded over.
    - `segment_ids`: whether batches have segment ids where the source gives none; each row is then
      one segment.

    Raises InputError where the batch does not split over the devices that share it, and where the
    source gives anything but token ids of that shape.
    """
    size, length = config.train.global_batch, config.train.sequence_length
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        devices = layout.size("whole_batch")
    rule = f"train.global_batch={size} does not split over the {devices} devices that share a batch"
    divides(devices, size, rule=rule)
    placed = functools.partial(by_rows, (size, length), batch_sharding(mesh, layout))

    def ones(dtype: type) -> jax.Array:
        return placed(lambda start, stop: np.ones((stop - start, length), dtype))

    def batch(number: int) -> Batch:
        seen: dict[int, Sequences] = {}  # several devices, and several arrays, read the same rows

        def drawn(start: int, stop: int) -> Sequences:
            if start not in seen:
                rows = source.sequences(number, range(start, stop), length + 1)
                shape = (stop - start, length + 1)
                seen[start] = _checked(rows, shape, config, type(source).__name__)
            return seen[start]

        def array(name: str, dtype: type) -> jax.Array:
            return placed(lambda start, stop: np.asarray(getattr(drawn(start, stop), name), dtype))

        tokens = placed(lambda start, stop: drawn(start, stop).tokens[:, :-1])
        _, weights, positions, segments = next(iter(seen.values()))
        one_segment = ones(np.int32) if segment_ids else None
        return Batch(
            tokens=tokens,
            targets=placed(lambda start, stop: drawn(start, stop).tokens[:, 1:]),
            weights=ones(np.float32) if weights is None else array("weights", np.float32),
            positions=None if positions is None else array("positions", np.int32),
            segment_ids=one_segment if segments is None else array("segment_ids", np.int32),
        )

    return map(batch, itertools.count(first))


def _checked(
    rows: np.ndarray | Sequences, shape: tuple[int, int], config: Config, source: str
) -> Sequences:
    """What a source gave, with its tokens as int32."""
    given = rows if isinstance(rows, Sequences) else Sequences(rows)
    for name, value in given._asdict().items():
        of_tokens = getattr(value, "shape", None) == (shape[0], shape[1] - 1)
        if name != "tokens" and value is not None and not of_tokens:
            raise InputError(
                f"the source {source} gave {name} {kind_of(value)}; give a number for each token "
                f"but the last of a row, {[shape[0], shape[1] - 1]}"
            )
    return given._replace(tokens=_token_ids(given.tokens, shape, config, source))


def _token_ids(rows: np.ndarray, shape: tuple[int, int], config: Config, source: str) -> np.ndarray:
    """Checked token ids of a source, as int32: with others the loss would be nan."""
    dtype = getattr(rows, "dtype", None)
    if dtype is None or rows.shape != shape or not np.issubdtype(dtype, np.integer):
        raise InputError(
            f"the source {source} gave {kind_of(rows)} for {shape[0]} rows of {shape[1]} tokens; "
            f"its `sequences` must return an array of integers {[*shape]} (a row has "
            f"{counted(shape[1] - 1, 'token')}, train.sequence_length, and the target of the last "
            "one)"
        )
    tokens, vocabulary = np.asarray(rows), config.model.vocab_size
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocabulary:
            raise InputError(
                f"the source {source} gave the token {token}, which is not in the model's "
                f"vocabulary; give tokens from 0 to {vocabulary - 1} "
                f"(model.vocab_size={vocabulary})"
            )
    return tokens.astype(np.int32)


def learnable_batches(
    config: Config,
    mesh: Mesh,
    *,
    seed: int = 0,
    first: int = 0,
    layout: Layout = Layout(),
    segment_ids: bool = False,
) -> Iterator[Batch]:
    """Endless batches in which nine tokens in ten are determined by the token before them.

    The rule is a fixed permutation of the vocabulary, so that a model which learns it goes from an
    entropy of log(vocab) down to about 0.1 · log(vocab) + 0.33 nats. The same seed gives the same
    batches on every mesh; the other arguments are as for `batches`.
    """
    rule = Rule(seed, config.model.vocab_size)
    return batches(config, mesh, rule, first=first, layout=layout, segment_ids=segment_ids)


def by_rows(
    shape: tuple[int, int], sharding: NamedSharding, make: Callable[[int, int], np.ndarray]
) -> jax.Array:
    """An array of rows `make(start, stop)`; each process makes those of its own devices."""

    def of_device(index: Any) -> np.ndarray:
        rows, columns = index
        start, stop, _ = rows.indices(shape[0])
        return make(start, stop)[:, columns]

    return jax.make_array_from_callback(shape, sharding, of_device)


@dataclass(frozen=True)
class Rule:
    """The rule of generated sequences, whose tokens are below `vocab_size`."""

    seed: int
    vocab_size: int

    @functools.cached_property
    def follower(self) -> np.ndarray:
        """The token that follows each token, int32 `[vocab]`: a permutation."""
        return np.random.default_rng(self.seed).permutation(self.vocab_size).astype(np.int32)

    def sequences(self, batch: int, rows: range, length: int) -> np.ndarray:
        generators = [np.random.default_rng((self.seed, batch, row)) for row in rows]
        drawn = np.stack(
            [rng.integers(self.vocab_size, size=length, dtype=np.int32) for rng in generators]
        )
        ruled = np.stack([rng.random(length) < FOLLOWS_RULE for rng in generators])
        # From left to right, because the token before may itself have been set by the rule.
        for column in range(1, length):
            follows = self.follower[drawn[:, column - 1]]
            drawn[:, column] = np.where(ruled[:, column], follows, drawn[:, column])
        return drawn
