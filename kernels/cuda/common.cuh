// What several kernels share. Sums have a fixed order that depends on the row's own shape only: never on the batch.
#pragma once
#include "clb.cuh"

constexpr u32 kAll = 0xffffffffu;
constexpr int kPage = 65536;
constexpr int kTileRows = 16;
constexpr float kLargest = 3.4028235e38f;

// What a kernel found wrong in a row; the host turns it into an exception.
constexpr int kFine = 0, kNotFinite = 1, kBadIndex = 2;

// e^x with the steps of kernels/cpu/vec.h, so that both give the same bits; NaN stays NaN.
__device__ __forceinline__ float exp_as_cpu(float x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for a fraction
  x = x < -88.3f ? -88.3f : x > 88.3f ? 88.3f : x;
  const float n = (x * 1.44269504f + kWhole) - kWhole, r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = 1.3981999507e-3f + p * r;
  p = 8.3334519073e-3f + p * r;
  p = 4.1665795894e-2f + p * r;
  p = 1.6666665459e-1f + p * r;
  p = 5.0000001201e-1f + p * r;
  p = (r + p * r * r) + 1.0f;
  return p * __int_as_float((int)(((u32)__float_as_int(n + kWhole) - 0x4b400000u + 127u) << 23));
}

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
