"""Calls of forward and backward for some of the query's heads launch the same kernels as a call
with only those heads; only the address and the stride of rows differ.

Guards against reading or writing another head, a wrong row stride, and results outside the array of
the other heads. Runs on a fake libcuda (tests/support/cpp): needs the built extension and a C
compiler.
"""

from dataclasses import replace

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import Sizes, backward, forward, of_head_group
from cpp.machine import arguments, make_machine, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

S = Sizes(heads=4, kv_heads=2)
FIRST, ALL = 6, 12
ROWS = ("query", "out", "dout", "dq")
MAKERS = {
    "forward": forward,
    "backward": backward,
    "backward apart": lambda m, s=S: backward(m, s, algorithm="sm90_separate"),
    "backward portable": lambda m, s=S: backward(m, s, algorithm="portable"),
    "backward of dq alone": lambda m, s=S: backward(m, s, algorithm="sm90_separate", needs_grad=1),
    "backward of dk and dv alone": lambda m, s=S: backward(
        m, s, algorithm="sm90_separate", needs_grad=2
    ),
}


def moved(call):
    """The plain call, with its rows at the address of the first head."""

    def at_first_head(arrays):
        return {
            name: replace(a, address=a.address + 2 * FIRST * a.shape[3])
            if name in ROWS and a.shape != (0,)
            else a
            for name, a in arrays.items()
        }

    return replace(call, operands=at_first_head(call.operands), results=at_first_head(call.results))


def widened(params):
    """Converts a launch's arguments for only those heads to those for the same heads among ALL."""
    params = dict(params)
    if "row_heads" in params:
        assert params["row_heads"] == S.heads
        params["row_heads"] = ALL
    for name in ROWS:
        if isinstance(params.get(name), dict):
            columns, length, heads, batch = params[name]["sizes"]
            row = columns * ALL
            last = ((batch - 1) * length + length - 1) * row + heads * columns
            params[name] = {
                **params[name],
                "byte_strides": [2 * row, 2 * columns, 2 * row * length],
                "strides": [row * length, columns, row, 1],
                "bit21": int(2 * last - 1 >= 128 * 1024),
            }
    return params


@pytest.mark.parametrize("is_first_group", [0, 1])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", ["sm90", "portable"])
@pytest.mark.parametrize("s", [S, replace(S, batch=3, mask_batch=1, q_len=1, kv_len=1)])
def test_launches_are_those_of_the_heads_alone(request, kind, maker, is_first_group, s):
    machine = request.getfixturevalue(kind)
    plain = MAKERS[maker](machine, s)
    assert machine.run(moved(plain)) is None
    want = machine.launches()
    clears = [r for r in machine.record() if "memset" in r]
    machine.cuda.fake_clear()
    call = of_head_group(plain, FIRST, ALL, is_first_group)
    assert machine.run(call, INITIALIZE) is None
    assert machine.run(call) is None
    got = machine.launches()
    assert [r for r in machine.record() if "memset" in r] == clears
    assert len(want) == len(got) > 0
    differing = 0
    for a, b in zip(want, got, strict=True):
        names = arguments(a["kernel"])
        params = [dict(zip(names, x["params"], strict=False)) for x in (a, b)]
        assert params[1] == widened(params[0]), a["kernel"]
        assert {**a, "params": b["params"]} == b
        differing += params[1] != params[0]
    assert differing > 0


def test_the_edge_of_small_tensors(tmp_path, driver):
    """Sizes at and around 128 KiB, counted up to the last element of the call's heads, with rows
    that are not contiguous."""
    machine = make_machine(tmp_path, driver, choose=lambda m: m.has_sm90())
    dim = machine.variant["qk_dim"]
    rows = 128 * 1024 // (2 * dim * ALL)
    for q_len in (rows, rows + 1, rows + 2):
        s = Sizes(batch=1, mask_batch=1, q_len=q_len, kv_len=64, heads=1, kv_heads=1)
        machine.cuda.fake_clear()
        assert machine.run(of_head_group(forward(machine, s), 0, ALL)) is None
        (launch,) = machine.launches()
        last = 2 * dim * ALL * (q_len - 1) + 2 * dim - 1
        assert launch["params"][0]["bit21"] == (last >= 128 * 1024)
