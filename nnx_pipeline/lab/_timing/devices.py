"""What the makers of devices say about them, with the source of each figure.

All rates are per device, which is a chip (a TPU v5p with both of its cores). Sources:

- TPU: Google Cloud, "TPU v5p", "TPU v5e", "TPU v6e" (system architecture): peak compute per chip,
  HBM bandwidth, bidirectional bandwidth of the interconnect per chip. A link carries half of its
  bidirectional bandwidth each way; v5p has six links in a 3D torus, v5e and v6e four in a 2D one.
- A dimension of a v5p slice closes to a ring when it is a multiple of 4, of v5e and v6e of 16.
- The clock follows from the peak: matrix units × their area × 2 × clock. v5p has 8 units of
  128 × 128 and 459 TFLOP/s, v5e 4 and 197. For v6e, 4 units of 256 × 256 are assumed: Google
  publishes 4.7 times the compute of v5e from larger units and a higher clock, and no clock.
- On-chip memory for arrays, v5p: a core has 64 MiB (JAX documentation, Pallas for TPU), of which
  libtpu keeps 16 for the workspace of single operations (xla_tpu_scoped_vmem_limit_kib).
- TPU, operands of 8 bits or fewer: the rate of `s8` where the compiler takes half of the cycles of
  `bf16` for them (libtpu 0.0.42.1), as for `f8e5m2` and not for `f8e4m3fn`.
- NVIDIA: data sheets of H100 SXM and H200 SXM, dense rates. `f32` is without tensor cores. NVLink
  is 900 GB/s, PCIe 128 GB/s, half of it each way. Integers of 32 bits take half of the lanes of
  `f32` (CUDA C++ programming guide, throughput of arithmetic, 9.0).
- The host of a TPU: Google publishes no figure for each kind. The chapter on TPUs of "How to Scale
  Your Model" (2025) gives 16 to 32 GB/s for a chip; the lower one stands here for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, above all its speed; rates are per second."""

    flops: Mapping[str, float] = field(hash=False)  # of products, by HLO dtype and in `tf32`
    memory: float  # bytes
    link: float  # bytes of one link in one direction; of a switch, what one device sends
    dimensions: int  # of the torus that the links form; 0 for a switch
    closes_at: int = 1  # a dimension of a multiple of this size is a ring
    island: int | None = None  # how many devices a switch joins; nothing is known beyond
    clock: float | None  # cycles; None where the compiler estimates nothing
    host: float  # bytes to or from the memory of the host
    launch: float  # seconds of a collective for each device that it passes
    on_chip: int | None = None  # bytes that a compiler gives to arrays


_HOPPER = {
    **dict.fromkeys(("bf16", "f16"), 989 * TERA),
    **dict.fromkeys(("s8", "u8", "f8e4m3fn", "f8e5m2"), 1979 * TERA),
    "tf32": 495 * TERA,
    **dict.fromkeys(("f32", "f64"), 67 * TERA),
    **dict.fromkeys(("s32", "u32"), 33.5 * TERA),
}
_H100 = Device(
    flops=_HOPPER,
    memory=3350 * GIGA,
    link=450 * GIGA,
    dimensions=0,
    island=8,
    clock=None,
    host=64 * GIGA,
    launch=5e-6,
)
DEVICES = {
    ("tpu", "v5p"): Device(
        flops={"bf16": 459 * TERA, "s8": 918 * TERA},
        memory=2765 * GIGA,
        link=100 * GIGA,
        dimensions=3,
        closes_at=4,
        clock=1.75e9,
        host=16 * GIGA,
        launch=1e-6,
        on_chip=48 * 2**20,
    ),
    ("tpu", "v5e"): Device(
        flops={"bf16": 197 * TERA, "s8": 393 * TERA},
        memory=819 * GIGA,
        link=50 * GIGA,
        dimensions=2,
        closes_at=16,
        clock=1.5e9,
        host=16 * GIGA,
        launch=1e-6,
    ),
    ("tpu", "v6e"): Device(
        flops={"bf16": 918 * TERA, "s8": 1836 * TERA},
        memory=1640 * GIGA,
        link=100 * GIGA,
        dimensions=2,
        closes_at=16,
        clock=1.75e9,
        host=16 * GIGA,
        launch=1e-6,
    ),
    ("cuda", "h100"): _H100,
    ("cuda", "h200"): replace(_H100, memory=4800 * GIGA),
}


def device_of(kind: str, target: str) -> Device | None:
    return DEVICES.get((kind, target))
