"""State of the whole process: attention specs and `install` in threads, log lines, names missing in
jax._src."""

import enum
import importlib
import logging
import sys
import threading
import time
import types

import packax.kvax.utils as kvax
import pytest
from packax._src.core import jax_compat


def test_no_thread_reads_the_specs_of_two_calls():
    kinds = [(("a", None, None, None),) * 2, (("b", None, None, None),) * 2]
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            specs = kvax.get_attention_specs()
            if specs.query_specs[0] != specs.kv_specs[0]:
                wrong.append(specs)

    interval = sys.getswitchinterval()
    with kvax.attention_specs(*kinds[0]):
        reader = threading.Thread(target=read)
        reader.start()
        sys.setswitchinterval(1e-6)
        try:
            for n in range(3000):
                kvax.set_attention_specs(*kinds[n % 2])
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            reader.join()
    assert not wrong


def in_threads(function, number=4):
    """Calls the function in several threads at the same time."""
    barrier, errors = threading.Barrier(number), []

    def run():
        barrier.wait()
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def slowly(function, calls):
    """The function, which notes its calls and takes a while, so that threads can overlap."""

    def call(*args):
        calls.append(args)
        time.sleep(0.05)
        return function(*args)

    return call


def modules(monkeypatch, *names):
    found = [types.ModuleType(name) for name in names]
    for module in found:
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found[-1]


def test_threads_install_levanter_once(monkeypatch):
    install = importlib.import_module("packax.integrations.levanter.install")
    module = modules(monkeypatch, "levanter", "levanter.layers", "levanter.layers.attention")
    module.AttentionBackend = enum.Enum("AttentionBackend", {"DEFAULT": "default"})
    module.dot_product_attention = theirs = lambda query, attn_backend=None: query
    calls = []
    monkeypatch.setattr(install, "_layers", slowly(install._layers, calls))
    monkeypatch.setattr(install, "_default", {"where": False})
    in_threads(install.install)
    assert len(calls) == 1 and module.dot_product_attention.by_levanter is theirs
    assert [x.name for x in module.AttentionBackend] == ["DEFAULT", "PACKAX"]


def test_threads_install_maxtext_once(monkeypatch):
    pytest.importorskip("flax")
    install = importlib.import_module("packax.integrations.maxtext.install")
    names = "maxtext", "maxtext.utils", "maxtext.layers"
    modules(monkeypatch, *names)
    utils = modules(monkeypatch, "maxtext.utils.max_utils")
    utils.reorder_causal_load_balanced = lambda batch, cp_size: batch
    module = modules(monkeypatch, "maxtext.layers.attention_op")

    class AttentionOp:
        def __call__(self):
            pass

    module.AttentionOp = AttentionOp
    calls = []
    monkeypatch.setattr(install, "_op_of", slowly(install._op_of, calls))
    in_threads(install.install)
    assert len(calls) == 1 and module.AttentionOp.__mro__[1] is AttentionOp


def test_maxtext_logs_one_line(monkeypatch, caplog, capsys):
    install = pytest.importorskip("packax.integrations.maxtext.install")
    monkeypatch.setattr(install, "_said", set())
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: "0.2.5")
    op = type("Op", (), {"mesh": None})()
    with caplog.at_level(logging.INFO, "packax"):
        install._say(op, None)
        install._say(op, None)
    assert caplog.messages == ["packax: attention of MaxText 0.2.5, on one device"]
    assert not capsys.readouterr().out


def test_names_missing_in_jax_are_reported_once(monkeypatch, recwarn):
    jax_compat._warn_of_missing.cache_clear()
    monkeypatch.setitem(sys.modules, "jax._src.dispatch", None)
    for _ in range(2):
        jax_compat.lower_with_devices(None)
    jax_compat._warn_of_missing.cache_clear()
    (warning,) = recwarn
    assert "does not know this version of jax" in str(warning.message)
    assert "plain jit partitions" in str(warning.message)
