"""What the workers in torch share: inputs from files, both passes run and written for the
reference, bursts. Gradients are by torch.autograd, residuals in memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from lib.exchange import OPERANDS
from lib.output import first_line
from lib.turns import State, burst, launches_of

Attention = Callable[..., torch.Tensor]


def finish(_: Any) -> None:
    torch.cuda.synchronize()


class Torch(State):
    device = "cuda"
    heads_first = False  # (B, H, S, D) instead of (B, S, H, D)

    def __init__(self) -> None:
        self.passes: dict[str, Callable[[], Any]] = {}

    def attention(self, case: str, folder: Path, **options: Any) -> Attention:
        raise NotImplementedError

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if self.heads_first else x

    def prepare(
        self,
        case: str,
        folder: str,
        results: str,
        compared: dict[str, list[int]],
        round_ms: float,
        **options: Any,
    ) -> dict[str, Any]:
        """Runs both passes and writes what the reference compares; {"failed", "launches"}."""
        self.passes = {}
        gc.collect()
        torch.cuda.empty_cache()
        q, k, v, do = (
            self._turned(
                torch.from_numpy(np.load(Path(folder) / f"{name}.npy"))
                .view(torch.bfloat16)
                .to(self.device)
            ).contiguous()
            for name in OPERANDS
        )
        rows, (start, stop), (head,) = compared["rows"], compared["window"], compared["head"]

        def write(name: str, x: torch.Tensor, *at: Any) -> None:
            x = self._turned(x)[0][at].detach().contiguous().view(torch.int16).cpu()
            np.save(Path(results) / f"{name}.npy", x.numpy())

        failed = {}
        try:
            function = self.attention(case, Path(folder), **options)

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return function(q, k, v)

            write("out", forward(), rows)
            self.passes["fwd"] = forward
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = function(*leaves)

            def backward() -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(out, leaves, do, retain_graph=True)

            dq, dk, dv = backward()
            write("dq", dq, rows)
            write("dk", dk, slice(start, stop), head)
            write("dv", dv, slice(start, stop), head)
            del dq, dk, dv
            self.passes["bwd"] = backward
        except Exception as error:  # the forward may run even if the backward does not
            failed["bwd" if self.passes else "fwd"] = first_line(error)
        launches = {what: launches_of(f, finish, round_ms) for what, f in self.passes.items()}
        return {"failed": failed, "launches": launches}

    def time(self, name: str, what: str, launches: int) -> float:
        return burst(self.passes[what], finish, launches)
