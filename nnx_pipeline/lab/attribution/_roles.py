"""Finds what a buffer is for, its role, from the evidence in the program's text.

The rules apply in this order, and the first that matches gives the role.

1.  The table of pointers of a tuple, and a value that the text does not print: `other`. The
    workspace that a cuBLAS or cuDNN call takes besides its result: `library workspace`.
    A product with a batch dimension over which all its readers sum at once: `partial sums`. The
    NVIDIA compiler splits a long contraction into such products side by side.
2.  A value whose numbers come from an argument of the program through nothing but conversions,
    slices, all-gathers and moves: `gathered weight` where an all-gather is among these, else
    `parameter cast` where a conversion is, else `parameter copy`. An element of a loop's state that
    the body passes on unchanged counts as its initial value.
3.  An element of a loop's state, or the value that the loop's body writes to it in place:
    a. in a program with a backward pass, of a parameter's shape, and either added to or written
       part by part: `gradient accumulator`. Where it is written part by part, the loop must be of
       the backward pass (`transpose(` in the operation's path). Where it is added to, nothing else
       in the loop may read it, unlike a layer's input that is added to the layer's output;
    b. written part by part by a loop that is not of the backward pass, each part a `gradient` by
       rule 5 (of a microbatch, for example): `gradient`;
    c. written part by part by a forward loop, and read by an operation of the backward pass, or by
       a loop that recomputes, and read by one that does not: `saved residual`;
    d. received or summed by a collective in the loop: `collective buffer`;
    e. anything else: `scan carry`.
4.  The result of a collective, or the operand of an asynchronous one: `gradient` where it is the
    result of a reduce-scatter or all-reduce and of a parameter's shape, else `collective buffer`.
    The result of an all-to-all, also after it is converted or its axes are moved, is a `gradient`
    where it is of the shape in which a parameter is stored.
5.  Of a parameter's shape: `gradient` under `transpose(` unless it is recomputed, `optimizer
    update` where a program that has a backward pass computes it outside both passes.
6.  With the size of the vocabulary among its dimensions: `logits`. That size is the larger
    dimension of a matrix among the arguments whose path holds `embedding`, `head`, `vocab` or the
    like (and no position), unless it is also a size of another floating-point argument.
7.  Made in the forward pass (`jvp(` without `transpose(`) and read in the backward pass:
    `saved residual`.
8.  The result of a product (of cuBLAS or cuDNN as well), of a reduction or of an element-wise
    operation: `activation`.
9.  The rest (constants, counters, random numbers, other custom calls): `other`.

A buffer is "of a parameter's shape" by its sizes above 1, in any order. They are those of a
floating-point argument with two or more dimensions, or a subset of those that includes the two
largest (a part along stacked dimensions). In rules 3 and 4, one of the sizes may also be a multiple
of the argument's (a dimension that is gathered).
"""

import re
from collections import Counter
from functools import cached_property

from nnx_pipeline.lab._hlo.dataflow import RESHAPES, Flow, Value, collective
from nnx_pipeline.lab._hlo.module import Instruction, Shape
from nnx_pipeline.lab._tracing.jaxpr import RECOMPUTED
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.attribution._origins import Origins

_VOCABULARY = {
    *("embed", "embedder", "embedding", "head", "lm_head", "logits", "logits_dense"),
    *("token_embedder", "vocab", "wte"),
}
_NOT_COMPUTED = (
    *("after-all", "constant", "custom-call", "infeed", "iota", "parameter", "partition-id"),
    *("replica-id", "rng", "rng-bit-generator", "tuple"),
)
_COPIES = ("copy", "copy-start", "copy-done")
_MOST_READERS = 400  # values that a search for a reader in the backward pass visits at most


class Roles:
    """Applies the rules at the head of this file to the values of one program."""

    def __init__(self, flow: Flow, origins: Origins) -> None:
        self.flow = flow
        self.origins = origins

    def of(self, value: Value, shape: Shape | None) -> str:
        """The role of a value; `shape` is None for the table of pointers of a tuple."""
        instruction = self.flow.at(value)
        if instruction is None or shape is None:
            return "other"
        if _is_library(instruction) and shape.dtype in ("s8", "u8") and len(shape.dims) == 1:
            return "library workspace"
        if self._is_summed_at_once(value):
            return "partial sums"
        return (
            self._of_argument(value, shape)
            or self._in_loop(value, shape)
            or self._of_collective(value, shape)
            or self._by_shape(value, shape)
            or self._by_pass(value)
        )

    def _of_argument(self, value: Value, shape: Shape) -> str | None:
        """Rule 2; None where it does not apply."""
        lineage = self.flow.lineage(value)
        made_by = lineage[-1]
        if made_by.name not in self._arguments:
            return None
        if any(collective(item) == "all-gather" for item in lineage):
            return "gathered weight"
        converted = any(item.opcode == "convert" for item in lineage)
        same = not converted and all(made.dtype == shape.dtype for made in made_by.shapes)
        return "parameter copy" if same else "parameter cast"

    def _in_loop(self, value: Value, shape: Shape) -> str | None:
        """Rule 3."""
        slot = self._slot(value)
        if slot is None:
            return None
        loop, state = slot
        written, *initial = self.flow.sources(state)
        if not initial:
            return None  # the body passes it on unchanged, so that it is still the initial value
        writer = self._writer(written)
        again = any(RECOMPUTED in item.op_name for item in (writer, loop))
        backward = not again and (self._is_backward(writer) or self._is_backward(loop))
        stacked = writer.opcode == "dynamic-update-slice"
        summed = (stacked and backward) or self._adds_to(writer, state)
        if self._has_backward and summed and self._like_parameter(shape):
            return "gradient accumulator"
        if stacked and not backward:
            if self._has_backward and self._is_gradient((writer.operands[1], ())):
                return "gradient"
            if self._read_backward(state, again=again):
                return "saved residual"
        return "collective buffer" if collective(writer) else "scan carry"

    def _of_collective(self, value: Value, shape: Shape) -> str | None:
        """Rule 4."""
        # A weight's gradient by column shards becomes one by row shards: the shape tells the end
        # of this exchange, where the pass does not, if a loss computes its gradient when called.
        exchanged = collective(self.flow.lineage(value)[-1]) == "all-to-all"
        if exchanged and self._has_backward and self._like_parameter(shape, gathered=False):
            return "gradient"
        lineage = self.flow.lineage(value, reshaped=False)
        kinds = [kind for item in lineage if (kind := collective(item))]
        sends = any(
            collective(reader) and reader.opcode.endswith(("-start", "send"))
            for reader, _ in self.flow.readers(value)
        )
        if not kinds and not sends:
            return None
        summed = kinds and kinds[0] in ("reduce-scatter", "all-reduce")
        return "gradient" if summed and self._like_parameter(shape) else "collective buffer"

    def _by_shape(self, value: Value, shape: Shape) -> str | None:
        """Rules 5 and 6."""
        operation = self.origins.of(value).operation
        if self._like_parameter(shape, gathered=False):
            if "transpose(" in operation and RECOMPUTED not in operation:
                return "gradient"
            if self._has_backward and operation and "jvp(" not in operation:
                return "optimizer update"
        has_vocabulary = any(size in shape.dims for size in self._vocabularies)
        return "logits" if has_vocabulary else None

    def _by_pass(self, value: Value) -> str:
        """Rules 7 to 9."""
        made_by = self.flow.lineage(value)[-1]
        operation = self.origins.of(value).operation
        forward = "jvp(" in operation and "transpose(" not in operation
        if forward and not self._is_backward(made_by) and self._read_backward(value):
            return "saved residual"
        computed = made_by.opcode not in _NOT_COMPUTED or _is_library(made_by)
        return "activation" if computed else "other"

    def _is_summed_at_once(self, value: Value) -> bool:
        """Whether a value is a product that all its readers sum over one batch dimension."""
        product = self.flow.lineage(value, reshaped=False)[-1]
        # The batch dimensions come first in the result.
        batch = len(product.integers("lhs_batch_dims")) if product.opcode == "dot" else 0
        pending, summed = [value], set[tuple[int, ...]]()
        while batch and pending:
            for reader, passed_on in self.flow.readers(pending.pop()):
                if self._is_sum(reader):
                    summed |= {reader.integers("dimensions")}
                elif passed_on and reader.opcode == "fusion":
                    pending.append(passed_on)
                elif reader.opcode in ("convert", "copy"):
                    pending.append((reader.name, ()))
                else:
                    return False
        return summed in [{(place,)} for place in range(batch)]

    def _is_sum(self, instruction: Instruction) -> bool:
        if instruction.opcode != "reduce" or len(instruction.operands) != 2:
            return False
        root, _ = self.flow.root(instruction.called()[0], ())
        return self.flow.instructions[root].opcode == "add"

    def _slot(self, value: Value) -> tuple[Instruction, Value] | None:
        """The loop whose state holds a value, and the element of the state that it is; or None. A
        buffer that is not yet written to also belongs to the loop for which it is copied."""
        made = self.flow.instructions[value[0]]
        is_empty = made.opcode in ("broadcast", "custom-call") and len(made.operands) < 2
        passed = ("tuple", "while", "bitcast", "parameter", *(_COPIES if is_empty else ()))
        pending = [value]
        for here in each_once(pending):
            instruction = self.flow.instructions[here[0]]
            if instruction.opcode == "while" and here[1]:
                return instruction, here
            for caller in self.flow.callers.get(self.flow.home[here[0]], []):
                if instruction.opcode == "parameter" and caller.opcode == "while" and here[1]:
                    return caller, (caller.name, here[1])
            pending += [
                passed_on
                for reader, passed_on in self.flow.readers(here)
                if passed_on and reader.opcode in passed
            ]
        return None

    def _is_gradient(self, part: Value) -> bool:
        made_by = self._writer(part)
        operation = made_by.op_name or self.origins.of(part).operation
        backward = "transpose(" in operation and RECOMPUTED not in operation
        (shape,) = self.flow.instructions[part[0]].shapes
        return backward and self._like_parameter(shape, gathered=False)

    def _writer(self, written: Value) -> Instruction:
        writer = self.flow.lineage(written, reshaped=False)[-1]
        while writer.opcode == "convert":
            writer = self.flow.lineage((writer.operands[0], ()), reshaped=False)[-1]
        return writer

    def _adds_to(self, writer: Instruction, state: Value) -> bool:
        added = writer.opcode == "add" and any(
            self.flow.holds_state((operand, ()), state) for operand in writer.operands
        )
        return added and self._is_only_added_to(state)

    def _is_only_added_to(self, state: Value) -> bool:
        loop, index = self.flow.instructions[state[0]], state[1]
        inside = self.flow.module.instructions(loop.called("body"))
        pending = [(item.name, index) for _, item in inside if item.opcode == "parameter"]
        for value in each_once(pending):
            for reader, passed_on in self.flow.readers(value):
                if reader is loop or reader.opcode == "add":
                    continue  # the next iteration, or the sum
                if passed_on is None and reader.opcode not in (*RESHAPES, "select"):
                    return False
                pending.append(passed_on or (reader.name, ()))
        return True

    def _is_backward(self, instruction: Instruction) -> bool:
        return "transpose(" in instruction.op_name

    def _read_backward(self, value: Value, *, again: bool = False) -> bool:
        """Whether an operation of the backward pass reads a value, also after it is passed on. With
        `again`, operations that recompute do not count."""
        pending, seen = [value], {value}
        while pending and len(seen) < _MOST_READERS:
            for reader, passed_on in self.flow.readers(pending.pop()):
                counts = not again or RECOMPUTED not in reader.op_name
                passes = ("parameter", "tuple", *(("while",) if again else ()))
                counts = counts and not self._fills(reader, passed_on)
                if counts and self._is_backward(reader) and reader.opcode not in passes:
                    return True
                following = passed_on or (None if reader.op_name else (reader.name, ()))
                if following and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return False

    def _fills(self, fusion: Instruction, passed_on: Value | None) -> bool:
        """Whether a fusion made a value, or does no more with it than to write a part of it."""
        if fusion.opcode != "fusion" or passed_on is None:
            return False
        inside = [] if passed_on[0] == fusion.name else self.flow.readers(passed_on)
        return all(one.opcode == "dynamic-update-slice" and into for one, into in inside)

    @cached_property
    def _arguments(self) -> dict[str, Instruction]:
        inside = self.flow.module.instructions([self.flow.module.entry])
        return {item.name: item for _, item in inside if item.opcode == "parameter"}

    @cached_property
    def _has_backward(self) -> bool:
        return any(self._is_backward(item) for item in self.flow.instructions.values())

    @cached_property
    def _parameter_sizes(self) -> list[Counter[int]]:
        shapes = [shape for item in self._arguments.values() for shape in item.shapes]
        sizes = [_sizes(shape) for shape in shapes if _is_float(shape)]
        unique = {tuple(sorted(counts.elements())) for counts in sizes if counts.total() > 1}
        return [Counter(key) for key in sorted(unique)]

    @cached_property
    def _vocabularies(self) -> set[int]:
        """The sizes of vocabularies, without those that another parameter has as a dimension."""
        named: set[int] = set()
        others: set[int] = set()
        for item in self._arguments.values():
            for shape in item.shapes:
                if len(shape.dims) == 2 and _has_vocabulary(item.op_name):
                    named.add(max(shape.dims))
                elif _is_float(shape):
                    others.update(shape.dims)
        return named - others

    def _like_parameter(self, shape: Shape, *, gathered: bool = True) -> bool:
        """Whether it is "of a parameter's shape"; `gathered`: with one dimension gathered too."""
        sizes = _sizes(shape)
        for parameter in self._parameter_sizes:
            ours, theirs = list((sizes - parameter).elements()), parameter - sizes
            matrix = Counter(sorted(parameter.elements())[-2:])
            if not ours and not matrix - sizes:
                return True
            one = gathered and len(ours) == theirs.total() == 1
            if one and ours[0] % next(theirs.elements()) == 0:
                return True
        return False


def _is_library(instruction: Instruction) -> bool:
    return instruction.target.startswith(("__cublas$", "__cudnn$"))


def _is_float(shape: Shape) -> bool:
    return re.match(r"b?f\d", shape.dtype) is not None


def _has_vocabulary(argument: str) -> bool:
    parts = set(re.findall(r"[a-z]+(?:_[a-z]+)*", argument.lower()))
    return bool(parts & _VOCABULARY) and not any("pos" in part for part in parts)


def _sizes(shape: Shape) -> Counter[int]:
    return Counter(size for size in shape.dims if size > 1)
