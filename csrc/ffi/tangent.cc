// packax_forward_tangent_v1: checks the buffers, then runs the kernel of the call.
//
// Sizes come from the buffers; attributes hold only what cannot be derived from the buffers.

#include "ffi/attention.h"
#include "launch/select.h"

namespace packax {
namespace {

ffi::Error CheckTangent(Stream stream, ForwardTangentBuffers b) {
  TangentOperands o = {};
  PACKAX_TRY(ReadAttention(b, &o));
  PACKAX_CHECK(!o.lse_in_two(), kUnimplemented)
      << "bias or dropout_threshold is given, there are kernels without both";
  PACKAX_CHECK(o.heads == o.row_heads, kUnimplemented)
      << "attributes first_head and heads are " << o.first_head << " and " << o.heads
      << ", there are kernels for all of the query's " << o.row_heads;
  const Axis qk_dim{"qk_dim", o.qk_dim}, v_dim{"v_dim", o.v_dim};
  PACKAX_TRY(ExpectRows("out", b.out, o, v_dim));
  PACKAX_TRY(ExpectLse(b.lse, o));
  o.has_tq = Absent(b.tq) ? 0 : 1;
  o.has_tk = Absent(b.tk) ? 0 : 1;
  o.has_tv = Absent(b.tv) ? 0 : 1;
  if (o.has_tq != 0) PACKAX_TRY(ExpectRows("tq", b.tq, o, qk_dim));
  if (o.has_tk != 0) PACKAX_TRY(ExpectKeys("tk", b.tk, o, qk_dim));
  if (o.has_tv != 0) PACKAX_TRY(ExpectKeys("tv", b.tv, o, v_dim));
  PACKAX_TRY(ExpectRows("tout", *b.tout, o, v_dim));
  PACKAX_TRY(ExpectSums("tlse", *b.tlse, o));
  if (o.batch == 0) return ffi::Error::Success();

  Read(b, &o);
  o.out = RowsOf("out", b.out, o, o.v_dim);
  o.tq = RowsOf("tq", b.tq, o, o.qk_dim);
  o.tk = KeysOf("tk", b.tk, o, o.qk_dim);
  o.tv = KeysOf("tv", b.tv, o, o.v_dim);
  o.tout = RowsOf("tout", *b.tout, o, o.v_dim);
  return RunTangent(stream, o);
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(forward_tangent, ForwardTangent, CheckTangent);
