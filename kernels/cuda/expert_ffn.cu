// What lies between and after the products of an expert: silu(gate) * up, and the sums over experts.
#include "common.cuh"

// The steps of kernels/cpu/expert_ffn.c: the same bits.
__global__ void __launch_bounds__(256)
swiglu(const float* __restrict__ gate, const float* __restrict__ up, float* __restrict__ hidden, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const i64 at = (i64)blockIdx.y * width + i;
  if (i < width) hidden[at] = gate[at] / (1.0f + exp_as_cpu(0.0f - gate[at])) * up[at];
}

// sum[r] += weight * y of each of the row's picks, in the order of the list: ascending experts, whatever the waves.
__global__ void __launch_bounds__(256)
add_picks(const float* __restrict__ y, const int* __restrict__ begin, const int* __restrict__ picks,
          const float* __restrict__ weights, float* __restrict__ sum, int cols) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (i >= cols) return;
  float total = sum[(i64)row * cols + i];
  for (int p = begin[row]; p < begin[row + 1]; ++p) total += weights[p] * y[(i64)picks[p] * cols + i];
  sum[(i64)row * cols + i] = total;
}

__global__ void __launch_bounds__(256)
add_sum(float* __restrict__ x, const float* __restrict__ sum, int size) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) x[i] += sum[i];
}

__global__ void __launch_bounds__(256)
clear(float* __restrict__ x, int size) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) x[i] = 0.0f;
}

// sigmoid(gate . x) of each row: what its shared expert counts. One warp a row.
__global__ void __launch_bounds__(32)
shared_weight(const float* __restrict__ gate, const float* __restrict__ x, float* __restrict__ weight, int cols) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < cols; i += 32) sum = fmaf(gate[i], x[(i64)blockIdx.x * cols + i], sum);
  sum = warp_sum(sum);
  if (threadIdx.x == 0) weight[blockIdx.x] = 1.0f / (1.0f + expf(-sum));
}
