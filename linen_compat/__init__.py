"""Linen-style classes and checkpoints beside `nnx_pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linen_compat.huggingface_config import config_from_huggingface as config_from_huggingface
    from linen_compat.huggingface_config import config_to_huggingface as config_to_huggingface
    from linen_compat.loading import load as load
    from linen_compat.maxtext_config import config_from_maxtext as config_from_maxtext
    from linen_compat.saving import save as save
    from linen_compat.train_state import load_train_state as load_train_state
    from linen_compat.train_state import save_train_state as save_train_state

# Public names and where they are; imported when they are asked for, so that `linen-compat --help`
# does not wait for what it does not need.
_PUBLIC = {
    "config_from_maxtext": "maxtext_config",
    "config_from_huggingface": "huggingface_config",
    "config_to_huggingface": "huggingface_config",
    "load": "loading",
    "load_train_state": "train_state",
    "save": "saving",
    "save_train_state": "train_state",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'linen_compat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"linen_compat.{_PUBLIC[name]}"), name)
