// What calls of the second version have besides: a bias that is an array, and dropout. Read from
// the buffers and checked once.

#pragma once

#include "ffi/shape.h"

namespace packax {

// In the order of the signatures.
struct BiasOperands {
  ffi::AnyBuffer bias, dropout_streams, dropout_rows;
  int64_t dropout_threshold;
};

// As the kernels take it (csrc/kernels/portable/bias.py, dropout.py).
struct BiasParams {
  const void* bias = nullptr;
  const void* dropout_streams = nullptr;  // (batch, heads, 4) uint32
  const void* dropout_rows = nullptr;     // (dropout_rows_batch, q_len) int32
  float inverse_keep = 1;                 // 1 / the share of probabilities that is kept
  int32_t bias_kind = 0;                  // 1: of the query's dtype, 2: of float32; 0: not there
  int32_t bias_axes = 0;  // bit 0: one for each batch row, 1: for each head, 2: for each row
  int32_t dropout_threshold = 0;  // the bits of a uint32; 0: nothing is dropped
  int32_t dropout_rows_batch = 1;
  int32_t batch = 1, heads = 1, rows = 1;  // of the bias

  bool has_bias() const { return bias_kind > 0; }
  bool any() const { return has_bias() || dropout_threshold != 0; }
};

ffi::Error ReadBias(const Shape& s, const BiasOperands& o, BiasParams* p);

// Of a bias: its gradient has its shape and dtype.
ffi::Error CheckBiasGradient(const ffi::AnyBuffer& bias, const ffi::AnyBuffer& dbias);

}  // namespace packax
