/* two_stage: integer logits with a bound on their error, then float logits of the candidates alone; everything when
   the bound does not shut out half of the experts. The derivation is in colibri_lab/router/two_stage.py. */

typedef struct {
    double scale, norm, rest; /* of the row: step of its codes, |x|, |x - codes| (2-norms, rounded up) */
} Codes;

/* x as integers from -last to last. 0 when it is too small, too large or not finite for the bound to hold. */
static int codes_of(const Model *m, const float *x, int16_t *code, Codes *c) {
    int hidden = m->hidden, bits = min_int(m->router_bits, 12);
    float last = (float)((1 << (bits - 1)) - 1);
    v16 any = v_zero(), norm = v_zero(), rest = v_zero();
    for (int i = 0; i < hidden; i += 16) any = v_absmax(any, v_at(x, i, hidden));
    float peak = v_absmax_lane(any);
    if (!(peak >= 1e-12f && peak <= 1e15f)) return 0;
    float step = peak / last;
    v16 inverse = v_set1(last / peak), scale = v_set1(step);
    for (int i = 0; i < hidden; i += 16) {
        v16 v = v_at(x, i, hidden), p = v_round(v_mul(v, inverse)), u = v_sub(v, v_mul(p, scale));
        norm = v_madd(norm, v, v);
        rest = v_madd(rest, u, u);
        v_store_codes(code + i, p);
    }
    double up = 1.0 + (hidden + 32) * 0x1p-23; /* rounding of a sum of squares, more than enough */
    c->scale = step;
    c->norm = sqrt((double)v_sum(norm)) * up;
    c->rest = sqrt((double)v_sum(rest)) * up + c->norm * 0x1p-22; /* and of p * step and x - p * step */
    return 1;
}

/* logits of the listed experts, the bits of router_logits. */
static void logits_of(const Layer *layer, const float *x, int hidden, const int32_t *expert, int count, float *logits) {
    for (int i = 0; i < count; i += 4) { /* the last one again where four are not left */
        const float *w[4];
        float four[4];
        v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int j = 0; j < 4; j++) w[j] = layer->gate + (size_t)expert[min_int(i + j, count - 1)] * hidden;
        for (int h = 0; h < hidden; h += 16) {
            v16 v = v_at(x, h, hidden);
            for (int j = 0; j < 4; j++) s[j] = v_madd(s[j], v_at(w[j], h, hidden), v);
        }
        v_sum4(s, four);
        for (int j = 0; j < 4 && i + j < count; j++) logits[expert[i + j]] = four[j];
    }
}

/* The first stage. Candidates into list: experts whose largest possible logit reaches the k-th largest of the smallest
   possible ones. Returns their number, or 0 when nothing is proved. fast: [k] the experts with the largest of the
   smallest possible logits, best first, or -1s where none is known. */
static int candidates_of(const Model *m, const Layer *layer, const float *x, int16_t *code, int32_t *list,
                         int32_t *fast) {
    int experts = m->experts, k = m->top_k, found = 0;
    float low[MOST_EXPERTS], high[MOST_EXPERTS];
    Codes c;
    int64_t sum[4];
    for (int i = 0; i < k; i++) fast[i] = -1;
    if (experts < 1 || !codes_of(m, x, code, &c)) return 0;
    for (int e = 0; e < experts; e++) {
        if (e % 4 == 0) /* rows of codes come in fours, the last ones zero */
            dot4_codes(layer->gate_codes + (size_t)e * m->code_width, (size_t)m->code_width, code, m->code_width,
                       m->code_block, sum);
        const double *f = layer->gate_facts + 4 * (size_t)e;
        if (!(f[3] * c.norm <= 1e37)) { /* not finite, or its float logit might overflow */
            if (f[3] <= 1e300) return 0;
            low[e] = -INFINITY, high[e] = INFINITY;
            continue;
        }
        double logit = f[0] * c.scale * (double)sum[e % 4], error = f[1] * c.norm + f[2] * c.rest;
        /* of this line, of rounding to float below, and of float products that underflow */
        error += (fabs(logit) + error) * 0x1p-20 + (m->hidden + 4) * 0x1p-148;
        low[e] = (float)(logit - error), high[e] = (float)(logit + error);
    }
    best_logits(low, experts, k, fast);
    float bar = low[fast[k - 1]];
    for (int e = 0; e < experts; e++)
        if (high[e] >= bar) list[found++] = e;
    return found == k || 2 * found <= experts ? found : 0;
}

/* The second stage, of what the first one found. */
static int choose_two_stage(const Model *m, const Layer *layer, const float *x, const int32_t *list, int found,
                            float *logits, int32_t *chosen, float *weight, Tally *t) {
    int whole = !found || !m->normalise;
    if (whole) router_logits(layer->gate, x, m->hidden, 0, m->experts, logits);
    else {
        for (int e = 0; e < m->experts; e++) logits[e] = -INFINITY;
        logits_of(layer, x, m->hidden, list, found, logits);
    }
    if (!choose(m, logits, chosen, weight, t)) return 0;
    t->certified = found > 0, t->fallback = !found, t->candidates = found;
    t->scored = whole ? m->experts : found; /* the sum over all experts needs all logits */
    return 1;
}
