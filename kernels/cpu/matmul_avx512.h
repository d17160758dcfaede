/* int8 activations on AVX512-VNNI: a 32-bit lane is one row of the tile, so nothing is summed across lanes.
   vpdpbusd wants unsigned weights: nibbles are (value + 8), int8 codes become (value + 128) by flipping the sign bit;
   the starting value of each sum takes that out again. High nibbles stay where they are, 16 times too large, and their
   sum is shifted once at the end instead of every weight. */

INLINE void fast_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    const __m512i low_nibbles = _mm512_set1_epi8(15), high_nibbles = _mm512_set1_epi8((char)0xf0),
                  sign_bits = _mm512_set1_epi8((char)0x80);
    v16 acc[MAX_BLOCK];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        if (c->ahead) read_ahead(c, tile, m->groups_per_tile * ROWS * 2);
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            if (c->ahead) read_ahead(c, codes, m->group * (int4 ? 8 : 16));
            __m512i even[MAX_BLOCK], odd[MAX_BLOCK]; /* two sums a row: one would wait for itself */
            for (int i = 0; i < n; i++) {
                even[i] = _mm512_set1_epi32(a[i].offset[group]);
                odd[i] = _mm512_setzero_si512();
            }
            int k = group * m->group;
            for (const uint8_t *end = codes + m->group * (int4 ? 8 : 16); codes < end; codes += 256)
#pragma GCC unroll 4
                for (int u = 0; u < 4; u++, k += int4 ? 8 : 4) {
                    __m512i w = _mm512_loadu_si512(codes + 64 * u);
                    __m512i first = int4 ? _mm512_and_si512(w, low_nibbles) : _mm512_xor_si512(w, sign_bits);
                    __m512i second = _mm512_and_si512(w, high_nibbles);
                    for (int i = 0; i < n; i++) {
                        __m512i x = _mm512_set1_epi32((int)load_u32(a[i].q + k));
                        if (int4) {
                            even[i] = _mm512_dpbusd_epi32(even[i], first, x);
                            odd[i] =
                                _mm512_dpbusd_epi32(odd[i], second, _mm512_set1_epi32((int)load_u32(a[i].q + k + 4)));
                        } else if (u & 1) {
                            odd[i] = _mm512_dpbusd_epi32(odd[i], first, x);
                        } else {
                            even[i] = _mm512_dpbusd_epi32(even[i], first, x);
                        }
                    }
                }
            v16 scale = v_load_half((const uint16_t *)tile + b * ROWS);
            for (int i = 0; i < n; i++) {
                v16 total = _mm512_cvtepi32_ps(_mm512_add_epi32(even[i], int4 ? _mm512_srai_epi32(odd[i], 4) : odd[i]));
                acc[i] = v_madd(acc[i], v_mul(scale, v_set1(a[i].scale[group])), total);
            }
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}
