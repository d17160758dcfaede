/* Router logits and the choice: softmax over all experts, the k best on unrounded logits, ties to the lower index. */

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

/* Returns 0 when a logit is NaN or the largest is not finite: there is no right choice then. */
static int choose(const float *logits, int experts, int k, int normalise, int32_t *chosen, float *weight) {
    float top = logits[0];
    int bad = 0;
    for (int e = 0; e < experts; e++) {
        bad |= isnan(logits[e]);
        top = logits[e] > top ? logits[e] : top;
    }
    if (bad || !(fabsf(top) <= 3.4028235e38f)) return 0;
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int e = 0; e < experts; e++) {
            int taken = 0;
            for (int j = 0; j < i; j++) taken |= chosen[j] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        chosen[i] = best;
    }
    float total = 0, e16[16];
    v16 sum = v_zero();
    for (int i = 0; i < (normalise ? 0 : experts); i += 16) {
        int n = min_int(16, experts - i);
        for (int j = 0; j < 16; j++) e16[j] = j < n ? logits[i + j] - top : -INFINITY;
        sum = v_add(sum, v_exp(v_load(e16)));
    }
    for (int i = 0; i < k; i++) {
        for (int j = 0; j < 16; j++) e16[j] = logits[chosen[i]] - top;
        v_store(e16, v_exp(v_load(e16)));
        weight[i] = e16[0];
        total += e16[0];
    }
    if (!normalise) total = v_sum(sum);
    for (int i = 0; i < k; i++) weight[i] /= total;
    return 1;
}
