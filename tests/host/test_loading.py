"""Kernels are loaded once, outside of CUDA graph capture, from a cubin that the driver can read;
failures say what failed.

Guards against errors that no CPU run of JAX can show: a kernel that is loaded twice or under CUDA
graph capture, a function that is used in another context, an error that does not say what failed.
Runs on a fake libcuda (tests/support/cpp): needs the built extension and a C compiler, but no GPU.
"""

import threading

import pytest
from cpp.call_frame import EXECUTE, INITIALIZE
from cpp.calls import CALLS, backward, documents, forward
from cpp.launches import kernels_of
from cpp.machine import make_machine, needs_compiler, needs_extension

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]


# --- Loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_initialize_loads_and_execute_launches(machine, name):
    """Loading is not allowed under CUDA graph capture, in which only the execute stage may run."""
    call = CALLS[name](machine)
    assert machine.run(call, INITIALIZE) is None
    assert machine.launches() == []
    loads = machine.calls("cuLibraryLoadData")
    for function in ("cuLibraryLoadData", "cuKernelSetAttribute", "cuKernelGetFunction"):
        machine.fail(function, 1)
    assert machine.run(call) is None
    assert len(machine.launches()) == loads  # no kernel that this call does not use
    assert machine.run(call, INITIALIZE) is None  # runs before every execution; now only a lookup


def test_each_device_loads_for_itself(tmp_path, driver):
    """One library per process, one function per context; shared memory is set for each device."""
    machine = make_machine(tmp_path, driver, ccs=(None, None))
    call = forward(machine)
    for device in (0, 1, 0, 1):
        machine.cuda.fake_set_current(device)
        assert machine.run(call, INITIALIZE) is None
        assert machine.run(call) is None
    assert [r["device"] for r in machine.launches()] == [0, 1, 0, 1]
    assert machine.calls("cuLibraryLoadData") == 1
    assert machine.calls("cuKernelSetAttribute") == machine.calls("cuKernelGetFunction") == 2


def test_a_new_context_loads_anew(machine):
    """A new context may have the address of a destroyed one, but must not use its functions."""
    call = forward(machine)
    assert machine.run(call) is None
    machine.cuda.fake_new_context(0)
    assert machine.run(call, INITIALIZE) is None
    assert machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == 1
    assert machine.calls("cuKernelGetFunction") == 2


def test_threads_load_once(tmp_path, driver):
    machine = make_machine(tmp_path, driver, ccs=(None, None))
    calls = [make(machine) for make in CALLS.values()]
    barrier = threading.Barrier(8)
    failures = []

    def work(i):
        machine.cuda.fake_set_current(i % 2)
        barrier.wait()
        for stage in (INITIALIZE, EXECUTE, EXECUTE):
            for call in calls:
                failure = machine.run(call, stage)
                if failure:
                    failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    launches = machine.launches()
    kernels = len({launch["kernel"] for launch in launches})
    assert machine.calls("cuLibraryLoadData") == kernels
    assert machine.calls("cuKernelGetFunction") == 2 * kernels
    one = len(launches) / (8 * 2)
    assert one == int(one) >= kernels


def test_host_times(machine):
    ext, call = machine.ext, forward(machine)
    assert machine.run(call, INITIALIZE) is None
    assert set(ext.host_times().values()) == {(0, 0)}
    for _ in range(3):
        assert machine.run(call) is None
    times = ext.host_times()
    calls, nanoseconds = times.pop("packax_forward_v1")
    assert calls == 3 and 0 < nanoseconds < 10**9
    assert set(times.values()) == {(0, 0)}
    ext.reset_host_times()
    assert set(ext.host_times().values()) == {(0, 0)}


# --- Cubins for newer drivers --------------------------------------------------------------------


def launched(machine, call, version, wanted):
    """(row of the table, launch) of `call` with this driver version; `wanted`: the row's driver."""
    machine.cuda.fake_set_version(version)
    assert machine.run(call, INITIALIZE) is None
    loads = machine.calls("cuLibraryLoadData")
    assert machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == loads
    (launch,) = machine.launches()
    row = machine.row("forward_sm90", driver=version)
    assert row["driver"] == wanted
    return row, launch


@pytest.mark.parametrize(("version", "wanted"), [(12090, 12000), (13000, 13000), (13020, 13000)])
def test_the_newest_cubin_that_the_driver_loads(assembled_twice, version, wanted):
    row, launch = launched(assembled_twice, forward(assembled_twice), version, wanted)
    assert row["name"].endswith("_cuda13") == (wanted == 13000)
    assert assembled_twice.calls("cuLibraryLoadData") == 1
    assert launch["shared"] == row["shared"]


UNREADABLE = (200, 209, 218, 222, 300, 801)
LOADING = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction")


@pytest.mark.parametrize("function", LOADING)
@pytest.mark.parametrize("code", UNREADABLE)
def test_a_cubin_that_the_driver_cannot_read(assembled_twice, function, code):
    """It is tried once; then the cubin for older drivers is used while the context exists."""
    assembled_twice.cuda.fake_fail_times(function.encode(), code, 1)
    launched(assembled_twice, forward(assembled_twice), 13000, 13000)
    assert assembled_twice.calls("cuLibraryLoadData") == 2


@pytest.mark.parametrize("function", LOADING)
def test_both_cubins_unreadable(assembled_twice, function):
    """The error describes the second, which any driver that packax supports should load."""
    assembled_twice.cuda.fake_set_version(13000)
    assembled_twice.fail(function, 209)
    failure = assembled_twice.run(forward(assembled_twice))
    row = assembled_twice.row("forward_sm90", driver=12090)
    assert f"{function} failed: CUDA_ERROR_NO_BINARY_FOR_GPU" in failure.message
    assert f"; {row['name']} (cubin for sm_90a)" in failure.message
    assert assembled_twice.calls(function) == 2


def test_a_driver_out_of_memory_is_no_reason_for_the_older_cubin(assembled_twice):
    assembled_twice.cuda.fake_set_version(13000)
    assembled_twice.cuda.fake_fail_times(b"cuLibraryLoadData", 2, 1)
    failure = assembled_twice.run(forward(assembled_twice))
    row = assembled_twice.row("forward_sm90", driver=13000)
    assert f"; {row['name']} (cubin for sm_90a)" in failure.message
    assert "driver for CUDA 13.0" in failure.message
    assert assembled_twice.run(forward(assembled_twice)) is None


def test_a_kernel_without_an_older_cubin(machine):
    machine.cuda.fake_set_version(13000)
    machine.fail("cuLibraryLoadData", 209)
    assert "documents_init_" in machine.run(documents(machine)).message
    assert machine.calls("cuLibraryLoadData") == 1


# --- Refusals -------------------------------------------------------------------------------------


def test_no_context(machine):
    machine.cuda.fake_set_current(-1)
    failure = machine.run(forward(machine))
    machine.cuda.fake_set_current(0)
    assert failure.code == "Internal"
    assert failure.message == ("packax_forward_v1: the calling thread has no current CUDA context")


def test_unknown_gpu(tmp_path, driver):
    machine = make_machine(tmp_path, driver, ccs=(75,))
    rows = machine.ext.variants()
    archs = ", ".join(a for _, a in sorted({(r["cc"], r["arch"]) for r in rows}))
    forwards = [r for r in rows if r["kernel"] == "forward"]
    dtypes = ", ".join(sorted({r["dtype"] for r in forwards}))
    dims = sorted({(r["qk_dim"], r["v_dim"]) for r in forwards})
    dims = ", ".join(f"{a}x{b}" for a, b in dims)
    v = machine.variant
    way_out = '. implementation="xla", of create_attention_mask too, needs no kernels'
    for stage in (INITIALIZE, EXECUTE):
        failure = machine.run(forward(machine), stage)
        assert failure.code == "Unimplemented"
        assert failure.message == (
            f"packax_forward_v1: no forward kernel for compute capability 7.5, {v['dtype']}, "
            f"head dims {v['qk_dim']}x{v['v_dim']} (query and key x value); this build has it for "
            f"{archs}; {dtypes}; head dims {dims}; device 0 is Fake GPU 0{way_out}"
        )
        failure = machine.run(documents(machine), stage)
        assert failure.code == "Unimplemented"
        assert failure.message == (
            "packax_documents_v1: no documents_init kernel for compute capability 7.5; "
            f"this build has it for {archs}; device 0 is Fake GPU 0{way_out}"
        )
    assert machine.launches() == []


@pytest.mark.parametrize("cc", [86, 100, 120])
def test_a_gpu_that_a_part_of_the_kernels_lacks(tmp_path, driver, cc):
    """If the build lacks this GPU, the error names what it has and how to build all kernels."""
    machine = make_machine(tmp_path, driver)
    part = machine.ext.part()
    names = ("forward", "backward_dkdv", "backward_dq", "documents_rows")
    rows = [r for r in machine.ext.variants() if r["kernel"] in names]
    if not part or any(r["cc"] == cc for r in rows):
        pytest.skip(f"this build has the kernels of {cc // 10}.{cc % 10}")
    (tmp_path / "other").mkdir()
    machine = make_machine(tmp_path / "other", driver, ccs=(cc,))
    failure = machine.run(forward(machine), INITIALIZE)
    if cc == 86 and failure is None:  # the kernels of 8.0 that fit run on it
        assert machine.run(forward(machine)) is None
        return
    assert failure.code == "Unimplemented"
    hint = f"this build has only some of packax's kernels ({part}): PACKAX_ARCHS=all pip install "
    assert hint + "./ builds all; device 0 is Fake GPU 0" in failure.message


def test_unknown_head_dim(machine):
    failure = machine.run(forward(machine, dims=(520, machine.variant["v_dim"])))
    assert failure.code == "Unimplemented"
    assert failure.message.startswith("packax_forward_v1: no forward kernel for compute capability")
    assert f"head dims 520x{machine.variant['v_dim']} (query and key x value)" in failure.message


@pytest.mark.parametrize(
    ("function", "more"),
    [
        ("cuLibraryLoadData", "{bytes} bytes, driver for CUDA 12.4"),
        ("cuLibraryGetKernel", "symbol {kernel}"),
        ("cuKernelSetAttribute", "{shared} bytes of shared memory"),
        ("cuKernelGetFunction", "{bytes} bytes"),
        (
            "cuLaunchKernel",
            "grid ({grid}, 1, 1), {threads} threads, {shared} bytes of shared memory",
        ),
    ],
)
def test_driver_failure(machine, function, more):
    """The error has the kernel, its architecture, the device and the driver's error. The next call
    tries again."""
    call = forward(machine)
    machine.fail(function, 209)
    failure = machine.run(call)
    machine.fail(function, 0)
    assert machine.run(call) is None
    (launch,) = machine.launches()
    v, grid = machine.row(launch["kernel"]), launch["grid"][0]
    assert failure.code == "Internal"
    assert failure.message == (
        f"packax_forward_v1: {function} failed: CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is "
        f"available); {v['name']} (cubin for {v['arch']}) on device 0, Fake GPU 0 (compute "
        f"capability {v['cc'] // 10}.{v['cc'] % 10}), " + more.format(**v, grid=grid)
    )


@pytest.mark.parametrize(
    "function",
    [
        "cuCtxGetCurrent",
        "cuCtxGetId",
        "cuCtxGetDevice",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDriverGetVersion",
    ],
)
def test_context_failure(machine, function):
    machine.fail(function, 777)  # a code that the driver does not know
    failure = machine.run(forward(machine))
    assert failure.code == "Internal"
    device = ", device 0" if function.startswith("cuDevice") else ""
    assert failure.message == f"packax_forward_v1: {function} failed: CUDA error 777{device}"
    machine.fail(function, 0)
    assert machine.run(forward(machine)) is None


def test_a_failed_launch_stops_the_backward(machine):
    call = backward(machine)
    first, *_ = kernels_of(machine, call)
    machine.fail("cuLaunchKernel", 1)
    launched = machine.calls("cuLaunchKernel")
    failure = machine.run(call)
    assert f"cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE (invalid argument); {first}_" in (
        failure.message
    )
    assert machine.calls("cuLaunchKernel") == launched + 1


def test_a_failed_load_stops_the_backward_before_it_starts(machine):
    machine.fail("cuLibraryLoadData", 1)
    assert machine.run(backward(machine)).code == "Internal"
    assert machine.calls("cuLaunchKernel") == 0
