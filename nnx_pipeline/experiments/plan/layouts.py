"""The layouts of a model on a number of devices, as plain data, and why others are none.

A layout is a mesh, a schedule, and the options that change memory and time but not what is
computed. A config field that the user sets keeps its value. The config itself decides which layouts
there are: what it refuses is listed with its reason.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, divisors
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.ops._fast_attention.cudnn import check_cudnn
from nnx_pipeline.ops._fast_attention.splash import Splash

# Most microbatches for each stage; without stages, most whose gradients add up.
MOST_PER_STAGE, MOST_ADDED_UP, MOST_REPEATS = 8, 16, 8
MOST_SQUARE = 8192  # tokens of a sequence up to which `chunked` attention is no choice
REMATS = ("none", "minimal", "save_dot_except_mlp", "full")
# The field of a config behind each field of a layout.
FIELDS = {
    "repeats": "pipeline.num_repeats",
    "microbatches": "pipeline.num_microbatches",
    "schedule": "pipeline.schedule",
    "gather": "pipeline.fsdp_gather",
    "remat": "pipeline.remat",
    "zero1": "train.shard_optimizer_over_data",
    "experts": "model.experts",
    "attention": "model.attention",
}


class Layout(NamedTuple):
    """One layout; the fields behind `mesh` are those of `FIELDS`."""

    mesh: MeshConfig
    repeats: int
    microbatches: int
    schedule: str
    zero1: bool
    gather: str
    remat: str
    experts: str
    attention: str

    def settings(self) -> dict[str, str]:
        """What `--set` takes for it, without the fields that do nothing on its mesh."""
        loops = self.mesh.stage > 1 or self.microbatches > 1
        left_out = set() if loops else {"repeats", "microbatches", "schedule", "gather"}
        left_out |= {"zero1"} if self.mesh.data == 1 else set()
        return {
            key: str(getattr(self, name)).lower()
            for name, key in FIELDS.items()
            if name not in left_out
        }

    def __str__(self) -> str:
        parts = [str(self.mesh), loop_of(self), "zero1" if self.zero1 else ""]
        return ", ".join(
            [*filter(None, parts), f"remat={self.remat}", self.experts, self.attention]
        )


def loop_of(layout: Layout) -> str:
    """The schedule, repeats × microbatches, and when weights are gathered; "" without a loop."""
    if layout.mesh.stage == 1 and layout.microbatches == 1:
        return ""
    repeats = f"{layout.repeats}×" if layout.mesh.stage > 1 else ""
    return f"{layout.schedule} {repeats}{layout.microbatches} {layout.gather}"


@dataclass(frozen=True)
class Space:
    """What there is to choose.

    - `config`: of the preset, with what the user sets; `fixed`: the fields that the user sets.
    - `devices`: how many a mesh must have.
    - `experts`, `attentions`: the kinds that the platform has, best first.
    """

    config: Config
    fixed: frozenset[str]
    devices: int
    experts: tuple[str, ...]
    attentions: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, fixed: frozenset[str], platform: Platform, devices: int) -> "Space":
        model = config.model
        experts = ("grouped", "dense") if model.num_experts > 1 else (model.experts,)
        plain = "dot_product" if config.train.sequence_length <= MOST_SQUARE else "chunked"
        attentions = ("flash", plain) if _has_kernel(config, platform) else (plain,)
        if FIELDS["experts"] in fixed:
            experts = (model.experts,)
        if FIELDS["attention"] in fixed:
            attentions = (model.attention,)
        return cls(config, fixed, devices, experts, attentions)

    def config_of(self, layout: Layout) -> Config:
        """The config with the options of a layout; raises InputError where it refuses them."""
        given = {key: text for key, text in layout.settings().items() if key not in self.fixed}
        return apply_overrides(self.config, given)

    def values(self, name: str, choices: Sequence[object]) -> tuple[object, ...]:
        """The choices of a field of a layout, or the one that the user set."""
        key = FIELDS[name]
        if key not in self.fixed:
            return tuple(choices)
        section, of_section = key.split(".")
        return (getattr(getattr(self.config, section), of_section),)


def _has_kernel(config: Config, platform: Platform) -> bool:
    """Whether the platform has a kernel for attention that takes this model."""
    model, length = config.model, config.train.sequence_length
    if platform.kind == "tpu":
        return Splash.obstacle(length, model.dtype) is None
    if platform.kind != "cuda":
        return False
    widths = model.head_dim, model.value_head_dim or model.head_dim
    try:
        check_cudnn(widths, model.dtype, packed=False, soft_cap=model.attention_soft_cap)
    except InputError:
        return False
    return True


@dataclass
class Listed:
    """The layouts of a space.

    - `shapes`: those that the config takes, each with the first of all options that change no
      divisibility: `options_of` gives the others.
    - `meshes`: how many meshes were looked at.
    - `refused`: how many pairs of mesh and schedule the config refuses, by its rule.
    - `examples`: for each of these rules one reason, as the config says it.
    """

    shapes: list[Layout] = field(default_factory=list)
    meshes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        rule = rule_of(reason)
        self.refused[rule] += 1
        self.examples.setdefault(rule, reason)


def rule_of(reason: str) -> str:
    """The rule in a reason: `model.num_heads … over tensor` without its numbers and its cure."""
    start = reason.partition(";")[0].partition(", with ")[0]
    words = re.sub(r"=?\(?\b\d[\d,]*\b\)?", "", start)
    return " ".join(re.sub(r"\b(sequence|stage|repeat)s?\b(?!_)", r"\1s", words).split())


def list_shapes(space: Space) -> Listed:
    """All layouts of a space but for their options, and why others are none."""
    found, made = Listed(), functools.cache(space.config_of)
    for mesh in meshes_of(space.devices, with_experts=space.config.model.num_experts > 1):
        found.meshes += 1
        try:
            plain = apply_overrides(space.config, {"pipeline.num_microbatches": "none"})
            plain.check_weights(mesh)
        except InputError as error:
            found.refuse(str(error))
            continue
        for shape in _shapes(space, mesh):
            try:
                made(shape._replace(mesh=_OF_LOOP[mesh.stage > 1])).check_mesh(mesh)
            except InputError as error:
                found.refuse(str(error))
            else:
                found.shapes.append(shape)
    return found


# Meshes with which a config is made once for all meshes with and without stages.
_OF_LOOP = {True: MeshConfig(stage=2, data=2), False: MeshConfig(data=2)}


def meshes_of(devices: int, *, with_experts: bool) -> Iterator[MeshConfig]:
    """Every mesh of the axes that a model can use whose sizes multiply to the devices."""
    names = ("data", "stage", "tensor", *(["expert"] if with_experts else []))
    for sizes in itertools.product(divisors(devices), repeat=len(names)):
        rest, left = divmod(devices, functools.reduce(lambda a, b: a * b, sizes))
        if not left and rest:
            axes = dict(zip(names, sizes, strict=True))
            yield MeshConfig(
                data=axes["data"],
                stage=axes["stage"],
                fsdp=rest,
                tensor=axes["tensor"],
                expert=axes.get("expert", 1),
            )


def _shapes(space: Space, mesh: MeshConfig) -> Iterator[Layout]:
    """The layouts of a mesh by its loop over microbatches; the options are the first of each."""
    config, several = space.config, mesh.stage > 1
    per_stage = config.model.num_pipeline_layers // mesh.stage
    repeats = [one for one in divisors(per_stage) if one <= MOST_REPEATS] if several else [1]
    most = MOST_PER_STAGE * mesh.stage if several else MOST_ADDED_UP
    parts = [one for one in divisors(config.train.global_batch) if one <= most]
    for number, microbatches, zero1 in itertools.product(
        space.values("repeats", repeats),
        space.values("microbatches", [one for one in parts if one % mesh.stage == 0]),
        space.values("zero1", [False, True] if mesh.data > 1 else [False]),
    ):
        count = int(str(microbatches or mesh.stage))
        kinds = ["circular", "1f1b"] if several else ["1f1b" if count > 1 else "circular"]
        for schedule in space.values("schedule", kinds):
            yield Layout(
                mesh=mesh,
                repeats=int(str(number)),
                microbatches=count,
                schedule=str(schedule),
                zero1=bool(zero1),
                gather=str(space.values("gather", ["use"])[0]),
                remat=str(space.values("remat", ["full"])[0]),
                experts=space.experts[0],
                attention=space.attentions[0],
            )


def options_of(space: Space, shape: Layout) -> Iterator[Layout]:
    """A shape with every choice of what changes no divisibility, the fastest first."""
    loops = shape.mesh.stage > 1 or shape.microbatches > 1
    gathers = ["use"]
    if loops and (shape.mesh.fsdp > 1 or shape.zero1):
        gathers.append("step")
        if shape.repeats > 1 and shape.schedule == "circular":
            gathers.append("prefetch")
    for experts, attention, remat, gather in itertools.product(
        space.experts,
        space.attentions,
        space.values("remat", REMATS),
        space.values("gather", gathers),
    ):
        yield shape._replace(
            gather=str(gather), remat=str(remat), experts=experts, attention=attention
        )


def features_of(layout: Layout) -> dict[str, str]:
    """What a layout has, by the kind of choice, for the reasons why others fell out."""
    mesh, several = layout.mesh, layout.mesh.data > 1
    if mesh.stage > 1:
        loop = f"{layout.schedule} pipeline"
    else:
        loop = "gradients added up" if layout.microbatches > 1 else "whole batch at once"
    return {
        "loop": loop,
        "tensor": "tensor > 1" if mesh.tensor > 1 else "tensor = 1",
        "expert": "expert > 1" if mesh.expert > 1 else "expert = 1",
        "data": f"{'ZeRO-1 over' if layout.zero1 else 'plain'} data > 1" if several else "data = 1",
        "gather": f"gather={layout.gather}",
        "remat": f"remat={layout.remat}",
        "experts": f"{layout.experts} experts",
        "attention": f"{layout.attention} attention",
    }


def row_of(layout: Layout) -> dict[str, object]:
    """A layout by name and value, as JSON has it."""
    return {**layout._asdict(), "mesh": layout.mesh.sizes()}
