/* Which past tokens a row attends to, in order of position. Exact: all in its window. Expert-local: of those the first
   `sinks` and the `recent` newest, and between them the ones whose first expert is among the row's own. */

/* Of a row's position in the tables `where` and `first`. */
INLINE size_t entry_of(const Model *m, int l, int r) {
    return ((size_t)m->seat[r] * m->n_layers + l) * m->positions + m->position[r];
}

/* Of a token's keys, and of its values, in the pool. */
INLINE size_t kv_bytes(const Model *m) { return (size_t)m->kv_heads * m->head_dim * (m->kv_dtype == FP16 ? 2 : 4); }

/* The experts that a row will choose are known only after attention, so the layer's gate is asked before it: attention
   adds little to the hidden state. Borrows the row's places for logits and for attention's output. */
static void guess_experts(Context *c, const Layer *layer, int r) {
    const Model *m = &c->m;
    float *x = c->out + (size_t)r * m->hidden, *logits = m->router_logits + (size_t)r * m->experts;
    rms_norm(m->x + (size_t)r * m->hidden, layer->post_norm, x, m->hidden, m->eps);
    router_logits(layer->gate, x, m->hidden, 0, m->experts, logits);
    best_logits(logits, m->experts, m->top_k, c->guess + (size_t)r * m->top_k);
}

/* The near tokens of a row and, between head and tail, those of its experts. Returns their number, -1 for a first
   expert out of range. */
static int collect(const Context *c, int r, const int32_t *where, const int16_t *first, int begin, int head, int tail,
                   int32_t *room) {
    const Model *m = &c->m;
    uint8_t wanted[MOST_EXPERTS + 1];
    int count = 0, last = m->position[r];
    memset(wanted, 0, (size_t)m->experts + 1);
    wanted[0] = 1; /* of this very step: its first expert is not known yet */
    for (int i = 0; i < m->top_k; i++) wanted[1 + c->guess[(size_t)r * m->top_k + i]] = 1;
    for (int t = begin; t < head; t++) room[count++] = where[t];
    for (int t = head; t < tail; t++) {
        if ((unsigned)(first[t] + 1) > (unsigned)m->experts) return -1;
        room[count] = where[t];
        count += wanted[first[t] + 1];
    }
    for (int t = tail; t <= last; t++) room[count++] = where[t];
    return count;
}

/* Fills c->sight[r]; room: [positions]. Returns 0 when a table points outside its range. */
static int look(Context *c, const Layer *layer, int l, int r, int32_t *room) {
    const Model *m = &c->m;
    int position = m->position[r], end = position + 1;
    int begin = layer->window && end > layer->window ? end - layer->window : 0;
    int head = max_int(begin, m->sinks), tail = end - m->recent;
    size_t start = entry_of(m, l, r) - (size_t)position;
    Sight s = {m->where + start + begin, end - begin, end - begin, 0};
    if (m->recent && layer->gate && head < tail) {
        guess_experts(c, layer, r);
        s.count = collect(c, r, m->where + start, m->first + start, begin, head, tail, room);
        s.where = room, s.guessed = 1;
    }
    c->sight[r] = s;
    int outside = s.count < 0;
    for (int t = 0; t < s.count; t++) outside |= (s.where[t] < 0) | (s.where[t] >= m->tokens);
    return !outside;
}

/* A layer's counters of attention, in the order of ops/types.py's SEEN. The choice is the backend's own router's. */
static void count_sights(const Context *c, const Layer *layer, int l, int n) {
    const Model *m = &c->m;
    int64_t *counts = m->seen + 4 * (size_t)l;
    for (int r = 0; r < n; r++) {
        const Sight *s = &c->sight[r];
        counts[0] += s->count, counts[1] += s->all;
        if (!s->guessed || !layer->gate) continue;
        counts[2]++;
        for (int i = 0; i < m->top_k; i++)
            counts[3] += c->guess[(size_t)r * m->top_k + i] == m->experts_of_row[(size_t)r * m->top_k];
    }
}
