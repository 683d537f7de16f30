"""What can be changed of a function without its source to make its program smaller."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr

from nnx_pipeline.lab._tracing import changed
from nnx_pipeline.lab._tracing.calls import Donating
from nnx_pipeline.lab._tracing.changed import Policy
from nnx_pipeline.lab._tracing.jaxpr import equations_of
from nnx_pipeline.lab.compile._gpus import GPUS
from nnx_pipeline.lab.compile._settings import Setting
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform

Kind = Literal["donation", "loop", "policy", "setting"]
_MOST_LOOPS = 3  # lines whose loops are tried one by one
_DOTS = "dots_with_no_batch_dims_saveable"
_POLICIES = {
    "nothing kept": "nothing_saveable",
    "dots kept": _DOTS,
    "all dots kept": "dots_saveable",
}
# How a policy says that values go to the memory of the host.
HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
# XLA computes again what would take more than this share of the device, a whole number of percent:
# here half of what the program needs.
_REMATERIALIZATION = "xla_jf_rematerialization_percent_shared_memory_limit"
# With it collectives begin early, and what they bring is there for longer.
_SCHEDULER = {
    "tpu": "xla_tpu_enable_latency_hiding_scheduler",
    **dict.fromkeys(GPUS, "xla_gpu_enable_latency_hiding_scheduler"),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is changed of a function while it is traced or compiled.

    - `kinds`: one for a single change, several for changes that are made together.
    - `name`: what it is called.
    - `cure`: what to write to have it.
    - `assumes`: what must hold that no program says.
    - `donated`: arguments that are donated too, by number or name.
    - `loops`: the lines whose loops get a checkpoint around their body, with the policy `keeps`.
    - `policy`: what takes the place of each policy of the function; None for no change.
    - `settings`: of the compiler.
    """

    kinds: tuple[Kind, ...]
    name: str
    cure: str
    assumes: str = ""
    donated: tuple[int | str, ...] = ()
    loops: frozenset[str] = frozenset()
    keeps: Policy = field(default=None, repr=False)
    policy: Policy = field(default=None, repr=False)
    settings: tuple[Setting, ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context to trace the function in."""
        with contextlib.ExitStack() as changes:
            if self.loops:
                changes.enter_context(changed.replaced_bodies(self._body_of))
            if self.policy:
                changes.enter_context(changed.replaced_policies(lambda *_: self.policy))
            yield

    def _body_of(self, line: str, body: changed.Function) -> changed.Function:
        return changed.checkpointed(body, self.keeps) if line in self.loops else body

    def of(self, function: Callable[..., object]) -> Any:
        """The function with what it is to donate."""
        return Donating(function, self.donated) if self.donated else function

    def on(self, platform: Platform) -> Platform:
        """The platform with the settings as well."""
        own = {one.name: one for one in (*platform.xla, *self.settings)}
        return platform.with_settings(tuple(own[name] for name in sorted(own)))


AS_IT_IS = Change(kinds=(), name="as it is", cure="")


def together(changes: Sequence[Change]) -> Change:
    """One change that makes all of these, which are of different kinds."""
    single: dict[str, Any] = {}
    for change in changes:
        for name in ("donated", "loops", "keeps", "policy", "settings"):
            single[name] = single.get(name) or getattr(change, name)
    return Change(
        kinds=tuple(kind for change in changes for kind in change.kinds),
        name="the best of each kind together",
        cure=" + ".join(change.name for change in changes),
        **single,
    )


@dataclass
class Watched:
    """What a function calls while it is traced.

    - `lines`: those of its loops.
    - `checkpointed`: those of them whose bodies call `jax.checkpoint`.
    - `policies`, `checkpoints`: of each `jax.checkpoint` the policy, and the line of the call.
    """

    lines: dict[str, None] = field(default_factory=dict)
    checkpointed: set[str] = field(default_factory=set)
    policies: list[Policy] = field(default_factory=list)
    checkpoints: dict[str, None] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        inside: list[str] = []

        def body_of(line: str, body: changed.Function) -> changed.Function:
            self.lines[line] = None
            return changed.within(line, body, inside)

        def policy_of(line: str, policy: Policy) -> Policy:
            self.policies.append(policy)
            self.checkpoints[line] = None
            self.checkpointed.update(inside)
            # So that its derivatives, which bind it again elsewhere, are not seen as further calls.
            return changed.OwnPolicy(policy or jax.checkpoint_policies.nothing_saveable)

        with changed.replaced_bodies(body_of), changed.replaced_policies(policy_of):
            yield


def loop_changes(lines: Sequence[str], *, keeping: bool = True) -> Iterator[Change]:
    """A checkpoint around the body of the loops that these lines call: of all, of each line alone,
    and, where `keeping`, of all with a policy that keeps products."""
    groups = [[line] for line in lines[:_MOST_LOOPS]] if len(lines) > 1 else []
    what = "jax.checkpoint(body, prevent_cse=False"
    for group in ([*lines], *groups):
        places = ", ".join(map(_short, group))
        yield Change(
            kinds=("loop",),
            name=f"checkpoint {places}" if len(group) == 1 else "checkpoint all loops",
            cure=f"{what}) in the place of the body at {places} (nn.remat, nnx.remat of a layer)",
            loops=frozenset(group),
        )
    if keeping:
        yield Change(
            kinds=("loop",),
            name=f"checkpoint {_short(lines[0]) if len(lines) == 1 else 'all loops'}, dots kept",
            cure=f"{what}, policy=jax.checkpoint_policies.{_DOTS}) in the place of the body at "
            + ", ".join(map(_short, lines)),
            loops=frozenset(lines),
            keeps=getattr(jax.checkpoint_policies, _DOTS),
        )


def policy_changes(own: Sequence[Policy], program: ClosedJaxpr) -> Iterator[Change]:
    """Each policy that is not that of every `jax.checkpoint` of the function."""
    nothing = jax.checkpoint_policies.nothing_saveable
    there = [nothing if policy is None else policy for policy in own]
    names = [e.params["name"] for e in equations_of(program) if e.primitive.name == "name"]
    for short, (written, policy) in _policies(tuple(dict.fromkeys(names))).items():
        if any(one != policy for one in there):
            yield Change(
                kinds=("policy",),
                name=f"policy: {short}",
                cure=f"policy=jax.checkpoint_policies.{written} in each jax.checkpoint",
                policy=policy,
            )


def _policies(names: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """The policies to try by a short name, each as it is written."""
    known = jax.checkpoint_policies
    found = {short: (name, getattr(known, name)) for short, name in _POLICIES.items()}
    host = ", ".join(f'{key}="{value}"' for key, value in HOST.items())
    if not names:
        offload = "offload_dot_with_no_batch_dims"
        return found | {"dots on the host": (f"{offload}({host})", getattr(known, offload)(**HOST))}
    words = ", ".join(f'"{name}"' for name in names)
    both = "names_which_can_be_saved=[], names_which_can_be_offloaded="
    of_host = known.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[*names], **HOST
    )
    return found | {
        "names kept": (f"save_only_these_names({words})", known.save_only_these_names(*names)),
        "names on the host": (
            f"save_and_offload_only_these_names({both}[{words}], {host})",
            of_host,
        ),
    }


def setting_changes(base: Measurement, platform: Platform) -> Iterator[Change]:
    """Settings of the platform's compiler that trade memory for time, unless the user gave them."""
    size, found = base.device_memory_bytes, dict[str, Setting]()
    if platform.kind == "tpu" and size and (share := int(50 * base.needed_bytes / size)):
        found[f"XLA's own remat, {share}%"] = Setting(_REMATERIALIZATION, str(share))
    if platform.kind in _SCHEDULER and math.prod(base.mesh.values()) > 1:
        found["no latency hiding"] = Setting(_SCHEDULER[platform.kind], False)
    given = {one.name for one in platform.xla}
    for name, setting in found.items():
        if setting.name not in given:
            yield Change(
                kinds=("setting",), name=name, cure=f"--xla {setting}", settings=(setting,)
            )


def _short(line: str) -> str:
    return line.rpartition("/")[2]
