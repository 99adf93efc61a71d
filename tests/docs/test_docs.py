"""The Python of README.md, docs/ (support/pages.py) and the docstrings runs, and what it defines
does what the text says. CI runs the bash blocks of the README.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import packax.kvax
import pytest
from jax.sharding import PartitionSpec as P
from lowered import Extension
from packax._src.ops import ffi
from pages import BLOCKS, LENGTH, TEXTS, around, names, namespace_of
from paths import ROOT

MODULES = {"jax": jax, "jnp": jnp, "np": np, "packax": packax, "P": P, "functools": functools}


PAGES = [page for page, blocks in BLOCKS.items() if blocks and "tutorial" not in page]


@pytest.mark.parametrize("page", PAGES)
def test_page(page):
    """Also calls the steps that the text defines."""
    namespace = namespace_of(page)
    if not namespace["outs"]:
        pytest.skip("the package that its blocks need is not installed")
    for block, space in zip(BLOCKS[page], namespace["after"], strict=True):
        if "def step" in block and "query" in space:
            _run_step(space)
        if "def local_step" in block:
            with around():
                space["local_step"](None, {"segment_ids": space["segment_ids"]}, space["plan"])


def _run_step(space):
    """Calls the steps that the texts define, as the texts describe."""
    step = space["step"]
    query, key, value = space["query"], space["key"], space["value"]
    if "key_cache" in inspect.signature(step).parameters:
        lengths = jnp.asarray([3, 9])
        caches = jnp.copy(key), jnp.copy(value)
        out, key_cache, _, after = step(query[:, :1], key[:, :1], value[:, :1], *caches, lengths)
        assert np.isfinite(out).all() and list(after) == [4, 10]
        np.testing.assert_array_equal(key_cache[1, 9], key[1, 0])
    elif list(inspect.signature(step).parameters) == ["parameters", "batch"]:
        with around():
            for name in ("step", "step_of_two_kinds"):
                if name in space:
                    space[name](None, {"segment_ids": space["segment_ids"]})


def modules():
    yield packax
    for found in pkgutil.walk_packages(packax.__path__, "packax."):
        if not re.search(r"__main__|_ext|\.demo|integrations\.(flax|maxtext|levanter)", found.name):
            yield importlib.import_module(found.name)


def examples():
    found = {}
    for module in modules():
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            if test.examples:
                found[test.name] = test
    return found


EXAMPLES = examples()


def _of_a_batch(query, key, value, mask):
    """The arguments for a model of one row, as a batch of one."""
    return query[None], key[None], value[None], mask


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring(name, monkeypatch):
    test = EXAMPLES[name]
    length = LENGTH if re.search("plan|load_balance", name) else 64
    space = names(length) | MODULES
    ids = space["segment_ids"]
    space |= {"positions": jnp.arange(length)[None].repeat(2, 0), "key_mask": ids >= 0}
    space |= {"plan": packax.context_plan(packax.causal(), ranks=4, kind="zigzag", length=LENGTH)}
    space |= {"step": lambda q: packax.flash_attention(q, q, q, packax.causal())}
    space |= {"attend": lambda *tensors: packax.flash_attention(*_of_a_batch(*tensors))[0]}
    space |= {"shapes": [jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)]}
    specs = (None, "context", None, None), (None,) * 4
    if ".kvax" in name:
        space |= {"q": space["query"], "k": space["key"], "v": space["value"], "tokens": ids}
        space |= {"ids": ids, "kv_ids": ids, "kv_positions": space["positions"]}
        space |= {x: getattr(packax.kvax.ops, x) for x in packax.kvax.ops.__all__}
    if "flash_attention_jax" in name:
        space |= {x: space["query"].swapaxes(1, 2) for x in "qkv"}
    monkeypatch.setattr(ffi, "ext", Extension)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    mesh = jax.make_mesh((1, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), packax.kvax.utils.attention_specs(*specs):
        if ".kvax" in name:
            tokens = (space["positions"], ids) * 2
            space["mask"] = packax.kvax.ops.create_attention_mask(*tokens)
        test.globs = test.globs | space
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_examples_of_docstrings_have_a_heading():
    """Without it the site shows nested quotation bars in place of code."""
    for name, test in EXAMPLES.items():
        lines = test.docstring.splitlines()
        first = next(n for n, line in enumerate(lines) if line.lstrip().startswith(">>>"))
        above = [line.strip() for line in lines[:first] if line.strip().endswith(":")]
        assert "Examples:" in above, f"{name}: put its example under `Examples:`"


def test_every_public_function_has_an_example():
    kvax = packax.kvax.ops, packax.kvax.utils
    for module in (packax.context, packax.kv_cache, packax.masks, packax.segments, *kvax):
        for name in module.__all__:
            thing = inspect.unwrap(getattr(module, name))
            if inspect.isfunction(thing):
                assert f"{thing.__module__}.{thing.__name__}" in EXAMPLES, name
    for name in packax.__all__:
        thing = getattr(packax, name)
        if inspect.isfunction(thing):
            assert f"{thing.__module__}.{name}" in EXAMPLES, name
            assert "Raises:" in thing.__doc__ or name in (
                "full",
                "alibi",
                "debug_checks",
                "export_checks",
            )


def test_nothing_refers_to_a_file_that_a_wheel_does_not_have():
    """Docstrings of public names, and errors, name pages of the documentation by their titles."""
    public = [f"{name} says {path}" for name, path in _paths_in_docstrings()]
    package = ROOT / "python" / "packax"
    texts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.search(r"\bdocs/\S*\.md", str(node.value))
    ]
    assert not public and not texts


def test_errors_and_public_docstrings_call_a_sequence_row_and_a_token_query():
    """As "The mask format" defines the terms; only kernels have "query rows" and "batch rows"."""
    named = re.compile(r"\b(query|batch) rows?\b")
    public = [
        name
        for module in modules()
        for name in (getattr(module, "__all__", ()) if "._src" not in module.__name__ else ())
        if named.search(inspect.getdoc(getattr(module, name)) or "")
    ]
    package = ROOT / "python" / "packax"
    texts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in _texts(ast.parse(path.read_text()))
        if named.search(node.value)
    ]
    assert not public and not texts


def _paths_in_docstrings():
    for module in modules():
        if "._src" in module.__name__:
            continue
        things = [module, *(getattr(module, x) for x in getattr(module, "__all__", ()))]
        for thing in things:
            members = vars(thing).values() if inspect.isclass(thing) else ()
            for text in (inspect.getdoc(x) for x in (thing, *members)):
                for path in re.findall(r"\bdocs/\S*\.md", text or ""):
                    yield getattr(thing, "__name__", repr(thing)), path


def _texts(tree):
    """Strings other than docstrings."""
    bare = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node


def test_pages_are_named_by_their_titles():
    titles = {re.match(r"# (.*)", text)[1] for name, text in TEXTS.items() if "docs/" in name}
    sources = " ".join(path.read_text() for path in (ROOT / "python" / "packax").rglob("*.py"))
    sources = re.sub(r"\s+", " ", sources)
    named = re.findall(r'"([^"]+)" (?:in|of) the documentation', sources)
    named += re.findall(r"""\bpage\(["']([^"']+)["']\)""", sources)
    assert len(named) > 8 and set(named) <= titles


@pytest.mark.parametrize("kind", [packax.AttentionMask, packax.context.ContextPlan])
def test_help_shows_what_is_public(kind):
    text = pydoc.plain(pydoc.render_doc(kind))
    assert all(name in text for name in kind.public)
    assert not re.search(r"dataclass|q_blocks|annotations|levels_|\bsteps\(|_move", text)
    assert f"class {kind.__name__}(" in text and "kv_start=" not in text
