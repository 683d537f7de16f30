"""Rules about arguments that a program returns updated: donation, and caches made anew."""

from collections import Counter
from collections.abc import Iterator, Sequence

from jax.extend.core import Literal

from nnx_pipeline.lab._tracing.calls import Input
from nnx_pipeline.lab._tracing.jaxpr import is_differentiated
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import ArraySize, LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import Derivation, Value, as_loop, step_back

_WRITES = {"dynamic_update_slice", "scatter", "scatter-add"}
_SAME_NUMBERS = facts.SAME | facts.FORM


def not_donated(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds arguments that a program returns updated, and that its jit does not donate.

    A result is an updated argument of its dtype and shape if the argument is written into, or if it
    is a term of the result: in a program with a backward pass, or for several arrays of one
    argument. x + f(x) of a layer is no update. A term with a factor below a half is none (weight
    decay, the network that a target follows), and neither is one of several that could be it.
    """
    numbers = updated_arguments(program)
    kept = [program.inputs[number] for number in numbers]
    sizes = [program.device_bytes(program.input(number)) for number in numbers]
    total = ArraySize(sum(one.bytes for one in sizes), all(one.per_device for one in sizes))
    if kept and total.bytes >= limit:
        names = dict.fromkeys(one.parameter for one in kept)
        yield Waste(
            program.function,
            total,
            f"{' and '.join(names)} ({counted(len(kept), 'array')}) come back with the same dtypes "
            "and shapes and are not donated, so that old and new are in memory together",
            donation_words(kept, program.jit, program.function.function),
        )


def donation_words(kept: Sequence[Input], jit: str, name: str) -> str:
    """What to write so that arrays are donated.

    - `kept`: the arrays.
    - `jit`: what jitted the function or could, see `jit_for`.
    - `name`: that of the function.
    """
    numbers = tuple(dict.fromkeys(one.argument for one in kept if isinstance(one.argument, int)))
    names = tuple(dict.fromkeys(one.parameter for one in kept))
    options = f"donate_argnums={numbers}"
    if not all(isinstance(one.argument, int) for one in kept):
        options = f"donate_argnames={names}"
    elif all(name.isidentifier() for name in names):
        options = f"{options} or donate_argnames={names}"
    cures = {
        "": f"jit it with donation: jax.jit({name}, {options})",
        "no nnx.jit": f"jit it with donation: nnx.jit({name}, {options})",
        "no eqx.filter_jit": 'jit it with donation: eqx.filter_jit(donate="all") or, for all but '
        'the first argument, donate="all-except-first"',
        "equinox": 'write eqx.filter_jit(donate="all") or, for all but the first argument, '
        'donate="all-except-first"',
    }
    return (
        f"{cures.get(jit, f'write {jit}(…, {options})')}; the caller then uses the new arrays alone"
    )


def updated_arguments(program: LintedProgram) -> list[int]:
    """The numbers of the inputs that results update, each result another, and without donation."""
    updates = [_updated(program, value) for value in program.results()]
    taken: dict[int, bool] = {}
    for candidates, is_sure in sorted(updates, key=lambda update: len(update[0])):
        free = [number for number in sorted(candidates) if number not in taken]
        if len({program.inputs[number].argument for number in free}) > 1:
            continue  # which of them comes back is not known
        taken |= dict.fromkeys(free[:1], is_sure)
    # Without a gradient only a tree with several such arrays is taken for a state.
    trees = Counter(program.inputs[number].argument for number in taken)
    taken = {n: s for n, s in taken.items() if s or trees[program.inputs[n].argument] > 1}
    # The memory of other donated arrays of that dtype and shape serves as well.
    spare = Counter(
        facts.kind_of(program.input(number))
        for number, one in enumerate(program.inputs)
        if one.donated and number not in taken
    )
    kept = []
    for number in sorted(taken):
        kind = facts.kind_of(program.input(number))
        if not program.inputs[number].donated and not spare[kind]:
            kept.append(number)
        elif not program.inputs[number].donated:
            spare[kind] -= 1
    return kept


def _updated(program: LintedProgram, result: Value) -> tuple[set[int], bool]:
    """The inputs of the dtype and shape of a result that it may be an update of, and whether it is
    one for sure."""
    if _is_passed_through(result):
        return set(), False
    steps = [*facts.history(result, _of_written)]
    is_sure = any(step.primitive in _WRITES for step in steps)
    if not is_sure:
        steps, is_sure = [*facts.history(result, _of_update)], program.has_backward
    reached = {step.number for step in steps if step.way == "argument"}
    kind = facts.kind_of(result)
    return {number for number in reached if facts.kind_of(program.input(number)) == kind}, is_sure


def _is_passed_through(value: Value) -> bool:
    """Whether a result is an argument as it came, perhaps through a loop that stacks it again."""
    while True:
        step = step_back(value)
        is_link = step.way in ("slice", "stack") or (step.way == "same" and len(step.values) == 1)
        if not is_link and step.primitive not in facts.SAME:
            return step.way == "argument"
        value = facts.returned_operand(step)


def _of_written(step: Derivation) -> Sequence[Value]:
    """The operand that a result holds the numbers of, but for those written into it."""
    if step.primitive in _SAME_NUMBERS | facts.PART | _WRITES:
        return (facts.returned_operand(step),)
    return ()


def _of_update(step: Derivation) -> Sequence[Value]:
    """The terms and factors of a result, but for what is computed under differentiation."""
    name = step.primitive
    if name not in _SAME_NUMBERS | facts.SUMS | facts.FACTORS:
        return ()
    if step.values and is_differentiated([step.equation, *step.values[0].scope.calls()]):
        return ()
    return () if _is_small_part(step) else step.values


def _is_small_part(step: Derivation) -> bool:
    """Whether a product has a literal factor below a half, or a quotient one above two."""
    equation = step.equation
    if equation is None or step.primitive not in ("mul", "div"):
        return False
    numbers = [one.val for one in equation.invars if isinstance(one, Literal)]
    sizes = [abs(float(number)) for number in numbers if not getattr(number, "shape", ())]
    if step.primitive == "div":
        sizes = [1 / size for size in sizes if size]
    return any(size < 0.5 for size in sizes)


def donations_lost(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds donated arguments whose memory no result can take, for its dtype or its sharding."""
    free = list(program.results())
    lost = []
    for number, one in enumerate(program.inputs):
        if not one.donated:
            continue
        given = program.input(number)
        fits = next((result for result in free if _fits(program, given, result)), None)
        if fits is None:
            lost.append((given, one))
        else:
            free.remove(fits)
    for given, one in lost:
        size = program.device_bytes(given)
        alike = [r for r in free if getattr(r.aval, "shape", None) == given.aval.shape]
        alike.sort(key=lambda result: result.aval.dtype != given.aval.dtype)
        if size.bytes < limit or not alike:
            continue
        free.remove(alike[0])
        yield Waste(
            facts.line_of(alike[0]) or program.function,
            size,
            *_why_lost(program, given, one, alike[0]),
        )


def _fits(program: LintedProgram, given: Value, result: Value) -> bool:
    if facts.kind_of(given) != facts.kind_of(result):
        return False
    before, after = program.spec_of(given), program.spec_of(result)
    return before is None or after is None or before == after


def _why_lost(program: LintedProgram, given: Value, one: Input, result: Value) -> tuple[str, str]:
    if given.aval.dtype != result.aval.dtype:
        return (
            f"{one.name}, {facts.array_text(given)}, is donated, and the result of its shape is "
            f"{result.aval.dtype.name}: its memory is of no use, and the result takes other memory",
            f"return it in the dtype that it came in: .astype({one.name}.dtype)",
        )
    before, after = program.spec_of(given), program.spec_of(result)
    return (
        f"{one.name}, {facts.array_text(given)}, is donated with {before}, and the result is "
        f"sharded as {after}: its memory is of no use, and the result takes other memory",
        f"return it sharded as it came: jax.lax.with_sharding_constraint(…, {before}), or "
        "out_shardings of the jit",
    )


def caches_rebuilt(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds caches that a step makes anew from the old one, where it could write into that.

    It puts the old one and the new entries side by side, pads it, or copies it into zeros. A cache
    is an argument, or what a loop carries, whose successor is read by a matrix product, as keys and
    values are, or into which the step also writes.
    """
    pairs: list[tuple[Value, Value | None]] = [(value, None) for value in program.results()]
    for scope, equation in program.scope.equations():
        loop = as_loop(scope, equation)
        pairs += [(end, begin) for _, begin, end in loop.carried] if loop else []
    for value, begin in pairs:
        size = program.device_bytes(value)
        if size.bytes < limit or not facts.is_float(value):
            continue
        made, pieces, writes = _pieces(value)
        old = [piece for piece in pieces if _is_old(piece, begin)]
        whole = made.aval.size
        if 2 * sum(piece.aval.size for piece in old) < whole or not old:
            continue
        if writes or facts.feeds_product(made) or any(map(_is_written, old)):
            yield Waste(
                facts.line_of(made) or program.function,
                size,
                f"{facts.array_text(made)} is the old cache and its new entries, copied into an "
                "array made anew in each step",
                "allocate the cache once, at its largest, write into it with "
                "jax.lax.dynamic_update_slice(cache, new, start) (or cache.at[…].set(new)), and "
                "donate it",
            )


def _pieces(value: Value) -> tuple[Value, Sequence[Value], bool]:
    """The array that a value was first made as, what that is put together from, and whether
    something was written into it later."""
    updates: list[Value] = []
    while True:
        step = step_back(value)
        name = step.primitive
        if step.way == "stack" or (step.way == "same" and len(step.values) == 1):
            value = step.values[0]
        elif name in _SAME_NUMBERS - {"broadcast_in_dim"}:
            value = facts.returned_operand(step)
        elif name in ("slice", "dynamic_slice"):
            value = step.values[0]
        elif name in _WRITES:
            updates.append(step.values[2 if name.startswith("scatter") else 1])
            value = step.values[0]
        elif name in ("concatenate", "stack"):
            return value, step.values, bool(updates)
        elif name == "pad":
            return value, step.values[:1], bool(updates)
        elif name == "broadcast_in_dim" and isinstance(step.values[0].variable, Literal):
            return value, updates, len(updates) > 1
        else:
            return value, (), False


def _is_old(piece: Value, begin: Value | None) -> bool:
    """Whether a piece is the cache of before, or a part of it: an argument, or the carry."""
    waiting = [piece]
    for one in each_once(waiting):
        step = step_back(one)
        if one == begin or (begin is None and step.way == "argument"):
            return True
        if step.way in ("slice", "same"):
            waiting += step.values
        elif step.primitive in _SAME_NUMBERS | facts.PART | _WRITES:
            waiting.append(facts.returned_operand(step))
    return False


def _is_written(piece: Value) -> bool:
    return any(step.primitive in _WRITES for step in facts.history(piece, _of_written))
