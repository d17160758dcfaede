// Attention of a row over the tokens of its sight, in order of position, through the page table. Split-K: a block
// takes kSplit tokens for one head and leaves a largest score, a sum and a mix; attention_merge joins them in order.
// The splits depend on the row's own length alone, so the batch changes no bit.
#include "common.cuh"

constexpr int kSplit = 256, kWarps = 4;

struct Online {
  float top, sum;
};
// Two parts of a softmax: what each is worth beside the other.
__device__ __forceinline__ float worth(float top, float most) { return top == -CLB_INF ? 0.0f : expf(top - most); }

// parts: [rows][splits][heads][2 + dim]. begin[r]: of the row's list in `sight`; count[r]: its tokens.
template <class T, int kLaneDims>
__global__ void __launch_bounds__(128)
attention(const float* __restrict__ queries, const T* __restrict__ keys, const T* __restrict__ values,
          const int* __restrict__ sight, const i64* __restrict__ begin, const int* __restrict__ count,
          float* __restrict__ parts, int* __restrict__ status, int heads, int kv_heads, int dim, int stride,
          int tokens, float scale) {
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, total = count[row];
  if (split * kSplit >= total) return;  // the whole block
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = head / (heads / kv_heads);
  const int last = min(total, (split + 1) * kSplit);
  const float* query = queries + (i64)row * stride + head * dim;
  float q[kLaneDims], mix[kLaneDims], top = -CLB_INF, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    q[i] = i * 32 + lane < dim ? query[i * 32 + lane] : 0.0f;
    mix[i] = 0.0f;
  }
  for (int t = split * kSplit + warp; t < last; t += kWarps) {
    const int token = __ldg(sight + begin[row] + t);
    if (token < 0 || token >= tokens) {  // the same for the whole warp
      if (lane == 0) atomicMax(status + row, kBadIndex);
      continue;
    }
    const i64 at = ((i64)token * kv_heads + group) * dim;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i)
      if (i * 32 + lane < dim) score = fmaf(q[i], to_float(keys[at + i * 32 + lane]), score);
    score = warp_sum(score) * scale;
    const float most = fmaxf(top, score), old = worth(top, most), now = worth(score, most);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i)
      if (i * 32 + lane < dim) mix[i] = fmaf(now, to_float(values[at + i * 32 + lane]), mix[i] * old);
    sum = fmaf(sum, old, now);
    top = score != score ? score : most;  // fmaxf drops a NaN, which must reach the result
  }
  float* room = clb_shared<float>();  // [kWarps][2 + dim]
  const int wide = 2 + dim;
  if (lane == 0) room[warp * wide] = top, room[warp * wide + 1] = sum;
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i)
    if (i * 32 + lane < dim) room[warp * wide + 2 + i * 32 + lane] = mix[i];
  __syncthreads();
  float most = -CLB_INF;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, room[w * wide]);
  float* out = parts + (((i64)row * gridDim.x + split) * heads + head) * wide;
  for (int i = threadIdx.x; i <= dim; i += blockDim.x) {  // 0: the sum, then the mix
    float joined = 0.0f;
    for (int w = 0; w < kWarps; ++w) joined = fmaf(worth(room[w * wide], most), room[w * wide + 1 + i], joined);
    out[1 + i] = joined;
  }
  if (threadIdx.x == 0) out[0] = most;
}

__global__ void __launch_bounds__(128)
attention_merge(const float* __restrict__ parts, const int* __restrict__ count, float* __restrict__ out, int heads,
                int dim, int splits) {
  const int head = blockIdx.x, row = blockIdx.y, wide = 2 + dim, used = (count[row] + kSplit - 1) / kSplit;
  const float* part = parts + ((i64)row * splits * heads + head) * wide;
  const i64 step = (i64)heads * wide;
  float most = -CLB_INF, sum = 0.0f;
  for (int s = 0; s < used; ++s) most = fmaxf(most, part[s * step]);
  for (int s = 0; s < used; ++s) sum = fmaf(worth(part[s * step], most), part[s * step + 1], sum);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    float mixed = 0.0f;
    for (int s = 0; s < used; ++s) mixed = fmaf(worth(part[s * step], most), part[s * step + 2 + i], mixed);
    out[((i64)row * heads + head) * dim + i] = mixed / sum;
  }
}

// Expert-local sight: of the positions in its window a row sees the first `sinks`, the last `recent`, and between them
// those whose first expert is among the k that it is guessed to choose (or is not known yet). One warp a row.
__global__ void __launch_bounds__(32)
collect_sight(const int* __restrict__ where, const i16* __restrict__ first, const int* __restrict__ guess,
              const int* __restrict__ seat, const int* __restrict__ position, int* __restrict__ sight,
              int* __restrict__ count, int* __restrict__ status, int k, int experts, int layer, int layers,
              int positions, int window, int recent, int sinks) {
  const int row = blockIdx.x, lane = threadIdx.x, end = position[row] + 1;
  const int begin = window && end > window ? end - window : 0;
  const i64 table = ((i64)seat[row] * layers + layer) * positions;
  int found = 0;
  for (int t = begin + lane; t - lane < end; t += 32) {  // the warp stays together
    const bool there = t < end;
    const int expert = there ? first[table + t] : -1;
    bool wanted = there && (t < sinks || t >= end - recent);
    if (there && !wanted) {
      wanted = expert == -1;
      for (int i = 0; i < k; ++i) wanted = wanted || expert == guess[(i64)row * k + i];
      if (expert < -1 || expert >= experts) atomicMax(status + row, kBadIndex);
    }
    const u32 mask = __ballot_sync(kAll, wanted);
    if (wanted) sight[(i64)row * positions + found + __popc(mask & ((1u << lane) - 1))] = where[table + t];
    found += __popc(mask);
  }
  if (lane == 0) count[row] = found;
}
