/* Exact attention of one row over the tokens that `where` names, in order of position, so that slots never change a sum.
   A key or value is read once for up to four query heads that share it. */

typedef struct {
    const char *base;  /* k or v of the pool, at this key head */
    size_t stride;     /* bytes between tokens */
    int half, dim;
} Tokens;

INLINE v16 token_at(const Tokens *t, int32_t token, int i) {
    const char *p = t->base + (size_t)token * t->stride;
    int left = t->dim - i;
    if (t->half) return left >= 16 ? v_load_half((const uint16_t *)p + i) : v_load_half_n((const uint16_t *)p + i, left);
    return left >= 16 ? v_load((const float *)p + i) : v_load_n((const float *)p + i, left);
}

/* scores[h][t] = scale * q_h . k_t for n query heads; q: [n][dim]. */
INLINE void score(const Tokens *k, const int32_t *where, int count, const float *q, float scale, float *scores, int stride, const int n) {
    for (int t = 0; t < count; t++) {
        v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int i = 0; i < k->dim; i += 16) {
            v16 key = token_at(k, where[t], i);
            for (int h = 0; h < n; h++) s[h] = v_madd(s[h], key, v_at(q + (size_t)h * k->dim, i, k->dim));
        }
        float sums[4];
        v_sum4(s, sums);
        for (int h = 0; h < n; h++) scores[(size_t)h * stride + t] = sums[h] * scale;
    }
}

/* out[h] = sum over t of weight[h][t] * v_t, times 1 / total[h]. */
INLINE void mix(const Tokens *v, const int32_t *where, int count, const float *weight, int stride, const float *total, float *out, const int n) {
    for (int i = 0; i < v->dim; i += 16) {
        v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int t = 0; t < count; t++) {
            v16 value = token_at(v, where[t], i);
            for (int h = 0; h < n; h++) s[h] = v_madd(s[h], value, v_set1(weight[(size_t)h * stride + t]));
        }
        for (int h = 0; h < n; h++) v_put(out + (size_t)h * v->dim, i, v->dim, v_div(s[h], v_set1(total[h])));
    }
}

/* scores become e^(score - largest) in place; returns their sum. scores has room up to a multiple of 16. */
static float exponentials(float *scores, int count) {
    float top = scores[0];
    for (int t = 1; t < count; t++) top = scores[t] > top ? scores[t] : top;
    for (int t = count; t < round_up(count, 16); t++) scores[t] = -INFINITY;
    v16 sum = v_zero();
    for (int t = 0; t < count; t += 16) {
        v16 e = v_exp(v_sub(v_load(scores + t), v_set1(top)));
        v_store(scores + t, e);
        sum = v_add(sum, e);
    }
    return v_sum(sum);
}

INLINE void attend(const Tokens *k, const Tokens *v, const int32_t *where, int count, const float *q, float scale, float *scores, int stride,
                   float *out, const int n) {
    float total[4];
    score(k, where, count, q, scale, scores, stride, n);
    for (int h = 0; h < n; h++) total[h] = exponentials(scores + (size_t)h * stride, count);
    mix(v, where, count, scores, stride, total, out, n);
}

/* All query heads of row r that share key head `kv`. Returns 0 when `where` points outside the pool. */
static int attend_group(Context *c, const Layer *layer, int l, int r, int kv, int thread) {
    const Model *m = &c->m;
    int dim = m->head_dim, share_of = layer->heads / m->kv_heads, position = m->position[r];
    int begin = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0, count = position + 1 - begin;
    const int32_t *where = m->where + ((size_t)m->seat[r] * m->n_layers + l) * m->positions + begin;
    for (int t = 0; t < count; t++)
        if (where[t] < 0 || where[t] >= m->tokens) return 0;
    int half = m->kv_dtype == FP16;
    size_t size = half ? 2 : 4, stride = (size_t)m->kv_heads * dim * size, at = (size_t)kv * dim * size;
    Tokens keys = {(const char *)m->k + at, stride, half, dim}, values = {(const char *)m->v + at, stride, half, dim};
    const float *q = c->qkv + (size_t)r * c->qkv_width + (size_t)kv * share_of * dim;
    float *out = c->attended + (size_t)r * c->attended_width + (size_t)kv * share_of * dim;
    float *scores = c->scores + (size_t)thread * 4 * c->scores_len;
    for (int h = 0; h < share_of;) {
        int n = min_int(4, share_of - h);
        if (n == 4) attend(&keys, &values, where, count, q, layer->scale, scores, c->scores_len, out, 4);
        else if (n == 3) attend(&keys, &values, where, count, q, layer->scale, scores, c->scores_len, out, 3);
        else if (n == 2) attend(&keys, &values, where, count, q, layer->scale, scores, c->scores_len, out, 2);
        else attend(&keys, &values, where, count, q, layer->scale, scores, c->scores_len, out, 1);
        h += n, q += (size_t)n * dim, out += (size_t)n * dim;
    }
    return 1;
}
