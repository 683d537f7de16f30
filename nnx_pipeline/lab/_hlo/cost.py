"""Counts what a compiled program executes per step: matrix products and collectives.

XLA's own cost analysis counts the body of a loop once and does not know what library calls compute.
Here all counts are multiplied by the trip counts of the loops around them (`Runs`). Figures are per
device and step; None is what the text does not tell.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nnx_pipeline.lab._hlo.integers import PASSES_ON
from nnx_pipeline.lab._hlo.loops import Runs, Shares, executions, running
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import TRANSFERS, is_known, plain
from nnx_pipeline.lab._hlo.products import flops_of
from nnx_pipeline.lab._hlo.slices import kind_between_slices, names_slices
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.errors import counted

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

CHAIN = re.compile(r'chain_id=\s*"(\d+)"')  # of the parts of one collective
# Attributes that only instructions that communicate between devices have.
_BETWEEN_DEVICES = ("channel_id", "replica_groups", "source_target_pairs")


@dataclass(frozen=True)
class Unread:
    """An instruction, or a whole text, that figures leave out."""

    name: str  # of the instruction, "" for a text
    what: str  # its opcode, or the target of a custom call; or which text
    # Of `flops`, `collectives`, `time`, `buffers` (roles and source lines), `account`; `time_bound`
    # alone is an instruction that counts in the time with the least that it takes, `time_rule` one
    # that counts by a rule, where there is no estimate.
    figures: tuple[str, ...]
    executed: int | None  # per step, None where that is not known
    reason: str


def unread(instruction: Instruction, figure: str, executed: int | None, reason: str) -> "Unread":
    """The entry for an instruction that one figure leaves out."""
    what = instruction.target or instruction.opcode
    return Unread(instruction.name, what, (figure,), executed, reason)


@dataclass(frozen=True)
class MatrixProducts:
    """The matrix products of a program, also inside fusions, loops and library calls. A convolution
    counts only kernel positions that read an element, a product with a vector that became multiply
    and add not at all, a grouped product that was expanded as the dense one that it is."""

    known: int  # 2·m·n·k for each product that the text describes
    unknown: tuple[Unread, ...]  # instructions that may be products that cannot be counted


def products_of(module: Module, runs: Runs) -> MatrixProducts:
    total, unknown = 0, []
    for computation, instruction, times in running(module, runs):
        flops = flops_of(computation, instruction)
        if isinstance(flops, int) and flops and times is None:
            flops = "a product that runs an unknown number of times"
        if isinstance(flops, str):
            unknown.append(unread(instruction, "flops", times, flops))
        else:
            total += flops * (times or 0)  # times is None only where flops is 0
    return MatrixProducts(total, tuple(unknown))


def collective_counts(module: Module, runs: Runs | None = None) -> dict[str, dict[str, int | None]]:
    """Counts each kind of collective: `ops` in the program, `executed` and `bytes` per step.

    `bytes` are those of the results, per device: the gathered array of an all-gather, the shard
    that a reduce-scatter leaves. A start and its done count once, at the done. An all-reduce and a
    slice of its result in one fusion of the TPU compiler are a reduce-scatter. None is for a kind
    of which one is in a loop of unknown trip count (`uncounted_transfers`).
    """
    counts: dict[str, dict[str, int | None]] = {
        kind: {"ops": 0, "executed": 0, "bytes": 0} for kind in COLLECTIVES
    }
    for _, times, kind, size in _collectives(module, executions(module) if runs is None else runs):
        count = counts[kind]
        count["ops"] = (count["ops"] or 0) + 1
        for field, per_run in (("executed", 1), ("bytes", size)):
            before = count[field]  # what is unknown once stays unknown
            count[field] = None if before is None or times is None else before + times * per_run
    return counts


def uncounted_transfers(module: Module, runs: Runs) -> tuple[Unread, ...]:
    """Instructions between devices that are not fully in `collective_counts`."""
    reason = "a collective that runs an unknown number of times"
    found = [
        unread(instruction, "collectives", None, reason)
        for instruction, times, _, _ in _collectives(module, runs)
        if times is None
    ]
    for _, instruction, times in running(module, runs):
        if reason := _transfer(instruction):
            found.append(unread(instruction, "collectives", times, reason))
    return tuple(found)


def _transfer(instruction: Instruction) -> str:
    """Why an instruction that may communicate between devices is not counted; "" if it does not."""
    attributes, opcode = instruction.attributes, instruction.opcode
    if opcode.endswith(("-update", "-done")):
        return ""  # its start has been looked at
    if plain(opcode) in TRANSFERS:
        is_of_host = attributes.get("is_host_transfer") == "true" and not names_slices(instruction)
        is_counted = is_of_host or kind_between_slices(instruction)
        return "" if is_counted else "a transfer of a kind that is not counted"
    if not is_known(opcode) and any(key in attributes for key in _BETWEEN_DEVICES):
        return "an opcode that is not known, between devices"
    config = instruction.config if plain(opcode) == "custom-call" else ""
    sends = re.search(r"has_communication\W+true|collective_id\W+\d", config)
    return "a kernel written by hand that sends to other devices" if sends else ""


def _collectives(module: Module, runs: Runs) -> Iterator[tuple[Instruction, int | None, str, int]]:
    """Yields each collective once, how often it runs, its kind and the bytes of its result."""
    fused = {
        callee
        for _, instruction in module.instructions()
        if plain(instruction.opcode) == "fusion"
        for callee in instruction.called()
    }
    steps_seen: set[tuple[str, str]] = set()
    for computation, instruction, times in running(module, runs):
        kind, size = collective_of(computation, instruction, in_fusion=computation.name in fused)
        if kind and not _is_repeated_step(instruction, steps_seen):
            yield instruction, times, kind, size


def branch_notes(module: Module, runs: Runs, shares: Shares) -> tuple[str, ...]:
    """Sentences on the figures that count every branch of a conditional of unknown shares."""
    found: dict[str, int] = {}
    for computation, instruction, times in running(module, runs):
        key = computation.name, instruction.name
        if instruction.opcode != "conditional" or times == 0 or shares.get(key) is not None:
            continue
        # What matters is whether anything inside is counted, not how often it runs.
        once = dict.fromkeys(_reached(module, instruction), 1)
        counts = collective_counts(module, once).values()
        has_products = products_of(module, once) != MatrixProducts(0, ())
        uncounted = ["matrix products"] if has_products else []
        uncounted += ["collectives"] if any(count["ops"] for count in counts) else []
        what = " and ".join(uncounted)
        found[what] = found.get(what, 0) + 1
    return tuple(
        f"the {what} count every branch of {counted(count, 'conditional')}"
        for what, count in found.items()
        if what
    )


def _reached(module: Module, instruction: Instruction) -> Iterator[str]:
    pending = [*instruction.called()]
    for name in each_once(pending):
        yield name
        inside = module.computations[name].instructions.values()
        pending += [callee for item in inside for callee in item.called()]


def collective_of(
    computation: Computation, instruction: Instruction, *, in_fusion: bool
) -> tuple[str, int]:
    """The kind and result bytes of a collective; ("", 0) for a start or any other instruction."""
    if instruction.opcode == "recv" and (between := kind_between_slices(instruction)):
        return between, instruction.shapes[0].bytes
    kind = instruction.opcode.removesuffix("-done").removeprefix("ragged-")
    if kind not in COLLECTIVES:
        return "", 0
    if kind == "all-reduce" and in_fusion:
        pieces = _slices(computation, instruction)
        if pieces:
            return "reduce-scatter", sum(piece.result_bytes for piece in pieces)
    return kind, instruction.result_bytes


def _slices(computation: Computation, instruction: Instruction) -> list[Instruction] | None:
    """The dynamic slices that a computation takes of a result; None if it uses more of it."""
    users = computation.users[instruction.name]
    found: list[Instruction] = []
    for user in users:
        if user.opcode == "dynamic-slice":
            found.append(user)
        elif user.opcode in (*PASSES_ON, "get-tuple-element", "transpose", "convert"):
            behind = _slices(computation, user)
            if behind is None:
                return None
            found += behind
        else:
            return None
    return found if users else None  # without users the computation returns the whole result


def _is_repeated_step(instruction: Instruction, seen: set[tuple[str, str]]) -> bool:
    """Whether a copy of this collective was counted already: the TPU compiler may split one into
    several fusions, each with a copy of the same `chain_id` and `channel_id`."""
    chain = CHAIN.search(instruction.attributes.get("frontend_attributes", ""))
    if chain is None:
        return False
    key = (chain[1], instruction.attributes.get("channel_id", ""))
    repeated = key in seen
    seen.add(key)
    return repeated


def unknown_opcodes(module: Module, runs: Runs) -> tuple[Unread, ...]:
    """Instructions through which no buffer's line and role can be traced, whether they run or
    not."""
    return tuple(
        unread(instruction, "buffers", runs.get(home.name), "an opcode that is not known")
        for home, instruction in module.instructions()
        if not is_known(instruction.opcode)
    )


def merged(found: Iterable[Unread]) -> tuple[Unread, ...]:
    """Each instruction once, with all the figures that leave it out."""
    by_name: dict[str, Unread] = {}
    for item in found:
        other = by_name.setdefault(item.name, item)
        if other is not item:
            figures = tuple(dict.fromkeys((*other.figures, *item.figures)))
            by_name[item.name] = dataclasses.replace(other, figures=figures)
    return tuple(by_name.values())
