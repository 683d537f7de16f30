"""How long one instruction takes, and by what that is known.

- `cycles`: the TPU compiler writes into most instructions how many cycles it estimates. Of the
  others, such as a sort or a gather, one pass of their bytes that are not on the chip is known, at
  the memory's rate: a lower bound (`bounds`).
- `xla-model`: into a program for some NVIDIA GPUs XLA writes the figures of its own model
  (`xla_model`). A product takes no less than in a roofline, because the model does not know how
  precise it is, and rates of 8 bits are above the peak. What has no figure takes one pass of its
  bytes, as the model counts all that is no product; of a sort, and of what else needs more than
  one, that is a lower bound. A product without one takes its operations at `KERNEL_EFFICIENCY` of
  the peak, and is named (`assumed`). Each instruction also takes the launch of a kernel.
- `kernel`: a kernel written by hand takes the longer of its operations at `KERNEL_EFFICIENCY` of
  the peak (in a roofline at the peak) and its bytes at the memory's rate, as it states them
  (`stated_cost`). Where its program leaves open how fast it multiplies, the fastest peak counts: a
  lower bound. A matrix unit of a TPU multiplies nothing narrower than itself, and one of the sizes
  of a product is the width of an array, such as the 128 numbers of a head. On a v6e, whose units
  are 256 wide, the compiler itself takes 6,880 cycles for 2048 × 128 by 128 × 2048 that stay on the
  chip, and 7,440 for twice the width (libtpu 0.0.42.1).
- `roofline`: any other program for a GPU has no estimates. What is no kernel takes the longer of
  its operations at the peak and its bytes at the memory's rate, which no real program reaches.

A copy, update or slice between device and host is no compute: it takes what it moves at the rate of
the way to the host (`Costs.transfer`).
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module, Shape
from nnx_pipeline.lab._hlo.opcodes import PRODUCTS, TRANSFERS, is_known, plain
from nnx_pipeline.lab._hlo.products import flops_of, is_hand_written, stated_cost
from nnx_pipeline.lab._hlo.slices import kind_between_slices
from nnx_pipeline.lab._timing import xla_model
from nnx_pipeline.lab._timing.devices import Device
from nnx_pipeline.lab._timing.links import called_inside, collectives_in
from nnx_pipeline.lab._timing.precision import precision_of, precisions_of_kernel, product_rate
from nnx_pipeline.lab._timing.schedule import Transfer, Way
from nnx_pipeline.lab._timing.traffic import LIBRARIES, UPDATE, Traffic

Kind = Literal["products", "kernels", "moves", "other"]

KERNEL_EFFICIENCY = 0.65  # of the peak: attention kernels reach 50 to 80 % of it on a v5p
SMALL = 4096  # bytes: what is smaller and has no estimate steers the program and is left out
LARGE = 8  # an array that a kernel multiplies is no smaller than the largest by more than this
NO_ESTIMATE = 2**62  # the sentinels are 2⁶³ − 1 and 2⁶⁴ − 1; no estimate comes near them

ONE_PASS = "the compiler estimates nothing, and one pass of its bytes counts"
AT_A_SHARE = (
    "XLA's model has no figure, and its operations count at "
    f"{100 * KERNEL_EFFICIENCY:.0f} % of the peak"
)
ANY_PRECISION = "the precision of its products is not known, and the fastest counts"

NETWORK = "the network between slices counts at its nominal rate"

_CYCLES = re.compile(r'estimated_cycles"\s*:\s*"?(\d+)')
_MOVES = frozenset(
    {
        *("bitcast", "broadcast", "concatenate", "copy", "dynamic-slice", "dynamic-update-slice"),
        *("iota", "pad", "reshape", "slice", "transpose"),
    }
)
_FLOATS = frozenset({"bf16", "f16", "f32"})
_COMPLEX = ("c64", "c128")
_HOST_MOVES = frozenset({"copy", "dynamic-slice", UPDATE})
_FREE = frozenset(
    {
        *("after-all", "bitcast", "conditional", "constant", "get-tuple-element", "opt-barrier"),
        *("parameter", "partition-id", "replica-id", "tuple", "while", "call"),
    }
)


@dataclass(frozen=True)
class Cost:
    seconds: float
    kind: Kind
    bound: str = ""  # why it may run longer; "" where nothing says so
    assumed: str = ""  # the rule that stands for an estimate; "" where there is one, or a bound


@dataclass(frozen=True)
class Costs:
    module: Module
    device: Device

    @cached_property
    def by_xla(self) -> bool:
        """Whether the program has figures of XLA's model of a GPU."""
        return self.device.clock is None and xla_model.has_figures(self.module)

    def of(self, computation: Computation, instruction: Instruction) -> Cost | str | None:
        """What an instruction takes by itself, without the computations that a loop runs. A text
        says why nothing is known. None is for an instruction that takes no time of its own, such as
        a tuple, a collective, or the start of a transfer (`transfer`)."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-update", "-done")) or _makes_nothing(instruction):
            return None
        if kind_between_slices(instruction):
            return None
        if reason := self._unknown(computation, instruction):
            return reason
        if self._host_transfer(computation, instruction) is not None:
            return None
        if opcode.endswith("-start"):
            if self.device.clock or collectives_in(self.module, computation, instruction):
                return None
            return self._started(computation, instruction)
        kind = self._kind(instruction)
        if kind == "kernels":
            return self._of_kernel(computation, instruction)
        found = _CYCLES.search(instruction.config)
        if found and self.device.clock and int(found[1]) < NO_ESTIMATE:
            return Cost(int(found[1]) / self.device.clock, kind)
        if collectives_in(self.module, computation, instruction):
            return None  # its time is the time of the links
        if self.device.clock is None:
            return self._on_gpu(computation, instruction, kind)
        if Traffic(self.module).of(computation, instruction) <= SMALL:
            return None
        least = self._least.of(computation, instruction)
        return Cost(least / self.device.memory, kind, ONE_PASS)

    def bound_beside(self, computation: Computation, instruction: Instruction) -> str:
        """Why the compute of another core of a TPU, or what goes to another slice, may take longer;
        "" for anything else."""
        if instruction.opcode == "recv" and kind_between_slices(instruction):
            return NETWORK
        on_chip = self.transfer(computation, instruction)
        if on_chip is None or on_chip.way != "on-chip":
            return ""
        is_compute = instruction.called() and not self._only_moves(instruction)
        return ONE_PASS if is_compute else ""

    def transfer(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """What an instruction moves beside the compute: to or from the host, or within a TPU. The
        start of what another core of a TPU does counts as such a transfer, too."""
        if to_host := self._host_transfer(computation, instruction):
            return to_host
        is_start = instruction.opcode.endswith("-start") and self.device.clock is not None
        if not is_start or collectives_in(self.module, computation, instruction):
            return None
        return Transfer("on-chip", self._passed(computation, instruction) / self.device.memory)

    @property
    def _least(self) -> Traffic:
        """What passes through the device's memory at the least: nothing of what is on a chip."""
        if self.device.clock is None:
            return Traffic(self.module)
        return Traffic(self.module, lambda shape: 0 if shape.space else shape.bytes)

    def _passed(self, computation: Computation, start: Instruction) -> int:
        """Bytes that a start of a TPU moves: of another core's work, those of all that it runs."""
        if not start.called() or self._only_moves(start):
            return _moved(computation, start)
        inside = self.module.instructions(start.called())
        return sum(self._least.of(home, item) for home, item in inside if item.opcode not in _FREE)

    def _host_transfer(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """The transfer of a copy, slice or update between host and device; None if it is none. A
        fusion is one if it moves arrays and does nothing else, one of them to or from the host."""
        if instruction.opcode.endswith(("-done", "-update")):
            return None
        if plain(instruction.opcode) != "fusion":
            return self._crossing(computation, instruction)
        if not self._only_moves(instruction):
            return None
        fused = self.module.instructions(instruction.called()[:1])
        crossings = list(filter(None, itertools.starmap(self._crossing, fused)))
        return crossings[0] if len(crossings) == 1 else None

    def _crossing(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """What an instruction by itself sends to the memory of the host, or brings from it."""
        name = plain(instruction.opcode)
        if name not in _HOST_MOVES:
            return None
        source = computation.instructions[instruction.operands[1 if name == UPDATE else 0]]
        to_host = done_of(computation, instruction).in_host_memory
        if source.in_host_memory == to_host:
            return None
        way: Way = "to host" if to_host else "from host"
        return Transfer(way, _moved(computation, instruction) / self.device.host)

    def at_peak(self, computation: Computation, instruction: Instruction) -> float | str:
        """Seconds of the products of an instruction, parts included, at the peak; or why not
        known."""
        if inside := called_inside(instruction):
            found = list(itertools.starmap(self.at_peak, self.module.instructions(inside)))
            unknown = [reason for reason in found if isinstance(reason, str)]
            return unknown[0] if unknown else sum(map(float, found))
        flops = flops_of(computation, instruction)
        if isinstance(flops, str) or not flops:
            return flops
        if is_hand_written(instruction):
            shapes = computation.operand_shapes(instruction)
            peak, bound = self._kernel_peak(instruction, [*itertools.chain.from_iterable(shapes)])
            return bound or flops / peak
        wanted = precision_of(computation, instruction)
        rate = product_rate(self.device, wanted)
        dtypes = " and ".join(dict.fromkeys(wanted.dtypes))
        return flops / rate if rate else f"a product of {dtypes}, whose rate is not known"

    def _unknown(self, computation: Computation, instruction: Instruction) -> str:
        if not is_known(instruction.opcode):
            return "an opcode that is not known"
        if plain(instruction.opcode) in TRANSFERS:
            return "a transfer of a kind that is not counted"
        read = (computation.instructions[name] for name in instruction.operands)
        on_host = any(one.in_host_memory and one.opcode != "tuple" for one in (instruction, *read))
        if on_host and self._host_transfer(computation, instruction) is None:
            return "work in the memory of the host"
        return ""

    def _started(self, computation: Computation, start: Instruction) -> Cost | str | None:
        """What a GPU does on another stream, which takes no less time there."""
        if not start.called():
            size = 2 * done_of(computation, start).result_bytes  # a copy reads it and writes it
            return Cost(size / self.device.memory, "moves")
        found = list(itertools.starmap(self.of, self.module.instructions(start.called())))
        unknown = [reason for reason in found if isinstance(reason, str)]
        costs = [cost for cost in found if isinstance(cost, Cost)]
        if unknown or not costs:
            return unknown[0] if unknown else None
        return Cost(sum(cost.seconds for cost in costs), costs[0].kind)

    def _kind(self, instruction: Instruction) -> Kind:
        if is_hand_written(instruction):
            return "kernels"
        if instruction.target.startswith(LIBRARIES) or self._inside(instruction) & PRODUCTS:
            return "products"
        return "moves" if self._only_moves(instruction) else "other"

    def _only_moves(self, instruction: Instruction) -> bool:
        return self._inside(instruction) <= _MOVES | _FREE

    def _inside(self, instruction: Instruction) -> set[str]:
        names = called_inside(instruction)
        if not names:
            return {instruction.opcode}
        return set().union(*(self._inside(item) for _, item in self.module.instructions(names)))

    def _of_kernel(self, computation: Computation, instruction: Instruction) -> Cost | str:
        own = stated_cost(instruction)
        if "flops" not in own:
            return "a kernel that states no operations"
        size = own.get("bytes_accessed") or Traffic(self.module).of(computation, instruction)
        shapes = computation.operand_shapes(instruction)
        read = [*itertools.chain.from_iterable(shapes)]
        peak, bound = self._kernel_peak(instruction, read)
        # A lower bound holds of every kernel, also of one that is better than most.
        is_estimate = (self.device.clock is not None or self.by_xla) and not bound
        rate = peak * (KERNEL_EFFICIENCY * self._filled(read) if is_estimate else 1.0)
        seconds = max(own["flops"] / rate, size / self.device.memory) + self._launch
        return Cost(seconds, "kernels", bound, AT_A_SHARE * (self.by_xla and is_estimate))

    def _filled(self, read: Sequence[Shape]) -> float:
        """The share of the matrix units that products of the large arrays fill, each of which is as
        wide as a multiple of a unit."""
        arrays = [shape for shape in read if shape.dims]
        least = max((shape.elements for shape in arrays), default=0) / LARGE
        widths = [shape.dims[-1] for shape in arrays if shape.elements >= least]
        wide = sum(self.device.unit * -(-width // self.device.unit) for width in widths)
        return sum(widths) / wide if wide else 1.0

    def _kernel_peak(self, kernel: Instruction, read: Sequence[Shape]) -> tuple[float, str]:
        """The fastest rate at which a kernel may multiply, and why it may be slower, or ""."""
        if self.device.clock is None:
            dtypes = {"bf16", *(one.dtype for one in read)}
            known = [rate for dtype, rate in self.device.flops.items() if dtype in dtypes]
            is_open = {one.dtype for one in read} & _FLOATS == {"f32"}
            return max(known), ANY_PRECISION if is_open else ""
        wanted = precisions_of_kernel(kernel, read)
        rates = {product_rate(self.device, one) or self.device.flops["bf16"] for one in wanted}
        return max(rates), ANY_PRECISION if len(rates) > 1 else ""

    def _on_gpu(self, computation: Computation, instruction: Instruction, kind: Kind) -> Cost | str:
        at_peak = self.at_peak(computation, instruction)
        if isinstance(at_peak, str):
            return at_peak
        if instruction.target and not instruction.target.startswith(LIBRARIES):
            return "a library call that says nothing of its time"
        size = self._least.of(computation, instruction)
        passed = size / self.device.memory
        if not self.by_xla:
            return Cost(max(at_peak, passed), kind)
        said = xla_model.compute_seconds(instruction)
        if at_peak and said is None:
            seconds = max(at_peak / KERNEL_EFFICIENCY, passed)
            return Cost(seconds + self._launch, kind, assumed=AT_A_SHARE)
        if at_peak and said is not None:
            said = max(self._measured(computation, instruction, said, at_peak), passed)
        needs_more = said is None and kind == "other" and instruction.opcode != "fusion"
        bound = ONE_PASS if needs_more and size > SMALL else ""
        return Cost((passed if said is None else said) + self._launch, kind, bound)

    @property
    def _launch(self) -> float:
        return xla_model.LAUNCH if self.by_xla else 0.0

    def _measured(
        self, computation: Computation, product: Instruction, said: float, at_peak: float
    ) -> float:
        """What XLA's model says of a product, and no less than at the peak. Where a product of
        these dtypes was not measured, it reaches that share of its peak which one in bfloat16
        does."""
        dots = list(self._dots(computation, product))
        if len(dots) == 1:
            ((home, dot),) = dots
            read, made = precision_of(home, dot).dtypes, product.shapes[0].dtype
            flops = flops_of(home, dot)
            plain_flops = flops / (4 if made in _COMPLEX else 1) if isinstance(flops, int) else 0.0
            in_bf16 = plain_flops / self.device.flops["bf16"]
            if share := xla_model.share_of_peak(said, in_bf16, (*read, made)):
                said = at_peak / share
        return max(said, at_peak)

    def _dots(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        if inside := called_inside(instruction):
            for home, item in self.module.instructions(inside):
                yield from self._dots(home, item)
        elif instruction.opcode in ("dot", "custom-call"):
            yield computation, instruction


def done_of(computation: Computation, instruction: Instruction) -> Instruction:
    """The done of an asynchronous start; any other instruction as it is."""
    while instruction.opcode.endswith(("-start", "-update")):
        users = computation.users[instruction.name]
        following = (user for user in users if user.opcode.endswith(("-update", "-done")))
        if (found := next(following, None)) is None:
            break
        instruction = found
    return instruction


def _moved(computation: Computation, instruction: Instruction) -> int:
    """Bytes that a copy, a slice or an update moves, or the result of what else is started."""
    if plain(instruction.opcode) == UPDATE:
        _, update, *_ = computation.operand_shapes(instruction)
        return sum(shape.bytes for shape in update)
    return done_of(computation, instruction).result_bytes


def _makes_nothing(instruction: Instruction) -> bool:
    is_call = instruction.opcode == "custom-call"
    return is_call and re.search(r"Allocate|Sharding|annotate", instruction.target) is not None
