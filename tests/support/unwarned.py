"""A fixture for tests of faces that fall back: their warnings are errors, and appear each time."""

import warnings

import pytest
from packax.integrations import fallback


@pytest.fixture(autouse=True)
def unwarned(monkeypatch):
    """No warning was given before, and PACKAX_FALLBACK is unset. A warning is an error."""
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.delenv("PACKAX_FALLBACK", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fallback.FallbackWarning)
        yield
