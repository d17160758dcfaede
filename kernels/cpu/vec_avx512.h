/* AVX512F/BW/DQ/VL + VNNI. */
#include <immintrin.h>

#ifdef AMX
#define ISA "amx"
#else
#define ISA "avx512"
#endif
#define FAST_ROWS 8  /* rows of activations that one load of int8 or int4 weights serves */
#define FLOAT_ROWS 4 /* the same for float activations: four sums a row must stay in registers */
#define SCORED 4     /* keys that attention scores at a time: four sums each must stay in registers */
#define MIXED 4      /* vectors of a value that attention adds at a time */

typedef __m512 v16;

INLINE v16 v_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 lanes(int n) { return (__mmask16)((1u << n) - 1); }
INLINE v16 v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
INLINE void v_store_n(float *p, v16 v, int n) { _mm512_mask_storeu_ps(p, lanes(n), v); }
INLINE v16 v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE v16 v_load_half_n(const uint16_t *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(n), p)); }
INLINE void v_store_half_n(uint16_t *p, v16 v, int n) {
    _mm256_mask_storeu_epi16(p, lanes(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(b, c, a); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); } /* a > b ? a : b, so NaN in b stays */
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE v16 v_round(v16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* y * 2^n for whole n from -127 (gives 0) to 127. */
INLINE v16 v_ldexp(v16 y, v16 n) {
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(y, _mm512_castsi512_ps(bits));
}

/* Lanes i and i + 8, then i + 4, i + 2, i + 1: the tree of all levels. */
INLINE __m128 to_quarters(v16 v) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
INLINE float v_sum(v16 v) {
    __m128 q = to_quarters(v);
    __m128 h = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
/* The four sums of v[0..3]. */
INLINE void v_sum4(const v16 *v, float *out) {
    __m128 a = to_quarters(v[0]), b = to_quarters(v[1]), c = to_quarters(v[2]), d = to_quarters(v[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
}

/* out[h * stride + j] = the sum of v[j][h], in the order of v_sum: two vectors become one at each of its steps. Half of
   what is moved stays in its lane, since only one port can move it elsewhere. */
INLINE void v_sum16(const v16 v[4][4], float *out, size_t stride, int n) {
    const __m512i quarters = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    const __m512i pairs = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    v16 four[4];
    for (int j = 0; j < 4; j++) {
        v16 eight[2];
        for (int h = 0; h < 4; h += 2)
            eight[h / 2] = v_add(_mm512_mask_blend_ps(0xff00, v[j][h], v[j][h + 1]),
                                 _mm512_shuffle_f32x4(v[j][h], v[j][h + 1], 0x4e));
        four[j] = v_add(_mm512_mask_blend_ps(0xf0f0, eight[0], eight[1]),
                        _mm512_permutex2var_ps(eight[0], quarters, eight[1]));
    }
    v16 a = v_add(_mm512_mask_blend_ps(0xcccc, four[0], four[2]), _mm512_shuffle_ps(four[0], four[2], 0x4e));
    v16 b = v_add(_mm512_mask_blend_ps(0xcccc, four[1], four[3]), _mm512_shuffle_ps(four[1], four[3], 0x4e));
    v16 sums = v_add(_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permutex2var_ps(a, pairs, b)); /* of h 0, 2, 1, 3 */
    _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
    if (n > 1) _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(sums, 2));
    if (n > 2) _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(sums, 1));
    if (n > 3) _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(sums, 3));
}

/* The larger bit pattern of |a| and |b|: as absolute values, with NaN above everything. */
INLINE v16 v_absmax(v16 a, v16 b) {
    __m512i mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), mask),
                                                _mm512_and_si512(_mm512_castps_si512(b), mask)));
}
INLINE float v_absmax_lane(v16 v) {
    int bits = _mm512_reduce_max_epi32(_mm512_castps_si512(v));
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Sixteen int8 codes of x, rounded to nearest even; their sum. */
INLINE int v_quantise(v16 x, int8_t *out) {
    __m512i q = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(q));
    return _mm512_reduce_add_epi32(q);
}

/* Byte j of sixteen rows' words at p: an int8 code, or the low (part 0) or high nibble less 8. */
INLINE v16 v_int8(const uint8_t *p, int j) {
    __m512i w = _mm512_loadu_si512(p);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 24 - 8 * j), 24));
}
INLINE v16 v_int4(const uint8_t *p, int j, int part) {
    const v16 value = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), 8 * j + 4 * part), value);
}

/* Whole numbers within int16. */
INLINE void v_store_codes(int16_t *out, v16 whole) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole)));
}
INLINE float v_max_lane(v16 v) { return _mm512_reduce_max_ps(v); }

/* Four rows of int16 codes, `stride` apart, times b: exact. n is a multiple of 32; `block` products fit into 32 bits.
 */
INLINE void dot4_codes(const int16_t *a, size_t stride, const int16_t *b, int n, int block, int64_t *out) {
    for (int j = 0; j < 4; j++) out[j] = 0;
    for (int i = 0; i < n;) {
        int end = n - i > 16 * block ? i + 16 * block : n;
        __m512i s[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        for (; i < end; i += 32)
            for (int j = 0; j < 4; j++)
                s[j] = _mm512_dpwssd_epi32(s[j], _mm512_loadu_si512(a + (size_t)j * stride + i),
                                           _mm512_loadu_si512(b + i));
        for (int j = 0; j < 4; j++)
            out[j] += n <= block ? _mm512_reduce_add_epi32(s[j])
                                 : _mm512_reduce_add_epi64(
                                       _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(s[j])),
                                                        _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(s[j], 1))));
    }
}

/* table[whole >> shift & 15] for whole numbers from 0, lane by lane. */
INLINE v16 v_lookup(v16 table, v16 whole, int shift) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtps_epi32(whole), (unsigned)shift), table);
}
/* One bit for each of sixteen integers: is it at least t? */
INLINE uint16_t bits_from(const int32_t *p, int32_t t) {
    return (uint16_t)_mm512_cmpge_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(t));
}
