/* Router logits, and the exact choice: softmax over all experts, the k best on unrounded logits, ties to the lower
   index. What the other routers share is here too. */

enum { MOST_EXPERTS = 2048 }; /* checked at bind */

/* What one row adds to its layer's counters; the integers in the order of ops/routing.py's COUNTS. */
typedef struct {
    int32_t rows, certified, fallback, candidates, scored, saturated, audited, wrong;
    float low, top; /* of its finite logits */
} Tally;

/* logits[e] = gate[e] . x for first <= e < last, four at a time: one chain of additions would wait for itself. */
static void router_logits(const float *gate, const float *x, int hidden, int first, int last, float *logits) {
    int e = first;
    for (; e + 4 <= last; e += 4) {
        const float *w = gate + (size_t)e * hidden;
        v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int i = 0; i < hidden; i += 16) {
            v16 v = v_at(x, i, hidden);
            for (int j = 0; j < 4; j++) s[j] = v_madd(s[j], v_at(w + (size_t)j * hidden, i, hidden), v);
        }
        v_sum4(s, logits + e);
    }
    for (; e < last; e++) logits[e] = dot(gate + (size_t)e * hidden, x, hidden);
}

/* Sixteen logits from i on; lanes past the end repeat the first logit. */
INLINE v16 logits_at(const float *logits, int i, int experts) {
    float t[16];
    if (experts - i >= 16) return v_load(logits + i);
    for (int j = 0; j < 16; j++) t[j] = i + j < experts ? logits[i + j] : logits[0];
    return v_load(t);
}

/* Smallest and largest finite logit. 0 when a logit is NaN or the largest is not finite: there is no right choice. */
static int span_of(const float *logits, int experts, Tally *t) {
    const v16 most = v_set1(3.4028235e38f), least = v_set1(-3.4028235e38f);
    v16 top = v_set1(-INFINITY), low = most, any = v_zero();
    for (int i = 0; i < experts; i += 16) {
        v16 v = logits_at(logits, i, experts);
        any = v_absmax(any, v);
        top = v_max(top, v);
        low = v_min(low, v_max(v, least));
    }
    t->top = v_max_lane(top), t->low = -v_max_lane(v_sub(v_zero(), low));
    if (isnan(v_absmax_lane(any)) || !(fabsf(t->top) <= 3.4028235e38f)) return 0;
    if (t->low <= -3.4028235e38f) { /* an expert is shut out by -inf */
        t->low = t->top;
        for (int e = 0; e < experts; e++)
            if (logits[e] < t->low && logits[e] >= -3.4028235e38f) t->low = logits[e];
    }
    return 1;
}

/* Floats in the order of integers; both zeros are one number. */
INLINE int32_t order_of(float f) {
    int32_t bits;
    f += 0.0f;
    memcpy(&bits, &f, 4);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

/* The k largest of n keys, ties to the lower index. Destroys the keys; INT32_MIN is none. */
static void largest_keys(int32_t *key, int n, int k, int32_t *chosen) {
    for (int i = 0; i < k; i++) {
        int32_t best = INT32_MIN, at = n;
        for (int e = 0; e < n; e++) best = max_int(best, key[e]);
        for (int e = 0; e < n; e++) at = min_int(at, key[e] == best ? e : n);
        chosen[i] = at;
        key[at] = INT32_MIN;
    }
}

static void best_logits(const float *logits, int experts, int k, int32_t *chosen) {
    int32_t key[MOST_EXPERTS];
    int n = round_up(experts, 16);
    for (int e = 0; e < experts; e++) key[e] = order_of(logits[e]);
    for (int e = experts; e < n; e++) key[e] = INT32_MIN;
    largest_keys(key, n, k, chosen);
}

/* Softmax weights of the chosen, as softmax gives them: over all experts, or divided by their own sum. */
static void softmax_weights(const float *logits, int experts, int k, int normalise, const int32_t *chosen,
                            float *weight) {
    float top = logits[chosen[0]], total = 0, lane[16];
    v16 sum = v_zero();
    for (int i = 0; i < (normalise ? 0 : experts); i += 16) {
        int n = min_int(16, experts - i);
        for (int j = 0; j < 16; j++) lane[j] = j < n ? logits[i + j] - top : -INFINITY;
        sum = v_add(sum, v_exp(v_load(lane)));
    }
    for (int i = 0; i < k; i += 16) {
        for (int j = 0; j < 16; j++) lane[j] = i + j < k ? logits[chosen[i + j]] - top : -INFINITY;
        v_store(lane, v_exp(v_load(lane)));
        for (int j = 0; j < 16 && i + j < k; j++) total += weight[i + j] = lane[j];
    }
    if (!normalise) total = v_sum(sum);
    for (int i = 0; i < k; i++) weight[i] /= total;
}

static int choose(const Model *m, const float *logits, int32_t *chosen, float *weight, Tally *t) {
    t->scored = m->experts;
    if (!span_of(logits, m->experts, t)) return 0;
    best_logits(logits, m->experts, m->top_k, chosen);
    softmax_weights(logits, m->experts, m->top_k, m->normalise, chosen, weight);
    return 1;
}
