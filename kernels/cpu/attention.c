/* Attention of one row over the tokens of its sight, in order of position, so that slots never change a sum. A key or
   value is read once for up to four query heads that share it; up to four such groups of heads go through the tokens
   together, tile by tile, since a token's heads lie side by side. */

enum {
    WARM = 1 << 19, /* bytes of keys that stay in a second-level cache between two rows of a prompt */
    TILE = 16,      /* tokens: a vector of scores for each head */
    FEW = 4,        /* tokens at a time; with each few, as many are asked for */
    GROUPS = 4,     /* of heads at a time */
    SHARERS = 4,    /* query heads of a group */
    HEADS = GROUPS * SHARERS
};

/* n query heads that share a key head, the first of them `head` of those at hand; q, out: [n][dim]. */
typedef struct {
    const char *keys, *values; /* of the pool, at the key head */
    const float *q;
    float *out;
    int n, head;
} Group;

typedef struct {
    const int32_t *where; /* [count] */
    float *scores;        /* [tiles][heads at hand][TILE] */
    size_t stride;        /* bytes between tokens */
    int count, bytes;     /* bytes: of a token, those of the key heads at hand */
    int cold;             /* not in a cache yet, to be asked for */
    float scale;
} View;

/* Where the tokens of a tile lie, and those to ask for meanwhile, FEW by FEW. */
typedef struct {
    const char *base; /* keys or values of the first group */
    size_t now[TILE], next[TILE];
    int count, few, offset; /* the bytes to ask for next, of which FEW tokens */
} Tile;

INLINE size_t place(const View *v, int t) { return (size_t)v->where[min_int(t, v->count - 1)] * v->stride; }

/* While two tiles are read, the next two are asked for as FEW runs in turn: hardware prefetchers follow one stream a
   page of 4 KiB, which eight tokens often fill. */
INLINE void enter_tile(Tile *x, const View *v, int first) {
    x->count = min_int(TILE, v->count - first);
    x->few = x->offset = 0;
    for (int t = 0; t < x->count; t++) x->now[t] = place(v, first + t);
    if (!v->cold) return;
    const int run = 2 * TILE / FEW;
    int second = first / TILE % 2, from = first + (2 - second) * TILE + second * run / 2;
    for (int t = 0; t < run / 2; t++)
        for (int j = 0; j < FEW; j++) x->next[FEW * t + j] = place(v, from + j * run + t);
}

/* Asks for the next `bytes` of FEW tokens. */
INLINE void ask(Tile *x, const View *v, int bytes) {
    const char *base = x->base + x->offset;
    for (int i = 0; i < bytes; i += 128)
        for (int j = 0; j < FEW; j++) {
            __builtin_prefetch(base + x->next[x->few + j] + i);
            __builtin_prefetch(base + x->next[x->few + j] + i + 64);
        }
    if ((x->offset += bytes) < v->bytes) return;
    x->offset = 0;
    x->few = (x->few + FEW) % TILE;
}

/* Asks for the first two tiles, as nothing before them has. */
INLINE void begin(Tile *x, const View *v, const char *base) {
    x->base = base;
    for (int t = 0; v->cold && t < min_int(2 * TILE, v->count); t++)
        for (int i = 0; i < v->bytes; i += 64) __builtin_prefetch(base + place(v, t) + i);
}

INLINE v16 part_of(const char *token, int i, int lanes, const int half) {
    const uint16_t *halves = (const uint16_t *)token + i;
    const float *floats = (const float *)token + i;
    if (half) return lanes == 16 ? v_load_half(halves) : v_load_half_n(halves, lanes);
    return lanes == 16 ? v_load(floats) : v_load_n(floats, lanes);
}

/* scores[h][t] = q_h . k_t for n query heads and the `many` tokens from t on. */
INLINE void score_some(const Group *g, const Tile *x, float *scores, int t, const int many, const int n, const int half,
                       const int dim) {
    v16 s[SCORED][SHARERS];
    for (int j = 0; j < many; j++)
        for (int h = 0; h < SHARERS; h++) s[j][h] = v_zero();
    for (int i = 0; i < dim; i += 16) {
        v16 query[SHARERS];
        for (int h = 0; h < n; h++) query[h] = v_at(g->q + (size_t)h * dim, i, dim);
        for (int j = 0; j < many; j++) {
            v16 key = part_of(g->keys + x->now[t + j], i, min_int(16, dim - i), half);
            for (int h = 0; h < n; h++) s[j][h] = v_fma(s[j][h], key, query[h]);
        }
    }
#if SCORED == 4
    if (many == 4) return v_sum16(s, scores + t, TILE, n);
#endif
    for (int j = 0; j < many; j++) {
        float sums[SHARERS];
        v_sum4(s[j], sums);
        for (int h = 0; h < n; h++) scores[h * TILE + t + j] = sums[h];
    }
}

INLINE void score(const Group *g, const View *v, Tile *x, float *scores, const int n, const int half, const int dim) {
    int t = 0;
    for (; t + FEW <= x->count; t += FEW) {
        if (v->cold) ask(x, v, dim * (half ? 2 : 4));
        for (int j = 0; j < FEW; j += SCORED) score_some(g, x, scores, t + j, SCORED, n, half, dim);
    }
    for (; t < x->count; t++) score_some(g, x, scores, t, 1, n, half, dim);
}

/* `many` vectors of out[h] from i on += weights[h][t] * v_t; lanes: of the last one. */
INLINE void mix_some(const Group *g, const View *v, Tile *x, const float *weights, int i, int lanes, const int many,
                     const int n, const int half, const int dim) {
    v16 s[SHARERS][MIXED];
    for (int h = 0; h < n; h++)
        for (int k = 0; k < many; k++) s[h][k] = v_at(g->out + (size_t)h * dim, i + 16 * k, dim);
    for (int t = 0; t < x->count; t++) {
        if (v->cold && i == 0 && t % FEW == 0) ask(x, v, dim * (half ? 2 : 4));
        v16 value[MIXED];
        for (int k = 0; k < many; k++)
            value[k] = part_of(g->values + x->now[t], i + 16 * k, k == many - 1 ? lanes : 16, half);
        for (int h = 0; h < n; h++) {
            v16 weight = v_set1(weights[h * TILE + t]);
            for (int k = 0; k < many; k++) s[h][k] = v_fma(s[h][k], value[k], weight);
        }
    }
    for (int h = 0; h < n; h++)
        for (int k = 0; k < many; k++) v_put(g->out + (size_t)h * dim, i + 16 * k, dim, s[h][k]);
}

INLINE void mix(const Group *g, const View *v, Tile *x, const float *weights, const int n, const int half,
                const int dim) {
    int i = 0;
    for (; i + 16 * MIXED <= dim; i += 16 * MIXED) mix_some(g, v, x, weights, i, 16, MIXED, n, half, dim);
    for (; i + 16 <= dim; i += 16) mix_some(g, v, x, weights, i, 16, 1, n, half, dim);
    if (i < dim) mix_some(g, v, x, weights, i, dim - i, 1, n, half, dim);
}

/* With these numbers as constants the loops above keep their sums in registers and have no end to look for. */
#define FOR_HEADS(call, numbers)                                            \
    (g->n == 4   ? call(g, v, &x, (numbers) + g->head * TILE, 4, half, dim) \
     : g->n == 2 ? call(g, v, &x, (numbers) + g->head * TILE, 2, half, dim) \
                 : call(g, v, &x, (numbers) + g->head * TILE, 1, half, dim))

/* Scores times scale, over those of a tile; the largest of each head in `top`, lane by lane. */
INLINE void scale_scores(const View *v, float *scores, int count, int heads, v16 *top) {
    for (int h = 0; h < heads; h++, scores += TILE) {
        for (int t = count; t < TILE; t++) scores[t] = -INFINITY;
        v16 s = v_mul(v_load(scores), v_set1(v->scale));
        v_store(scores, s);
        top[h] = v_max(top[h], s);
    }
}

/* e^(score - largest) of a tile, and their sums, lane by lane. */
INLINE void weigh(const float *scores, const float *most, int heads, float *weights, v16 *sum) {
    for (int h = 0; h < heads; h++, scores += TILE, weights += TILE) {
        v16 e = v_exp(v_sub(v_load(scores), v_set1(most[h])));
        v_store(weights, e);
        sum[h] = v_add(sum[h], e);
    }
}

static float top_lane(v16 v) {
    float lanes[16], most = -INFINITY;
    v_store(lanes, v);
    for (int i = 0; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

/* Each lane of out[h] = sum over t of weight[h][t] * v_t, token after token, over the sum of the weights. */
INLINE void attend(const Group *groups, const Group *end, const View *v, const int half, const int dim) {
    const int heads = end[-1].head + end[-1].n;
    v16 top[HEADS], sum[HEADS];
    _Alignas(64) float weights[HEADS * TILE];
    float most[HEADS], *scores = v->scores;
    Tile x;
    for (int h = 0; h < heads; h++) top[h] = v_set1(-INFINITY), sum[h] = v_zero();
    begin(&x, v, groups->keys);
    for (int t = 0; t < v->count; t += TILE, scores += heads * TILE) {
        enter_tile(&x, v, t);
        for (const Group *g = groups; g < end; g++) FOR_HEADS(score, scores);
        scale_scores(v, scores, x.count, heads, top);
    }
    begin(&x, v, groups->values);
    for (int h = 0; h < heads; h++) most[h] = top_lane(top[h]);
    for (const Group *g = groups; g < end; g++) memset(g->out, 0, (size_t)g->n * dim * sizeof(float));
    scores = v->scores;
    for (int t = 0; t < v->count; t += TILE, scores += heads * TILE) {
        enter_tile(&x, v, t);
        weigh(scores, most, heads, weights, sum);
        for (const Group *g = groups; g < end; g++) FOR_HEADS(mix, weights);
    }
    for (const Group *g = groups; g < end; g++)
        for (int h = 0; h < g->n; h++) {
            float *out = g->out + (size_t)h * dim;
            v16 total = v_set1(v_sum(sum[g->head + h]));
            for (int i = 0; i < dim; i += 16) v_put(out, i, dim, v_div(v_at(out, i, dim), total));
        }
}

/* All query heads of row r that share the key heads [first, last). */
static void attend_heads(Context *c, const Layer *layer, int r, int first, int last, int thread) {
    const Model *m = &c->m;
    const Sight *s = &c->sight[r];
    int dim = m->head_dim, share_of = layer->heads / m->kv_heads, half = m->kv_dtype == FP16, count = 0, heads = 0;
    size_t size = half ? 2 : 4, stride = (size_t)m->kv_heads * dim * size;
    int cold = r == 0 || m->seat[r - 1] != m->seat[r] || (size_t)s->count * stride > WARM;
    View v = {s->where, c->scores + (size_t)thread * HEADS * c->scores_len, stride, s->count, 0, cold, layer->scale};
    Group groups[GROUPS];
    for (int head = first * share_of, n; head < last * share_of; head += n) {
        int left = share_of - head % share_of;
        size_t at = (size_t)(head / share_of) * dim * size;
        n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        Group g = {(const char *)m->k + at,
                   (const char *)m->v + at,
                   c->qkv + (size_t)r * c->qkv_width + (size_t)head * dim,
                   c->attended + (size_t)r * c->attended_width + (size_t)head * dim,
                   n,
                   heads};
        groups[count++] = g;
        heads += n;
        if (count < GROUPS && head + n < last * share_of) continue;
        v.bytes = (int)(g.keys - groups->keys) + dim * (int)size;
        if (half && dim == 64) attend(groups, groups + count, &v, 1, 64);
        else if (half && dim == 128) attend(groups, groups + count, &v, 1, 128);
        else attend(groups, groups + count, &v, half, dim);
        count = heads = 0;
    }
}
