// y = W x over the tiles of the file, for resident matrices and for experts alike: a block takes sixteen rows of W and
// up to kBatch inputs of one job, so weights are read once for all of them. A lane has four rows of W and every
// (8 * warps)-th group of inputs. Groups are added one behind the other, as kernels/cpu/matmul.c does, so both give the
// same bits: the lanes leave what their groups give in shared memory, and one thread a row adds it up.
#include "tiles.cuh"

constexpr int kWarps = 4, kShares = kWarps * 8;

// A job: some inputs that want one matrix. job[4]: row of the page table, first pick, number of picks (0: nothing to
// do, where the number of jobs was not known at the launch), unused.
struct Job {
  int table, first, count;
};
__device__ __forceinline__ Job job_at(const int* jobs) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(jobs) + blockIdx.y);
  return {v.x, v.y, v.z};
}

// What kShares groups give, zeros past the last, from the lanes to the thread that adds them in order; `turn` counts
// the calls of a block. Two rooms in turn: who still adds reads the one that nobody writes to before the next barrier.
template <int kBatch>
__device__ __forceinline__ void add_groups(const float (&part)[kBatch][4], int turn, float& total) {
  float* room = clb_shared<float>() + (turn & 1) * kShares * kBatch * kTileRows;  // [kShares][kBatch][16]
  const int lane = threadIdx.x & 31, share = (threadIdx.x >> 5) * 8 + (lane >> 2);
#pragma unroll
  for (int b = 0; b < kBatch; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) room[(share * kBatch + b) * kTileRows + (lane & 3) * 4 + i] = part[b][i];
  __syncthreads();
  if (threadIdx.x < kBatch * kTileRows) {
#pragma unroll 8
    for (int s = 0; s < kShares; ++s) total += room[s * kBatch * kTileRows + threadIdx.x];
  }
}

// Rows past the end and picks past the job are not stored.
template <int kBatch>
__device__ __forceinline__ void finish(float total, const Job& job, float* y, int rows) {
  const int b = threadIdx.x / kTileRows, row = blockIdx.x * kTileRows + threadIdx.x % kTileRows;
  if (b < kBatch && b < job.count && row < rows) y[(i64)(job.first + b) * rows + row] = total;
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
#pragma unroll (kBatch == 1 ? 2 : 1)
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
  if (job.count == 0) return;  // the whole block
  const Tiles m = {frames, tables + (i64)job.table * pages, start_page, start_byte, tile_bytes, across, per_page};
  const int lane = threadIdx.x & 31, quad = lane & 3, share = (threadIdx.x >> 5) * 8 + (lane >> 2);
  int input[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) input[b] = __ldg(inputs + job.first + min(b, job.count - 1));
  float total = 0.0f;
  for (int first = 0, turn = 0; first < groups; first += kShares, ++turn) {
    const int g = first + share;
    float part[kBatch][4] = {};
    if (g < groups) {
      const int in_row = g / groups_per_tile, in_tile = g - in_row * groups_per_tile;
      const u8* tile = tile_at(m, blockIdx.x * across + in_row);
      const u8* at = tile + groups_per_tile * kTileRows * 2 + quad * 16;
      at += in_tile * (group >> 5) * part_bytes(Format());
      const i8* q[kBatch];
      int dot[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        q[b] = codes + ((i64)input[b] * groups + g) * group;
#pragma unroll
        for (int i = 0; i < 4; ++i) dot[b][i] = __ldg(offsets + (i64)input[b] * groups + g);
      }
#pragma unroll 1
      for (int k = 0; k < group; k += 32, at += part_bytes(Format())) {
        dots<kBatch>(at, q, dot, Format());
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
        for (int i = 0; i < 4; ++i) part[b][i] = scale[i] * step * (float)dot[b][i];
      }
    }
    add_groups<kBatch>(part, turn, total);
  }
  finish<kBatch>(total, job, y, rows);
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
__device__ __forceinline__ constexpr int chunk_inputs(Float) { return 4; }
__device__ __forceinline__ u32 bytes_of(u32 word, int part, Int4) { return word >> 4 * part & 0x0f0f0f0fu; }
__device__ __forceinline__ u32 bytes_of(u32 word, int, Int8) { return word ^ 0x80808080u; }
__device__ __forceinline__ constexpr float excess(Int4) { return 8.0f; }
__device__ __forceinline__ constexpr float excess(Int8) { return 128.0f; }

// The first `count` inputs of a chunk times four rows of weights without their scale: input j goes to sum j % 4.
template <int kBatch, class Format>
__device__ __forceinline__ void add_chunk(const u8* codes, int chunk, const float* const (&v)[kBatch], int count,
                                          u32 power, float (&sum)[4][kBatch][4], Format) {
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
        for (int i = 0; i < 4; ++i) sum[j][b][i] += w[i] * x;
      }
    }
  }
}
template <int kBatch, class Float>
__device__ __forceinline__ void add_values(const u8* values, int chunk, const float* const (&v)[kBatch], int count,
                                           float (&sum)[4][kBatch][4], Float) {
  const typename Float::type* at = reinterpret_cast<const typename Float::type*>(values) + chunk * 4 * kTileRows;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j >= count) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][b][i] += to_float(at[j * kTileRows + i]) * v[b][j];
  }
}
template <int kBatch>
__device__ __forceinline__ void add_chunk(const u8* values, int chunk, const float* const (&v)[kBatch], int count, u32,
                                          float (&sum)[4][kBatch][4], Single) {
  add_values<kBatch>(values, chunk, v, count, sum, Single());
}
template <int kBatch>
__device__ __forceinline__ void add_chunk(const u8* values, int chunk, const float* const (&v)[kBatch], int count, u32,
                                          float (&sum)[4][kBatch][4], Half) {
  add_values<kBatch>(values, chunk, v, count, sum, Half());
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

// Float activations: input k of a group goes to sum k % 4. fp16 and fp32 weights have no groups of their own:
// thirty-two inputs count as one.
template <class Format, int kBatch>
__global__ void __launch_bounds__(128)
matmul_exact(const u8* __restrict__ frames, const int* __restrict__ tables, const int* __restrict__ jobs,
             const int* __restrict__ inputs, const float* __restrict__ x, float* __restrict__ y, int rows, int cols,
             int groups, int group, int pages, int start_page, int start_byte, int tile_bytes, int across,
             int per_page, int groups_per_tile) {
  const Job job = job_at(jobs);
  if (job.count == 0) return;  // the whole block
  const Tiles m = {frames, tables + (i64)job.table * pages, start_page, start_byte, tile_bytes, across, per_page};
  const int lane = threadIdx.x & 31, quad = lane & 3, share = (threadIdx.x >> 5) * 8 + (lane >> 2);
  const u32 power = 0x4b000000u | (u32)group >> 20;  // or else the compiler moves a constant anew for each weight
  const float* in[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) in[b] = x + (i64)__ldg(inputs + job.first + min(b, job.count - 1)) * cols;
  float total = 0.0f;
  for (int first = 0, turn = 0; first < groups; first += kShares, ++turn) {
    const int g = first + share;
    float part[kBatch][4] = {};
    if (g < groups) {
      const int in_row = g / groups_per_tile, in_tile = g - in_row * groups_per_tile;
      const u8* tile = tile_at(m, blockIdx.x * across + in_row);
      const u8* codes = tile + (scaled(Format()) ? groups_per_tile * kTileRows * 2 : 0) +
                        in_tile * group_bytes(group, Format()) + quad * quad_bytes(Format());
      constexpr int wide = chunk_inputs(Format());
      const float* v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) v[b] = in[b] + g * group;
      float sum[4][kBatch][4] = {};
      const int end = min(group, cols - g * group), whole = end / wide;
      for (int c = 0; c < whole; ++c) {
        add_chunk<kBatch>(codes, c, v, wide, power, sum, Format());
#pragma unroll
        for (int b = 0; b < kBatch; ++b) v[b] += wide;
      }
      if (whole * wide < end) add_chunk<kBatch>(codes, whole, v, end - whole * wide, power, sum, Format());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const half_t* scales = reinterpret_cast<const half_t*>(tile) + in_tile * kTileRows + quad * 4;
        const float scale = scaled(Format()) ? to_float(scales[i]) : 1.0f;
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
          part[b][i] = scale * ((sum[0][b][i] + sum[1][b][i]) + (sum[2][b][i] + sum[3][b][i]));
      }
    }
    add_groups<kBatch>(part, turn, total);
  }
  finish<kBatch>(total, job, y, rows);
}
