"""A pytest plugin for peer_suites.py that replaces another project's attention by packax.

PEER_SUITE names the project; with PEER_PLAIN set, nothing is replaced. The outcome of every test is
written to PEER_REPORT as JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import sys
import types
from typing import Any

import pytest

_outcomes: dict[str, str] = {}


def _jax() -> None:
    import jax
    import packax

    jax.nn.dot_product_attention = packax.dot_product_attention


def _flax() -> None:
    """Also replaces Flax's function in default arguments of functions and classes."""
    import packax.integrations.flax as ours
    from flax import linen, nnx

    theirs = {linen.dot_product_attention, nnx.dot_product_attention}

    def other(x: Any) -> Any:
        return ours.dot_product_attention if _among(x, theirs) else x

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "flax" or not isinstance(module, types.ModuleType):
            continue
        for attribute, x in list(vars(module).items()):
            if _among(x, theirs):
                setattr(module, attribute, other(x))
            for function in (x, *(vars(x).values() if isinstance(x, type) else ())):
                if isinstance(function, types.FunctionType):
                    defaults = function.__defaults__ or ()
                    function.__defaults__ = tuple(map(other, defaults)) or None
                    for key, default in (function.__kwdefaults__ or {}).items():
                        function.__kwdefaults__[key] = other(default)
            if isinstance(x, type):
                for key, field in vars(x).get("__dataclass_fields__", {}).items():
                    field.default = other(field.default)
                    if _among(vars(x).get(key), theirs):
                        setattr(x, key, staticmethod(ours.dot_product_attention))


def _among(x: Any, functions: set[Any]) -> bool:
    return any(x is function for function in functions)


def _kvax() -> None:
    """packax.kvax under kvax's names; what only kvax has (its reference, its helpers) stays kvax's.

    kvax was written for older jax, so a removed sharding class is rebuilt from current ones. Its
    reference uses cuDNN through jax.nn; without a GPU, jax.nn's XLA implementation replaces that.
    """
    import jax
    import packax.kvax as ours

    for name in ("", ".ops", ".utils"):
        package = importlib.import_module(f"{ours.__name__}{name}")
        sys.modules[f"kvax{name}"] = package
        for _, module, _ in list(pkgutil.iter_modules(package.__path__)):
            replacement = importlib.import_module(f"{package.__name__}.{module}")
            sys.modules[f"kvax{name}.{module}"] = replacement
        package.__path__.append(os.path.join("kvax", *name.split(".")[1:]))
    if not hasattr(jax.sharding, "PositionalSharding"):
        jax.sharding.PositionalSharding = _Positional
        put = jax.device_put
        jax.device_put = lambda x, to: put(x, getattr(to, "named", to))
    if jax.default_backend() == "cpu":
        attention = jax.nn.dot_product_attention

        def by_xla(*args: Any, implementation: Any = None, **options: Any) -> Any:
            return attention(*args, **options, implementation="xla")

        jax.nn.dot_product_attention = by_xla


class _Positional:
    """jax.sharding.PositionalSharding, last in jax 0.7, with one mesh axis per dimension."""

    def __init__(self, devices: Any, whole: bool = False):
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        axes = tuple(f"axis{n}" for n in range(devices.ndim))
        self.devices = devices
        spec = PartitionSpec() if whole else PartitionSpec(*axes)
        self.named = NamedSharding(Mesh(devices, axes), spec)

    def replicate(self) -> _Positional:
        return _Positional(self.devices, whole=True)

    def reshape(self, *shape: Any) -> _Positional:
        """Supported only for a replicated sharding."""
        return self


def _maxtext() -> None:
    from packax.integrations import maxtext

    maxtext.install(every=True)


def _levanter() -> None:
    """Serves calls that name no implementation, also on the CPU. Grug's "xla_flash" and the layers'
    flash attention of Levanter 1.2 are replaced, too: their tests call them by name."""
    from packax.integrations import levanter

    levanter.install(default="everywhere")

    def flash(q: Any, k: Any, v: Any, mask: Any, *, block_size: Any = None) -> Any:
        return levanter.attention(q, k, v, mask)

    def named(*args: Any, key: Any = None, dtype: Any = None, block_size: Any = None, **more: Any):
        return levanter.dot_product_attention(*args, prng=key, attention_dtype=dtype, **more)

    for name, attribute, function in (
        ("levanter.grug.attention", "xla_flash_attention", flash),
        ("levanter.models.flash_attention", "flash_attention", named),
    ):
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            setattr(importlib.import_module(name), attribute, function)


_REPLACE = {
    "jax": _jax,
    "flax": _flax,
    "kvax": _kvax,
    "levanter": _levanter,
    "maxtext": _maxtext,
}
if not os.environ.get("PEER_PLAIN"):
    _REPLACE[os.environ["PEER_SUITE"]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.skipped:
        _outcomes[item.nodeid] = "skipped"
    elif report.failed:
        refused = call.excinfo.errisinstance(NotImplementedError)
        last = str(call.excinfo.value).strip().splitlines()[:1]
        _outcomes[item.nodeid] = ("refused: " if refused else "failed: ") + call.excinfo.typename
        _outcomes[item.nodeid] += f": {last[0][:200]}" if last else ""
    elif report.when == "call" and item.nodeid not in _outcomes:
        _outcomes[item.nodeid] = "passed"


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _outcomes[report.nodeid] = f"failed: {str(report.longrepr).strip().splitlines()[-1][:200]}"


def pytest_sessionfinish() -> None:
    with open(os.environ["PEER_REPORT"], "w") as file:
        json.dump(_outcomes, file, indent=1)
