#!/usr/bin/env bash
# Packs FlashAttention-3 in JAX for attention.py and train_step.py on a machine without access to a
# package registry: one archive of 13 MiB, to unpack into a folder on PYTHONPATH.
#
#   bash benchmarks/compare/pack_fa3.sh [dist/fa3.tar.xz]      (PYTHON: an interpreter with pip)
#
# It contains the wheel of flash-attn3-jax for Python 3.12 on x86-64, which supports only Hopper and
# head dim 128 and includes a CUDA runtime. The machine must have jax and einops.
set -euo pipefail
cd "$(dirname "$0")/../.."

archive=$(realpath -m "${1:-dist/fa3.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: \
  --python-version 312 --implementation cp --platform manylinux_2_28_x86_64 \
  --dest "$work/wheels" flash-attn3-jax==0.2.3
mkdir "$work/site"
unzip -q "$work"/wheels/*.whl -d "$work/site"
mkdir -p "$(dirname "$archive")"
tar -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | xz -T0 -4 >"$archive"
ls -l "$archive"
