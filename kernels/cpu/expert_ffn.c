/* The second half of a layer: SwiGLU networks of the chosen experts, the shared one or a dense one, each once for all
   rows that want it. A job is one network with its rows. Stage one: gate and up, silu(gate) * up, requantised in place.
   Stage two: down, added row by row in ascending order of experts, whatever the waves and threads. */

enum { BLOCK_GROUPS = 8 }; /* row groups a slice: 128 hidden values hold whole weight groups of any size */

typedef struct {
    Context *c;
    int l, n, parts, finish;
} Step;

static int64_t ffn_as_pages_arrive(Context *c, Step *s, int64_t work);

static Run run_of(const Job *job, const Matrix *m) { return m->data ? resident(m) : job->run; }

/* Row groups that fit the thread's scratch for `rows` rows: as many as possible, since long runs read faster. */
static int slice_of(const Context *c, int rows) {
    return max_int(BLOCK_GROUPS, c->scratch_len / (rows * ROWS) / BLOCK_GROUPS * BLOCK_GROUPS);
}

/* The row groups [*begin, *end) of gate and up that are part `part` of `parts` of a job. */
static void up_share(const Job *job, int parts, int part, int *begin, int *end) {
    int groups = ceil_div(job->w->gate.rows, ROWS), blocks = ceil_div(groups, BLOCK_GROUPS);
    *begin = share(blocks, parts, part) * BLOCK_GROUPS;
    *end = min_int(groups, share(blocks, parts, part + 1) * BLOCK_GROUPS);
}

static void up_part(Context *c, const Job *job, int parts, int part, int thread) {
    const Ffn *w = job->w;
    int exact = c->m.exact, slice = slice_of(c, job->rows), begin, end;
    up_share(job, parts, part, &begin, &end);
    float **gate = c->pointers + (size_t)thread * 2 * (size_t)c->m.capacity, **up = gate + c->m.capacity;
    float *scratch = c->scratch + (size_t)thread * 2 * (size_t)c->scratch_len;
    Act *hidden = job->hidden;
    const Act *in = c->job_in + job->first;
    for (int first = begin; first < end; first += slice) {
        int last = min_int(end, first + slice), from = first * ROWS, to = min_int(w->gate.rows, last * ROWS);
        for (int i = 0; i < job->rows; i++) {
            gate[i] = hidden[i].x + from;
            up[i] = scratch + (size_t)i * (last - first) * ROWS;
        }
        matmul(&w->gate, run_of(job, &w->gate), first, last, in, gate, job->rows, exact);
        matmul(&w->up, run_of(job, &w->up), first, last, in, up, job->rows, exact);
        for (int i = 0; i < job->rows; i++) {
            for (int k = 0; k < to - from; k += 16)
                v_put(gate[i], k, to - from, v_mul(v_silu(v_at(gate[i], k, to - from)), v_at(up[i], k, to - from)));
            act_range(&hidden[i], hidden[i].x, from, to, &w->down, exact);
        }
    }
}

static void up_unit(void *arg, int unit, int thread) {
    Step *s = arg;
    reader_poll(s->c->m.reader);
    up_part(s->c, &s->c->jobs[unit / s->parts], s->parts, unit % s->parts, thread);
}

static void add_weighted(float *sum, const float *y, float weight, int n) {
    for (int i = 0; i < n; i += 16) v_put(sum, i, n, v_madd(v_at(sum, i, n), v_set1(weight), v_at(y, i, n)));
}

/* Lanes from.. of the rows' sums go to x. */
static void add_sums(Context *c, int n, int from, int width) {
    for (int r = 0; r < n; r++) {
        float *x = c->m.x + (size_t)r * c->m.hidden + from, *sum = c->row_sum + (size_t)r * c->m.hidden + from;
        for (int i = 0; i < width; i += 16) v_put(x, i, width, v_add(v_at(x, i, width), v_at(sum, i, width)));
    }
}

static void down_unit(void *arg, int unit, int thread) {
    Step *s = arg;
    Context *c = s->c;
    int hidden = c->m.hidden, groups = ceil_div(hidden, ROWS), most = 1;
    int begin = share(groups, s->parts, unit), end = share(groups, s->parts, unit + 1);
    reader_poll(c->m.reader);
    float **y = c->pointers + (size_t)thread * 2 * (size_t)c->m.capacity;
    float *scratch = c->scratch + (size_t)thread * 2 * (size_t)c->scratch_len;
    for (int j = 0; j < c->n_jobs; j++) most = max_int(most, c->jobs[j].rows);
    for (int first = begin, slice = slice_of(c, most); first < end; first += slice) {
        int last = min_int(end, first + slice), from = first * ROWS, width = min_int(hidden, last * ROWS) - from;
        for (int j = 0; j < c->n_jobs; j++) {
            const Job *job = &c->jobs[j];
            for (int i = 0; i < job->rows; i++) y[i] = scratch + (size_t)i * (last - first) * ROWS;
            matmul(&job->w->down, run_of(job, &job->w->down), first, last, job->hidden, y, job->rows, c->m.exact);
            for (int i = 0; i < job->rows; i++)
                add_weighted(c->row_sum + (size_t)c->job_row[job->first + i] * hidden + from, y[i],
                             c->job_weight[job->first + i], width);
        }
        if (s->finish) add_sums(c, s->n, from, width);
    }
}

/* Jobs of the routed experts first <= e < last, ascending; rows in order within each. *coming: pages on their way. */
static int64_t gather_experts(Context *c, int l, int n, int first, int last, int *coming) {
    const Model *m = &c->m;
    int picks = n * m->top_k, at = 0;
    memset(c->count, 0, (size_t)m->experts * sizeof *c->count);
    for (int i = 0; i < picks; i++) {
        if (m->experts_of_row[i] < 0 || m->experts_of_row[i] >= m->experts)
            return failure(BAD_INDEX, EXPERT, i / m->top_k);
        c->count[m->experts_of_row[i]]++;
    }
    for (int e = max_int(first, 0); e < min_int(last, m->experts); e++) {
        if (!c->count[e]) continue;
        if (c->count[e] > n) return failure(BAD_INDEX, EXPERT, e); /* twice in one row: no router does that */
        const int32_t *pages = m->table + ((size_t)l * m->experts + e) * m->table_pages;
        for (int g = 0; g < m->expert_pages; g++) {
            int32_t frame = __atomic_load_n(&pages[g], __ATOMIC_ACQUIRE);
            if (frame == COMING) (*coming)++;
            else if (frame < 0 || frame >= m->n_frames) return failure(MISSING_PAGE, 0, e);
        }
        Job job = {&m->expert, {m->frames, pages}, at, 0, c->hidden.act + at};
        at += c->count[e];
        c->count[e] = c->n_jobs;
        c->jobs[c->n_jobs++] = job;
    }
    for (int i = 0; i < picks; i++) {
        int e = m->experts_of_row[i];
        if (e < first || e >= last) continue;
        Job *job = &c->jobs[c->count[e]];
        int slot = job->first + job->rows++;
        c->job_row[slot] = i / m->top_k;
        c->job_weight[slot] = m->weights[i];
        c->job_in[slot] = c->in.act[i / m->top_k];
    }
    return OK;
}

/* A job of all rows for a resident network. gate: weigh each row by sigmoid(gate . x), NULL: by 1. */
static void gather_all(Context *c, const Ffn *w, const float *gate, const Acts *in, int n) {
    const Model *m = &c->m;
    int first = c->n_jobs ? c->jobs[c->n_jobs - 1].first + c->jobs[c->n_jobs - 1].rows : 0;
    Job job = {w, {NULL, NULL}, first, n, c->wide_hidden.act};
    c->jobs[c->n_jobs++] = job;
    for (int r = 0; r < n; r++) {
        float weight[16] = {1.0f};
        if (gate) v_store(weight, v_sigmoid(v_set1(dot(gate, m->ffn_in + (size_t)r * m->hidden, m->hidden))));
        c->job_row[first + r] = r;
        c->job_weight[first + r] = weight[0];
        c->job_in[first + r] = in->act[r];
    }
}

static void prepare_unit(void *arg, int r, int thread) {
    Step *s = arg;
    Context *c = s->c;
    const Layer *layer = &c->m.layers[s->l];
    const float *x = c->m.ffn_in + (size_t)r * c->m.hidden;
    (void)thread;
    act_row(&c->in.act[r], x, layer->has_dense ? &layer->dense.gate : &c->m.expert.gate, c->m.exact);
    if (layer->has_shared && s->finish) act_row(&c->shared_in.act[r], x, &layer->shared.gate, c->m.exact);
}

/* A row's K/V go to their slot, which the router's choice has settled; k, v: where they wait. */
static void settle_row(const Model *m, int l, int r, int32_t to, const char *k, const char *v, int expert) {
    memmove((char *)m->k + (size_t)to * kv_bytes(m), k, kv_bytes(m));
    memmove((char *)m->v + (size_t)to * kv_bytes(m), v, kv_bytes(m));
    m->where[entry_of(m, l, r)] = to;
    m->first[entry_of(m, l, r)] = m->layers[l].has_dense ? -1 : (int16_t)expert;
}

/* The same for the step's rows, from staging. */
static int64_t settle(Context *c, int l, int n) {
    const Model *m = &c->m;
    for (int r = 0; r < n; r++)
        if (m->kv_dst[r] < 0 || m->kv_dst[r] >= m->tokens) return failure(BAD_INDEX, KV_DST, r);
    for (int r = 0; r < n; r++) {
        size_t from = (size_t)(m->staging + r) * kv_bytes(m);
        settle_row(m, l, r, m->kv_dst[r], (char *)m->k + from, (char *)m->v + from,
                   m->experts_of_row[(size_t)r * m->top_k]);
    }
    return OK;
}

/* Jobs of the step's routed experts first <= e < last; nothing else has changed where this fails. */
static int64_t begin_ffn(Step *s, int first, int last, int *coming) {
    Context *c = s->c;
    c->n_jobs = 0;
    if (c->m.layers[s->l].has_dense) return OK;
    uint64_t begin = now_ns(CLOCK_MONOTONIC);
    int64_t failed = gather_experts(c, s->l, s->n, first, last, coming);
    if (!failed) c->m.spent[1] += (int64_t)(now_ns(CLOCK_MONOTONIC) - begin);
    return failed;
}

/* The jobs, and the resident networks where they are the step's last. */
static int64_t compute_ffn(Step *s, int coming) {
    Context *c = s->c;
    const Model *m = &c->m;
    const Layer *layer = &m->layers[s->l];
    int64_t work = 0;
    int n = s->n;
    run_units(c, prepare_unit, s, n, (int64_t)n * m->hidden * 4);
    if (layer->has_dense) gather_all(c, &layer->dense, NULL, &c->in, n);
    if (layer->has_shared && s->finish) gather_all(c, &layer->shared, layer->shared_gate, &c->shared_in, n);
    for (int j = 0; j < c->n_jobs; j++) work += (int64_t)c->jobs[j].rows * c->jobs[j].w->gate.rows * m->hidden;
    if (coming) return ffn_as_pages_arrive(c, s, work);
    if (c->n_jobs) {
        s->parts = max_int(1, ceil_div(parts_of(c, 1 << 20, 6), c->n_jobs));
        run_units(c, up_unit, s, c->n_jobs * s->parts, 2 * work);
    }
    s->parts = parts_of(c, ceil_div(m->hidden, ROWS), 6);
    run_units(c, down_unit, s, s->parts, work);
    return OK;
}

static void begin_sums(Context *c, int n) { memset(c->row_sum, 0, (size_t)n * c->m.hidden * sizeof(float)); }

EXPORT int64_t colibri_expert_ffn(Context *c, int l, int at, int n, int first, int last) {
    if (!c) return failure(UNBOUND, 0, 0);
    int64_t failed = look_from(c, at, n);
    int coming = 0;
    if (failed || (failed = check_rows(&c->m, l, n)) || n == 0) return failed;
    Step s = {c, l, n, 1, c->m.layers[l].has_dense || last == c->m.experts};
    if ((failed = begin_ffn(&s, first, last, &coming))) return failed;
    if (first == 0) {
        if ((failed = settle(c, l, n))) return failed;
        begin_sums(c, n);
    }
    return compute_ffn(&s, coming);
}
