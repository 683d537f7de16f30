"""Wraps Linen modules as NNX modules."""

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import DenyList, meta
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, PyTree

from linen_compat.bridge import _checks as checks
from linen_compat.bridge import _paths as paths
from linen_compat.bridge._paths import Flat, Path, Tree, Variable, flatten
from linen_compat.bridge.to_linen import INTERMEDIATES, PARAMS, NoKey
from linen_compat.modules.parameters import unboxed
from nnx_pipeline import InputError, Layout

RESERVED = {"deterministic", "layout", "use_running_average"} | {
    f"linen_{name}" for name in ("collections", "module", "slots", "sown", "streams")
}
STATISTICS = "batch_stats"
_numbers = itertools.count()
_Slots = tuple[tuple[Path, Path], ...]  # (path in NNX, path in Linen beginning with the collection)


def to_nnx(
    module: nn.Module,
    *example: PyTree,
    rngs: nnx.Rngs | Array | int | None = None,
    variables: Tree | None = None,
    collect: Iterable[str] = (),
    method: Callable[..., object] | None = None,
    **options: Any,
) -> "LinenAsNNX":
    """Wraps a Linen module as an NNX module whose variables are made here, once.

    A call of the result is one `module.apply` on plain arrays. It makes, renames and unboxes
    nothing.

    - `example`, `options`: arguments of the module, arrays or `jax.ShapeDtypeStruct`, with which
      its variables are made.
    - `rngs`: a key or a seed for the parameters, or an `nnx.Rngs`. Its other named streams, such as
      dropout, become the streams of calls.
    - `variables`: variables as `init` returns them, in the place of new ones.
    - `collect`: collections, such as intermediates, that a call may write beside those that exist.
    - `method`: the method that makes the variables, by default `__call__`.

    What becomes of the parts of the module:

    - A norm, an embedding, attention, a feed-forward block or a decoder layer of this project gets
      the parameter names of its NNX class, where it is `module` itself. All other paths are those
      of Linen, also of such modules inside another one.
    - A variable is of the type of its collection: `nnx.Param`, `nnx.BatchStat` … Each call updates
      the variables that it changes and that are no parameters.
    - What the module sows into a collection other than `intermediates` is a variable too. It holds
      what the last call that sowed it sowed, and before the first call what `init` sowed, or zeros
      beside `variables`, which may lack it. No call gets it.
    - After `eval()` a call draws from no stream that the result keeps, and changes no
      `batch_stats`. Linen modules are told by an argument or a field, such as `train=False`: a call
      that still draws or changes is refused.
    - `nn.LogicallyPartitioned` become `logical_axes` in `Layout`'s names; other metadata boxes are
      kept as `linen_box`.

    Raises InputError when `variables` has a path that the module does not have, lacks one that it
    has, or holds an array of another shape; and for anything but a Linen module, for arguments that
    it does not take, and for anything but a key, a seed or an `nnx.Rngs` to make variables from.
    """
    checks.check_module(module)
    checks.check_rngs(rngs)
    checks.check_collections(variables, of=type(module).__name__)
    names = checks.check_collect(collect)
    called = type(module).__call__ if method is None else method
    checks.check_arguments(called, example, options, of=type(module).__name__)
    keys, streams = _keys_and_streams(rngs, needed=variables is None)

    def init(keys: dict[str, Array]) -> PyTree:
        has_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(example))
        make = module.lazy_init if has_shapes else module.init
        # The number keeps `nn.jit` from a call that it has traced before, in which no one sows.
        mutable = DenyList((INTERMEDIATES, f"init {next(_numbers)}"))
        with note.noting():
            return make(keys, *example, method=called, mutable=mutable, **options)

    note = _Sown()
    # Beside given variables, only the paths, shapes and metadata of new ones are needed.
    made = init(keys) if variables is None else jax.eval_shape(lambda: init(keys))
    boxes = flatten(made)
    sown = frozenset(path for path in boxes if note.has(path))
    leaves = boxes
    if variables is not None:
        flat = flatten(variables)
        read = {path: leaf for path, leaf in flat.items() if not note.has(path)}
        wanted = {path: paths.unboxed_shape(boxes[path]) for path in boxes if path not in sown}
        paths.check_leaves(read, wanted, of=type(module).__name__)
        leaves = flat | {path: jax.tree.map(jnp.zeros_like, boxes[path]) for path in sown}
    slots = tuple((paths.nnx_path(module, path[1:]), path) for path in boxes)
    made_here = [_variable(path[0], boxes[path], leaves[path]) for path in boxes]
    return LinenAsNNX(module, slots, sown, made_here, streams, names)


class _Sown:
    """Notes where modules sow."""

    _lock = threading.RLock()

    def __init__(self) -> None:
        self._paths: set[Path] = set()

    def has(self, path: Path) -> bool:
        """Whether a path was sown, or lies in a tree that was."""
        return any(path[:end] in self._paths for end in range(2, len(path) + 1))

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what this thread sows in the context; others may sow too, or wait to enter.

        It replaces `nn.Module.sow`, and not that of each module of which a method is called: a
        parent may sow for a child before it calls it.
        """
        thread = threading.get_ident()
        with self._lock:
            plain = nn.Module.sow

            def sow(module: nn.Module, col: str, name: str, *args: Any, **options: Any) -> bool:
                if module.scope is not None and threading.get_ident() == thread:
                    self._paths.add((col, *module.path, name))
                return plain(module, col, name, *args, **options)

            setattr(nn.Module, "sow", sow)  # noqa: B010  # mypy knows the overloads of the other
            try:
                yield
            finally:
                setattr(nn.Module, "sow", plain)  # noqa: B010


class LinenAsNNX(nnx.Module):
    """The NNX module that `to_nnx` makes: it holds a Linen module's variables and applies it.

    - `slots`: the path of each variable in NNX, and in Linen; `variables` has them in this order.
    - `sown`: the Linen paths among them that calls write and never read.
    - `collect`: collections that a call may write beside those of the variables.
    """

    linen_streams: nnx.Rngs | None = None
    # `eval()` and `train()` set these two, also where this module is part of another.
    deterministic: bool | None = None
    use_running_average: bool | None = None

    def __init__(
        self,
        module: nn.Module,
        slots: _Slots,
        sown: frozenset[Path],
        variables: list[Variable],
        streams: nnx.Rngs | None,
        collect: tuple[str, ...],
    ) -> None:
        self.linen_module, self.linen_slots, self.linen_sown = module, slots, sown
        self.linen_collections = tuple(
            sorted({*collect, *(path[0] for _, path in slots if path[0] != PARAMS)})
        )
        if streams is not None:
            self.linen_streams = streams
        for (path, _), variable in zip(slots, variables, strict=True):
            _attach(self, path, variable)

    def __call__(
        self,
        *args: object,
        rngs: nnx.Rngs | Mapping[str, Array] | None = None,
        method: str | Callable[..., object] | None = None,
        **kwargs: Any,
    ) -> PyTree:
        """Applies the Linen module, or another method of it, given by name or as a function.

        `rngs` are streams or keys by name, instead of the streams that the module keeps. Raises
        InputError when the module draws random numbers from a stream that it was not given, changes
        running statistics after `eval()`, or has no method of that name.
        """
        if isinstance(method, str):
            checks.check_method(self.linen_module, method, of=type(self.linen_module).__name__)
        if rngs is None:
            rngs = None if self.deterministic else self.linen_streams
        keys = {} if rngs is None else {name: _key(rngs[name]) for name in rngs}
        read = [(at, path) for at, path in self.linen_slots if path not in self.linen_sown]
        flat = {path: _at(self, at).get_value() for at, path in read}
        fixed = {STATISTICS} if self.use_running_average else set()
        mutable = [name for name in self.linen_collections if name not in fixed] or False
        options = {"rngs": keys, "mutable": mutable, "method": method, **kwargs}
        try:
            out = self.linen_module.apply(unflatten_dict(flat), *args, **options)
        except flax.errors.InvalidRngError as error:
            raise self._needs_stream(error) from error
        except NoKey as error:  # of an NNX module within this one
            if not self.deterministic:
                raise
            raise self._eval_error("draws random numbers", error) from error
        except flax.errors.ModifyScopeVariableError as error:
            if not self.use_running_average:
                raise
            raise self._eval_error("changes running statistics", error) from error
        if not mutable:
            return out
        out, updates = out
        self._update(flat, flatten(updates))
        return out

    def _needs_stream(self, error: Exception) -> InputError:
        if self.deterministic:
            return self._eval_error("draws random numbers", error)
        return InputError(
            f"{type(self.linen_module).__name__} draws random numbers from a stream that it "
            f"was not given ({_first(error)}); give to_nnx one, such as "
            "rngs=nnx.Rngs(params=0, dropout=1), in the constructor of a module for to_linen "
            "nnx.Rngs(params=rngs.params(), dropout=rngs.dropout()), or call the module with "
            "rngs={'dropout': key}"
        )

    def _eval_error(self, does: str, error: Exception) -> InputError:
        return InputError(
            f"{type(self.linen_module).__name__} {does} after eval() ({_first(error)}), as a Linen "
            "module is told by its own arguments and fields; call it with that argument, such as "
            "train=False or deterministic=True, or go back with train()"
        )

    def _update(self, before: Flat, updates: Flat) -> None:
        """Stores what the call wrote in the variables, and new intermediates as attributes."""
        places = {path: at for at, path in self.linen_slots}
        for path, leaf in updates.items():
            if path in places:
                if leaf is not before.get(path):
                    _at(self, places[path]).set_value(unboxed(leaf))
            elif path[0] == INTERMEDIATES:
                _attach(self, path[1:], _variable(path[0], leaf, leaf))
            else:
                raise InputError(
                    f"{type(self.linen_module).__name__} made {'/'.join(path)} in a call, but not "
                    "in init; give to_nnx example arguments with which init makes it too"
                )

    def set_view(
        self, *, deterministic: bool | None = None, use_running_average: bool | None = None
    ) -> None:
        """For `nnx.view`, which then does what `eval()` and `train()` do."""
        if deterministic is not None:
            self.deterministic = deterministic
        if use_running_average is not None:
            self.use_running_average = use_running_average

    @property
    def layout(self) -> Layout:
        """The layout of the Linen module, if it has one; `sharding.with_layout` replaces it."""
        layout: Layout = self.linen_module.layout
        return layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self.linen_module = self.linen_module.clone(layout=layout)


def _first(error: Exception) -> str:
    """The message of an error, without the address of a page and the cure."""
    return str(error).split(" (http")[0].split("; give ")[0]


def _variable(collection: str, box: PyTree, leaf: PyTree) -> Variable:
    """An NNX variable with the array of `leaf` and the metadata of `box`."""
    kind = nnx.variable_type_from_name(collection, allow_register=True)
    value = unboxed(leaf)
    if not isinstance(box, meta.AxisMetadata):
        return kind(value)
    if isinstance(box, nn.LogicallyPartitioned) and box.mesh is None and box.rules is None:
        return kind(value, logical_axes=paths.layout_axes(tuple(box.names)))
    return kind(value, linen_box=box.replace_boxed(None))


def _attach(module: "LinenAsNNX", path: Path, variable: Variable) -> None:
    """Sets a variable below a module; it may replace an intermediate of an earlier call."""
    if path[0] in RESERVED:
        raise InputError(
            f"the variable {'.'.join(path)} would hide {path[0]} of the wrapper; "
            f"rename {path[0]} in the Linen module"
        )
    node: nnx.Module = module
    for name in path[:-1]:
        if name not in vars(node):
            setattr(node, name, nnx.Dict())
        node = vars(node)[name]
    present = vars(node).get(path[-1]) if isinstance(node, nnx.Module) else node
    if not isinstance(present, nnx.Intermediate | None):
        raise InputError(
            f"two variables would be called {'.'.join(path)}, as NNX has no collections to tell "
            "them apart; rename one of them in the Linen module"
        )
    setattr(node, path[-1], variable)


def _at(module: nnx.Module, path: Path) -> Variable:
    variable: Variable = operator.attrgetter(".".join(path))(module)
    return variable


def _keys_and_streams(
    rngs: nnx.Rngs | Array | int | None, *, needed: bool
) -> tuple[dict[str, Array], nnx.Rngs | None]:
    """Keys for `init` by name, and the streams for later calls: all but `params` and `default`.

    Without `rngs` it is an InputError if the keys are needed, to make variables.
    """
    if rngs is None:
        if needed:
            raise InputError("to_nnx makes parameters and got no rngs; give rngs=nnx.Rngs(0)")
        return {PARAMS: jax.random.key(0)}, None
    if not isinstance(rngs, nnx.Rngs):
        return {PARAMS: jax.random.key(rngs) if isinstance(rngs, int | np.integer) else rngs}, None
    names = [name for name in rngs if name not in (PARAMS, "default")]
    keys = {PARAMS: rngs.params(), **{name: rngs[name]() for name in names}}
    streams = nnx.Rngs(**{name: rngs[name]() for name in names}) if names else None
    return keys, streams


def _key(source: nnx.RngStream | Array) -> Array:
    return source() if isinstance(source, nnx.RngStream) else source
