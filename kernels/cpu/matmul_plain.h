/* int8 activations without intrinsics. A 32-bit word holds one row's codes, as in all levels.
   Nibbles: two of them at a time, in the halves of a word, times two activations: products of at most 15 * 127, of
   which sixteen a half (32 inputs) still fit 16 bits. int8 codes: as floats, which hold a group's dot, below 2^24,
   exactly. */

/* Four rows at a time: compilers cut the arithmetic of wider 16-bit vectors into single numbers. */
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef int16_t halves __attribute__((vector_size(16)));

/* x[i]: activations 0 and 2, 1 and 3, 4 and 6, 5 and 7 of eight inputs, the same two in every word. */
INLINE void pairs(const int8_t *q, halves *x) {
    for (int i = 0; i < 4; i++) {
        const int8_t *at = q + (i & 1) + 4 * (i >> 1);
        x[i] = (halves)((u4){0} + ((uint32_t)(uint16_t)at[0] | (uint32_t)(uint16_t)at[2] << 16));
    }
}

INLINE v16 dot_int4(const uint8_t *codes, const int8_t *q, int group, int offset) {
    i4 sum[4];
    for (int r = 0; r < 4; r++) sum[r] = (i4){0} + offset;
    for (int k = 0; k < group; k += 32) {
        halves s[4] = {{0}, {0}, {0}, {0}};
        for (int u = 0; u < 4; u++, codes += 64, q += 8) {
            halves x[4];
            pairs(q, x);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                u4 w;
                memcpy(&w, codes + 16 * r, 16);
                s[r] += (halves)(w & 0x000f000f) * x[0] + (halves)(w >> 8 & 0x000f000f) * x[1];
                s[r] += (halves)(w >> 4 & 0x000f000f) * x[2] + (halves)(w >> 12 & 0x000f000f) * x[3];
            }
        }
        for (int r = 0; r < 4; r++) sum[r] += ((i4)((u4)s[r] << 16) >> 16) + ((i4)s[r] >> 16);
    }
    i16 all;
    memcpy(&all, sum, 64);
    return __builtin_convertvector(all, v16);
}

INLINE v16 dot_int8(const uint8_t *codes, const int8_t *q, int group) {
    v16 sum = v_zero();
    for (int k = 0; k < group; k += 4, codes += 64) {
        for (int j = 0; j < 4; j++) sum = v_madd(sum, v_int8(codes, j), v_set1((float)q[k + j]));
    }
    return sum;
}

INLINE void fast_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    v16 acc[FAST_ROWS];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        if (c->ahead) read_ahead(c, tile, m->groups_per_tile * ROWS * 2);
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            if (c->ahead) read_ahead(c, codes, m->group * (int4 ? 8 : 16));
            v16 scale = v_load_half((const uint16_t *)tile + b * ROWS);
            for (int i = 0; i < n; i++) {
                const int8_t *q = a[i].q + group * m->group;
                v16 dot = int4 ? dot_int4(codes, q, m->group, a[i].offset[group]) : dot_int8(codes, q, m->group);
                acc[i] = v_madd(acc[i], v_mul(scale, v_set1(a[i].scale[group])), dot);
            }
            codes += m->group * (int4 ? 8 : 16);
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}
