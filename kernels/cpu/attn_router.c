/* The first half of a layer: norm, queries, keys and values, attention, output projection, norm, router. */

typedef struct {
    Context *c;
    const Layer *layer;
    int l, n, parts, shares; /* shares: units of attention that a row is */
} Half;

/* One row of a matrix's input: norm of x. */
static void input_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    const Model *m = &c->m;
    (void)thread;
    rms_norm(m->x + (size_t)r * m->hidden, h->layer->input_norm, c->in.act[r].x, m->hidden, m->eps);
    act_row(&c->in.act[r], c->in.act[r].x, &h->layer->qkv, m->exact);
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i += 16) {
        v16 a = v_at(x, i, half), b = v_at(x + half, i, half), c = v_at(cos, i, half), s = v_at(sin, i, half);
        v_put(x, i, half, v_sub(v_mul(a, c), v_mul(b, s)));
        v_put(x + half, i, half, v_add(v_mul(b, c), v_mul(a, s)));
    }
}

static void norm_heads(float *x, const float *weight, int len, int width, float eps) {
    for (int at = 0; weight && at < width; at += len) rms_norm(x + at, weight, x + at, len, eps);
}

static void to_pool(const Model *m, void *pool, int64_t token, const float *x) {
    int width = m->kv_heads * m->head_dim;
    if (m->kv_dtype == FP32) memcpy((float *)pool + token * width, x, (size_t)width * sizeof(float));
    else
        for (int i = 0; i < width; i += 16)
            v_store_half_n((uint16_t *)pool + token * width + i, v_at(x, i, width), min_int(16, width - i));
}

/* One row from raw projections to rotated queries and to K/V in the staging area. */
static void project_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    const Model *m = &c->m;
    const Layer *layer = h->layer;
    int dim = m->head_dim, queries = layer->heads * dim, keys = m->kv_heads * dim, width = queries + 2 * keys;
    float *q = c->qkv + (size_t)r * c->qkv_width, *k = q + queries, *v = k + keys;
    (void)thread;
    for (int i = 0; layer->qkv_bias && i < width; i += 16)
        v_put(q, i, width, v_add(v_at(q, i, width), v_at(layer->qkv_bias, i, width)));
    norm_heads(q, layer->q_norm, layer->q_norm_len, queries, m->eps);
    norm_heads(k, layer->k_norm, layer->k_norm_len, keys, m->eps);
    for (int i = 0; layer->has_clip && i < width; i += 16)
        v_put(q, i, width, v_max(v_set1(-layer->clip), v_min(v_set1(layer->clip), v_at(q, i, width))));
    const float *cos = m->cos + (size_t)m->position[r] * (dim / 2), *sin = m->sin + (size_t)m->position[r] * (dim / 2);
    for (int i = 0; i < queries + keys; i += dim) rotate(q + i, cos, sin, dim / 2);
    to_pool(m, m->k, m->staging + r, k);
    to_pool(m, m->v, m->staging + r, v);
}

/* Where a row's heads are shared out, its list stays for all of them; else while the thread attends for the row. */
static void look_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    int32_t *room = c->room + (size_t)(h->shares > 1 ? r : thread) * (c->m.recent ? (size_t)c->m.positions : 0);
    if (!look(c, h->layer, h->l, r, room)) c->status[r] = BAD_INDEX;
}

static void attend_unit(void *job, int unit, int thread) {
    Half *h = job;
    int heads = h->c->m.kv_heads, r = unit / h->shares, part = unit % h->shares;
    if (h->shares == 1) look_unit(job, r, thread);
    if (!h->c->status[r])
        attend_heads(h->c, h->layer, r, share(heads, h->shares, part), share(heads, h->shares, part + 1), thread);
}

static void attended_unit(void *job, int r, int thread) {
    Half *h = job;
    (void)thread;
    act_row(&h->c->in.act[r], h->c->attended + (size_t)r * h->c->attended_width, &h->layer->o, h->c->m.exact);
}

static void residual_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    const Model *m = &c->m;
    float *x = m->x + (size_t)r * m->hidden, *out = c->out + (size_t)r * m->hidden;
    (void)thread;
    for (int i = 0; i < m->hidden; i += 16) {
        v16 o = v_at(out, i, m->hidden);
        if (h->layer->o_bias) o = v_add(o, v_at(h->layer->o_bias, i, m->hidden));
        v_put(x, i, m->hidden, v_add(v_at(x, i, m->hidden), o));
    }
    rms_norm(x, h->layer->post_norm, m->ffn_in + (size_t)r * m->hidden, m->hidden, m->eps);
}

static void logits_unit(void *job, int unit, int thread) {
    Half *h = job;
    const Model *m = &h->c->m;
    int blocks = ceil_div(m->experts, 4); /* router_logits takes four at a time */
    int first = 4 * share(blocks, h->parts, unit), last = min_int(m->experts, 4 * share(blocks, h->parts, unit + 1));
    (void)thread;
    for (int r = 0; r < h->n; r++)
        router_logits(h->layer->gate, m->ffn_in + (size_t)r * m->hidden, m->hidden, first, last,
                      m->router_logits + (size_t)r * m->experts);
}

static void first_stage_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    (void)thread;
    c->found[r] = first_stage_row(&c->m, h->layer, r, c->codes + (size_t)r * c->m.code_width,
                                  c->listed + (size_t)r * c->m.experts);
}

static void choose_unit(void *job, int r, int thread) {
    Half *h = job;
    Context *c = h->c;
    const Model *m = &c->m;
    (void)thread;
    const int32_t *list = m->router == TWO_STAGE ? c->listed + (size_t)r * m->experts : NULL;
    if (!route_row(m, h->layer, r, list, c->found[r], &c->tally[r])) c->status[r] = NON_FINITE;
}

static void both_stages_unit(void *job, int r, int thread) {
    first_stage_unit(job, r, thread);
    choose_unit(job, r, thread);
}

static void second_stage_unit(void *job, int r, int thread) {
    Half *h = job;
    reader_poll(h->c->m.reader); /* of reads that began with the first stage */
    choose_unit(job, r, thread);
}

static int64_t check_rows(const Model *m, int l, int n) {
    if (l < 0 || l >= m->n_layers) return failure(BAD_INDEX, LAYER, l);
    for (int r = 0; r < n; r++) {
        if (m->seat[r] < 0 || m->seat[r] >= m->seats) return failure(BAD_INDEX, SEAT, r);
        if (m->position[r] < 0 || m->position[r] >= min_int(m->positions, m->rope_positions))
            return failure(BAD_INDEX, POSITION, r);
    }
    return OK;
}

static int64_t first_failure(const Context *c, int n) {
    for (int r = 0; r < n; r++)
        if (c->status[r]) return failure(c->status[r], c->status[r] == BAD_INDEX ? WHERE : 0, r);
    return OK;
}

/* All before the router, for rows and a layer that were checked. */
static int64_t before_router(Half *half) {
    Half h = *half;
    Context *c = h.c;
    const Model *m = &c->m;
    const Layer *layer = h.layer;
    int l = h.l, n = h.n;
    int64_t failed, history = 0, wide = (int64_t)n * m->hidden;
    memset(c->status, 0, (size_t)n * sizeof *c->status);
    run_units(c, input_unit, &h, n, 4 * wide);
    product(c, &layer->qkv, c->in.act, c->qkv, (size_t)c->qkv_width, n);
    run_units(c, project_unit, &h, n, 8 * (int64_t)n * c->qkv_width);
    for (int r = 0; r < n; r++) { /* all rows before the first one looks: rows of one seat see each other */
        m->where[entry_of(m, l, r)] = (int32_t)(m->staging + r);
        m->first[entry_of(m, l, r)] = -1;
        history += 16 + (layer->window ? min_int(layer->window, m->position[r] + 1) : m->position[r] + 1);
    }
    if (c->pool.threads > 1 && n < 4 * c->pool.threads) h.shares = min_int(m->kv_heads, n == 1 ? c->pool.threads : 2);
    if (h.shares > 1) run_units(c, look_unit, &h, n, history + (m->recent ? wide * m->experts : 0));
    run_units(c, attend_unit, &h, n * h.shares, 2 * history * layer->heads * m->head_dim);
    if ((failed = first_failure(c, n))) return failed;
    run_units(c, attended_unit, &h, n, 4 * wide);
    product(c, &layer->o, c->in.act, c->out, (size_t)m->hidden, n);
    run_units(c, residual_unit, &h, n, 4 * wide);
    return OK;
}

/* Rows and layer of a call, checked; OK with n 0: nothing to do. */
static int64_t half_of(Context *c, int l, int at, int n, Half *h) {
    if (!c) return failure(UNBOUND, 0, 0);
    int64_t failed = look_from(c, at, n);
    if (failed || (failed = check_rows(&c->m, l, n))) return failed;
    Half half = {c, &c->m.layers[l], l, n, 1, 1};
    *h = half;
    return OK;
}

/* Each row's choice by `unit`; begin: since when the router's time counts. */
static int64_t choose_rows(Half *h, Unit unit, int64_t work, uint64_t begin) {
    Context *c = h->c;
    const Model *m = &c->m;
    run_units(c, unit, h, h->n, work);
    int64_t failed = first_failure(c, h->n);
    if (failed) return failed;
    count_rows(m, h->l, c->tally, h->n);
    m->spent[0] += (int64_t)(now_ns(CLOCK_MONOTONIC) - begin);
    count_sights(c, h->layer, h->l, h->n);
    return OK;
}

EXPORT int64_t colibri_attn_router(Context *c, int l, int at, int n) {
    Half h;
    int64_t failed = half_of(c, l, at, n, &h);
    if (failed || n == 0) return failed;
    const Model *m = &c->m;
    int64_t scores = (int64_t)n * m->experts;
    c->staged = (Staged){0, 0, 0};
    if ((failed = before_router(&h))) return failed;
    if (!h.layer->gate) return count_sights(c, h.layer, l, n), OK;
    uint64_t begin = now_ns(CLOCK_MONOTONIC);
    if (m->router == TWO_STAGE) return choose_rows(&h, both_stages_unit, scores * m->hidden / 4, begin);
    h.parts = parts_of(c, ceil_div(m->experts, 4), 4);
    run_units(c, logits_unit, &h, h.parts, scores * m->hidden);
    return choose_rows(&h, choose_unit, scores * (2 * m->top_k + 8), begin);
}

/* The same in two calls, in a sparse layer and for two_stage: after the first, experts_of_row has the first stage's ids
   (see candidates_of), so that reads of them may begin; the second goes on from what the first one found. */
EXPORT int64_t colibri_first_stage(Context *c, int l, int at, int n) {
    Half h;
    int64_t failed = half_of(c, l, at, n, &h);
    if (failed || n == 0) return failed;
    const Model *m = &c->m;
    c->staged = (Staged){0, 0, 0};
    if (m->router != TWO_STAGE || !h.layer->gate) return failure(BAD_INDEX, LAYER, l);
    if ((failed = before_router(&h))) return failed;
    uint64_t begin = now_ns(CLOCK_MONOTONIC);
    run_units(c, first_stage_unit, &h, n, (int64_t)n * m->experts * m->hidden / 4);
    m->spent[0] += (int64_t)(now_ns(CLOCK_MONOTONIC) - begin);
    c->staged = (Staged){l, at, n};
    return OK;
}

EXPORT int64_t colibri_second_stage(Context *c, int l, int at, int n) {
    Half h;
    int64_t failed = half_of(c, l, at, n, &h);
    if (failed || n == 0) return failed;
    const Model *m = &c->m;
    Staged staged = c->staged;
    c->staged = (Staged){0, 0, 0};
    if (staged.layer != l || staged.at != at || staged.n != n) return failure(BAD_INDEX, COUNT, n);
    return choose_rows(&h, second_stage_unit, (int64_t)n * m->top_k * m->hidden, now_ns(CLOCK_MONOTONIC));
}
