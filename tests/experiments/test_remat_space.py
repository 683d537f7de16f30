"""What a preset can keep, and the setting of each choice."""

import pytest

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides, parse_overrides
from nnx_pipeline.config._remat import KEPT, LAYER_INPUT, POLICIES, remat_of
from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments.plan.remat_space import remat_settings, remat_space
from nnx_pipeline.lab.search.choices import Choice, Fate, Space

TINY = preset("tiny")  # 8 layers
FATES = ("recompute", "offload", "keep")
SEVERAL, ONE, WHOLE = "stage=4,fsdp=2", "stage=8", "fsdp=2"


def space_on(mesh: str, config: Config = TINY, *, offloads: bool = True) -> Space:
    return remat_space(config, MeshConfig.parse(mesh), offloads=offloads)


def choice(space: Space, **fates: Fate) -> Choice:
    """With `inputs` for the inputs of layers, and everything else computed again."""
    names = {"inputs": LAYER_INPUT}
    given = {names.get(name, name): fate for name, fate in fates.items()}
    return tuple(given.get(kind.name, kind.fates[0]) for kind in space.kinds)


@pytest.mark.parametrize(
    ("mesh", "offloads", "inputs"),
    [
        (SEVERAL, True, FATES),
        (SEVERAL, False, ("recompute", "keep")),
        (ONE, True, ("keep", "offload")),
        (ONE, False, None),
        (WHOLE, True, ("keep", "offload")),
    ],
)
def test_the_inputs_of_layers(mesh: str, offloads: bool, inputs: tuple[str, ...] | None) -> None:
    """They are kept anyway where a layer is alone in its visit, or has a checkpoint of its own."""
    space = space_on(mesh, offloads=offloads)
    fates = {kind.name: kind.fates for kind in space.kinds}
    assert fates.pop(LAYER_INPUT, None) == inputs
    of_names = FATES if offloads else ("recompute", "keep")
    assert fates == dict.fromkeys(KEPT, of_names)


def set_by(space: Space, chosen: Choice, config: Config = TINY) -> Config:
    return apply_overrides(config, parse_overrides(remat_settings(config, space, chosen)))


def test_groups_of_layers_are_chosen_one_by_one() -> None:
    config = apply_overrides(TINY, {"pipeline.remat_groups": "2"})
    space = remat_space(config, MeshConfig.parse(WHOLE), offloads=False)
    assert [kind.name for kind in space.kinds] == [f"{name}@{at}" for name in KEPT for at in (1, 2)]
    found = tuple("keep" if kind.name == "mlp_up@2" else "recompute" for kind in space.kinds)
    assert set_by(space, found, config).pipeline.remat == "keep:mlp_up@2"


@pytest.mark.parametrize("mesh", [SEVERAL, ONE, WHOLE])
def test_every_named_policy_is_a_choice(mesh: str) -> None:
    space, made = space_on(mesh), set()
    for chosen in space.listed():
        pipeline = set_by(space, chosen).pipeline
        if pipeline.save_decoder_layer_input:
            made.add(pipeline.remat)
    assert {*POLICIES} <= made
    assert all(remat_of(one) for one in made)


def test_the_setting_of_a_choice() -> None:
    space = space_on(SEVERAL)
    found = choice(space, inputs="offload", out_proj="keep")
    assert remat_settings(TINY, space, found) == [
        "pipeline.remat=keep:out_proj/offload:decoder_layer_input"
    ]
    again = choice(space, mlp_up="keep")
    assert remat_settings(TINY, space, again) == [
        "pipeline.remat=keep:mlp_up",
        "pipeline.save_decoder_layer_input=false",
    ]
    without = set_by(space, again)
    kept = choice(space, inputs="keep")
    assert remat_settings(without, space, kept) == [
        "pipeline.remat=full",
        "pipeline.save_decoder_layer_input=true",
    ]
    assert remat_settings(TINY, space, space.everything) == ["pipeline.remat=none"]
