// What kernels may use of the GPU beyond plain CUDA C++; hostsim/clb.cuh has the same names for the CPU.
// No header of the toolkit is needed, so a compiler and headers that do not match cannot break a build.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef long long i64;

#define CLB_INF __int_as_float(0x7f800000)
#define CLB_NAN __int_as_float(0x7fffffff)

// A 16-bit float in memory; arithmetic is always in float.
struct half_t {
  u16 bits;
};
__device__ __forceinline__ float to_float(half_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
  return f;
}
__device__ __forceinline__ float to_float(float f) { return f; }
__device__ __forceinline__ void store(half_t* p, float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(f)); }
__device__ __forceinline__ void store(float* p, float f) { *p = f; }

// The one place that names shared memory: its size comes with the launch.
template <class T>
__device__ __forceinline__ T* clb_shared() {
  extern __shared__ __align__(16) unsigned char clb_shared_memory[];
  return reinterpret_cast<T*>(clb_shared_memory);
}

// Sixteen bytes of weights, which are read once: not to be kept in the first-level cache.
__device__ __forceinline__ uint4 clb_stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
