// The embedding of each row's token: a row of a plain table, or of the head's tiles where the two are tied.
#include "tiles.cuh"

template <class T>
__global__ void __launch_bounds__(256)
embed(const T* __restrict__ table, const int* __restrict__ token, float* __restrict__ x, int cols) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (i < cols) x[(i64)row * cols + i] = to_float(table[(i64)token[row] * cols + i]);
}

__device__ __forceinline__ float weight_in(const u8* tile, int row, int k, int group, int scales, Int4) {
  const int code = tile[scales + k / 8 * 64 + row * 4 + (k & 3)] >> (k & 4) & 15;
  return to_float(reinterpret_cast<const half_t*>(tile)[k / group * kTileRows + row]) * (float)(code - 8);
}
__device__ __forceinline__ float weight_in(const u8* tile, int row, int k, int group, int scales, Int8) {
  const int code = (i8)tile[scales + k / 4 * 64 + row * 4 + (k & 3)];
  return to_float(reinterpret_cast<const half_t*>(tile)[k / group * kTileRows + row]) * (float)code;
}
template <class Float>
__device__ __forceinline__ float weight_in(const u8* tile, int row, int k, int, int, Float) {
  return to_float(reinterpret_cast<const typename Float::type*>(tile)[k * kTileRows + row]);
}

template <class Format>
__global__ void __launch_bounds__(256)
embed_tiles(const u8* __restrict__ frames, const int* __restrict__ table, const int* __restrict__ token,
            float* __restrict__ x, int cols, int group, int start_page, int start_byte, int tile_bytes, int across,
            int per_page, int tile_cols) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, wanted = token[row];
  if (i >= cols) return;
  const Tiles m = {frames, table, start_page, start_byte, tile_bytes, across, per_page};
  const u8* tile = tile_at(m, wanted / kTileRows * across + i / tile_cols);
  const int scales = group ? tile_cols / group * kTileRows * 2 : 0;
  x[(i64)row * cols + i] = weight_in(tile, wanted % kTileRows, i % tile_cols, group, scales, Format());
}
