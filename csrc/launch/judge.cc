#include "launch/judge.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "launch/decode_shares.h"
#include "launch/select.h"

namespace packax {
namespace {

constexpr int64_t kMultiprocessors = 132;  // of an H200; no answer here depends on their number

using Devices = std::vector<Device>;

Devices DevicesOf(const auto& capabilities) {
  Devices devices;
  for (const int cc : capabilities) {
    Device& device = devices.emplace_back();
    device.cc = cc;
    device.driver = kNewestDriver;
    device.multiprocessors = static_cast<int>(kMultiprocessors);
  }
  return devices;
}

Devices DevicesOrAll(std::span<const int> gpus) {
  return gpus.empty() ? DevicesOf(CurrentTable().ccs()) : DevicesOf(gpus);
}

template <typename Operands>
Judgement JudgeAny(const Operands& o, const Devices& devices) {
  Judgement result;
  result.here = std::ranges::any_of(devices, [&](const auto& x) { return Choose(o, x).found; });
  result.found = result.here || std::ranges::any_of(DevicesOf(CurrentTable().ccs()),
                                                    [&](const auto& x) { return HasCommon(o, x); });
  return result;
}

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

// Chooses the algorithm, and with it the sums of the bias gradient. Separate kernels are
// deterministic, and can compute only the gradients that are needed.
void ChooseAlgorithm(const Devices& devices, bool deterministic, BackwardOperands* o) {
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
  if (fused && !deterministic) o->algorithm = Algorithm::kSm90Fused;
  if (separate && (deterministic || !everything || !fused)) {
    o->algorithm = Algorithm::kSm90Separate;
  }
  o->dbias_parts = sums && o->algorithm == Algorithm::kSm90Separate ? parts : 0;
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
// need no padding. `prepare` completes the operands for other sizes.
template <typename Operands, typename Prepare>
void JudgeDims(const Operands& o, const Devices& devices, const Prepare& prepare,
               Judgement* result) {
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
    prepare(&other);
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
template <typename Operands, typename Prepare>
void JudgeKeys(const Operands& o, const Devices& devices, const Prepare& prepare,
               Judgement* result) {
  const auto dedicated = [&](const Operands& call) {
    return std::ranges::any_of(devices, [&](const Device& x) {
      const Choice choice = Choose(call, x);
      return choice.found && !choice.fallback;
    });
  };
  if (o.bias_kind == 0 || o.kv_len % 8 == 0 || dedicated(o)) return;
  Operands wide = o;
  wide.kv_len = static_cast<int32_t>(8 * CeilDiv(o.kv_len, 8));
  prepare(&wide);
  Judgement other;
  JudgeDims(wide, devices, prepare, &other);
  if (dedicated(wide) || other.qk_dim > 0) result->kv_len = wide.kv_len;
}

template <typename Operands, typename Prepare>
Judgement JudgeAttention(const Operands& o, const Devices& devices, const Prepare& prepare) {
  Judgement result = JudgeAny(o, devices);
  if (!result.here && !result.found) return result;
  JudgeDims(o, devices, prepare, &result);
  JudgeKeys(o, devices, prepare, &result);
  return result;
}

}  // namespace

void ChooseAlgorithm(std::span<const int> gpus, bool deterministic, BackwardOperands* o) {
  ChooseAlgorithm(DevicesOrAll(gpus), deterministic, o);
}

Judgement Judge(const ForwardOperands& o, std::span<const int> gpus) {
  return JudgeAttention(o, DevicesOrAll(gpus), [](ForwardOperands*) {});
}

Judgement Judge(BackwardOperands o, std::span<const int> gpus, bool deterministic) {
  const Devices devices = DevicesOrAll(gpus);
  const auto choose = [&](BackwardOperands* x) { ChooseAlgorithm(devices, deterministic, x); };
  choose(&o);
  Judgement result = JudgeAttention(o, devices, choose);
  result.algorithm = o.algorithm;
  int64_t columns = o.qk_dim;
  for (const Device& x : devices) {
    const Choice choice = Choose(o, x);
    if (choice.needs == Algorithm::kSm90Fused) columns = std::max(columns, choice.qk_dim);
  }
  o.dq_columns = columns;
  result.workspace = o.workspace();
  result.dbias_parts = o.dbias_parts;
  return result;
}

Judgement Judge(const TangentOperands& o, std::span<const int> gpus) {
  return JudgeAny(o, DevicesOrAll(gpus));
}

Judgement Judge(const DecodeOperands& o, std::span<const int> gpus) {
  Judgement result;
  const bool wide = o.dtype != Dtype::kBf16 && o.dtype != Dtype::kF16;
  if (!o.fp8 || !wide) result = JudgeAny(o, DevicesOrAll(gpus));
  result.splits = DecodeRoom(o);
  return result;
}

Judgement Judge(const DocumentsOperands& o, std::span<const int> gpus) {
  return JudgeAny(o, DevicesOrAll(gpus));
}

Judgement Judge(const BlocksOperands& o, std::span<const int> gpus) {
  return JudgeAny(o, DevicesOrAll(gpus));
}

}  // namespace packax
