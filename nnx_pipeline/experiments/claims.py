"""Every claim that the lab tests, as an experiment whose two arms differ in one thing."""

from typing import Any

from nnx_pipeline.config.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.experiments import layer_variants as variants
from nnx_pipeline.experiments import loop_variants
from nnx_pipeline.experiments.arms import Arm, Experiment
from nnx_pipeline.experiments.config_edits import in_both, set_pipeline, set_train
from nnx_pipeline.experiments.layer_claims import LAYERS
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.pipeline.parts import LoopParts
from nnx_pipeline.pipeline.stage.apply import select_repeat
from nnx_pipeline.sharding import left_to_compiler, place


def _one_repeat(config: Config, mesh: MeshConfig) -> Config:
    """The config with one repeat, and so with the most layers per stage: two or more."""
    config = set_pipeline(num_repeats=1)(config)
    layers = config.layers_per_stage(mesh.stage)
    if layers < 2:
        raise InputError(
            f"needs several layers per stage: num_layers={config.model.num_layers} over "
            f"stage={mesh.stage} is {layers}; give the model {2 * mesh.stage} layers or more"
        )
    return config


def _one_layer_per_stage(config: Config, mesh: MeshConfig) -> Config:
    """The config with as many repeats as leave each stage one layer at a time."""
    return set_pipeline(num_repeats=max(config.model.num_layers // mesh.stage, 1))(config)


def _loop(**parts: Any) -> Parts:
    """The parts of an arm that replaces pieces of the circular loop."""
    return Parts(loop=LoopParts(**parts))


def _circular(config: Config, mesh: MeshConfig) -> Config:
    """The config as it is; raises InputError if its schedule is not the circular one."""
    if config.pipeline.schedule != "circular":
        raise InputError(
            f"replaces a piece of the circular loop, which pipeline.schedule="
            f"{config.pipeline.schedule} does not run; set pipeline.schedule=circular"
        )
    return config


def _circular_in_auto_mode(config: Config, mesh: MeshConfig) -> Config:
    return set_pipeline(sharding="auto")(_circular(config, mesh))


def _circular_by_autodiff(config: Config, mesh: MeshConfig) -> Config:
    return set_pipeline(backward="autodiff")(_circular(config, mesh))


def _two_repeats(config: Config, mesh: MeshConfig) -> Config:
    """The config with two repeats, unless it has several already."""
    repeats = max(config.pipeline.num_repeats, 2)
    return set_pipeline(num_repeats=repeats)(_circular(config, mesh))


def _ahead(config: Config, mesh: MeshConfig) -> Config:
    """The config with what gathering weights one repeat ahead needs."""
    return set_pipeline(backward="accumulate")(_two_repeats(config, mesh))


def _room_for_delay(config: Config, mesh: MeshConfig) -> Config:
    """The config with the number of microbatches fixed, or both arms would choose their own.

    Without one of its own it gets as many as the longer delay needs.
    """
    microbatches = config.pipeline.num_microbatches or 2 * mesh.stage
    return set_pipeline(num_microbatches=microbatches)(config)


SCHEDULES = (
    Experiment(
        name="schedule",
        claim="design",
        difference="the forward pass of all microbatches comes before any backward pass, or each "
        "stage does both at each tick (1F1B); both with one repeat",
        a=Arm(label="circular", configure=set_pipeline(schedule="circular")),
        b=Arm(label="1f1b", configure=set_pipeline(schedule="1f1b")),
        setup=in_both(num_repeats=1),
        needs=("stage",),
    ),
    Experiment(
        name="delay",
        claim="S5",
        difference="activations arrive one tick after they are sent, or two, which should hide the "
        "transfer and may cost memory; both with as many microbatches as two ticks need",
        a=Arm(label="1 tick", configure=set_pipeline(forwarding_delay=1)),
        b=Arm(label="2 ticks", configure=set_pipeline(forwarding_delay=2)),
        setup=_room_for_delay,
        needs=("stage",),
    ),
    Experiment(
        name="backward",
        claim="S3.2",
        difference="the ticks are differentiated by JAX, or by hand with one gradient buffer per "
        "parameter that is added to in place",
        a=Arm(label="autodiff", configure=set_pipeline(backward="autodiff")),
        b=Arm(label="accumulate", configure=set_pipeline(backward="accumulate")),
        needs=("stage",),
    ),
    Experiment(
        name="ticks",
        claim="S3.3",
        difference="the ticks are unrolled, or are one scan",
        a=Arm(label="unrolled", parts=_loop(walk=loop_variants.python_loop, is_scan=False)),
        b=Arm(label="scan"),
        setup=_circular,
        needs=("stage",),
    ),
    Experiment(
        name="repeats",
        claim="S3.3",
        difference="the ticks of each repeat are a scan of their own, or all ticks of all repeats "
        "are one scan; both with two repeats or more",
        a=Arm(label="scan per repeat", parts=_loop(walk=loop_variants.scan_per_repeat)),
        b=Arm(label="one scan"),
        setup=_two_repeats,
        needs=("stage",),
    ),
)

TRANSFERS = (
    Experiment(
        name="stage-shift",
        claim="S1.1",
        difference="activations reach the next stage by ppermute in a shard_map, or by slices",
        a=Arm(label="ppermute", configure=set_pipeline(shift="ppermute")),
        b=Arm(label="slice", configure=set_pipeline(shift="slice")),
        needs=("stage",),
    ),
    Experiment(
        name="stage-shift-pad",
        claim="S1.1",
        difference="activations reach the next stage by ppermute, or by padding and a slice",
        a=Arm(label="ppermute", configure=set_pipeline(shift="ppermute")),
        b=Arm(label="pad", configure=set_pipeline(shift="pad")),
        needs=("stage",),
    ),
)

WEIGHTS = (
    Experiment(
        name="repeat-select",
        claim="S2.10e",
        difference="a stage takes the weights of its repeat by a gather, or by a dynamic slice; "
        "both with two repeats or more",
        a=Arm(label="index", parts=_loop(select=loop_variants.select_by_gather)),
        b=Arm(label="slice", parts=_loop(select=select_repeat)),
        setup=_two_repeats,
        needs=("stage",),
    ),
    Experiment(
        name="weights-per-step",
        claim="S4.3",
        difference="weights are gathered over fsdp at each use, or once per step, which saves "
        "transfers and may cost memory; both with backward=accumulate",
        a=Arm(label="per use", configure=set_pipeline(fsdp_gather="use")),
        b=Arm(label="per step", configure=set_pipeline(fsdp_gather="step")),
        setup=in_both(backward="accumulate"),
        needs=("stage", "fsdp"),
    ),
    Experiment(
        name="weights-ahead",
        claim="S3.1",
        difference="weights are gathered over fsdp at each use, or repeat by repeat, the next one "
        "while the present one is in use; both with backward=accumulate and two repeats or more",
        a=Arm(label="per use", configure=set_pipeline(fsdp_gather="use")),
        b=Arm(label="ahead", configure=set_pipeline(fsdp_gather="prefetch")),
        setup=_ahead,
        needs=("stage", "fsdp"),
    ),
    Experiment(
        name="zero-1",
        claim="S4.2",
        difference="every device along data has the whole state of the optimizer, or a part of it "
        "(train.shard_optimizer_over_data)",
        a=Arm(label="whole", configure=set_train(shard_optimizer_over_data=False)),
        b=Arm(label="sharded", configure=set_train(shard_optimizer_over_data=True)),
        needs=("data",),
    ),
)

REMAT = (
    Experiment(
        name="layer-input",
        claim="S1.3",
        difference="the input of each layer of a stage is kept for the backward pass, or not; both "
        "with one repeat, for several layers per stage",
        a=Arm(label="kept", configure=set_pipeline(save_decoder_layer_input=True)),
        b=Arm(label="recomputed", configure=set_pipeline(save_decoder_layer_input=False)),
        setup=_one_repeat,
        needs=("stage",),
    ),
    Experiment(
        name="qkv-offload",
        claim="S5",
        difference="queries, keys and values are kept in device memory, or in host memory; both "
        "with one layer per stage, since several are unrolled only where something is offloaded",
        a=Arm(label="device", configure=set_pipeline(remat="save_qkv_proj")),
        b=Arm(label="host", configure=set_pipeline(remat="qkv_proj_offloaded")),
        setup=_one_layer_per_stage,
        needs=("stage",),
    ),
)

SHARDING = (
    Experiment(
        name="constraints",
        claim="S1.2",
        difference="the shardings of the shifted activations, the input of the first stage, the "
        "stream and an iota are stated again, or not; both in auto mode, because in explicit mode "
        "the types state them",
        a=Arm(label="kept", parts=_loop(stage_inputs=loop_variants.stage_inputs_constrained)),
        b=Arm(label="dropped"),
        setup=_circular_in_auto_mode,
        needs=("stage",),
    ),
    Experiment(
        name="sharding-mode",
        claim="S4.1",
        difference="the compiler infers the shardings inside a layer from arguments, results and "
        "constraints on its output and on the stages, or the type of each array states its own",
        a=Arm(label="auto", configure=set_pipeline(sharding="auto"), under=left_to_compiler),
        b=Arm(label="explicit", configure=set_pipeline(sharding="explicit")),
    ),
    Experiment(
        name="trivial-specs",
        claim="S2.4a",
        difference="constraints whose spec shards nothing are kept, or skipped; both in auto mode "
        "and with fsdp_gather=step, where the specs of a stage's activations shard nothing",
        a=Arm(label="kept", parts=Parts(constrain=place)),
        b=Arm(label="skipped"),
        setup=in_both(sharding="auto", fsdp_gather="step", backward="accumulate"),
        needs=("stage",),
    ),
    Experiment(
        name="size-one-axes",
        claim="S2.4b",
        difference="specs and collectives name mesh axes of size 1, or leave them out; both in "
        "auto mode, because in explicit mode the axes are part of the type and must match",
        a=Arm(label="named", layout=variants.SizeOneAxes()),
        b=Arm(label="left out"),
        setup=in_both(sharding="auto"),
    ),
    Experiment(
        name="stage-metadata",
        claim="S2.10d",
        difference="while the step is traced, variables get new metadata in every stage, without "
        "the axes of the stack, or keep what they have",
        a=Arm(label="stripped", parts=_loop(map_stages=variants.map_stages_stripped)),
        b=Arm(label="as it is"),
        kind="trace",
        judged_by="trace_host",
        needs=("stage",),
        same_program="metadata is not part of a program and can only cost tracing",
    ),
    Experiment(
        name="stage-vmap",
        claim="MaxText",
        difference="the stages run under nnx.vmap, which splits the layers into graph and state "
        "and returns the state, and the loop carries the updated layers from tick to tick, or "
        "under jax.vmap, and the loop does not carry them; both with backward=autodiff",
        a=Arm(
            label="nnx.vmap",
            parts=_loop(
                map_stages=variants.map_stages_by_nnx_vmap,
                walk=loop_variants.carry_layers,
                select=select_repeat,
            ),
        ),
        b=Arm(label="jax.vmap", parts=_loop(select=select_repeat)),
        setup=_circular_by_autodiff,
        needs=("stage",),
        by_default=True,
    ),
)

CLAIMS = (*TRANSFERS, *SCHEDULES, *WEIGHTS, *REMAT, *SHARDING, *LAYERS)
