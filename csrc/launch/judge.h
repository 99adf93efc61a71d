// Answers questions about a call while a program is lowered, when the GPU that runs it may not be
// known and some sizes may not be: whether there are kernels, how to rewrite the call, which
// algorithm and workspace the backward needs. By the tables in select_*.cc; without a driver.

#pragma once

#include <span>
#include <vector>

#include "call/operands.h"

namespace packax {

struct Judgement {
  bool found = false;   // one of the GPUs has kernels, or any other GPU those that all GPUs have
  bool here = false;    // one of the GPUs has kernels
  bool native = false;  // kernels that are not fallback kernels take the call on all of the GPUs
  // Rewrites after which faster kernels take the call; 0: none.
  int64_t qk_dim = 0, v_dim = 0;  // to which to pad the head dims
  int64_t kv_len = 0;             // to which to pad the keys, for a bias

  // Of a backward. For documents, `workspace.others` is that of each batch row.
  Algorithm algorithm = Algorithm::kPortable;
  BackwardWorkspace workspace = {};
  int64_t dbias_parts = 0;  // sums of the bias gradient after the workspace

  int64_t splits = 0;  // of decoding: for how many shares of the keys the workspace has room
};

// GPUs with these compute capabilities, or with those of the table if there are none.
std::vector<Device> DevicesOf(std::span<const int> gpus, int driver);

// Of any call in call/operands.h, in a program that may run on any of these GPUs.
template <typename Operands>
Judgement Judge(const Operands& call, const std::vector<Device>& devices);

// Chooses `algorithm`, and with it `dbias_parts`.
void ChooseAlgorithm(const std::vector<Device>& devices, BackwardOperands* o);

}  // namespace packax
