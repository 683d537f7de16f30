"""The interleaved timetable of Narayanan et al. (2021), in which each rank has a fixed order.

Microbatches go in groups of as many as there are ranks, and a group passes one stage of a rank
before it enters the rank's next one; backward it is the other way round. A rank makes forward
visits first, then one forward and one backward visit in turn, and then the backward visits that are
left. Where its next action cannot be done yet the rank waits, even if a later one could be done:
taking what is ready makes the ranks after it wait longer.
"""

import numpy as np

from nnx_pipeline.pipeline._timetable.actions import BACKWARD, FORWARD, Actions


def interleaved(ranks: int, microbatches: int, repeats: int) -> Actions:
    """The timetable, in which stage g is on rank g mod ranks.

    - `ranks`: how many ranks there are.
    - `microbatches`: their number, a multiple of the ranks.
    - `repeats`: stages per rank.
    """
    rank, visits = np.arange(ranks)[:, None], microbatches * repeats
    position = _positions(ranks, visits, repeats)
    order = np.empty_like(position)  # the inverse: the forward visits are counted before the others
    np.put_along_axis(order, position, np.arange(2 * visits)[None], axis=1)
    back, visit = np.divmod(order, visits)
    sweep, within = np.divmod(visit, ranks)
    group, chunk = np.divmod(sweep, repeats)
    # An action reads the same visit of the rank next to it, and at an end of the ranks a visit of
    # the rank at the other end, a sweep earlier. In the first sweep of a group nothing is
    # waited for there: the first rank takes microbatches in, and the last rank turns back what it
    # made earlier in its order.
    besides = rank + np.where(back, 1, -1)
    wraps = besides % ranks != besides
    needs = np.where(wraps & (chunk == 0), 0, 1 + position[besides % ranks, order - ranks * wraps])
    taken = _run(besides % ranks, needs)
    stage = np.where(back, repeats - 1 - chunk, chunk) * ranks + rank
    tables = (np.where(back, BACKWARD, FORWARD), stage, group * ranks + within)
    return Actions(*(_in_steps(table, taken) for table in tables))


def _positions(ranks: int, visits: int, repeats: int) -> np.ndarray:
    """The place of each action in the order of its rank: `[ranks, 2 * visits]`.

    First those of the forward visits, then those of the backward visits. A rank begins with as many
    forward visits as in Megatron-LM, the code of the paper's authors.
    """
    rank, visit = np.arange(ranks)[:, None], np.arange(visits)
    first = np.minimum(2 * (ranks - 1 - rank) + (repeats - 1) * ranks, visits)
    forward = visit + np.maximum(visit - first, 0)
    backward = visit + np.minimum(first + visit + 1, visits)
    return np.concatenate([forward, backward], axis=1)


def _run(source: np.ndarray, needs: np.ndarray) -> np.ndarray:
    """Which action of its order each rank takes in each step: `[steps, ranks]`.

    Their number, one more than the last action's, stands for none.

    - `source`: the rank that an action waits for, `[ranks, actions]`.
    - `needs`: how many actions of its order that rank must have done before, `[ranks, actions]`.
    """
    ranks, actions = needs.shape
    source = np.pad(source, ((0, 0), (0, 1))).reshape(-1)
    never = actions + 1
    needs = np.pad(needs, ((0, 0), (0, 1)), constant_values=never).reshape(-1)
    done, start = np.zeros(ranks, int), np.arange(ranks) * (actions + 1)
    taken = []
    while (done < actions).any():
        cell = start + done
        may = done[source[cell]] >= needs[cell]
        assert may.any(), "an order in which ranks wait for each other"
        taken.append(np.where(may, done, actions))
        done += may
    return np.stack(taken)


def _in_steps(table: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """What is written of actions, step by step, with 0 where a rank waits: int32 `[ranks, steps]`.

    - `table`: a number for each action in the order of its rank, `[ranks, actions]`.
    - `taken`: from `_run`.
    """
    return np.take_along_axis(np.pad(table, ((0, 0), (0, 1))), taken.T, axis=1).astype(np.int32)
