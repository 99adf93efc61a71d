"""FFI handlers with invalid buffers and attributes: every check, and its whole message.

Guards against a handler that crashes or launches on invalid operands, and against a message that
names the wrong argument. Runs on a fake libcuda (tests/support/cpp): needs the built extension and
a C compiler.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cpp import calls
from cpp.call_frame import EXECUTE, INITIALIZE, Array
from cpp.calls import (
    ALIBI,
    SM90_BLOCKS,
    Sizes,
    backward,
    decode,
    forward,
    of_head_group,
    ragged,
    tangent,
)
from cpp.machine import make_machine, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


def some_heads(make, **more):
    """Calls for heads 6 to 9 of a query with 12."""
    return lambda m: of_head_group(make(m, Sizes(heads=4), **more), 6, 12)


SEPARATE = {"blocks": SM90_BLOCKS, "algorithm": "sm90_separate"}
CALLS = calls.CALLS | {
    "ragged": ragged,
    "tangent": tangent,
    "forward_soft_cap": partial(forward, soft_cap=50.0),
    "backward_soft_cap": partial(backward, soft_cap=50.0),
    "forward_alibi": partial(forward, **ALIBI),
    "backward_alibi": partial(backward, **ALIBI),
    "forward_block_lists": partial(forward, blocks=SM90_BLOCKS),
    "backward_block_lists": partial(backward, **SEPARATE),
    "decode": decode,
    "decode, pages": partial(decode, page_size=16),
    "decode, sinks": partial(decode, sink_batch=2),
    "forward, sinks": partial(forward, sinks=2),
    "backward, sinks": partial(backward, sinks=2),
    "decode, FP8": partial(decode, scale_rows=2),
    "decode, FP8 pages": partial(decode, page_size=16, scale_rows=99),
    "forward, some heads": some_heads(forward),
    "backward, some heads": some_heads(backward),
}
fallback = CALLS["forward_fallback"]
GENERAL = ("forward_fallback", "backward_fallback", "forward_bias", "backward_bias")
VALUE = r'\w+\[[^]]*\]|"[^"]*"|[-\w.]+'
STATED = re.compile(rf"(?:attribute )?(?P<name>\w+) is (?P<value>{VALUE}), expected ")
GIVEN = re.compile(rf"(?P<changes>\w+=(?:{VALUE})(?:, \w+=(?:{VALUE}))*): ")


def table():
    """(call, changes as text, message) of each row of refusals.txt."""
    text = (Path(__file__).parent / "refusals.txt").read_text().replace("\n    ", " ")
    for line in text.splitlines():
        if line.startswith("["):
            names = line[1:-1].split("; ")
        elif given := GIVEN.match(line):
            changes = re.findall(rf"(\w+)=({VALUE})", given["changes"])
            yield from ((name, changes, line[given.end() :]) for name in names)
        elif line and not line.startswith("#"):
            stated = STATED.match(line)
            yield from ((name, [stated.group("name", "value")], line) for name in names)


def kinds_of(machine):
    v = machine.variant
    return {"D": {"bf16": "bfloat16", "f16": "float16"}[v["dtype"]], "QK": v["qk_dim"],
        "V": v["v_dim"]}  # fmt: skip


def read(text, call, name, kinds):
    """The array or attribute that a table's text stands for."""
    if found := re.fullmatch(r"(\w+)\[(.*)\]", text):
        shape = (kinds.get(n) or int(n) for n in found[2].split(", ") if n)
        return Array(kinds.get(found[1], found[1]), tuple(shape))
    dtype, _ = call.attributes[name]
    return dtype, {"string": lambda x: x[1:-1], "float32": float}.get(dtype, int)(text)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory, driver):
    """A machine on which some of the calls have dedicated kernels."""
    folder = tmp_path_factory.mktemp("hopper")
    return make_machine(folder, driver, choose=lambda m: m.has("forward_sm90_block_lists"))


def refusal(machine, call):
    """The failure of both stages, which must not launch anything."""
    before = machine.calls("cuLaunchKernel")
    failures = [machine.run(call, stage) for stage in (INITIALIZE, EXECUTE)]
    assert failures[0] == failures[1] is not None
    assert machine.calls("cuLaunchKernel") == before
    return failures[0]


@pytest.mark.parametrize("where", ["shared_machine", "hopper"])
@pytest.mark.parametrize("name,changes,text", list(table()))
def test_refusal(request, where, name, changes, text):
    machine = request.getfixturevalue(where)
    loaded = machine.calls("cuLibraryLoadData")
    call, kinds = CALLS[name](machine), kinds_of(machine)
    failure = refusal(
        machine, call.change(**{name: read(x, call, name, kinds) for name, x in changes})
    )
    for word, of in (("D[", "D"), ("QK]", "QK"), ("V]", "V")):
        text = text.replace(word, f"{kinds[of]}{word[-1]}")
    assert (failure.code, failure.message) == ("InvalidArgument", f"{call.target}: {text}")
    assert machine.calls("cuLibraryLoadData") == loaded


def sixteen_million_keys(m):
    return CALLS["forward_bias"](m, Sizes(kv_len=(1 << 24) + 1))


UNIMPLEMENTED = [
    (lambda m: decode(m, scale_rows=1, dtype="float32"), "packax_decode_v1: no decode kernel for a "
        "query in float32 over key in float8_e4m3fn, only for bfloat16 and float16"),
    (lambda m: decode(m, scale_rows=1, dims=(24, 64)), "no decode kernel for head dims 24x64 "
        "(query and key x value), which must be multiples of 16"),
    *(
        (lambda m, dims=dims: decode(m, dims=dims), "packax_decode_v1: no decode kernel for head "
            f"dims {dims[0]}x{dims[1]} (query and key x value), which must be multiples of 8")
        for dims in ((60, 64), (64, 7))
    ),
    (lambda m: decode(m, dims=(520, 8)),
        "head dims 520x8 (query and key x value); this build has it for"),
    (lambda m: fallback(m, dims=(8, 520)), "packax_forward_v1: no forward_fallback kernel "
        "for compute capability .* head dims 8x520"),
    (lambda m: fallback(m, dims=(84, 80)),
        "qk_dim is 84, there are kernels for multiples of 8"),
    (lambda m: fallback(m, dims=(64, 20)),
        "v_dim is 20, there are kernels for multiples of 8"),
    *(
        (lambda m, name=name, dims=dims: CALLS[name](m, Sizes(), dims), f"_v1: no {name[:7]}.* "
            f"head dims {dims[0]}x{dims[1]} (query and key x value)")
        for name in GENERAL[2:]
        for dims in ((264, 64), (256, 264), (512, 512))
    ),
    *(
        (some_heads(CALLS[name], blocks=None, scales=0, slopes=0, soft_cap=2048.0), "first_head "
            "and heads are 6 and 4, but the fallback kernels take all of the query's 12")
        for name in GENERAL
    ),
    (sixteen_million_keys,
        "bias has rows of 16777217 keys, there are kernels for 16777216 at most"),
    (lambda m: tangent(m).change(bias=Array("float32", (1, 1, 1, 700))),
        "bias or dropout_threshold"),
    (lambda m: tangent(m).change(first_head=("int32", 0), heads=("int32", 2)),
        "first_head and heads"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["shared_machine", "hopper"])
@pytest.mark.parametrize("make,text", UNIMPLEMENTED)
def test_what_has_no_kernel(request, where, make, text):
    failure = refusal(machine := request.getfixturevalue(where), make(machine))
    assert failure.code == "Unimplemented"
    assert re.search(re.escape(text).replace(r"\.\*", ".*"), failure.message), failure.message


@pytest.mark.parametrize("make,result", [(forward, "out"), (backward, "dq")])
def test_other_heads_elsewhere(shared_machine, make, result):
    call = some_heads(make)(shared_machine)
    init = call.operands["init"]
    call.operands["init"] = replace(init, address=0x7700)
    assert refusal(shared_machine, call).message == (
        f"{call.target}: init is at 0x7700 and {result} at {init.address:#x}, "
        "expected one place for both"
    )


def test_other_heads_of_a_gradient_that_is_not_needed(shared_machine):
    """An init without a result, whose memory it would share, is rejected."""
    call = backward(shared_machine, Sizes(heads=4), algorithm="sm90_separate", needs_grad=2)
    call = of_head_group(call, 6, 12, is_first_group=1)
    assert call.results["dq"].shape == call.operands["init"].shape == (0,)
    call.operands["init"] = replace(call.operands["dout"], address=call.results["dq"].address)
    failure = refusal(shared_machine, call)
    assert failure.code == "InvalidArgument"
    assert failure.message.startswith(f"{call.target}: init is at ")


def test_wrong_number_of_operands(shared_machine):
    call = forward(shared_machine)
    call.operands.popitem()
    failure = shared_machine.run(call)
    assert failure.code == "InvalidArgument"
    assert "Wrong number of arguments: expected 23 but got 22" in failure.message
