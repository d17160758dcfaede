/* One bound model: the caller's arrays, our scratch, our threads. All memory is taken here, none in a step. */

typedef struct {
    Act *act; /* one a row */
    int rows, width;
} Acts;

typedef struct {
    const Ffn *w;
    Run run;         /* of an expert; a resident network has its own runs */
    int first, rows; /* its part of the gathered arrays below */
    Act *hidden;     /* [rows] silu(gate x) * up x */
} Job;

/* The past tokens that a row attends to. */
typedef struct {
    const int32_t *where; /* [count] pool indices, in order of position */
    int count, all;       /* all: how many exact attention would read */
    int guessed;          /* whether the row's experts were guessed to choose them */
} Sight;

/* How far a job is whose pages come in while others are computed; see arrival.c. */
typedef struct {
    _Atomic int up_next, up_done, down_next;
} Turn;

/* Rows of a layer whose router has done its first stage and not its second; n 0: none. */
typedef struct {
    int layer, at, n;
} Staged;

typedef struct {
    Model m;   /* with the rows of the running call: its row 0 is row `at` of the step */
    Model all; /* as it was bound */
    Pool pool;
    Acts in, shared_in;          /* inputs of a matrix, and of the shared expert, by row */
    Acts hidden, wide_hidden;    /* of the routed experts by (job, row), of a shared or dense network by row */
    float *qkv, *attended, *out; /* [R][...] */
    float *sum;                  /* [R][H] the layer's sum of experts */
    float *row_sum;              /* of the running call's row 0: between two waves of a group another one may run */
    float *scores;               /* [threads][16 heads][positions] */
    float *scratch;              /* [threads][2][scratch_len] */
    float **pointers;            /* [threads][2][R] */
    float *partial;              /* [R * (k + 1)][H] results by (job, row), where experts come in as they arrive */
    Job *jobs;
    Turn *turns;
    Act *job_in; /* gathered by job */
    int *job_row, *count;
    float *job_weight;
    int32_t *status; /* [R] */
    Sight *sight;    /* [R] */
    int32_t *room;   /* expert-local: [4 * threads][positions] for the lists of sights */
    int32_t *guess;  /* expert-local: [R][k] */
    int16_t *codes;  /* [R][code_width] of the router's input */
    Tally *tally;    /* [R] */
    int32_t *found;  /* [R] candidates that the first stage of two_stage proved, or 0 */
    int32_t *listed; /* [R][E] these; for two_stage alone */
    Staged staged;
    char *kept_k, *kept_v; /* [n_layers][RUN_ROWS][kv_heads][head_dim], see layers.c */
    int qkv_width, attended_width, scores_len, scratch_len, n_jobs;
    void *memory[64];
    int n_memory;
} Context;

static void *take(Context *c, size_t count, size_t size) {
    char *p =
        calloc(1, (count + 1) * size + 64); /* not memset: what a small step never touches should cost no memory */
    if (!p) return NULL;
    c->memory[c->n_memory++] = p;
    return p + (-(uintptr_t)p & 63);
}

static int take_acts(Context *c, Acts *a, size_t rows, int width) {
    size_t w = (size_t)round_up(width, 256), groups = w / 32;
    a->act = take(c, rows, sizeof(Act));
    float *x = take(c, rows * w, sizeof(float)), *scale = take(c, rows * groups, sizeof(float));
    int8_t *q = take(c, rows * w, 1);
    int32_t *offset = take(c, rows * groups, sizeof(int32_t));
    if (!a->act || !x || !scale || !q || !offset) return 0;
    for (size_t r = 0; r < rows; r++) {
        Act one = {x + r * w, q + r * w, scale + r * groups, offset + r * groups};
        a->act[r] = one;
    }
    a->rows = (int)rows, a->width = (int)w;
    return 1;
}

EXPORT void colibri_free(Context *c) {
    if (!c) return;
    if (c->pool.threads) pool_stop(&c->pool);
    for (int i = 0; i < c->n_memory; i++) free(c->memory[i]);
    free(c);
}

EXPORT Context *colibri_bind(const Model *model) {
    Context *c;
    if (posix_memalign((void **)&c, 64, sizeof *c)) return NULL; /* the pool's words want cache lines of their own */
    memset(c, 0, sizeof *c);
    c->m = *model;
    Model *m = &c->m;
    size_t rows = (size_t)m->capacity, threads = (size_t)min_int(max_int(m->threads, 1), 256), pairs = rows;
    int widest = m->hidden, wide = 0, ffn = 0;
    Layer *layers = take(c, (size_t)m->n_layers, sizeof(Layer));
    if (!layers) goto no_memory;
    memcpy(layers, m->layers, (size_t)m->n_layers * sizeof(Layer));
    m->layers = layers;
    c->all = *m;
    for (int l = 0; l < m->n_layers; l++) {
        const Layer *layer = &m->layers[l];
        c->qkv_width = max_int(c->qkv_width, layer->qkv.rows);
        c->attended_width = max_int(c->attended_width, layer->o.cols);
        if (layer->has_dense) wide = max_int(wide, layer->dense.gate.rows);
        else pairs = rows * (size_t)(m->top_k + 1), ffn = m->expert.gate.rows;
        if (layer->has_shared) wide = max_int(wide, layer->shared.gate.rows);
    }
    widest = max_int(widest, c->attended_width);
    c->scratch_len = round_up(max_int(max_int(m->hidden, max_int(ffn, wide)), (int)rows * 128), 128);
    c->scores_len = round_up(m->positions, 16);
    if (!take_acts(c, &c->in, rows, widest) || !take_acts(c, &c->shared_in, rows, m->hidden) ||
        !take_acts(c, &c->hidden, pairs, ffn) || !take_acts(c, &c->wide_hidden, rows, wide))
        goto no_memory;
    c->qkv = take(c, rows * (size_t)c->qkv_width, sizeof(float));
    c->attended = take(c, rows * (size_t)c->attended_width, sizeof(float));
    c->out = take(c, rows * (size_t)m->hidden, sizeof(float));
    c->sum = take(c, rows * (size_t)m->hidden, sizeof(float));
    c->scores = take(c, threads * 16 * (size_t)c->scores_len, sizeof(float));
    c->scratch = take(c, threads * 2 * (size_t)c->scratch_len, sizeof(float));
    c->pointers = take(c, threads * 2 * rows, sizeof(float *));
    c->partial = take(c, pairs * (size_t)m->hidden, sizeof(float));
    c->jobs = take(c, (size_t)m->experts + 2, sizeof(Job));
    c->turns = take(c, (size_t)m->experts + 2, sizeof(Turn));
    c->job_in = take(c, pairs, sizeof(Act));
    c->job_row = take(c, pairs, sizeof(int));
    c->job_weight = take(c, pairs, sizeof(float));
    c->count = take(c, (size_t)m->experts + 1, sizeof(int));
    c->status = take(c, rows, sizeof(int32_t));
    c->sight = take(c, rows, sizeof(Sight));
    c->room = take(c, m->recent ? 4 * threads * (size_t)m->positions : 0, sizeof(int32_t));
    c->guess = take(c, m->recent ? rows * (size_t)m->top_k : 0, sizeof(int32_t));
    c->codes = take(c, rows * (size_t)m->code_width, sizeof(int16_t));
    c->tally = take(c, rows, sizeof(Tally));
    c->found = take(c, rows, sizeof(int32_t));
    c->listed = take(c, m->router == TWO_STAGE ? rows * (size_t)m->experts : 0, sizeof(int32_t));
    size_t kept = (size_t)m->n_layers * RUN_ROWS * (size_t)(m->kv_heads * m->head_dim);
    c->kept_k = take(c, kept, m->kv_dtype == FP16 ? 2 : 4);
    c->kept_v = take(c, kept, m->kv_dtype == FP16 ? 2 : 4);
    if (!c->kept_k || !c->kept_v || !c->qkv || !c->attended || !c->out || !c->sum || !c->scores || !c->scratch || !c->pointers || !c->jobs ||
        !c->job_in || !c->job_row || !c->job_weight || !c->count || !c->status || !c->sight || !c->room || !c->guess ||
        !c->codes || !c->tally || !c->found || !c->listed || !c->partial || !c->turns)
        goto no_memory;
    pool_start(&c->pool, (int)threads);
    return c;
no_memory:
    colibri_free(c);
    return NULL;
}

/* A call's row 0 is row `at` of the step: rows are read and written where they lie, in groups of any size. */
static int64_t look_from(Context *c, int at, int n) {
    const Model *all = &c->all;
    Model *m = &c->m;
    if (at < 0 || n < 0 || n > all->capacity || at > all->capacity - n) return failure(BAD_INDEX, COUNT, n);
    size_t row = (size_t)at;
    m->token = all->token + row, m->position = all->position + row, m->seat = all->seat + row;
    m->kv_dst = all->kv_dst + row, m->staging = all->staging + at;
    m->x = all->x + row * (size_t)m->hidden, m->ffn_in = all->ffn_in + row * (size_t)m->hidden;
    m->router_logits = all->router_logits + row * (size_t)m->experts;
    m->weights = all->weights + row * (size_t)m->top_k;
    m->experts_of_row = all->experts_of_row + row * (size_t)m->top_k;
    c->row_sum = c->sum + row * (size_t)m->hidden;
    return OK;
}

EXPORT const char *colibri_isa(void) { return ISA; }

/* Sizes of the structs, so that a ctypes twin which has drifted apart is found at load. */
EXPORT int colibri_sizeof(int what) {
    const int size[] = {sizeof(Matrix), sizeof(Ffn), sizeof(Layer), sizeof(Model)};
    return what >= 0 && what < 4 ? size[what] : -1;
}

/* Waking a sleeping thread costs about a microsecond at best: below this many multiply-adds the caller works alone. */
enum { WORTH_WAKING = 65536 };

INLINE void run_units(Context *c, Unit unit, void *job, int units, int64_t work) {
    if (work < WORTH_WAKING)
        for (int i = 0; i < units; i++) unit(job, i, 0);
    else pool_run(&c->pool, unit, job, units);
}

/* Part u of `parts` of n items: [share(n, parts, u), share(n, parts, u + 1)). */
INLINE int share(int n, int parts, int u) { return (int)((int64_t)n * u / parts); }

/* How many parts a matrix of row groups is cut into: some a thread, so that a slow one does not hold up the rest. */
INLINE int parts_of(const Context *c, int row_groups, int each) {
    return c->pool.threads == 1 ? 1 : max_int(1, min_int(row_groups, c->pool.threads * each));
}

INLINE Run resident(const Matrix *m) {
    Run run = {m->data, NULL};
    return run;
}

/* One matrix times the first n rows of acts, all threads: y[i] is row i's result. */
typedef struct {
    Context *c;
    const Matrix *w;
    const Act *act;
    float *y;
    size_t stride;
    int n, parts;
} Product;

static void product_unit(void *job, int unit, int thread) {
    Product *p = job;
    int groups = ceil_div(p->w->rows, ROWS), first = share(groups, p->parts, unit),
        last = share(groups, p->parts, unit + 1);
    reader_poll(p->c->m.reader);
    float **y = p->c->pointers + (size_t)thread * 2 * (size_t)p->c->m.capacity;
    for (int i = 0; i < p->n; i++) y[i] = p->y + (size_t)i * p->stride + first * ROWS;
    matmul(p->w, resident(p->w), first, last, p->act, y, p->n, p->c->m.exact);
}

static void product(Context *c, const Matrix *w, const Act *act, float *y, size_t stride, int n) {
    Product p = {c, w, act, y, stride, n, parts_of(c, ceil_div(w->rows, ROWS), w->rows > 8192 ? 32 : 6)};
    run_units(c, product_unit, &p, p.parts, (int64_t)n * w->rows * w->cols);
}
