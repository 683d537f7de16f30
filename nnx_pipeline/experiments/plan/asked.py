"""What a plan is asked for: a model on chips, with what the user sets."""

from dataclasses import dataclass

from nnx_pipeline.config._overrides import parse_overrides
from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments.plan.layouts import Layout, Space
from nnx_pipeline.experiments.plan.predict import Links, Predictor
from nnx_pipeline.experiments.plan.search import Plan
from nnx_pipeline.lab._cli.values import Chosen, Costing
from nnx_pipeline.lab._timing.devices import DEVICES, device_of
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.over import MemoryLimit

STEPS = 1000  # of the command to paste


@dataclass(frozen=True)
class Asked:
    """What a plan is for.

    - `name`, `assignments`: the preset, and what the user sets; `config`: both.
    - `platform`: the chips; `costing`: their price; `limit`: bytes that a device may hold.
    """

    name: str
    assignments: tuple[str, ...]
    config: Config
    platform: Platform
    costing: Costing
    limit: int

    @classmethod
    def of(
        cls, config: Config, chosen: Chosen, name: str, costing: Costing, limit: str = "100%"
    ) -> "Asked":
        """Raises InputError for a platform of whose time or number of devices nothing is known, and
        for a limit of memory that it does not have."""
        platform = Platform.parse(name)
        if device_of(platform.kind, platform.target) is None or platform.memory_bytes() is None:
            known = sorted({f"{kind}:{target}" for kind, target in DEVICES})
            raise InputError(
                f"--platform {name}: a plan needs the time of a step and the memory of a device, "
                f"which are not known of it; choose chips that have both: {', '.join(known)}"
            )
        _, parts = platform.size
        if parts > 1 and platform.kind == "tpu":
            raise InputError(
                f"--platform {name}: a plan is for one slice; leave out *{parts}, and compile its "
                f"layouts for several by `nnx-pipeline measure --dcn data={parts}`"
            )
        most = MemoryLimit.parse(limit, platform).bytes
        return cls(str(chosen.model), chosen.assignments, config, platform, costing, most)

    def title(self) -> str:
        train = self.config.train
        batch = f"batch {train.global_batch} × {train.sequence_length}"
        whole = self.platform.memory_bytes()
        within = f", within {self.limit / 1e9:,.1f} GB" if self.limit != whole else ""
        return f"{self.name} on {self.platform}, {batch}{within}"

    def plan(self) -> Plan:
        """The plan with its layouts listed, and nothing compiled yet; raises InputError as
        `Plan.fill`."""
        platform = self.platform
        device = device_of(platform.kind, platform.target)
        devices, hosts = platform.size
        assert device is not None, "as `of` checks"
        assert devices is not None, "as of every platform with a topology"
        sides = [int(one) for one in platform.topology.split("x") if one != "1"]
        side = (
            devices // hosts if platform.is_gpu else min(filter(lambda n: n > 1, sides), default=2)
        )
        fixed = frozenset(parse_overrides(self.assignments))
        space = Space.of(self.config, fixed, platform, devices)
        plan = Plan(space, Predictor(self.config, device, Links(device, max(side, 2))), self.limit)
        plan.fill()
        return plan

    def words(self, layout: Layout) -> list[str]:
        """The command that trains with a layout, in pieces that stay together."""
        given = parse_overrides(self.assignments)
        settings = [*self.assignments]
        settings += [f"{key}={text}" for key, text in layout.settings().items() if key not in given]
        axes = ",".join(f"{axis}={size}" for axis, size in layout.mesh.sizes().items() if size > 1)
        return [
            f"nnx-pipeline train --model {self.name}",
            f"--mesh {axes or 'data=1'}",
            *(f"--set {text}" for text in settings),
            f"--platform local --steps {STEPS}",
        ]
