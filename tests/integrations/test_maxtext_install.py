"""`packax.integrations.maxtext.install()` with an installed MaxText, and the mesh axes that it
uses.

MaxText is in no extra: its tests run only where it is installed (docs/guide/maxtext.md).
"""

import importlib
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import packax
import pytest
from jax.sharding import PartitionSpec as P
from paths import ROOT
from tiers import some

linen = pytest.importorskip("flax.linen")
from maxtext_reference import close, ids_and_positions, tensors  # noqa: E402
from packax.integrations import fallback, maxtext  # noqa: E402
from packax.integrations.maxtext.install import sharding_of  # noqa: E402

install = importlib.import_module("packax.integrations.maxtext.install")

RULES = (
    ("activation_batch_attn", ("data", "fsdp", "expert")),
    ("activation_heads", ("tensor", "tensor_sequence")),
    ("activation_q_length", ("context", "ulysses")),
)
BALANCED = types.SimpleNamespace(context_parallel_load_balance=True)


WHOLE = P(None, None, None, None)


@pytest.mark.parametrize(  # batch, lengths and heads of the query and the key
    ("sizes", "batch", "lengths", "heads", "query", "key"),
    [
        ({"fsdp": 4}, 4, (64, 64), (4, 2), P("fsdp", None, None, None), None),
        # with a batch of 2, fsdp does not divide the rest
        ({"data": 2, "fsdp": 2}, 2, (64, 64), (4, 2), P("data", None, None, None), None),
        ({"data": 2, "fsdp": 2}, 3, (64, 64), (4, 2), None, None),
        ({"stage": 2}, 2, (64, 64), (4, 2), None, None),
        (
            {"context": 2, "tensor": 2}, 3, (512,) * 2, (4, 2),
            P(None, "context", "tensor", None), None,
        ),
        # every rank has both heads
        ({"tensor": 4}, 1, (64, 64), (4, 2), P(None, None, "tensor", None), WHOLE),
        ({"context": 2}, 1, (64, 64), (4, 2), WHOLE, None),
        ({"context": 2}, 1, (512, 64), (4, 2), WHOLE, None),
        # in the order for 2 ranks, over 4
        (
            {"context": 2, "ulysses": 2, "fsdp": 2}, 2, (1024,) * 2, (4, 2),
            P("fsdp", "context", "ulysses", None), None,
        ),
        (
            {"context": 2, "ulysses": 2, "tensor": 2}, 1, (512,) * 2, (4, 2),
            P(None, "context", ("tensor", "ulysses"), None), P(None, "context", None, None),
        ),
        # too many ranks for the heads
        ({"context": 2, "ulysses": 4}, 1, (512,) * 2, (2, 2), P(None, "context", None, None), None),
        ({"ulysses": 2}, 1, (64, 64), (4, 2), P(None, "ulysses", None, None), None),  # in order
    ],
)  # fmt: skip
def test_axes_of_rules_and_mesh(sizes, batch, lengths, heads, query, key):
    names = ("data", "stage", "fsdp", "expert", "context", "ulysses", "tensor", "tensor_sequence")
    shape = tuple(sizes.get(name, 1) for name in names)
    mesh = jax.sharding.AbstractMesh(shape, names)
    shapes = [(batch, length, n, 8) for length, n in zip(lengths, heads, strict=True)]
    with linen.logical_axis_rules(RULES):
        found = sharding_of(mesh, *shapes, BALANCED)
    expected = packax.AttentionSharding(query, key or query, mesh=mesh) if query else None
    assert found == expected


@pytest.mark.parametrize(
    ("sizes", "length"),
    some([((2, 2, 1), 512), ((2, 2, 2), 512), ((2, 1, 1), 128), ((1, 2, 1), 60)], 0),
)
def test_a_sequence_that_no_kernel_divides_is_right(sizes, length):
    """Reordered for fewer ranks than hold the sequence (Ulysses), or in too small chunks; and one
    in order, sharded."""
    mesh = jax.make_mesh(
        sizes, ("context", "ulysses", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    q, k, v = tensors(length, length, 0.5)
    ids, positions = ids_and_positions(length)
    operands = [
        maxtext.reorder_sequence(jnp.asarray(x), sizes[0]) for x in (q, k, v, ids, positions)
    ]
    if sizes[0] == 1:
        operands = [jnp.asarray(x) for x in (q, k, v, ids, positions)]
    rows = jax.sharding.NamedSharding(mesh, P(None, ("context", "ulysses")))
    operands = [jax.device_put(x, rows) for x in operands]
    with linen.logical_axis_rules(RULES):
        sharding = sharding_of(mesh, q.shape, k.shape, BALANCED)
    assert sharding.query[1:3] == {512: ("context", "ulysses"), 128: (None, None)}.get(
        length, ("ulysses", None)
    )
    op = maxtext.AttentionOp(BALANCED, mesh, sharding=sharding)

    def loss(q, *others):
        out = op(q, *others)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(*operands)
    back = [maxtext.reorder_sequence(x, sizes[0], to_contiguous=True) for x in (out, gradient)]
    back = [out, gradient] if sizes[0] == 1 else back
    one = maxtext.AttentionOp(attention_type="global")

    def of_one(q):
        out = one(q, k, v, ids)
        return jnp.sum(jnp.sin(out)), out

    (_, expected), slope = jax.jit(jax.value_and_grad(of_one, has_aux=True))(q)
    close(back[0], expected)
    close(back[1], slope)


class TheirOp:
    """Called as MaxText's AttentionOp is."""

    attention_type, kv_quant, mesh, config = "mla", None, None, None
    attn_logits_soft_cap = sliding_window_size = chunk_attn_window_size = None

    def __init__(self, *, attention_kernel):
        self.attention_kernel = attention_kernel

    def __call__(self, query, key, value, model_mode="train"):
        return self.attention_kernel


@pytest.mark.parametrize("dims", [(192, 128), (576, 512)])
def test_head_dims_without_kernels_run_on_theirs(monkeypatch, dims):
    """Latent attention, and its absorbed form: use_mla_absorbed_mqa."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.setattr(install, "_say", lambda *_: None)
    monkeypatch.setattr(fallback, "has_kernels", lambda q, k, v, with_bias: q.shape[3] <= 512)
    op = install._op_of(TheirOp)(attention_kernel="autoselected")
    query, key, value = (jnp.ones((1, 8, *x)) for x in ((2, dims[0]), (1, dims[0]), (1, dims[1])))
    if dims == (192, 128):
        assert op(query, key, value).shape == (1, 8, 2, 128)
        return
    with pytest.warns(fallback.FallbackWarning, match="float32 and head dim 576/512: runs"):
        assert op(query, key, value) == "dot_product"
    monkeypatch.setenv("PACKAX_FALLBACK", "error")
    with pytest.raises(NotImplementedError, match="576/512"):
        op(query, key, value)


def program(text):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", text]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("first", ["install", "theirs"])
def test_install_reaches_every_name(first):
    """Before and after MaxText's modules import the name; the op keeps MaxText's other methods."""
    pytest.importorskip("maxtext")
    program(f"""
from packax.integrations import maxtext
if {first!r} == "install":
    maxtext.install()
from maxtext.layers import attention_op, attentions
from maxtext.models import gpt3
from maxtext.utils import max_utils, maxtext_utils
maxtext.install()
ops = attention_op.AttentionOp, attentions.AttentionOp, gpt3.AttentionOp
assert len(set(ops)) == 1 and hasattr(ops[0], "by_packax"), ops
assert hasattr(ops[0], "generate_attention_mask")
import jax.numpy as jnp
there = max_utils.reorder_causal_load_balanced(
    {{"inputs": jnp.arange(8)[None], "other": 1}}, 2, "striped", "gpu"
)
assert there["inputs"].tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]] and there["other"] == 1
""")


def test_the_trainings_agree(tmp_path):
    """Packed documents, alone and over a context axis; the script has more models."""
    pytest.importorskip("maxtext")
    script = ROOT / "tests" / "peers" / "maxtext_trainings.py"
    command = [sys.executable, str(script), "--only", "packing", "--steps", "2"]
    command += ["--out", str(tmp_path)]
    subprocess.run(command, check=True)
