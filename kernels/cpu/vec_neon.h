/* NEON on aarch64: sixteen lanes are four registers. */
#include <arm_neon.h>

#ifdef DOTPROD
#define ISA "dotprod"
#else
#define ISA "neon"
#endif
#define FAST_ROWS 4
#define FLOAT_ROWS 1 /* four sums of four registers each are half of all there are */
#define SCORED 1     /* keys that attention scores at a time: four sums each must stay in registers */
#define MIXED 1      /* vectors of a value that attention adds at a time */

typedef struct {
    float32x4_t a, b, c, d;
} v16;
typedef struct {
    int32x4_t a, b, c, d;
} i16;

INLINE v16 v_of(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    v16 v = {a, b, c, d};
    return v;
}
#define OF_ONE(f, x) v_of(f((x).a), f((x).b), f((x).c), f((x).d))
#define OF_TWO(f, x, y) v_of(f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d))

INLINE v16 v_set1(float x) { return v_of(vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)); }
INLINE v16 v_load(const float *p) { return v_of(vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)); }
INLINE void v_store(float *p, v16 v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
    vst1q_f32(p + 8, v.c);
    vst1q_f32(p + 12, v.d);
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
    float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(p)), high = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return v_of(vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                vcvt_high_f32_f16(high));
}
INLINE v16 v_load_half_n(const uint16_t *p, int n) {
    uint16_t t[16] = {0};
    memcpy(t, p, (size_t)n * 2);
    return v_load_half(t);
}
INLINE void v_store_half_n(uint16_t *p, v16 v, int n) {
    uint16_t t[16];
    vst1q_u16(t, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b)));
    vst1q_u16(t + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.c), v.d)));
    memcpy(p, t, (size_t)n * 2);
}

/* FMAX and FMIN would give NaN wherever there is one; here it stays only in b, as on x86. */
INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

INLINE v16 v_add(v16 x, v16 y) { return OF_TWO(vaddq_f32, x, y); }
INLINE v16 v_sub(v16 x, v16 y) { return OF_TWO(vsubq_f32, x, y); }
INLINE v16 v_mul(v16 x, v16 y) { return OF_TWO(vmulq_f32, x, y); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    return v_of(vfmaq_f32(a.a, b.a, c.a), vfmaq_f32(a.b, b.b, c.b), vfmaq_f32(a.c, b.c, c.c), vfmaq_f32(a.d, b.d, c.d));
}
INLINE v16 v_div(v16 x, v16 y) { return OF_TWO(vdivq_f32, x, y); }
INLINE v16 v_max(v16 x, v16 y) { return OF_TWO(larger, x, y); }
INLINE v16 v_min(v16 x, v16 y) { return OF_TWO(smaller, x, y); }
INLINE v16 v_round(v16 x) { return OF_ONE(vrndnq_f32, x); }

INLINE float32x4_t pow2(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
INLINE v16 v_ldexp(v16 y, v16 n) { return v_mul(y, OF_ONE(pow2, n)); }

/* Lanes i and i + 8, i + 4, i + 2: what is left for the last addition. */
INLINE float32x2_t to_eighths(v16 v) {
    float32x4_t q = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    return vadd_f32(vget_low_f32(q), vget_high_f32(q));
}
INLINE float v_sum(v16 v) { return vpadds_f32(to_eighths(v)); }
INLINE void v_sum4(const v16 *v, float *out) {
    vst1q_f32(out, vpaddq_f32(vcombine_f32(to_eighths(v[0]), to_eighths(v[1])),
                              vcombine_f32(to_eighths(v[2]), to_eighths(v[3]))));
}

INLINE float32x4_t absmax4(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(vabsq_f32(a)), vreinterpretq_s32_f32(vabsq_f32(b))));
}
INLINE v16 v_absmax(v16 x, v16 y) { return OF_TWO(absmax4, x, y); }
INLINE float v_absmax_lane(v16 v) {
    int32_t bits = vmaxvq_s32(vreinterpretq_s32_f32(absmax4(absmax4(v.a, v.b), absmax4(v.c, v.d))));
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE float v_max_lane(v16 v) {
    float32x4_t q = larger(larger(v.a, v.c), larger(v.b, v.d));
    q = larger(q, vextq_f32(q, q, 2));
    return vgetq_lane_f32(larger(q, vextq_f32(q, q, 1)), 0);
}

/* Whole numbers, to nearest even. */
INLINE i16 whole(v16 v) {
    i16 w = {vcvtnq_s32_f32(v.a), vcvtnq_s32_f32(v.b), vcvtnq_s32_f32(v.c), vcvtnq_s32_f32(v.d)};
    return w;
}
INLINE int16x8_t narrow(int32x4_t low, int32x4_t high) { return vmovn_high_s32(vmovn_s32(low), high); }

INLINE int v_quantise(v16 x, int8_t *out) {
    i16 q = whole(x);
    vst1q_s8(out, vmovn_high_s16(vmovn_s16(narrow(q.a, q.b)), narrow(q.c, q.d)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(q.a, q.b), vaddq_s32(q.c, q.d)));
}
INLINE void v_store_codes(int16_t *out, v16 codes) {
    i16 w = whole(codes);
    vst1q_s16(out, narrow(w.a, w.b));
    vst1q_s16(out + 8, narrow(w.c, w.d));
}

INLINE v16 widened(int8x16_t codes) {
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return v_of(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high)));
}
/* ld4 puts byte j of the sixteen words into register j. */
INLINE v16 v_int8(const uint8_t *p, int j) { return widened(vreinterpretq_s8_u8(vld4q_u8(p).val[j])); }
INLINE v16 v_int4(const uint8_t *p, int j, int part) {
    uint8x16_t w = vld4q_u8(p).val[j];
    int8x16_t code = vreinterpretq_s8_u8(part ? vshrq_n_u8(w, 4) : vandq_u8(w, vdupq_n_u8(15)));
    return widened(vsubq_s8(code, vdupq_n_s8(8)));
}

INLINE void dot4_codes(const int16_t *a, size_t stride, const int16_t *b, int n, int block, int64_t *out) {
    for (int j = 0; j < 4; j++) out[j] = 0;
    for (int i = 0; i < n;) {
        int end = n - i > 4 * block ? i + 4 * block : n; /* a lane takes every fourth product */
        int32x4_t s[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
        for (; i < end; i += 8) {
            int16x8_t x = vld1q_s16(b + i);
            for (int j = 0; j < 4; j++) {
                int16x8_t w = vld1q_s16(a + (size_t)j * stride + i);
                s[j] = vmlal_high_s16(vmlal_s16(s[j], vget_low_s16(w), vget_low_s16(x)), w, x);
            }
        }
        for (int j = 0; j < 4; j++) out[j] += vaddlvq_s32(s[j]);
    }
}

/* Entries of a table of sixteen floats, as bytes 4 i to 4 i + 3 of its four registers. */
INLINE float32x4_t looked_up(uint8x16x4_t table, int32x4_t at, int shift) {
    uint32x4_t i = vandq_u32(vshlq_u32(vreinterpretq_u32_s32(at), vdupq_n_s32(-shift)), vdupq_n_u32(15));
    uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), i, 0x04040404);
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
}
INLINE v16 v_lookup(v16 table, v16 index, int shift) {
    uint8x16x4_t t = {{vreinterpretq_u8_f32(table.a), vreinterpretq_u8_f32(table.b), vreinterpretq_u8_f32(table.c),
                       vreinterpretq_u8_f32(table.d)}};
    i16 at = whole(index);
    return v_of(looked_up(t, at.a, shift), looked_up(t, at.b, shift), looked_up(t, at.c, shift),
                looked_up(t, at.d, shift));
}
INLINE uint16_t bits_from(const int32_t *p, int32_t t) {
    const uint32_t places[4] = {1, 2, 4, 8};
    uint32_t bits = 0;
    for (int r = 0; r < 4; r++)
        bits |= vaddvq_u32(vandq_u32(vcgeq_s32(vld1q_s32(p + 4 * r), vdupq_n_s32(t)), vld1q_u32(places))) << 4 * r;
    return (uint16_t)bits;
}
