#!/usr/bin/env bash
# Packs cuEquivariance in JAX for pair_biases.py on a machine without access to a package registry:
# one archive of 18 MiB, to unpack into a folder on PYTHONPATH.
#
#   bash benchmarks/compare/pack_cueq.sh [dist/cueq.tar.xz]      (PYTHON: an interpreter with pip)
#
# This takes a minute (xz). The archive has wheels for Linux on x86-64, any Python 3, CUDA 13 only,
# without parts that the attention does not use. The machine must have jax with its CUDA 13
# libraries as wheels, einops, networkx, opt-einsum, packaging, scipy and sympy.
set -euo pipefail
cd "$(dirname "$0")/../.."

archive=$(realpath -m "${1:-dist/cueq.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: \
  --platform manylinux_2_28_x86_64 --dest "$work/wheels" \
  cuequivariance==0.13.0 cuequivariance-jax==0.13.0 cuequivariance-ops-cu13==0.13.0 \
  cuequivariance-ops-jax-cu13==0.13.0
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
# Removes headers, a CMake package, texts, and tuning tables of Triton kernels for PyTorch.
rm -rf "$work"/site/{include,lib64,Third_party_attr.txt} \
  "$work"/site/cuequivariance_ops/{triton/cache,triangle_mxfp8_einsum_cutlass}

mkdir -p "$(dirname "$archive")"
tar -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . |
  xz --x86 --lzma2=preset=6,dict=64MiB >"$archive"
ls -l "$archive"
