"""Reads configurations into a `Config`: MaxText's, this project's own files, and presets."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import yaml

from linen_compat.maxtext import _deepseek as deepseek
from linen_compat.maxtext import _keys as keys
from linen_compat.maxtext._families import BLOCKS, check_block, fields_of_block, keys_of_preset
from linen_compat.maxtext._mesh import mesh_of, on_mesh
from linen_compat.maxtext._published import SIZES
from linen_compat.maxtext._values import (
    DEFAULTS,
    Fields,
    Values,
    as_number,
    load_yaml,
    typed,
    wrong_type,
)
from nnx_pipeline import (
    Config,
    InputError,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
    preset,
)
from nnx_pipeline.config._overrides import known_keys
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.config.config import SECTIONS
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.lab._files import place, read_text
from nnx_pipeline.lab.errors import nearest, one_of, shown, unparsed

# MaxText's keys for the sizes of a model, and the fields of `ModelConfig` that they become.
_SIZES = {
    "vocab_size": "vocab_size",
    "base_emb_dim": "embed_dim",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
    "base_num_query_heads": "num_heads",
    "base_num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "normalization_layer_epsilon": "norm_epsilon",
    "rope_max_timescale": "rope_theta",
}
# Where a MaxText key differs from its field here: errors about the field name the key as well.
_RENAMED = {key: field for key, field in _SIZES.items() if key != field} | {
    "num_pipeline_repeats": "num_repeats",
    "num_pipeline_microbatches": "num_microbatches",
    "gradient_clipping_threshold": "clip_norm",
    "per_device_batch_size times all parallelisms": "global_batch",
    "max_target_length": "sequence_length",
    "adam_weight_decay": "weight_decay",
    "load_balance_loss_weight": "load_balance_weight",
    "weight_dtype": "param_dtype",
    "steps or learning_rate_schedule_steps": "schedule_steps",
    "warmup_steps_fraction times the steps": "warmup_steps",
    "wsd_decay_steps_fraction times the steps": "decay_steps",
    "learning_rate_final_fraction": "final_fraction",
    "skip_step_scaling_factor": "spike_factor",
    "skip_step_interval": "spike_interval",
    "rope_linear_scaling_factor": "rope_factor",
}
# The presets by MaxText's names; of DeepSeek those that MaxText has.
PRESETS_OF_MAXTEXT = {name: name for name in PRESETS if not name.startswith("deepseek")} | {
    name: named.preset for name, named in deepseek.NAMED.items()
}
# MaxText's remat policies; those without a counterpart become `full`, which changes no value.
_REMAT = (
    *POLICIES,
    *("minimal_with_context", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi"),
    *("custom", "minimal_flash", "save_qkv_proj_offloaded"),
)


def config_from_maxtext(source: str | Path | Values) -> Config:
    """A MaxText configuration as a config of this project.

    - `source`: a YAML file or a dictionary.

    Keys that are left out have MaxText's defaults, but for `shard_mode`, whose default here is
    `explicit`. With a `model_name` among this project's presets the sizes are those of the preset,
    with `deepseek2-16b` or `deepseek3-671b` those of `deepseek-v2-lite` or `deepseek-v3`, and with
    the name of another Llama or Qwen that MaxText has a file for those of that file;
    other values must not contradict them unless `override_model_config` is true. Keys that only say
    how a run is carried out (kernels, machines, data, logs) are ignored. `steps` is read as the
    length of the learning rate's schedule, where `learning_rate_schedule_steps` is -1.

    `num_pipeline_repeats=-1` is worked out from the pipeline parallelism, as in MaxText. The global
    batch is worked out from all parallelisms, where -1 counts as 1. A remat policy without a
    counterpart becomes `full`, which changes no value.

    Raises InputError for a key that is neither mapped nor ignored on purpose, naming the nearest,
    and for a value that this project does not compute with.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read_yaml(source)
    _check_keys(raw)
    values = typed({**DEFAULTS, **_with_sizes(raw)})
    try:
        return Config(model=_model(values), pipeline=_pipeline(values), train=_train(values))
    except InputError as error:
        renamed = _RENAMED
        if values["decoder_block"] == deepseek.BLOCK:
            renamed = {**renamed, "rope_factor": "rope_factor", **deepseek.RENAMED}
        named = [f"{ours} is {key}" for key, ours in renamed.items() if ours in str(error)]
        names = f" (in MaxText {', '.join(named)})" if named else ""
        raise InputError(f"{error}{names}") from error


def mesh_from_yaml(name: str, devices: int | None, slices: int) -> MeshConfig:
    """The mesh of a MaxText YAML file, see `mesh_of`; one device for any other YAML."""
    raw = _read_yaml(name)
    return MeshConfig() if _has_sections(raw) else mesh_of(raw, devices, slices)


def config_from_yaml(name: str, mesh: MeshConfig | None = None) -> Config:
    """The config of a MaxText YAML file, of a YAML of this project's sections, or a preset.

    - `mesh`: takes the place of MaxText's parallelisms.
    """
    if not name or not place(name).exists():
        if name in PRESETS:
            return preset(name)
        raise InputError(
            f"{name or 'an empty name'} is neither a file nor a preset; give a MaxText YAML, a "
            f"YAML with {', '.join(SECTIONS)}, or one of: {', '.join(PRESETS)}"
        )
    raw = _read_yaml(name)
    if _has_sections(raw):
        return _from_sections(name, raw)
    return config_from_maxtext(raw if mesh is None else on_mesh(raw, mesh))


def _has_sections(raw: Values) -> bool:
    return "model" in raw and set(raw) <= set(SECTIONS)


def _read_yaml(path: str | Path) -> Fields:
    """The keys and values of a YAML file. Raises InputError when it holds none."""
    text = read_text(place(path))
    try:
        raw = load_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # too deep, too many digits
        raise InputError(f"{path} cannot be read as YAML: {unparsed(error)}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a YAML file of keys and values; give one")
    return raw


def _from_sections(name: str, raw: Values) -> Config:
    known = known_keys()
    for section, fields in raw.items():
        if not isinstance(fields, Mapping):
            raise InputError(f"{name}: {section} is not a mapping from fields to values")
        for field in fields:
            key = f"{section}.{field}"
            if key not in known:
                raise InputError(f"{name}: no such config field {key}; {nearest(key, known)}")
    try:
        made: Fields = {section: SECTIONS[section](**fields) for section, fields in raw.items()}
    except TypeError as error:  # a field without a default is missing
        raise InputError(f"{name}: {error}") from error
    return Config(**made)


def _check_keys(raw: Values) -> None:
    """Raises InputError for keys that are unknown, and for fixed keys with another value."""
    if isinstance(block := raw.get("decoder_block", DEFAULTS["decoder_block"]), str):
        check_block(block)
    for key, value in raw.items():
        kind = keys.kind(str(key))
        if kind is None:
            cure = nearest(str(key), keys.listed_keys())
            cure = cure if cure.startswith("did you mean") else "remove it if it has no effect"
            if key == "base_config":
                cure = "other files are not read; put its keys into this one"
            raise InputError(
                f"{key}={shown(value)} is not a MaxText key that this project knows; {cure}"
            )
        if kind == "fixed" and not keys.is_accepted(key, value):
            raise InputError(
                f"{key}={shown(value)} is not supported; this project computes with "
                f"{key}={keys.FIXED[key][0]!r}"
            )


def _with_sizes(raw: Fields) -> Fields:
    """The keys that are given, with the sizes of their `model_name`, if that is a preset.

    As in MaxText these sizes win over its defaults, even where the file spells them out; what is
    given wins over them with `override_model_config`.
    """
    name = raw.get("model_name", "default")
    if not isinstance(name, str):
        raise wrong_type("model_name", name, str)
    sizes = _sizes_of(name)
    if not sizes and name != "default":
        needed, block = {*_SIZES, "decoder_block"}, BLOCKS.get(raw.get("decoder_block", ""))
        if block is not None and not block.routed:  # MaxText's own files do not say them then
            needed -= {"num_experts", "num_experts_per_tok"}
        if raw.get("decoder_block") == deepseek.BLOCK:
            needed = needed - {"head_dim"} | {*deepseek.NEEDED}
        missing = sorted(needed - set(raw))
        if missing:
            raise InputError(
                f"model_name={name!r} is not among {', '.join({**PRESETS_OF_MAXTEXT, **SIZES})}, "
                f"so the file must say {', '.join(missing)}"
            )
    if raw.get("override_model_config") is True:
        return {**sizes, **raw}
    for key, size in sizes.items():
        value = raw.get(key, size)
        if isinstance(value, str) and isinstance(size, float):  # YAML reads 1e-06 as text
            value = as_number(key, value, float)
        if value not in (size, DEFAULTS[key]):
            raise InputError(
                f"{key}={value!r} contradicts model_name={name!r}, which has {size!r}; remove one "
                "of them, or set override_model_config to true"
            )
    return {**raw, **sizes}


def _sizes_of(model_name: str) -> Fields:
    """MaxText's keys with the sizes of a model that it has a file for; none for other names."""
    if model_name not in PRESETS_OF_MAXTEXT:
        return SIZES.get(model_name, {})
    model = PRESETS[PRESETS_OF_MAXTEXT[model_name]].model
    sizes = {key: getattr(model, field) for key, field in _SIZES.items()}
    if model.num_experts > 1:
        sizes["base_moe_mlp_dim"] = model.mlp_dim
    if model_name in deepseek.NAMED:
        del sizes["head_dim"]  # MaxText adds two other keys up instead
    return {**sizes, **keys_of_preset(model_name, model)}


def _model(values: Values) -> ModelConfig:
    if values["dropout_rate"] and values["enable_dropout"]:
        raise InputError(
            f"dropout_rate={values['dropout_rate']} with enable_dropout is not supported, as "
            "MaxText draws other masks; set enable_dropout to false"
        )
    sizes = {field: values[key] for key, field in _SIZES.items()}
    sizes["rope_theta"] = float(sizes["rope_theta"])
    dtypes = {"dtype": values["dtype"], "param_dtype": values["weight_dtype"]}
    return ModelConfig(**{**sizes, **dtypes, **fields_of_block(values)})


def _pipeline(values: Values) -> PipelineConfig:
    once, per_repeat = values["pipeline_fsdp_ag_once"], values["pipeline_fsdp_ag_per_repeat"]
    if once and per_repeat:
        raise InputError(
            "pipeline_fsdp_ag_once and pipeline_fsdp_ag_per_repeat are both true; keep one of them"
        )
    gather = "step" if once else "prefetch" if per_repeat else "use"
    one_of("remat_policy", values["remat_policy"], _REMAT)
    microbatches, policy = values["num_pipeline_microbatches"], values["remat_policy"]
    one_of("shard_mode", values["shard_mode"], ("explicit", "auto"))
    plain = PipelineConfig(
        remat=policy if policy in POLICIES else "full", sharding=values["shard_mode"]
    )
    repeats = _repeats(values)
    if repeats is None:  # MaxText reads no option of the pipeline then
        return plain
    return dataclasses.replace(
        plain,
        num_microbatches=None if microbatches == -1 else microbatches,
        num_repeats=repeats,
        forwarding_delay=2 if values["pipeline_delay_activation_forwarding"] else 1,
        fsdp_gather=gather,  # type: ignore[arg-type]
    )


def _repeats(values: Values) -> int | None:
    """How often a microbatch passes through all stages; None without stages."""
    layers: int = values["base_num_decoder_layers"]
    inside, dense = values["pipeline_parallel_layers"], values["first_num_dense_layers"]
    if inside not in (-1, layers - dense):
        raise InputError(
            f"pipeline_parallel_layers={inside} of base_num_decoder_layers={layers} leaves layers "
            "outside the pipeline, which is not supported; set it to -1"
        )
    which = f"{layers} - first_num_dense_layers={dense}" if dense else f"{layers}"
    layers -= dense
    parallelisms = [values[f"{net}_pipeline_parallelism"] for net in ("ici", "dcn")]
    repeats: int = values["num_pipeline_repeats"]
    per_stage: int = values["num_layers_per_pipeline_stage"]
    if -1 in parallelisms:
        if repeats != -1:
            return repeats
        raise InputError(
            "num_pipeline_repeats=-1 cannot be worked out with a pipeline parallelism of -1; "
            "set one of them to a number above 0"
        )
    stages = math.prod(parallelisms)
    if stages == 1:
        return None
    rounds = max(1, layers // max(1, stages * per_stage)) if repeats == -1 else repeats
    if stages * per_stage * rounds != layers:
        raise InputError(
            f"{stages} stages × num_pipeline_repeats={rounds} × num_layers_per_pipeline_stage="
            f"{per_stage} are not base_num_decoder_layers={which}; make them equal"
        )
    return rounds


def _train(values: Values) -> TrainConfig:
    length = values["max_target_length"]
    return TrainConfig(
        global_batch=_global_batch(values),
        sequence_length=length,
        loss_chunks=math.gcd(TrainConfig.loss_chunks, length),
        learning_rate=float(values["learning_rate"]),
        **_schedule(values),
        **_guard(values),
        adam_b1=values["adam_b1"],
        adam_b2=values["adam_b2"],
        adam_eps=float(values["adam_eps"]),
        weight_decay=values["adam_weight_decay"],
        clip_norm=values["gradient_clipping_threshold"] or None,  # 0 is for no clipping there
        load_balance_weight=values["load_balance_loss_weight"],
        # MaxText casts gradients in float32 alone, and so `float32` changes none.
        grad_dtype=None if values["grad_dtype"] == "float32" else values["grad_dtype"],
        shard_optimizer_over_data=values["shard_optimizer_over_data"],
    )


def _schedule(values: Values) -> Fields:
    """The schedule of the learning rate, in steps; in MaxText the parts are fractions."""
    kind, style = values["lr_schedule_type"], values["wsd_decay_style"]
    one_of("lr_schedule_type", kind, ("cosine", "wsd"))
    one_of("wsd_decay_style", style, ("linear", "cosine"))
    given = values["learning_rate_schedule_steps"]
    total: int = values["steps"] if given == -1 else given
    names = ("warmup_steps_fraction", "wsd_decay_steps_fraction")
    warmup, fall = (int(total * values[name]) for name in names)
    return {
        "learning_rate_decay": "cosine" if kind == "cosine" else style,
        "warmup_steps": warmup,
        "schedule_steps": total,
        "decay_steps": None if kind == "cosine" else fall,
        "final_fraction": values["learning_rate_final_fraction"],
    }


def _guard(values: Values) -> Fields:
    """Which steps are skipped. MaxText sets no limit to how many; here it is its interval, in which
    the spikes would become what other steps are compared with."""
    if not values["skip_step_on_spikes"]:
        return {}
    interval = values["skip_step_interval"]
    return {
        "max_skipped_steps": interval,
        "spike_factor": values["skip_step_scaling_factor"],
        "spike_interval": interval,
    }


def _global_batch(values: Values) -> int:
    """The batch of all devices: the batch per device times all parallelisms.

    Where a parallelism is -1, which counts as 1, or the product is not whole, the batch is rounded
    up to a multiple of the number of microbatches.
    """
    names = [key for key in values if keys.PARALLELISM.fullmatch(key)]
    sizes = [as_number(name, values[name], int) for name in names]
    batch = values["per_device_batch_size"] * math.prod(size for size in sizes if size != -1)
    if batch == int(batch) and -1 not in sizes:
        return int(batch)
    microbatches: int = max(1, values["num_pipeline_microbatches"])
    whole: int = math.ceil(batch / microbatches) * microbatches
    return whole
