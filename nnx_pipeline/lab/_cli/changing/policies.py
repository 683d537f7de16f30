"""A choice as a change of a function, and as code to paste into it."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx_pipeline.lab.comparison.changes import HOST, Change
from nnx_pipeline.lab.search.choices import Choice, Space, short


def change_of(space: Space, choice: Choice) -> Change:
    """What makes a function, while it is traced, do as a choice says."""
    policy = _policy(space, choice)
    return Change(
        kinds=("policy",),
        name=" ".join(choice),
        cure=written(space, choice),
        loops=frozenset(space.lines(choice)),
        keeps=policy,
        policy=policy,
    )


def _policy(space: Space, choice: Choice) -> Callable[..., Any]:
    known = jax.checkpoint_policies
    policy: Callable[..., Any] = known.everything_saveable
    if choice != space.everything:
        policy = known.save_and_offload_only_these_names(
            names_which_can_be_saved=space.names(choice, "keep"),
            names_which_can_be_offloaded=space.names(choice, "offload"),
            **HOST,
        )
    return policy


def to_paste(space: Space, choice: Choice, calls: Sequence[str]) -> str:
    """What to write into a function to have a choice.

    - `calls`: the lines where it calls what is in `jax.checkpoint`.
    """
    lines, policy = [*map(short, space.lines(choice))], written(space, choice)
    calls = [*map(short, calls)]
    if choice == space.everything:
        what = f"remove jax.checkpoint at {', '.join(calls)}" if calls else "leave it as it is"
        return f"{what}: everything is kept"
    parts = []
    if calls:
        parts.append(f"in jax.checkpoint, called at {', '.join(calls)}:\npolicy={policy}")
    if lines:
        begin = f"around the body of the loop at {', '.join(lines)}:"
        inside = policy.replace("\n", "\n    ")
        parts.append(
            f"{begin}\njax.checkpoint(\n    body,\n    prevent_cse=False,\n    policy={inside},\n)"
        )
    return "\n".join(parts)


def written(space: Space, choice: Choice) -> str:
    """The policy of a choice as code."""
    if choice == space.everything:
        return "jax.checkpoint_policies.everything_saveable"
    lists = {
        "names_which_can_be_saved": _listed(space.names(choice, "keep")),
        "names_which_can_be_offloaded": _listed(space.names(choice, "offload")),
        **{name: f'"{value}"' for name, value in HOST.items()},
    }
    inside = "".join(f"    {name}={value},\n" for name, value in lists.items())
    return f"jax.checkpoint_policies.save_and_offload_only_these_names(\n{inside})"


def _listed(names: Sequence[str]) -> str:
    return json.dumps([*names], ensure_ascii=False)  # a list of texts is the same in Python
