"""Checks that a handler rejects a call, with this message, and launches nothing."""

from dataclasses import replace

from cpp.call_frame import EXECUTE, INITIALIZE, Array


def check_refusal(shared_machine, make, changes, text):
    """D, QK and V in `changes` and `text` stand for the dtype and head dims of the kernels."""
    m = shared_machine
    dtype = {"bf16": "bfloat16", "f16": "float16"}[m.variant["dtype"]]
    dims = {"QK": m.variant["qk_dim"], "V": m.variant["v_dim"]}

    def fill(value):
        if not isinstance(value, Array):
            return value
        shape = tuple(dims.get(n, n) for n in value.shape)
        return replace(value, dtype=dtype if value.dtype == "D" else value.dtype, shape=shape)

    for word, meaning in {
        "D[": f"{dtype}[",
        "QK]": f"{dims['QK']}]",
        "V]": f"{dims['V']}]",
    }.items():
        text = text.replace(word, meaning)
    call = make(m).change(**{name: fill(value) for name, value in changes.items()})
    for stage in (INITIALIZE, EXECUTE):
        failure = m.run(call, stage)
        assert failure.code == "InvalidArgument"
        assert failure.message == f"{call.target}: {text}"
    assert m.calls("cuLaunchKernel") == m.calls("cuLibraryLoadData") == 0
