// Router logits, and the choice of the k best experts by each of the routers. router/*.py say what they are.
#include "choose.cuh"

// logits[r][e] = gate[e] . x[r], one warp each; wanted: 0 leaves an expert out, as -inf.
__global__ void __launch_bounds__(128)
router_logits(const float* __restrict__ gate, const float* __restrict__ x, const u8* __restrict__ wanted,
              float* __restrict__ logits, int experts, int cols) {
  const int lane = threadIdx.x & 31, e = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (e >= experts) return;  // the whole warp
  const i64 at = (i64)blockIdx.y * experts + e;
  float sum = 0.0f;
  if (wanted[at])  // the same for the whole warp
    for (int i = lane; i < cols; i += 32) sum = fmaf(gate[(i64)e * cols + i], x[(i64)blockIdx.y * cols + i], sum);
  sum = warp_sum(sum);
  if (lane == 0) logits[at] = wanted[at] ? sum : -CLB_INF;
}

// staged: two_stage has counted candidates already.
__global__ void __launch_bounds__(32)
route_softmax(const float* __restrict__ logits, int* __restrict__ chosen, float* __restrict__ weights,
              int* __restrict__ counts, float* __restrict__ span, int* __restrict__ status, int experts, int k,
              int normalise, int staged) {
  const Row r = row_at(logits, chosen, weights, counts, span, status, experts, k, normalise);
  const Span s = span_of(r);
  if (!staged) count(r, experts, 0, 0);
  choose_exactly(r, s.top, clb_shared<int>());
}

// Codes between the row's smallest and largest logit, ranked as integers; exp(-distance to the top) as a product of
// tables of sixteen, one for every four bits.
__device__ __forceinline__ float entry_of(int code, int last, float step, int bits) {
  const int distance = min(last + 1 - code, last);
  float f = code > 0 ? 1.0f : 0.0f;
  for (int shift = 0; shift < bits; shift += 4)
    f *= expf(-(float)(distance >> shift & 15) * ((float)(1 << shift) * step));
  return f;
}

__global__ void __launch_bounds__(32)
route_int8_lut(const float* __restrict__ logits, int* __restrict__ chosen, float* __restrict__ weights,
               int* __restrict__ counts, float* __restrict__ span, int* __restrict__ status, int experts, int k,
               int normalise, int bits) {
  const Row r = row_at(logits, chosen, weights, counts, span, status, experts, k, normalise);
  int* keys = clb_shared<int>();
  const Span s = span_of(r);
  const int last = (1 << bits) - 1;
  const float width = s.top - s.low, step = width / (float)last;
  if (!(width <= kLargest)) {
    count(r, experts, 0, 1);
    choose_exactly(r, s.top, keys);
    return;
  }
  count(r, experts, step > 0.25f ? experts : 0, 0);  // so coarse that a step changes a weight by more than a quarter
  const float inverse = width >= 1e-30f ? (float)last / width : 0.0f;
  float all = 0.0f, some = 0.0f;
  for (int e = r.lane; e < experts; e += 32) {  // 0: shut out by -inf, 1: the smallest, last + 1: the largest
    const int code = r.logits[e] >= -kLargest ? 1 + __float2int_rn((r.logits[e] - s.low) * inverse) : 0;
    keys[e] = code;
    if (!normalise) all += entry_of(code, last, step, bits);
  }
  take_best(r, keys);
  for (int i = r.lane; i < k; i += 32) {
    const float v = r.logits[r.chosen[i]];
    const int code = v >= -kLargest ? 1 + __float2int_rn((v - s.low) * inverse) : 0;
    some += r.weights[i] = entry_of(code, last, step, bits);
  }
  divide(r, some, all);
}

constexpr int kMoves = 3, kNear = 3;
constexpr float kBelow = 28.0f, kTableStep = 1024.0f;

__device__ __forceinline__ int table_index(float z) {
  z = z < -kBelow ? -kBelow : z > 0.0f ? 0.0f : z;
  return __float2int_rn((z + kBelow) * kTableStep);
}
__device__ __forceinline__ int count_from(const Row& r, const int* index, int threshold) {
  int n = 0;
  for (int e = r.lane; e < r.experts; e += 32) n += index[e] >= threshold;
  return __reduce_add_sync(kAll, n);
}

// Past the least index that is set (down: to the largest that is not), `steps` times.
__device__ __forceinline__ int moved(const Row& r, const int* index, int threshold, int steps, bool down) {
  for (; steps; --steps) {
    int near = down ? 0 : 2147483646;
    for (int e = r.lane; e < r.experts; e += 32) {
      if (down && index[e] < threshold) near = max(near, index[e]);
      if (!down && index[e] >= threshold) near = min(near, index[e]);
    }
    threshold = down ? __reduce_max_sync(kAll, near) : __reduce_min_sync(kAll, near) + 1;
  }
  return threshold;
}

__device__ __forceinline__ float odds(int v) { return (float)v / (float)(65536 - v); }  // of a sigmoid: e^x

// Sigmoid out of a 16-bit table, a threshold, one bit for each expert that reaches it, and how many are set.
__global__ void __launch_bounds__(32)
route_bit_level(const float* __restrict__ logits, int* __restrict__ chosen, float* __restrict__ weights,
                int* __restrict__ counts, float* __restrict__ span, int* __restrict__ status,
                const u16* __restrict__ sigmoid, int experts, int k, int normalise, float threshold_at,
                float threshold_step) {
  const Row r = row_at(logits, chosen, weights, counts, span, status, experts, k, normalise);
  int *index = clb_shared<int>(), *keys = index + experts;
  const Span s = span_of(r);
  float sum = 0.0f, all = 0.0f, some = 0.0f;
  for (int e = r.lane; r.lane < 16 && e < experts; e += 16) sum += fmaxf(r.logits[e] - s.top, -kBelow);
  int low = 0;
  for (int e = r.lane; e < experts; e += 32) {
    index[e] = table_index(fmaxf(r.logits[e] - s.top, -kBelow));
    low += sigmoid[index[e]] == 0;
    if (!normalise) all += odds(sigmoid[index[e]]);
  }
  low = __reduce_add_sync(kAll, low);
  const float mean = sum16(sum) / (float)experts;
  float guess = mean * (1.0f - threshold_at);
  int threshold = table_index(guess), found = count_from(r, index, threshold);
  for (int move = 0; move < kMoves && found != k; ++move) {
    const int steps = found > k ? found - k : k - found;
    if (steps > kNear && move == kMoves - 1) break;
    if (steps > kNear) {
      guess -= (float)(found - k) * threshold_step * mean;
      threshold = table_index(guess);
    } else {
      threshold = moved(r, index, threshold, steps, found < k);
    }
    found = count_from(r, index, threshold);
  }
  count(r, experts, low, found != k);
  if (found != k) {
    choose_exactly(r, s.top, keys);
    return;
  }
  for (int e = r.lane; e < experts; e += 32) keys[e] = index[e] >= threshold ? order_of(r.logits[e]) : kNone;
  take_best(r, keys);
  __syncwarp();  // `index` is read across lanes from here on
  for (int i = r.lane; i < k; i += 32) some += r.weights[i] = odds(sigmoid[index[r.chosen[i]]]);
  divide(r, some, all);
}

// Was the choice the right set? exact: all logits. Adds to the row's counters.
__global__ void __launch_bounds__(32)
audit_choice(const float* __restrict__ exact, const int* __restrict__ chosen, int* __restrict__ right,
             int* __restrict__ counts, int experts, int k) {
  const i64 row = blockIdx.x;
  const Row r = {exact + row * experts, right + row * k, nullptr, nullptr, nullptr, nullptr, experts, k, 0,
                 (int)threadIdx.x};
  int* keys = clb_shared<int>();
  for (int e = r.lane; e < experts; e += 32) keys[e] = order_of(r.logits[e]);
  take_best(r, keys);
  __syncwarp();
  bool same = true;
  for (int i = r.lane; i < k; i += 32) {
    bool found = false;
    for (int j = 0; j < k; ++j) found = found || chosen[row * k + i] == r.chosen[j];
    same = same && found;
  }
  same = __all_sync(kAll, same);
  if (r.lane == 0) counts[row * kCounts + kAudited] = 1, counts[row * kCounts + kWrong] = !same;
}
