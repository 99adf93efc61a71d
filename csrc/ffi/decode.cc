// packax_decode_v1: attention of a few new rows of every sequence over its cache. packax_ragged_v1:
// of any number of new rows of each, packed. Checks the buffers, then runs the kernels of the call.

#include <algorithm>
#include <cmath>

#include "ffi/checks.h"
#include "ffi/stages.h"
#include "launch/select.h"

namespace packax {
namespace {

constexpr int64_t kMaxRows = 16;  // new rows per sequence
constexpr int64_t kItem = 8;      // numbers of an item, or of a tile of a chunk

// `batch` and `rows`: the largest batch and q_len.
ffi::Error ReadQuery(const DecodeBuffers& b, int64_t batch, int64_t rows, DecodeOperands* o) {
  PACKAX_TRY(ExpectRank("query", b.query, 4, "(batch, q_len, heads, qk_dim)"));
  PACKAX_TRY(ReadDtype(b.query, b.float32_products == 1, &o->dtype));
  o->fp8 = b.key.element_type() == ffi::DataType::F8E4M3FN;
  o->bfloat16_query = o->dtype == Dtype::kBf16 ? 1 : 0;
  PACKAX_CHECK(!o->fp8 || o->dtype == Dtype::kBf16 || o->dtype == Dtype::kF16, kUnimplemented)
      << "no decode kernel for a query in " << DtypeText(b.query.element_type())
      << " over key in float8_e4m3fn, only for bfloat16 and float16";
  const auto sizes = b.query.dimensions();
  PACKAX_TRY(ToInt32("batch (query axis 0)", sizes[0], 0, batch, &o->batch));
  PACKAX_TRY(ToInt32("q_len (query axis 1)", sizes[1], 1, rows, &o->q_len));
  PACKAX_TRY(ToInt32("heads (query axis 2)", sizes[2], 1, kMaxHeads, &o->heads));
  PACKAX_TRY(ToInt32("qk_dim (query axis 3)", sizes[3], 1, kMaxInt32, &o->qk_dim));
  PACKAX_TRY(ToInt32("v_dim (value axis 3)", b.value.dimensions()[3], 1, kMaxInt32, &o->v_dim));
  return CheckRowSize(o->heads, std::max(o->qk_dim, o->v_dim));
}

// `sequences`: the rows of block_table.
ffi::Error ReadCache(const DecodeBuffers& b, bool paged, Axis sequences, DecodeOperands* o) {
  const auto key_sizes = b.key.dimensions();
  PACKAX_TRY(ToInt32("kv_heads (key axis 2)", key_sizes[2], 1, kMaxHeads, &o->kv_heads));
  PACKAX_CHECK(o->heads % o->kv_heads == 0, kInvalidArgument)
      << "query has " << o->heads << " heads, expected a multiple of the " << o->kv_heads
      << " heads of key and value";
  Axis first{"batch", o->batch}, second{"kv_len", key_sizes[1]};
  if (!paged) {
    PACKAX_TRY(ToInt32("kv_len (key axis 1)", key_sizes[1], 1, kMaxLength, &o->kv_len));
  } else {
    PACKAX_TRY(ExpectRank("block_table", b.block_table, 2, "(batch, table_width)"));
    const int64_t width = b.block_table.dimensions()[1];
    PACKAX_TRY(ToInt32("pages (key axis 0)", key_sizes[0], 1, kMaxInt32, &o->pages));
    PACKAX_TRY(ToInt32("page_size (key axis 1)", key_sizes[1], 1, kMaxLength, &o->page_size));
    PACKAX_TRY(ToInt32("table_width (block_table axis 1)", width, 1, kMaxLength, &o->table_width));
    PACKAX_TRY(ToInt32("table_width * page_size", width * o->page_size, 1, kMaxLength, &o->kv_len));
    PACKAX_TRY(Expect("block_table", b.block_table, ffi::DataType::S32,
                      {sequences, {"table_width", width}}));
    first = {"pages", o->pages};
    second = {"page_size", o->page_size};
  }
  const Axis kv_heads{"kv_heads", o->kv_heads};
  const ffi::DataType dtype = o->fp8 ? ffi::DataType::F8E4M3FN : DataTypeOf(o->dtype);
  PACKAX_TRY(Expect("key", b.key, dtype, {first, second, kv_heads, {"qk_dim", o->qk_dim}}));
  PACKAX_TRY(Expect("value", b.value, dtype, {first, second, kv_heads, {"v_dim", o->v_dim}}));
  if (!o->fp8) return ffi::Error::Success();
  PACKAX_TRY(ExpectRank("key_scale", b.key_scale, 2,
                        paged ? "(1 or pages, kv_heads)" : "(1 or batch, kv_heads)"));
  o->scale_rows = 1;
  if (b.key_scale.dimensions()[0] != 1) o->scale_rows = static_cast<int32_t>(first.size);
  const Axis rows{paged ? "1 or pages" : "1 or batch", o->scale_rows};
  const ffi::DataType f32 = ffi::DataType::F32;
  PACKAX_TRY(Expect("key_scale", b.key_scale, f32, {rows, kv_heads}));
  return Expect("value_scale", b.value_scale, f32, {rows, kv_heads});
}

ffi::Error ReadRest(DecodeBuffers& b, DecodeOperands* o) {
  const Axis batch{"batch", o->batch}, q_len{"q_len", o->q_len}, heads{"heads", o->heads};
  const Axis v_dim{"v_dim", o->v_dim};
  const ffi::DataType f32 = ffi::DataType::F32;
  PACKAX_TRY(Expect("kv_start", b.kv_start, ffi::DataType::S32, {batch, q_len}));
  PACKAX_TRY(Expect("kv_end", b.kv_end, ffi::DataType::S32, {batch, q_len}));
  PACKAX_TRY(ReadSinks(b.sinks, o->batch, o->heads, &o->sink_batch));
  o->has_sinks = o->sink_batch > 0 ? 1 : 0;
  o->sink_batch = std::max(o->sink_batch, 1);  // the kernel divides by it
  PACKAX_TRY(Expect("out", *b.out, DataTypeOf(o->dtype), {batch, q_len, heads, v_dim}));
  return Expect("lse", *b.lse, f32, {batch, heads, q_len});
}

ffi::Error ReadShares(DecodeBuffers& b, DecodeOperands* o) {
  const Axis batch{"batch", o->batch}, q_len{"q_len", o->q_len}, heads{"heads", o->heads};
  const Axis v_dim{"v_dim", o->v_dim};
  const ffi::DataType f32 = ffi::DataType::F32;
  PACKAX_TRY(ExpectRank("partial", *b.partial, 5, "(splits, batch, q_len, heads, v_dim)"));
  PACKAX_TRY(
      ToInt32("splits (partial axis 0)", b.partial->dimensions()[0], 1, kMaxInt32, &o->room));
  const Axis splits{"splits", o->room};
  PACKAX_TRY(Expect("partial", *b.partial, f32, {splits, batch, q_len, heads, v_dim}));
  return Expect("sums", *b.sums, f32, {splits, batch, q_len, heads});
}

ffi::Error ReadItems(RaggedBuffers& b, DecodeOperands* o) {
  const ffi::DataType s32 = ffi::DataType::S32, f32 = ffi::DataType::F32;
  PACKAX_TRY(ExpectRank("partial", *b.partial, 4, "(items, tile_rows, heads, v_dim)"));
  const auto sizes = b.partial->dimensions();
  PACKAX_TRY(ToInt32("items (partial axis 0)", sizes[0], 1, kMaxInt32, &o->room));
  PACKAX_TRY(ToInt32("tile_rows (partial axis 1)", sizes[1], 1, kMaxInt32, &o->tile_rows));
  const Axis items{"items", o->room}, tile_rows{"tile_rows", o->tile_rows};
  const Axis heads{"heads", o->heads};
  PACKAX_TRY(Expect("partial", *b.partial, f32, {items, tile_rows, heads, {"v_dim", o->v_dim}}));
  PACKAX_TRY(Expect("sums", *b.sums, f32, {items, tile_rows, heads}));
  const int64_t alone = int64_t{2} * o->q_len + kItem * o->room;
  PACKAX_TRY(ExpectRank("work", b.work, 1, "(2 * q_len + 8 * items)"));
  const int64_t more = b.work.dimensions()[0] - alone - o->q_len;  // with chunks
  if (more <= 0 || more % kItem != 0) {
    return Expect("work", b.work, s32, {{"2 * q_len + 8 * items", alone}});
  }
  PACKAX_TRY(ToInt32("tiles of chunks (in work)", more / kItem - 1, 0, kMaxInt32, &o->chunk_tiles));
  o->counter = b.counter->untyped_data();
  PACKAX_TRY(Expect("counter", *b.counter, s32, {{"counter", 1}}));
  return Expect("work", b.work, s32,
                {{"3 * q_len + 8 * (items + 1 + tiles)", more + alone + o->q_len}});
}

// The views of query, key and value, for tensor maps. They have no elements in FP8.
void MakeViews(const DecodeBuffers& b, DecodeOperands* o) {
  const TensorMapElement element =
      o->dtype == Dtype::kF16 ? TensorMapElement::kF16 : TensorMapElement::kBf16;
  const auto view = [&](const char* name, const ffi::AnyBuffer& x) {
    const auto sizes = x.dimensions();
    return TensorView{name,     x.untyped_data(), element,  sizes[0],
                      sizes[2], sizes[1],         sizes[3], sizes[2] * sizes[3]};
  };
  o->query = view("query", b.query);
  o->key = view("key", b.key);
  o->value = view("value", b.value);
}

// `rows`: the largest q_len. `packed`: packed rows in a batch of 1, and their items, or null.
ffi::Error ReadAll(DecodeBuffers& b, int64_t rows, RaggedBuffers* packed, DecodeOperands* o) {
  const bool paged = packed != nullptr || !Absent(b.block_table);
  PACKAX_TRY(ExpectAttribute("float32_products", b.float32_products, 1));
  PACKAX_TRY(ExpectRank(
      "key", b.key, 4,
      paged ? "(pages, page_size, kv_heads, qk_dim)" : "(batch, kv_len, kv_heads, qk_dim)"));
  PACKAX_TRY(ExpectRank(
      "value", b.value, 4,
      paged ? "(pages, page_size, kv_heads, v_dim)" : "(batch, kv_len, kv_heads, v_dim)"));
  PACKAX_TRY(ReadQuery(b, packed != nullptr ? 1 : kMaxInt32, rows, o));
  Axis sequences{"batch", o->batch};
  if (packed != nullptr) {
    PACKAX_TRY(ExpectRank("block_table", b.block_table, 2, "(sequences, table_width)"));
    sequences = {"sequences", b.block_table.dimensions()[0]};
  }
  PACKAX_TRY(ReadCache(b, paged, sequences, o));
  PACKAX_TRY(ReadRest(b, o));
  PACKAX_TRY(packed != nullptr ? ReadItems(*packed, o) : ReadShares(b, o));
  PACKAX_CHECK(std::isfinite(b.scale), kInvalidArgument)
      << "attribute scale is " << b.scale << ", expected a finite number";
  PACKAX_TRY(CheckSoftCap(b.soft_cap));
  const int32_t multiple = o->multiple();
  PACKAX_CHECK(o->qk_dim % multiple == 0 && o->v_dim % multiple == 0, kUnimplemented)
      << "no decode kernel for head dims " << o->qk_dim << "x" << o->v_dim
      << " (query and key x value), which must be multiples of " << multiple;
  o->qk_eighths = o->qk_dim / 8;
  o->v_eighths = o->v_dim / 8;
  Read(b, o);
  MakeViews(b, o);
  return ffi::Error::Success();
}

ffi::Error CheckDecode(Stream stream, DecodeBuffers b) {
  DecodeOperands o = {};
  PACKAX_TRY(ReadAll(b, kMaxRows, nullptr, &o));
  return o.batch == 0 ? ffi::Error::Success() : RunDecode(stream, o);
}

ffi::Error CheckRagged(Stream stream, RaggedBuffers b) {
  DecodeOperands o = {};
  DecodeBuffers shared{b.query,  b.key,         b.value,     b.kv_start,
                       b.kv_end, b.block_table, b.key_scale, b.value_scale,
                       b.sinks,  b.out,         b.lse,       b.partial,
                       b.sums,   b.scale,       b.soft_cap,  b.float32_products};
  PACKAX_TRY(ReadAll(shared, kMaxInt32, &b, &o));
  o.workspace = b.work.untyped_data();
  return o.batch == 0 ? ffi::Error::Success() : RunDecode(stream, o);
}

}  // namespace
}  // namespace packax

PACKAX_DEFINE_TARGET(decode, Decode, CheckDecode);
PACKAX_DEFINE_TARGET(ragged, Ragged, CheckRagged);
