"""What `config.json` says of latent attention: the parts of a head, and the factor on scores."""

import math

from linen_compat.formats._checksums import Json
from linen_compat.formats.huggingface._architectures import CONFIG_FILE, Keys
from nnx_pipeline import InputError, ModelConfig

DICTIONARIES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
READ_APART = ("qk_nope_head_dim", "qk_head_dim")


def head_dim(values: Keys, absent: Keys) -> int:
    """The width of a whole query, of which the last `qk_rope_head_dim` numbers are rotated.

    Raises InputError for sizes that are no whole numbers, or that other keys contradict. The key
    `head_dim` has the width of the rotated part.
    """
    parts: dict[str, int] = {}
    for key in ("qk_nope_head_dim", "qk_rope_head_dim"):
        parts[key] = values.get(key, absent[key])
        if isinstance(parts[key], bool) or not isinstance(parts[key], int) or parts[key] < 1:
            raise InputError(
                f"{CONFIG_FILE}: {key}={parts[key]!r} is not a whole number of 1 or more"
            )
    whole = sum(parts.values())
    for key, wanted in {"head_dim": parts["qk_rope_head_dim"], "qk_head_dim": whole}.items():
        if values.get(key) not in (None, wanted):
            raise InputError(
                f"{CONFIG_FILE}: {key}={values[key]!r} contradicts the sizes of the parts of a "
                f"head, which make it {wanted}; remove it, or correct one of them"
            )
    return whole


def attention_scale_in(values: Keys) -> float:
    """What transformers multiplies the scores by beside head_dim^-0.5.

    It is (0.1 · mscale_all_dim · ln(factor) + 1)², or 1 without `mscale_all_dim`.
    """
    for name in DICTIONARIES:
        rope = values.get(name) or {}
        if rope.get("mscale_all_dim"):
            return _mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return 1.0


def check_turns_alone(rope: Keys, name: str) -> None:
    """Raises InputError where yarn also multiplies the rotated numbers by a factor.

    Only a part of a head is rotated, so that such a factor is not one of the scores.
    """
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise InputError(f"{name}.{key}={value!r} is not a number")
    factor, both = rope["factor"], (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    found = rope.get("attention_factor")
    if found is None and all(both):
        found = _mscale(factor, both[0]) / _mscale(factor, both[1])
    elif found is None:
        found = _mscale(factor, 1.0)
    if found != 1.0:
        raise InputError(
            f"{name} multiplies the rotated part of each head by {found:.6g} (attention_factor="
            f"{rope.get('attention_factor')!r}, mscale={both[0]!r}, mscale_all_dim={both[1]!r}), "
            "which is not computed here; only mscale=mscale_all_dim or attention_factor=1.0 is"
        )


def check_savable_deepseek(model: ModelConfig) -> None:
    if model.norm_epsilon != 1e-6:
        raise InputError(
            f"model.norm_epsilon={model.norm_epsilon} has no place in a DeepSeek of transformers, "
            "which normalises latent vectors with 1e-06; only such a model can be saved"
        )
    if model.num_shared_experts < 1:
        raise InputError(
            "model.num_shared_experts=0 has no place in a DeepSeek of transformers, whose layers "
            "have one or more; only such a model can be saved"
        )
    _mscale_of(model)


def keys(model: ModelConfig) -> Json:
    """The keys of `config.json` for the parts of a head, and for layers without experts."""
    assert model.rope_head_dim is not None, "the model has latent attention"
    # Without this key transformers takes it that a DeepSeek-V3 predicts several tokens.
    ahead = {"num_nextn_predict_layers": 0} if model.router_score == "sigmoid" else {}
    return {
        **ahead,
        "intermediate_size": model.dense_mlp_dim or model.mlp_dim,
        "qk_nope_head_dim": model.head_dim - model.rope_head_dim,
    }


def keys_of_yarn(model: ModelConfig) -> Json:
    """The entries of a rope dictionary by which transformers gets `attention_scale`."""
    mscale = _mscale_of(model)
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {"attention_factor": 1.0}


def _mscale_of(model: ModelConfig) -> float:
    """The `mscale` that gives `attention_scale`; 0 where that is head_dim^-0.5.

    Raises InputError where there is none.
    """
    whole = model.attention_scale * model.head_dim**0.5
    if math.isclose(whole, 1.0, rel_tol=1e-9):
        return 0.0
    if model.rope_scaling != "yarn" or model.rope_factor == 1.0 or whole < 1.0:
        raise InputError(
            f"model.attention_scale={model.attention_scale} has no place in a DeepSeek of "
            f"transformers with rope_scaling={model.rope_scaling!r}; only head_dim^-0.5="
            f"{model.head_dim**-0.5}, or with yarn more, can be saved"
        )
    assert model.rope_factor is not None, "yarn has one"
    found: float = (whole**0.5 - 1.0) / (0.1 * math.log(model.rope_factor))
    short = round(found, 9)  # such as 0.707, which a product and a root have rounded
    exact = model.head_dim**-0.5 * _mscale(model.rope_factor, short) ** 2
    return short if math.isclose(exact, model.attention_scale, rel_tol=1e-14) else found


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
