"""Which kernels the build recompiles after a change of a file or of the table."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import pathlib
import re
import shutil

import pytest
from aot_modules import ALL, compiler, table
from paths import KERNEL_DIR, ROOT
from tiers import some

SOME = list({(v.kernel, v.source): v for v in ALL}.values())
OF_ROWS = list({(v.kernel, v.source, v.row, v.assembler): v for v in ALL}.values())


def fingerprints() -> dict[str, str]:
    compiler.source_code.cache_clear()
    return {v.name: compiler.fingerprint(v) for v in SOME}


of_unchanged_files = functools.cache(fingerprints)


@pytest.fixture
def recompiled(monkeypatch, tmp_path, request):
    """A function that appends a line to a kernel file and returns the names of the variants whose
    cache entry becomes invalid."""
    shutil.copytree(ROOT / "csrc" / "kernels", tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(compiler, "KERNEL_DIR", tmp_path)
    request.addfinalizer(compiler.source_code.cache_clear)

    before = of_unchanged_files()

    def change(name: str, added: str = "changed = 1") -> set[str]:
        nonlocal before
        file = compiler.module_file(name)
        file.write_text(file.read_text() + f"{added}\n")
        now, then = fingerprints(), before
        before = now
        return {name for name in now if now[name] != then[name]}

    return change


SM90 = "fwd ragged tangent bwd bwd_dq bwd_dq_parts shared_dbias"
SCORES = "fwd bwd bwd_dq bwd_dbias tangent"
FILES = [  # a file, and those of the kernels that import it; "": of the same folder
    ("common.kv_ranges", f"{SM90} sm80.fwd sm80.bwd", "sm90"),
    ("sm80.bwd", "bwd"),
    ("sm90.row_producer", "fwd ragged bwd_dq bwd"),  # tiles of keys need the planes of a bias
    ("sm90.lse_by_mma", "bwd"),  # through the producer
    ("common.bwd_preprocess", "bwd_preprocess"),
    ("portable.decode", "decode"),
    ("portable.bias", f"{SCORES} sum_dbias"),
    ("mask.block_bounds", "block_bounds"),
    *((f"sm90.{file}", SM90) for file in ("common", "args", "pipeline", "block_lists")),
    ("sm80.common", "fwd bwd"),
    ("sm90.fwd_consumer", "fwd ragged"),
    ("sm90.softmax", "fwd ragged tangent bwd"),
    ("sm90.chunked_mma", "fwd ragged bwd_dq bwd_dq_parts shared_dbias bwd"),
    ("common.soft_cap", "ragged fwd bwd bwd_dq sm80.fwd sm80.bwd", "sm90"),
    ("portable.row_tile", "fwd bwd_dq tangent"),
    *((f"portable.{file}", SCORES) for file in ("scoring", "dropout", "block_lists")),
    *((f"portable.{file}", f"{SCORES} dbias_of_pairs decode") for file in ("arithmetic",
        "kv_ranges")),
]  # fmt: skip


@pytest.mark.parametrize("file,kernels,folder", some([(*x, "")[:3] for x in FILES], *range(8)))
def test_a_changed_file_recompiles_the_kernels_that_import_it(
    recompiled, file, kernels, folder
) -> None:
    folder = folder or file.split(".")[0]
    sources = {x if "." in x else f"{folder}.{x}" for x in kernels.split()}
    assert recompiled(file) == {v.name for v in SOME if v.source in sources}


def test_a_comment_or_a_docstring_recompiles_nothing(recompiled) -> None:
    assert recompiled("portable.arithmetic", "# a comment") == set()
    assert recompiled("portable.arithmetic", "def f():\n    x = 1") != set()
    assert recompiled("portable.arithmetic", "    # a comment\n    # and another") == set()
    text = compiler.module_file("portable.arithmetic").read_text()
    documented = text.replace("def f():\n", 'def f():\n    """A docstring."""\n')
    compiler.module_file("portable.arithmetic").write_text(documented)
    assert documented != text and recompiled("portable.arithmetic", "") == set()


@pytest.mark.parametrize(
    "name,value,kernels",
    [
        ("ASSEMBLERS", table.ASSEMBLERS | {"13.4": ("another", *table.ASSEMBLERS["13.4"][1:])},
            {v.kernel for v in OF_ROWS if v.assembler == "13.4"}),
        ("MULTIPLES", {}, set(table.KERNELS)),
        ("FLOATS", ("scale",), set(table.KERNELS)),
        ("SPILLS", table.SPILLS | {("forward_sm90", 128): 4096}, {"forward_sm90"}),
        ("SERIALISED", (*table.SERIALISED, "forward"), {"forward"}),
        ("FUNCTIONS", table.FUNCTIONS | {"mask.segments": ("documents_init",)},
            {"documents_runs", "documents_rows"}),
        ("absent_arguments", lambda _: (),
            {k for k in table.KERNELS if table.absent_arguments(k)}),
    ],
)  # fmt: skip
def test_what_the_table_says_besides_variants_recompiles_them(monkeypatch, name, value, kernels):
    """Otherwise the cache would return kernels that another table compiled and accepted."""
    before = {v.name: compiler.fingerprint(v) for v in OF_ROWS}
    for module in (table, compiler.table):  # one file, loaded twice as a module
        monkeypatch.setattr(module, name, value)
    assert {v.kernel for v in OF_ROWS if compiler.fingerprint(v) != before[v.name]} == kernels


def test_an_interrupted_build_leaves_nothing_that_the_cache_would_give(
    monkeypatch, tmp_path
) -> None:
    variant, out, store = ALL[0], tmp_path / "out", tmp_path / "store"
    out.mkdir()
    for suffix in (".cubin", ".json"):
        (out / f"{variant.name}{suffix}").write_bytes(b"whole")
    write = pathlib.Path.write_bytes

    def full_disk(path, data):
        write(path, data[:2])
        if ".json" in path.name:
            raise OSError("No space left on device")

    with monkeypatch.context() as context:
        context.setattr(pathlib.Path, "write_bytes", full_disk)
        with pytest.raises(OSError, match="No space"):
            compiler.keep(variant, out, store)
    assert not (store / f"{variant.name}.json").exists()
    compiler.keep(variant, out, store)
    assert {(store / f"{variant.name}{s}").read_bytes() for s in (".cubin", ".json")} == {b"whole"}


def test_a_damaged_entry_of_the_cache_is_compiled_again(monkeypatch, tmp_path, capfd) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    variant, out, cache = ALL[0], tmp_path / "out", tmp_path / "cache"
    entry = cache / compiler.fingerprint(variant) / variant.name
    files = [entry.with_suffix(suffix) for suffix in (".cubin", ".json")]

    def write(variant, ptx, meta, out):
        (out / files[0].name).write_bytes(b"cubin")
        record = {"registers": 1, "shared": 2, "stack": 3}
        record["sha256"] = hashlib.sha256(b"cubin").hexdigest()
        (out / files[1].name).write_text(json.dumps(record))

    def from_cache() -> int:
        assert compiler.compile_table([variant], out, cache, 1) == 0
        assert (out / files[0].name).read_bytes() == files[0].read_bytes() == b"cubin"
        return int(re.search(r"(\d) from the cache", capfd.readouterr().out)[1])

    monkeypatch.setattr(compiler, "warm_up", lambda _: None)  # Triton may interpret here
    monkeypatch.setattr(compiler.lower, "make_ptx", lambda _: ("ptx", "meta"))
    monkeypatch.setattr(compiler.lower, "write_variant", write)
    assert [from_cache(), from_cache()] == [0, 1]
    for file in files:
        for damaged in (file.read_bytes()[:-2], b"", b"{}"):
            file.write_bytes(damaged)
            assert [from_cache(), from_cache()] == [0, 1]
    files[0].unlink()
    assert from_cache() == 0


@pytest.mark.parametrize("file", sorted(KERNEL_DIR.glob("*/*.py")), ids=str)
def test_files_are_imported_in_the_way_that_the_compiler_reads(file: pathlib.Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    own = {f"{f.parent.name}.{f.stem}" for f in KERNEL_DIR.glob("*/*.py")}
    read = set(re.findall(r"^from ([\w.]+) import", file.read_text(), re.M))
    assert imported & own == read & own
