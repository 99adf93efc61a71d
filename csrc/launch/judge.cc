#include "launch/judge.h"

#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "launch/decode_shares.h"
#include "launch/select.h"

namespace packax {
namespace {

constexpr int64_t kMultiprocessors = 132;  // of an H200; no answer here depends on their number

using Devices = std::vector<Device>;

// --- The algorithm of the backward.

// The parts into which the batch rows that share a bias are divided for its gradient, so that
// programs of equal length keep all multiprocessors busy (csrc/kernels/sm90/shared_dbias.py).
int64_t DbiasParts(const BackwardOperands& o) {
  if (o.batch == 0 || o.heads == 0 || o.q_len == 0 || o.kv_len == 0) return 1;
  const bool of_heads = (o.bias_axes & 2) != 0;
  const int64_t planes = Product({o.batch / o.bias_group(), of_heads ? o.heads : 1});
  const int64_t rows = (o.bias_axes & 4) != 0 ? o.q_len : 1;
  const int64_t tiles = Product({planes, CeilDiv(rows, 2 * kBlock), CeilDiv(o.kv_len, kBlock)});
  const int64_t most = std::min(Product({o.bias_group(), of_heads ? 1 : o.heads}),
                                std::max(int64_t{1}, 8 * kMultiprocessors / tiles));
  // The fewest rounds per part: rounds(n) / n is compared as a fraction.
  int64_t best = 1;
  const auto rounds = [&](int64_t n) { return CeilDiv(tiles * n, kMultiprocessors); };
  for (int64_t n = 2; n <= most; ++n) {
    if (rounds(n) * best < rounds(best) * n) best = n;
  }
  return best;
}

// Completes the operands for their sizes.
template <typename Operands>
void Prepare(const Devices& devices, Operands* o) {
  if constexpr (requires { o->algorithm; }) ChooseAlgorithm(devices, o);
}

// --- Rewrites.

// The head dims for which there are any kernels of the table, smallest first.
std::vector<std::pair<int, int>> BuiltDims() {
  std::set<std::pair<int, int>> found;
  for (size_t i = 0; i < std::size(kKernelNames); ++i) {
    for (const Variant* v : CurrentTable().Of(static_cast<Kernel>(i))) {
      if (v->qk_dim > 0) found.emplace(v->qk_dim, v->v_dim);
    }
  }
  std::vector<std::pair<int, int>> dims(found.begin(), found.end());
  std::ranges::stable_sort(dims, {}, [](const auto& x) { return x.first + x.second; });
  return dims;
}

// Head dims between those of the kernels are padded to the smallest for which all of the GPUs have
// dedicated kernels, apart from GPUs that have none for any head dims. Kernels that are clipped
// need no padding.
template <typename Operands>
void JudgeDims(const Operands& o, const Devices& devices, Judgement* result) {
  const auto clipped = [&](const Device& x) { return Choose(o, x).clipped; };
  if (!devices.empty() && std::ranges::all_of(devices, clipped)) {
    result->native = true;
    return;
  }
  const auto dims = BuiltDims();
  std::vector<Operands> calls;
  for (const auto& [qk_dim, v_dim] : dims) {
    Operands& other = calls.emplace_back(o);
    other.qk_dim = qk_dim;
    other.v_dim = v_dim;
    Prepare(devices, &other);
  }
  std::vector<const Device*> able;
  for (const Device& x : devices) {
    const auto has = [&](const Operands& call) { return HasDedicated(call, x); };
    if (std::ranges::any_of(calls, has)) able.push_back(&x);
  }
  for (const Operands& call : calls) {
    if (able.empty() || call.qk_dim < o.qk_dim || call.v_dim < o.v_dim) continue;
    const auto has = [&](const Device* x) { return HasDedicated(call, *x); };
    if (!std::ranges::all_of(able, has)) continue;
    result->native = call.qk_dim == o.qk_dim && call.v_dim == o.v_dim;
    if (!result->native) {
      result->qk_dim = call.qk_dim;
      result->v_dim = call.v_dim;
    }
    return;
  }
}

// The kernels for Hopper read a bias and write its gradient by TMA, which needs rows of whole 16
// bytes. The other kernels take up to three times as long.
template <typename Operands>
void JudgeKeys(const Operands& o, const Devices& devices, Judgement* result) {
  const auto dedicated = [&](const Operands& call) {
    return std::ranges::any_of(devices, [&](const Device& x) {
      const Choice choice = Choose(call, x);
      return choice.found && !choice.fallback;
    });
  };
  if (o.bias_kind == 0 || o.kv_len % 8 == 0 || dedicated(o)) return;
  Operands wide = o;
  wide.kv_len = static_cast<int32_t>(8 * CeilDiv(o.kv_len, 8));
  Prepare(devices, &wide);
  Judgement other;
  JudgeDims(wide, devices, &other);
  if (dedicated(wide) || other.qk_dim > 0) result->kv_len = wide.kv_len;
}

void JudgeWorkspace(BackwardOperands o, const Devices& devices, Judgement* result) {
  int64_t columns = o.qk_dim;
  for (const Device& x : devices) {
    const Choice choice = Choose(o, x);
    if (choice.needs == Algorithm::kSm90Fused) columns = std::max(columns, choice.qk_dim);
  }
  o.dq_columns = columns;
  result->algorithm = o.algorithm;
  result->workspace = o.workspace();
  result->dbias_parts = o.dbias_parts;
}

}  // namespace

Devices DevicesOf(std::span<const int> gpus, int driver) {
  const std::set<int>& all = CurrentTable().ccs();
  Devices devices;
  for (const int cc :
       gpus.empty() ? std::vector(all.begin(), all.end()) : std::vector(gpus.begin(), gpus.end())) {
    Device& device = devices.emplace_back();
    device.cc = cc;
    device.driver = driver;
    device.multiprocessors = static_cast<int>(kMultiprocessors);
  }
  return devices;
}

// Separate kernels are deterministic, and can compute only the gradients that are needed.
void ChooseAlgorithm(const Devices& devices, BackwardOperands* o) {
  const bool everything = o->needs_dq && o->needs_dkv;
  const auto parts = static_cast<int32_t>(o->needs_dbias ? DbiasParts(*o) : 0);
  bool separate = false, fused = false, sums = false;
  for (const Device& device : devices) {
    const auto chooses = [&](Algorithm algorithm, int32_t dbias_parts) {
      o->algorithm = algorithm;
      o->dbias_parts = dbias_parts;
      const Choice choice = Choose(*o, device);
      return choice.needs == algorithm && (choice.clipped || everything);
    };
    const bool alone = chooses(Algorithm::kSm90Separate, 0);
    sums = sums || (!alone && chooses(Algorithm::kSm90Separate, parts));
    separate = separate || alone || sums;
    fused = fused || chooses(Algorithm::kSm90Fused, 0);
  }
  o->algorithm = Algorithm::kPortable;
  if (fused && !o->deterministic) o->algorithm = Algorithm::kSm90Fused;
  if (separate && (o->deterministic || !everything || !fused)) {
    o->algorithm = Algorithm::kSm90Separate;
  }
  o->dbias_parts = sums && o->algorithm == Algorithm::kSm90Separate ? parts : 0;
}

template <typename Operands>
Judgement Judge(const Operands& call, const Devices& devices) {
  Operands o = call;
  Prepare(devices, &o);
  Judgement result;
  if constexpr (std::is_base_of_v<MaskOperands, Operands>) {
    if (o.kv_len == 0 || o.batch > o.kMaxBatch) return result;
  }
  if constexpr (std::is_same_v<DocumentsOperands, Operands>) {
    if (o.kv_len > o.kMaxKeys) return result;
    result.workspace = {0, 0, o.words()};
  }
  result.here = std::ranges::any_of(devices, [&](const auto& x) { return Choose(o, x).found; });
  result.found = result.here || std::ranges::any_of(DevicesOf({}, kNewestDriver),
                                                    [&](const auto& x) { return HasCommon(o, x); });
  if constexpr (requires { o.algorithm; }) JudgeWorkspace(o, devices, &result);
  if constexpr (requires { o.fp8; }) result.splits = DecodeRoom(o);
  if constexpr (requires { o.bias_kind; }) {
    if (IsAligned(o)) {
      JudgeDims(o, devices, &result);
      JudgeKeys(o, devices, &result);
    }
  }
  return result;
}

template Judgement Judge(const ForwardOperands&, const Devices&);
template Judgement Judge(const BackwardOperands&, const Devices&);
template Judgement Judge(const TangentOperands&, const Devices&);
template Judgement Judge(const DecodeOperands&, const Devices&);
template Judgement Judge(const DocumentsOperands&, const Devices&);
template Judgement Judge(const BlocksOperands&, const Devices&);

}  // namespace packax
