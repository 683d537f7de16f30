"""The table of experiments and their claims, which can be read without JAX."""

import importlib.resources
import tomllib
from typing import Any

CLAIM_TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    (importlib.resources.files("nnx_pipeline.experiments") / "claims.toml").read_text("utf-8")
)
# Claims that another command measures: the command, and what the claim is about.
ELSEWHERE = {
    "S2.12": (
        "linen-compat overhead",
        "layers are native NNX, native Linen, NNX wrapped as Linen, or Linen wrapped as NNX; what "
        "that costs in tracing and in memory",
    )
}
