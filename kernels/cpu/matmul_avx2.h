/* int8 activations on AVX2: a 32-bit lane is one row of the tile, eight rows a register, so half a tile at a time.
   Nibbles: vpmaddubsw adds two products of at most 15 * 127; eight of those sums (32 inputs) still fit 16 bits.
   int8 codes: |w| times x with w's sign; a pair is at most 2 * 127 * 127, so every pair is widened at once. */

INLINE __m256i broadcast4(const int8_t *q) { return _mm256_set1_epi32((int)load_u32(q)); }

INLINE void dots_int4(const uint8_t *codes, const Act *a, int k, int end, __m256i *d, const int n) {
    const __m256i low_nibbles = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (; k < end; codes += 256) {
        __m256i s[FAST_ROWS];
        for (int i = 0; i < n; i++) s[i] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++, k += 8) {
            __m256i w = _mm256_loadu_si256((const __m256i *)(codes + 64 * u));
            __m256i first = _mm256_and_si256(w, low_nibbles),
                    second = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_nibbles);
            for (int i = 0; i < n; i++) {
                s[i] = _mm256_add_epi16(s[i], _mm256_maddubs_epi16(first, broadcast4(a[i].q + k)));
                s[i] = _mm256_add_epi16(s[i], _mm256_maddubs_epi16(second, broadcast4(a[i].q + k + 4)));
            }
        }
        for (int i = 0; i < n; i++) d[i] = _mm256_add_epi32(d[i], _mm256_madd_epi16(s[i], ones));
    }
}

INLINE void dots_int8(const uint8_t *codes, const Act *a, int k, int end, __m256i *d, const int n) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (; k < end; k += 4, codes += 64) {
        __m256i w = _mm256_loadu_si256((const __m256i *)codes), size = _mm256_abs_epi8(w);
        for (int i = 0; i < n; i++) {
            __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast4(a[i].q + k), w));
            d[i] = _mm256_add_epi32(d[i], _mm256_madd_epi16(pairs, ones));
        }
    }
}

INLINE void fast_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    __m256 acc[FAST_ROWS][2];
    for (int i = 0; i < n; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        if (c->ahead) read_ahead(c, tile, m->groups_per_tile * ROWS * 2);
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            if (c->ahead) read_ahead(c, codes, m->group * (int4 ? 8 : 16));
            int k = group * m->group;
            for (int half = 0; half < 2; half++) {
                __m256i d[FAST_ROWS];
                for (int i = 0; i < n; i++) d[i] = _mm256_set1_epi32(int4 ? a[i].offset[group] : 0);
                if (int4) dots_int4(codes + 32 * half, a, k, k + m->group, d, n);
                else dots_int8(codes + 32 * half, a, k, k + m->group, d, n);
                __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(tile + b * ROWS * 2 + 16 * half)));
                for (int i = 0; i < n; i++) {
                    __m256 f = _mm256_mul_ps(scale, _mm256_set1_ps(a[i].scale[group]));
                    acc[i][half] = _mm256_add_ps(acc[i][half], _mm256_mul_ps(f, _mm256_cvtepi32_ps(d[i])));
                }
            }
            codes += m->group * (int4 ? 8 : 16);
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], v_pair(acc[i][0], acc[i][1]));
}
