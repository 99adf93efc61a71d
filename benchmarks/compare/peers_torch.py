"""FlashAttention-4's CuTe kernels, or torch's own FlashAttention-2, for versus_fa4.py.

Each is timed one burst per request.

Inputs come from the JAX worker, which also checks the results; both are passed in files. They are
called as in torch programs: flash_attn_func for one document, flash_attn_varlen_func for several,
for FlashAttention-2 the operation with cu_seqlens; gradients by torch.autograd, residuals in
memory.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from compare.torch_worker import Attention, Torch
from lib.cases import CASES, Case
from lib.turns import serve


def attention(case: Case, device: str, peer: str = "fa4") -> Attention:
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


def flash_attention_2(case: Case, device: str) -> Attention:
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


class Peers(Torch):
    def hello(self) -> dict[str, str]:
        names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
        installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
        return {name: importlib.metadata.version(name) for name in names if name in installed}

    def attention(self, case: str, folder: Path, **options: Any) -> Attention:
        (found,) = (item for item in CASES if item.name == case)
        return attention(found, self.device, **options)


if __name__ == "__main__":
    serve(Peers().answer)
