/* v16: sixteen floats. One header per ISA level gives the same operations with the same rounding; everything that is
   not an integer dot product is written once on top of them, so the levels agree bit for bit. Little-endian machines
   only. */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#elif defined(NEON) || defined(DOTPROD)
#include "vec_neon.h"
#else
#include "vec_plain.h"
#endif

INLINE uint32_t load_u32(const void *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

INLINE v16 v_zero(void) { return v_set1(0.0f); }

/* a + b * c, rounded twice: a fused operation is v_fma on every level, and nothing else is one. */
INLINE v16 v_madd(v16 a, v16 b, v16 c) { return v_add(a, v_mul(b, c)); }

/* e^x within 2 ulp (Cephes' polynomial); 0 below -87.7, finite above 88.4, NaN stays NaN. */
INLINE v16 v_exp(v16 x) {
    x = v_max(v_set1(-88.3f), v_min(v_set1(88.3f), x));
    v16 n = v_round(v_mul(x, v_set1(1.44269504f)));
    v16 r = v_sub(v_sub(x, v_mul(n, v_set1(0.693359375f))), v_mul(n, v_set1(-2.12194440e-4f)));
    v16 p = v_set1(1.9875691500e-4f);
    p = v_madd(v_set1(1.3981999507e-3f), p, r);
    p = v_madd(v_set1(8.3334519073e-3f), p, r);
    p = v_madd(v_set1(4.1665795894e-2f), p, r);
    p = v_madd(v_set1(1.6666665459e-1f), p, r);
    p = v_madd(v_set1(5.0000001201e-1f), p, r);
    p = v_add(v_madd(r, v_mul(p, r), r), v_set1(1.0f));
    return v_ldexp(p, n);
}

INLINE v16 v_sigmoid(v16 x) { return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }
INLINE v16 v_silu(v16 x) { return v_div(x, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }

/* Vectors at i of n floats: whole, or the rest with zeros in the missing lanes. */
INLINE v16 v_at(const float *p, int i, int n) { return n - i >= 16 ? v_load(p + i) : v_load_n(p + i, n - i); }
INLINE void v_put(float *p, int i, int n, v16 v) {
    if (n - i >= 16) v_store(p + i, v);
    else v_store_n(p + i, v, n - i);
}

INLINE float dot(const float *a, const float *b, int n) {
    v16 sum = v_zero();
    for (int i = 0; i < n; i += 16) sum = v_madd(sum, v_at(a, i, n), v_at(b, i, n));
    return v_sum(sum);
}
