"""Where weights lie that `apply` is given: arrays of numpy on a mesh, and meshes of two kinds."""

import jax
import numpy as np
import pytest
from helpers import mesh_of, replace
from jax.sharding import AxisType
from maxtext_data import checkpoint, config_of, laid_out, nested, parameters, reference

import linen_compat
from nnx_pipeline import InputError

MIXED = r"all be explicit or all be auto, and they are stage=Auto, fsdp=Explicit; make it with"


@pytest.mark.parametrize("sharding", ["explicit", "auto"])
@pytest.mark.parametrize(
    ("mesh", "layout", "stages", "repeats"),
    [("stage=2,fsdp=2", "pipelined", 2, 2), ("fsdp=2,tensor=2", "scanned", 1, 1)],
)
def test_parameters_of_numpy_on_a_mesh(mesh, layout, stages, repeats, sharding):
    config = replace(config_of(), "pipeline", num_repeats=repeats)
    layers = {} if layout == "pipelined" else {"layer_layout": layout}
    model = linen_compat.Transformer(config, **layers)
    params = nested(laid_out(parameters(), layout, stages, repeats))
    batch = reference()

    @jax.jit
    def apply(params, tokens, positions, segment_ids):
        return model.apply({"params": params}, tokens, positions=positions, segment_ids=segment_ids)

    with jax.set_mesh(mesh_of(mesh, sharding)), jax.default_matmul_precision("highest"):
        names = ("inputs", "inputs_position", "inputs_segmentation")
        logits = apply(params, *(batch[name] for name in names))
    np.testing.assert_allclose(np.asarray(logits), batch["logits_dense"], rtol=0, atol=1e-5)


def test_a_mesh_with_axes_of_both_kinds_is_refused():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("stage", "fsdp"), axis_types=kinds)
    config = config_of()
    with pytest.raises(InputError, match=MIXED):
        linen_compat.load(checkpoint("unscanned"), config, mesh=mesh)
    with pytest.raises(InputError, match=MIXED), jax.set_mesh(mesh):
        linen_compat.Transformer(config).init(jax.random.key(0), reference()["inputs"])
    with pytest.raises(InputError, match=MIXED):
        linen_compat.load_train_state(checkpoint("unscanned"), config, mesh=mesh)
