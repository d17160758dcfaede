// y = W x over the tiles of the file, for resident matrices and for experts alike: a block takes sixteen rows of W and
// up to kBatch inputs of one job, so weights are read once for all of them. A lane has four rows of W and every
// (8 * warps)-th group of inputs; the sums of the lanes and then of the warps are added in a fixed order.
#include "tiles.cuh"

constexpr int kWarps = 4, kShares = kWarps * 8;

// A job: some inputs that want one matrix. job[4]: row of the page table, first pick, number of picks, unused.
struct Job {
  int table, first, count;
};
__device__ __forceinline__ Job job_at(const int* jobs) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(jobs) + blockIdx.y);
  return {v.x, v.y, v.z};
}

// Lanes' sums to y. Rows past the end and picks past the job stay in their own lanes and are not stored.
template <int kBatch>
__device__ __forceinline__ void finish(float (&sum)[kBatch][4], const Job& job, float* y, int rows) {
  float* room = clb_shared<float>();  // [kWarps][kBatch][16]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v = sum[b][i];
      for (int lanes = 4; lanes < 32; lanes <<= 1) v += __shfl_xor_sync(kAll, v, lanes);
      if (lane < 4) room[(warp * kBatch + b) * kTileRows + quad * 4 + i] = v;
    }
  __syncthreads();
  const int t = threadIdx.x, b = t / kTileRows, row = blockIdx.x * kTileRows + t % kTileRows;
  if (b >= kBatch || b >= job.count || row >= rows) return;
  float total = room[t];
  for (int w = 1; w < kWarps; ++w) total += room[w * kBatch * kTileRows + t];
  y[(i64)(job.first + b) * rows + row] = total;
}

__device__ __forceinline__ int dot_word(u32 word, int low, int high, int sum, Int4) {
  return __dp4a((int)(word >> 4 & 0x0f0f0f0fu), high, __dp4a((int)(word & 0x0f0f0f0fu), low, sum));
}

// Thirty-two inputs of four rows of int4 codes: four chunks of eight inputs.
template <int kBatch>
__device__ __forceinline__ void dots(const u8* codes, const i8* const (&q)[kBatch], int (&sum)[kBatch][4], Int4) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 a = clb_stream(reinterpret_cast<const uint4*>(codes) + half * 8);
    const uint4 c = clb_stream(reinterpret_cast<const uint4*>(codes) + half * 8 + 4);
    const u32 first[4] = {a.x, a.y, a.z, a.w}, second[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int4 x = __ldg(reinterpret_cast<const int4*>(q[b]) + half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[b][i] = dot_word(first[i], x.x, x.y, sum[b][i], Int4());
        sum[b][i] = dot_word(second[i], x.z, x.w, sum[b][i], Int4());
      }
    }
  }
}

// The same of int8 codes: eight chunks of four inputs.
template <int kBatch>
__device__ __forceinline__ void dots(const u8* codes, const i8* const (&q)[kBatch], int (&sum)[kBatch][4], Int8) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    u32 word[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = clb_stream(reinterpret_cast<const uint4*>(codes) + (part * 4 + j) * 4);
      word[j][0] = v.x, word[j][1] = v.y, word[j][2] = v.z, word[j][3] = v.w;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int4 v = __ldg(reinterpret_cast<const int4*>(q[b]) + part);
      const int x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[b][i] = __dp4a((int)word[j][i], x[j], sum[b][i]);
    }
  }
}

__device__ __forceinline__ int part_bytes(Int4) { return 256; }  // of thirty-two inputs of a tile
__device__ __forceinline__ int part_bytes(Int8) { return 512; }

// int8 activations: exact integer dots a group, then float sums over groups.
template <class Format, int kBatch>
__global__ void __launch_bounds__(128)
matmul_fast(const u8* __restrict__ frames, const int* __restrict__ tables, const int* __restrict__ jobs,
            const int* __restrict__ inputs, const i8* __restrict__ codes, const float* __restrict__ steps,
            const int* __restrict__ offsets, float* __restrict__ y, int rows, int groups, int group, int pages,
            int start_page, int start_byte, int tile_bytes, int across, int per_page, int groups_per_tile) {
  const Job job = job_at(jobs);
  const Tiles m = {frames, tables + (i64)job.table * pages, start_page, start_byte, tile_bytes, across, per_page};
  const int lane = threadIdx.x & 31, quad = lane & 3, share = (threadIdx.x >> 5) * 8 + (lane >> 2);
  int input[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) input[b] = __ldg(inputs + job.first + min(b, job.count - 1));
  float sum[kBatch][4] = {};
  for (int g = share; g < groups; g += kShares) {
    const int in_row = g / groups_per_tile, in_tile = g - in_row * groups_per_tile;
    const u8* tile = tile_at(m, blockIdx.x * across + in_row);
    const u8* part = tile + groups_per_tile * kTileRows * 2 + in_tile * (group >> 5) * part_bytes(Format()) + quad * 16;
    const i8* q[kBatch];
    int dot[kBatch][4];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      q[b] = codes + ((i64)input[b] * groups + g) * group;
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[b][i] = __ldg(offsets + (i64)input[b] * groups + g);
    }
#pragma unroll 1
    for (int k = 0; k < group; k += 32, part += part_bytes(Format())) {
      dots<kBatch>(part, q, dot, Format());
#pragma unroll
      for (int b = 0; b < kBatch; ++b) q[b] += 32;
    }
    const half_t* scales = reinterpret_cast<const half_t*>(tile) + in_tile * kTileRows + quad * 4;
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scale[i] = to_float(scales[i]);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float step = __ldg(steps + (i64)input[b] * groups + g);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[b][i] = fmaf(scale[i] * step, (float)dot[b][i], sum[b][i]);
    }
  }
  finish<kBatch>(sum, job, y, rows);
}

// Byte j less a whole number, as a float: 2^23 with a byte in its last bits is a float too, so nothing is rounded, and
// no conversion (a quarter of the speed) is needed. power: 2^23 in bits.
__device__ __forceinline__ float byte_of(u32 bytes, int j, u32 power, float less) {
  return __int_as_float((int)__byte_perm(bytes, power, 0x7440u | (u32)j)) - (8388608.0f + less);
}

// Inputs 4 * part to 4 * part + 3 of a chunk: one byte each, and what it has too much.
__device__ __forceinline__ constexpr int chunk_inputs(Int4) { return 8; }
__device__ __forceinline__ constexpr int chunk_inputs(Int8) { return 4; }
template <class Float>
__device__ __forceinline__ constexpr int chunk_inputs(Float) { return 1; }
__device__ __forceinline__ u32 bytes_of(u32 word, int part, Int4) { return word >> 4 * part & 0x0f0f0f0fu; }
__device__ __forceinline__ u32 bytes_of(u32 word, int, Int8) { return word ^ 0x80808080u; }
__device__ __forceinline__ constexpr float excess(Int4) { return 8.0f; }
__device__ __forceinline__ constexpr float excess(Int8) { return 128.0f; }

// The first `count` inputs of a chunk times four rows of weights without their scale, in order.
template <int kBatch, class Format>
__device__ __forceinline__ void add_chunk(const u8* codes, int chunk, const float* const (&v)[kBatch], int count,
                                          u32 power, float (&sum)[kBatch][4], Format) {
  const uint4 word = clb_stream(reinterpret_cast<const uint4*>(codes) + chunk * 4);
  const u32 rows[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int part = 0; part < chunk_inputs(Format()) / 4; ++part) {
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = bytes_of(rows[i], part, Format());
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (part * 4 + j >= count) return;
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = byte_of(bytes[i], j, power, excess(Format()));
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float x = v[b][part * 4 + j];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[b][i] = fmaf(w[i], x, sum[b][i]);
      }
    }
  }
}
template <int kBatch, class Float>
__device__ __forceinline__ void add_values(const u8* values, int k, const float* const (&v)[kBatch],
                                           float (&sum)[kBatch][4], Float) {
  const typename Float::type* at = reinterpret_cast<const typename Float::type*>(values) + k * kTileRows;
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[b][i] = fmaf(to_float(at[i]), v[b][0], sum[b][i]);
}
template <int kBatch>
__device__ __forceinline__ void add_chunk(const u8* values, int k, const float* const (&v)[kBatch], int, u32,
                                          float (&sum)[kBatch][4], Single) {
  add_values<kBatch>(values, k, v, sum, Single());
}
template <int kBatch>
__device__ __forceinline__ void add_chunk(const u8* values, int k, const float* const (&v)[kBatch], int, u32,
                                          float (&sum)[kBatch][4], Half) {
  add_values<kBatch>(values, k, v, sum, Half());
}
__device__ __forceinline__ int quad_bytes(Int4) { return 16; }  // between two lanes' four rows
__device__ __forceinline__ int quad_bytes(Int8) { return 16; }
template <class Float>
__device__ __forceinline__ int quad_bytes(Float) { return 4 * sizeof(typename Float::type); }
__device__ __forceinline__ int group_bytes(int group, Int4) { return group * 8; }
__device__ __forceinline__ int group_bytes(int group, Int8) { return group * 16; }
template <class Float>
__device__ __forceinline__ int group_bytes(int group, Float) {
  return group * kTileRows * (int)sizeof(typename Float::type);
}
template <class Format>
__device__ __forceinline__ constexpr bool scaled(Format) { return false; }
__device__ __forceinline__ constexpr bool scaled(Int4) { return true; }
__device__ __forceinline__ constexpr bool scaled(Int8) { return true; }

// Float activations. fp16 and fp32 weights have no groups of their own: thirty-two inputs count as one.
template <class Format, int kBatch>
__global__ void __launch_bounds__(128)
matmul_exact(const u8* __restrict__ frames, const int* __restrict__ tables, const int* __restrict__ jobs,
             const int* __restrict__ inputs, const float* __restrict__ x, float* __restrict__ y, int rows, int cols,
             int groups, int group, int pages, int start_page, int start_byte, int tile_bytes, int across,
             int per_page, int groups_per_tile) {
  const Job job = job_at(jobs);
  const Tiles m = {frames, tables + (i64)job.table * pages, start_page, start_byte, tile_bytes, across, per_page};
  const int lane = threadIdx.x & 31, quad = lane & 3, share = (threadIdx.x >> 5) * 8 + (lane >> 2);
  const u32 power = 0x4b000000u | (u32)group >> 20;  // or else the compiler moves a constant anew for each weight
  const float* in[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) in[b] = x + (i64)__ldg(inputs + job.first + min(b, job.count - 1)) * cols;
  float sum[kBatch][4] = {};
  for (int g = share; g < groups; g += kShares) {
    const int in_row = g / groups_per_tile, in_tile = g - in_row * groups_per_tile, left = cols - g * group;
    const u8* tile = tile_at(m, blockIdx.x * across + in_row);
    const u8* codes = tile + (scaled(Format()) ? groups_per_tile * kTileRows * 2 : 0) +
                      in_tile * group_bytes(group, Format()) + quad * quad_bytes(Format());
    float part[kBatch][4] = {};
    constexpr int wide = chunk_inputs(Format());
    const float* v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) v[b] = in[b] + g * group;
    const int end = min(group, left), whole = end / wide;
    for (int c = 0; c < whole; ++c) {
      add_chunk<kBatch>(codes, c, v, wide, power, part, Format());
#pragma unroll
      for (int b = 0; b < kBatch; ++b) v[b] += wide;
    }
    if (whole * wide < end) add_chunk<kBatch>(codes, whole, v, end - whole * wide, power, part, Format());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const half_t* scales = reinterpret_cast<const half_t*>(tile) + in_tile * kTileRows + quad * 4;
      const float scale = scaled(Format()) ? to_float(scales[i]) : 1.0f;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) sum[b][i] = fmaf(scale, part[b][i], sum[b][i]);
    }
  }
  finish<kBatch>(sum, job, y, rows);
}
