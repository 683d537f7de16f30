"""Documents in sequences: none is torn or meets another, and an epoch has each sequence once."""

import jax
import numpy as np
import pytest
from helpers import mesh_of, new_model, small_config
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline import Config
from nnx_pipeline.train import batches, loss_of
from nnx_pipeline.train._packing import Packed, Stream, best_fit, packed, shuffled

END, LENGTH = 31, 9
CONFIG = small_config(model={"num_layers": 1})


def documents_of(sizes: list[int]) -> list[np.ndarray]:
    """Documents of different tokens, each with its end."""
    generator = np.random.default_rng(0)
    return [np.append(generator.integers(END, size=size), END) for size in sizes]


def pairs_of(sequence: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(sequence[:-1].tolist(), sequence[1:].tolist(), strict=True))


@given(st.lists(st.integers(0, 40), max_size=30))
def test_every_token_is_the_target_of_the_one_before_it_once(sizes: list[int]) -> None:
    """But for the first of each document; what fits into a sequence is whole, from position 0."""
    documents = documents_of(sizes)
    source = Packed((packed(documents, LENGTH),), 8, END)
    rows = source.numbered(range(len(source)))
    weights, positions = np.asarray(rows.weights), np.asarray(rows.positions)
    segments = np.asarray(rows.segment_ids)
    found = zip(rows.tokens[:, :-1][weights], rows.tokens[:, 1:][weights], strict=True)
    want = [pair for one in documents for pair in pairs_of(one)]
    assert sorted((int(a), int(b)) for a, b in found) == sorted(want)
    pieces = []
    for row, ids in enumerate(segments):
        for segment in set(ids.tolist()) - {0}:
            here = np.flatnonzero((ids == segment) & weights[row])
            assert (positions[row, here] == np.arange(len(here))).all()
            if len(here):
                pieces.append(tuple(rows.tokens[row, here[0] : here[-1] + 2].tolist()))
    for one in documents:
        if 2 <= len(one) <= LENGTH:
            pieces.remove(tuple(one.tolist()))


@given(st.lists(st.integers(2, LENGTH), max_size=60))
def test_sequences_are_filled(sizes: list[int]) -> None:
    """No sequence holds too much, and no two of them would go into one."""
    found = best_fit(np.array(sizes, int), LENGTH)
    filled = np.bincount(found, weights=sizes).tolist() if sizes else []
    assert all(0 < size <= LENGTH for size in filled)
    assert len(filled) < 2 or sum(sorted(filled)[:2]) > LENGTH


@given(st.integers(1, 700), st.text("ab", max_size=3))
def test_an_order_has_every_number_once(count: int, key: str) -> None:
    assert sorted(shuffled(place, count, key) for place in range(count)) == list(range(count))


def test_an_order_is_one_of_many() -> None:
    """Of four numbers 24 orders; of many the first ones come from everywhere."""
    orders = {tuple(shuffled(at, 4, str(key)) for at in range(4)) for key in range(400)}
    assert len(orders) == 24
    drawn = np.array([shuffled(at, 10**12, "key") for at in range(400)]) / 1e12
    assert np.histogram(drawn, bins=4, range=(0, 1))[0].min() > 70


@pytest.mark.parametrize("end", [END, None])
def test_the_loss_of_packed_documents_is_that_of_each_alone(end: int | None) -> None:
    """Each alone in a row from its beginning, by the logits of the model and plain NumPy."""
    documents = documents_of([7, 2, 3, 1, 1, 5])
    source = Packed((packed(documents, LENGTH),), 8, end)
    assert len(source) == 3
    batch = next(batches(CONFIG, mesh_of(""), source))
    model = new_model(CONFIG)
    rows = np.zeros((len(documents), LENGTH), np.int32)
    for row, document in enumerate(documents):
        rows[row, : len(document)] = document
    likely = np.asarray(jax.nn.log_softmax(model(rows[:, :-1])))
    entropy = [
        -likely[row, at, document[at + 1]]
        for row, document in enumerate(documents)
        for at in range(len(document) - 1)
    ]
    found = float(loss_of(model, batch)[1][0])
    if end is None:
        assert abs(found - np.mean(entropy)) > 1e-2, "they see each other"
    else:
        assert float(batch.weights.sum()) == len(entropy)
        assert found == pytest.approx(np.mean(entropy), rel=1e-5)


def test_what_is_left_of_a_sequence_is_padding() -> None:
    """Segment 0, which no expert has room for, and weight 0; past the end all is."""
    documents = [np.array([3, 4, END]), np.array([5, END])]
    rows = Packed((packed(documents, LENGTH),), 8, END).numbered(range(2))
    np.testing.assert_array_equal(rows.tokens, [[3, 4, END, 5, END, 0, 0, 0, 0], [0] * 9])
    np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 2, 2, 0, 0, 0], [0] * 8])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 0, 1, 0, 0, 0, 0], [0] * 8])


def test_a_stream_is_cut_where_sequences_end() -> None:
    """Its documents are segments; each token but the first is a target or the first of another."""
    tokens = np.array([3, 4, END, 5, 6, 7, 8, END, 9, 10, 11, 12], np.uint16)
    rows = Packed((Stream(tokens, 6),), 8, END).numbered(range(2))
    np.testing.assert_array_equal(rows.tokens, [tokens[:6], tokens[5:11]])
    np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]])
    np.testing.assert_array_equal(rows.weights, [[1, 1, 0, 1, 1], [1, 1, 0, 1, 1]])
    whole = Packed((Stream(tokens, 6),), 8, None).numbered(range(2))
    assert (whole.segment_ids, whole.positions) == (None, None)
    assert np.asarray(whole.weights).all()


def visits(config: Config, mesh: str, source: Packed, first: int, count: int) -> list[np.ndarray]:
    given = batches(config, mesh_of(mesh), source, first=first)
    return [np.asarray(next(given).tokens) for _ in range(count)]


def test_epochs_and_their_order() -> None:
    """Each sequence of two files once in an epoch, in another order in the next, on any mesh."""
    streams = tuple(Stream(np.arange(first, first + 97), LENGTH) for first in (0, 100))
    source = Packed(streams, 8, None, seed=3)
    assert len(source) == 24
    config = small_config(model={"vocab_size": 200})
    found = visits(config, "", source, 0, 6)
    epochs = [np.concatenate(found[at : at + 3])[:, 0].tolist() for at in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(0, 96, 8), *range(100, 196, 8)]
    assert epochs[0] != epochs[1]
    assert (
        epochs[0]
        != np.concatenate(visits(config, "", Packed(streams, 8, None, 4), 0, 3))[:, 0].tolist()
    )
    np.testing.assert_array_equal(visits(config, "data=2,stage=2,fsdp=2", source, 2, 4), found[2:])
    one, many = source.sequences(5, range(2, 4), LENGTH), source.sequences(5, range(8), LENGTH)
    np.testing.assert_array_equal(one.tokens, many.tokens[2:4])
