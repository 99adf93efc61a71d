"""Which kernels each call of attention runs on each GPU, and with which arguments: handlers.txt.

Guards against a call that reaches a kernel which ignores one of its options, arguments in the wrong
order, a tensor map over the wrong tensor or with the wrong box, a workspace section in the wrong
place, a counter that is not cleared, a grid that misses rows, and a size that overflows.

The kernels are those that C++ selects from the table of a full build. If this build has them, too,
the handlers run on a fake libcuda (tests/support/cpp), which needs a C compiler.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cpp import calls
from cpp.calls import ALIBI, EVERY, SIZES, Sizes, of_head_group
from cpp.launches import expect, fields, selected, whole_table
from cpp.machine import DRIVER, make_machine, needs_compiler, needs_extension
from kernel_sets import BACKWARD

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

S = Sizes()
PRESETS = {"every": EVERY, "alibi": ALIBI}


@dataclass(frozen=True)
class Row:
    target: str
    dims: tuple[int, int]
    kernel_dims: tuple[int, int]
    sizes: Sizes
    options: dict
    cc: int
    wanted: str  # kernels, or an entry of BACKWARD

    def call(self, machine, **more):
        options = self.options | more
        group = options.pop("group", None)
        make = getattr(calls, self.target.removeprefix("forward_"))
        call = make(machine, self.sizes, self.dims, columns=self.kernel_dims[0], **options)
        return of_head_group(call, *group) if group else call

    def kernels(self, of):
        """Those whose results the call needs; `of`: its fields."""
        if self.target != "backward":
            return self.wanted.split()
        dq, dkv, dbias = (of[f"needs_{x}"] for x in ("dq", "dkv", "dbias"))
        needed = {"dkdv": dkv, "dq": dq, "postprocess": dq}
        needed |= dict.fromkeys(("dbias", "shared", "sum"), dbias)
        names = BACKWARD[self.wanted].split()
        return [f"backward_{name}" for name in names if needed.get(name.split("_")[0], True)]


def value_of(text):
    if ":" in text:
        return tuple(map(value_of, text.split(":")))
    return eval(text) if text[0].isdigit() else text


def pair(text):
    qk_dim, _, v_dim = text.partition("x")
    return int(qk_dim), int(v_dim or qk_dim)


def rows():
    """The rows of handlers.txt, each with one value of each option."""
    text = (Path(__file__).parent / "handlers.txt").read_text().replace("\n    ", " ")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        call, words, gpus = (part.strip() for part in line.split("|"))
        of, _, kernel_dims = call.partition(">")
        target, *dims = of.split()
        sizes, presets, options = [S], {}, {}
        for word in words.split():
            name, _, values = word.partition("=")
            if word == "all":
                sizes = SIZES
            elif not values:
                presets |= PRESETS[word]
            else:
                options[name] = [value_of(x) for x in values.split(",")]
        for given in itertools.product(*options.values()):
            given = presets | dict(zip(options, given, strict=True))
            own = {name: given.pop(name) for name in list(given) if hasattr(S, name)}
            for pair_, s, gpu in itertools.product(map(pair, dims), sizes, gpus.split("; ")):
                ccs, _, kernels = gpu.partition(": ")
                targets = ("forward", "backward") if target == "both" else (target,)
                for of, wanted in zip(targets, kernels.split(" / "), strict=True):
                    for cc in map(int, ccs.split()):
                        at = pair(kernel_dims.strip()) if kernel_dims else pair_
                        yield Row(of, pair_, at, replace(s, **own), given, cc, wanted)


@pytest.fixture(scope="module")
def machines(tmp_path_factory, driver):
    """A function of the compute capability. Kernels stay loaded for all tests of a module."""
    found = {}

    def of(cc):
        if cc not in found:
            found[cc] = make_machine(tmp_path_factory.mktemp("machine"), driver, ccs=(cc,))
        return found[cc]

    return of


def name_of(row):
    own = {n: x for n, x in vars(row.sizes).items() if x != getattr(S, n)}
    words = [f"{name}={value}" for name, value in (own | row.options).items()]
    return " ".join([row.target, "x".join(map(str, row.dims)), *words, f"on {row.cc}"])


@pytest.mark.parametrize("row", list(rows()), ids=name_of)
def test_which_kernels(machines, row):
    dtype = {"float16": "f16", "float32": "tf32"}.get(row.options.get("dtype"), "bf16")
    dtype = "f32" if row.options.get("float32") else dtype
    qk_dim, v_dim = row.kernel_dims
    variant = {"cc": row.cc, "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim}
    machine = replace(machines(row.cc), variant=variant)
    call = row.call(machine)
    f = fields(call)
    if "algorithm" not in row.options and "group" not in row.options:
        table, driver = whole_table(row.cc), 13000 if row.cc in (103, 110, 121) else DRIVER
        found = selected(machine.ext, row.target, row.cc, f, driver)
        assert [kernel for kernel, _ in found] == row.kernels(f)
        for kernel, name in found:
            of = "f32" if "delta_fallback" in kernel and dtype == "tf32" else dtype
            assert f"{kernel}_{of}_{qk_dim}x{v_dim}_" in name, name
        if row.target == "backward":
            judged = machine.ext.judge(row.target, f, [row.cc], driver, table)
            call = row.call(machine, algorithm=judged["algorithm"])
    kernels = row.kernels(fields(call))
    if machine.has(*kernels):
        expect(machine, call, kernels)
