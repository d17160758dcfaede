// Two-stage routing: integer logits with a proven bound on their error leave candidates, which alone are scored.
// router/two_stage.py derives the bound; a bound that does not shut out half of the experts proves nothing.
#include "choose.cuh"

constexpr double kUp20 = 9.5367431640625e-07, kUp22 = 2.384185791015625e-07, kUp23 = 1.1920928955078125e-07;

// A row as integers from -last to last. facts[r]: step, |x|, |x - codes * step| rounded up; step 0: no bound holds.
// hopeless[r]: 0, for code_bounds.
__global__ void __launch_bounds__(32)
row_codes(const float* __restrict__ x, i16* __restrict__ codes, double* __restrict__ facts,
          int* __restrict__ hopeless, int cols, int width, int bits) {
  const int lane = threadIdx.x;
  const float* in = x + (i64)blockIdx.x * cols;
  const float last = (float)((1 << (bits - 1)) - 1);
  float peak = 0.0f;
  bool finite = true;
  for (int i = lane; i < cols; i += 32) peak = fmaxf(peak, fabsf(in[i])), finite = finite && fabsf(in[i]) <= kLargest;
  peak = warp_max(peak);
  const bool fine = __all_sync(kAll, finite) && peak >= 1e-12f && peak <= 1e15f;
  const float step = fine ? peak / last : 0.0f, inverse = fine ? last / peak : 0.0f;
  float norm = 0.0f, rest = 0.0f;
  for (int i = lane; lane < 16 && fine && i < cols; i += 16) {
    const float u = in[i] - rintf(in[i] * inverse) * step;
    norm += in[i] * in[i];
    rest += u * u;
  }
  for (int i = lane; i < width; i += 32)
    codes[(i64)blockIdx.x * width + i] = fine && i < cols ? (i16)__float2int_rn(in[i] * inverse) : 0;
  norm = sum16(norm), rest = sum16(rest);
  if (lane) return;
  const double up = 1.0 + (cols + 32) * kUp23;
  hopeless[blockIdx.x] = 0;
  double* out = facts + blockIdx.x * 3;
  out[0] = step, out[1] = sqrt((double)norm) * up, out[2] = sqrt((double)rest) * up + out[1] * kUp22;
}

// bounds[r][0][e], [1][e]: what an expert's logit is at least and at most. One warp each. hopeless[r]: no bound holds.
__global__ void __launch_bounds__(128)
code_bounds(const i16* __restrict__ gate, const double* __restrict__ gate_facts, const i16* __restrict__ codes,
            const double* __restrict__ facts, float* __restrict__ bounds, int* __restrict__ hopeless, int experts,
            int cols, int width) {
  const int lane = threadIdx.x & 31, e = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = blockIdx.y;
  if (e >= experts) return;  // the whole warp
  i64 sum = 0;
  for (int i = lane; i < width; i += 32) sum += (int)gate[(i64)e * width + i] * (int)codes[(i64)row * width + i];
  for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(kAll, sum, lanes);
  if (lane) return;
  const double *f = gate_facts + 4 * e, step = facts[row * 3], norm = facts[row * 3 + 1], rest = facts[row * 3 + 2];
  float* out = bounds + (i64)row * 2 * experts + e;
  out[0] = -CLB_INF, out[experts] = CLB_INF;
  if (step == 0.0 || (!(f[3] * norm <= 1e37) && f[3] <= 1e300)) atomicMax(hopeless + row, 1);
  if (step == 0.0 || !(f[3] * norm <= 1e37)) return;
  const double logit = f[0] * step * (double)sum;
  double error = f[1] * norm + f[2] * rest;
  error += (fabs(logit) + error) * kUp20 + (cols + 4) * 2.802596928649634e-45;  // products that underflow
  out[0] = (float)(logit - error), out[experts] = (float)(logit + error);
}

// wanted[r][e]: candidates, or all where nothing is proved or the sum over all is needed. One warp a row.
__global__ void __launch_bounds__(32)
choose_candidates(const float* __restrict__ bounds, const int* __restrict__ hopeless, u8* __restrict__ wanted,
                  int* __restrict__ best, int* __restrict__ counts, int experts, int k, int normalise) {
  const i64 row = blockIdx.x;
  const float *low = bounds + row * 2 * experts, *high = low + experts;
  const Row r = {low, best + row * k, nullptr, counts + row * kCounts, nullptr, nullptr, experts, k, normalise,
                 (int)threadIdx.x};
  int* keys = clb_shared<int>();
  for (int e = r.lane; e < experts; e += 32) keys[e] = order_of(low[e]);
  take_best(r, keys);
  __syncwarp();
  const float bar = low[r.chosen[k - 1]];
  int found = 0;
  for (int e = r.lane; e < experts; e += 32) found += high[e] >= bar;
  found = __reduce_add_sync(kAll, found);
  const bool proved = !hopeless[row] && (found == k || 2 * found <= experts), whole = !proved || !normalise;
  for (int e = r.lane; e < experts; e += 32) wanted[row * experts + e] = whole || high[e] >= bar;
  count(r, whole ? experts : found, 0, !proved);
  if (r.lane == 0) r.counts[kCertified] = proved, r.counts[kCandidates] = proved ? found : 0;
}
