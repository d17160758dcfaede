/* One row's choice by the bound router, its audit, and its place in the counters. */

static int same_set(const int32_t *a, const int32_t *b, int k) {
    for (int i = 0; i < k; i++) {
        int found = 0;
        for (int j = 0; j < k; j++) found |= a[i] == b[j];
        if (!found) return 0;
    }
    return 1;
}

/* two_stage's first stage of a row: its candidates' number, its ids where the chosen ones will be. code: [code_width] */
static int first_stage_row(const Model *m, const Layer *layer, int r, int16_t *code, int32_t *list) {
    const float *x = m->ffn_in + (size_t)r * m->hidden;
    return candidates_of(m, layer, x, code, list, m->experts_of_row + (size_t)r * m->top_k);
}

/* Logits are there already, except for two_stage, which makes those that it needs of what its first stage found.
   0: not finite. */
static int route_row(const Model *m, const Layer *layer, int r, const int32_t *list, int found, Tally *t) {
    float *logits = m->router_logits + (size_t)r * m->experts, *weight = m->weights + (size_t)r * m->top_k;
    const float *x = m->ffn_in + (size_t)r * m->hidden;
    int32_t *chosen = m->experts_of_row + (size_t)r * m->top_k;
    memset(t, 0, sizeof *t);
    t->rows = 1;
    int fine = m->router == INT8_LUT    ? choose_lut(m, logits, chosen, weight, t)
               : m->router == BIT_LEVEL ? choose_bits(m, logits, chosen, weight, t)
               : m->router == TWO_STAGE ? choose_two_stage(m, layer, x, list, found, logits, chosen, weight, t)
                                        : choose(m, logits, chosen, weight, t);
    if (fine && m->router_audit) {
        float all[MOST_EXPERTS];
        int32_t right[MOST_EXPERTS];
        if (m->router == TWO_STAGE) router_logits(layer->gate, x, m->hidden, 0, m->experts, logits = all);
        best_logits(logits, m->experts, m->top_k, right);
        t->audited = 1, t->wrong = !same_set(chosen, right, m->top_k);
    }
    return fine;
}

static void count_rows(const Model *m, int l, const Tally *t, int n) {
    int64_t *counts = m->router_counts + 8 * (size_t)l;
    float *span = m->router_span + 2 * (size_t)l;
    for (int r = 0; r < n; r++) {
        const int32_t *one = &t[r].rows;
        for (int i = 0; i < 8; i++) counts[i] += one[i];
        span[0] = t[r].low < span[0] ? t[r].low : span[0];
        span[1] = t[r].top > span[1] ? t[r].top : span[1];
    }
}

/* The router alone, on one thread: rows of ffn_in (score 1: logits are made from them; 2: two_stage's first stage alone)
   or of router_logits. Only the router's fields of m and layer are read. Returns n, the first row whose logits are not
   finite, or -1: no memory. */
EXPORT int64_t colibri_route(const Model *m, const Layer *layer, int n, int score) {
    int16_t *code = malloc(((size_t)m->code_width + 16) * sizeof *code);
    int32_t list[MOST_EXPERTS];
    Tally t;
    if (!code) return -1;
    int r = 0;
    for (; r < n; r++) {
        int found = m->router == TWO_STAGE ? first_stage_row(m, layer, r, code, list) : 0;
        if (score == 2) continue;
        if (score && m->router != TWO_STAGE)
            router_logits(layer->gate, m->ffn_in + (size_t)r * m->hidden, m->hidden, 0, m->experts,
                          m->router_logits + (size_t)r * m->experts);
        if (!route_row(m, layer, r, list, found, &t)) break;
        count_rows(m, 0, &t, 1);
    }
    free(code);
    return r;
}
