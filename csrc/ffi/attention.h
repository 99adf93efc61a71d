// What both passes of attention are given: sizes, mask, block mask and score parameters, read from
// the buffers and checked.

#pragma once

#include "ffi/bias.h"
#include "ffi/block_mask.h"
#include "ffi/score_params.h"
#include "ffi/shape.h"

namespace packax {

struct AttentionCall {
  Shape shape;
  Mask mask;
  BlockMask block_mask;
  ScoreParams scores;
  BiasParams bias = {};  // of calls of the second version

  // Whether nothing is asked for that the plain kernels have not.
  bool nothing_beside() const { return !scores.any() && !block_mask.there() && !bias.any(); }
};

// `o`: the operands and attributes of a pass, which names them alike. What a mask does not have is
// another array of it, so that only the attribute says so.
// `added`: null in calls of the first version.
template <typename Operands>
ffi::Error ReadAttention(const Operands& o, const ffi::AnyBuffer& kv_block_lists,
                         const BiasOperands* added, std::optional<AttentionCall>* call) {
  AttentionCall& c = call->emplace(AttentionCall{
      .shape = {},
      .mask = {o.q_lo, o.q_hi, o.q_ids, o.kv_ids, o.q_pos, o.kv_pos, o.q_blocks, o.q_order,
               o.segment_check},
      .block_mask = {o.block_mask, o.q_block_lists, kv_block_lists, o.q_block, o.kv_block},
      .scores = {o.scales, o.slopes, o.q_bias_pos, o.kv_bias_pos, o.scale, o.soft_cap},
  });
  PACKAX_TRY(ReadShape(o.query, o.key, o.value, o.q_lo, o.first_head, o.heads, &c.shape));
  PACKAX_TRY(ReadPrecision(o.float32_products, &c.shape));
  PACKAX_TRY(CheckMask(c.shape, c.mask));
  PACKAX_TRY(ReadScoreParams(c.shape, o.bias_of_indices, &c.scores));
  if (added != nullptr) PACKAX_TRY(ReadBias(c.shape, *added, &c.bias));
  return ReadBlockMask(c.shape, &c.block_mask);
}

}  // namespace packax
