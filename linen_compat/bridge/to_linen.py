"""Wraps NNX classes as Linen modules."""

from collections.abc import Callable, Mapping

import jax
from flax import linen as nn
from flax import nnx
from flax.traverse_util import unflatten_dict
from flax.typing import PathParts
from jaxtyping import Array, PyTree

from linen_compat.bridge._blueprint import (
    Blueprint,
    Recipe,
    Stream,
    StreamPerName,
    blueprint,
    collection_of,
    takes_rngs,
)
from linen_compat.bridge._checks import check_arguments, check_class, check_method
from linen_compat.bridge._paths import Path, Variable, check_leaves, flatten
from linen_compat.formats._arguments import check_configs
from linen_compat.modules.parameters import unboxed
from nnx_pipeline import InputError

INTERMEDIATES, PARAMS = "intermediates", "params"
_Variables = Mapping[PathParts, Variable]


class NoKey(InputError):
    """A module drew random numbers from a stream of which it was given no key."""


def to_linen(
    kind: type[nnx.Module], *args: object, name: str | None = None, **options: object
) -> "NNXAsLinen":
    """Wraps an NNX class, with the arguments of its constructor, as a Linen module.

    The module is `kind(*args, **options, rngs=…)`. Its constructor runs on abstract arrays here,
    once for each class, arguments and mesh, and in `init`. `apply` puts the module together from
    its graph.

    - `args`, `options`: arguments of its constructor, which can be hashed; `rngs` is not one of
      them.
    - `name`: the name of the Linen module among its siblings.

    What becomes of the parts of the module:

    - A norm, an embedding, attention, a feed-forward module or a decoder layer of this project gets
      the parameter names of its Linen class, also inside another module. The outermost of them
      decides. All other paths are those of NNX: the tree of `Mixtral` does not become the tree of
      `Transformer`.
    - A variable is in the collection of its type: `nnx.Param` in `params`, `nnx.BatchStat` in
      `batch_stats`. InputError is raised when a call changes a variable whose collection is not
      mutable.
    - `logical_axes` become `nn.LogicallyPartitioned`, mesh axes `nn.Partitioned`.
    - Streams of random numbers are Linen's of the same name, in `init` and in `apply`.
    - Attributes that are set in a call last as long as that call.

    Raises InputError for anything but a class of NNX modules, for arguments that it does not take
    or that cannot be hashed, and for modules that hold arrays outside of variables.
    """
    check_class(kind)
    if "rngs" in options:
        raise InputError(
            f"to_linen({kind.__name__}, …) got rngs={type(options['rngs']).__name__}, but the "
            "module takes its random numbers from Linen; leave it out"
        )
    arguments = {**options, "rngs": None} if takes_rngs(kind) else options
    check_arguments(kind.__init__, args, arguments, of=f"the constructor of {kind.__name__}")
    check_configs(kind.__init__, args, arguments, of=kind.__name__)
    recipe = Recipe(kind, args, tuple(sorted(options.items())))
    try:
        hash(recipe)
    except TypeError as error:
        raise InputError(
            f"to_linen({kind.__name__}, …) keeps one graph per class and arguments, and one of "
            f"these cannot be hashed ({error}); give tuples and frozen dataclasses"
        ) from error
    blueprint(recipe)
    return NNXAsLinen(recipe, name=name)


class NNXAsLinen(nn.Module):
    """The module that `to_linen` makes; two are equal if their arguments are."""

    recipe: Recipe

    @nn.compact
    def __call__(self, *args: object, nnx_method: str = "__call__", **kwargs: object) -> PyTree:
        """Calls the NNX module, or its method `nnx_method`.

        Raises InputError when the variables are not those of the module, there is no such method,
        or `init` got no key for a stream that the module draws from.
        """
        plan = blueprint(self.recipe)
        if self.is_initializing() and not any(self.variables.values()):
            # Nothing has been made yet: here alone the constructor makes arrays.
            module = self.recipe.make(StreamPerName(self._typed_key))
            made = dict(nnx.to_flat_state(nnx.state(module)))
            self._put({slot.linen: slot.box(made[slot.nnx].get_value()) for slot in plan.slots})
            return self._method(module, nnx_method)(*args, **kwargs)
        boxes = flatten({k: v for k, v in self.variables.items() if k != INTERMEDIATES})
        check_leaves(boxes, plan.shapes, of=self.recipe.name, at=self.path)
        before: dict[PathParts, Array] = {
            slot.nnx: unboxed(boxes[slot.linen]) for slot in plan.slots
        }
        without_key = self._add_streams(plan, before)
        module = plan.build(before)
        out = self._method(module, nnx_method)(*args, **kwargs)
        if not self.is_initializing():
            after = dict(nnx.to_flat_state(nnx.state(module)))
            for stream in without_key:
                # Each draw replaces the count by a new array.
                if after[stream.count].get_value() is not before[stream.count]:
                    raise NoKey(
                        f"{self.recipe.name} drew random numbers from the stream {stream.name!r} "
                        f"and apply got no key for it; give "
                        f"rngs={{{stream.name!r}: jax.random.key(…)}}"
                    )
            self._put_back(plan, boxes, before, after)
        return out

    def _method(self, module: nnx.Module, name: str) -> Callable[..., PyTree]:
        check_method(module, name, of=self.recipe.name)
        method: Callable[..., PyTree] = getattr(module, name)
        return method

    def _typed_key(self, name: str) -> Array:
        """A typed key for a stream, from Linen's stream of that name or from `params`."""
        if not self.has_rng(name) and not self.has_rng(PARAMS):
            raise InputError(
                f"{self.recipe.name} draws random numbers from the stream {name!r} and "
                f"got no key for it; give a key, or {{{name!r}: jax.random.key(…)}}"
            )
        key = self.make_rng(name)
        typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        return key if typed else jax.random.wrap_key_data(key)

    def _add_streams(self, plan: Blueprint, values: dict[PathParts, Array]) -> list[Stream]:
        """Adds each stream's key and count to `values`, and returns the streams without a key.

        Such a stream gets a placeholder; calls that have drawn from it are refused.
        """
        without = []
        for stream in plan.streams:
            has_key = self.has_rng(stream.name) or self.has_rng(PARAMS)
            key = self._typed_key(stream.name) if has_key else jax.random.key(0)
            # A stream with a shape holds an array of keys.
            values[stream.key] = jax.random.split(key, stream.shape) if stream.shape else key
            values[stream.count] = jax.numpy.zeros(stream.shape, jax.numpy.uint32)
            if not has_key:
                without.append(stream)
        return without

    def _put_back(
        self,
        plan: Blueprint,
        boxes: dict[Path, PyTree],
        before: dict[PathParts, Array],
        after: _Variables,
    ) -> None:
        """Writes the variables that the call changed to Linen's collections."""
        linen = {slot.nnx: slot.linen for slot in plan.slots}
        new: dict[Path, PyTree] = {}
        for path, variable in after.items():
            value = variable.get_value()
            if value is before.get(path) or isinstance(variable, nnx.RngState):
                continue
            collection = collection_of(variable)
            if collection == INTERMEDIATES:
                if self.is_mutable_collection(INTERMEDIATES):  # else left out, as by Linen's sow
                    new[(collection, *map(str, path))] = value
                continue
            name = f"{self.recipe.name}.{'.'.join(map(str, path))}"
            if path not in linen:
                raise InputError(
                    f"{name} was created in the call, after the graph was made; "
                    "create it in the constructor"
                )
            if not self.is_mutable_collection(collection):
                raise InputError(
                    f"the call changed {name} and its collection {collection!r} is not mutable; "
                    f"give apply mutable=[{collection!r}], or call it so that it changes nothing"
                )
            box = boxes[linen[path]]
            new[linen[path]] = box.replace_boxed(value) if hasattr(box, "replace_boxed") else value
        if new:
            self._put(new, boxes)

    def _put(self, new: dict[Path, PyTree], siblings: Mapping[Path, PyTree] | None = None) -> None:
        """Writes variables to Linen's collections, together with others below the same names.

        Linen replaces everything below one name at a time, so what is beside is written again.
        """
        changed = {path[:2] for path in new}
        unchanged = {path: leaf for path, leaf in (siblings or {}).items() if path[:2] in changed}
        for collection, tree in unflatten_dict({**unchanged, **new}).items():
            for name, value in tree.items():
                self.put_variable(collection, name, value)
