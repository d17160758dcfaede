/* Walking the tiles of a matrix: through the page table for experts, straight on for resident matrices. */

typedef struct {
    const uint8_t *base;  /* frame 0, or the first page of a resident run */
    const int32_t *pages; /* frame of each page; NULL: page g is the g-th after base */
} Run;

typedef struct {
    const uint8_t *at; /* the next tile */
    Run run;
    int page, last, left; /* the matrix's last page; tiles left in this one */
    int size, per_page;
    int ahead;      /* whether those who read ask for what comes: not where it has just been read */
    uintptr_t end;  /* of the page */
    intptr_t apart; /* bytes from there to the next page */
} Cursor;

INLINE const uint8_t *page_at(Run run, int page) {
    return run.base + (size_t)(run.pages ? run.pages[page] : page) * PAGE;
}

/* The page, counted from the run's first, that holds a tile. */
INLINE int page_of(const Matrix *m, int64_t tile) {
    int64_t first = (PAGE - m->start % PAGE) / m->tile_bytes;
    return (int)(m->start / PAGE + (tile < first ? 0 : 1 + (tile - first) / m->tiles_per_page));
}

INLINE void enter_page(Cursor *c) {
    const int32_t *next = c->run.pages && c->page < c->last ? &c->run.pages[c->page + 1] : NULL;
    int32_t frame = next ? __atomic_load_n(next, __ATOMIC_RELAXED) : -1; /* negative: it is not there yet */
    c->end = (uintptr_t)page_at(c->run, c->page) + PAGE;
    c->apart = frame < 0 ? 0 : (intptr_t)((uintptr_t)c->run.base + (size_t)frame * PAGE - c->end);
}

INLINE Cursor cursor_at(const Matrix *m, Run run, int64_t tile) {
    Cursor c = {.run = run, .page = (int)(m->start / PAGE), .size = m->tile_bytes, .per_page = m->tiles_per_page};
    int offset = (int)(m->start % PAGE), first = (PAGE - offset) / m->tile_bytes;
    if (tile >= first) { /* past the page where the matrix starts, pages are full */
        c.page += 1 + (int)((tile - first) / m->tiles_per_page);
        tile = (tile - first) % m->tiles_per_page;
        first = m->tiles_per_page;
        offset = 0;
    }
    c.left = first - (int)tile;
    c.at = page_at(run, c.page) + offset + tile * m->tile_bytes;
    c.last = page_of(m, (int64_t)ceil_div(m->rows, ROWS) * m->tiles_across - 1);
    enter_page(&c);
    return c;
}

INLINE const uint8_t *cursor_next(Cursor *c) {
    if (c->left == 0) {
        c->at = page_at(c->run, ++c->page);
        c->left = c->per_page;
        enter_page(c);
    }
    const uint8_t *tile = c->at;
    c->at += c->size;
    c->left--;
    return tile;
}

/* Weights are asked for before they are read, in the order in which memory gives a core most: a line of each of four
   pages of the processor (4 KiB) in turn, since hardware prefetchers follow one stream a page and stop at its end.
   Addresses past a matrix do no harm: prefetches never fault. */
enum { AHEAD_PAGE = 4096, AHEAD_BYTES = 4 * AHEAD_PAGE };

/* For each 256 bytes from p on, which are read now, four lines of the next 16 KiB. */
INLINE void read_ahead(const Cursor *c, const uint8_t *p, int bytes) {
    for (uintptr_t at = (uintptr_t)p, end = at + (uintptr_t)bytes; at < end; at += 256) {
        uintptr_t next = (at | (AHEAD_BYTES - 1)) + 1;
        if (next == c->end) next += (uintptr_t)c->apart;
        next += (at & (AHEAD_BYTES - 256)) / 4;
        for (int page = 0; page < 4; page++) __builtin_prefetch((const char *)next + page * AHEAD_PAGE, 0, 3);
    }
}

/* Where a run begins: the rest of its first 16 KiB, which nothing before it has asked for, as four streams too. */
INLINE void begin_ahead(const Cursor *c) {
    uintptr_t quarter = (AHEAD_BYTES - (uintptr_t)c->at % AHEAD_BYTES) / 4;
    for (uintptr_t i = 0; i < quarter; i += 64)
        for (uintptr_t stream = 0; stream < 4; stream++) __builtin_prefetch(c->at + i + stream * quarter, 0, 3);
}
