"""Texts as training data: their bytes are the tokens, and a tenth of each is held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab._files import MOST_TEXT, read_text
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.sharding.layout import Layout
from nnx_pipeline.train.data import by_rows
from nnx_pipeline.train.step import Batch, batch_sharding, loss_of

BYTE_VALUES = 256  # token ids of text: one for each value of a byte
END = 0  # the byte that ends a document; no text has it


@dataclass(frozen=True)
class Texts:
    """The first nine tenths of each document as int32 tokens, and the rest, each with `END`."""

    training: np.ndarray
    held_out: np.ndarray

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens; files in another order are another text."""
        # Every document ends with a byte that no document has, so that the cuts count too.
        return hashlib.sha256(self.training.tobytes() + self.held_out.tobytes()).hexdigest()


def read_texts(paths: Sequence[str], config: Config) -> Texts:
    """The documents in some text files in UTF-8, one in each."""
    vocabulary, length = config.model.vocab_size, config.train.sequence_length
    if vocabulary < BYTE_VALUES:
        raise InputError(
            f"--data is read as bytes, and model.vocab_size={vocabulary} has no token for some of "
            f"them; --set model.vocab_size={BYTE_VALUES}"
        )
    training, held_out = [], []
    for path in paths:
        document = read_text(path, MOST_TEXT).encode()
        if END in document:
            raise InputError(
                f"{path} contains a byte 0, which is the token that ends a document; remove it"
            )
        cut = len(document) * 9 // 10
        training.append(document[:cut] + bytes([END]))
        held_out.append(document[cut:] + bytes([END]))
    joined = (np.frombuffer(b"".join(parts), np.uint8) for parts in (training, held_out))
    texts = Texts(*(tokens.astype(np.int32) for tokens in joined))
    if len(texts.held_out) <= length:
        raise InputError(
            "the tenth of each file of --data that is held out, with a token that ends it, makes "
            f"{len(texts.held_out)} tokens, and a sequence needs {length + 1}; give more text, or "
            "lower train.sequence_length"
        )
    return texts


@dataclass(frozen=True)
class Windows:
    """Sequences that begin anywhere in a text, drawn at random; a `train.data.Source`."""

    tokens: np.ndarray
    seed: int

    def sequences(self, batch: int, rows: range, length: int) -> np.ndarray:
        last = len(self.tokens) - length
        starts = [np.random.default_rng((self.seed, batch, row)).integers(last + 1) for row in rows]
        return np.stack([self.tokens[start : start + length] for start in starts])


@jax.jit
def _entropy(model: Mixtral, batch: Batch) -> jax.Array:
    """The cross-entropy; jitted here, so that it is compiled once for all saved steps."""
    return loss_of(model, batch)[1][0]


def entropy_of(model: Mixtral, tokens: np.ndarray, mesh: Mesh) -> float:
    """The mean cross-entropy of a model on a text, in nats per token.

    The text is cut into sequences one after the other; what is left at the end is left out.
    """
    train = model.config.train
    contexts, targets = in_sequences(tokens, train.sequence_length)
    count, batch = len(contexts), train.global_batch
    shape, sharding = (batch, train.sequence_length), batch_sharding(mesh, Layout())
    total = 0.0
    for first in range(0, count, batch):

        def rows(array: np.ndarray, first: int = first) -> jax.Array:
            part = array[first : first + batch]
            # The last batch is filled up with sequences of weight 0.
            filled = np.pad(part, ((0, batch - len(part)), (0, 0)))
            return by_rows(shape, sharding, lambda start, stop: filled[start:stop])

        weights = np.ones(contexts.shape, np.float32)
        with jax.set_mesh(mesh):
            mean = _entropy(
                model, Batch(tokens=rows(contexts), targets=rows(targets), weights=rows(weights))
            )
        total += float(mean) * min(batch, count - first)
    return total / count


def bigram_entropy(training: np.ndarray, held_out: np.ndarray, length: int) -> float:
    """The cross-entropy of a bigram model on the targets of `entropy_of`, in nats per token.

    Its counts are from `training`. P(b | a) = (n(a, b) + k · P(b)) / (n(a) + k), with P(b) = (n(b)
    + 1) / (n + 256) for a text of n bytes. The k is the best of several for the held-out text
    itself, so that the entropy is as low as this smoothing can make it.
    """
    pairs = np.zeros((BYTE_VALUES, BYTE_VALUES))
    np.add.at(pairs, (training[:-1], training[1:]), 1)
    single = (np.bincount(training, minlength=BYTE_VALUES) + 1) / (len(training) + BYTE_VALUES)
    contexts, targets = (part.reshape(-1) for part in in_sequences(held_out, length))
    seen, after = pairs[contexts, targets], pairs.sum(axis=1)[contexts]
    return min(
        float(-np.mean(np.log((seen + k * single[targets]) / (after + k))))
        for k in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    )


def in_sequences(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text as sequences and their targets, `[sequences, length]` each."""
    count = (len(tokens) - 1) // length
    whole = count * length
    return tokens[:whole].reshape(count, length), tokens[1 : whole + 1].reshape(count, length)
