"""Which cubin each GPU uses with each driver, as documented in docs/guide/gpus.md.

Selects kernels of a full build, and runs a forward on the fake driver if this build has the
architecture.
"""

import itertools
import re

import pytest
from aot_modules import ALL, table
from cpp.call_frame import INITIALIZE
from cpp.calls import forward
from cpp.launches import selected
from cpp.machine import make_machine, needs_compiler, needs_extension
from paths import DOCS

pytest_plugins = ("cpp.fixtures",)

DRIVERS = (*range(12000, 12100, 10), 13000, 13010, 13020)
ROW = re.compile(r"^\| (\d+)\.(\d) \|.+\| `(\w+)` \| `(\w+)` \| (\d+)\.(\d) \|$", re.M)
ROWS = {
    10 * int(major) + int(minor): (arch, float32, 1000 * int(cuda) + 10 * int(of))
    for major, minor, arch, float32, cuda, of in ROW.findall((DOCS / "guide/gpus.md").read_text())
}


def test_the_page_has_every_architecture():
    assert sorted(ROWS) == [80, 86, 87, 89, 90, 100, 103, 110, 120, 121]
    archs = {arch.name: arch for arch in table.ARCHS.values()}
    assert {arch for arch, _, _ in ROWS.values()} == set(archs)
    for cc, (arch, float32, driver) in ROWS.items():
        assert driver == archs[arch].driver == max(12000, archs[float32].driver), cc
        of_float32 = {v.arch.name for v in table.variants() if v.dtype in table.FLOAT32}
        assert float32 in of_float32 and (arch == float32 or arch not in of_float32), cc


def test_the_page_says_what_is_assembled_from_what():
    text = " ".join((DOCS / "guide/gpus.md").read_text().split())
    own = [arch.name for arch in table.ARCHS.values() if not arch.ptx]
    assert f"makes PTX for `{'`, `'.join(own[:-1])}` and `{own[-1]}`." in text
    others = {arch.name: arch.ptx for arch in table.ARCHS.values() if arch.ptx not in ("", "80")}
    assert re.findall(r"`(\w+)` is assembled from the PTX of `sm_(\w+)`", text) == [*others.items()]
    assert "and all other targets from that of `sm_80`, whose matrix instructions they use" in text
    family = "for a family (names ending in `f`) contain the same machine code as those for one"
    assert family in text


@needs_extension
@pytest.mark.parametrize("cc", ROWS)
def test_each_gpu_runs_its_cubins(cc):
    """Of those that the driver loads, the newest."""
    from packax import _ext

    arch, float32, oldest = ROWS[cc]
    call = {"batch": 2, "q_len": 300, "kv_len": 700, "heads": 6, "kv_heads": 2, "qk_dim": 128}
    call |= {"v_dim": 128, "scale": 0.125}
    for driver, (dtype, own) in itertools.product(DRIVERS, (("bf16", arch), ("f32", float32))):
        found = selected(_ext, "forward", cc, call | {"dtype": dtype}, driver)
        if driver < oldest:
            assert found == [], driver
            continue
        ((kernel, name),) = found
        same = [v for v in ALL if (v.kernel, v.dtype, v.dim) == (kernel, dtype, 128)]
        same = [v for v in same if v.arch.name == own and v.driver <= driver]
        assert name == max(same, key=lambda v: v.driver).name, driver


@pytest.mark.parametrize("driver_version", [12000, 12080, 12090, 13000, 13020])
@pytest.mark.parametrize("cc", ROWS)
@needs_extension
@needs_compiler
def test_a_forward_on_every_gpu(tmp_path, driver, cc, driver_version):
    arch, _, oldest = ROWS[cc]
    machine = make_machine(tmp_path, driver, ccs=(cc,))
    rows = [row for row in machine.ext.variants() if row["arch"] == arch]
    if not rows:
        pytest.skip(f"this build has no {arch}")
    machine.variant = next(row for row in rows if row["kernel"] == "forward")
    machine.cuda.fake_set_version(driver_version)
    call = forward(machine)
    failure = machine.run(call, INITIALIZE)
    if driver_version >= oldest:
        assert failure is None
        assert machine.run(call) is None
        (launch,) = machine.launches()
        row = machine.row(launch["kernel"], cc, driver_version)
        assert row["arch"] == arch and launch["shared"] == row["shared"]
        return
    assert failure.code == "Unimplemented"
    versions = [f"{v // 1000}.{v % 1000 // 10}" for v in (oldest, driver_version)]
    needs = "needs a driver for CUDA {} or newer, this one is for CUDA {}".format(*versions)
    assert f"no forward kernel for compute capability {cc // 10}.{cc % 10}" in failure.message
    assert needs in failure.message and machine.launches() == []
