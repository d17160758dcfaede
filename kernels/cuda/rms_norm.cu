// out[b] = x[rows[b]] over its root mean square, times weight. One block a row.
#include "common.cuh"

__device__ __forceinline__ float scale_of(const float* x, int cols, float eps, float* room) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum = fmaf(x[i], x[i], sum);
  return 1.0f / sqrtf(block_sum(sum, room) / (float)cols + eps);
}

__global__ void __launch_bounds__(256)
rms_norm(const float* __restrict__ x, const int* __restrict__ rows, const float* __restrict__ weight,
         float* __restrict__ out, int cols, float eps) {
  const float* row = x + (i64)rows[blockIdx.x] * cols;
  const float factor = scale_of(row, cols, eps, clb_shared<float>());
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[(i64)blockIdx.x * cols + i] = row[i] * factor * weight[i];
}

// x += more + bias, and its norm: the end of attention and the input of router and experts.
__global__ void __launch_bounds__(256)
add_rms_norm(float* __restrict__ x, const float* __restrict__ more, const float* __restrict__ bias,
             const float* __restrict__ weight, float* __restrict__ out, int cols, float eps) {
  float* row = x + (i64)blockIdx.x * cols;
  const i64 at = (i64)blockIdx.x * cols;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) row[i] += more[at + i] + bias[i];  // its own elements only
  const float factor = scale_of(row, cols, eps, clb_shared<float>());
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[at + i] = row[i] * factor * weight[i];
}
