/* AVX2 + FMA + F16C: sixteen lanes are two registers. */
#include <immintrin.h>

#define ISA "avx2"
#define FAST_ROWS 4
#define FLOAT_ROWS 2
#define SCORED 1 /* keys that attention scores at a time: four sums each must stay in registers */
#define MIXED 1 /* vectors of a value that attention adds at a time */

typedef struct {
    __m256 lo, hi;
} v16;

INLINE v16 v_pair(__m256 lo, __m256 hi) {
    v16 v = {lo, hi};
    return v;
}
INLINE v16 v_set1(float x) { return v_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE v16 v_load(const float *p) { return v_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, v16 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
INLINE v16 v_load_n(const float *p, int n) {
    float t[16] = {0};
    memcpy(t, p, (size_t)n * 4);
    return v_load(t);
}
INLINE void v_store_n(float *p, v16 v, int n) {
    float t[16];
    v_store(t, v);
    memcpy(p, t, (size_t)n * 4);
}
INLINE v16 v_load_half(const uint16_t *p) {
    return v_pair(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE v16 v_load_half_n(const uint16_t *p, int n) {
    uint16_t t[16] = {0};
    memcpy(t, p, (size_t)n * 2);
    return v_load_half(t);
}
INLINE void v_store_half_n(uint16_t *p, v16 v, int n) {
    uint16_t t[16];
    _mm_storeu_si128((__m128i *)t, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(t + 8), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    memcpy(p, t, (size_t)n * 2);
}

INLINE v16 v_add(v16 a, v16 b) { return v_pair(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
INLINE v16 v_sub(v16 a, v16 b) { return v_pair(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
INLINE v16 v_mul(v16 a, v16 b) { return v_pair(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    return v_pair(_mm256_fmadd_ps(b.lo, c.lo, a.lo), _mm256_fmadd_ps(b.hi, c.hi, a.hi));
}
INLINE v16 v_div(v16 a, v16 b) { return v_pair(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
INLINE v16 v_max(v16 a, v16 b) { return v_pair(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
INLINE v16 v_min(v16 a, v16 b) { return v_pair(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)); }
INLINE v16 v_round(v16 a) {
    return v_pair(_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                  _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE __m256 pow2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE v16 v_ldexp(v16 y, v16 n) { return v_mul(y, v_pair(pow2(n.lo), pow2(n.hi))); }

INLINE __m128 to_quarters(v16 v) {
    __m256 h = _mm256_add_ps(v.lo, v.hi);
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
INLINE float v_sum(v16 v) {
    __m128 q = to_quarters(v);
    __m128 h = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
INLINE void v_sum4(const v16 *v, float *out) {
    __m128 a = to_quarters(v[0]), b = to_quarters(v[1]), c = to_quarters(v[2]), d = to_quarters(v[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
}

INLINE __m256 absmax8(__m256 a, __m256 b) {
    __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a), mask),
                                                _mm256_and_si256(_mm256_castps_si256(b), mask)));
}
INLINE v16 v_absmax(v16 a, v16 b) { return v_pair(absmax8(a.lo, b.lo), absmax8(a.hi, b.hi)); }
INLINE float v_absmax_lane(v16 v) {
    __m256i m = _mm256_castps_si256(absmax8(v.lo, v.hi));
    __m128i q = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(q));
}

INLINE int v_quantise(v16 x, int8_t *out) {
    __m256i a = _mm256_cvtps_epi32(x.lo), b = _mm256_cvtps_epi32(x.hi);
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
    __m256i s = _mm256_add_epi32(a, b);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

INLINE __m256 int8_half(const uint8_t *p, int j) {
    __m256i w = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 24 - 8 * j);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24));
}
INLINE __m256 int4_half(const uint8_t *p, int shift) {
    __m256i w =
        _mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)p), shift), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(w, _mm256_set1_epi32(8)));
}
INLINE v16 v_int8(const uint8_t *p, int j) { return v_pair(int8_half(p, j), int8_half(p + 32, j)); }
INLINE v16 v_int4(const uint8_t *p, int j, int part) {
    return v_pair(int4_half(p, 8 * j + 4 * part), int4_half(p + 32, 8 * j + 4 * part));
}

INLINE void v_store_codes(int16_t *out, v16 whole) {
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.lo), _mm256_cvtps_epi32(whole.hi));
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(w, 0xd8));
}
INLINE float v_max_lane(v16 v) {
    __m256 h = _mm256_max_ps(v.lo, v.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

INLINE int64_t sum_codes(__m256i s) {
    __m256i w = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(s)),
                                 _mm256_cvtepi32_epi64(_mm256_extracti128_si256(s, 1)));
    __m128i q = _mm_add_epi64(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    return _mm_cvtsi128_si64(q) + _mm_extract_epi64(q, 1);
}
INLINE void dot4_codes(const int16_t *a, size_t stride, const int16_t *b, int n, int block, int64_t *out) {
    for (int j = 0; j < 4; j++) out[j] = 0;
    for (int i = 0; i < n;) {
        int end = n - i > 8 * block ? i + 8 * block : n;
        __m256i s[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
        for (; i < end; i += 16) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(b + i));
            for (int j = 0; j < 4; j++) {
                __m256i w = _mm256_loadu_si256((const __m256i *)(a + (size_t)j * stride + i));
                s[j] = _mm256_add_epi32(s[j], _mm256_madd_epi16(w, x));
            }
        }
        for (int j = 0; j < 4; j++) out[j] += sum_codes(s[j]);
    }
}

INLINE __m256 lookup_half(v16 table, __m256 whole, int shift) {
    __m256i at = _mm256_srli_epi32(_mm256_cvtps_epi32(whole), shift);
    __m256 low = _mm256_permutevar8x32_ps(table.lo, at), high = _mm256_permutevar8x32_ps(table.hi, at);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}
INLINE v16 v_lookup(v16 table, v16 whole, int shift) {
    return v_pair(lookup_half(table, whole.lo, shift), lookup_half(table, whole.hi, shift));
}
INLINE uint16_t bits_from(const int32_t *p, int32_t t) {
    __m256i under = _mm256_set1_epi32(t - 1), a = _mm256_loadu_si256((const __m256i *)p);
    __m256i b = _mm256_loadu_si256((const __m256i *)(p + 8));
    int low = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, under)));
    int high = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b, under)));
    return (uint16_t)(low | high << 8);
}
