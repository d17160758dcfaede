/* Weights to int4, for conversion: the reference is colibri_lab/convert/quantise.py's encode_int4. Sixteen groups at a
   time, one a lane, so that each lane does what the reference does to its column, in the same order. */

enum { MOST_GROUP = 128 };
static const float DIVISORS[3] = {-8.0f, 7.0f, -8.5f}; /* what the value of largest magnitude is divided by */

/* Scales as fp16 holds them; below its normal range they are rounded up, so that the largest value still fits. */
static v16 half_scales(v16 scale, uint16_t *half, int *finite) {
    float exact[ROWS], stored[ROWS];
    v_store(exact, scale);
    v_store_half_n(half, scale, ROWS);
    v_store(stored, v_load_half(half));
    for (int i = 0; i < ROWS; i++) {
        if (fabsf(stored[i]) < fabsf(exact[i]) && fabsf(exact[i]) < 6.2e-5f) half[i]++;
        if ((half[i] & 0x7c00) == 0x7c00) *finite = 0;
    }
    return v_load_half(half);
}

/* Codes of the columns t[k] for one divisor, and the squared error of each; scale 0 divides by 1. */
static v16 encode_columns(const float (*t)[ROWS], int group, v16 scale, float (*codes)[ROWS]) {
    float step[ROWS];
    v16 error = v_zero();
    v_store(step, scale);
    for (int i = 0; i < ROWS; i++) step[i] = step[i] == 0.0f ? 1.0f : step[i];
    v16 divisor = v_load(step);
    for (int k = 0; k < group; k++) {
        v16 value = v_load(t[k]), code = v_round(v_div(value, divisor));
        code = v_min(v_set1(7.0f), v_max(v_set1(-8.0f), code));
        v16 off = v_sub(v_mul(code, scale), value);
        error = v_add(error, v_mul(off, off));
        v_store(codes[k], code);
    }
    return error;
}

/* The value of largest magnitude of each column, with its sign; the smallest wins against an equal largest. */
static v16 full_scale(const float (*t)[ROWS], int group) {
    float low[ROWS], high[ROWS];
    v16 least = v_load(t[0]), most = least;
    for (int k = 1; k < group; k++) least = v_min(least, v_load(t[k])), most = v_max(most, v_load(t[k]));
    v_store(low, least), v_store(high, most);
    for (int i = 0; i < ROWS; i++) high[i] = -low[i] >= high[i] ? low[i] : high[i];
    return v_load(high);
}

/* x [rows][cols] finite; codes [rows][cols] 0..15; scales [rows][ceil(cols / group)] fp16. 0: a scale does not fit. */
EXPORT int colibri_encode_int4(const float *x, int64_t rows, int64_t cols, int group, uint8_t *codes,
                               uint16_t *scales) {
    float t[MOST_GROUP][ROWS], trial[MOST_GROUP][ROWS], best[MOST_GROUP][ROWS];
    int64_t across = (cols + group - 1) / group, count = rows * across;
    int finite = 1;
    if (group < 1 || group > MOST_GROUP) return 0;
    for (int64_t first = 0; first < count; first += ROWS) {
        int lanes = (int)(count - first < ROWS ? count - first : ROWS);
        memset(t, 0, sizeof t);
        for (int i = 0; i < lanes; i++) {
            int64_t row = (first + i) / across, begin = (first + i) % across * group;
            const float *from = x + row * cols + begin;
            for (int k = 0, n = (int)(cols - begin < group ? cols - begin : group); k < n; k++) t[k][i] = from[k];
        }
        v16 full = full_scale((const float (*)[ROWS])t, group);
        float least[ROWS], error[ROWS];
        uint16_t chosen[ROWS], half[ROWS];
        for (int d = 0; d < 3; d++) {
            float most = 65504.0f * fabsf(DIVISORS[d]);
            v16 reach = d ? v_max(v_set1(-most), v_min(v_set1(most), full)) : full;
            v16 scale = half_scales(v_add(v_div(reach, v_set1(DIVISORS[d])), v_zero()), half, &finite);
            v_store(error, encode_columns((const float (*)[ROWS])t, group, scale, trial));
            if (d == 0) {
                memcpy(best, trial, sizeof best), memcpy(least, error, sizeof least), memcpy(chosen, half, sizeof half);
                continue;
            }
            for (int i = 0; i < lanes; i++) {
                if (!(error[i] < least[i])) continue;
                least[i] = error[i], chosen[i] = half[i];
                for (int k = 0; k < group; k++) best[k][i] = trial[k][i];
            }
        }
        if (!finite) return 0;
        for (int i = 0; i < lanes; i++) {
            int64_t row = (first + i) / across, begin = (first + i) % across * group;
            uint8_t *to = codes + row * cols + begin;
            for (int k = 0, n = (int)(cols - begin < group ? cols - begin : group); k < n; k++)
                to[k] = (uint8_t)((int)best[k][i] + 8);
            scales[first + i] = chosen[i];
        }
    }
    return 1;
}
