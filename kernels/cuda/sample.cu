// The next token of each row by the rules of engine/sampling.py, and whether it is surely theirs. One block a row.
// Penalty, temperature and top-k are the same double arithmetic. Probabilities are whole numbers of 2^-44 of the
// largest, so that their sums have no order; how far these may be from any float sum is known (`slack`), and a draw or
// a cut that lies nearer to an edge than that is left to the host.
#include "common.cuh"

constexpr i64 kMost = 9223372036854775807LL, kLeast = -kMost - 1;
constexpr double kOne = 17592186044416.0;  // 2^44: up to 2^19 of them add up without overflow
constexpr double kUlps = 4.440892098500626e-16, kNear = 9.094947017729282e-13;  // 2^-51, 2^-40
constexpr int kParts = 4;  // of an interval in a step of the search
// how[r]: temperature, top_p, log of min_p, repetition penalty, a random number from 0 to 1
constexpr int kHow = 5, kTemperature = 0, kTopP = 1, kFloor = 2, kPenalty = 3, kDraw = 4;

// Doubles in the order of integers, and back; both zeros are one number.
__device__ __forceinline__ i64 order_of(double v) {
  const i64 bits = __double_as_longlong(v + 0.0);
  return bits ^ (bits >> 63 & kMost);
}
__device__ __forceinline__ double score_of(i64 key) { return __longlong_as_double(key ^ (key >> 63 & kMost)); }

// The largest value, or the sum, over the block; the same in every thread. Ends with the room free for the next use.
__device__ __forceinline__ i64 over_block(i64 v, i64* room, bool largest) {
  for (int lanes = 16; lanes; lanes >>= 1) {
    const i64 other = __shfl_xor_sync(kAll, v, lanes);
    v = largest ? (other > v ? other : v) : v + other;
  }
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  v = room[0];
  for (int w = 1; w < (int)(blockDim.x >> 5); ++w) v = largest ? (room[w] > v ? room[w] : v) : v + room[w];
  __syncthreads();
  return v;
}

// Of the threads before this one; room: one number a thread.
__device__ __forceinline__ i64 before_me(i64 v, i64* room) {
  room[threadIdx.x] = v;
  __syncthreads();
  i64 sum = 0;
  for (int t = 0; t < (int)threadIdx.x; ++t) sum += room[t];
  __syncthreads();
  return sum;
}

// How far a sum of `count` masses may be from any float sum of the same, on both sides of a comparison.
__device__ __forceinline__ double slack_of(i64 count, i64 mass) {
  return 4.0 * ((double)count + (double)mass * (double)count * kUlps);
}

// A row's ranking, by key and then by index, and how much of its beginning is kept.
struct Ranking {
  const i64 *keys, *masses;
  i64 key;   // of the last that is kept
  int last;  // index of the last that is kept among equal keys
  int vocab;
  __device__ __forceinline__ bool has(int i) const { return keys[i] > key || (keys[i] == key && i <= last); }
  __device__ __forceinline__ i64 weight(int i, bool by_mass) const { return by_mass ? masses[i] : 1; }
};

// The least and the largest key from `low` to `top` among those that are kept.
__device__ __forceinline__ void close_in(const Ranking& r, i64* low, i64* top, i64* room) {
  i64 least = kMost, most = kLeast;
  for (int i = threadIdx.x; i < r.vocab; i += blockDim.x) {
    const i64 key = r.keys[i];
    if (key < *low || key > *top || !r.has(i)) continue;
    least = key < least ? key : least, most = key > most ? key : most;
  }
  *low = ~over_block(~least, room, true), *top = over_block(most, room, true);
}

// What is kept and has at least this key weighs how much?
__device__ __forceinline__ i64 weight_from(const Ranking& r, i64 key, bool by_mass, i64* room) {
  i64 sum = 0;
  for (int i = threadIdx.x; i < r.vocab; i += blockDim.x)
    if (r.keys[i] >= key && r.has(i)) sum += r.weight(i, by_mass);
  return over_block(sum, room, false);
}

// The largest key that weighs `target` or more together with its equals and betters. Each step cuts the interval where
// it lies into parts, and goes on between the keys that are in the right one.
__device__ __forceinline__ i64 key_at(const Ranking& r, i64 low, i64 top, i64 target, bool by_mass, i64* room) {
  for (close_in(r, &low, &top, room); low < top; close_in(r, &low, &top, room)) {
    const u64 width = (u64)top - (u64)low, step = width / kParts + 1;
    i64 sum[kParts] = {};  // sum[p]: of keys from low + p * step on
    for (int i = threadIdx.x; i < r.vocab; i += blockDim.x) {
      if (r.keys[i] < low || !r.has(i)) continue;
      const u64 past = (u64)r.keys[i] - (u64)low;
      const i64 weight = r.weight(i, by_mass);
#pragma unroll
      for (int p = 1; p < kParts; ++p)
        if (past >= p * step) sum[p] += weight;
    }
    int best = 0;
#pragma unroll
    for (int p = 1; p < kParts; ++p)
      if (over_block(sum[p], room, false) >= target) best = p;
    const u64 begin = best * step, end = begin + step - 1;
    top = (i64)((u64)low + (end < width ? end : width));
    low = (i64)((u64)low + begin);
  }
  return low;
}

// Index of the n-th (from 1) that has this key, in the order of indices; n is at most their number. Whoever holds it
// in its part of the row writes it to room[blockDim.x].
__device__ __forceinline__ int nth_equal(const Ranking& r, i64 key, i64 n, int begin, int end, i64* room) {
  i64 mine = 0;
  for (int i = begin; i < end; ++i) mine += r.keys[i] == key;
  i64 before = before_me(mine, room);
  if (before < n && n <= before + mine) {
    int i = begin;
    for (; before < n; ++i) before += r.keys[i] == key;
    room[blockDim.x] = i - 1;
  }
  __syncthreads();
  const int found = (int)room[blockDim.x];
  __syncthreads();
  return found;
}

// Keep the first of the ranking while those before them weigh less than `target`. Returns false where other sums of the
// same masses, up to `slack` away, might end elsewhere.
__device__ __forceinline__ bool keep(Ranking* r, i64 target, double slack, bool by_mass, int begin, int end,
                                     i64* room) {
  const i64 key = key_at(*r, kLeast, kMost, target, by_mass, room);
  const i64 above = weight_from(*r, key + 1, by_mass, room), from = weight_from(*r, key, by_mass, room);
  const i64 better = weight_from(*r, key + 1, false, room), count = weight_from(*r, key, false, room) - better;
  const i64 each = (from - above) / count, left = target - above, wanted = (left + each - 1) / each;
  const bool whole = wanted == count && weight_from(*r, kLeast, false, room) == better + count;
  const bool sure = (wanted > 1 ? (double)(left - (wanted - 1) * each) > slack : above == 0 || (double)left > slack) &&
                    (whole || (double)(wanted * each - left) > slack);
  r->last = nth_equal(*r, key, wanted, begin, end, room);
  r->key = key;
  return sure;
}

// token[r], its logit in value[r], and sure[r]: 1 where it is the host's choice too. seen: [seats][vocab], 1 for tokens
// that are penalised; a sure choice is added. work: [rows][2][vocab]. Shared: eight bytes for each thread, and eight
// more.
__global__ void __launch_bounds__(512)
sample(const float* __restrict__ logits, u8* __restrict__ seen, const double* __restrict__ how,
       const int* __restrict__ top_k, const int* __restrict__ seat, i64* __restrict__ work,
       int* __restrict__ token, int* __restrict__ sure, float* __restrict__ value, int vocab) {
  const int row = blockIdx.x, t = threadIdx.x, part = (vocab + (int)blockDim.x - 1) / (int)blockDim.x;
  const int begin = min(vocab, t * part), end = min(vocab, begin + part);  // of the row, in order
  const double *h = how + row * kHow, penalty = h[kPenalty], temperature = h[kTemperature];
  i64 *keys = work + (i64)row * 2 * vocab, *masses = keys + vocab, *room = clb_shared<i64>();
  u8* old = seen + (i64)seat[row] * vocab;
  i64 top = kLeast, fine = 1;
  for (int i = t; i < vocab; i += blockDim.x) {
    double v = logits[(i64)row * vocab + i];
    if (penalty != 1.0 && old[i]) v = v > 0.0 ? v / penalty : v * penalty;
    keys[i] = order_of(v);
    fine = v == v ? fine : 0;
    top = keys[i] > top ? keys[i] : top;
  }
  top = over_block(top, room, true), fine = ~over_block(~fine, room, true);
  const double best = score_of(top);
  fine = fine && best < CLB_INF && best > -CLB_INF;  // the same in all threads
  int chosen = nth_equal({keys, masses, 0, 0, vocab}, top, 1, begin, end, room);
  if (fine && temperature > 0.0) {
    Ranking r = {keys, masses, kLeast, vocab, vocab};
    if (top_k[row] > 0 && top_k[row] < vocab) keep(&r, top_k[row], -1.0, false, begin, end, room);
    i64 kept = 0, number = 0;
    for (int i = t; i < vocab; i += blockDim.x) {
      masses[i] = r.has(i) ? (i64)rint(exp((score_of(keys[i]) - best) / temperature) * kOne) : 0;
      kept += masses[i], number += r.has(i);
    }
    kept = over_block(kept, room, false), number = over_block(number, room, false);
    if (h[kTopP] < 1.0) {
      const i64 target = (i64)ceil(h[kTopP] * (double)kept);
      const Ranking all = r;
      fine = keep(&r, target > 1 ? target : 1, slack_of(number, kept), true, begin, end, room);
      const double edge = score_of(r.key);
      i64 near = 0;  // another score whose probability may round to the same
      for (int i = t; i < vocab; i += blockDim.x)
        near |= all.has(i) && keys[i] != r.key && fabs(score_of(keys[i]) - edge) / temperature < kNear;
      fine = fine && !over_block(near, room, true);
    }
    i64 mine = 0, left = 0, first = vocab, last = -1, doubt = 0;
    for (int i = begin; i < end; ++i) {
      const double far = (score_of(keys[i]) - best) / temperature - h[kFloor];
      if (r.has(i) && keys[i] != top) doubt |= fabs(far) < kNear * (1.0 - h[kFloor]);
      const bool stays = r.has(i) && !(far < 0.0);
      if (!stays) masses[i] = 0;
      mine += masses[i], left += stays;
      last = stays ? i : last, first = stays && first == vocab ? i : first;
    }
    kept = over_block(mine, room, false), number = over_block(left, room, false);
    const double slack = slack_of(number, kept);
    last = over_block(last, room, true), first = ~over_block(~first, room, true);
    fine = fine && !over_block(doubt, room, true);
    i64 before = before_me(mine, room), draw = (i64)(h[kDraw] * (double)kept);
    draw = draw < kept ? draw : kept - 1;
    if (before <= draw && draw < before + mine) {
      int i = begin;
      for (; before + masses[i] <= draw; ++i) before += masses[i];
      const bool low = i == first || (double)(draw - before) > slack;
      const bool high = i == last || (double)(before + masses[i] - draw) > slack;
      room[0] = i, room[1] = low && high;
    }
    __syncthreads();
    chosen = (int)room[0], fine = fine && room[1];
  }
  if (t) return;
  token[row] = chosen, sure[row] = fine != 0, value[row] = logits[(i64)row * vocab + chosen];
  if (fine && penalty != 1.0) old[chosen] = 1;
}
