"""A small forward and backward of every dtype and head dim, to run under compute-sanitizer:

    python tests/gpu/hazards.py memcheck | racecheck | synccheck

hazards.py runs this program under the tool and counts its reports.

`--dims 128x128`: only these head dims. `--small`, for slow tools: only bfloat16 and few cases; they
still let every ring of buffers wrap.

Every buffer gets a separate allocation, so that an access past its end is an error instead of
reaching a neighbour in jax's pool. Lengths are odd, ids reappear, padding is in the middle and at
the end, and one case has Sq != Skv. The LSE has no cotangent. Results are compared with numpy in
float64.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
flags = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import packax  # noqa: E402
from packax import _ext  # noqa: E402

# ‖x - reference‖ / ‖reference‖; float32 includes TF32.
LIMIT = {
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float32": 4e-3,
}


def reference(query, key, value, cotangent, attends, scale, soft_cap, slopes, bias):
    """Output and gradients in float64. attends: (batch, queries, keys); bias: (1, heads, queries,
    keys) or None."""
    batch, q_len = query.shape[:2]
    kv_heads = key.shape[2]
    q, do = (x.reshape(batch, q_len, kv_heads, -1, x.shape[-1]) for x in (query, cotangent))
    scores = np.einsum("bqhgd,bkhd->bhgqk", q, key) * scale
    dtanh = 1.0
    if soft_cap is not None:
        scores = np.tanh(scores / soft_cap)
        scores, dtanh = soft_cap * scores, 1 - scores**2
    if slopes is not None:
        far = np.abs(np.arange(q_len)[:, None] - np.arange(key.shape[1]))
        scores = scores - slopes.reshape(1, kv_heads, -1, 1, 1) * far
    if bias is not None:
        scores = scores + bias.reshape(1, kv_heads, -1, *bias.shape[2:])
    scores = np.where(attends[:, None, None], scores, -np.inf)
    top = np.max(scores, -1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhgqk,bkhd->bqhgd", p, value)
    dp = np.einsum("bqhgd,bkhd->bhgqk", do, value)
    dlogits = p * (dp - np.sum(p * dp, -1, keepdims=True))
    ds = dlogits * dtanh * scale
    dq = np.einsum("bhgqk,bkhd->bqhgd", ds, key).reshape(query.shape)
    dk = np.einsum("bhgqk,bqhgd->bkhd", ds, q)
    dv = np.einsum("bhgqk,bqhgd->bkhd", p, do)
    dbias = () if bias is None else (dlogits.sum(0).reshape(bias.shape),)
    return out.reshape(*query.shape[:3], -1), dq, dk, dv, *dbias


def run(
    name, expression, batch, q_len, kv_len, heads, kv_heads, dims, dtype, deterministic=False,
    soft_cap=None, alibi=False, bias_dtype=None,
) -> bool:  # fmt: skip
    rng = np.random.default_rng(0)
    qk, v = dims
    shapes = [(q_len, heads, qk), (kv_len, kv_heads, qk), (kv_len, kv_heads, v), (q_len, heads, v)]
    arrays = [jnp.asarray(rng.normal(size=(batch, *shape)), dtype) for shape in shapes]
    slopes = 2.0 ** -np.arange(1, heads + 1, dtype=np.float32) if alibi else None
    biases = []  # one array shared by all batch rows
    if bias_dtype is not None:
        biases = [jnp.asarray(rng.normal(size=(1, heads, q_len, kv_len)), bias_dtype)]

    @jax.jit
    def both(query, key, value, cotangent, *biases):
        mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
        out, pullback = jax.vjp(
            lambda query, key, value, bias=None: packax.flash_attention(
                query,
                key,
                value,
                mask,
                implementation="cuda",
                deterministic=deterministic,
                soft_cap=soft_cap,
                bias=packax.alibi(slopes) if alibi else bias,
            ),
            query,
            key,
            value,
            *biases,
        )
        return (out, *pullback(cotangent))

    results = [np.asarray(x, np.float64) for x in both(*arrays, *biases)]
    attends = np.asarray(expression.as_array(q_len, kv_len))
    attends = attends.reshape(-1, q_len, kv_len)  # a block mask has a head axis, here of size 1
    attends = np.broadcast_to(attends, (batch, q_len, kv_len))
    bias = np.asarray(biases[0], np.float64) if biases else None
    exact = reference(
        *(np.asarray(x, np.float64) for x in arrays), attends, qk**-0.5, soft_cap, slopes, bias
    )
    errors = [
        np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(results, exact, strict=True)
    ]
    good = all(error < LIMIT[dtype] for error in errors)
    what = f"{name} {dtype} {qk}x{v}{' deterministic' if deterministic else ''}"
    shown = " ".join(f"{error:.1e}" for error in errors)
    print(f"{what}: errors {shown}{'' if good else ' WRONG'}", flush=True)
    return good


def decode(dims, dtype, page_size) -> bool:
    """Both query tiles, a sequence that fills the cache, and invalid block table entries after the
    pages in use. Last, packed rows of these sequences: a chunk, few rows, and padding."""
    rng = np.random.default_rng(1)
    lengths, room, kv_heads = np.array([200, 0, 3, 131], np.int32), 200, 2
    table = None
    cache = (4, room)
    if page_size:
        blocks = -(-room // page_size)
        table = rng.permutation(4 * blocks).reshape(4, blocks).astype(np.int32)
        table[np.arange(blocks) * page_size >= lengths[:, None]] = 2**31 - 1
        cache = (4 * blocks, page_size)
    key, value = (jnp.asarray(rng.normal(size=(*cache, kv_heads, d)), dtype) for d in dims)
    good = True
    starts = np.array([1, 41, 41, 43, 44], np.int32)  # of the packed rows

    def uniform(*arrays, implementation):
        given = {"block_table": table, "implementation": implementation}
        return packax.decode_attention(*arrays, lengths, **given)

    def ragged(*arrays, implementation):
        given = {"cu_q_lens": starts, "implementation": implementation}
        return packax.ragged_paged_attention(*arrays, lengths, table, **given)

    for attend, rows, heads in (
        (uniform, (4, 1), 6), (uniform, (4, 7), 20), (ragged, (46,), 20)
    ):  # fmt: skip
        query = jnp.asarray(rng.normal(size=(*rows, heads, dims[0])), dtype)
        arrays = query, key, value
        got = attend(*arrays, implementation="cuda")
        # On the CPU, because XLA's program for the GPU takes minutes under the tool.
        arrays = jax.device_put(arrays, jax.devices("cpu")[0])
        want = attend(*arrays, implementation="xla")
        outs = [np.asarray(x, np.float64) for x in (got, want)]
        error = np.linalg.norm(outs[0] - outs[1]) / np.linalg.norm(outs[1])
        right = error < LIMIT[dtype]
        name = f"decode {rows[-1]} x {heads} pages of {page_size}"
        print(
            f"{name} {dtype} {dims[0]}x{dims[1]}: error {error:.1e}{'' if right else ' WRONG'}",
            flush=True,
        )
        good &= bool(right)
    return good


def packed(*lengths: int) -> np.ndarray:
    """Segment ids of runs: a positive length starts a document, a negative length is padding."""
    ids, document = [], 0
    for length in lengths:
        document += length > 0
        ids.append(np.full(abs(length), document if length > 0 else -1))
    return np.concatenate(ids).astype(np.int32)


def head_dims() -> list[tuple[int, int]]:
    """The (query/key, value) head dims for which this build has 16-bit kernels."""
    kernels = ("forward", "forward_sm90")
    found = (r for r in _ext.variants() if r["kernel"] in kernels and r["dtype"] in ("bf16", "f16"))
    return sorted({(r["qk_dim"], r["v_dim"]) for r in found})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dims", nargs="+", help="pairs such as 192x128 (default: all)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"sanitize.py needs a GPU; jax runs on {jax.default_backend()}")
    packed_rows = np.stack([packed(70, 1, -9, 130, -3), packed(213), packed(-5, 64, 64, 80)])
    shuffled = np.tile(np.repeat([3, 7, 3, 900001], [40, 31, 50, 16]), (1, 1)).astype(np.int32)
    positions = np.arange(137, dtype=np.int32)[None, ::-1].copy()
    causal = packax.causal()
    tested = causal & packax.documents(shuffled, positions=positions)
    good = True
    # 700 rows: more blocks than any ring has stages, both masked and unmasked; two query heads per
    # key/value head.
    long = causal & packax.documents(packed(90, -3, 550, 57)[None])
    documents = causal & packax.documents(packed_rows)
    # The number of keys is a multiple of 8, which Hopper's bias kernels need.
    eights = causal & packax.documents(packed(90, -3, 150, 29)[None])
    # Rows choose blocks of keys, except the first half of one block of rows, which chooses none.
    chosen = np.random.default_rng(2).random((1, 1, 700, 11)) < 0.4
    chosen[..., :350, :] |= chosen[..., 350:, :]
    chosen[..., 448:480, :] = False
    mapped = causal & packax.masks.block_sparse(chosen, (1, 64))
    pairs = {"x".join(map(str, dims)): dims for dims in head_dims()}
    if unknown := set(arguments.dims or ()) - set(pairs):
        raise SystemExit(f"--dims {' '.join(sorted(unknown))}: of {', '.join(pairs)}")
    for dims in (pairs[name] for name in arguments.dims or pairs):
        good &= run("long", long, 1, 700, 700, 2, 1, dims, "bfloat16")
        good &= run("long", long, 1, 700, 700, 2, 1, dims, "bfloat16", deterministic=True)
        good &= run("tested", tested, 1, 137, 137, 2, 2, dims, "bfloat16")
        for cap in (3.0, 50.0):  # scores above half of the cap, and below
            good &= run(f"cap {cap}", long, 1, 700, 700, 2, 1, dims, "bfloat16", soft_cap=cap)
        good &= run("cap", documents, 3, 213, 213, 4, 2, dims, "bfloat16", True, soft_cap=3.0)
        good &= run("alibi", long, 1, 700, 700, 2, 1, dims, "bfloat16", alibi=True)
        if max(dims) <= 256:
            for kind in ("bfloat16", "float32"):
                good &= run("bias", tested, 1, 137, 137, 2, 2, dims, "bfloat16", bias_dtype=kind)
            good &= run("bias", eights, 1, 272, 272, 2, 1, dims, "bfloat16", bias_dtype="bfloat16")
        # At head dim 64, calls with few tiles use another forward kernel than calls with many.
        good &= run("many heads", long, 1, 700, 700, 48, 12, dims, "bfloat16")
        good &= run("mapped", mapped, 1, 700, 700, 2, 1, dims, "bfloat16")
        good &= decode(dims, "bfloat16", 16)
        if arguments.small:
            continue
        good &= decode(dims, "float16", 0)
        good &= decode((dims[0] - 8, dims[1] - 24), "bfloat16", 3)
        good &= run("packed", documents, 3, 213, 213, 4, 2, dims, "bfloat16", deterministic=True)
        for dtype in ("bfloat16", "float16") if max(dims) <= 128 else ("float16",):
            good &= run("packed", documents, 3, 213, 213, 4, 2, dims, dtype)
            good &= run("causal", causal, 2, 129, 65, 8, 1, dims, dtype)
        for precision in ("tensorfloat32", "highest") if max(dims) <= 256 else ():
            with jax.default_matmul_precision(precision):
                good &= run(precision, documents, 3, 213, 213, 4, 2, dims, "float32")
                good &= decode(dims, "float32", 16)
    print("sanitize.py: ok" if good else "sanitize.py: WRONG results")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
