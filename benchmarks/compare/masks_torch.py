"""FlexAttention for masks.py: masks and scores by the same predicates, timed one burst per request.

It is called as in torch programs: compiled, a block mask built once, grouped heads by enable_gqa;
sinks by the log-sum-exp, as in Hugging Face's gpt-oss. Inputs and results are passed in files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from compare.torch_worker import Attention, Torch
from lib.mask_cases import OptionCase, select
from lib.turns import serve
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def attention(case: OptionCase, found: Any, device: str) -> Attention:
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


class Flex(Torch):
    heads_first = True

    def hello(self) -> dict[str, str]:
        return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}

    def attention(self, case: str, folder: Path, **options: Any) -> Attention:
        torch._dynamo.reset()
        (found,) = select(case)
        return attention(found, np.load(folder / "tables.npz"), self.device)


if __name__ == "__main__":
    serve(Flex().answer)
