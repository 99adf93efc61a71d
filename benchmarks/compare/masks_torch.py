"""FlexAttention for masks.py: masks and scores by the same predicates, timed one burst per request.

It is called as in torch programs: compiled, a block mask built once, grouped heads by enable_gqa;
sinks by the log-sum-exp, as in Hugging Face's gpt-oss. Inputs and results are passed in files.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from lib.mask_cases import OptionCase, select
from lib.turns import burst, launches_of, serve
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

OPERANDS = ("query", "key", "value", "cotangent")


def finish(_: Any) -> None:
    torch.cuda.synchronize()


def attention(case: OptionCase, found: Any, device: str) -> Callable[..., torch.Tensor]:
    """`found`: the arrays of the case's tables, by their names."""
    tables = {name: torch.from_numpy(x).to(device) for name, x in found.items()}
    by_head = case.selection is not None and case.selection.by_head
    slopes = torch.from_numpy(case.slopes()).to(device)
    sinks = torch.from_numpy(case.sink_logits()).to(device)
    block_mask = create_block_mask(
        lambda b, h, i, j: case.allows(h, i, j, tables),
        None, case.heads if by_head else None, case.seq, case.seq, device=device, _compile=True,
    )  # fmt: skip
    cap = case.soft_cap
    score = None
    if cap is not None:

        def score(s, b, h, i, j):
            return cap * torch.tanh(s / cap)

    elif case.alibi:

        def score(s, b, h, i, j):
            return s - slopes[h] * (i - j)

    compiled = torch.compile(flex_attention, dynamic=False)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        more = {"block_mask": block_mask, "score_mod": score, "enable_gqa": True}
        if not case.sinks:
            return compiled(q, k, v, **more)
        out, lse = compiled(q, k, v, return_lse=True, **more)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    return function


class State:
    device = "cuda"

    def __init__(self) -> None:
        self.passes: dict[str, Callable[[], Any]] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request["do"])(**{k: v for k, v in request.items() if k != "do"})

    def hello(self) -> dict[str, str]:
        return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}

    def prepare(
        self, case: str, folder: str, results: str, rows: list[int], head: int, round_ms: float
    ) -> dict[str, Any]:
        """Runs both passes and writes what the reference compares; {"failed", "launches"}."""
        self.passes = {}
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        (found,) = select(case)
        q, k, v, do = (
            torch.from_numpy(np.load(Path(folder) / f"{name}.npy"))
            .view(torch.bfloat16).to(self.device).transpose(1, 2).contiguous()
            for name in OPERANDS
        )  # fmt: skip

        def write(name: str, x: torch.Tensor) -> None:
            x = x.detach().contiguous().view(torch.int16).cpu().numpy()
            np.save(Path(results) / f"{name}.npy", x)

        failed = {}
        try:
            function = attention(found, np.load(Path(folder) / "tables.npz"), self.device)

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return function(q, k, v)

            write("out", forward()[0, :, rows].transpose(0, 1))
            self.passes["fwd"] = forward
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = function(*leaves)

            def backward() -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(out, leaves, do, retain_graph=True)

            dq, dk, dv = backward()
            write("dq", dq[0, :, rows].transpose(0, 1))
            write("dk", dk[0, head])
            write("dv", dv[0, head])
            self.passes["bwd"] = backward
        except Exception as error:  # the forward may run even if the backward does not
            text = (str(error).strip().splitlines() or [""])[0]
            failed["bwd" if self.passes else "fwd"] = f"{type(error).__name__}: {text}"[:300]
        launches = {what: launches_of(f, finish, round_ms) for what, f in self.passes.items()}
        return {"failed": failed, "launches": launches}

    def time(self, name: str, what: str, launches: int) -> float:
        return burst(self.passes[what], finish, launches)


if __name__ == "__main__":
    serve(State().answer)
