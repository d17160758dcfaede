/* Attention of one row over the tokens of its sight, in order of position, so that slots never change a sum. A key or
   value is read once for up to four query heads that share it. */

typedef struct {
    const char *base; /* k or v of the pool, at this key head */
    size_t stride;    /* bytes between tokens */
    int dim;
} Tokens;

INLINE v16 token_at(const Tokens *t, int32_t token, int i, int lanes, const int half) {
    const char *p = t->base + (size_t)token * t->stride;
    if (half) return lanes == 16 ? v_load_half((const uint16_t *)p + i) : v_load_half_n((const uint16_t *)p + i, lanes);
    return lanes == 16 ? v_load((const float *)p + i) : v_load_n((const float *)p + i, lanes);
}

/* scores[h][t] = q_h . k_t for n query heads; q: [n][dim]. */
INLINE void score(const Tokens *k, const int32_t *where, int count, const float *q, float *scores, int stride,
                  const int n, const int half) {
    const int dim = k->dim, whole = dim / 16 * 16;
    for (int t = 0; t < count; t++) {
        v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int i = 0; i < whole; i += 16) {
            v16 key = token_at(k, where[t], i, 16, half);
            for (int h = 0; h < n; h++) s[h] = v_madd(s[h], key, v_load(q + (size_t)h * dim + i));
        }
        if (whole < dim) {
            v16 key = token_at(k, where[t], whole, dim - whole, half);
            for (int h = 0; h < n; h++) s[h] = v_madd(s[h], key, v_load_n(q + (size_t)h * dim + whole, dim - whole));
        }
        float sums[4];
        v_sum4(s, sums);
        for (int h = 0; h < n; h++) scores[(size_t)h * stride + t] = sums[h];
    }
}

/* Lanes i.. of out[h] = sum over t of weight[h][t] * v_t, over total[h]. */
INLINE void mix_lanes(const Tokens *v, const int32_t *where, int count, const float *weight, int stride,
                      const float *total, float *out, int i, int lanes, const int n, const int half) {
    v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (int t = 0; t < count; t++) {
        v16 value = token_at(v, where[t], i, lanes, half);
        for (int h = 0; h < n; h++) s[h] = v_madd(s[h], value, v_set1(weight[(size_t)h * stride + t]));
    }
    for (int h = 0; h < n; h++) v_put(out + (size_t)h * v->dim, i, v->dim, v_div(s[h], v_set1(total[h])));
}

INLINE void mix(const Tokens *v, const int32_t *where, int count, const float *weight, int stride, const float *total,
                float *out, const int n, const int half) {
    int i = 0;
    for (; i + 16 <= v->dim; i += 16) mix_lanes(v, where, count, weight, stride, total, out, i, 16, n, half);
    if (i < v->dim) mix_lanes(v, where, count, weight, stride, total, out, i, v->dim - i, n, half);
}

/* scores become e^(scale * score - largest) in place; returns their sum. There is room up to a multiple of 16. */
static float exponentials(float *scores, int count, float scale) {
    v16 top = v_set1(-INFINITY), sum = v_zero();
    for (int t = count; t < round_up(count, 16); t++) scores[t] = -INFINITY;
    for (int t = 0; t < count; t += 16) {
        v16 s = v_mul(v_load(scores + t), v_set1(scale));
        v_store(scores + t, s);
        top = v_max(top, s);
    }
    float lanes[16], most = -INFINITY;
    v_store(lanes, top);
    for (int i = 0; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    for (int t = 0; t < count; t += 16) {
        v16 e = v_exp(v_sub(v_load(scores + t), v_set1(most)));
        v_store(scores + t, e);
        sum = v_add(sum, e);
    }
    return v_sum(sum);
}

typedef struct {
    Tokens keys, values;
    const int32_t *where; /* [count] */
    int count, stride;    /* stride: between the scores of two heads */
    float scale, *scores;
} View;

/* n query heads of one row; q and out are [n][dim]. */
INLINE void attend(const View *v, const float *q, float *out, const int n, const int half) {
    float total[4];
    score(&v->keys, v->where, v->count, q, v->scores, v->stride, n, half);
    for (int h = 0; h < n; h++) total[h] = exponentials(v->scores + (size_t)h * v->stride, v->count, v->scale);
    mix(&v->values, v->where, v->count, v->scores, v->stride, total, out, n, half);
}

/* With n and half as constants the loops above keep their sums in registers. Returns the heads done. */
INLINE int attend_some(const View *v, const float *q, float *out, int heads, const int half) {
    if (heads >= 4) return attend(v, q, out, 4, half), 4;
    if (heads >= 2) return attend(v, q, out, 2, half), 2;
    return attend(v, q, out, 1, half), 1;
}

/* All query heads of row r that share key head `kv`. */
static void attend_group(Context *c, const Layer *layer, int r, int kv, int thread) {
    const Model *m = &c->m;
    int dim = m->head_dim, share_of = layer->heads / m->kv_heads, half = m->kv_dtype == FP16;
    size_t size = half ? 2 : 4, stride = (size_t)m->kv_heads * dim * size, at = (size_t)kv * dim * size;
    View view = {{(const char *)m->k + at, stride, dim},
                 {(const char *)m->v + at, stride, dim},
                 c->sight[r].where,
                 c->sight[r].count,
                 c->scores_len,
                 layer->scale,
                 c->scores + (size_t)thread * 4 * c->scores_len};
    const float *q = c->qkv + (size_t)r * c->qkv_width + (size_t)kv * share_of * dim;
    float *out = c->attended + (size_t)r * c->attended_width + (size_t)kv * share_of * dim;
    for (int h = 0; h < share_of;) {
        int n = half ? attend_some(&view, q, out, share_of - h, 1) : attend_some(&view, q, out, share_of - h, 0);
        h += n, q += (size_t)n * dim, out += (size_t)n * dim;
    }
}
