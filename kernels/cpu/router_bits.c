/* bit_level: sigmoid out of a 16-bit fixed-point table, a threshold, one bit for each expert that reaches it, popcount.
   The threshold is an index of the table: that is the same as one among its values, as they rise, and nothing need be
   looked up before the experts are chosen.

   The row is moved so that its largest logit is 4 and the contest falls where the sigmoid is steep. The threshold is
   guessed from the row's mean as for normally distributed logits, then moved at most three times; when the count does
   not become k (still more than three away, or two of one index), the exact choice is made instead and counted.
   Table and rounding are monotone, so a threshold that leaves exactly k experts leaves the right ones. */

enum { TABLE_STEP = 1024, MOVES = 3, NEAR = 3 };
static const float BELOW = 28; /* what the table reaches below the largest logit */

INLINE int32_t table_index(float z) {
    z = z < -BELOW ? -BELOW : z > 0 ? 0 : z;
    return (int32_t)rintf((z + BELOW) * TABLE_STEP);
}

/* One bit an expert into mask, and how many are set. index has whole blocks of sixteen, -1 past the end. */
static int mask_of(const int32_t *index, int n, int32_t threshold, uint16_t *mask) {
    int count = 0;
    for (int i = 0; i < n; i += 16) count += __builtin_popcount(mask[i / 16] = bits_from(index + i, threshold));
    return count;
}

static int choose_bits(const Model *m, const float *logits, int32_t *chosen, float *weight, Tally *t) {
    int experts = m->experts, k = m->top_k, n = round_up(experts, 16);
    int32_t index[MOST_EXPERTS];
    float at[MOST_EXPERTS], total = 0;
    uint16_t mask[MOST_EXPERTS / 16];
    t->scored = experts;
    if (!span_of(logits, experts, t)) return 0;
    v16 sum = v_zero(), floor = v_set1(-BELOW);
    for (int i = 0; i < experts; i += 16) {
        v16 z = v_max(v_sub(logits_at(logits, i, experts), v_set1(t->top)), floor);
        v_store(at + i, v_round(v_mul(v_add(z, v_set1(BELOW)), v_set1(TABLE_STEP))));
        if (experts - i < 16) { /* lanes past the end add nothing */
            float lane[16] = {0};
            v_store_n(lane, z, experts - i);
            z = v_load(lane);
        }
        sum = v_add(sum, z);
    }
    int32_t low = experts - n, from = (int32_t)m->sigmoid_from; /* places past the end count as low */
    for (int e = 0; e < n; e++) index[e] = (int32_t)at[e];
    for (int e = experts; e < n; e++) index[e] = -1;
    for (int e = 0; e < n; e++) low += index[e] < from;
    t->saturated = low;
    float mean = v_sum(sum) / (float)experts, guess = mean * (1.0f - m->threshold_at);
    int32_t threshold = table_index(guess);
    int count = mask_of(index, n, threshold, mask);
    for (int move = 0; move < MOVES && count != k; move++) {
        int steps = abs(count - k);
        if (steps > NEAR) {
            if (move == MOVES - 1) break;
            guess -= (float)(count - k) * m->threshold_step * mean;
            threshold = table_index(guess);
        } else if (count > k) { /* past the least that are set */
            for (; steps; steps--) {
                int32_t least = INT32_MAX - 1;
                for (int e = 0; e < n; e++) least = min_int(least, index[e] >= threshold ? index[e] : INT32_MAX - 1);
                threshold = least + 1;
            }
        } else { /* down to the largest that are not */
            for (; steps; steps--) {
                int32_t most = 0;
                for (int e = 0; e < n; e++) most = max_int(most, index[e] < threshold ? index[e] : 0);
                threshold = most;
            }
        }
        count = mask_of(index, n, threshold, mask);
    }
    if (count != k) {
        t->fallback = 1;
        return choose(m, logits, chosen, weight, t);
    }
    for (int i = 0, found = 0; i < n; i += 16)
        for (unsigned bits = mask[i / 16]; bits; bits &= bits - 1) chosen[found++] = i + __builtin_ctz(bits);
    for (int i = 1; i < k; i++) { /* best first, stable */
        int32_t e = chosen[i];
        int j = i;
        for (; j && logits[chosen[j - 1]] < logits[e]; j--) chosen[j] = chosen[j - 1];
        chosen[j] = e;
    }
    for (int i = 0; i < k; i++) { /* s / (1 - s) of the sigmoid is e^x */
        int32_t v = m->sigmoid[index[chosen[i]]];
        total += weight[i] = (float)v / (float)(65536 - v);
    }
    if (!m->normalise) {
        for (int e = 0; e < n; e++) index[e] = m->sigmoid[max_int(index[e], 0)];
        for (int e = 0; e < n; e++) at[e] = (float)index[e] / (float)(65536 - index[e]);
        sum = v_zero();
        for (int i = 0; i < experts; i += 16) sum = v_add(sum, v_at(at, i, experts));
        total = v_sum(sum);
    }
    for (int i = 0; i < k; i++) weight[i] /= total;
    return 1;
}
