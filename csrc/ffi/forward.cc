// packax_forward_v1: checks the buffers, then runs the kernels of the call.
//
// Sizes come from the buffers; attributes hold only what cannot be derived from the buffers.

#include "ffi/attention.h"
#include "launch/select.h"

namespace packax {
namespace {

ffi::Error CheckForward(Stream stream, ForwardBuffers b) {
  ForwardOperands o = {};
  PACKAX_TRY(ReadAttention(b, &o));
  PACKAX_TRY(
      Expect("q_order_192", b.q_order_192, ffi::DataType::S32,
             {{"mask_batch", o.mask_batch}, {"ceil(q_len/192)", CeilDiv(o.q_len, kTile192)}}));
  PACKAX_TRY(ExpectAttribute("row_keys", b.row_keys, kMaxInt32));
  PACKAX_TRY(ReadSinks(b.sinks, o.batch, o.heads, &o.sink_batch));
  PACKAX_TRY(ExpectRows("out", *b.out, o, {"v_dim", o.v_dim}));
  PACKAX_TRY(CheckInit("out", b.init, *b.out));
  PACKAX_TRY(ExpectLse(*b.lse, o));
  o.row_stats = !Absent(*b.row_max);
  if (o.row_stats) PACKAX_TRY(ExpectSums("row_max", *b.row_max, o));
  PACKAX_TRY(Expect("counter", *b.counter, ffi::DataType::S32, {{"words", 1}}));
  if (o.batch == 0) return ffi::Error::Success();

  Read(b, &o);
  o.out = RowsOf("out", *b.out, o, o.v_dim);
  if (!o.row_stats) o.row_max = nullptr;
  return RunForward(stream, o);
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(forward, Forward, CheckForward);
