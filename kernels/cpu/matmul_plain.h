/* int8 activations in plain C. The dot of a group is a whole number below 2^24, so floats hold it exactly in any order,
   and compilers turn this into multiply-adds of whatever width there is. */

INLINE void fast_codes(const Matrix *m, Cursor *c, const Act *a, float (*out)[ROWS], const int n, const int int4) {
    v16 acc[FAST_ROWS];
    for (int i = 0; i < n; i++) acc[i] = v_zero();
    for (int group = 0; group < m->groups;) {
        const uint8_t *tile = cursor_next(c), *codes = tile + m->groups_per_tile * ROWS * 2;
        for (int b = 0; b < m->groups_per_tile && group < m->groups; b++, group++) {
            v16 d[FAST_ROWS];
            for (int i = 0; i < n; i++) d[i] = v_zero();
            for (int k = group * m->group, end = k + m->group; k < end; k += int4 ? 8 : 4, codes += 64)
                for (int part = 0; part < (int4 ? 2 : 1); part++)
                    for (int j = 0; j < 4; j++) {
                        v16 w = int4 ? v_int4(codes, j, part) : v_int8(codes, j);
                        for (int i = 0; i < n; i++) d[i] = v_madd(d[i], w, v_set1((float)a[i].q[k + 4 * part + j]));
                    }
            v16 scale = v_load_half((const uint16_t *)tile + b * ROWS);
            for (int i = 0; i < n; i++) acc[i] = v_madd(acc[i], v_mul(scale, v_set1(a[i].scale[group])), d[i]);
        }
    }
    for (int i = 0; i < n; i++) v_store(out[i], acc[i]);
}
