// What several kernels share. Sums have a fixed order that depends on the row's own shape only: never on the batch.
#pragma once
#include "clb.cuh"

constexpr u32 kAll = 0xffffffffu;
constexpr int kPage = 65536;
constexpr int kTileRows = 16;
constexpr float kLargest = 3.4028235e38f;

// What a kernel found wrong in a row; the host turns it into an exception.
constexpr int kFine = 0, kNotFinite = 1, kBadIndex = 2;

__device__ __forceinline__ float warp_sum(float v) {
  for (int lanes = 16; lanes; lanes >>= 1) v += __shfl_xor_sync(kAll, v, lanes);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int lanes = 16; lanes; lanes >>= 1) v = fmaxf(v, __shfl_xor_sync(kAll, v, lanes));
  return v;
}

// Sum over the block, the same in every thread; room: one float a warp. Ends with the room free for the next use.
__device__ __forceinline__ float block_sum(float v, float* room) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  v = warp_sum(v);
  if (lane == 0) room[warp] = v;
  __syncthreads();
  float sum = 0.0f;
  for (int w = 0; w < warps; ++w) sum += room[w];
  __syncthreads();
  return sum;
}

__device__ __forceinline__ float block_max(float v, float* room) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  v = warp_max(v);
  if (lane == 0) room[warp] = v;
  __syncthreads();
  float most = room[0];
  for (int w = 1; w < warps; ++w) most = fmaxf(most, room[w]);
  __syncthreads();
  return most;
}
