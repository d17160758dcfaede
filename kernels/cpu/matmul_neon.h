/* int8 activations on NEON: a 32-bit lane is one row of the tile, so four rows a register and d[i][r] rows 4 r to
   4 r + 3. All codes are signed here, nibbles less 8 by the starting value of the sums. */

#ifdef DOTPROD
/* sdot adds four products to each lane; one register holds sixteen inputs, of which it takes the four of a lane. */

INLINE void dots_int4(const uint8_t *codes, const Act *a, int k, int end, int32x4_t (*d)[4], const int n) {
    const uint8x16_t low_nibbles = vdupq_n_u8(15);
    for (; k < end; k += 16, codes += 128) {
        int8x16_t x[FAST_ROWS];
        for (int i = 0; i < n; i++) x[i] = vld1q_s8(a[i].q + k);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            uint8x16_t w = vld1q_u8(codes + 16 * r), v = vld1q_u8(codes + 64 + 16 * r);
            int8x16_t w0 = vreinterpretq_s8_u8(vandq_u8(w, low_nibbles)), w1 = vreinterpretq_s8_u8(vshrq_n_u8(w, 4)),
                      v0 = vreinterpretq_s8_u8(vandq_u8(v, low_nibbles)), v1 = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
            for (int i = 0; i < n; i++) {
                d[i][r] = vdotq_laneq_s32(vdotq_laneq_s32(d[i][r], w0, x[i], 0), w1, x[i], 1);
                d[i][r] = vdotq_laneq_s32(vdotq_laneq_s32(d[i][r], v0, x[i], 2), v1, x[i], 3);
            }
        }
    }
}

INLINE void dots_int8(const uint8_t *codes, const Act *a, int k, int end, int32x4_t (*d)[4], const int n) {
    for (; k < end; k += 16, codes += 256) {
        const int8_t *w = (const int8_t *)codes;
        int8x16_t x[FAST_ROWS];
        for (int i = 0; i < n; i++) x[i] = vld1q_s8(a[i].q + k);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++, w += 16) {
            int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 64), w2 = vld1q_s8(w + 128), w3 = vld1q_s8(w + 192);
            for (int i = 0; i < n; i++) {
                d[i][r] = vdotq_laneq_s32(vdotq_laneq_s32(d[i][r], w0, x[i], 0), w1, x[i], 1);
                d[i][r] = vdotq_laneq_s32(vdotq_laneq_s32(d[i][r], w2, x[i], 2), w3, x[i], 3);
            }
        }
    }
}

#else
/* Without sdot: products in 16 bits, of which eight of nibbles (at most 15 * 127 each) or two of int8 codes (at most
   128 * 127) fit; then they are added in pairs. Registers hold four rows at a time. */

typedef struct {
    int16x8_t low, high; /* of two rows each, four products a row */
} Products;

INLINE int8x16_t broadcast4(const int8_t *q) { return vreinterpretq_s8_u32(vdupq_n_u32(load_u32(q))); }

INLINE void add_products(Products *p, int8x16_t w, int8x16_t x) {
    p->low = vmlal_s8(p->low, vget_low_s8(w), vget_low_s8(x));
    p->high = vmlal_high_s8(p->high, w, x);
}

INLINE int32x4_t row_sums(const Products *p) { return vpaddq_s32(vpaddlq_s16(p->low), vpaddlq_s16(p->high)); }

INLINE void dots_int4(const uint8_t *codes, const Act *a, int k, int end, int32x4_t (*d)[4], const int n) {
    for (; k < end; k += 32, codes += 256)
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            Products p[FAST_ROWS];
            for (int i = 0; i < n; i++) p[i].low = p[i].high = vdupq_n_s16(0);
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++) {
                uint8x16_t w = vld1q_u8(codes + 64 * u + 16 * r);
                int8x16_t first = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15))),
                          second = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
                for (int i = 0; i < n; i++) {
                    add_products(&p[i], first, broadcast4(a[i].q + k + 8 * u));
                    add_products(&p[i], second, broadcast4(a[i].q + k + 8 * u + 4));
                }
            }
            for (int i = 0; i < n; i++) d[i][r] = vaddq_s32(d[i][r], row_sums(&p[i]));
        }
}

INLINE void dots_int8(const uint8_t *codes, const Act *a, int k, int end, int32x4_t (*d)[4], const int n) {
    for (; k < end; k += 8, codes += 128) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            int8x16_t w = vld1q_s8((const int8_t *)codes + 16 * r), v = vld1q_s8((const int8_t *)codes + 64 + 16 * r);
            for (int i = 0; i < n; i++) {
                Products p = {vdupq_n_s16(0), vdupq_n_s16(0)};
                add_products(&p, w, broadcast4(a[i].q + k));
                add_products(&p, v, broadcast4(a[i].q + k + 4));
                d[i][r] = vaddq_s32(d[i][r], row_sums(&p));
            }
        }
    }
}
#endif

INLINE void fast_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    v16 acc[FAST_ROWS];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        if (c->ahead) read_ahead(c, tile, m->groups_per_tile * ROWS * 2);
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            if (c->ahead) read_ahead(c, codes, m->group * (int4 ? 8 : 16));
            int k = group * m->group;
            int32x4_t d[FAST_ROWS][4];
            for (int i = 0; i < n; i++)
                for (int r = 0; r < 4; r++) d[i][r] = vdupq_n_s32(int4 ? a[i].offset[group] : 0);
            if (int4) dots_int4(codes, a, k, k + m->group, d, n);
            else dots_int8(codes, a, k, k + m->group, d, n);
            v16 scale = v_load_half((const uint16_t *)tile + b * ROWS);
            for (int i = 0; i < n; i++) {
                v16 total = v_of(vcvtq_f32_s32(d[i][0]), vcvtq_f32_s32(d[i][1]), vcvtq_f32_s32(d[i][2]),
                                 vcvtq_f32_s32(d[i][3]));
                acc[i] = v_madd(acc[i], v_mul(scale, v_set1(a[i].scale[group])), total);
            }
            codes += m->group * (int4 ? 8 : 16);
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}
