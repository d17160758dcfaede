/* Layers one after the other with nobody between them, as far as the experts that the rows choose are in memory. What
   the caller wants to know of each layer is kept, and so are its K/V until it has given them a place. */

/* What a layer of the run leaves; K/V wait where nothing overwrites them. */
static void keep(Context *c, int l, int n) {
    const Model *m = &c->m;
    size_t at = (size_t)l * RUN_ROWS, bytes = (size_t)n * kv_bytes(m), from = (size_t)m->staging * kv_bytes(m);
    memcpy(c->kept_k + at * kv_bytes(m), (char *)m->k + from, bytes);
    memcpy(c->kept_v + at * kv_bytes(m), (char *)m->v + from, bytes);
    if (m->layers[l].has_dense) return;
    size_t picks = (size_t)n * m->top_k;
    memcpy(m->run_experts + at * m->top_k, m->experts_of_row, picks * sizeof(int32_t));
    memcpy(m->run_weights + at * m->top_k, m->weights, picks * sizeof(float));
}

/* Rows [0, n) from layer `first` on. *reached: the layer that failed, or that lacks an expert: its router has chosen,
   its experts have not begun; else n_layers. */
EXPORT int64_t colibri_run_layers(Context *c, int first, int n) {
    if (!c) return failure(UNBOUND, 0, 0);
    const Model *m = &c->m;
    if (n < 0 || n > RUN_ROWS) return failure(BAD_INDEX, COUNT, n);
    if (first < 0 || first > m->n_layers) return failure(BAD_INDEX, LAYER, first);
    for (int l = first; l < m->n_layers; l++) {
        uint64_t begin = now_ns(CLOCK_MONOTONIC), routed;
        int64_t failed;
        int coming = 0;
        *m->reached = l;
        if ((failed = colibri_attn_router(c, l, 0, n))) return failed;
        keep(c, l, n);
        m->run_spent[0] += (int64_t)((routed = now_ns(CLOCK_MONOTONIC)) - begin);
        Step s = {c, l, n, 1, 1};
        failed = begin_ffn(&s, 0, m->experts, &coming);
        if (coming || (failed & 0xff) == MISSING_PAGE) return OK;
        if (failed) return failed;
        begin_sums(c, n);
        compute_ffn(&s, 0);
        m->run_spent[1] += (int64_t)(now_ns(CLOCK_MONOTONIC) - routed);
    }
    *m->reached = m->n_layers;
    return OK;
}

/* The kept K/V of layers first <= l < last go to run_kv_dst[l][r]. */
EXPORT int64_t colibri_settle_layers(Context *c, int first, int last, int n) {
    if (!c) return failure(UNBOUND, 0, 0);
    const Model *m = &c->m;
    int64_t failed = look_from(c, 0, n);
    if (failed || n > RUN_ROWS) return failed ? failed : failure(BAD_INDEX, COUNT, n);
    if (first < 0 || last > m->n_layers) return failure(BAD_INDEX, LAYER, first < 0 ? first : last);
    for (int l = first; l < last; l++) {
        size_t at = (size_t)l * RUN_ROWS;
        const int32_t *to = m->run_kv_dst + at;
        if ((failed = check_rows(m, l, n))) return failed;
        for (int r = 0; r < n; r++) {
            if (to[r] < 0 || to[r] >= m->tokens) return failure(BAD_INDEX, KV_DST, r);
            size_t from = (at + (size_t)r) * kv_bytes(m);
            settle_row(m, l, r, to[r], c->kept_k + from, c->kept_v + from,
                       m->run_experts[(at + (size_t)r) * m->top_k]);
        }
    }
    return OK;
}
