// Activations as int8 codes with one step per weight group: step = absmax / 127, codes to nearest even. One warp each.
// A NaN or infinity makes the step NaN, so that it reaches the result. offsets: `shift` times the sum of the codes.
#include "common.cuh"

__global__ void __launch_bounds__(128)
quantise_rows(const float* __restrict__ x, i8* __restrict__ codes, float* __restrict__ steps,
              int* __restrict__ offsets, int cols, int groups, int group, int shift) {
  const int lane = threadIdx.x & 31, g = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  if (g >= groups) return;  // the whole warp
  const float* in = x + (i64)row * cols;
  float top = 0.0f;
  bool finite = true;
  for (int i = lane; i < group; i += 32) {
    const int k = g * group + i;
    const float v = k < cols ? fabsf(in[k]) : 0.0f;
    finite = finite && v <= kLargest;
    top = fmaxf(top, v);
  }
  top = warp_max(top);
  const bool whole = __all_sync(kAll, finite), fine = whole && top >= 1e-30f;  // 127 / top must not overflow
  const float inverse = fine ? 127.0f / top : 0.0f;
  int sum = 0;
  for (int i = lane; i < group; i += 32) {
    const int k = g * group + i, code = fine && k < cols ? __float2int_rn(in[k] * inverse) : 0;
    codes[(i64)row * groups * group + k] = (i8)code;
    sum += code;
  }
  for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(kAll, sum, lanes);
  if (lane == 0) {
    steps[(i64)row * groups + g] = fine ? top / 127.0f : whole ? 0.0f : CLB_NAN;
    offsets[(i64)row * groups + g] = shift * sum;
  }
}
