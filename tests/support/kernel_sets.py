"""The kernels of each backward, and the grid of each kernel."""

from math import ceil, prod

MULTIPROCESSORS = 10  # of the fake devices
BACKWARD = {
    "portable": "delta dkdv dq",
    "fallback": "delta_fallback dkdv_fallback dq_fallback",
    "bias": "delta_fallback dkdv_bias dq_bias dbias",
    "bias_alone": "delta_fallback dkdv_bias_alone dq_bias_alone dbias_alone",
    "dbias_of_pairs": "delta_fallback dkdv_dbias_alone dq_of_dbias_alone",
    "sm80": "preprocess sm80 postprocess_sm80",
    "sm80_soft_cap": "preprocess sm80_soft_cap postprocess_sm80",
    "sm90_dbias": "preprocess_dbias dkdv_sm90_dbias dq_of_dbias_alone",
} | {  # on Hopper
    f"fused{x}": f"preprocess sm90{x} postprocess"
    for x in ("", "_soft_cap", "_alibi", "_short", "_pairs")
} | {
    "fused_dropout": "preprocess_dropout sm90_dropout postprocess",
    "separate_dropout": "preprocess_dropout dkdv_sm90_dropout dq_sm90_dropout",
} | {
    f"separate{x}": f"preprocess dkdv_sm90{x} dq_sm90{x}"
    for x in ("", "_soft_cap", "_block_lists", "_parts")
} | {
    f"sm90{x}_bias": f"preprocess_dbias dkdv_sm90{x}_bias dq_sm90{x}_bias shared{x}_dbias sum_dbias"
    for x in ("", "_float32")
}  # fmt: skip


def forward_programs(kernel):
    """The most programs of a forward kernel for Hopper."""
    return MULTIPROCESSORS * (3 if kernel.endswith("short") else 1)


def forward_tiles(f, block):
    """Its tiles, of `block` rows."""
    return f["heads"] * ceil(f["q_len"] / block) * f["batch"] * ceil(f["v_dim"] / 256)


def grid_of(kernel, f, block):
    """The grid of a kernel with such a block, for a call with these fields."""

    def tiles(length, of=128):
        return ceil(f[length] / of) * f["batch"]

    if kernel.startswith(("documents", "blocks")):
        rows = {"documents_rows": f["q_len"], "blocks_rows": ceil(f["q_len"] / 64)}
        keys = {"blocks_keys": ceil(f["kv_len"] / 64)}
        keys["blocks_order"] = ceil(max(f["q_len"], f["kv_len"]) / 128)
        return [ceil((rows | keys).get(kernel, f["kv_len"]) / block), f["batch"]]
    if kernel.startswith("forward_sm90"):
        return [min(forward_programs(kernel), forward_tiles(f, block))]
    if "process" in kernel:
        return [f["heads"] * f["batch"] * 64 * ceil(f["q_len"] / 64) // block]
    if "delta" in kernel:
        return [f["heads"] * tiles("q_len", block)]
    if kernel.startswith("backward_dq_sm90") and not kernel.endswith("parts"):
        return [min(MULTIPROCESSORS, f["heads"] * tiles("q_len", block))]
    if kernel == "backward_sum_dbias":
        return [ceil(prod(f["dbias"]) / block)]
    if kernel.startswith("backward_shared"):
        planes = f["dbias_parts"] * prod(f["dbias"][:2])
        return [planes * ceil(f["q_len"] / (2 * block)) * ceil(f["kv_len"] / block)]
    if kernel.startswith("backward_dbias"):
        planes, rows = prod(f["dbias"][:2]), f["dbias"][2]
        return [planes * ceil(rows / block) * ceil(f["kv_len"] / block)]
    if kernel == "backward_sm90_pairs":
        return [f["kv_heads"] * f["batch"]]
    if kernel.startswith(("backward_dkdv", "backward_sm")):
        halves = 2 if kernel.endswith("parts") else 1
        return [f["kv_heads"] * tiles("kv_len") * (128 // block) * halves]
    return [f["heads"] * tiles("q_len") * (128 // block)]
