// Of a row's logits: the largest (lower index on ties) and the natural log of the sum of exponentials. One block a row.
#include "common.cuh"

__global__ void __launch_bounds__(256)
finish_logits(const float* __restrict__ logits, int* __restrict__ argmax, float* __restrict__ largest,
              float* __restrict__ logsumexp, int vocab) {
  const float* x = logits + (i64)blockIdx.x * vocab;
  float* room = clb_shared<float>();  // one word a warp
  float top = -CLB_INF;
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) top = fmaxf(top, x[i]);
  top = block_max(top, room);
  int best = vocab - 1;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
    if (x[i] == top) best = min(best, i);
    sum += expf(x[i] - top);
  }
  sum = block_sum(sum, room);
  for (int lanes = 16; lanes; lanes >>= 1) best = min(best, __shfl_xor_sync(kAll, best, lanes));
  int* found = reinterpret_cast<int*>(room);
  if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < (int)(blockDim.x >> 5); ++w) best = min(best, found[w]);
    argmax[blockIdx.x] = best, largest[blockIdx.x] = x[best];
    logsumexp[blockIdx.x] = top + logf(sum);
  }
}
