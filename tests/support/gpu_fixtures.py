"""Fixtures for the GPU tests, loaded as a pytest plugin."""

import pytest
from gpu_kinds import DTYPES, KINDS, name_of


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(params=(False, True), ids=("", "deterministic"))
def deterministic(request):
    return request.param


@pytest.fixture(params=KINDS, ids=name_of)
def kind(request):
    """dtype and head dims"""
    return request.param
