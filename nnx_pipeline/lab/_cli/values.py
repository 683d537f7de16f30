"""The values of options that several commands share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from nnx_pipeline.lab._files import say
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab.compile._packages import version
from nnx_pipeline.lab.compile._settings import TRITON_GEMM, gemm_of, parse_settings
from nnx_pipeline.lab.compile.platform import GEMMS, Platform, default_platform
from nnx_pipeline.lab.errors import InputError, nearest
from nnx_pipeline.lab.mesh import Axes, MeshConfig, make_mesh

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nnx_pipeline.lab.compile.measure import Measurement


MOST_PRICE = 1e9  # far below what a sum of costs can hold


@dataclass(frozen=True)
class Chosen:
    model: str | None
    assignments: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    mesh: str
    named: tuple[str, ...]
    gemm: str | None
    xla: tuple[str, ...] = ()
    dcn: str = ""

    @property
    def platform(self) -> str:
        """The platform; "" where none is named. Raises InputError for several."""
        if len(self.named) > 1:
            raise InputError(
                f"--platform {' --platform '.join(self.named)}: this compiles for one platform; "
                "nnx-pipeline compare SUBJECT takes several"
            )
        return "".join(self.named)

    def each(self) -> list[Self]:
        """The target once for each platform that is named. Raises InputError for one that is named
        twice."""
        for at, name in enumerate(self.named):
            if name in self.named[:at]:
                raise InputError(f"--platform {name} is given twice; give each platform once")
        return [dataclasses.replace(self, named=(platform,)) for platform in self.named]

    def settled(self, *, on_mesh: bool = True) -> Self:
        """Takes an installed compiler where no platform is named, and says so.

        `on_mesh` says whether the program needs a mesh also on one device.
        """
        if self.platform:
            return self
        mesh = self.axes
        slices = mesh.dcn.num_devices if mesh.dcn else 1
        platform, why = default_platform(mesh.num_devices, on_mesh=on_mesh, slices=slices)
        say(f"no --platform is named: compiling for {platform}, {why}")
        return dataclasses.replace(self, named=(platform,))

    def words(self) -> list[str]:
        gemm = ["--gemm", self.gemm] if self.gemm is not None else []
        settings = [word for text in self.xla for word in ("--xla", text)]
        dcn = ["--dcn", self.dcn] if self.dcn else []
        return ["--mesh", self.mesh, *dcn, "--platform", self.platform, *gemm, *settings]

    @property
    def axes(self) -> Axes:
        """The mesh of a function, whose axes may have any names."""
        return Axes.parse(self.mesh, dcn=self.dcn)

    @property
    def mesh_config(self) -> MeshConfig:
        """The mesh of a preset."""
        return MeshConfig.parse(self.mesh, dcn=self.dcn)

    def for_other_process(self) -> list[Platform]:
        """The same as `platforms`; raises InputError for `local`."""
        platforms = self.platforms()
        if platforms[0].kind == "local":
            raise InputError(
                f"--platform {self.platform}: another process compiles this, and devices are not "
                "shared; choose cpu, tpu, cuda or rocm"
            )
        return platforms

    def platforms(self, arm_settings: Sequence[str] = ()) -> list[Platform]:
        """One platform for each kind of matrix products; `arm_settings` win over `--xla`."""
        settings = parse_settings(self.xla, arm_settings)
        platform = Platform.parse(self.platform).with_settings(settings)
        if self.gemm is not None and self.gemm not in (*GEMMS, "both"):
            raise InputError(
                f"--gemm {self.gemm!r} is not known; {nearest(self.gemm, [*GEMMS, 'both'])}"
            )
        if not platform.is_gpu:
            if self.gemm is not None:
                raise InputError(
                    f"--gemm {self.gemm} applies only to GPUs; leave it out with {self.platform}"
                )
            return [platform]
        chosen = GEMMS if self.gemm in (None, "both") else (self.gemm,)
        if (set_gemm := gemm_of(settings)) is not None:
            if self.gemm not in (None, set_gemm):
                raise InputError(
                    f"--gemm {self.gemm} and the compiler setting {TRITON_GEMM} contradict each "
                    "other; leave one of them out"
                )
            chosen = (set_gemm,)
        return [dataclasses.replace(platform, gemm=one) for one in chosen]


@dataclass(frozen=True)
class Costing:
    """`--price`, `[PLATFORM=]PRICE` each, and `--tokens`."""

    prices: tuple[str, ...]
    tokens: int | None

    def of(self, measured: Measurement) -> Measurement:
        """The same with its tokens and its price."""
        prices = self._parsed()
        price = prices.get(_longest(prices, measured.platform))
        return dataclasses.replace(measured, tokens=measured.tokens or self.tokens, price=price)

    def check(self, platforms: Sequence[Platform], *, of_function: bool) -> None:
        """Raises InputError for a price or tokens that would have no use, before anything runs."""
        if not self.prices and not self.tokens:
            return
        option = "--price" if self.prices else "--tokens"
        if self.tokens and not of_function:
            raise InputError(
                f"--tokens {self.tokens} is for a function; a preset has its own, "
                "train.global_batch × train.sequence_length: leave it out"
            )
        if not self.tokens and of_function:
            raise InputError("--price needs the tokens of a step; give --tokens N")
        prices, names = self._parsed(), ", ".join(map(str, platforms))
        used = {_longest(prices, str(platform)) for platform in platforms}
        for start, price in prices.items():
            if start not in used:
                raise InputError(
                    f"--price {f'{start}=' if start else ''}{price:g} is for none of the platforms "
                    f"{names}; correct its beginning, or leave it out"
                )
        if not any(device_of(platform.kind, platform.target) for platform in platforms):
            raise InputError(
                f"{option} has no use on {names}, of whose time nothing is known; leave it out, or "
                "choose a platform that nnx-pipeline platforms lists with a time"
            )

    def _parsed(self) -> dict[str, float]:
        """The prices by how the platforms begin that they are for; raises InputError."""
        found: dict[str, float] = {}
        for text in self.prices:
            start, equals, price = text.rpartition("=")
            try:
                value = float(price)
            except ValueError:
                value = math.nan
            if not 0 < value <= MOST_PRICE or (equals and not start):
                raise InputError(
                    f"--price {text!r} is no price of a chip for an hour; write 4.2, or for chips "
                    "of one kind cuda:h100=2.9"
                )
            if start in found:
                raise InputError(
                    f"--price is given twice for {start or 'all platforms'}: {found[start]:g} and "
                    f"{value:g}; give one of them"
                )
            found[start] = value
        return found


def _longest(starts: Iterable[str], platform: str) -> str:
    """The longest text that a platform begins with."""
    return max(filter(platform.startswith, starts), key=len, default="")


@dataclass(frozen=True)
class Baseline:
    """`--baseline`, a revision or a file with a result, and `--with`, `PACKAGE==VERSION` each."""

    baseline: str | None
    packages: tuple[str, ...]

    @property
    def is_given(self) -> bool:
        return self.baseline is not None or bool(self.packages)

    @property
    def is_file(self) -> bool:
        """Whether `--baseline` is a result; raises InputError beside `--with`."""
        if self.baseline is None or not self.baseline.endswith(".json"):
            return False
        if self.packages:
            raise InputError(
                f"--with {self.packages[0]} compiles the baseline, and {self.baseline} is a "
                "result; leave one of them out"
            )
        return True

    def present(self) -> str:
        """The packages of `--with` at the versions that are installed."""
        names = [text.partition("==")[0].strip() for text in self.packages]
        return ", ".join(f"{name}=={version(name) or 'none'}" for name in names)


@dataclass(frozen=True)
class Measuring:
    listed: bool
    sweeps: tuple[str, ...]
    fresh: bool


@dataclass(frozen=True)
class Place:
    mesh: str
    platform: str
    dcn: str = ""

    @property
    def mesh_config(self) -> MeshConfig:
        return MeshConfig.parse(self.mesh, dcn=self.dcn)

    def devices(self) -> Sequence[Any]:
        target, number = Platform.parse(self.platform), self.mesh_config.num_devices
        if not target.is_real:
            raise InputError(
                f"--platform {self.platform} has no devices to run on; use cpu or local"
            )
        return target.devices(number)

    def grid(self, devices: Sequence[Any], sharding: Literal["explicit", "auto"]) -> Mesh:
        return make_mesh(self.mesh_config, devices, sharding=sharding)


@dataclass(frozen=True)
class TwoArms(Target):
    xla_a: tuple[str, ...] = ()
    xla_b: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, str]:
        return ("--xla-a" if self.xla_a else "", "--xla-b" if self.xla_b else "")

    @property
    def labels(self) -> tuple[str, str]:
        """What the arms are called where their settings are all that differs."""
        one, other = self.options
        if one and other:
            return one, other
        return ("with", "without") if one else ("without", "with")

    def pairs(self) -> list[tuple[Platform, Platform]]:
        # An arm whose settings choose the matrix products stands beside Triton's alone.
        return list(zip(self.platforms(self.xla_a), self.platforms(self.xla_b), strict=False))
