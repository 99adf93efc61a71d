#include "ffi/block_mask.h"

namespace packax {

ffi::Error ReadBlockMask(const Shape& s, BlockMask* m) {
  PACKAX_CHECK(m->q_block >= 0 && m->kv_block >= 0 && (m->q_block > 0) == (m->kv_block > 0),
               kInvalidArgument)
      << "attributes q_block and kv_block are " << m->q_block << " and " << m->kv_block
      << ", expected both above 0, or both 0 without a block mask";
  if (m->q_block == 0) {
    m->q_block = m->kv_block = 1;  // divisors
    return ffi::Error::Success();
  }
  PACKAX_TRY(
      ExpectRank("block_mask", m->bits, 4, "(block_mask_batch, block_mask_heads, rows, words)"));
  const int64_t batch = m->bits.dimensions()[0], heads = m->bits.dimensions()[1];
  PACKAX_CHECK(batch == 1 || batch == s.mask_batch, kInvalidArgument)
      << "block_mask has " << batch << " rows (axis 0), expected 1 or mask_batch, " << s.mask_batch;
  PACKAX_CHECK(heads == 1 || heads == s.heads, kInvalidArgument)
      << "block_mask has " << heads << " heads (axis 1), expected 1 or those of the call, "
      << s.heads;
  m->batch = static_cast<int32_t>(batch);
  m->heads = static_cast<int32_t>(heads);
  PACKAX_TRY(Expect("block_mask", m->bits, ffi::DataType::S32,
                    {{"block_mask_batch", batch},
                     {"block_mask_heads", heads},
                     {"ceil(q_len/q_block)", CeilDiv(s.q_len, m->q_block)},
                     {"ceil(kv_len/kv_block/32)", CeilDiv(CeilDiv(s.kv_len, m->kv_block), 32)}}));
  return Expect("q_block_lists", m->q_lists, ffi::DataType::S32,
                {{"mask_batch", s.mask_batch},
                 {"block_mask_heads", heads},
                 {"ceil(q_len/128)", s.q_tiles()},
                 {"2+ceil(kv_len/64)", 2 + s.kv_blocks()}});
}

ffi::Error CheckListsOfKeys(const Shape& s, const BlockMask& m) {
  if (!m.there()) return ffi::Error::Success();
  return Expect("kv_block_lists", m.kv_lists, ffi::DataType::S32,
                {{"mask_batch", s.mask_batch},
                 {"block_mask_heads", m.heads},
                 {"ceil(kv_len/128)", s.kv_tiles()},
                 {"2+ceil(q_len/64)", 2 + s.q_blocks()}});
}

}  // namespace packax
