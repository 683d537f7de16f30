"""Experiments: two arms and one difference, with the claim they put to the test."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.lab import variants
from nnx_pipeline.modules import Parts


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of an experiment: how it changes the config and the parts of the model."""

    label: str
    configure: Callable[[Config], Config] = lambda config: config
    parts: Parts = field(default_factory=Parts)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arm b does what the claim says is better; everything else is equal.

    claim: row of the source documents, or where else it stands. tolerance: how far losses and
    gradients of the arms may lie apart at `tiny` in float32, relative to the largest value.
    """

    name: str
    claim: str
    difference: str
    a: Arm
    b: Arm
    needs_stages: bool = False
    tolerance: float = 1e-5


def _shift(how: str) -> Callable[[Config], Config]:
    def configure(config: Config) -> Config:
        return dataclasses.replace(
            config,
            pipeline=dataclasses.replace(config.pipeline, shift=how),  # type: ignore[arg-type]
        )

    return configure


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="stage-shift",
            claim="S1.1",
            difference="activations reach the next stage by ppermute in a shard_map, or by slices",
            a=Arm(label="ppermute", configure=_shift("ppermute")),
            b=Arm(label="slice", configure=_shift("slice")),
            needs_stages=True,
        ),
        Experiment(
            name="stage-vmap",
            claim="MaxText",
            difference="the stages run under nnx.vmap, or under jax.vmap",
            a=Arm(label="nnx.vmap", parts=Parts(over_stages=variants.over_stages_by_nnx_vmap)),
            b=Arm(label="jax.vmap"),
            needs_stages=True,
        ),
        Experiment(
            name="norm-scale",
            claim="S2.5",
            difference="RMSNorm applies its scale by an einsum, or by a product",
            a=Arm(label="einsum", parts=Parts(apply_norm_scale=variants.einsum_scale)),
            b=Arm(label="multiply"),
        ),
        Experiment(
            name="loss-chunks",
            claim="design",
            difference="cross-entropy sees all logits at once, or one chunk of the sequence",
            a=Arm(label="full logits", parts=Parts(loss=variants.full_cross_entropy)),
            b=Arm(label="chunked"),
        ),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of that name; InputError names the nearest when there is none."""
    if name not in EXPERIMENTS:
        raise InputError(f"experiment {name!r} is not known; {nearest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
