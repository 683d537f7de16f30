"""What an NNX class is made of, found out once: its graph and its variables, without an array."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from linen_compat.bridge.axes import linen_axes
from linen_compat.bridge.paths import Path, linen_paths
from nnx_pipeline import InputError
from nnx_pipeline.tracing import this_turn


@dataclass(frozen=True)
class Recipe:
    """How an NNX module is made: `kind(*args, **dict(options), rngs=…)`."""

    kind: type[nnx.Module]
    args: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """A module with new variables; `rngs` is left out where the class takes none."""
        options = dict(self.options)
        if takes_rngs(self.kind):
            options["rngs"] = rngs
        return self.kind(*self.args, **options)


@dataclass(frozen=True, eq=False)
class Slot:
    """A variable on both sides. `linen` begins with the collection."""

    nnx: tuple[Any, ...]
    linen: Path
    shape: tuple[int, ...]
    box: Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream of random numbers: the paths of its key and its count, and Linen's name for it."""

    key: tuple[Any, ...]
    count: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The graph of an NNX module, its variables and its streams of random numbers."""

    graph: Any
    slots: tuple[Slot, ...]
    streams: tuple[Stream, ...]
    shapes: dict[Path, tuple[int, ...]]

    def build(self, values: dict[tuple[Any, ...], Any]) -> nnx.Module:
        """The module with these arrays, by NNX path; its constructor does not run."""
        return nnx.merge(self.graph, nnx.from_flat_state(values.items()))


class StreamPerName(nnx.Rngs):
    """Gives each name a stream of its own when it is first asked for, so that its name is known."""

    def __init__(self, make_key: Callable[[str], Array]) -> None:
        super().__init__()
        self._make_key = make_key

    def __getitem__(self, name: str) -> nnx.RngStream:
        if name not in vars(self):
            setattr(self, name, nnx.RngStream(self._make_key(name), tag=name))
        return vars(self)[name]

    def __getattr__(self, name: str) -> nnx.RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


def blueprint(recipe: Recipe) -> Blueprint:
    """The blueprint under the ambient mesh, on which a module's parts may depend.

    The constructor runs the first time, on abstract arrays. Raises InputError for a module that
    holds an array which is no variable.
    """
    return _blueprint(recipe, jax.sharding.get_abstract_mesh(), this_turn())


@functools.lru_cache(maxsize=4096)
def _blueprint(recipe: Recipe, mesh: Any, turn: Any) -> Blueprint:
    del mesh, turn  # the ambient mesh, because the result depends on it; a measurement asks anew
    module = nnx.eval_shape(lambda: recipe.make(StreamPerName(_any_key)))
    graph, state = nnx.split(module)
    renamed = linen_paths(module)
    slots, streams = [], []
    variables = dict(nnx.to_flat_state(state))
    for path, variable in variables.items():
        if not isinstance(variable, nnx.Variable):
            raise InputError(
                f"{recipe.kind.__name__} holds an array at {'.'.join(map(str, path))} that is no "
                "nnx.Variable, so that it would belong to no collection; wrap it in one"
            )
        if isinstance(variable, nnx.RngKey):
            count = (*path[:-1], "count")
            streams.append(Stream(path, count, variable.tag, variable.get_value().shape))
        elif not isinstance(variable, nnx.RngState):
            own = tuple(map(str, path))
            slots.append(
                Slot(
                    path,
                    (collection_of(variable), *renamed.get(own, own)),
                    tuple(variable.get_value().shape),
                    _boxing(variable, renamed.get(own)),
                )
            )
    shapes = {slot.linen: slot.shape for slot in slots}
    if len(shapes) < len(slots):
        raise InputError(f"two variables of {recipe.kind.__name__} get the same path in Linen")
    return Blueprint(graph, tuple(slots), tuple(streams), shapes)


def forget_blueprints() -> None:
    """Has every blueprint be found out anew; for measuring what that costs."""
    _blueprint.cache_clear()


def collection_of(variable: nnx.Variable) -> str:
    """The Linen collection of a variable, by its type: `params`, `batch_stats`, `cache` …"""
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _boxing(variable: nnx.Variable, own: Path | None) -> Callable[[Any], Any]:
    """Puts an array into the metadata box that says what the variable's metadata says."""
    metadata = variable.get_metadata()
    if "linen_box" in metadata:
        return metadata["linen_box"].replace_boxed
    if metadata.get("logical_axes") is not None:
        names = tuple(metadata["logical_axes"])
        axes = linen_axes(own) if own is not None else ()
        # Those of a stack of layers come before the layer's own.
        names = (*names[: len(names) - len(axes)], *axes)
        return functools.partial(nn.LogicallyPartitioned, names=names)
    if metadata.get("out_sharding") is not None:
        return functools.partial(nn.Partitioned, names=tuple(metadata["out_sharding"]))
    return lambda value: value


def _any_key(name: str) -> Array:
    return jax.random.key(0)


@functools.cache
def takes_rngs(kind: type[nnx.Module]) -> bool:
    """Whether the constructor of a class takes random numbers."""
    if kind.__init__ is object.__init__:
        return False
    parameters = inspect.signature(kind.__init__).parameters.values()
    return any(one.name == "rngs" or one.kind is one.VAR_KEYWORD for one in parameters)
