// Between the QKV product and attention: bias, norms of queries and keys, clip, RoPE; queries stay, keys and values go
// to the staging area of the pool in its dtype, and the tables say so. One block a row.
#include "common.cuh"

constexpr int kNoNorm = 0, kPerHead = 1, kFlat = 2;

// heads * dim values in place. Per head: a warp a head; flat: the block over all.
__device__ __forceinline__ void norm_heads(float* v, const float* weight, int heads, int dim, int kind, float eps,
                                           float* room) {
  if (kind == kFlat) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) sum = fmaf(v[i], v[i], sum);
    const float factor = 1.0f / sqrtf(block_sum(sum, room) / (float)(heads * dim) + eps);
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) v[i] = v[i] * factor * weight[i];
  } else if (kind == kPerHead) {
    const int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < heads; h += blockDim.x >> 5) {
      float sum = 0.0f;
      for (int i = lane; i < dim; i += 32) sum = fmaf(v[h * dim + i], v[h * dim + i], sum);
      const float factor = 1.0f / sqrtf(warp_sum(sum) / (float)dim + eps);
      for (int i = lane; i < dim; i += 32) v[h * dim + i] = v[h * dim + i] * factor * weight[i];
    }
  }
}

__device__ __forceinline__ float clipped(float v, float limit) { return v < -limit ? -limit : v > limit ? limit : v; }

template <class T>
__global__ void __launch_bounds__(128)
project_heads(float* __restrict__ qkv, const float* __restrict__ bias, const float* __restrict__ q_norm,
              const float* __restrict__ k_norm, const float* __restrict__ cosines, const float* __restrict__ sines,
              const int* __restrict__ seat, const int* __restrict__ position, T* __restrict__ keys,
              T* __restrict__ values, int* __restrict__ where, i16* __restrict__ first, int heads, int kv_heads,
              int dim, int query_norm, int key_norm, float eps, float clip, int layer, int layers, int positions,
              int staging) {
  const int row = blockIdx.x, t = threadIdx.x, half = dim / 2;
  const int queries = heads * dim, width = kv_heads * dim, all = queries + 2 * width;
  float* v = qkv + (i64)row * all;
  float* room = clb_shared<float>();
  for (int i = t; i < all; i += blockDim.x) v[i] += bias[i];
  __syncthreads();
  norm_heads(v, q_norm, heads, dim, query_norm, eps, room);
  norm_heads(v + queries, k_norm, kv_heads, dim, key_norm, eps, room);
  __syncthreads();
  const float* c = cosines + (i64)position[row] * half;
  const float* s = sines + (i64)position[row] * half;
  const i64 to = (i64)(staging + row) * width;
  for (int i = t; i < (heads + kv_heads) * half; i += blockDim.x) {
    const int at = i / half * dim + i % half, k = at - queries;
    const float a = clipped(v[at], clip), b = clipped(v[at + half], clip);
    const float cosine = c[i % half], sine = s[i % half];
    const float x = a * cosine - b * sine, y = b * cosine + a * sine;
    if (k < 0) {
      v[at] = x, v[at + half] = y;
    } else {
      store(keys + to + k, x), store(keys + to + k + half, y);
    }
  }
  for (int i = t; i < width; i += blockDim.x) store(values + to + i, clipped(v[queries + width + i], clip));
  if (t == 0) {
    const i64 entry = ((i64)seat[row] * layers + layer) * positions + position[row];
    where[entry] = staging + row;
    first[entry] = -1;
  }
}

// Keys and values of the step's rows from staging to their slots, which the router's choice has settled: of one layer,
// or of some from it on (blockIdx.y), whose stagings lie `apart` tokens from each other. target, expert:
// [layers][rows].
template <class T>
__global__ void __launch_bounds__(128)
settle_rows(T* __restrict__ keys, T* __restrict__ values, const int* __restrict__ target, const int* __restrict__ seat,
            const int* __restrict__ position, const int* __restrict__ expert, int* __restrict__ where,
            i16* __restrict__ first, int width, int layer, int layers, int positions, int staging, int apart) {
  const int row = blockIdx.x, at = blockIdx.y * gridDim.x + row;
  const i64 from = (i64)(staging + (int)blockIdx.y * apart + row) * width, to = (i64)target[at] * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    keys[to + i] = keys[from + i];
    values[to + i] = values[from + i];
  }
  if (threadIdx.x == 0) {
    const i64 entry = ((i64)seat[row] * layers + layer + blockIdx.y) * positions + position[row];
    where[entry] = target[at];
    first[entry] = (i16)expert[at];
  }
}
