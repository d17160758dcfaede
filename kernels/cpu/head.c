/* Final norm, logits, their largest (lower index on ties) and the log of the sum of their exponentials. */

enum { VOCAB_BLOCK = 4096 }; /* logits that are summed together: one chain of all would lose digits */

typedef struct {
    Context *c;
    int n;
} Heads;

static void head_input_unit(void *job, int i, int thread) {
    Heads *h = job;
    Context *c = h->c;
    const Model *m = &c->m;
    (void)thread;
    rms_norm(m->x + (size_t)m->out_row[i] * m->hidden, m->final_norm, c->in.act[i].x, m->hidden, m->eps);
    act_row(&c->in.act[i], c->in.act[i].x, &m->head, m->exact);
}

static int largest(const float *x, int n) {
    v16 top = v_set1(-INFINITY);
    for (int i = 0; i + 16 <= n; i += 16) top = v_max(v_load(x + i), top);
    float lanes[16], best = -INFINITY;
    v_store(lanes, top);
    for (int i = 0; i < 16; i++) best = lanes[i] > best ? lanes[i] : best;
    for (int i = n / 16 * 16; i < n; i++) best = x[i] > best ? x[i] : best;
    for (int i = 0; i < n; i++)
        if (x[i] == best) return i;
    return 0; /* nothing but NaN */
}

/* One row. Sums of fixed blocks, then the sum of those in order. */
static void head_output_unit(void *job, int i, int thread) {
    Heads *h = job;
    const Model *m = &h->c->m;
    const float *x = m->logits + (size_t)i * m->vocab;
    int best = largest(x, m->vocab);
    float total = 0;
    (void)thread;
    for (int first = 0; first < m->vocab; first += VOCAB_BLOCK) {
        v16 sum = v_zero();
        for (int k = first, end = min_int(m->vocab, first + VOCAB_BLOCK); k < end; k += 16) {
            float tail[16];
            v16 v;
            if (end - k >= 16) v = v_load(x + k);
            else {
                for (int j = 0; j < 16; j++) tail[j] = k + j < end ? x[k + j] : -INFINITY;
                v = v_load(tail);
            }
            sum = v_add(sum, v_exp(v_sub(v, v_set1(x[best]))));
        }
        total += v_sum(sum);
    }
    m->argmax[i] = best;
    m->logsumexp[i] = x[best] + logf(total);
}

EXPORT int64_t colibri_head(Context *c, int n) {
    if (!c) return failure(UNBOUND, 0, 0);
    const Model *m = &c->m;
    Heads h = {c, n};
    int64_t failed = look_from(c, 0, n);
    if (failed) return failed;
    for (int i = 0; i < n; i++)
        if (m->out_row[i] < 0 || m->out_row[i] >= m->capacity) return failure(BAD_INDEX, OUT_ROW, i);
    run_units(c, head_input_unit, &h, n, (int64_t)n * m->hidden * 4);
    product(c, &m->head, c->in.act, m->logits, (size_t)m->vocab, n);
    run_units(c, head_output_unit, &h, n, (int64_t)n * m->vocab * 8);
    return OK;
}
