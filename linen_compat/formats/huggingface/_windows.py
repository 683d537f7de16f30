"""Keys of `config.json` that say which layers have a sliding window, and their fields."""

from linen_compat.formats._intact import Json
from linen_compat.formats.huggingface._architecture import (
    CONFIG_FILE,
    LOCAL_THETA,
    LONGEST,
    WINDOW,
    Architecture,
    Keys,
)
from linen_compat.formats.huggingface._rope import whole_number
from nnx_pipeline import InputError, ModelConfig

TYPES, USED, LAST_WHOLE, CYCLE = (
    *("layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
)
KEYS = (TYPES, WINDOW)
_WHOLE, _CUT = "full_attention", "sliding_attention"


def fields_of_windows(values: Keys, architecture: Architecture, longest: int) -> Json:
    """`sliding_window` and which layers do without; none where no sequence is longer than it."""
    absent = {**architecture.absent, **values}
    window = absent.get(WINDOW) if absent.get(USED, True) else None
    if window is not None:
        window = whole_number(WINDOW, window)
    kinds = _kinds(values, architecture)
    others = [kind for kind in kinds if kind not in (_WHOLE, _CUT)]
    if others or (_CUT in kinds and architecture.windows != "some"):
        only = f"only {_WHOLE!r}" + (f" and {_CUT!r}" if architecture.windows == "some" else "")
        raise InputError(
            f"{CONFIG_FILE}: {TYPES} has {[*others, _CUT][0]!r}, which is not supported, {only}; "
            "convert another model"
        )
    if window is None and _CUT in kinds:
        raise InputError(f"{CONFIG_FILE}: {TYPES} has {_CUT!r} and there is no {WINDOW}; add it")
    if window is None or (architecture.windows == "some" and _CUT not in kinds):
        return {}
    if kinds and architecture.windows == "all":
        raise InputError(
            f"{CONFIG_FILE}: {TYPES} says that no layer has a window, and {WINDOW}={window}; set "
            f"{WINDOW} to null, or remove {TYPES}"
        )
    if window >= longest and len({*kinds}) < 2 and LOCAL_THETA not in architecture.absent:
        return {}
    if architecture.windows is None:
        raise InputError(
            f"{CONFIG_FILE}: {WINDOW}={window} is smaller than {LONGEST}={longest}, and a "
            f"{architecture.name} of transformers reads the whole sequence; set it to null"
        )
    return {WINDOW: window, **(_without(kinds) if architecture.windows == "some" else {})}


def keys_of_windows(model: ModelConfig, architecture: Architecture) -> Json:
    """The keys of `config.json` for the windows of a model."""
    if architecture.windows is None:
        return {}
    used = {USED: model.sliding_window is not None} if USED in architecture.absent else {}
    if architecture.windows == "all":
        return {WINDOW: model.sliding_window, **used}
    kinds, number = model.of_kinds, model.num_layers
    types = [_WHOLE if kind.sliding_window is None else _CUT for kind in kinds] * number
    first = {LAST_WHOLE: model.full_attention_first if model.sliding_window else number}
    first = first if LAST_WHOLE in architecture.absent else {}
    every = model.full_attention_every
    cycle = {CYCLE: every} if every and CYCLE in architecture.absent else {}
    return {WINDOW: model.sliding_window, **used, **first, **cycle, TYPES: types[:number]}


def _kinds(values: Keys, architecture: Architecture) -> list[object]:
    """What each layer reads: as `layer_types` says, or as transformers takes it without that."""
    number, absent = int(values["num_hidden_layers"]), {**architecture.absent, **values}
    said = values.get(TYPES)
    if said is not None:
        if not isinstance(said, list) or len(said) != number:
            raise InputError(f"{CONFIG_FILE}: {TYPES}={said!r} is not one kind for each layer")
        return said
    if architecture.windows != "some":
        return []
    if CYCLE in absent:
        cycle = whole_number(CYCLE, absent[CYCLE])
        return [_CUT if (layer + 1) % cycle else _WHOLE for layer in range(number)]
    last = absent[LAST_WHOLE] if absent.get(USED, True) else number
    if isinstance(last, bool) or not isinstance(last, int) or last < 0:
        raise InputError(f"{CONFIG_FILE}: {LAST_WHOLE}={last!r} is not a whole number")
    return [_WHOLE if layer < last else _CUT for layer in range(number)]


def _without(kinds: list[object]) -> Json:
    """The field that says which layers have no window, of those that have one of two kinds."""
    number, whole = len(kinds), [kind == _WHOLE for kind in kinds]
    if not any(whole):
        return {}
    first = whole.index(False)
    if first and not any(whole[first:]):
        return {"full_attention_first": first}
    every = whole.index(True) + 1
    if whole == [(layer + 1) % every == 0 for layer in range(number)]:
        return {"full_attention_every": every}
    raise InputError(
        f"{CONFIG_FILE}: {TYPES} has {_WHOLE!r} in layers "
        f"{[layer for layer in range(number) if whole[layer]]}, which is not supported, only in "
        "the first ones, or in every n-th"
    )
