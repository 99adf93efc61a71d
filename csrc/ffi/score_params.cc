#include "ffi/score_params.h"

#include <cmath>

namespace packax {
namespace {

constexpr int32_t kMultiple = 8;  // of head dims: rows begin at whole 16 bytes

ffi::Error ReadBatch(const char* name, const ffi::AnyBuffer& buffer, const Shape& s,
                     int32_t* batch) {
  const int64_t rows = buffer.dimensions()[0];
  PACKAX_CHECK(rows == 1 || rows == s.batch, kInvalidArgument)
      << name << " has " << rows << " rows (axis 0), expected 1 or the batch, " << s.batch;
  *batch = static_cast<int32_t>(rows);
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ReadScoreParams(const Shape& s, int32_t bias_of_indices, ScoreParams* p) {
  for (const auto& [name, dim] : {std::pair{"qk_dim", s.qk_dim}, std::pair{"v_dim", s.v_dim}}) {
    PACKAX_CHECK(dim % kMultiple == 0, kUnimplemented)
        << name << " is " << dim << ", there are kernels for multiples of " << kMultiple;
  }
  PACKAX_TRY(CheckScale(p->scale));
  PACKAX_CHECK(std::isfinite(p->soft_cap) && p->soft_cap >= 0, kInvalidArgument)
      << "attribute soft_cap is " << p->soft_cap << ", expected a finite number, 0 for none";
  if (!Absent(p->scales)) {
    PACKAX_TRY(ExpectRank("scales", p->scales, 1, "(scales_batch)"));
    PACKAX_TRY(ReadBatch("scales", p->scales, s, &p->scales_batch));
    PACKAX_TRY(
        Expect("scales", p->scales, ffi::DataType::F32, {{"scales_batch", p->scales_batch}}));
  }
  PACKAX_TRY(ExpectAttribute("bias_of_indices", bias_of_indices, 1));
  p->of_indices = bias_of_indices == 1;
  if (Absent(p->slopes)) return ffi::Error::Success();
  PACKAX_TRY(ExpectRank("slopes", p->slopes, 2, "(bias_batch, heads)"));
  PACKAX_TRY(ReadBatch("slopes", p->slopes, s, &p->bias_batch));
  const Axis batch{"bias_batch", p->bias_batch};
  PACKAX_TRY(Expect("slopes", p->slopes, ffi::DataType::F32, {batch, {"heads", s.heads}}));
  PACKAX_TRY(Expect("q_bias_pos", p->q_bias_pos, ffi::DataType::S32, {batch, {"q_len", s.q_len}}));
  return Expect("kv_bias_pos", p->kv_bias_pos, ffi::DataType::S32, {batch, {"kv_len", s.kv_len}});
}

}  // namespace packax
