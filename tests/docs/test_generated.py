"""The reference parts of docs/internals are what docs/internals/generate.py makes of the
sources."""

import importlib.util

import pytest
from paths import DOCS

FILE = DOCS / "internals" / "generate.py"
spec = importlib.util.spec_from_file_location("generate_docs", FILE)
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_page_is_up_to_date(name):
    made = generate.page(name, generate.PAGES[name]())
    assert (FILE.parent / name).read_text() == made, "run python docs/internals/generate.py"


def test_every_kernel_has_a_grid():
    text = (FILE.parent / "kernels.md").read_text()
    grids = text[text.index("## Grids") : text.index("## Arguments")]
    for kernel in generate.table.KERNELS:
        assert f"`{kernel}`" in grids, kernel


def test_a_binding_is_read_as_it_stands():
    """A signature that goes on with another, comments of two lines, attributes."""
    text = """auto BaseSignature(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::AnyBuffer>()  // query: (batch, q_len)
      .template Arg<ffi::Buffer<ffi::S32>>()  // ids: like query,
                                              // with padding
      .template Attr<float>("scale");
}

auto MoreSignature(Binding&& binding) {
  return BaseSignature(std::forward<Binding>(binding)
                           .template Ret<ffi::AnyBuffer>());  // out: like query
}
"""
    found = generate.signatures(text)
    assert found["BaseSignature"] == (
        None,
        [
            ("operand", "query", "(batch, q_len)"),
            ("operand", "ids", "like query, with padding"),
            ("attribute", "scale", "f32"),
        ],
    )
    assert found["MoreSignature"] == ("BaseSignature", [("result", "out", "like query")])
