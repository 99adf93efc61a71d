"""State of the whole process: attention specs in threads, log lines, names missing in jax._src."""

import logging
import sys
import threading

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
