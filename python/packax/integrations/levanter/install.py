"""`install()`: packax as a backend of Levanter's two attentions, by name or by default."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import threading
from typing import Any, Literal

import jax

from packax.integrations import replace_everywhere
from packax.integrations.levanter import grug, layers

_default: dict[str, Any] = {"where": False}
_lock = threading.Lock()  # of `install`, which replaces a function once


def install(*, default: bool | Literal["everywhere"] = False) -> None:
    """Makes packax an attention of Levanter, before or after its models are imported.

    Grug's `attention` takes implementation="packax", and the layers' `AttentionBackend` has a
    member PACKAX, so that a configuration may say `attn_backend: packax`. Levanter 1.2 has only the
    layers.

    Args:
        default: whether packax also runs, on NVIDIA GPUs, calls that name no backend
            (implementation=None, AttentionBackend.DEFAULT or None); "everywhere": on other
            platforms, too. The last call wins.

    Raises:
        ValueError: default is something else.
        ModuleNotFoundError: marin-levanter is not installed.

    Examples:
        >>> import packax.integrations.levanter
        >>> packax.integrations.levanter.install(default=True)
    """
    if default not in (False, True, "everywhere"):
        raise ValueError(f'default must be False, True or "everywhere", but is {default!r}')
    with _lock:
        _install(default)


def _install(default: Any) -> None:
    _default["where"] = default
    module = importlib.import_module("levanter.layers.attention")
    if hasattr(module.dot_product_attention, "by_levanter"):
        return
    if importlib.util.find_spec("levanter.grug") is not None:
        core = importlib.import_module("levanter.grug.attention._core")
        names: Any = core.GrugAttentionImplementation
        extended = Literal[(*names.__args__, "packax")]  # type: ignore[valid-type]
        replace_everywhere(names, extended)
        replace_everywhere(core.attention, _grug(core.attention))
    _add_member(module.AttentionBackend, "PACKAX", "packax")
    replace_everywhere(module.dot_product_attention, _layers(module.dot_product_attention, module))


def _grug(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def attention(q: Any, k: Any, v: Any, mask: Any, *, implementation: Any = None) -> Any:
        chosen = implementation == "packax" or (implementation is None and _is_default())
        function = grug.attention if chosen else theirs
        return function(q, k, v, mask, implementation=implementation)

    attention.by_levanter = theirs  # type: ignore[attr-defined]
    return attention


def _layers(theirs: Any, module: Any) -> Any:
    signature = inspect.signature(theirs)
    backends = module.AttentionBackend

    @functools.wraps(theirs)
    def dot_product_attention(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        backend, flash = given.get("attn_backend"), given.get("use_flash")
        chosen = backend == backends.PACKAX
        if backend in (None, backends.DEFAULT) and flash is not False:
            chosen = _is_default()
        elif chosen and flash is False:
            raise ValueError("use_flash is False, but attn_backend is packax")
        return (layers.dot_product_attention if chosen else theirs)(*args, **options)

    dot_product_attention.by_levanter = theirs  # type: ignore[attr-defined]
    return dot_product_attention


def _is_default() -> bool:
    where = _default["where"]
    return where == "everywhere" or (where and jax.default_backend() == "gpu")


def _add_member(enum: Any, name: str, value: str) -> None:
    """Adds a member to an existing enumeration. Python has no public function for it."""
    member = str.__new__(enum, value) if issubclass(enum, str) else object.__new__(enum)
    member._name_, member._value_ = name, value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    setattr(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = enum._value2member_map_[value] = member
