/* y = W x for some row groups of W and some rows of activations. Weights are loaded once for a block of rows; each row
   is summed as if it were alone, so its bits do not depend on the block. Padding never counts: padded inputs are left
   out (or meet zero activations inside a last, partly filled group), padded rows stay in their own lanes and are not
   stored. */

#define MAX_BLOCK 8

#if defined(AMX)
#include "matmul_amx.h"
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "matmul_avx512.h"
#elif defined(__AVX2__)
#include "matmul_avx2.h"
#elif defined(NEON) || defined(DOTPROD)
#include "matmul_neon.h"
#else
#include "matmul_plain.h"
#endif

/* Float activations: input k goes to sum k % 4, (s0 + s1) + (s2 + s3) at the end of a group. Four sums, because one
   chain of additions would wait for each of them; kernels/cuda/matmul.cu has the same order. */
INLINE v16 four(const v16 *s) { return v_add(v_add(s[0], s[1]), v_add(s[2], s[3])); }

INLINE void float_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    v16 acc[FLOAT_ROWS];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        if (c->ahead) read_ahead(c, tile, m->groups_per_tile * ROWS * 2);
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            if (c->ahead) read_ahead(c, codes, m->group * (int4 ? 8 : 16));
            v16 s[FLOAT_ROWS][4];
            for (int i = 0; i < n; i++)
                for (int j = 0; j < 4; j++) s[i][j] = v_zero();
            for (int k = group * m->group, end = k + m->group; k < end; k += int4 ? 8 : 4, codes += 64) {
                for (int part = 0; part < (int4 ? 2 : 1); part++)
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        v16 w = int4 ? v_int4(codes, j, part) : v_int8(codes, j);
                        for (int i = 0; i < n; i++) s[i][j] = v_madd(s[i][j], w, v_set1(a[i].x[k + 4 * part + j]));
                    }
            }
            v16 scale = v_load_half((const uint16_t *)tile + b * ROWS);
            for (int i = 0; i < n; i++) acc[i] = v_madd(acc[i], scale, four(s[i]));
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}

/* Thirty-two inputs count as a group here. */
INLINE void float_values(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int half) {
    v16 acc[FLOAT_ROWS];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int first = 0; first < m->cols; first += m->tile_cols) {
        const uint8_t *w = cursor_next(c);
        const int step = ROWS * (half ? 2 : 4);
        for (int k = first, end = min_int(first + m->tile_cols, m->cols); k < end;) {
            v16 s[FLOAT_ROWS][4];
            for (int i = 0; i < n; i++)
                for (int j = 0; j < 4; j++) s[i][j] = v_zero();
            int stop = min_int(k + 32, end);
            for (; k + 4 <= stop; k += 4) {
                if (c->ahead && (!half || k % 8 == 0)) read_ahead(c, w, 256);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++, w += step) {
                    v16 v = half ? v_load_half((const uint16_t *)w) : v_load((const float *)w);
                    for (int i = 0; i < n; i++) s[i][j] = v_madd(s[i][j], v, v_set1(a[i].x[k + j]));
                }
            }
            for (int j = 0; k < stop; k++, j++, w += step) {
                v16 v = half ? v_load_half((const uint16_t *)w) : v_load((const float *)w);
                for (int i = 0; i < n; i++) { /* s[i][0..2] by name: an index would push the sums out of registers */
                    v16 more = v_mul(v, v_set1(a[i].x[k]));
                    if (j == 0) s[i][0] = v_add(s[i][0], more);
                    else if (j == 1) s[i][1] = v_add(s[i][1], more);
                    else s[i][2] = v_add(s[i][2], more);
                }
            }
            for (int i = 0; i < n; i++) acc[i] = v_add(acc[i], four(s[i]));
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}

/* A block function multiplies one row group with up to `n` rows and says how many it took. */
typedef int (*Block)(const Matrix *, Cursor *, const Act *, int n, float (*out)[ROWS]);

#define BLOCK(name, kernel, flag, most)                                                   \
    static int name(const Matrix *m, Cursor *c, const Act *a, int n, float(*out)[ROWS]) { \
        if (most >= 8 && n >= 8) return kernel(m, c, a, out, 8, flag), 8;                 \
        if (most >= 4 && n >= 4) return kernel(m, c, a, out, 4, flag), 4;                 \
        if (most >= 2 && n >= 2) return kernel(m, c, a, out, 2, flag), 2;                 \
        return kernel(m, c, a, out, 1, flag), 1;                                          \
    }
BLOCK(block_fast_int4, fast_codes, 1, FAST_ROWS)
BLOCK(block_fast_int8, fast_codes, 0, FAST_ROWS)
BLOCK(block_int4, float_codes, 1, FLOAT_ROWS)
BLOCK(block_int8, float_codes, 0, FLOAT_ROWS)
BLOCK(block_fp16, float_values, 1, FLOAT_ROWS)
BLOCK(block_fp32, float_values, 0, FLOAT_ROWS)

static Block block_for(const Matrix *m, int exact) {
    switch (m->dtype) {
    case INT4: return uses_int8(m, exact) ? block_fast_int4 : block_int4;
    case INT8: return uses_int8(m, exact) ? block_fast_int8 : block_int8;
    case FP16: return block_fp16;
    default: return block_fp32;
    }
}

/* Row groups first <= g < last of W, times a[0..n): y[i][16 * (g - first)...] for row i. */
static void matmul(const Matrix *m, Run run, int first, int last, const Act *a, float *const *y, int n, int exact) {
    Block block = block_for(m, exact);
#ifdef AMX
    int many = uses_int8(m, exact) ? matmul_many(m, run, first, last, a, y, n) : 0;
    if (many == n) return;
    a += many, y += many, n -= many;
#endif
    Cursor next = cursor_at(m, run, (int64_t)first * m->tiles_across);
    float out[MAX_BLOCK][ROWS];
    begin_ahead(&next);
    for (int g = first; g < last; g++) {
        Cursor begin = next;
        int width = min_int(ROWS, m->rows - g * ROWS);
        for (int i = 0; i < n;) {
            next = begin;
            next.ahead = i == 0;
            int took = block(m, &next, a + i, n - i, out);
            for (int j = 0; j < took; j++) memcpy(y[i + j] + (g - first) * ROWS, out[j], (size_t)width * sizeof(float));
            i += took;
        }
    }
}
