/* Walking the tiles of a matrix: through the page table for experts, straight on for resident matrices. */

typedef struct {
    const uint8_t *base;  /* frame 0, or the first page of a resident run */
    const int32_t *pages; /* frame of each page; NULL: page g is the g-th after base */
} Run;

typedef struct {
    const uint8_t *at; /* the next tile */
    Run run;
    int page, left; /* tiles left in the page */
    int size, per_page;
} Cursor;

INLINE const uint8_t *page_at(Run run, int page) {
    return run.base + (size_t)(run.pages ? run.pages[page] : page) * PAGE;
}

/* The page, counted from the run's first, that holds a tile. */
INLINE int page_of(const Matrix *m, int64_t tile) {
    int64_t first = (PAGE - m->start % PAGE) / m->tile_bytes;
    return (int)(m->start / PAGE + (tile < first ? 0 : 1 + (tile - first) / m->tiles_per_page));
}

INLINE Cursor cursor_at(const Matrix *m, Run run, int64_t tile) {
    Cursor c = {NULL, run, (int)(m->start / PAGE), 0, m->tile_bytes, m->tiles_per_page};
    int offset = (int)(m->start % PAGE), first = (PAGE - offset) / m->tile_bytes;
    if (tile >= first) { /* past the page where the matrix starts, pages are full */
        c.page += 1 + (int)((tile - first) / m->tiles_per_page);
        tile = (tile - first) % m->tiles_per_page;
        first = m->tiles_per_page;
        offset = 0;
    }
    c.left = first - (int)tile;
    c.at = page_at(run, c.page) + offset + tile * m->tile_bytes;
    return c;
}

INLINE const uint8_t *cursor_next(Cursor *c) {
    if (c->left == 0) {
        c->at = page_at(c->run, ++c->page);
        c->left = c->per_page;
    }
    const uint8_t *tile = c->at;
    c->at += c->size;
    c->left--;
    return tile;
}

/* One page of the processor (4 KiB) ahead, into the second-level cache: hardware prefetchers stop at page ends, and
   this is worth 15 % of a decode where memory is slow. An address past the end does no harm: prefetches never fault. */
INLINE void read_ahead(const uint8_t *p) { __builtin_prefetch(p + 4096, 0, 2); }
