"""Rules about activations that need not be stored whole: scores, logits, dispatch, residuals."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import remat_p

from nnx_pipeline.lab._tracing.jaxpr import is_recomputed, is_transposed
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import ArraySize, LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import (
    JaxprLoop,
    JaxprScope,
    Value,
    as_loop,
    calls_of,
    loop_of,
    loops_around,
    step_back,
)

# Shorter sequences and smaller vocabularies gain little.
_LONG, _MANY = 1024, 4096
_ELEMENTWISE = facts.SAME | facts.FORM | facts.FACTORS | facts.SUMS | {"max", "min", "tanh"}
_NORMALISES = {"div", "log", "integer_pow", "log1p"}
_CUTS = {"slice", "dynamic_slice"}
# How many times what a checkpoint keeps is stored without one, at the least.
_OF_LAYERS, _OF_OTHERS = 3, 12


class Softmax(NamedTuple):
    """An array whose exponentials are summed over one axis and normalised, made by a product."""

    scope: JaxprScope  # of the product
    product: JaxprEqn
    exponential: Value
    summed: int  # the size of the axis

    def free(self, operand: int) -> list[int]:
        """The sizes of the axes that one operand of the product gives to its result alone."""
        contracted, batch = self.product.params["dimension_numbers"]
        shape = self.scope.value(self.product.invars[operand]).aval.shape
        return [
            n for at, n in enumerate(shape) if at not in (*contracted[operand], *batch[operand])
        ]


def _softmaxes(program: LintedProgram) -> Iterator[Softmax]:
    """Every softmax, log-softmax and logsumexp of a product; an online one, which adds its sums up
    from part to part before it divides, is none."""
    for scope, equation in program.scope.equations():
        if equation.primitive.name != "reduce_sum" or is_transposed([equation, *scope.calls()]):
            continue
        exponential = facts.made_from(scope.value(equation.invars[0]), facts.SAME)
        step = step_back(exponential)
        if step.primitive not in ("exp", "exp2") or len(equation.params["axes"]) != 1:
            continue
        if not _is_normalised_by(scope.value(equation.outvars[0])):
            continue
        product = _product_behind(step.values[0])
        if product is not None:
            summed = exponential.aval.shape[equation.params["axes"][0]]
            yield Softmax(*product, exponential, summed)


def _is_normalised_by(total: Value) -> bool:
    waiting = [total]
    for one in each_once(waiting):
        for equation in one.scope.readers.get(one.variable, []):
            if equation.primitive.name in _NORMALISES:
                return True
            if equation.primitive.name in facts.SAME | facts.FORM | {"abs"}:
                waiting += [one.scope.value(result) for result in equation.outvars]
        waiting += calls_of(one)
    return False


def _product_behind(value: Value) -> tuple[JaxprScope, JaxprEqn] | None:
    """The product that a value is computed from elementwise, in as many numbers."""
    size, waiting = value.aval.size, [value]
    for one in each_once(waiting):
        step = step_back(one)
        if step.primitive == "dot_general":
            return step.values[0].scope, step.equation
        if step.way == "same" or step.primitive in _ELEMENTWISE:
            waiting += [other for other in step.values if getattr(other.aval, "size", 0) == size]
    return None


def scores_stored(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds attention scores of all queries with all keys.

    Inside of a checkpoint the scores of one layer are there at a time, so that only those of longer
    sequences are reported.
    """
    found = [(one, one.scope.locate(one.product)) for one in _softmaxes(program)]
    again = {
        location
        for one, location in found
        if any(map(is_recomputed, [one.product, *one.scope.calls()]))
    }
    for one, location in found:
        size = program.device_bytes(one.exponential)
        if size.bytes < limit or one.summed < _LONG * (2 if location in again else 1):
            continue
        square = all(one.summed in one.free(operand) for operand in (0, 1))
        if square and not _comes_in_parts(one, {"dynamic_slice"}):
            yield Waste(
                location,
                size,
                f"{facts.array_text(one.exponential)} are the scores of {one.summed} queries with "
                "as many keys, which are stored whole",
                "use attention that never stores them: jax.nn.dot_product_attention(…, "
                'implementation="cudnn") on NVIDIA, a Pallas flash kernel on TPU, or a '
                "jax.lax.map over blocks of queries inside a jax.checkpoint",
            )


def logits_stored(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds float32 logits of all tokens over a whole vocabulary, of which a softmax is taken."""
    for one in _softmaxes(program):
        size = program.device_bytes(one.exponential)
        if size.bytes < limit or one.summed < _MANY:
            continue
        if one.exponential.aval.dtype.itemsize < 4 or one.product.params["dimension_numbers"][1][0]:
            continue
        # The weights have the vocabulary, and nothing else that the result has.
        if [one.summed] in (one.free(0), one.free(1)) and not _comes_in_parts(one, _CUTS):
            yield Waste(
                one.scope.locate(one.product),
                size,
                f"{facts.array_text(one.exponential)} are the logits of all tokens, in float32",
                "compute the loss of a part of the tokens at a time: a jax.lax.scan (or "
                "jax.lax.map) over chunks of the hidden states, with the product and the softmax "
                "inside a jax.checkpoint",
            )


def _comes_in_parts(softmax: Softmax, cuts: set[str]) -> bool:
    """Whether an operand of the product is a part of a larger array: what a loop cuts for an
    iteration, or what one of these primitives does, in half or less."""
    looped = bool(loops_around(softmax.scope))
    waiting = [softmax.scope.value(operand) for operand in softmax.product.invars]
    for one in each_once(waiting):
        step = step_back(one)
        if step.primitive in cuts and _is_cut_from(one, step.values[0]):
            return True
        if looped and step.way == "slice":
            return True
        if step.way == "same" or (step.way == "made" and step.primitive not in facts.PRODUCTS):
            # Smaller operands, such as the scale of a norm, are not what is multiplied.
            waiting += [
                other
                for other in step.values
                if getattr(other.aval, "size", 0) >= one.aval.size
                and bool(loops_around(other.scope)) == looped
            ]
    return False


def _is_cut_from(part: Value, whole: Value) -> bool:
    # Not along the last axis, as queries are cut from a product that makes keys and values too.
    is_across = bool(part.aval.shape[-1:] == whole.aval.shape[-1:])
    return is_across and bool(2 * part.aval.size <= whole.aval.size)


def residuals_stacked(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds scans whose backward pass reads several arrays that the forward pass stored of each
    iteration, where a checkpoint of the body would store its input alone."""
    for forward, backward, kept in _residuals(program):
        if _has_checkpoint(backward.body):
            continue
        inputs = [begin for _, begin, _ in forward.carried]
        needed = [entry for _, entry in kept if facts.made_from(entry, facts.SAME) in inputs]
        sizes = [program.device_bytes(whole) for whole, _ in kept]
        stored, known = sum(one.bytes for one in sizes), all(one.per_device for one in sizes)
        length = kept[0][0].aval.shape[0]
        least = sum(length * program.device_bytes(before).bytes for before, _, _ in forward.carried)
        layers = any(program.is_parameter(whole) for whole, _ in forward.sliced)
        times = _OF_LAYERS if layers else _OF_OTHERS
        if stored < limit or stored < times * least or len(needed) == len(kept):
            continue
        yield Waste(
            forward.scope.locate(forward.equation),
            ArraySize(stored, known),
            f"the backward pass of this scan reads {len(kept)} arrays that are stored for each of "
            f"{length} iterations",
            f"put the body in jax.checkpoint (nn.remat, nnx.remat, eqx.filter_checkpoint): it then "
            f"stores what an iteration starts with, {least / 1e6:,.1f} MB, and computes the rest "
            "again",
        )


class Residuals(NamedTuple):
    """What a scan stacks for the scan that is its transpose: whole arrays and their entries."""

    forward: JaxprLoop
    backward: JaxprLoop
    stacks: list[tuple[Value, Value]]


def _residuals(program: LintedProgram) -> Iterator[Residuals]:
    for scope, equation in program.scope.equations():
        backward = as_loop(scope, equation)
        if backward is None or not is_transposed([equation, *scope.calls()]):
            continue
        found: dict[int, Residuals] = {}
        for whole, _ in backward.sliced:
            stack = facts.made_from(whole, facts.SAME | facts.FORM)
            step = step_back(stack)
            if step.way != "stack":
                continue
            entry = step.values[0]
            forward = loop_of(entry.scope)
            if forward and not is_transposed([forward.equation, *forward.scope.calls()]):
                own = found.setdefault(id(forward.body), Residuals(forward, backward, []))
                own.stacks.append((stack, entry))
        yield from found.values()


def _has_checkpoint(body: JaxprScope) -> bool:
    return any(equation.primitive is remat_p for _, equation in body.equations())
