"""FlashAttention-4's CuTe kernels, or torch's own FlashAttention-2, for versus_fa4.py.

Each is timed one burst per request.

Inputs come from the JAX worker, which also checks the results; both are passed in files. They are
called as in torch programs: flash_attn_func for one document, flash_attn_varlen_func for several,
for FlashAttention-2 the operation with cu_seqlens; gradients by torch.autograd, residuals in
memory.
"""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from lib.cases import CASES, Case
from lib.turns import burst, launches_of, serve

OPERANDS = ("query", "key", "value", "cotangent")


def finish(_: Any) -> None:
    torch.cuda.synchronize()


def attention(case: Case, device: str, peer: str = "fa4") -> Callable[..., torch.Tensor]:
    if case.batch == 1 and peer == "fa2":
        return flash_attention_2(case, device)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    if case.documents == 1:
        return lambda q, k, v: first(flash_attn_func(q, k, v, causal=True))
    if case.batch != 1:
        raise NotImplementedError("documents in several rows")
    edges = torch.tensor(np.cumsum([0, *case.lengths]), dtype=torch.int32, device=device)
    longest = max(case.lengths)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=edges,
            cu_seqlens_k=edges,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        return first(out)[None]

    return packed


def flash_attention_2(case: Case, device: str) -> Callable[..., torch.Tensor]:
    edges = torch.tensor(np.cumsum([0, *case.lengths]), dtype=torch.int32, device=device)
    longest = max(case.lengths)
    options: dict[str, Any] = {"scale": case.head_dim**-0.5}
    if case.window:
        options |= {"window_size_left": case.window - 1, "window_size_right": 0}

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return torch.ops.aten._flash_attention_forward(
            *rows, edges, edges, longest, longest, 0.0, True, False, **options
        )[0][None]

    return packed


class State:
    device = "cuda"

    def __init__(self) -> None:
        self.passes: dict[str, Callable[[], Any]] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        return getattr(self, request["do"])(**{k: v for k, v in request.items() if k != "do"})

    def hello(self) -> dict[str, str]:
        names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
        installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
        return {name: importlib.metadata.version(name) for name in names if name in installed}

    def load(self, folder: str) -> list[torch.Tensor]:
        files = [Path(folder) / f"{name}.npy" for name in OPERANDS]
        return [torch.from_numpy(np.load(f)).view(torch.bfloat16).to(self.device) for f in files]

    def prepare(
        self,
        case: str,
        folder: str,
        results: str,
        compared: dict[str, list[int]],
        round_ms: float,
        peer: str = "fa4",
    ) -> dict[str, Any]:
        """Runs both passes and writes what the reference compares; {"failed", "launches"}."""
        self.passes = {}
        gc.collect()
        torch.cuda.empty_cache()
        (found,) = (item for item in CASES if item.name == case)
        q, k, v, do = self.load(folder)
        function = attention(found, self.device, peer)
        rows, (start, stop), (head,) = compared["rows"], compared["window"], compared["head"]

        def write(name: str, x: torch.Tensor) -> None:
            np.save(
                Path(results) / f"{name}.npy",
                x.detach().contiguous().view(torch.int16).cpu().numpy(),
            )

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return function(q, k, v)

        failed = {}
        try:
            write("out", forward()[0, rows])
            self.passes["fwd"] = forward
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = function(*leaves)

            def backward() -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(out, leaves, do, retain_graph=True)

            dq, dk, dv = backward()
            write("dq", dq[0, rows])
            write("dk", dk[0, start:stop, head])
            write("dv", dv[0, start:stop, head])
            del dq, dk, dv
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
