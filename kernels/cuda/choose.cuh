// What all routers share: one warp a row, one int of shared memory an expert, lane e % 32 owns expert e.
#pragma once
#include "common.cuh"

constexpr int kNone = -2147483647 - 1;
// A row's counters, in the order of ops/routing.py's COUNTS.
constexpr int kCounts = 8, kRows = 0, kCertified = 1, kFallback = 2, kCandidates = 3, kScored = 4, kSaturated = 5;
constexpr int kAudited = 6, kWrong = 7;

struct Row {
  const float* logits;
  int* chosen;
  float* weights;
  int *counts, *status;
  float* span;
  int experts, k, normalise, lane;
};

__device__ __forceinline__ Row row_at(const float* logits, int* chosen, float* weights, int* counts, float* span,
                                      int* status, int experts, int k, int normalise) {
  const i64 r = blockIdx.x;
  return {logits + r * experts, chosen + r * k, weights + r * k,   counts + r * kCounts,   status + r,
          span + r * 2,         experts,        k,                 normalise,              (int)threadIdx.x};
}

// Floats in the order of integers; both zeros are one number.
__device__ __forceinline__ int order_of(float f) {
  const int bits = __float_as_int(f + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// A sum in the order of the reference: sixteen lanes, then i + 8, i + 4, i + 2, i + 1.
__device__ __forceinline__ float sum16(float v) {
  for (int lanes = 8; lanes; lanes >>= 1) v += __shfl_xor_sync(kAll, v, lanes);
  return __shfl_sync(kAll, v, 0);
}

struct Span {
  float low, top;
  bool fine;
};
// Smallest and largest finite logit; not fine when one is NaN or the largest is not finite.
__device__ __forceinline__ Span span_of(const Row& r) {
  float low = CLB_INF, top = -CLB_INF;
  bool fine = true;
  for (int e = r.lane; e < r.experts; e += 32) {
    const float v = r.logits[e];
    fine = fine && v == v;
    top = fmaxf(top, v);
    if (fabsf(v) <= kLargest) low = fminf(low, v);
  }
  low = -warp_max(-low), top = warp_max(top);
  fine = __all_sync(kAll, fine) && fabsf(top) <= kLargest;
  if (r.lane == 0) {
    r.span[0] = low, r.span[1] = top;
    if (!fine) atomicMax(r.status, kNotFinite);
  }
  return {low, top, fine};
}

// The k largest keys, best first, ties to the lower index; they become kNone.
__device__ __forceinline__ void take_best(const Row& r, int* keys) {
  for (int i = 0; i < r.k; ++i) {
    int best = kNone, at = r.experts - 1;
    for (int e = r.lane; e < r.experts; e += 32)
      if (keys[e] > best) best = keys[e], at = e;
    const int most = __reduce_max_sync(kAll, best);
    at = __reduce_min_sync(kAll, best == most ? at : r.experts - 1);
    if (r.lane == at % 32) keys[at] = kNone;
    if (r.lane == i % 32) r.chosen[i] = at;
  }
}

// Weights of the chosen, each written by lane i % 32, divided by their own sum or by all experts'.
__device__ __forceinline__ void divide(const Row& r, float chosen, float all) {
  const float total = r.normalise ? warp_sum(chosen) : warp_sum(all);
  for (int i = r.lane; i < r.k; i += 32) r.weights[i] /= total;
}

__device__ __forceinline__ void count(const Row& r, int scored, int saturated, int fallback) {
  if (r.lane) return;
  for (int i = 0; i < kCounts; ++i) r.counts[i] = 0;
  r.counts[kRows] = 1, r.counts[kScored] = scored, r.counts[kSaturated] = saturated, r.counts[kFallback] = fallback;
}

__device__ __forceinline__ void choose_exactly(const Row& r, float top, int* keys) {
  for (int e = r.lane; e < r.experts; e += 32) keys[e] = order_of(r.logits[e]);
  take_best(r, keys);
  float chosen = 0.0f, all = 0.0f;
  for (int i = r.lane; i < r.k; i += 32) chosen += r.weights[i] = expf(r.logits[r.chosen[i]] - top);
  for (int e = r.lane; !r.normalise && e < r.experts; e += 32) all += expf(r.logits[e] - top);
  divide(r, chosen, all);
}
