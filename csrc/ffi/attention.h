// Reads and checks the operands that both passes of attention share.

#pragma once

#include "call/operands.h"
#include "ffi/checks.h"
#include "ffi/stages.h"

namespace packax {

// Reads and checks the shared operands.
ffi::Error ReadAttention(AttentionBuffers& b, AttentionOperands* o);

// RowsOf: a view of query, out or one of their gradients, starting at the call's first head.
// KeysOf: a view of key, value or one of their gradients.
TensorView RowsOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim);
TensorView KeysOf(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                  int64_t dim);

// (batch, q_len, row_heads, dim): query, out and their gradients.
ffi::Error ExpectRows(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim);

// (batch, kv_len, kv_heads, dim): gradients of key and value.
ffi::Error ExpectKeys(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o,
                      Axis dim);

// (batch, heads, q_len) in float32: one number per row.
ffi::Error ExpectSums(const char* name, const ffi::AnyBuffer& buffer, const AttentionOperands& o);

// lse: (batch, heads, q_len), or (batch, heads, q_len, 2) if o.lse_in_two().
ffi::Error ExpectLse(const ffi::AnyBuffer& lse, const AttentionOperands& o);

// For a call that computes some of the heads: `init` holds the heads of earlier calls, and `result`
// must be the same memory. Absent in the first call, and if nothing is written.
ffi::Error CheckInit(const char* name, const ffi::AnyBuffer& init, const ffi::AnyBuffer& result);

}  // namespace packax
