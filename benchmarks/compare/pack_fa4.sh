#!/usr/bin/env bash
# Packs FlashAttention-4 for attention.py on a machine without access to a package registry: one
# archive of about 53 MiB.
#
#   bash benchmarks/compare/pack_fa4.sh [dist/fa4.tar.xz]
#
# This takes five minutes (xz). PYTHON: an interpreter with pip. The archive has wheels for
# Python 3.12 on x86-64, unpacked into one folder; CUDA 13 only. The machine must have torch,
# einops, cuda-bindings, protobuf and typing-extensions. nvidia-cutlass-dsl finds its modules
# through a .pth file, which Python ignores in a folder on PYTHONPATH, so attention.py also adds
# nvidia_cutlass_dsl/dsl_packages.
set -euo pipefail
cd "$(dirname "$0")/../.."

archive=$(realpath -m "${1:-dist/fa4.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for glibc in 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: \
  --python-version 312 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$work/wheels" \
  flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 \
  nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 \
  quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5

mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
# Removes a profiler, stubs and static libraries, which nothing imports or loads.
dsl=$work/site/nvidia_cutlass_dsl
rm -rf "$dsl"/dsl_packages/iket "$dsl"/cu13/lib/stubs "$dsl"/cu13/lib/*.a "$dsl"/cu13/include

mkdir -p "$(dirname "$archive")"
tar -C "$work/site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . |
  xz --x86 --lzma2=preset=9e,dict=256MiB >"$archive"
ls -l "$archive"
