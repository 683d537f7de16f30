"""Arrays in several threads: order, errors and memory; and copies of transposed arrays."""

import itertools
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from maxtext_data import assert_same_leaves, checkpoint, full_state, read, state_in, write

from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats import _streams as streams
from linen_compat.formats._orbax import arrays as stored
from linen_compat.formats._orbax.stream import OrbaxSource
from linen_compat.formats._parallel import Memory, in_order
from linen_compat.formats._streams import Mismatch
from linen_compat.formats._transpose import contiguous

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.uint8)


@pytest.mark.parametrize("workers", [1, 4])
def test_results_come_in_order(workers):
    def task(number):
        time.sleep(0.01 * (number % 3 == 0))
        return number

    tasks = ((lambda n=number: task(n)) for number in range(40))
    assert [*in_order(tasks, Memory(10), workers)] == [*range(40)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_error_of_the_first_task_that_has_one_is_raised_and_few_begin_after_it(workers):
    begun = []

    def task(number):
        begun.append(number)
        time.sleep(0.2 if number == 4 else 0.001)
        if number >= 4:
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"^4$"):
        for _ in in_order(((lambda n=n: task(n)) for n in range(200)), Memory(10), workers):
            pass
    assert len(begun) <= 4 + workers


def test_tasks_wait_for_memory_and_one_alone_does_not():
    memory, lock = Memory(100), threading.Lock()
    taken, most = [0], [0]

    def admitted():
        for size in [60, 60, 30, 30, 300, 10, 90, 20]:
            memory.take(size)
            with lock:
                taken[0] += size
                most[0] = max(most[0], taken[0] if size != 300 else 0)
            yield lambda size=size: done(size)

    def done(size):
        time.sleep(0.02)
        with lock:
            taken[0] -= size
        memory.give(size)
        return size

    assert sum(in_order(admitted(), memory, 4)) == 600
    assert 60 < most[0] <= 100  # several at once, and never more


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_copies_are_the_same_to_the_bit_whatever_the_order_of_axes(dtype):
    rng = np.random.default_rng(0)
    for shape in [(), (7,), (0, 3), (300, 700), (257, 1, 513), (3, 300, 270), (2, 3, 4, 5)]:
        whole = (rng.standard_normal(shape) * 50).astype(dtype)
        for axes in itertools.permutations(range(len(shape))):
            turned = whole.transpose(axes)
            parts = [turned, *([turned[1:], turned[::-1], turned[..., ::2]] if shape else [])]
            for part in parts:
                copy = contiguous(part)
                assert copy.flags.c_contiguous
                assert (copy.shape, copy.dtype) == (part.shape, part.dtype)
                assert copy.tobytes() == part.tobytes()


def test_an_array_in_order_already_is_not_copied():
    whole = np.zeros((3, 4))
    assert contiguous(whole) is whole


@pytest.mark.parametrize("layout", [("scanned",), ("pipelined", 1, 2)], ids=lambda one: one[0])
def test_a_stack_in_one_chunk_is_opened_once_for_all_threads(tmp_path, monkeypatch, layout):
    opened, read_array, begin = [], OrbaxSource.read, stored.StoredArrays.__init__

    class Spy(dict):
        def __setitem__(self, leaf, store):
            opened.append(leaf)
            super().__setitem__(leaf, store)

    def with_spy(self, items):
        begin(self, items)
        self._open = Spy()

    def slowly(self, path, layer, *rest):
        time.sleep(0.002 * (layer or 0))  # so that threads overtake each other
        return read_array(self, path, layer, *rest)

    write(tmp_path / "items", state_in(*layout))
    monkeypatch.setattr(stored.StoredArrays, "__init__", with_spy)
    monkeypatch.setattr(OrbaxSource, "read", slowly)
    plan(From(tmp_path), To(tmp_path / "out", "maxtext:unscanned")).run()
    assert len(opened) == len(set(opened)) > 10
    assert_same_leaves(read(tmp_path / "out"), full_state())


def test_several_arrays_are_copied_at_once_in_a_bounded_number(tmp_path, monkeypatch):
    read_array, lock, inside, most = OrbaxSource.read, threading.Lock(), [0], [0]

    def spy(self, *arguments):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        array = read_array(self, *arguments)
        with lock:
            inside[0] -= 1
        return array

    monkeypatch.setattr(OrbaxSource, "read", spy)
    prepared = plan(From(checkpoint("unscanned")), To(tmp_path / "out", "nnx"))
    sizes = []
    prepared.run(progress=lambda name, nbytes: sizes.append(nbytes))
    assert 1 < most[0] <= 32
    assert sum(sizes) == prepared.nbytes


def test_of_several_damaged_arrays_the_first_one_is_named(tmp_path):
    leaves = full_state()
    for name in leaves:
        if name.startswith("params/") and leaves[name].ndim > 1:
            leaves[name] = np.full_like(leaves[name], np.nan)
    prepared = plan(From(write(tmp_path / "in", leaves)), To(tmp_path / "out", "nnx"))
    first = next(
        one.name
        for one in streams._arrays(prepared.opened.source, ["parameters"])
        if leaves[one.name].ndim > 1
    )
    for _ in range(5):
        with pytest.raises(Mismatch, match=f"^{first} holds NaN or infinity"):
            prepared.run()
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
