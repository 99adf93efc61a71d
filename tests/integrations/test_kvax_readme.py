"""The flow of kvax's README (kvax_readme.py): a training step on one device and on four (data and
context) has the loss and gradients of dense attention, and on CUDA it runs on the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import calls
from packax.kvax.utils import FlashAttentionParamsConfig

pytest.importorskip("flax.linen")
pytest.importorskip("optax")
from kvax_readme import Transformer, check_training, config, dense, started, training
from tiers import some


@pytest.fixture(scope="module")
def expected():
    return training(Transformer(config(), attention=dense), (1, 1), 1)


@pytest.mark.parametrize("mesh_shape", some([((1, 1),), ((2, 2),)]))
def test_a_step_of_training_is_that_of_dense_attention(mesh_shape, expected):
    given = {}
    if mesh_shape == (2, 2):
        blocks = FlashAttentionParamsConfig(query_block_size=16, kv_block_size=16)
        given = {"fwd_params": blocks, "bwd_params": blocks}
    run = training(Transformer(config(**given), permute=mesh_shape != (1, 1)), mesh_shape, 2)
    np.testing.assert_allclose(run.losses[0], expected.losses[0], rtol=1e-5)
    assert run.losses[1] < run.losses[0] - 1e-3
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        run.gradients,
        expected.gradients,
    )


@pytest.mark.exhaustive
def test_in_bfloat16():
    """With the bounds that test_gpu_kvax.py uses for the kernels."""
    check_training(Transformer(config(dtype=jnp.bfloat16, head_dim=64)), "cpu", times=2)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("mesh_shape", some([((1, 1),), ((2, 2),)], 1))
def test_for_a_gpu_the_step_is_kernels(mesh_shape):
    """The step that test_gpu_kvax.py runs, lowered for CUDA here: XLA computes no attention."""
    model = Transformer(config(dtype=jnp.bfloat16, head_dim=64), permute=mesh_shape != (1, 1))
    with started(model, mesh_shape, times=5) as (step, parameters, state):
        lowered = step.trace(parameters, state).lower(lowering_platforms=("cuda",))
    found = calls(lowered.as_text())
    targets = [target for target, *_ in found]
    assert targets.count("packax_forward_v1") == targets.count("packax_backward_v1") == 1, targets
    (forward,) = (call for call in found if call[0] == "packax_forward_v1")
    batch, rows = (2 // mesh_shape[0], 320 // mesh_shape[1])
    assert forward[2][:2] == [f"{batch}x{rows}x4x64xbf16", f"{batch}x320x2x64xbf16"]
