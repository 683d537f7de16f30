"""The experiments of `claims.toml`, with what no config can say of their arms."""

from collections.abc import Callable
from typing import Any

from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments import _layer_variants as variants
from nnx_pipeline.experiments import _loop_variants as loop_variants
from nnx_pipeline.experiments._arms import Arm, Experiment, Setup
from nnx_pipeline.experiments._claim_table import CLAIM_TABLE
from nnx_pipeline.experiments._config_edits import Fields, with_fields
from nnx_pipeline.experiments._replaced import Replaced
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.pipeline.stage.apply import select_repeat
from nnx_pipeline.sharding.layout import left_to_compiler


def _as_it_is(config: Config, mesh: MeshConfig) -> Config:
    return config


def _one_repeat(config: Config, mesh: MeshConfig) -> Config:
    """One repeat, and so the most layers per stage; there must be two or more."""
    config = with_fields(config, {"pipeline": {"num_repeats": 1}})
    layers = config.layers_per_stage(mesh.stage)
    if layers < 2:
        raise InputError(
            f"needs several layers per stage: num_layers={config.model.num_layers} over "
            f"stage={mesh.stage} is {layers}; give the model {2 * mesh.stage} layers or more"
        )
    return config


def _one_layer_per_stage(config: Config, mesh: MeshConfig) -> Config:
    repeats = max(config.model.num_layers // mesh.stage, 1)
    return with_fields(config, {"pipeline": {"num_repeats": repeats}})


def _circular(config: Config, mesh: MeshConfig) -> Config:
    if config.pipeline.schedule != "circular":
        raise InputError(
            f"replaces a piece of the circular loop, which pipeline.schedule="
            f"{config.pipeline.schedule} does not run; set pipeline.schedule=circular"
        )
    return config


def _two_repeats(config: Config, mesh: MeshConfig) -> Config:
    repeats = max(config.pipeline.num_repeats, 2)
    return with_fields(_circular(config, mesh), {"pipeline": {"num_repeats": repeats}})


def _room_for_delay(config: Config, mesh: MeshConfig) -> Config:
    """As many microbatches as the longer delay needs; each arm would choose its own number."""
    microbatches = config.pipeline.num_microbatches or 2 * mesh.stage
    return with_fields(config, {"pipeline": {"num_microbatches": microbatches}})


def _routed(config: Config, mesh: MeshConfig) -> Config:
    if config.model.num_experts == 1:
        raise InputError("needs routed experts: give the model num_experts of 2 or more")
    return config


def _mask_of_the_model(config: Config, mesh: MeshConfig) -> Config:
    if config.model.attention in ("flash", "auto"):
        raise InputError(
            f"replaces the mask, and model.attention={config.model.attention} may be a kernel with "
            "one of its own; set model.attention=chunked"
        )
    return config


SETUPS: dict[str, Setup] = {
    "": _as_it_is,
    "circular": _circular,
    "mask of the model": _mask_of_the_model,
    "one layer per stage": _one_layer_per_stage,
    "one repeat": _one_repeat,
    "room for a delay": _room_for_delay,
    "routed": _routed,
    "two repeats": _two_repeats,
}


_TICK = "nnx_pipeline.pipeline.circular._tick"
_REPEATS = "nnx_pipeline.pipeline.stage._repeats"


def _in_tick(**names: object) -> tuple[Replaced, ...]:
    """Other functions, by name, in the circular loop."""
    return tuple(Replaced(_TICK, name, by) for name, by in names.items())


def select_by(function: object) -> tuple[Replaced, ...]:
    """Another way to read a repeat's parameters, out of one array with all repeats."""
    one_array = Replaced(_REPEATS, "split_to_read", loop_variants.one_array)
    return one_array, Replaced(_REPEATS, "select", function)


def _map_stages(by: object) -> tuple[Replaced, ...]:
    """Another way to map the function of a stage over the stages."""
    return (Replaced("nnx_pipeline.pipeline.stage.apply", "map_stages", by),)


# What an arm has beside its fields of the config, as arguments of `Arm`.
OWN: dict[str, dict[str, Any]] = {
    "": {},
    "axes of size 1": {"layout": variants.SizeOneAxes()},
    "einsum scale": {"replaced": variants.EINSUM_SCALE},
    "every constraint": {"replaced": variants.EVERY_CONSTRAINT},
    "full logits": {"replaced": variants.FULL_LOGITS},
    "gradients left alone": {"replaced": variants.GRADIENT_LEFT},
    "hidden units through float32": {"replaced": variants.HIDDEN_THROUGH_FLOAT32},
    "left to the compiler": {"under": left_to_compiler},
    "mask array": {"replaced": variants.MASK_ARRAY, "segment_ids": True},
    "nine tiles": {"replaced": variants.experts_by(variants.nine_tiles)},
    "nnx.vmap": {
        "replaced": (
            *_map_stages(variants.map_stages_by_nnx_vmap),
            *_in_tick(walk_ticks=loop_variants.carry_layers),
            *select_by(select_repeat),
        )
    },
    "scan per repeat": {"replaced": _in_tick(walk_ticks=loop_variants.scan_per_repeat)},
    "select by index": {"replaced": select_by(loop_variants.select_by_gather)},
    "select by slice": {"replaced": select_by(select_repeat)},
    "shardings of Flax off": {"layout": variants.FlaxShardings(always=False)},
    "shardings of Flax on": {"layout": variants.FlaxShardings(always=True)},
    "stated shardings": {"replaced": _in_tick(stage_inputs=loop_variants.stage_inputs_constrained)},
    "stripped metadata": {"replaced": _map_stages(variants.map_stages_stripped)},
    "sum in float32": {"replaced": variants.experts_by(variants.summed_in_float32)},
    "sum in the model's dtype": {"replaced": variants.experts_by(variants.summed_in_model_dtype)},
    "three tiles": {"replaced": variants.experts_by(variants.three_tiles)},
    "tokens resharded": {
        "replaced": variants.RESHARDED,
        "layout": variants.WHOLE_OVER_EXPERTS,
    },
    "tokens whole over experts": {"layout": variants.WHOLE_OVER_EXPERTS},
    "unrolled ticks": {"replaced": _in_tick(walk_ticks=loop_variants.python_loop, IN_SCAN=False)},
}


def _arm(row: dict[str, Any]) -> Arm:
    label, own = row["label"], OWN[row.get("own", "")]
    return Arm(label=label, configure=_setting(_fields(row)), **own)


def _fields(row: dict[str, Any]) -> Fields:
    return {section: row[section] for section in ("model", "pipeline", "train") if section in row}


def _setting(fields: Fields) -> Callable[[Config], Config]:
    return lambda config: with_fields(config, fields)


def _experiment(name: str, row: dict[str, Any]) -> Experiment:
    row = dict(row)
    a, b = _arm(row.pop("a")), _arm(row.pop("b"))
    setup, both = SETUPS[row.pop("setup", "")], _fields(row.pop("both", {}))
    needs, sizes = tuple(row.pop("needs", ())), tuple(row.pop("sizes", {}).items())
    return Experiment(
        name=name,
        a=a,
        b=b,
        setup=lambda config, mesh: with_fields(setup(config, mesh), both),
        needs=needs,
        sizes=sizes,
        **row,
    )


EXPERIMENTS = {name: _experiment(name, row) for name, row in CLAIM_TABLE.items()}
