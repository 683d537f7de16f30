"""Experiments: two arms and one difference, with the claim they put to the test."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
    by_default: bool = True
    tolerance: float = 1e-5


def _pipeline(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(
        config, pipeline=dataclasses.replace(config.pipeline, **fields)
    )


def _model(**fields: Any) -> Callable[[Config], Config]:
    return lambda config: dataclasses.replace(
        config, model=dataclasses.replace(config.model, **fields)
    )


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="stage-shift",
            claim="S1.1",
            difference="activations reach the next stage by ppermute in a shard_map, or by slices",
            a=Arm(label="ppermute", configure=_pipeline(shift="ppermute")),
            b=Arm(label="slice", configure=_pipeline(shift="slice")),
            needs_stages=True,
        ),
        Experiment(
            name="stage-shift-pad",
            claim="S1.1",
            difference="activations reach the next stage by ppermute, or by padding and a slice",
            a=Arm(label="ppermute", configure=_pipeline(shift="ppermute")),
            b=Arm(label="pad", configure=_pipeline(shift="pad")),
            needs_stages=True,
            by_default=False,
        ),
        Experiment(
            name="layer-input",
            claim="S1.3",
            difference="the input of each layer of a stage is kept for the backward pass, or not",
            a=Arm(label="kept", configure=_pipeline(save_decoder_layer_input=True)),
            b=Arm(label="recomputed", configure=_pipeline(save_decoder_layer_input=False)),
            needs_stages=True,
            by_default=False,
        ),
        Experiment(
            name="embedding",
            claim="S2.7",
            difference="tokens are looked up by a one-hot product, or by a gather",
            a=Arm(label="one-hot", configure=_model(embedding="one_hot")),
            b=Arm(label="gather", configure=_model(embedding="gather")),
            by_default=False,
        ),
        Experiment(
            name="sharding-mode",
            claim="S4.1",
            difference="shardings are found by the compiler from constraints, or are in the types",
            a=Arm(label="auto", configure=_pipeline(sharding="auto")),
            b=Arm(label="explicit", configure=_pipeline(sharding="explicit")),
            by_default=False,
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


def choose(names: Iterable[str]) -> list[Experiment]:
    """The experiments of those names; `all` is all, no name a short set.

    InputError names the nearest when there is none of a name.
    """
    names = list(names)
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            raise InputError(
                f"experiment {name!r} is not known; {nearest(name, [*EXPERIMENTS, 'all'])}"
            )
    if "all" in names:
        return list(EXPERIMENTS.values())
    if names:
        return [EXPERIMENTS[name] for name in names]
    return [experiment for experiment in EXPERIMENTS.values() if experiment.by_default]
