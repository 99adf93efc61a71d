"""The worker of attention.py and masks.py for torch: times one burst per request.

It times FlashAttention-4's CuTe kernels, torch's own FlashAttention-2, and FlexAttention. Inputs
come from the JAX process, which also checks the results; both are passed in files. Attention is
called as in torch programs: flash_attn_func for one document and flash_attn_varlen_func for
several; for FlashAttention-2 the operation with cu_seqlens. FlexAttention is compiled, with the
same predicates as in JAX, a block mask built once, enable_gqa for grouped heads, and sinks applied
by the log-sum-exp, as in Hugging Face's gpt-oss. Gradients are by torch.autograd, with residuals in
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
from lib.cases import Case
from lib.exchange import OPERANDS
from lib.mask_cases import OptionCase, select
from lib.output import first_line
from lib.turns import State, burst, launches_of, serve

Attention = Callable[..., torch.Tensor]


def packing(case: Case, device: str) -> tuple[torch.Tensor, int]:
    """cu_seqlens of the documents, and the length of the longest."""
    edges = torch.tensor(np.cumsum([0, *case.lengths]), dtype=torch.int32, device=device)
    return edges, max(case.lengths)


def flash_attention(case: Case, device: str, peer: str = "fa4") -> Attention:
    if case.batch == 1 and peer == "fa2":
        return flash_attention_2(case, device)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    if case.documents == 1:
        return lambda q, k, v: first(flash_attn_func(q, k, v, causal=True))
    if case.batch != 1:
        raise NotImplementedError("documents in several rows")
    edges, longest = packing(case, device)
    rows = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    rows |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return first(flash_attn_varlen_func(*flat, **rows, causal=True))[None]

    return packed


def flash_attention_2(case: Case, device: str) -> Attention:
    edges, longest = packing(case, device)
    options: dict[str, Any] = {"scale": case.head_dim**-0.5}
    if case.window:
        options |= {"window_size_left": case.window - 1, "window_size_right": 0}

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return torch.ops.aten._flash_attention_forward(
            *rows, edges, edges, longest, longest, 0.0, True, False, **options
        )[0][None]

    return packed


def flex_attention_of(case: OptionCase, found: Any, device: str) -> Attention:
    """`found`: the arrays of the case's tables, by name."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

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


def finish(_: Any) -> None:
    torch.cuda.synchronize()


class Torch(State):
    device = "cuda"

    def __init__(self) -> None:
        self.passes: dict[str, Callable[[], Any]] = {}

    def hello(self) -> dict[str, str]:
        names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
        installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
        found = {name: importlib.metadata.version(name) for name in names if name in installed}
        return found | {"gpu": torch.cuda.get_device_name()}

    def attention(self, case: Any, folder: Path, peer: str) -> Attention:
        if peer != "flex":
            return flash_attention(Case(**case), self.device, peer)
        torch._dynamo.reset()
        (found,) = select(case)
        return flex_attention_of(found, np.load(folder / "tables.npz"), self.device)

    def prepare(
        self,
        case: Any,
        folder: str,
        results: str,
        compared: dict[str, list[int]],
        round_ms: float,
        peer: str,
    ) -> dict[str, Any]:
        """Runs both passes and writes the slices to compare. Returns {"failed", "launches"}."""
        self.passes = {}

        def turned(x: torch.Tensor) -> torch.Tensor:  # FlexAttention takes (B, H, S, D)
            return x.transpose(1, 2) if peer == "flex" else x

        gc.collect()
        torch.cuda.empty_cache()
        q, k, v, do = (
            turned(
                torch.from_numpy(np.load(Path(folder) / f"{name}.npy"))
                .view(torch.bfloat16)
                .to(self.device)
            ).contiguous()
            for name in OPERANDS
        )
        rows, (start, stop), (head,) = compared["rows"], compared["window"], compared["head"]

        def write(name: str, x: torch.Tensor, *at: Any) -> None:
            x = turned(x)[0][at].detach().contiguous().view(torch.int16).cpu()
            np.save(Path(results) / f"{name}.npy", x.numpy())

        failed = {}
        try:
            function = self.attention(case, Path(folder), peer)

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
        except Exception as error:  # the forward may work even if the backward fails
            failed["bwd" if self.passes else "fwd"] = first_line(error)
        launches = {what: launches_of(f, finish, round_ms) for what, f in self.passes.items()}
        return {"failed": failed, "launches": launches}

    def time(self, name: str, what: str, launches: int) -> float:
        return burst(self.passes[what], finish, launches)


if __name__ == "__main__":
    serve(Torch().answer)
