"""The spills and the serialised matrix products that the build accepts in kernels for sm_90a."""

# Bytes of local memory per thread (spills) that a variant for Hopper may use, by kernel and head
# dim (and, for float32, dtype). The build rejects more spills, and any wgmma that the assembler
# serialises. These are accepted because the portable tiles and the Hopper kernels were chosen by
# their times, spills included (docs/experiments.md lists variants with fewer spills that were
# slower). The Hopper kernels spill sizes and pointers, mostly outside the loops, and nothing in the
# forward's mask-free loop.
SPILLS: dict[tuple, int] = {
    ("forward", 64): 128,
    ("forward", 128): 112,
    ("forward", 192): 24,
    ("forward", 256): 112,
    ("backward_dkdv", 64): 488,
    ("backward_dkdv", 128): 256,
    ("backward_dkdv", 192): 192,
    ("backward_dkdv", 256): 200,
    ("backward_dq", 64): 104,
    ("backward_dq", 128): 80,
    ("backward_dq", 192): 160,
    ("backward_dq", 256): 104,
    ("backward_dkdv_fallback", 64): 248,
    ("backward_dkdv_fallback", 128): 680,
    ("backward_dkdv_fallback", 192): 304,
    ("backward_dq_fallback", 128): 288,
    ("backward_dq_fallback", 192): 16,
    ("backward_dq_fallback", 256): 56,
    ("forward_fallback", 256): 208,
    ("forward_fallback", 512): 88,
    ("backward_dkdv_fallback", 256): 552,
    ("backward_dkdv_fallback", 512): 520,
    ("backward_dq_fallback", 512): 176,  # none in the loop without a mask
    ("backward_dkdv_bias", 64): 544,
    ("backward_dkdv_bias", 128): 160,
    ("backward_dq_bias", 64): 240,
    ("backward_dq_bias", 128): 696,
    ("backward_dq_bias", 256): 344,
    ("forward_bias", 128): 160,
    ("forward_bias", 256): 480,
    ("backward_dkdv_bias", 256): 520,
    ("backward_dbias", 256): 72,  # 12 loads in the loop, no stores
    ("forward_bias_alone", 64): 40,
    ("forward_bias_alone", 128): 32,
    ("forward_bias_alone", 256): 240,
    ("backward_dkdv_bias_alone", 64): 16,
    ("backward_dkdv_bias_alone", 128): 368,
    ("backward_dkdv_bias_alone", 256): 552,
    ("backward_dq_bias_alone", 64): 64,
    ("backward_dq_bias_alone", 128): 104,
    ("backward_dq_bias_alone", 256): 320,
    ("backward_dkdv_dbias_alone", 128): 400,
    ("backward_dkdv_dbias_alone", 256): 592,
    ("backward_dbias_alone", 64): 104,
    ("backward_dbias_alone", 128): 192,
    ("backward_dbias_alone", 256): 8,
    ("backward_dbias", 128, "f32"): 360,
    ("forward_bias", 128, "tf32"): 184,
    ("backward_dkdv_bias", 128, "tf32"): 160,
    ("backward_dbias", 128, "tf32"): 608,
    ("forward_fallback", 128, "tf32"): 16,
    ("backward_dq_fallback", 128, "f32"): 48,
    ("backward_dq_fallback", 256, "f32"): 40,
    ("backward_dkdv_fallback", 256, "tf32"): 56,
    ("backward_dq_fallback", 128, "tf32"): 16,
    ("forward_tangent", 128): 8,
    ("forward_tangent_fallback", 128): 336,
    ("forward_tangent_fallback", 256): 760,
    ("forward_tangent_fallback", 64, "tf32"): 56,
    ("forward_tangent_fallback", 128, "tf32"): 560,
    # none in the loop without a mask
    ("forward_tangent_sm90", 128): 104,  # under ptxas 12.9; 56 under 13.4
    ("forward_sm90", 64): 304,  # under ptxas 12.9; 136 under 13.4
    ("forward_sm90_low_occupancy", 64): 120,  # under ptxas 12.9
    ("forward_sm90_short", 64): 120,  # under ptxas 12.9; 16 under 13.4
    ("forward_sm90", 96): 112,  # under ptxas 12.9; 32 under 13.4
    ("forward_sm90", 128): 136,  # under ptxas 12.9
    ("forward_sm90", 192): 144,  # under ptxas 12.9; 48 under 13.4
    ("forward_sm90", 256): 192,  # under ptxas 12.9; 80 under 13.4
    ("forward_sm90", (192, 192)): 112,  # under ptxas 12.9; 40 under 13.4
    ("forward_sm90", 512): 144,  # under ptxas 13.4; 112 under 12.9
    ("ragged_sm90", 64): 96,  # under ptxas 12.9; 24 under 13.4
    ("ragged_sm90", 128): 96,  # under ptxas 12.9; 56 under 13.4
    ("ragged_sm90_large_pages", 64): 88,  # under ptxas 12.9
    ("ragged_sm90_large_pages", 128): 88,  # under ptxas 12.9
    ("ragged_sm90_small_pages", 64): 16,  # under ptxas 12.9
    ("ragged_sm90_small_pages", 128): 112,  # under ptxas 12.9
    ("backward_sm90", 64): 32,  # under ptxas 12.9
    ("backward_sm90_pairs", 96): 40,  # under ptxas 13.4
    ("backward_sm90", 128): 56,  # under ptxas 12.9; 48 under 13.4
    ("decode_tall", 256): 24,
    ("decode", 512): 24,  # none in a loop
    ("decode_combine", 512): 16,  # around the loops
    ("decode_fp8_pages", 64): 8,
    ("decode_tall_fp8", 128): 8,
    ("decode_tall_fp8_pages", 64): 32,
    ("decode_tall_fp8_pages", 128): 16,
    ("backward_dkdv_sm90", 128): 40,  # under ptxas 12.9
    ("backward_dq_sm90", 64): 168,  # under ptxas 12.9
    ("backward_dq_sm90", 96): 144,  # under ptxas 12.9
    ("backward_dq_sm90", 128): 200,  # under ptxas 12.9; 192 under 13.4
    ("backward_dkdv_sm90", 192): 152,  # under ptxas 12.9; 80 under 13.4
    ("backward_dq_sm90", 192): 288,  # under ptxas 12.9
    ("backward_dkdv_sm90", (192, 192)): 24,  # under ptxas 12.9
    ("backward_dq_sm90", (192, 192)): 136,  # under ptxas 12.9; 96 under 13.4
    ("backward_dkdv_sm90", 256): 120,  # under ptxas 13.4
    ("backward_dq_sm90", 256): 184,  # under ptxas 12.9
    # none in the loops without a mask
    ("backward_dkdv_sm90_parts", 512): 56,  # under ptxas 13.4
    ("backward_dq_sm90_parts", 512): 56,  # under ptxas 13.4
    # with the largest logits, as without them
    ("forward_sm90_max_logits", 64): 304,  # under ptxas 12.9
    ("forward_sm90_max_logits", 128): 112,  # under ptxas 12.9
    ("forward_sm90_max_logits", 192): 144,  # under ptxas 12.9
    ("forward_sm90_max_logits", 256): 192,  # under ptxas 12.9
    ("forward_sm90_max_logits", (192, 192)): 112,  # under ptxas 12.9
    ("forward_sm90_max_logits", 512): 120,  # under ptxas 12.9
    # with a block mask
    ("forward_sm90_block_lists", 64): 152,  # under ptxas 12.9; 16 under 13.4
    ("backward_dq_sm90_block_lists", 64): 152,  # under ptxas 13.4; 104 under 12.9
    ("forward_sm90_block_lists", 128): 136,  # under ptxas 12.9; 96 under 13.4
    ("backward_dkdv_sm90_block_lists", 128): 160,  # under ptxas 12.9; 144 under 13.4
    ("backward_dq_sm90_block_lists", 128): 160,  # under ptxas 13.4; 136 under 12.9
    ("forward_sm90_block_lists", 192): 152,  # under ptxas 12.9; 96 under 13.4
    ("backward_dkdv_sm90_block_lists", 192): 192,  # under ptxas 12.9; 160 under 13.4
    ("backward_dq_sm90_block_lists", 192): 280,  # under ptxas 12.9; 200 under 13.4
    ("forward_sm90_block_lists", 256): 248,  # under ptxas 12.9; 104 under 13.4
    ("backward_dkdv_sm90_block_lists", 256): 96,  # under ptxas 13.4
    ("backward_dq_sm90_block_lists", 256): 192,  # under ptxas 12.9; 192 under 13.4
    # with a bias array
    ("forward_sm90_bias", (32, 32)): 104,  # under ptxas 12.9; 48 under 13.4
    ("forward_sm90_bias", 64): 104,  # under ptxas 12.9; 40 under 13.4
    ("forward_sm90_bias", 128): 96,  # under ptxas 12.9; 56 under 13.4
    ("forward_sm90_bias", 256): 144,  # under ptxas 12.9; 120 under 13.4
    ("forward_sm90_float32_bias", (32, 32)): 104,  # under ptxas 12.9; 32 under 13.4
    ("forward_sm90_float32_bias", 64): 104,  # under ptxas 12.9; 32 under 13.4
    ("backward_dkdv_sm90_bias", (32, 32)): 16,  # under ptxas 12.9; 8 under 13.4
    ("backward_dkdv_sm90_float32_bias", (32, 32)): 24,  # under ptxas 12.9; 8 under 13.4
    ("backward_dkdv_sm90_dbias", (32, 32)): 24,  # under ptxas 13.4; 8 under 12.9
    ("backward_dq_sm90_bias", (32, 32)): 96,  # under ptxas 12.9; 16 under 13.4
    ("backward_dq_sm90_bias", 64): 96,  # under ptxas 12.9; 8 under 13.4
    ("backward_dq_sm90_float32_bias", (32, 32)): 104,  # under ptxas 12.9; 24 under 13.4
    ("backward_dq_sm90_float32_bias", 64): 104,  # under ptxas 12.9; 32 under 13.4
    ("forward_sm90_float32_bias", 128): 112,  # under ptxas 12.9; 40 under 13.4
    ("forward_sm90_float32_bias", 256): 128,  # under ptxas 13.4; 104 under 12.9
    ("backward_dkdv_sm90_float32_bias", 128): 16,  # under ptxas 12.9
    ("backward_dq_sm90_bias", 128): 128,  # under ptxas 12.9; 120 under 13.4
    ("backward_dq_sm90_float32_bias", 128): 184,  # under ptxas 13.4; 120 under 12.9
    ("backward_shared_dbias", 128): 152,  # under ptxas 12.9; 48 under 13.4
    ("backward_shared_float32_dbias", 128): 152,  # under ptxas 12.9; 48 under 13.4
    ("backward_shared_dbias", (32, 32)): 144,  # under ptxas 12.9; 32 under 13.4
    ("backward_shared_dbias", 64): 144,  # under ptxas 12.9; 32 under 13.4
    ("backward_shared_float32_dbias", (32, 32)): 144,  # under ptxas 12.9; 32 under 13.4
    ("backward_shared_float32_dbias", 64): 144,  # under ptxas 12.9; 32 under 13.4
    ("backward_dkdv_sm90_dbias", 256): 136,  # under ptxas 13.4; 96 under 12.9
    # with ALiBi
    ("forward_sm90_alibi", 64): 280,  # under ptxas 12.9; 144 under 13.4
    ("forward_sm90_alibi", 128): 104,  # under ptxas 12.9
    ("backward_sm90_alibi", 64): 48,  # under ptxas 12.9
    ("backward_sm90_alibi", 128): 136,  # under ptxas 12.9; 136 under 13.4
    # with dropout: none in the loops that generate bits
    ("forward_sm90_dropout", 64): 128,  # under ptxas 12.9; 48 under 13.4
    ("forward_sm90_dropout", 128): 240,  # under ptxas 12.9; 72 under 13.4
    ("backward_sm90_dropout", 64): 32,  # under ptxas 12.9
    ("backward_sm90_dropout", 128): 160,  # under ptxas 13.4; 144 under 12.9
    ("backward_dkdv_sm90_dropout", 128): 120,  # under ptxas 12.9; 88 under 13.4
    ("backward_dq_sm90_dropout", 64): 120,  # under ptxas 12.9
    ("backward_dq_sm90_dropout", 128): 224,  # under ptxas 12.9; 136 under 13.4
    # with a soft cap: tanh branches while products are in flight; in the forward, most spills are
    # in the branch for scores past half the cap
    ("forward_sm90_soft_cap", 64): 456,  # under ptxas 12.9; 328 under 13.4
    ("forward_sm90_soft_cap", 128): 280,  # under ptxas 12.9; 40 under 13.4
    ("forward_sm90_soft_cap", 256): 232,  # under ptxas 12.9; 80 under 13.4
    ("backward_sm90_soft_cap", 64): 144,  # under ptxas 12.9; 64 under 13.4
    ("backward_sm90_soft_cap", 128): 328,  # under ptxas 12.9; 312 under 13.4
    ("backward_dkdv_sm90_soft_cap", 128): 304,  # under ptxas 12.9; 232 under 13.4
    ("backward_dkdv_sm90_soft_cap", 256): 224,  # under ptxas 12.9; 152 under 13.4
    ("backward_dq_sm90_soft_cap", 64): 128,  # under ptxas 12.9
    ("backward_dq_sm90_soft_cap", 128): 192,  # under ptxas 12.9; 168 under 13.4
    ("backward_dq_sm90_soft_cap", 256): 320,  # under ptxas 12.9; 248 under 13.4
}
# Kernels for Hopper whose wgmma the assembler may serialise (C7515): the portable dK/dV kernel,
# which is only a substitute there, and portable kernels with a bias array alone.
SERIALISED = (
    "backward_dkdv",
    "backward_dkdv_bias_alone",
    "backward_dkdv_dbias_alone",
    "forward_bias_alone",
    "forward_tangent",
    "forward_tangent_fallback",
)
