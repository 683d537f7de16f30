"""Sentences on what a compiled program does not use, and on what no figure counts."""

import math
import re
from collections import Counter

import jax

from nnx_pipeline.lab.errors import counted


def dropped_arguments(compiled: jax.stages.Compiled) -> list[str]:
    """A note on arguments that nothing reads: JAX drops them, but the caller still holds them."""
    tree: object
    arguments, tree = jax.tree.flatten(compiled.args_info)
    places = tree.flatten_up_to(compiled.input_shardings)
    sizes = [
        math.prod(argument.shape) * getattr(argument.dtype, "itemsize", 0)
        for argument, place in zip(arguments, places, strict=True)
        if place is None
    ]
    if not sizes:
        return []
    text = f"{sum(sizes):,} bytes before sharding, which the caller still holds"
    return [f"{in_no_figure(len(sizes))}: {text}"]


def in_no_figure(count: int) -> str:
    which, them = (f"{count} arguments are", "them") if count > 1 else ("1 argument is", "it")
    return f"{which} in no figure, since the program does not read {them}"


def lost_donations(compiled: jax.stages.Compiled, hlo: str) -> list[str]:
    """A note on donated arguments whose memory no result of the compiled program takes."""
    tree: object
    arguments, tree = jax.tree.flatten(compiled.args_info)
    places = tree.flatten_up_to(compiled.input_shardings)
    read = [one for one, place in zip(arguments, places, strict=True) if place is not None]
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", hlo.partition("\n")[0])
    # An entry is `{output}: (parameter, {place in it}, kind)`; many parameters become one tuple.
    entries = re.findall(r": \((\d+), \{(\d*)", aliases[1]) if aliases else []
    taken = {int(inside or number) for number, inside in entries}
    lost = [one for at, one in enumerate(read) if one.donated and at not in taken]
    if not lost:
        return []
    size = sum(math.prod(one.shape) * getattr(one.dtype, "itemsize", 0) for one in lost)
    kinds = dict.fromkeys(f"{one.dtype}[{','.join(map(str, one.shape))}]" for one in lost)
    more = ", …" if len(kinds) > 3 else ""
    return [
        f"donated without effect: {counted(len(lost), 'argument')} ({', '.join([*kinds][:3])}{more}"
        f"; {size:,} bytes before sharding). A result takes the memory of an argument of its own "
        "dtype, shape and sharding"
    ]


def scratch_at_run_time(hlo: str) -> list[str]:
    """A note on NVIDIA's libraries that allocate device memory when they are called."""
    found = re.findall(r'custom_call_target="(cu(?:solver|sparse)_\w+)"| (fft)\(', hlo)
    calls = Counter(target or fft for target, fft in found)
    if not calls:
        return []
    names = ", ".join(f"{name} ({counted(count, 'call')})" for name, count in calls.items())
    return [f"in no figure is the scratch that libraries allocate while they run: {names}"]
