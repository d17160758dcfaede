// Intrinsics of the GPU, and the twins of device/clb.cuh.
#pragma once
#define CLB_INF __int_as_float(0x7f800000)
#define CLB_NAN __int_as_float(0x7fffffff)

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  u32 made = 0;
  for (int i = 0; i < 4; ++i) made |= (u32)(((u64)y << 32 | x) >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (i8)(a >> 8 * i) * (i8)(b >> 8 * i);
  return c;
}
inline float __int_as_float(int v) { return sim::value<float>((u32)v); }
inline int __float_as_int(float v) { return (int)sim::bits(v); }
inline double __longlong_as_double(i64 v) { return sim::value<double>((u64)v); }
inline i64 __double_as_longlong(double v) { return (i64)sim::bits(v); }
inline int __float2int_rn(float v) { return v != v ? 0 : (int)nearbyintf(v); }
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }

template <class T>
inline T* clb_shared() {
  return reinterpret_cast<T*>(sim::M->shared);
}
inline uint4 clb_stream(const uint4* p) { return *p; }
