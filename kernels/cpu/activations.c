/* What a matrix is multiplied with: one row as floats, or as int8 codes with one scale and one sum per weight group. */

typedef struct {
    float *x;        /* [cols], then zeros to the end of the last group */
    int8_t *q;       /* the same as codes, value = scale * q */
    float *scale;    /* [groups] absmax / 127 */
    int32_t *offset; /* [groups] -8 (int4) or -128 (int8) times the sum of the codes: what a dot product with unsigned
                        weight codes has too much */
} Act;

INLINE int uses_int8(const Matrix *m, int exact) { return !exact && (m->dtype == INT8 || m->dtype == INT4); }

/* One group: n values, then zeros. A NaN or infinity anywhere makes the scale NaN, so that it reaches the result. */
static void quantise_group(const float *x, int n, int group, int8_t *q, float *scale, int32_t *sum) {
    v16 top = v_zero();
    for (int i = 0; i < n; i += 16) top = v_absmax(top, v_at(x, i, n));
    float peak = v_absmax_lane(top);
    int finite = peak <= 3.4028235e38f;
    int fine = finite && peak >= 1e-30f; /* 127 / peak must not overflow */
    *sum = 0;
    *scale = fine ? peak / 127.0f : finite ? 0.0f : NAN;
    if (!fine) {
        memset(q, 0, (size_t)group);
        return;
    }
    v16 inverse = v_set1(127.0f / peak);
    for (int i = 0; i < group; i += 16)
        *sum += i < n ? v_quantise(v_mul(v_at(x, i, n), inverse), q + i) : v_quantise(v_zero(), q + i);
}

/* Columns first <= i < last of x as activations for m; first must begin a group. x may be a->x. */
static void act_range(Act *a, const float *x, int first, int last, const Matrix *m, int exact) {
    if (uses_int8(m, exact)) {
        for (int i = first; i < last; i += m->group) {
            int b = i / m->group;
            int32_t sum;
            quantise_group(x + i, min_int(m->group, last - i), m->group, a->q + i, a->scale + b, &sum);
            a->offset[b] = (m->dtype == INT4 ? -8 : -128) * sum;
        }
        return;
    }
    if (a->x != x) memcpy(a->x + first, x + first, (size_t)(last - first) * sizeof(float));
    if (last == m->cols && m->group) memset(a->x + last, 0, (size_t)(m->groups * m->group - last) * sizeof(float));
}

INLINE void act_row(Act *a, const float *x, const Matrix *m, int exact) { act_range(a, x, 0, m->cols, m, exact); }

static void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
    v16 factor = v_set1(1.0f / sqrtf(dot(x, x, n) / (float)n + eps));
    for (int i = 0; i < n; i += 16) v_put(out, i, n, v_mul(v_mul(v_at(x, i, n), factor), v_at(weight, i, n)));
}
