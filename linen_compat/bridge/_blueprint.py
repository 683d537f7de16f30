"""Finds the graph and the variables of an NNX class once, without making an array."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import jax
from flax import linen as nn
from flax import nnx
from flax.typing import PathParts
from jaxtyping import Array, PyTree

from linen_compat.bridge._paths import Path, Variable, linen_axes, linen_paths
from nnx_pipeline import InputError
from nnx_pipeline.lab._tracing.calls import this_turn
from nnx_pipeline.modules.moe import SelectionBias


@dataclass(frozen=True)
class Recipe:
    """How an NNX module is made, `kind(*args, **dict(options), rngs=…)`; it can be hashed."""

    kind: type[nnx.Module]
    args: tuple[object, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        return self.kind.__name__

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        options = dict(self.options)
        if takes_rngs(self.kind):
            options["rngs"] = rngs
        return self.kind(*self.args, **options)


@dataclass(frozen=True, eq=False)
class BridgedVariable:
    """One variable of a module; `box` puts an array into its Linen metadata box, if it has one."""

    nnx: PathParts
    linen: Path
    shape: tuple[int, ...]
    box: Callable[[Array], PyTree]


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream of random numbers; `shape` is that of its array of keys, `()` for one key."""

    key: PathParts
    count: PathParts
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The graph of an NNX module, its variables, and its streams of random numbers."""

    graph: nnx.GraphDef[nnx.Module]
    slots: tuple[BridgedVariable, ...]
    streams: tuple[Stream, ...]
    shapes: dict[Path, tuple[int, ...]]

    def build(self, values: Mapping[PathParts, Array]) -> nnx.Module:
        """The module with these arrays, by NNX path; its constructor does not run."""
        return nnx.merge(self.graph, nnx.from_flat_state(values.items()))


class StreamPerName(nnx.Rngs):
    """Random streams for a constructor: each is made when its name is first read.

    The tag of a stream is its name, which is also the name of Linen's stream.
    """

    def __init__(self, make_key: Callable[[str], Array]) -> None:
        super().__init__()
        self._make_key = make_key

    def __getitem__(self, name: str) -> nnx.RngStream:
        if name not in vars(self):
            setattr(self, name, nnx.RngStream(self._make_key(name), tag=name))
        stream: nnx.RngStream = vars(self)[name]
        return stream

    def __getattr__(self, name: str) -> nnx.RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


def blueprint(recipe: Recipe) -> Blueprint:
    """The blueprint of a recipe under the ambient mesh, on which a module's parts may depend.

    The constructor runs on abstract arrays, the first time only.
    """
    return _blueprint(recipe, jax.sharding.get_abstract_mesh(), this_turn())


@functools.lru_cache(maxsize=4096)
def _blueprint(recipe: Recipe, mesh: Hashable, turn: Hashable) -> Blueprint:
    # Both are here as keys of the cache: the result depends on the ambient mesh, and within
    # `traced_afresh` nothing from an earlier measurement may be used.
    del mesh, turn
    module = nnx.eval_shape(lambda: recipe.make(StreamPerName(lambda name: jax.random.key(0))))
    graph, state = nnx.split(module)
    renamed = linen_paths(module)
    slots, streams = [], []
    for path, variable in nnx.to_flat_state(state):
        if not isinstance(variable, nnx.Variable):
            raise InputError(
                f"{recipe.name} holds an array at {'.'.join(map(str, path))} that is not "
                "in an nnx.Variable, so it belongs to no collection; wrap it in one, such as "
                "nnx.Param"
            )
        if not hasattr(variable.get_value(), "shape"):
            raise InputError(
                f"{recipe.name}.{'.'.join(map(str, path))} holds a "
                f"{type(variable.get_value()).__name__} and not an array; give each array a "
                "variable of its own, such as nnx.List([nnx.Param(a), nnx.Param(b)])"
            )
        if isinstance(variable, nnx.RngKey):
            count = (*path[:-1], "count")
            streams.append(Stream(path, count, variable.tag, variable.get_value().shape))
        elif not isinstance(variable, nnx.RngState):
            parts, shape = tuple(map(str, path)), tuple(variable.get_value().shape)
            linen = (collection_of(variable), *renamed.get(parts, parts))
            slots.append(BridgedVariable(path, linen, shape, _boxing(variable, renamed.get(parts))))
    shapes = {slot.linen: slot.shape for slot in slots}
    if len(shapes) < len(slots):
        raise InputError(f"two variables of {recipe.name} get the same path in Linen; rename one")
    return Blueprint(graph, tuple(slots), tuple(streams), shapes)


def forget_blueprints() -> None:
    """Clears the cache of blueprints, to measure what it costs to find them."""
    _blueprint.cache_clear()


def collection_of(variable: Variable) -> str:
    """The Linen collection of a variable, by its type: `params`, `batch_stats`, `cache` …

    In Linen a bias that only chooses experts is one of the `params`, where it gets no gradient.
    """
    if isinstance(variable, SelectionBias):
        return "params"
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _boxing(variable: Variable, parts: Path | None) -> Callable[[Array], PyTree]:
    """Puts an array into a Linen box with the metadata of this variable."""
    metadata = variable.get_metadata()
    if "linen_box" in metadata:
        boxed: Callable[[Array], PyTree] = metadata["linen_box"].replace_boxed
        return boxed
    if metadata.get("logical_axes") is not None:
        names = tuple(metadata["logical_axes"])
        axes = linen_axes(parts) if parts is not None else ()
        # MaxText's names are known for the layer's own axes, which come last; the names of a stack
        # of layers before them stay.
        names = (*names[: len(names) - len(axes)], *axes)
        return functools.partial(nn.LogicallyPartitioned, names=names)
    if metadata.get("out_sharding") is not None:
        return functools.partial(nn.Partitioned, names=tuple(metadata["out_sharding"]))
    return lambda value: value


@functools.cache
def takes_rngs(kind: type[nnx.Module]) -> bool:
    if kind.__init__ is object.__init__:
        return False
    parameters = inspect.signature(kind.__init__).parameters.values()
    return any(each.name == "rngs" or each.kind is each.VAR_KEYWORD for each in parameters)
