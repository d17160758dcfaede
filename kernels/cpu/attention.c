/* Attention of one row over the tokens of its sight, in order of position, so that slots never change a sum. A key or
   value is read once for up to four query heads that share it; up to four such groups of heads go through the tokens
   together, tile by tile, since a token's heads lie side by side and neighbours in position do not. */

enum {
    WARM = 1 << 19, /* bytes of keys that stay in a second-level cache between two rows of a prompt */
    TILE = 8,       /* tokens: all groups' keys of two tiles fit into a first-level cache */
    AHEAD = 10,     /* tokens that are asked for before they are wanted; neighbours in a slot lie a power of two apart,
                       and at multiples of 8, where addresses differ by whole pages, a tenth of the time is lost */
    GROUPS = 4,     /* of heads at a time */
    SHARERS = 4     /* query heads of a group */
};

typedef struct {
    const char *base; /* k or v of the pool, at the group's key head */
    size_t stride;    /* bytes between tokens */
    int dim;
} Tokens;

/* n query heads that share a key head; q, out: [n][dim], scores: [n][stride]. */
typedef struct {
    Tokens keys, values;
    const float *q;
    float *out, *scores;
    int n;
} Group;

typedef struct {
    const int32_t *where; /* [count] */
    int count, stride;    /* stride: between the scores of two heads */
    int tile, cold;       /* cold: not in a cache yet, to be asked for */
    float scale;
} View;

INLINE const char *token_at(const Tokens *x, const View *v, int t) {
    return x->base + (size_t)v->where[t] * x->stride;
}

INLINE v16 part_of(const char *token, int i, int lanes, const int half) {
    const uint16_t *halves = (const uint16_t *)token + i;
    const float *floats = (const float *)token + i;
    if (half) return lanes == 16 ? v_load_half(halves) : v_load_half_n(halves, lanes);
    return lanes == 16 ? v_load(floats) : v_load_n(floats, lanes);
}

/* Asks for the token that comes after t. */
INLINE void ask(const Tokens *x, const View *v, int t, const int half) {
    const char *p = token_at(x, v, min_int(t + AHEAD, v->count - 1));
    for (int i = 0; i < x->dim * (half ? 2 : 4); i += 64) __builtin_prefetch(p + i);
}

/* scores[h][t] = q_h . k_t for n query heads and `many` tokens from t on. */
INLINE void score_some(const Group *g, const View *v, int t, const int n, const int many, const int half) {
    const int dim = g->keys.dim;
    v16 s[SCORED][SHARERS];
    const char *keys[SCORED];
    for (int j = 0; j < many; j++) keys[j] = token_at(&g->keys, v, t + j);
    for (int j = 0; j < many; j++)
        for (int h = 0; h < SHARERS; h++) s[j][h] = v_zero();
    for (int i = 0; i < dim; i += 16) {
        v16 query[SHARERS];
        for (int h = 0; h < n; h++) query[h] = v_at(g->q + (size_t)h * dim, i, dim);
        for (int j = 0; j < many; j++) {
            v16 key = part_of(keys[j], i, min_int(16, dim - i), half);
            for (int h = 0; h < n; h++) s[j][h] = v_fma(s[j][h], key, query[h]);
        }
    }
#if SCORED == 4
    if (many == 4) return v_sum16(s, g->scores + t, (size_t)v->stride, n);
#endif
    for (int j = 0; j < many; j++) {
        float sums[SHARERS];
        v_sum4(s[j], sums);
        for (int h = 0; h < n; h++) g->scores[(size_t)h * v->stride + t + j] = sums[h];
    }
}

INLINE void score(const Group *g, const View *v, int first, int last, const int n, const int half) {
    int t = first;
    for (; t + SCORED <= last; t += SCORED) {
        for (int j = 0; v->cold && j < SCORED; j++) ask(&g->keys, v, t + j, half);
        score_some(g, v, t, n, SCORED, half);
    }
    for (; t < last; t++) score_some(g, v, t, n, 1, half);
}

/* `many` vectors of out[h] from i on += weight[h][t] * v_t for first <= t < last; lanes: of the last one. */
INLINE void mix_some(const Group *g, const View *v, int first, int last, int i, int lanes, const int n, const int many,
                     const int half) {
    const int dim = g->values.dim;
    v16 s[SHARERS][MIXED];
    for (int h = 0; h < n; h++)
        for (int k = 0; k < many; k++) s[h][k] = v_at(g->out + (size_t)h * dim, i + 16 * k, dim);
    for (int t = first; t < last; t++) {
        const char *token = token_at(&g->values, v, t);
        v16 value[MIXED];
        for (int k = 0; k < many; k++) value[k] = part_of(token, i + 16 * k, k == many - 1 ? lanes : 16, half);
        for (int h = 0; h < n; h++) {
            v16 weight = v_set1(g->scores[(size_t)h * v->stride + t]);
            for (int k = 0; k < many; k++) s[h][k] = v_fma(s[h][k], value[k], weight);
        }
    }
    for (int h = 0; h < n; h++)
        for (int k = 0; k < many; k++) v_put(g->out + (size_t)h * dim, i + 16 * k, dim, s[h][k]);
}

INLINE void mix(const Group *g, const View *v, int first, int last, const int n, const int half) {
    const int dim = g->values.dim;
    int i = 0;
    for (int t = first; v->cold && t < last; t++) ask(&g->values, v, t, half);
    for (; i + 16 * MIXED <= dim; i += 16 * MIXED) mix_some(g, v, first, last, i, 16, n, MIXED, half);
    for (; i + 16 <= dim; i += 16) mix_some(g, v, first, last, i, 16, n, 1, half);
    if (i < dim) mix_some(g, v, first, last, i, dim - i, n, 1, half);
}

/* Scores become e^(scale * score - largest) in place; returns their sum. There is room up to a multiple of 16. */
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

/* With the number of heads and `half` as constants the loops above keep their sums in registers. */
#define FOR_HEADS(call, ...) \
    (g->n == 4 ? call(__VA_ARGS__, 4, half) : g->n == 2 ? call(__VA_ARGS__, 2, half) : call(__VA_ARGS__, 1, half))

/* Each lane of out[h] = sum over t of weight[h][t] * v_t, token after token, over the sum of the weights. */
INLINE void attend(const Group *groups, int count, const View *v, const int half) {
    for (int t = 0; t < v->count; t += v->tile)
        for (const Group *g = groups; g < groups + count; g++)
            FOR_HEADS(score, g, v, t, min_int(v->count, t + v->tile));
    float total[GROUPS * SHARERS], *sum = total;
    for (const Group *g = groups; g < groups + count; g++) {
        for (int h = 0; h < g->n; h++) *sum++ = exponentials(g->scores + (size_t)h * v->stride, v->count, v->scale);
        memset(g->out, 0, (size_t)g->n * g->values.dim * sizeof(float));
    }
    for (int t = 0; t < v->count; t += v->tile)
        for (const Group *g = groups; g < groups + count; g++) FOR_HEADS(mix, g, v, t, min_int(v->count, t + v->tile));
    sum = total;
    for (const Group *g = groups; g < groups + count; g++)
        for (int h = 0, dim = g->values.dim; h < g->n; h++, sum++)
            for (int i = 0; i < dim; i += 16)
                v_put(g->out + (size_t)h * dim, i, dim, v_div(v_at(g->out + (size_t)h * dim, i, dim), v_set1(*sum)));
}

/* All query heads of row r that share the key heads [first, last). */
static void attend_heads(Context *c, const Layer *layer, int r, int first, int last, int thread) {
    const Model *m = &c->m;
    const Sight *s = &c->sight[r];
    int dim = m->head_dim, share_of = layer->heads / m->kv_heads, half = m->kv_dtype == FP16, count = 0;
    size_t size = half ? 2 : 4, stride = (size_t)m->kv_heads * dim * size;
    float *scores = c->scores + (size_t)thread * GROUPS * SHARERS * c->scores_len;
    int cold = r == 0 || m->seat[r - 1] != m->seat[r] || (size_t)s->count * stride > WARM;
    View v = {s->where, s->count, c->scores_len, cold ? TILE : s->count, cold, layer->scale};
    Group groups[GROUPS];
    for (int head = first * share_of, n; head < last * share_of; head += n) {
        int left = share_of - head % share_of;
        size_t at = (size_t)(head / share_of) * dim * size;
        n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        Group g = {{(const char *)m->k + at, stride, dim},
                   {(const char *)m->v + at, stride, dim},
                   c->qkv + (size_t)r * c->qkv_width + (size_t)head * dim,
                   c->attended + (size_t)r * c->attended_width + (size_t)head * dim,
                   scores + (size_t)count * SHARERS * c->scores_len,
                   n};
        groups[count++] = g;
        if (count < GROUPS && head + n < last * share_of) continue;
        if (half) attend(groups, count, &v, 1);
        else attend(groups, count, &v, 0);
        count = 0;
    }
}
