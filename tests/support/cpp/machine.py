"""A fresh copy of packax._ext on a fake driver, for the tests of the C++ host code."""

import ctypes
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import pytest
from cpp.call_frame import EXECUTE, INITIALIZE, Xla

HERE = Path(__file__).resolve().parent
SPEC = importlib.util.find_spec("packax._ext") if importlib.util.find_spec("packax") else None
COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
needs_extension = pytest.mark.skipif(SPEC is None, reason="packax._ext is not built")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake libcuda")

ROWS = "kv_start kv_end q_ids kv_ids q_pos kv_pos q_blocks q_order"
KEYS = "kv_start kv_end q_ids kv_ids q_pos kv_pos q_blocks kv_blocks kv_order"
FP8 = ("decode_fp8", "decode_tall_fp8", "decode_fp8_pages", "decode_tall_fp8_pages")
# The arguments of kernels in order, as in docs/internals/kernels.md: pointers first. A suffix gives
# the type of an argument that is neither a pointer nor an int32: t(ensor map), f(loat).
POINTERS = {
    "forward": f"query key value out lse sinks {ROWS}",
    "forward_sm90": f"query:t key:t value:t out:t lse sinks {ROWS} counter",
    "backward_preprocess": "out dout lse dlse kv_start kv_end delta row_delta lse2 lo hi dq_sum",
    "backward_sm90": "query:t key:t value:t dout:t lse2:t delta:t lo:t hi:t dk:t dv:t dq_sum "
    "q_ids kv_ids q_pos kv_pos q_blocks kv_blocks kv_order",
    "backward_postprocess": "dq_sum dq",
    "backward_sm80": "query key value dout lse2 delta lo hi dq_sum dk dv q_ids kv_ids q_pos kv_pos "
    "q_blocks kv_blocks kv_order",
    "backward_postprocess_sm80": "dq_sum dq",
    "forward_sm80_soft_cap": f"query key value out lse sinks {ROWS}",
    "backward_sm80_soft_cap": "query key value dout lse2 delta lo hi dq_sum dk dv q_ids kv_ids "
    "q_pos kv_pos q_blocks kv_blocks kv_order",
    "backward_dkdv_sm90": "query:t key:t value:t dout:t lse2:t delta:t lo:t hi:t dk:t dv:t "
    "q_ids kv_ids q_pos kv_pos q_blocks kv_blocks kv_order",
    "backward_dq_sm90": "query:t key:t value:t dout:t dq:t lse2 delta kv_start kv_end q_ids kv_ids "
    "q_pos kv_pos q_blocks q_order counter",
    "backward_delta": "out dout dlse delta row_delta kv_start kv_end",
    "backward_dkdv": "query key value dout lse delta dk dv kv_start kv_end q_ids kv_ids q_pos "
    "kv_pos q_blocks kv_blocks kv_order",
    "backward_dq": "query key value dout lse delta dq kv_start kv_end q_ids kv_ids q_pos kv_pos "
    "q_blocks q_order",
    **{
        f"{kernel}_fallback": f"{pointers}_block_lists scales slopes q_bias_pos kv_bias_pos"
        for kernel, pointers in (
            ("forward", f"query key value out lse row_max sinks {ROWS} block_mask q"),
            ("backward_dkdv", f"query key value dout lse delta dk dv {KEYS} block_mask kv"),
            ("backward_dq", f"query key value dout lse delta dq score_grads {ROWS} block_mask q"),
        )
    },
    "backward_delta_fallback": "out dout dlse delta row_delta kv_start kv_end",
    "documents_init": "kv_ids workspace",
    "documents_runs": "kv_ids kv_pos workspace",
    "documents_rows": "q_ids kv_ids q_pos kv_pos workspace lo hi segment_checked",
    "blocks_rows": "kv_start kv_end segment_checked q_blocks",
    "blocks_keys": "q_blocks kv_blocks",
    "blocks_order": "q_blocks kv_blocks q_order q_order_192 kv_order",
    **dict.fromkeys(
        ("decode", "decode_tall"),
        "query key value kv_start kv_end block_table workspace partial sums",
    ),
    **dict.fromkeys(
        FP8,
        "query key value kv_start kv_end block_table key_scale value_scale workspace partial sums",
    ),
    "decode_combine": "partial sums sinks kv_start kv_end workspace out lse",
    "ragged_sm90": "query:t key:t value:t out lse sinks kv_start kv_end block_table workspace "
    "counter",
}
BIAS_POINTERS = "bias dropout_streams dropout_rows"
for _name in ("forward", "backward_dkdv", "backward_dq"):
    POINTERS[f"{_name}_bias"] = f"{POINTERS[f'{_name}_fallback']} {BIAS_POINTERS}"
POINTERS["backward_dbias"] = (
    f"query key value dout lse delta dbias {ROWS.removesuffix(' q_order')} block_mask scales "
    f"slopes q_bias_pos kv_bias_pos {BIAS_POINTERS}"
)
ALONE = ("forward_bias", "backward_dkdv_bias", "backward_dq_bias", "backward_dbias")
SCORE_POINTERS = [
    "row_max",
    "score_grads",
    "block_mask",
    "q_block_lists",
    "kv_block_lists",
    "scales",
    "slopes",
]
SCORE_POINTERS += ["q_bias_pos", "kv_bias_pos", "dropout_streams", "dropout_rows"]
POINTERS |= {
    f"{kernel}_alone": " ".join(x for x in POINTERS[kernel].split() if x not in SCORE_POINTERS)
    for kernel in ALONE
}
POINTERS["backward_dkdv_dbias_alone"] = POINTERS["backward_dkdv_bias_alone"].replace(
    " dv ", " dv dbias "
)
POINTERS["backward_dq_of_dbias_alone"] = "key dbias dq q_blocks q_order"
SOFT_CAP = ("forward_sm90", "backward_sm90", "backward_dkdv_sm90", "backward_dq_sm90")
POINTERS |= {f"{kernel}_soft_cap": POINTERS[kernel] for kernel in SOFT_CAP}
BLOCK_SPARSE = {
    "forward_sm90": "block_mask q_block_lists",
    "backward_dkdv_sm90": "block_mask kv_block_lists",
    "backward_dq_sm90": "block_mask q_block_lists",
}
POINTERS |= {
    f"{kernel}_block_lists": f"{POINTERS[kernel]} {more}" for kernel, more in BLOCK_SPARSE.items()
}
POINTERS["forward_tangent"] = f"query key value out lse tq tk tv tout tlse {ROWS}"
POINTERS["forward_tangent_fallback"] = (
    f"{POINTERS['forward_tangent']} block_mask q_block_lists scales slopes q_bias_pos kv_bias_pos"
)
POINTERS["forward_tangent_sm90"] = (
    f"query:t key:t value:t out:t lse tq:t tk:t tv:t tout:t tlse {ROWS}"
)
POINTERS["backward_dkdv_sm90_parts"] = POINTERS["backward_dkdv_sm90"]
POINTERS["backward_dq_sm90_parts"] = POINTERS["backward_dq_sm90"].removesuffix(" counter")
POINTERS["forward_sm90_low_occupancy"] = POINTERS["forward_sm90"]
POINTERS["forward_sm90_short"] = POINTERS["forward_sm90"]
POINTERS["forward_sm90_max_logits"] = POINTERS["forward_sm90"].replace(" lse", " lse row_max")
for _dtype in ("", "_float32"):
    POINTERS[f"forward_sm90{_dtype}_bias"] = f"{POINTERS['forward_sm90']} bias:t"
    POINTERS[f"backward_dkdv_sm90{_dtype}_bias"] = POINTERS["backward_dkdv_sm90"].replace(
        " dv:t ", " dv:t top:t bias:t "
    )
    POINTERS[f"backward_dq_sm90{_dtype}_bias"] = POINTERS["backward_dq_sm90"].replace(
        " delta ", " delta top bias:t "
    )
    POINTERS[f"backward_shared{_dtype}_dbias"] = (
        "query:t key:t value:t dout:t lse2:t delta:t top:t bias dbias_sums "
        "kv_start kv_end q_ids kv_ids q_pos kv_pos q_blocks"
    )
POINTERS["backward_sum_dbias"] = "dbias dbias_sums"
POINTERS["backward_preprocess_dbias"] = POINTERS["backward_preprocess"].replace(" hi ", " hi top ")
POINTERS["backward_dkdv_sm90_dbias"] = POINTERS["backward_dkdv_sm90"].replace(
    " dv:t ", " dv:t top:t bias:t dbias:t "
)
ALIBI = ("forward_sm90", "backward_sm90")
POINTERS |= {f"{kernel}_alibi": f"{POINTERS[kernel]} slopes" for kernel in ALIBI}
ATTENTION = "scale:f mask_mode batch mask_batch q_len kv_len heads kv_heads"
ROW_ATTENTION = f"{ATTENTION} row_heads"  # for kernels without tensor maps of rows
DECODE = (
    "scale:f soft_cap:f batch q_len kv_len pages page_size table_width heads kv_heads "
    "qk_eighths v_eighths splits shares tile_rows has_tall chunks_elsewhere"
)
FALLBACK_SIZES = (
    "batch mask_batch scales_batch bias_batch block_mask_batch block_mask_heads q_block kv_block "
    "q_len kv_len heads kv_heads qk_dim v_dim"
)
SCALARS = {
    "forward_fallback": f"scale:f soft_cap:f mask_mode {FALLBACK_SIZES}",
    "backward_dkdv_fallback": f"scale:f soft_cap:f mask_mode {FALLBACK_SIZES}",
    "backward_dq_fallback": f"scale:f soft_cap:f mask_mode has_score_grads {FALLBACK_SIZES}",
    "backward_delta_fallback": "has_dlse batch mask_batch q_len heads v_dim",
    "forward": ROW_ATTENTION,
    "forward_sm90": ATTENTION,
    "forward_sm90_low_occupancy": ATTENTION,
    "forward_sm90_short": ATTENTION,
    "forward_sm90_max_logits": ATTENTION,
    **dict.fromkeys(
        (
            *(f"forward_sm90{x}_bias" for x in ("", "_float32")),
            *(f"backward_dq_sm90{x}_bias" for x in ("", "_float32")),
            *(f"backward_dkdv_sm90{x}bias" for x in ("_", "_float32_", "_d")),
        ),
        ATTENTION.replace("mask_batch", "mask_batch bias_axes"),
    ),
    **dict.fromkeys(
        (f"backward_shared{x}_dbias" for x in ("", "_float32")),
        ATTENTION.replace("mask_mode", "mask_mode bias_axes dbias_parts"),
    ),
    "backward_sum_dbias": "bias_kind bias_axes dbias_parts batch q_len kv_len heads",
    "backward_preprocess": "has_dlse clear_dq batch mask_batch q_len heads row_heads v_dim",
    "backward_preprocess_dbias": "has_dlse clear_dq batch mask_batch q_len heads row_heads v_dim",
    "backward_sm90": ATTENTION,
    "backward_dkdv_sm90": ATTENTION,
    "backward_dq_sm90": ATTENTION,
    "backward_dkdv_sm90_parts": ATTENTION,
    "backward_dq_sm90_parts": ATTENTION,
    "backward_postprocess": "scale:f q_len heads row_heads qk_dim",
    "backward_sm80": ROW_ATTENTION,
    "backward_postprocess_sm80": "scale:f q_len heads row_heads",
    **dict.fromkeys(
        ("forward_sm80_soft_cap", "backward_sm80_soft_cap"),
        ROW_ATTENTION.replace("scale:f", "scale:f soft_cap:f"),
    ),
    "backward_delta": "has_dlse batch mask_batch q_len heads row_heads",
    "backward_dkdv": ROW_ATTENTION,
    "backward_dq": ROW_ATTENTION,
    "documents_init": "kv_len table_size",
    "documents_runs": "compare_positions kv_len table_size table_shift",
    "documents_rows": "compare_positions q_len kv_len table_size table_shift search_steps",
    "blocks_rows": "q_len",
    "blocks_keys": "q_len kv_len",
    "blocks_order": "q_len kv_len",
    "decode": DECODE,
    "decode_tall": DECODE,
    **dict.fromkeys(FP8, f"{DECODE} scale_rows bfloat16_query"),
    "decode_combine": "has_sinks batch sink_batch q_len kv_len heads v_eighths splits tile_rows "
    "chunks_elsewhere room",
    "ragged_sm90": "scale:f has_sinks q_len pages page_size table_width heads kv_heads v_eighths "
    "room",
}
BIAS_SCALARS = "bias_kind bias_axes dropout_threshold dropout_rows_batch"
SCALARS |= {
    kernel: f"scale:f soft_cap:f inverse_keep:f mask_mode {flag}{BIAS_SCALARS} {FALLBACK_SIZES}"
    for kernel, flag in (
        ("forward_bias", ""),
        ("backward_dkdv_bias", ""),
        ("backward_dq_bias", "has_score_grads "),
        ("backward_dbias", ""),
    )
}
SCALARS |= {
    f"{kernel}_alone": "scale:f mask_mode bias_axes batch mask_batch q_len kv_len heads "
    "kv_heads qk_dim v_dim"
    for kernel in (*ALONE, "backward_dkdv_dbias")
}
SCALARS["backward_dq_of_dbias_alone"] = (
    "scale:f batch mask_batch q_len kv_len heads kv_heads qk_dim"
)
SCALARS |= {f"{kernel}_soft_cap": ATTENTION.replace(" ", " soft_cap:f ", 1) for kernel in SOFT_CAP}
BLOCK_MASK_SIZES = "mask_batch block_mask_batch block_mask_heads q_block kv_block"
SCALARS |= {
    f"{kernel}_block_lists": ATTENTION.replace("mask_batch", BLOCK_MASK_SIZES)
    for kernel in BLOCK_SPARSE
}
SCALARS["forward_tangent"] = ATTENTION
SCALARS["forward_tangent_sm90"] = ATTENTION
SCALARS["forward_tangent_fallback"] = (
    f"scale:f soft_cap:f mask_mode has_tq has_tk has_tv {FALLBACK_SIZES}"
)
SCALARS |= {f"{kernel}_alibi": ATTENTION for kernel in ALIBI}
SCALARS |= {
    kernel: re.sub(r"\bmask_batch\b", "mask_batch sink_batch", names)
    for kernel, names in SCALARS.items()
    if kernel.startswith("forward") and "tangent" not in kernel
}


def layout(kernel):
    """The parameter list as the fake driver takes it, including Triton's two scratch pointers."""
    letters = [name.partition(":")[2] or "p" for name in POINTERS[kernel].split()]
    letters += [name.partition(":")[2] or "i" for name in SCALARS[kernel].split()]
    return "".join(letters) + "pp"


def arguments(kernel):
    """The names of a kernel's arguments, in order."""
    return re.sub(":[a-z]", "", f"{POINTERS[kernel]} {SCALARS[kernel]}").split()


SHORT_KEYS = 1024  # kShortKeys, kShortRowKeys in csrc/launch/select_attention.cc
SM90 = {
    "forward": ["forward_sm90"],
    "forward_low_occupancy": ["forward_sm90_low_occupancy"],  # at head dim 64, with few tiles
    "forward_short": ["forward_sm90_short"],  # at head dim 64, with few keys
    "backward": ["backward_preprocess", "backward_sm90", "backward_postprocess"],
    # deterministic, or only some of the gradients; up to head dim 256
    "backward_separate": ["backward_preprocess", "backward_dkdv_sm90", "backward_dq_sm90"],
    # at head dim 512
    "backward_parts": [
        "backward_preprocess",
        "backward_dkdv_sm90_parts",
        "backward_dq_sm90_parts",
    ],
    # of a plain forward, along query, key and value
    "forward_tangent": ["forward_tangent_sm90"],
    # with a soft cap as the only option
    "forward_soft_cap": ["forward_sm90_soft_cap"],
    "backward_soft_cap": ["backward_preprocess", "backward_sm90_soft_cap", "backward_postprocess"],
    "backward_separate_soft_cap": [
        "backward_preprocess",
        "backward_dkdv_sm90_soft_cap",
        "backward_dq_sm90_soft_cap",
    ],
    # with the result row_max as the only option
    "forward_max_logits": ["forward_sm90_max_logits"],
    # with a bias array that has a row for every query, as the only option
    "forward_sm90_bias": ["forward_sm90_bias"],
    # the same with a float32 bias; the backward with either
    "forward_sm90_float32_bias": ["forward_sm90_float32_bias"],
    **{
        f"backward_sm90{x}_bias": [
            "backward_preprocess_dbias",
            f"backward_dkdv_sm90{x}_bias",
            f"backward_dq_sm90{x}_bias",
            f"backward_shared{x}_dbias",
            "backward_sum_dbias",
        ]
        for x in ("", "_float32")
    },
    # with a bias array that has an element for every logit, and its gradient
    "backward_sm90_dbias": [
        "backward_preprocess_dbias",
        "backward_dkdv_sm90_dbias",
        "backward_dq_of_dbias_alone",
    ],
    # with ALiBi of indices as the only option
    "forward_alibi": ["forward_sm90_alibi"],
    "backward_alibi": ["backward_preprocess", "backward_sm90_alibi", "backward_postprocess"],
    # with a block mask as the only option
    "forward_block_lists": ["forward_sm90_block_lists"],
    "backward_block_lists": [
        "backward_preprocess",
        "backward_dkdv_sm90_block_lists",
        "backward_dq_sm90_block_lists",
    ],
}
KERNELS = {
    "forward": ["forward"],
    "backward": ["backward_delta", "backward_dkdv", "backward_dq"],
    "forward_fallback": ["forward_fallback"],
    "backward_fallback": [
        "backward_delta_fallback",
        "backward_dkdv_fallback",
        "backward_dq_fallback",
    ],
    "forward_bias": ["forward_bias"],
    "backward_bias": [
        "backward_delta_fallback",
        "backward_dkdv_bias",
        "backward_dq_bias",
        "backward_dbias",
    ],
    "forward_bias_alone": ["forward_bias_alone"],
    "backward_bias_alone": [
        "backward_delta_fallback",
        "backward_dkdv_bias_alone",
        "backward_dq_bias_alone",
        "backward_dbias_alone",
    ],
    # with a bias that has an element for every logit
    "backward_dbias_of_pairs": [
        "backward_delta_fallback",
        "backward_dkdv_dbias_alone",
        "backward_dq_of_dbias_alone",
    ],
    "documents": ["documents_init", "documents_runs", "documents_rows"],
    "blocks": ["blocks_rows", "blocks_keys", "blocks_order"],
    "decode": ["decode", "decode_combine"],
}

SM80_BACKWARD = ["backward_preprocess", "backward_sm80", "backward_postprocess_sm80"]

MULTIPROCESSORS = 10  # of the fake devices
DRIVER = 12040  # the CUDA version of the fake driver

ELF = b"\x7fELF\x02\x01"  # 64 bits, little endian
EM_CUDA = 190

_serial = itertools.count()


def compile_driver(folder, *flags):
    path = folder / "fake_libcuda.so"
    source = HERE / "fake_libcuda.c"
    more = os.environ.get("CFLAGS", "").split()  # such as a sanitizer's
    command = [COMPILER, "-O1", "-shared", "-fPIC", *more, *flags, source, "-o", path]
    subprocess.run(command, check=True)
    return path


@functools.cache
def outside_cubins():
    """The parts of the extension's file that are neither cubins nor zeros, [(offset, bytes)], and
    the number of cubins."""
    image = Path(SPEC.origin).read_bytes()
    pieces, count, end = [], 0, 0
    begin = image.find(ELF, 1)
    while begin >= 0:
        after = begin + len(ELF)
        if struct.unpack_from("<H", image, begin + 18)[0] == EM_CUDA:
            # Of the segment and section headers: offset, size of an entry, number of entries.
            segments, sections, *sizes = struct.unpack_from("<QQ6xHHHH", image, begin + 32)
            after = begin + max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            pieces.append((end, image[end:begin]))
            end, count = after, count + 1
        begin = image.find(ELF, after)
    pieces.append((end, image[end:]))
    return [(at, piece) for at, piece in pieces if piece.strip(b"\0")], count


def copy_without_cubins(copy):
    """Leaves holes for the cubins: the fake driver does not read them, and 65 MB per test fill a
    disk."""
    with copy.open("wb") as file:
        for offset, piece in outside_cubins()[0]:
            file.seek(offset)
            file.write(piece)


def load_extension(folder, libcuda):
    """Loads a copy of the extension, with separate globals: nothing is opened or loaded yet."""
    copy = folder / Path(SPEC.origin).name
    copy_without_cubins(copy)
    name = f"packax_copy{next(_serial)}._ext"
    loader = importlib.machinery.ExtensionFileLoader(name, str(copy))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    # PACKAX_LIBCUDA is read once, when the driver is first used, which driver() does.
    before = os.environ.get("PACKAX_LIBCUDA")
    os.environ["PACKAX_LIBCUDA"] = str(libcuda)
    try:
        module.driver()
    finally:
        os.environ.pop("PACKAX_LIBCUDA")
        if before is not None:
            os.environ["PACKAX_LIBCUDA"] = before
    return module


@dataclass
class Machine:
    ext: object
    cuda: ctypes.CDLL
    xla: Xla
    variant: dict  # the portable forward for device 0; its dtype and head dims are those of calls

    def has(self, names):
        """Whether the build has all kernels of an entry of SM90."""
        return self.has_kernels(SM90[names])

    def has_kernels(self, names):
        v = self.variant
        dims = (v["dtype"], v["qk_dim"], v["v_dim"])
        return all(self.ext.find(name, v["cc"], *dims, DRIVER) is not None for name in names)

    def has_sm80(self):
        return self.has_kernels(SM80_BACKWARD) and not self.has_sm90()

    def has_sm90(self):
        return self.has("forward")

    def has_separate(self):
        return self.has("backward_separate")

    def kernels(self, name):
        """The kernels that a call of this kind launches on device 0, in order."""
        if name == "backward" and self.has_sm80():
            return SM80_BACKWARD
        return (SM90 if self.has_sm90() else {}).get(name) or KERNELS[name]

    def forward_of(self, s):
        """The Hopper kernel for these sizes."""
        if s.kv_len <= SHORT_KEYS and self.has("forward_short"):
            return "forward_sm90_short"
        few = s.heads * s.batch * ceil(s.q_len / 192) < MULTIPROCESSORS
        return (
            "forward_sm90_low_occupancy"
            if few and self.has("forward_low_occupancy")
            else "forward_sm90"
        )

    def fail(self, function, code):
        self.cuda.fake_fail(function.encode(), code)

    def calls(self, function):
        return self.cuda.fake_calls(function.encode())

    def record(self):
        """Launches and memsets, in order."""
        return [json.loads(line) for line in self.cuda.fake_record().decode().splitlines()]

    def launches(self):
        return [r for r in self.record() if "kernel" in r]

    def run(self, call, stage=EXECUTE):
        """Runs a handler. Returns None or its Failure."""
        capsule = self.ext.registrations()[call.target][
            "initialize" if stage == INITIALIZE else "execute"
        ]
        return self.xla.call(
            capsule, stage, call.operands.values(), call.results.values(), call.attributes
        )

    def row(self, kernel, device_cc, driver=DRIVER):
        v = self.variant
        dtype = "e4m3" if "_fp8" in kernel else v["dtype"]
        dims = (dtype, v["qk_dim"], v["v_dim"])
        attention = kernel.startswith(("forward", "backward", "decode", "ragged"))
        name = self.ext.find(kernel, device_cc, *(dims if attention else ("any", 0, 0)), driver)
        return next(r for r in self.ext.variants() if r["name"] == name)


def make_machine(folder, driver, ccs=(None,), choose=lambda machine: True):
    """A machine for the first variant of the forward that the fake driver loads and for which
    `choose(machine)` is true; skips the test if there is none. `ccs`: compute capabilities of the
    devices, None for the variant's."""
    shutil.copy(driver, folder / "libcuda.so.1")
    ext = load_extension(folder, folder / "libcuda.so.1")
    cuda = ctypes.CDLL(str(folder / "libcuda.so.1"))
    cuda.fake_record.restype = ctypes.c_char_p
    forwards = [v for v in ext.variants() if v["kernel"] == "forward" and v["driver"] <= DRIVER]
    machines = (Machine(ext, cuda, Xla(), v) for v in forwards)
    machine = next((m for m in machines if choose(m)), None)
    if machine is None:
        pytest.skip("this build has no such kernel; with PACKAX_ARCHS=all it has")
    variant = machine.variant
    for i, cc in enumerate(ccs):
        cuda.fake_add_device(f"Fake GPU {i}".encode(), cc or variant["cc"], 232448)
    for kernel in POINTERS:
        cuda.fake_set_layout(kernel.encode(), layout(kernel).encode())
    return machine
