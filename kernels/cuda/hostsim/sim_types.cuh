// Qualifiers and types of CUDA C++.
#pragma once
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef long long i64;

struct dim3 {
  unsigned x, y, z;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

struct half_t {
  u16 bits;
};
inline float to_float(half_t h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return (float)f;
}
inline float to_float(float f) { return f; }
inline void store(half_t* p, float f) {
  const _Float16 h = (_Float16)f;
  memcpy(p, &h, 2);
}
inline void store(float* p, float f) { *p = f; }
