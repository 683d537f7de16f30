"""Slots of buffers, given out by how long each array is needed, in numpy."""

import numpy as np


def share_slots(
    owner: np.ndarray, start: np.ndarray, end: np.ndarray, *, owners: int
) -> tuple[np.ndarray, np.ndarray]:
    """A slot for each array, and for each owner the number of its slots.

    A slot is free again in the tick in which it is read last: a tick reads before it writes. An
    owner has as many slots as it has arrays at the same time. The first arrays take them in turn,
    and after that the array that starts next takes the slot of the one that ended first.

    - `owner`: whose buffer an array is in, from 0 on.
    - `start`: the tick in which it is written.
    - `end`: the last tick in which it is read, after `start`.
    - `owners`: how many there are.

    Integers, all of one shape, which is that of the slots.
    """
    shape, ticks = start.shape, 1 + int(end.max(initial=0))
    owner, start, end = (table.reshape(-1).astype(np.int64) for table in (owner, start, end))
    starts, ends = owner * ticks + start, owner * ticks + end
    by_start, by_end = (np.argsort(times, kind="stable") for times in (starts, ends))
    whose = owner[by_start]  # by_end too has one owner after the other
    first = np.searchsorted(whose, np.arange(owners))[whose]
    number = np.arange(len(whose))
    free_again = np.searchsorted(ends[by_end], starts[by_start], side="right") - first
    counts = np.zeros(owners, np.int64)
    np.maximum.at(counts, whose, number - first + 1 - free_again)
    # From which array each has its slot, by the place in the order of starts: the first ones from
    # none, and so from themselves.
    position = np.empty_like(number)
    position[by_start] = number
    later = number - first >= counts[whose]
    source = number.copy()
    source[later] = position[by_end[(number - counts[whose])[later]]]
    while not np.array_equal(further := source[source], source):
        source = further
    slots = np.empty_like(number)
    slots[by_start] = (number - first)[source]
    return slots.reshape(shape), counts
