// Where the tiles of a matrix lie: ops/layout.py, read through a page table of 64 KiB frames.
#pragma once
#include "common.cuh"

struct Tiles {
  const u8* frames;
  const int* table;  // frame of each page of the run
  int start_page, start_byte, tile_bytes, across, per_page;
};

__device__ __forceinline__ const u8* tile_at(const Tiles& m, int tile) {
  const int first = (kPage - m.start_byte) / m.tile_bytes;  // tiles in the page where the matrix starts
  int page = m.start_page, byte = m.start_byte;
  if (tile >= first) {
    const u32 past = (u32)(tile - first), pages = past / (u32)m.per_page;
    page += 1 + (int)pages, byte = 0;
    tile = (int)(past - pages * (u32)m.per_page);
  }
  return m.frames + (i64)__ldg(m.table + page) * kPage + byte + (i64)tile * m.tile_bytes;
}

struct Int4 {};
struct Int8 {};
struct Half {
  typedef half_t type;
};
struct Single {
  typedef float type;
};
