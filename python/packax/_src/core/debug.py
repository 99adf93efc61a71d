"""`debug_checks`: checks of values, which cost time and are off by default.

Checks of traced values run on the host when the program runs, and raise in the thread that traced
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from packax._src.core.sharding import UNSHARDED, Layout


class _Switch:
    """Replaces jax.make_user_context in older jax; does not invalidate the caches of jit."""

    def __init__(self, default: bool) -> None:
        self.value = default

    @contextlib.contextmanager
    def __call__(self, value: bool) -> Any:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


_new = getattr(jax, "make_user_context", _Switch)  # jax 0.8 and later: part of jit's cache keys
_enabled: Any = _new(os.environ.get("PACKAX_DEBUG", "") not in ("", "0"))


def enabled() -> bool:
    """Whether `debug_checks` are on."""
    return bool(_enabled.value)


def debug_checks(enable: bool = True) -> Any:
    """A context in which packax's debug checks are on, or off.

    They are `check_plan`, a check in `create_attention_mask` that finds segment ids that the plan
    has already permuted (outside jit it is always on), and checks that otherwise cover only numpy
    arrays: those of `packax.segments.from_attention_mask` and `from_one_based`, and the warnings of
    `packax.documents`.

    The environment variable PACKAX_DEBUG=1 turns them on for a whole process. A function that was
    compiled while they were off is recompiled, except in jax 0.7: there, turn them on before its
    first call.

    Args:
        enable: True or False.

    Examples:
        >>> with packax.context.debug_checks():
        ...     packax.context.check_plan(mask, segment_ids=segment_ids)
    """
    return _enabled(bool(enable))


def check_values(check: Callable[[Any], None], x: Any) -> None:
    """Runs check(x as a numpy array), which may raise ValueError: for numpy arrays always, for jax
    arrays under `debug_checks`, and for traced ones when the program runs."""
    if isinstance(x, np.ndarray):
        check(x)
    elif enabled() and isinstance(x, jax.core.Tracer):
        report_when_run(lambda x: check(np.asarray(x)), [x], UNSHARDED)
    elif enabled() and x.is_fully_addressable:
        check(np.asarray(x))


def report_when_run(check: Callable[..., None], held: list[Any], layout: Layout) -> None:
    """Calls check(*held) with complete arrays when the program runs, and raises its ValueError.

    The callback runs on every device. Every process then finds the error, and XLA gathers for all
    devices, not only for the first.
    """
    report = _Report(check)
    mesh: Any = jax.sharding.get_abstract_mesh()
    given = None
    if mesh.empty and layout.mesh is not None:
        given, mesh = layout.mesh, getattr(layout.mesh, "abstract_mesh", layout.mesh)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, kind in kinds.items() if kind != AxisType.Manual}

    def of_device(held: Any) -> tuple[()]:
        number = jax.lax.axis_index(mesh.axis_names) if mesh.axis_names else np.int32(0)
        jax.debug.callback(report, number, *held)
        return ()

    if not free:
        of_device(held)
        return
    if AxisType.Explicit in kinds.values():
        whole = P() if given is None else NamedSharding(given, P())
        held = jax.tree.map(lambda x: jax.sharding.reshard(jnp.asarray(x), whole), held)
    jax.shard_map(of_device, mesh=given, in_specs=P(), out_specs=(), axis_names=free)(held)


class _Report:
    """Checks a traced program on the host. Only one device of each process runs the check."""

    def __init__(self, check: Callable[..., None]) -> None:
        self.check = check
        self.thread = threading.get_ident()
        self.lock = threading.Lock()
        self.speaker: int | None = None

    def __call__(self, device: Any, *held: Any) -> None:
        with self.lock:
            if self.speaker is None:
                self.speaker = int(device)
        if int(device) != self.speaker:
            return
        try:
            self.check(*held)
        except ValueError as error:
            if threading.get_ident() == self.thread:
                raise  # jax runs programs of a single device in the caller's thread
            _raise_in(self.thread, str(error))


def _raise_in(thread: int, text: str) -> None:
    """Raises ValueError(text) in the given thread, or in the main thread if that has ended.

    Nothing else reports it in time. An exception in this callback would end the program of this
    device, and the other devices would wait for it in their next collective until XLA aborts the
    process. The checks return nothing that a later wait could test, and jax waits in C++, in
    `block_until_ready` of arrays that packax does not see. The price: the exception may arrive in
    a `finally` block of the thread and skip the rest of it.
    """

    def __init__(self: ValueError, *_: Any) -> None:
        ValueError.__init__(self, text)

    kind = type("PlanError", (ValueError,), {"__init__": __init__, "__module__": "packax"})
    for number in (thread, threading.main_thread().ident):
        if ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(number or 0), ctypes.py_object(kind)
        ):
            return
