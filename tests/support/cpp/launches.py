"""The launches that tests expect of a handler (kernels in order, grids, every argument), and the
sizes that they use."""

import struct
from math import ceil

from cpp.calls import Sizes
from cpp.machine import arguments

SIZES = [
    Sizes(),
    Sizes(batch=3, mask_batch=1, q_len=1, kv_len=1, heads=4, kv_heads=4),
    Sizes(batch=1, mask_batch=1, q_len=128, kv_len=129, heads=8, kv_heads=1),
    Sizes(batch=5, mask_batch=5, q_len=1 << 20, kv_len=(1 << 20) + 1, heads=2, kv_heads=1),
]


def expect_launches(machine, call, scalars, grids):
    """Runs `call` and checks that it launches exactly the kernels of `grids`, in this order.

    `grids`: kernel -> grid as a function of its block. `scalars`: the values of arguments that are
    not operands or results, for all kernels or by kernel."""
    assert machine.run(call) is None
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == list(grids)
    addresses = call.addresses()
    dims = {  # mask kernels have none
        name: call.operands[of].shape[3]
        for name, of in (("qk_dim", "query"), ("v_dim", "value"))
        if of in call.operands
    }
    addresses["delta"] = addresses.get("workspace")  # its first section
    for name in ("row_max", "row_delta"):
        if name in call.results and call.results[name].shape == (0,):
            addresses[name] = 0  # the kernel writes it only if it has an address
    sinks = call.operands.get("sinks")
    sink_batch = sinks.shape[0] if sinks is not None and sinks.shape != (0,) else 0
    for launch, (kernel, grid) in zip(launches, grids.items(), strict=True):
        row = machine.row(kernel, machine.variant["cc"])
        assert launch["grid"] == [*grid(row["block"]), 1, 1][:3], kernel
        assert launch["block"] == [row["threads"], 1, 1]
        assert launch["shared"] == row["shared"]
        assert launch["stream"] == machine.xla.stream
        values = {"sink_batch": sink_batch, **dims, **addresses, **scalars.get(kernel, scalars)}
        names = arguments(kernel)
        got = dict(zip(names, launch["params"], strict=False))
        assert got == {name: values[name] for name in names}, kernel
        assert launch["params"][len(names) :] == [0, 0]  # Triton's scratch pointers


def kernels_of(machine, call):
    """The names of the kernels that `call` launches, in order."""
    machine.cuda.fake_clear()
    assert machine.run(call) is None
    return [launch["kernel"] for launch in machine.launches()]


def attention(s, scale, mask_mode, has_dlse=0):
    return {
        "scale": struct.unpack("f", struct.pack("f", scale))[0],
        "mask_mode": mask_mode,
        "has_dlse": has_dlse,
        "batch": s.batch,
        "mask_batch": s.mask_batch,
        "q_len": s.q_len,
        "kv_len": s.kv_len,
        "heads": s.heads,
        "kv_heads": s.kv_heads,
        "row_heads": s.heads,
    }


def expect_portable_backward(machine, call, s, has_dlse=1, needs_grad=3):
    grids = {
        "backward_delta": lambda r: [ceil(s.q_len / r) * s.heads * s.batch],
        "backward_dkdv": lambda n: [s.kv_heads * s.batch * ceil(s.kv_len / 128) * (128 // n)],
        "backward_dq": lambda m: [s.heads * s.batch * ceil(s.q_len / 128) * (128 // m)],
    }
    if not needs_grad & 1:
        del grids["backward_dq"]
    if not needs_grad & 2:
        del grids["backward_dkdv"]
    scalars = attention(s, call.attributes["scale"][1], 2, has_dlse)
    expect_launches(machine, call, scalars, grids)
    assert machine.calls("cuTensorMapEncodeTiled") == 0
