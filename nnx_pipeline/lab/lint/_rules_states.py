"""The rule about states that an associative scan makes for all positions at once."""

from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from nnx_pipeline.lab._tracing.jaxpr import is_made_in_jax_by, is_transposed
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import JaxprScope, Value, calls_of, loops_around, step_back

_PASSED_ON = facts.SAME | facts.FORM | facts.FACTORS
_CONTRACTS = {"dot_general", "reduce_sum"}
_TIMES = 8  # how many times what is read of them the states are, at the least


def states_stored(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds states that an associative scan makes for all positions of smaller arrays, where a sum
    over each state leaves a fraction of their size. None of a part of the positions, which a loop
    cuts, and none of an array that is as large before the scan: chunks would not make it smaller.
    """
    for scope, equation in program.scope.equations():
        if equation.primitive.name not in facts.SUMS or not equation.outvars:
            continue
        states = scope.value(equation.outvars[0])
        size = program.device_bytes(states)
        if size.bytes < limit or not _is_scanned(scope, equation) or not _is_contracted(states):
            continue
        if _is_spread(states) and not _comes_in_parts(program, states):
            yield Waste(
                scope.locate(equation),
                size,
                f"{facts.array_text(states)} are the states of all positions, and a sum over each "
                f"state leaves 1/{_TIMES} of them or less",
                "make the states of a part of the positions at a time: a jax.lax.scan over chunks "
                "that carries the last state, with the associative scan and the sum inside a "
                "jax.checkpoint",
            )


def _is_scanned(scope: JaxprScope, equation: JaxprEqn) -> bool:
    backward = is_transposed([equation, *scope.calls()])
    return not backward and is_made_in_jax_by(equation, "associative_scan")


def _is_contracted(states: Value) -> bool:
    waiting = [states]
    for one in each_once(waiting):
        for equation in one.scope.readers.get(one.variable, []):
            results = [one.scope.value(result) for result in equation.outvars]
            name = equation.primitive.name
            if name in _CONTRACTS and _TIMES * results[0].aval.size <= states.aval.size:
                return not is_transposed([equation, *one.scope.calls()])
            waiting += results if name in _PASSED_ON else []
        waiting += calls_of(one)
    return False


def _is_spread(states: Value) -> bool:
    """Whether all that they are computed from, one by one, is a fraction of their size."""
    waiting, most = [states], states.aval.size // _TIMES
    for one in each_once(waiting):
        if one is not states and one.aval.size <= most:
            continue
        step = step_back(one)
        name = step.equation.primitive.name if step.equation is not None else ""
        if step.way == "constant" or name == "iota":
            continue
        if step.way not in ("same", "made") or name in _CONTRACTS | {"gather", "sort"}:
            return False
        waiting += step.values
    return True


def _comes_in_parts(program: LintedProgram, states: Value) -> bool:
    """Whether they are computed from what a loop cuts from an array other than a parameter."""
    waiting = [states] if loops_around(states.scope) else []
    for one in each_once(waiting):
        step = step_back(one)
        if step.way == "slice" and facts.is_float(one) and not program.is_parameter(one):
            return True
        waiting += step.values if step.way in ("same", "made") else ()
    return False
