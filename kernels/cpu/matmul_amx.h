/* int8 activations on AMX, sixteen rows and more at a time: a tile instruction multiplies sixteen rows of activations
   with sixteen rows of weights over one group, exactly, and what is left for vectors is the scaling of each sum. Fewer
   rows go the way of avx512. Instructions are written as bytes, since old assemblers do not know them. */

#include "matmul_avx512.h"

enum {
    MANY = 16,                 /* rows of activations in a tile register */
    ENOUGH = 11,               /* so many are faster in a tile that is not full */
    BLOCKS = 4,                /* tiles of activations that use the same weights in turn */
    PACKED = 256 * 1024,       /* bytes of activations that are packed at a time, on the stack */
    MOST_INPUTS = 256          /* of a tile of weights */
};

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} TileShapes;

/* Registers 0: sums, 1: activations, 2: weights. The addresses must be in rax, the distance of rows in rcx. */
INLINE void tile_shapes(const TileShapes *s) { __asm__ volatile(".byte 0xc4,0xe2,0x78,0x49,0x00" ::"a"(s) : "memory"); }
INLINE void tile_release(void) { __asm__ volatile(".byte 0xc4,0xe2,0x78,0x49,0xc0" ::: "memory"); }
INLINE void tile_zero0(void) { __asm__ volatile(".byte 0xc4,0xe2,0x7b,0x49,0xc0"); }
INLINE void tile_load1(const void *p, int64_t row) {
    __asm__ volatile(".byte 0xc4,0xe2,0x7b,0x4b,0x0c,0x08" ::"a"(p), "c"(row) : "memory");
}
INLINE void tile_load2(const void *p, int64_t row) {
    __asm__ volatile(".byte 0xc4,0xe2,0x7b,0x4b,0x14,0x08" ::"a"(p), "c"(row) : "memory");
}
INLINE void tile_dot(void) { __asm__ volatile(".byte 0xc4,0xe2,0x6b,0x5e,0xc1"); } /* 0 += 1 (signed) . 2 (signed) */
INLINE void tile_store0(void *p) {
    __asm__ volatile(".byte 0xc4,0xe2,0x7a,0x4b,0x04,0x08" ::"a"(p), "c"((int64_t)64) : "memory");
}

/* The codes of one tile of weights as signed bytes, [inputs / 4][16 rows][4]. */
INLINE const int8_t *signed_codes(const uint8_t *codes, int inputs, int8_t *room, const int int4) {
    if (!int4) return (const int8_t *)codes; /* they lie so already */
    const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int k = 0; k < inputs; k += 8, codes += 64, room += 128) {
        __m512i w = _mm512_loadu_si512(codes);
        _mm512_store_si512(room, _mm512_sub_epi8(_mm512_and_si512(w, nibble), eight));
        _mm512_store_si512(room + 64,
                           _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), nibble), eight));
    }
    return room - (size_t)inputs * 16;
}

/* Sixteen rows' codes piece by piece, [inputs / piece][16][piece], and scales, [groups][16]; of n rows the last one
   stands for those that lack. */
INLINE void pack_rows(const Matrix *m, const Act *a, int n, int piece, int8_t *q, float *scale) {
    for (int i = 0; i < MANY; i++) {
        const Act *row = a + min_int(i, n - 1);
        for (int k = 0, inputs = m->groups * m->group; k < inputs; k += 32) {
            int8_t *to = q + (k / piece * MANY + i) * piece + k % piece; /* piece: 32 or 64 */
            _mm256_storeu_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)(row->q + k)));
        }
        for (int b = 0; b < m->groups; b++) scale[b * MANY + i] = row->scale[b];
    }
}

/* The exact sums of one group: sixteen rows of activations with sixteen of weights, in pieces. */
INLINE void sums_of_group(const int8_t *q, const int8_t *w, int pieces, int piece, int32_t *sums) {
    tile_zero0();
    for (int p = 0; p < pieces; p++) {
        tile_load1(q + p * piece * MANY, piece);
        tile_load2(w + p * piece * MANY, 64);
        tile_dot();
    }
    tile_store0(sums);
}

/* One tile of weights for sixteen rows of activations, added to out [16 rows of activations][16 rows of weights]. A
   group's sums are made while those before it are scaled. */
INLINE void add_tile(const int8_t *q, const int8_t *w, const uint16_t *scales, const float *of_rows, int groups,
                     int pieces, int piece, int fresh, float (*out)[ROWS]) {
    _Alignas(64) int32_t sums[2][MANY * ROWS];
    const int step = pieces * piece * MANY;
    v16 acc[MANY];
#pragma GCC unroll 16
    for (int i = 0; i < MANY; i++) acc[i] = fresh ? v_zero() : v_load(out[i]);
    sums_of_group(q, w, pieces, piece, sums[0]);
    for (int b = 0; b < groups; b++) {
        if (b + 1 < groups) sums_of_group(q + (b + 1) * step, w + (b + 1) * step, pieces, piece, sums[(b + 1) & 1]);
        v16 scale = v_load_half(scales + b * ROWS);
#pragma GCC unroll 16
        for (int i = 0; i < MANY; i++)
            acc[i] = v_madd(acc[i], v_mul(scale, v_set1(of_rows[b * MANY + i])),
                            _mm512_cvtepi32_ps(_mm512_load_si512(sums[b & 1] + i * ROWS)));
    }
#pragma GCC unroll 16
    for (int i = 0; i < MANY; i++) v_store(out[i], acc[i]);
}

INLINE void many_codes(const Matrix *m, Cursor *c, int blocks, int piece, const int8_t *packed, const float *scales,
                       float (*out)[ROWS], const int int4) {
    _Alignas(64) int8_t room[MOST_INPUTS * ROWS];
    const int inputs = m->groups * m->group, pieces = m->group / piece;
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c);
        if (c->ahead) read_ahead(c, tile, m->tile_bytes);
        int here = min_int(m->groups_per_tile, m->groups - group);
        const int8_t *w = signed_codes(tile + m->groups_per_tile * ROWS * 2, here * m->group, room, int4);
        for (int block = 0; block < blocks; block++)
            add_tile(packed + ((size_t)block * (size_t)inputs + (size_t)group * (size_t)m->group) * MANY, w,
                     (const uint16_t *)tile, scales + (block * m->groups + group) * MANY, here, pieces, piece, !group,
                     out + block * MANY);
        group += here;
    }
}

/* As `matmul`, for as many of the rows as are worth it: how many that was. */
static int matmul_many(const Matrix *m, Run run, int first, int last, const Act *a, float *const *y, int n) {
    const int inputs = m->groups * m->group, piece = min_int(m->group, 64);
    const int most = min_int(BLOCKS, PACKED / (inputs * MANY)), left = n % MANY, rows = left < ENOUGH ? n - left : n;
    if (rows == 0 || most == 0 || m->tile_cols > MOST_INPUTS) return 0;
    _Alignas(64) int8_t packed[PACKED];
    float scales[PACKED / 32]; /* a group has at least 32 inputs */
    float out[BLOCKS * MANY][ROWS];
    const TileShapes shapes = {.palette = 1, .bytes = {64, (uint16_t)piece, 64}, .rows = {16, 16, (uint8_t)(piece / 4)}};
    tile_shapes(&shapes);
    for (int row = 0; row < rows; row += most * MANY) {
        int here = min_int(rows - row, most * MANY), blocks = ceil_div(here, MANY);
        for (int block = 0; block < blocks; block++)
            pack_rows(m, a + row + block * MANY, here - block * MANY, piece,
                      packed + (size_t)block * (size_t)inputs * MANY, scales + block * m->groups * MANY);
        Cursor next = cursor_at(m, run, (int64_t)first * m->tiles_across);
        next.ahead = row == 0;
        for (int g = first; g < last; g++) {
            int width = min_int(ROWS, m->rows - g * ROWS);
            if (m->dtype == INT4) many_codes(m, &next, blocks, piece, packed, scales, out, 1);
            else many_codes(m, &next, blocks, piece, packed, scales, out, 0);
            for (int i = 0; i < here; i++)
                memcpy(y[row + i] + (g - first) * ROWS, out[i], (size_t)width * sizeof(float));
        }
    }
    tile_release();
    return rows;
}
