#!/usr/bin/env bash
# Packs another library for benchmarks on a machine without access to a package registry: one
# archive of unpacked wheels for Linux on x86-64, to unpack into a folder on PYTHONPATH.
#
#   bash benchmarks/compare/pack.sh NAME [dist/NAME.tar.xz]     (PYTHON: an interpreter with pip)
#
#   fa3    FlashAttention-3 in JAX for attention.py and train_step.py: 13 MiB, Python 3.12, only
#          Hopper and head dim 128, with a CUDA runtime. The machine must have jax and einops.
#   fa4    FlashAttention-4 for attention.py: about 53 MiB, five minutes, Python 3.12, CUDA 13 only.
#          The machine must have torch, einops, cuda-bindings, protobuf and typing-extensions.
#          nvidia-cutlass-dsl finds its modules through a .pth file, which Python ignores in a folder
#          on PYTHONPATH, so attention.py also adds nvidia_cutlass_dsl/dsl_packages.
#   cueq   cuEquivariance in JAX for pair_biases.py: 18 MiB, any Python 3, CUDA 13 only, without
#          parts that the attention does not use. The machine must have jax with its CUDA 13
#          libraries as wheels, einops, networkx, opt-einsum, packaging, scipy and sympy.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:-}
archive=$(realpath -m "${2:-dist/$name.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site

platforms=(--platform manylinux_2_28_x86_64)
of_python=(--python-version 312 --implementation cp)
unused=() # what nothing imports or loads
case $name in
  fa3)
    wheels=(flash-attn3-jax==0.2.3)
    compress=(-T0 -4)
    ;;
  fa4)
    for glibc in 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64)
    wheels=(flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1
      nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1
      quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5)
    # A profiler, stubs and static libraries.
    unused=(nvidia_cutlass_dsl/{dsl_packages/iket,cu13/lib/stubs,cu13/lib/*.a,cu13/include})
    compress=(--x86 --lzma2=preset=9e,dict=256MiB)
    ;;
  cueq)
    of_python=()
    wheels=(cuequivariance==0.13.0 cuequivariance-jax==0.13.0 cuequivariance-ops-cu13==0.13.0
      cuequivariance-ops-jax-cu13==0.13.0)
    # Headers, a CMake package, texts, and tuning tables of Triton kernels for PyTorch.
    unused=(include lib64 Third_party_attr.txt
      cuequivariance_ops/{triton/cache,triangle_mxfp8_einsum_cutlass})
    compress=(--x86 --lzma2=preset=6,dict=64MiB)
    ;;
  *) echo "pack: '$name' is none of fa3, fa4 and cueq" >&2; exit 2 ;;
esac

"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: "${of_python[@]}" \
  "${platforms[@]}" --dest "$work/wheels" "${wheels[@]}"
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$site"; done
for pattern in "${unused[@]}"; do rm -rf "$site"/$pattern; done

mkdir -p "$(dirname "$archive")"
tar -C "$site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | xz "${compress[@]}" >"$archive"
ls -l "$archive"
