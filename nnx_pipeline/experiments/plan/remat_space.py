"""What the backward pass of a training step can keep, for `fit --over remat`."""

from nnx_pipeline.config._remat import AT, KEPT, LAYER_INPUT, Remat, spelled_out
from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.lab.search.choices import Choice, Fate, Kind, Space


def remat_space(config: Config, mesh: MeshConfig, *, offloads: bool) -> Space:
    def fates(*least: Fate) -> tuple[Fate, ...]:
        away: tuple[Fate, ...] = ("offload",) if offloads else ()
        return (*least, *away, "keep") if "recompute" in least else (*least, *away)

    # A layer alone in its visit of a stage has the input of the stage, which every policy keeps,
    # and so does the checkpoint of each layer where there are no visits.
    pipeline = config.pipeline
    several = pipeline.loops_on(mesh.stage) and config.layers_per_stage(mesh.stage) > 1
    inputs = Kind(LAYER_INPUT, fates("recompute") if several else fates("keep"))
    kinds = [inputs] if len(inputs.fates) > 1 else []
    groups = range(1, pipeline.remat_groups + 1)
    names = [f"{name}{AT}{group}" for name in KEPT for group in groups] if groups[1:] else KEPT
    return Space((*kinds, *(Kind(name, fates("recompute")) for name in names)))


def remat_settings(config: Config, space: Space, choice: Choice) -> list[str]:
    if choice == space.everything:
        return ["pipeline.remat=none"]
    kept, offloaded = (space.names(choice, fate) for fate in ("keep", "offload"))
    remat = Remat(tuple(name for name in kept if name != LAYER_INPUT), tuple(offloaded))
    again = LAYER_INPUT in space.names(choice, "recompute")
    settings = [f"pipeline.remat={spelled_out(remat)}"]
    if again == config.pipeline.save_decoder_layer_input:
        settings.append(f"pipeline.save_decoder_layer_input={str(not again).lower()}")
    return settings
