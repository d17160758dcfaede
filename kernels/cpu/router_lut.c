/* int8_lut: logits as codes between the row's smallest and largest, ranked as integers; softmax out of a table.

   The table has an entry exp(-d * step) for every distance d of a code from the top one. It is kept as the product of
   two tables of sixteen (three or four above 8 bits), exp(-d) = exp(-16 (d / 16)) exp(-(d % 16)): each is one vector
   register, looked up by a permutation, and made by one exp instead of sixteen. */

enum { MOST_TABLES = 4 };
static const float DIGITS[16] = {0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, -13, -14, -15};
static const float COARSE = 0.25f; /* a step that changes a weight by more than a quarter is too coarse */

static int choose_lut(const Model *m, const float *logits, int32_t *chosen, float *weight, Tally *t) {
    int experts = m->experts, k = m->top_k, n = round_up(experts, 16), tables = (m->router_bits + 3) / 4;
    float last = (float)((1 << m->router_bits) - 1), total = 0;
    int32_t key[MOST_EXPERTS + 16];
    float code[MOST_EXPERTS + 16];
    t->scored = experts;
    if (!span_of(logits, experts, t)) return 0;
    float range = t->top - t->low, step = range / last, inverse = range >= 1e-30f ? last / range : 0.0f;
    if (!(range <= 3.4028235e38f)) {
        t->fallback = 1;
        return choose(m, logits, chosen, weight, t);
    }
    if (step > COARSE) t->saturated = experts;
    for (int i = 0; i < experts; i += 16) { /* 0 is for -inf, 1 the smallest finite logit, last + 1 the largest */
        v16 c = v_mul(v_sub(v_at(logits, i, experts), v_set1(t->low)), v_set1(inverse));
        v_store(code + i, v_add(v_round(v_max(c, v_set1(-1))), v_set1(1)));
    }
    for (int e = 0; e < n; e++) key[e] = (int32_t)code[e] << 11 | (MOST_EXPERTS - 1 - e);
    for (int e = experts; e < n; e++) key[e] = -1;
    for (int i = 0; i < k; i++) { /* keys differ, so the largest is one: ties went to the lower index */
        int32_t best = -1;
        for (int e = 0; e < n; e++) best = max_int(best, key[e]);
        chosen[i] = MOST_EXPERTS - 1 - (best & (MOST_EXPERTS - 1));
        key[chosen[i]] = -1;
    }
    v16 table[MOST_TABLES];
    for (int j = 0; j < tables; j++) table[j] = v_exp(v_mul(v_load(DIGITS), v_set1((float)(1 << 4 * j) * step)));
    const v16 first = v_set1(last + 1);
    for (int i = 0; i < k; i++) weight[i] = code[chosen[i]];
    for (int i = 0; i < k; i += 16) {
        v16 c = v_at(weight, i, k), d = v_min(v_sub(first, c), v_set1(last)), f = v_min(c, v_set1(1));
        for (int j = 0; j < tables; j++) f = v_mul(f, v_lookup(table[j], d, 4 * j));
        v_put(weight, i, k, f);
    }
    for (int i = 0; i < k; i++) total += weight[i];
    if (!m->normalise) {
        v16 sum = v_zero();
        for (int i = 0; i < experts; i += 16) {
            v16 c = v_at(code, i, experts), d = v_min(v_sub(first, c), v_set1(last)), f = v_min(c, v_set1(1));
            for (int j = 0; j < tables; j++) f = v_mul(f, v_lookup(table[j], d, 4 * j));
            sum = v_add(sum, f);
        }
        total = v_sum(sum);
    }
    for (int i = 0; i < k; i++) weight[i] /= total;
    return 1;
}
