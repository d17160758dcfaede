/* rows.x = the embedding of rows.token; tied embeddings are read out of the head's tiles. */

static void embed_from_tiles(const Matrix *m, int row, float *out) {
    int lane = row % ROWS;
    Cursor c = cursor_at(m, resident(m), (int64_t)(row / ROWS) * m->tiles_across);
    for (int first = 0; first < m->cols; first += m->tile_cols) {
        const uint8_t *tile = cursor_next(&c), *codes = tile + m->groups_per_tile * ROWS * 2;
        for (int k = 0, end = min_int(m->tile_cols, m->cols - first); k < end; k++) {
            if (m->dtype == FP32) memcpy(&out[first + k], tile + (k * ROWS + lane) * 4, 4);
            else if (m->dtype == FP16)
                v_store_n(&out[first + k], v_load_half_n((const uint16_t *)tile + k * ROWS + lane, 1), 1);
            else {
                float scale, code;
                v_store_n(&scale, v_load_half_n((const uint16_t *)tile + k / m->group * ROWS + lane, 1), 1);
                if (m->dtype == INT8) code = (float)(int8_t)codes[k / 4 * 64 + lane * 4 + k % 4];
                else code = (float)((codes[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15) - 8);
                out[first + k] = scale * code;
            }
        }
    }
}

EXPORT int64_t colibri_embed(Context *c, int n) {
    if (!c) return failure(UNBOUND, 0, 0);
    const Model *m = &c->m;
    int64_t failed = look_from(c, 0, n);
    if (failed) return failed;
    for (int r = 0; r < n; r++)
        if (m->token[r] < 0 || m->token[r] >= m->vocab) return failure(BAD_INDEX, TOKEN, r);
    for (int r = 0; r < n; r++) {
        float *x = m->x + (size_t)r * m->hidden;
        size_t at = (size_t)m->token[r] * (size_t)m->hidden;
        if (!m->embedding) embed_from_tiles(&m->head, m->token[r], x);
        else if (m->embedding_dtype == FP32)
            memcpy(x, (const float *)m->embedding + at, (size_t)m->hidden * sizeof(float));
        else
            for (int i = 0; i < m->hidden; i += 16) {
                int left = m->hidden - i;
                const uint16_t *p = (const uint16_t *)m->embedding + at + i;
                v_put(x, i, m->hidden, left >= 16 ? v_load_half(p) : v_load_half_n(p, left));
            }
    }
    return OK;
}
