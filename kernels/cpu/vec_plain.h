/* Plain C for any processor: short loops over sixteen lanes, which compilers turn into whatever vectors there are. */
#define ISA "plain"
#define FAST_ROWS 2
#define FLOAT_ROWS 1

typedef struct {
    float f[16];
} v16;

#define LANES for (int i = 0; i < 16; i++)

INLINE v16 v_set1(float x) {
    v16 v;
    LANES v.f[i] = x;
    return v;
}
INLINE v16 v_load_n(const float *p, int n) {
    v16 v = {{0}};
    memcpy(v.f, p, (size_t)n * 4);
    return v;
}
INLINE v16 v_load(const float *p) { return v_load_n(p, 16); }
INLINE void v_store_n(float *p, v16 v, int n) { memcpy(p, v.f, (size_t)n * 4); }
INLINE void v_store(float *p, v16 v) { v_store_n(p, v, 16); }

/* fp16 to fp32: shift into place, then let a multiplication move the exponent, which also handles subnormals. */
INLINE float from_half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16, special = (h & 0x7c00) == 0x7c00;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits = (special ? (bits | 0x7f800000) : bits) | sign;
    memcpy(&f, &bits, 4);
    return f;
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
INLINE v16 v_load_half_n(const uint16_t *p, int n) {
    v16 v = {{0}};
    for (int i = 0; i < n; i++) v.f[i] = from_half(p[i]);
    return v;
}
INLINE v16 v_load_half(const uint16_t *p) { return v_load_half_n(p, 16); }
INLINE void v_store_half_n(uint16_t *p, v16 v, int n) {
    for (int i = 0; i < n; i++) p[i] = to_half(v.f[i]);
}

INLINE v16 v_add(v16 a, v16 b) {
    LANES a.f[i] += b.f[i];
    return a;
}
INLINE v16 v_sub(v16 a, v16 b) {
    LANES a.f[i] -= b.f[i];
    return a;
}
INLINE v16 v_mul(v16 a, v16 b) {
    LANES a.f[i] *= b.f[i];
    return a;
}
INLINE v16 v_div(v16 a, v16 b) {
    LANES a.f[i] /= b.f[i];
    return a;
}
INLINE v16 v_max(v16 a, v16 b) {
    LANES a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
    return a;
}
INLINE v16 v_min(v16 a, v16 b) {
    LANES a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
    return a;
}
/* To nearest even for |a| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. */
INLINE v16 v_round(v16 a) {
    LANES a.f[i] = (a.f[i] + 12582912.0f) - 12582912.0f;
    return a;
}
INLINE v16 v_ldexp(v16 y, v16 n) {
    LANES {
        uint32_t bits = n.f[i] > -127 ? (uint32_t)((int)n.f[i] + 127) << 23 : 0; /* NaN too: y carries it */
        float p;
        memcpy(&p, &bits, 4);
        y.f[i] *= p;
    }
    return y;
}

INLINE float v_sum(v16 v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v.f[i] += v.f[i + half];
    return v.f[0];
}
INLINE void v_sum4(const v16 *v, float *out) {
    for (int i = 0; i < 4; i++) out[i] = v_sum(v[i]);
}

INLINE v16 v_absmax(v16 a, v16 b) {
    LANES {
        uint32_t p, q;
        memcpy(&p, &a.f[i], 4);
        memcpy(&q, &b.f[i], 4);
        p &= 0x7fffffff, q &= 0x7fffffff;
        p = p > q ? p : q;
        memcpy(&a.f[i], &p, 4);
    }
    return a;
}
INLINE float v_absmax_lane(v16 v) {
    v16 m = v_absmax(v, v);
    for (int i = 1; i < 16; i++)
        if (!(m.f[i] <= m.f[0])) m.f[0] = m.f[i];
    return m.f[0];
}

INLINE int v_quantise(v16 x, int8_t *out) {
    int sum = 0;
    x = v_round(x);
    LANES {
        out[i] = (int8_t)x.f[i];
        sum += (int)x.f[i];
    }
    return sum;
}

INLINE v16 v_int8(const uint8_t *p, int j) {
    v16 v;
    uint32_t w[16];
    memcpy(w, p, 64);
    LANES v.f[i] = (float)((int32_t)(w[i] << (24 - 8 * j)) >> 24);
    return v;
}
INLINE v16 v_int4(const uint8_t *p, int j, int part) {
    v16 v;
    uint32_t w[16];
    memcpy(w, p, 64);
    LANES v.f[i] = (float)((int32_t)(w[i] >> (8 * j + 4 * part) & 15) - 8);
    return v;
}
#undef LANES
