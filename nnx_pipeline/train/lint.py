"""Wasted memory in a training step of this package."""

import jax
from jax.sharding import Mesh

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.lint import Finding, Limits, lint
from nnx_pipeline.train.step import abstract_batch, abstract_state, jit_train_step


def lint_step(config: Config, mesh: Mesh, *, limits: Limits = Limits()) -> list[Finding]:
    """Lints the training step that `nnx-pipeline measure` compiles, traced under the JAX mesh.

    - `limits`: the sizes in bytes below which nothing is reported.
    """
    with jax.set_mesh(mesh):
        state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
        step = jit_train_step(state, mesh)
    return lint(step, state, batch, mesh=mesh, parameters=state.model, limits=limits)
