"""Several processes of jax.distributed on this machine: the same loss and gradients as in one.

Eight fake CPU devices in all, collectives by gloo. The processes find each other by the variables
that launchers set; the program does not say how many there are.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import packax
import processes
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from paths import ROOT
from tiers import some
from xla_flags import of_devices

FIRST_PORT = 65536 - 2**12  # JAX derives the port from the job id: this plus the id modulo 4096


def free_job() -> int:
    """A job id whose port is unused."""
    for job in np.random.default_rng().integers(1, 2**12, 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", FIRST_PORT + int(job)))
            except OSError:
                continue
            return int(job)
    raise RuntimeError("no free port")


def slurm(job: int, number: int, process: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "127.0.0.1,other",
        "SLURM_NTASKS": str(number),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def open_mpi(job: int, number: int, process: int) -> dict[str, str]:
    """As mpirun of Open MPI 4 sets them."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job * 2**12}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(number),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


def together(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """The output of each process; all are killed if one fails."""
    launcher_variables = re.compile("SLURM_|OMPI_|JAX_COORDINATOR")
    base = {name: x for name, x in os.environ.items() if not launcher_variables.match(name)}
    base |= {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    running = [
        subprocess.Popen(
            command,
            env=base | environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        shown = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(x[-3000:] for x in shown)
    return shown


@pytest.fixture(scope="module")
def alone():
    """On one device, without sharding."""
    value, gradients = jax.jit(processes.step)(processes.parameters(), processes.batch())
    return {"loss": value, **gradients}


@pytest.mark.parametrize(
    ("number", "launcher"), some([(2, open_mpi), (4, slurm)], 0), ids=["2, Open MPI", "4, Slurm"]
)
def test_equals_one_process(number, launcher, alone, tmp_path):
    job = free_job()
    devices = of_devices(8 // number)
    outs = [tmp_path / f"{process}.npz" for process in range(number)]
    script = str(ROOT / "tests" / "support" / "processes.py")
    together(
        [[sys.executable, script, str(out)] for out in outs],
        [launcher(job, number, process) | {"XLA_FLAGS": devices} for process in range(number)],
    )
    for process, out in enumerate(outs):
        got = np.load(out)
        for name, want in alone.items():
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
        # The first half of the processes has the first half of fsdp.
        first = 2 * (process // (number // 2))
        assert got["rows"].tolist() == [first, first + 1]
        differ, local = map(str, got["refused"])
        assert re.search("processes 0 and 1 hold the same part.*process_rows", differ), differ
        assert re.search(r"batch\[0\] must be .* but is an array of this process alone", local), (
            local
        )


@pytest.mark.exhaustive
def test_the_example_by_two_commands():
    pytest.importorskip("optax")
    pytest.importorskip("tqdm")
    port = FIRST_PORT + free_job()
    script = str(ROOT / "examples" / "train_context_parallel.py")
    settings = ("--cpu", "--devices", "2", "--steps", "2", "--seq-len", "256", "--mesh", "2,2,1")
    where = ("--coordinator", f"127.0.0.1:{port}", "--processes", "2")
    commands = [
        [sys.executable, script, *settings, *where, "--process-id", str(n)] for n in range(2)
    ]
    first, second = together(commands, [{"XLA_FLAGS": of_devices(1)}] * 2)
    assert "mesh       {'fsdp': 2, 'context': 2, 'tensor': 1} on 4 x cpu" in first
    assert "processes  2; this one feeds rows [0]" in first
    assert "first loss equals one device's" in first
    assert "first loss" not in second


def test_rows_of_one_process():
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "context"), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    spec = P("fsdp", "context")
    sharding = packax.AttentionSharding(query=spec, key_value=spec, mesh=mesh)
    assert packax.context.process_rows(sharding, 6).tolist() == list(range(6))
    with pytest.raises(ValueError, match=r"batch, 5, must be a multiple of .*, 2"):
        packax.context.process_rows(sharding, 5)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        bare = packax.AttentionSharding(query=spec, key_value=spec)
        with pytest.raises(ValueError, match="process_rows needs a mesh of devices"):
            packax.context.process_rows(bare, 6)


@pytest.mark.parametrize("wrong", [np.ones(3), 3], ids=["numpy", "number"])
def test_only_arrays_over_all_processes_are_compared(wrong):
    with pytest.raises(ValueError, match=r"batch\['x'\] must be a jax array over all processes"):
        packax.context.check_same_rows({"x": wrong})
