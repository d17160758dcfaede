/* expert_ffn while readers still fill in the page table: whatever is there is computed, in any order, and a thread
   that finds nothing looks for the next page. A job's results are kept by row and added afterwards in ascending order
   of experts, so the sums have the bits of down_unit's. */

/* A reading thread may want this core: then not for long. The disk's own queue wants none. */
enum { ARRIVAL_SPIN_NS = 15000, ARRIVAL_LOOK_NS = 300000, ARRIVAL_NAP_NS = 20000 };

typedef struct {
    Context *c;
    Step *s;
    int up_parts, down_parts; /* of each job */
    _Atomic int lost;         /* 1 + number of the job whose page will not come */
    uint64_t *waited;         /* [threads] */
} Arrival;

typedef struct {
    int job, part, down;
} Part;

/* Are the pages of row groups [first, last) there? 0: on their way. A page that will not come is noted in `lost`. */
static int pages_there(Arrival *a, int j, const Matrix *m, int first, int last) {
    const Job *job = &a->c->jobs[j];
    if (m->data || first >= last) return 1;
    int end = page_of(m, (int64_t)last * m->tiles_across - 1);
    for (int g = page_of(m, (int64_t)first * m->tiles_across); g <= end; g++) {
        int32_t frame = __atomic_load_n(&job->run.pages[g], __ATOMIC_ACQUIRE);
        if (frame == COMING) return 0;
        if (frame < 0 || frame >= a->c->m.n_frames) return atomic_store(&a->lost, j + 1), 0;
    }
    return 1;
}

static int up_ready(Arrival *a, int j, int part) {
    const Job *job = &a->c->jobs[j];
    int begin, end;
    up_share(job, a->up_parts, part, &begin, &end);
    return pages_there(a, j, &job->w->gate, begin, end) && pages_there(a, j, &job->w->up, begin, end);
}

static int down_ready(Arrival *a, int j, int part) {
    int groups = ceil_div(a->c->m.hidden, ROWS);
    return pages_there(a, j, &a->c->jobs[j].w->down, share(groups, a->down_parts, part),
                       share(groups, a->down_parts, part + 1));
}

/* Claim a part that can be computed now; 0 when there is none. */
static int find_part(Arrival *a, Part *found) {
    Context *c = a->c;
    for (int j = 0; j < c->n_jobs; j++) {
        Turn *turn = &c->turns[j];
        int part = atomic_load(&turn->up_next);
        if (part < a->up_parts) {
            if (!up_ready(a, j, part) || !atomic_compare_exchange_strong(&turn->up_next, &part, part + 1)) continue;
            found->job = j, found->part = part, found->down = 0;
            return 1;
        }
        part = atomic_load(&turn->down_next);
        if (part >= a->down_parts || atomic_load(&turn->up_done) < a->up_parts || !down_ready(a, j, part)) continue;
        if (!atomic_compare_exchange_strong(&turn->down_next, &part, part + 1)) continue;
        found->job = j, found->part = part, found->down = 1;
        return 1;
    }
    return 0;
}

static void down_part(Context *c, const Job *job, int parts, int part, int thread) {
    int groups = ceil_div(c->m.hidden, ROWS), first = share(groups, parts, part), last = share(groups, parts, part + 1);
    float **y = c->pointers + (size_t)thread * 2 * (size_t)c->m.capacity;
    for (int i = 0; i < job->rows; i++) y[i] = c->partial + (size_t)(job->first + i) * c->m.hidden + first * ROWS;
    matmul(&job->w->down, run_of(job, &job->w->down), first, last, job->hidden, y, job->rows, c->m.exact);
}

/* One part, whichever; there are as many units as parts. */
static void arrival_unit(void *arg, int unit, int thread) {
    Arrival *a = arg;
    Part part = {0, 0, 0};
    Reader *reader = a->c->m.reader;
    uint64_t begin = 0, now = 0, spin = reader ? ARRIVAL_LOOK_NS : ARRIVAL_SPIN_NS;
    (void)unit;
    reader_poll(reader);
    if (!reader) sched_yield(); /* a reading thread that wants to go on would else wait out this one's slice, some ms */
    while (!atomic_load(&a->lost) && !find_part(a, &part)) {
        now = now_ns(CLOCK_MONOTONIC);
        if (!begin) begin = now;
        struct timespec nap = {0, ARRIVAL_NAP_NS};
        reader_poll(reader);
        if (now - begin > spin) nanosleep(&nap, NULL);
        else
            for (int i = 0; i < 8; i++) relax();
    }
    if (begin) a->waited[thread] += now_ns(CLOCK_MONOTONIC) - begin;
    if (atomic_load(&a->lost)) return;
    const Job *job = &a->c->jobs[part.job];
    if (part.down) down_part(a->c, job, a->down_parts, part.part, thread);
    else {
        up_part(a->c, job, a->up_parts, part.part, thread);
        atomic_fetch_add(&a->c->turns[part.job].up_done, 1);
    }
}

static void merge_unit(void *arg, int unit, int thread) {
    Step *s = arg;
    Context *c = s->c;
    int hidden = c->m.hidden, groups = ceil_div(hidden, ROWS), from = share(groups, s->parts, unit) * ROWS;
    int width = min_int(hidden, share(groups, s->parts, unit + 1) * ROWS) - from;
    (void)thread;
    for (int j = 0; j < c->n_jobs; j++)
        for (int i = c->jobs[j].first; i < c->jobs[j].first + c->jobs[j].rows; i++)
            add_weighted(c->row_sum + (size_t)c->job_row[i] * hidden + from, c->partial + (size_t)i * hidden + from,
                         c->job_weight[i], width);
    if (s->finish) add_sums(c, s->n, from, width);
}

static int64_t ffn_as_pages_arrive(Context *c, Step *s, int64_t work) {
    uint64_t waited[256] = {0}, longest = 0;
    int parts = max_int(4, ceil_div(parts_of(c, 1 << 20, 6), c->n_jobs));
    Arrival a = {c, s, parts, min_int(parts, ceil_div(c->m.hidden, ROWS)), 0, waited};
    memset(c->turns, 0, (size_t)c->n_jobs * sizeof(Turn));
    run_units(c, arrival_unit, &a, c->n_jobs * (a.up_parts + a.down_parts), 3 * work);
    for (int t = 0; t < c->pool.threads; t++) longest = waited[t] > longest ? waited[t] : longest;
    *c->m.waited += (int64_t)longest;
    if (a.lost) {
        ptrdiff_t entry = c->jobs[a.lost - 1].run.pages - c->m.table;
        return failure(MISSING_PAGE, 0, entry / c->m.table_pages % c->m.experts);
    }
    s->parts = parts_of(c, ceil_div(c->m.hidden, ROWS), 6);
    run_units(c, merge_unit, s, s->parts, (int64_t)s->n * c->m.hidden * 4);
    return OK;
}
