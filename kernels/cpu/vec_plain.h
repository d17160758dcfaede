/* Plain C for any processor: GNU C vectors of sixteen lanes, which gcc and clang cut into whatever registers there are
   (SSE2, NEON, ...). No intrinsics. */
#define ISA "plain"
#define FAST_ROWS 1
#define FLOAT_ROWS 1
#define SCORED 1 /* keys that attention scores at a time: four sums each must stay in registers */
#define MIXED 1 /* vectors of a value that attention adds at a time */

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));

INLINE v16 v_set1(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 v_load(const float *p) {
    v16 v;
    memcpy(&v, p, 64);
    return v;
}
INLINE void v_store(float *p, v16 v) { memcpy(p, &v, 64); }
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

/* fp16 to fp32: shift into place, then let a multiplication move the exponent, which also handles subnormals. */
INLINE v16 v_load_half(const uint16_t *p) {
    uint16_t h[16];
    u16 w;
    memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) w[i] = h[i];
    v16 f = (v16)((w & 0x7fff) << 13) * 0x1p112f;
    u16 special = (u16)((w & 0x7c00) == 0x7c00) & 0x7f800000;
    return (v16)((u16)f | special | (w & 0x8000) << 16);
}
INLINE v16 v_load_half_n(const uint16_t *p, int n) {
    uint16_t t[16] = {0};
    memcpy(t, p, (size_t)n * 2);
    return v_load_half(t);
}
/* fp32 to fp16, to nearest even: add the rounding in the integer domain; subnormals round by a float addition. */
INLINE uint16_t to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (a >= 0x38800000) return (uint16_t)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
    memcpy(&f, &a, 4);
    f += 0.5f;
    memcpy(&bits, &f, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
}
INLINE void v_store_half_n(uint16_t *p, v16 v, int n) {
    for (int i = 0; i < n; i++) p[i] = to_half(v[i]);
}

INLINE v16 v_add(v16 a, v16 b) { return a + b; }
INLINE v16 v_sub(v16 a, v16 b) { return a - b; }
INLINE v16 v_mul(v16 a, v16 b) { return a * b; }
#ifdef __FP_FAST_FMAF /* the processor has it */
INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    for (int i = 0; i < 16; i++) a[i] = fmaf(b[i], c[i], a[i]);
    return a;
}
#else
/* a + b * c rounded once, from s = b * c + a in double, where the product is exact. Rounding s again is right but where
   the first rounding led it to a tie between two floats, or a float has fewer digits. There s is rounded to odd instead,
   so that the last rounding sees what was lost (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
   2008). */
static float fma_odd(float a, float b, float c) {
    double p = (double)b * c, s = p + a, t = s - p, lost = (p - (s - t)) + (a - t);
    int64_t bits;
    memcpy(&bits, &s, 8);
    if ((lost > 0 || lost < 0) && !(bits & 1)) bits += (lost > 0) == (s > 0) ? 1 : -1; /* of NaN neither */
    memcpy(&s, &bits, 8);
    return (float)s;
}
INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    float x[16], y[16], z[16], out[16];
    double s[16];
    uint32_t words[32], doubtful = 0;
    v_store(x, a), v_store(y, b), v_store(z, c);
    for (int i = 0; i < 16; i++) s[i] = (double)y[i] * z[i] + x[i];
    for (int i = 0; i < 16; i++) out[i] = (float)s[i];
    memcpy(words, s, sizeof words);
    for (int i = 0; i < 16; i++) {
        uint32_t low = words[2 * i] & 0x1fffffff, high = words[2 * i + 1] & 0x7fffffff;
        doubtful |= (low == 0x10000000) | (high - 1 < 0x38100000 - 1); /* a tie; not 0, but below 2^-126 */
    }
    if (doubtful)
        for (int i = 0; i < 16; i++) out[i] = fma_odd(x[i], y[i], z[i]);
    return v_load(out);
}
#endif
INLINE v16 v_div(v16 a, v16 b) { return a / b; }
INLINE v16 pick(i16 first, v16 a, v16 b) { return (v16)(((i16)a & first) | ((i16)b & ~first)); }
INLINE v16 v_max(v16 a, v16 b) { return pick(a > b, a, b); }
INLINE v16 v_min(v16 a, v16 b) { return pick(a < b, a, b); }
/* To nearest even for |a| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. */
INLINE v16 v_round(v16 a) { return (a + 12582912.0f) - 12582912.0f; }

/* The whole numbers n, |n| < 2^22: the low bits of n + 1.5 * 2^23. A conversion would not be defined for NaN. */
INLINE i16 whole(v16 n) { return (i16)(n + 12582912.0f) - 0x4b400000; }
INLINE v16 v_ldexp(v16 y, v16 n) { return y * (v16)((whole(n) + 127) << 23); }

INLINE float v_sum(v16 v) {
    float t[16];
    v_store(t, v);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}
INLINE void v_sum4(const v16 *v, float *out) {
    for (int i = 0; i < 4; i++) out[i] = v_sum(v[i]);
}

INLINE v16 v_absmax(v16 a, v16 b) {
    i16 p = (i16)a & 0x7fffffff, q = (i16)b & 0x7fffffff, first = p > q;
    return (v16)((p & first) | (q & ~first));
}
INLINE float v_absmax_lane(v16 v) {
    int32_t t[16];
    float f;
    memcpy(t, &v, 64);
    for (int i = 0; i < 16; i++) t[0] = max_int(t[0], t[i] & 0x7fffffff);
    memcpy(&f, t, 4);
    return f;
}

INLINE int v_quantise(v16 x, int8_t *out) {
    i16 q = whole(x);
    int sum = 0;
    for (int i = 0; i < 16; i++) {
        out[i] = (int8_t)q[i];
        sum += q[i];
    }
    return sum;
}

INLINE i16 words_at(const uint8_t *p) {
    i16 w;
    memcpy(&w, p, 64);
    return w;
}
INLINE v16 v_int8(const uint8_t *p, int j) {
    return __builtin_convertvector((i16)((u16)words_at(p) << (24 - 8 * j)) >> 24, v16);
}
INLINE v16 v_int4(const uint8_t *p, int j, int part) {
    return __builtin_convertvector((words_at(p) >> (8 * j + 4 * part) & 15) - 8, v16);
}

INLINE void v_store_codes(int16_t *out, v16 index) {
    i16 at = whole(index);
    for (int i = 0; i < 16; i++) out[i] = (int16_t)at[i];
}
INLINE float v_max_lane(v16 v) {
    float top = v[0];
    for (int i = 1; i < 16; i++) top = v[i] > top ? v[i] : top;
    return top;
}
INLINE void dot4_codes(const int16_t *a, size_t stride, const int16_t *b, int n, int block, int64_t *out) {
    for (int j = 0; j < 4; j++) {
        const int16_t *w = a + (size_t)j * stride;
        out[j] = 0;
        for (int i = 0; i < n;) {
            int end = n - i > block ? i + block : n;
            int32_t part = 0;
            for (; i < end; i++) part += (int32_t)w[i] * b[i];
            out[j] += part;
        }
    }
}

INLINE v16 v_lookup(v16 table, v16 index, int shift) {
    float t[16];
    v_store(t, table);
    i16 at = whole(index) >> shift & 15;
    for (int i = 0; i < 16; i++) index[i] = t[at[i]];
    return index;
}
INLINE uint16_t bits_from(const int32_t *p, int32_t t) {
    unsigned bits = 0;
    for (int i = 0; i < 16; i++) bits |= (unsigned)(p[i] >= t) << i;
    return (uint16_t)bits;
}
