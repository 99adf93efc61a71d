"""Trains tiny models with an installed MaxText, by its dense attention and by packax, and compares.

    python tests/peers/maxtext_trainings.py [--only llama,mla] [--steps 4] [--out DIR]

Needs maxtext from the package index (docs/guide/maxtext.md lists the rest), downloads nothing, and
runs on two CPU devices. Each model trains twice from the same seed on the same synthetic tokens in
float32: first with attention=dot_product, then with attention=packax after
`packax.integrations.maxtext.install()`, or with `install(every=True)` where MaxText's checks accept
only dot_product. The program exits with 1 if losses differ by more than 1e-5, relatively. Writes
maxtext_trainings.json into --out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

from lib.output import default_out, first_line, say, write_json

TOLERANCE = 1e-5
COMMON = (
    "dataset_type=synthetic enable_checkpointing=false hardware=cpu "
    "skip_jax_distributed_system=True log_config=False dtype=float32 weight_dtype=float32 "
    "matmul_precision=highest learning_rate=0.01 sharding_tolerance=1.0 base_emb_dim=32 "
    "base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=64 base_moe_mlp_dim=32 "
    "base_num_decoder_layers=2 head_dim=8 per_device_batch_size=2 max_target_length=64 "
    "vocab_size=128 override_model_config=True"
)
_MLA = (
    "decoder_block=deepseek attention_type=mla q_lora_rank=16 kv_lora_rank=16 qk_nope_head_dim=8 "
    "qk_rope_head_dim=8 v_head_dim=8 base_num_kv_heads=4 first_num_dense_layers=2 "
    "rope_type=default num_experts=2 num_experts_per_tok=1 shared_experts=1"
)
DOT_PRODUCT_ALONE = ("sparse indexer", "MoBA")
MODELS = {
    "llama, FSDP": "",
    "packing": "packing=True max_segments_per_seq=5",
    "gemma2": "model_name=gemma2-2b base_num_decoder_layers=1 sliding_window_size=9",
    "gpt-oss": "model_name=gpt-oss-20b sliding_window_size=9 num_experts=2 num_experts_per_tok=1",
    "llama4": "model_name=llama4-17b-16e base_num_decoder_layers=4 chunk_attn_window_size=16 "
    "num_experts=2",
    "mla": _MLA,
    "QK-clip": f"{_MLA} use_qk_clip=True",
    "sparse indexer": f"{_MLA} use_indexer=True indexer_n_heads=2 indexer_head_dim=16 "
    "indexer_topk=8 indexer_sparse_training=True",
    "MoBA": "moba=True moba_chunk_size=16 moba_topk=2",
    "context": "ici_context_parallelism=2 ici_fsdp_parallelism=1 max_target_length=512 "
    "context_parallel_load_balance=True per_device_batch_size=0.5",
    "context, packing, windows": "model_name=gemma2-2b base_num_decoder_layers=1 "
    "sliding_window_size=70 ici_context_parallelism=2 ici_fsdp_parallelism=1 "
    "max_target_length=512 per_device_batch_size=0.5 packing=True max_segments_per_seq=5",
    "pipeline": "ici_pipeline_parallelism=2 ici_fsdp_parallelism=1 num_pipeline_microbatches=2",
    "tensor": "ici_tensor_parallelism=2 ici_fsdp_parallelism=1",
}


def losses(options: str, attention: str, steps: int) -> list[float]:
    import maxtext
    from maxtext.trainers.pre_train import train

    config = Path(maxtext.__path__[0], "configs", "base.yml")
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.json")
        run = [f"run_name={attention}", f"base_output_directory={folder}", f"steps={steps}"]
        run += [f"metrics_file={metrics}", f"attention={attention}"]
        given = {x.split("=")[0]: x for x in (*COMMON.split(), *options.split(), *run)}
        train.main(["train.py", str(config), *given.values()])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(line["learning/loss"]) for line in lines if "learning/loss" in line]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of models, with commas")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=default_out())
    options = parser.parse_args(arguments)
    from packax.integrations import maxtext
    from packax.integrations.maxtext import attention_op

    calls = []
    attention = attention_op.flash_attention
    attention_op.flash_attention = lambda *x, **y: calls.append(x) or attention(*x, **y)
    os.environ["PACKAX_FALLBACK"] = "error"  # no call may fall back
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "maxtext_trainings.json"
    known = json.loads(path.read_text())["trainings"] if path.exists() else {}
    failed = []
    for name, model in MODELS.items():
        if options.only and not any(part in name for part in options.only.split(",")):
            continue
        row: dict[str, object] = {"options": model}
        try:
            for kernel in ("dot_product", "packax"):
                calls.clear()
                every = kernel == "packax" and name in DOT_PRODUCT_ALONE
                maxtext.install(every=every)
                setting = "dot_product" if every else kernel
                row[kernel] = losses(model, setting, options.steps)
                if bool(calls) != (kernel == "packax"):
                    raise RuntimeError(f"attention={kernel} called packax {len(calls)} times")
            row["calls traced"] = len(calls)
            pairs = list(zip(row["dot_product"], row["packax"], strict=True))
            row["largest difference"] = max(abs(x - y) / abs(x) for x, y in pairs)
            good = len(pairs) == options.steps and row["largest difference"] < TOLERANCE
            say(f"{name}: {row['packax']}, difference {row['largest difference']:.1e}")
        except Exception as error:
            row["error"], good = first_line(error), False
            say(f"{name}: {row['error']}")
        failed += [] if good else [name]
        known[name] = row
        result = {"maxtext": importlib.metadata.version("maxtext")}
        result |= {"jax": importlib.metadata.version("jax"), "trainings": known}
        write_json(path, result)
    say(f"failed: {', '.join(failed)}" if failed else "all losses agree")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
