"""Fixtures for the tests of the C++ host code, as a pytest plugin."""

import pytest
from cpp.machine import compile_driver, make_machine


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def machine(tmp_path, driver):
    return make_machine(tmp_path, driver)


@pytest.fixture
def sm90(tmp_path, driver):
    """A machine that has the Hopper kernels, which take tensor maps."""
    return make_machine(tmp_path, driver, choose=lambda m: m.has("forward_sm90"))


@pytest.fixture
def assembled_twice(tmp_path, driver):
    """Like sm90, with a second cubin for newer drivers, which default builds do not have."""

    def twice(machine):
        return (
            machine.has("forward_sm90")
            and machine.row("forward_sm90", None, 13000)["driver"] == 13000
        )

    return make_machine(tmp_path, driver, choose=twice)


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory, driver):
    """For tests that do not use the driver."""
    return make_machine(tmp_path_factory.mktemp("machine"), driver)
