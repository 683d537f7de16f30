"""The shape of the code in figures: rooms, floors, arrows, circles, parameters, tunnels.

    python benchmarks/shape.py [CHECKOUT]

A room of a folder is a file or a folder in it. An arrow leads from a room to one that it imports; a
room stands one floor above the highest that it imports. A tunnel is an argument that is passed from
function to function under its own name; its length counts those that pass it on without reading it.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("nnx_pipeline", "linen_compat")
MOST_PARAMETERS = 6
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the packages by its dotted name."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {
        ".".join(file.relative_to(root).with_suffix("").parts): ast.parse(file.read_text())
        for file in files
    }


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules among `known` that a module imports; a package's face is its `__init__`."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            for there in (name, f"{name}.__init__", name.rpartition(".")[0]):
                if there in known:
                    yield there
                    break


def arrows_in(folder: str, trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Each room of a folder with those that it imports; the folder's own `__init__` is no room."""

    def room(name: str) -> str | None:
        inside = name.removeprefix(f"{folder}.")
        return None if inside == name or inside == "__init__" else inside.split(".")[0]

    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        if (own := room(name)) is not None:
            found[own] |= {there for other in imported(tree, set(trees)) if (there := room(other))}
            found[own].discard(own)
    return found


def floors(arrows: dict[str, set[str]]) -> int | str:
    """How many floors the rooms make, or the circle among them."""
    try:
        order = list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return "a circle: " + " -> ".join(error.args[1])
    floor: dict[str, int] = {}
    for room in order:
        floor[room] = 1 + max((floor[below] for below in arrows.get(room, ())), default=0)
    return max(floor.values(), default=0)


def functions(trees: dict[str, ast.Module]) -> Iterator[tuple[str, Function]]:
    """Every function with the module that it is in."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield name, node


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, without `self`, `cls`, `*arguments` and `**options`."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


class Taker(NamedTuple):
    """Something that can be called."""

    place: str  # module, classes and name
    node: ast.AST
    names: list[str]  # of its parameters


def takers(trees: dict[str, ast.Module]) -> dict[str, list[Taker]]:
    """All functions and classes by the bare name by which they are called.

    A class takes the parameters of its `__init__`, or its fields where it has none.
    """
    found: dict[str, list[Taker]] = defaultdict(list)

    def look(node: ast.AST, place: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef):
                fields = [one.target for one in inner.body if isinstance(one, ast.AnnAssign)]
                names = [field.id for field in fields if isinstance(field, ast.Name)]
                if not any(getattr(one, "name", "") == "__init__" for one in inner.body):
                    found[inner.name].append(Taker(f"{place}.{inner.name}", inner, names))
                look(inner, f"{place}.{inner.name}")
            elif isinstance(inner, Function):
                own = f"{place}.{inner.name}"
                called = place.rpartition(".")[2] if inner.name == "__init__" else inner.name
                found[called].append(Taker(own, inner, parameters(inner)))
                look(inner, own)
            else:
                look(inner, place)

    for module, tree in trees.items():
        look(tree, module)
    return found


def longest_tunnel(trees: dict[str, ast.Module]) -> list[str]:
    """The functions that an argument passes through under its own name, none of which reads it.

    A call, the creation of an object and a `functools.partial` pass an argument on. Where several
    functions have the name that is called, any of them may be meant: the longest way counts, so
    that the figure is at least that of the code. The last function, which reads it, does not count.

    `rngs` is left out: in Flax it goes down the tree of modules, however deep that is, and it is no
    option.
    """
    known = takers(trees)
    following: dict[tuple[str, str], set[str]] = defaultdict(set)
    for taker in (taker for same in known.values() for taker in same):
        for name in taker.names if isinstance(taker.node, Function) else ():
            if name == "rngs":
                continue
            inside = [node for statement in taker.node.body for node in ast.walk(statement)]
            uses = [node for node in inside if isinstance(node, ast.Name) and node.id == name]
            passed = list(_passed_on(taker, name, known))
            if uses and len({use for use, _ in passed}) == len(uses):
                following[taker.place, name] |= {there for _, there in passed}

    def path(function: str, name: str, seen: tuple[str, ...]) -> list[str]:
        if (function, name) not in following:
            return []  # it reads the argument
        further = [
            path(called, name, (*seen, called))
            for called in following[function, name]
            if called not in seen
        ]
        return [function, *max(further, key=len, default=[])]

    tunnels = {key: path(*key, (key[0],)) for key in list(following)}
    (_, argument), longest = max(tunnels.items(), key=lambda item: (len(item[1]), item[0]))
    return [argument, *longest]


def _passed_on(taker: Taker, name: str, known: dict[str, list[Taker]]) -> Iterator[tuple[int, str]]:
    """Each use of a name as an argument of the same name, and the function that it is given to."""
    own = taker.place.partition(".")[0]
    for call in ast.walk(taker.node):
        if not isinstance(call, ast.Call):
            continue
        target, given = call.func, list(call.args)
        if ast.unparse(target) == "functools.partial" and given:
            target, given = given[0], given[1:]
        for other in known.get(ast.unparse(target).rpartition(".")[2], ()):
            if PACKAGES.index(own) < PACKAGES.index(other.place.partition(".")[0]):
                continue  # the first package does not know the second
            taken = list(zip(other.names, given, strict=False))
            taken += [(one.arg, one.value) for one in call.keywords if one.arg in other.names]
            for parameter, argument in taken:
                if parameter == name and isinstance(argument, ast.Name) and argument.id == name:
                    yield id(argument), other.place


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    trees = modules(root)
    folders = sorted({name.rpartition(".")[0] for name in trees})
    print("| folder | rooms | floors | arrows |\n|---|--:|--:|--:|")
    for folder in folders:
        arrows = arrows_in(folder, trees)
        print(f"| {folder} | {len(arrows)} | {floors(arrows)} | {sum(map(len, arrows.values()))} |")
    many = sorted(
        ((len(parameters(f)), f"{name}.{f.name}") for name, f in functions(trees)), reverse=True
    )
    many = [one for one in many if one[0] > MOST_PARAMETERS]
    print(f"\n{len(trees)} files, {len(folders)} folders")
    print(f"{len(many)} functions with more than {MOST_PARAMETERS} parameters:")
    for count, name in many:
        print(f"  {count} {name}")
    argument, *through = longest_tunnel(trees)
    print(f"longest tunnel: `{argument}` through {len(through)}: {' -> '.join(through)}")


if __name__ == "__main__":
    main()
