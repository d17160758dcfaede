/* Experts on their way from the disk into their frames. No thread waits for the disk: reads are handed to the system's
   queue in pieces, and whoever needs a page, a kernel or Python, looks what has come, tells the page table and hands
   over what waits. So nothing has to wake up between a request and its page, and nothing competes with the kernels. */

enum { IDLE, QUEUED, READING, LANDED, FAILED };    /* states of a slot; Python's twin is in pager/queue.py */
enum { CUT = -1, CUT_IN_PAGE = -2, DAMAGED = -3 }; /* why a read failed, where it is no errno; the same */
enum { SECTOR = 4096, MOST_PIECES = MOST_WISHES };
enum { READ_SPIN_NS = 200000, READ_NAP_NS = 1000000 }; /* a page takes some 80 us */

/* A slot is one run of frames; one read at a time goes there. */
typedef struct {
    int64_t offset;       /* in the file */
    const uint32_t *sums; /* [pages] CRC-32, or NULL: checked before */
    int32_t *entries;     /* [pages] of the page table, or NULL: a guess, of which nobody is told yet */
    uint64_t there;       /* pieces that are in memory, and checked */
    int begun, left;      /* pieces that were handed over, that have not ended */
    int next;             /* the slot behind it in its line, or -1 */
    int reason, where;    /* why it failed, and at which page, or how many bytes were missing */
} Read;

typedef struct {
    int first, last; /* slots, or -1 */
} Line;

struct Reader {
    pthread_mutex_t lock; /* of all below but state and open */
    Disk disk;
    pid_t process; /* a forked child has a queue of its own */
    int fd, depth, slots, pieces, pages;
    int guesses; /* under way at a time */
    int reading, urgent; /* reads under way, and those of them that somebody needs */
    uint64_t since, busy; /* when something came under way, and how long something was before that, ns */
    int64_t bytes, piece; /* of a run, of a piece of it */
    uint8_t *arena;
    Line needed, guessed;
    int half; /* a slot of which not all pieces were taken, or -1 */
    Read *read;
    int32_t *got;           /* [slots][pieces] bytes of a piece so far */
    _Atomic int32_t *state; /* [slots] */
    _Atomic int open;       /* reads that are queued or under way */
};

static void set_state(Reader *r, int slot, int state) {
    atomic_store_explicit(&r->state[slot], state, memory_order_release);
}

static int piece_of(const Reader *r, int page) { return (int)(page * (int64_t)PAGE / r->piece); }

/* The page table gets the frames of what is there, and of the rest: COMING, or ABSENT when it will not come. */
static void tell(const Reader *r, int slot, int first, int last, int rest) {
    const Read *read = &r->read[slot];
    if (!read->entries) return;
    for (int g = first; g < last; g++) {
        int there = read->there >> piece_of(r, g) & 1;
        __atomic_store_n(&read->entries[g], there ? slot * r->pages + g : rest, __ATOMIC_RELEASE);
    }
}

static int64_t piece_bytes(const Reader *r, int piece) {
    int64_t rest = r->bytes - piece * r->piece;
    return rest < r->piece ? rest : r->piece;
}

static Wish wish_of(const Reader *r, int slot, int piece) {
    int64_t got = r->got[(size_t)slot * (size_t)r->pieces + (size_t)piece], at = piece * r->piece + got;
    uint64_t what = (uint64_t)slot << 8 | (uint64_t)piece;
    return (Wish){what, r->arena + slot * r->bytes + at, piece_bytes(r, piece) - got, r->read[slot].offset + at};
}

/* Some pieces of a read have ended, for a reason where it is not 0. */
static void end_pieces(Reader *r, int slot, int pieces, int reason, int where) {
    Read *read = &r->read[slot];
    if (reason && !read->reason) read->reason = reason, read->where = where;
    if ((read->left -= pieces) > 0) return;
    if (read->reason) tell(r, slot, 0, r->pages, ABSENT);
    if (!--r->reading) r->busy += now_ns(CLOCK_MONOTONIC) - r->since;
    r->urgent -= read->entries != NULL;
    set_state(r, slot, read->reason ? FAILED : LANDED);
    atomic_fetch_sub(&r->open, 1);
}

/* Hand over what was not yet of a read; 0 when the system takes no more now. */
static int hand_over(Reader *r, int slot) {
    Read *read = &r->read[slot];
    while (read->begun < r->pieces) {
        Wish wish[MOST_PIECES];
        int n = r->pieces - read->begun;
        for (int i = 0; i < n; i++) wish[i] = wish_of(r, slot, read->begun + i);
        int taken = disk_ask(r->disk, r->fd, wish, n);
        if (taken == 0 || taken == -EAGAIN || taken == -EINTR) return 0;
        if (!read->begun) {
            if (!r->reading++) r->since = now_ns(CLOCK_MONOTONIC);
            r->urgent += read->entries != NULL;
            set_state(r, slot, READING);
        }
        if (taken < 0) {
            read->begun = r->pieces;
            end_pieces(r, slot, n, -taken, 0);
        } else read->begun += taken;
    }
    return 1;
}

/* One piece came, whole or in part, or did not. */
static void arrive(Reader *r, const Came *came) {
    int slot = (int)(came->what >> 8), piece = (int)(came->what & 255);
    Read *read = &r->read[slot];
    int32_t *got = &r->got[(size_t)slot * (size_t)r->pieces + (size_t)piece];
    int64_t size = piece_bytes(r, piece);
    int first = (int)(piece * r->piece / PAGE), last = first + (int)(size / PAGE);
    if (came->bytes < 0) return end_pieces(r, slot, 1, (int)-came->bytes, 0);
    if (came->bytes == 0) return end_pieces(r, slot, 1, CUT, (int)(size - *got));
    *got += (int32_t)came->bytes;
    if (*got < size) { /* the rest, from an aligned place on */
        if (came->bytes < SECTOR) return end_pieces(r, slot, 1, CUT_IN_PAGE, 0);
        *got -= *got % SECTOR;
        Wish wish = wish_of(r, slot, piece);
        int taken = disk_ask(r->disk, r->fd, &wish, 1);
        if (taken != 1) end_pieces(r, slot, 1, taken ? -taken : EAGAIN, 0);
        return;
    }
    const uint8_t *run = r->arena + slot * r->bytes;
    for (int g = first; read->sums && g < last; g++)
        if (colibri_crc32(run + (int64_t)g * PAGE, PAGE) != read->sums[g]) return end_pieces(r, slot, 1, DAMAGED, g);
    read->there |= 1ull << piece;
    tell(r, slot, first, last, COMING);
    end_pieces(r, slot, 1, 0, 0);
}

static void line_up(Reader *r, int slot) {
    Line *line = r->read[slot].entries ? &r->needed : &r->guessed;
    if (line->last >= 0) r->read[line->last].next = slot;
    else line->first = slot;
    line->last = slot;
    set_state(r, slot, QUEUED);
}

static void leave(Reader *r, Line *line, int slot) {
    for (int s = line->first, before = -1; s >= 0; before = s, s = r->read[s].next) {
        if (s != slot) continue;
        if (before < 0) line->first = r->read[s].next;
        else r->read[before].next = r->read[s].next;
        if (line->last == s) line->last = before;
        return;
    }
}

/* Take what has come, hand over what waits: what is needed first, guesses while nothing that is needed is read. */
static void advance(Reader *r) {
    Came came;
    while (disk_take(r->disk, &came)) arrive(r, &came);
    if (r->half >= 0 && !hand_over(r, r->half)) return;
    r->half = -1;
    while (r->reading < r->depth) {
        Line *line = r->needed.first >= 0 ? &r->needed : &r->guessed;
        int slot = line->first;
        if (slot < 0) break;
        if (line == &r->guessed && (r->urgent || r->reading >= r->guesses)) break; /* it would share the disk */
        int done = hand_over(r, slot);
        if (r->read[slot].begun) leave(r, line, slot);
        if (!done) {
            if (r->read[slot].begun) r->half = slot;
            break;
        }
    }
}

/* In a forked child: what was under way comes to its parent, so it is read again here. */
static void begin_anew(Reader *r) {
    r->process = getpid(), r->reading = r->urgent = 0, r->half = -1;
    r->needed = r->guessed = (Line){-1, -1};
    if (!disk_open(&r->disk, r->depth * MOST_PIECES)) r->disk = 0; /* what is asked for then fails, and says why */
    for (int s = 0; s < r->slots; s++) {
        if (r->state[s] != QUEUED && r->state[s] != READING) continue;
        Read *read = &r->read[s];
        *read = (Read){read->offset, read->sums, read->entries, 0, 0, r->pieces, -1, 0, 0};
        memset(r->got + (size_t)s * (size_t)r->pieces, 0, (size_t)r->pieces * sizeof *r->got);
        line_up(r, s);
    }
}

static void take_lock(Reader *r) {
    pthread_mutex_lock(&r->lock);
    if (r->process != getpid()) begin_anew(r);
}

/* Called by kernels that wait for a page, and between two parts of their work; r may be NULL. */
static void reader_poll(Reader *r) {
    if (!r || !atomic_load_explicit(&r->open, memory_order_relaxed) || pthread_mutex_trylock(&r->lock)) return;
    if (r->process != getpid()) begin_anew(r);
    advance(r);
    pthread_mutex_unlock(&r->lock);
}

EXPORT void colibri_reader_poll(Reader *r) { reader_poll(r); }

/* Begin to read one expert into an idle slot. sums: see Read. entries: the page table's, told as pages come; NULL: a
   guess, read when nothing else is to be. */
EXPORT void colibri_reader_read(Reader *r, int slot, int64_t offset, const uint32_t *sums, int32_t *entries) {
    take_lock(r);
    r->read[slot] = (Read){offset, sums, entries, 0, 0, r->pieces, -1, 0, 0};
    memset(r->got + (size_t)slot * (size_t)r->pieces, 0, (size_t)r->pieces * sizeof *r->got);
    tell(r, slot, 0, r->pages, COMING);
    line_up(r, slot);
    atomic_fetch_add(&r->open, 1);
    advance(r);
    pthread_mutex_unlock(&r->lock);
}

/* A guess is needed now: it passes other guesses, and the page table is told of its pages, at once of those there. */
EXPORT void colibri_reader_tell(Reader *r, int slot, int32_t *entries) {
    take_lock(r);
    advance(r);
    int waits = r->state[slot] == QUEUED; /* the line that it stands in goes by its entries */
    if (waits) leave(r, &r->guessed, slot), r->read[slot].next = -1;
    r->urgent += r->state[slot] == READING && !r->read[slot].entries;
    r->read[slot].entries = entries;
    if (waits) line_up(r, slot);
    tell(r, slot, 0, r->pages, r->state[slot] == FAILED ? ABSENT : COMING);
    pthread_mutex_unlock(&r->lock);
}

/* 1 when nothing was read into the slot and nothing will be. */
EXPORT int colibri_reader_cancel(Reader *r, int slot) {
    take_lock(r);
    int queued = r->state[slot] == QUEUED;
    if (queued) {
        leave(r, r->read[slot].entries ? &r->needed : &r->guessed, slot);
        set_state(r, slot, IDLE);
        atomic_fetch_sub(&r->open, 1);
    }
    pthread_mutex_unlock(&r->lock);
    return queued;
}

/* Wait for a read to end, at most so many nanoseconds: its state. */
EXPORT int colibri_reader_wait(Reader *r, int slot, int64_t most) {
    uint64_t begin = now_ns(CLOCK_MONOTONIC), passed = 0;
    for (;;) {
        Came came;
        take_lock(r);
        advance(r);
        int state = r->state[slot];
        if (state < LANDED && passed > READ_SPIN_NS && (int64_t)passed < most && r->reading &&
            disk_wait(r->disk, &came, READ_NAP_NS))
            arrive(r, &came);
        pthread_mutex_unlock(&r->lock);
        passed = now_ns(CLOCK_MONOTONIC) - begin;
        if (state == IDLE || state >= LANDED || (int64_t)passed >= most) return state;
        relax();
    }
}

/* Nanoseconds in which a read was under way so far. */
EXPORT int64_t colibri_reader_busy(Reader *r) {
    take_lock(r);
    uint64_t busy = r->busy + (r->reading ? now_ns(CLOCK_MONOTONIC) - r->since : 0);
    pthread_mutex_unlock(&r->lock);
    return (int64_t)busy;
}

/* Why a read failed: an errno, or one of the reasons above; where: see Read. */
EXPORT int colibri_reader_error(Reader *r, int slot, int *where) {
    *where = r->read[slot].where;
    return r->read[slot].reason;
}

EXPORT void colibri_reader_close(Reader *r) {
    if (!r) return;
    disk_close(r->disk, r->depth * MOST_PIECES, !r->reading && r->process == getpid());
    pthread_mutex_destroy(&r->lock);
    free((void *)r->state), free(r->read), free(r->got), free(r);
}

/* fd: opened with O_DIRECT. depth: reads under way at a time. NULL where the system has no such queue. */
EXPORT Reader *colibri_reader_open(int fd, int depth) {
    Reader *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->fd = fd, r->depth = depth, r->process = getpid(), r->half = -1;
    r->needed = r->guessed = (Line){-1, -1};
    pthread_mutex_init(&r->lock, NULL);
    if (disk_open(&r->disk, depth * MOST_PIECES)) return r;
    colibri_reader_close(r);
    return NULL;
}

/* Once: where reads go. arena: [slots] runs of `bytes` bytes, whole pages; piece: bytes after which the page table is
   told; guesses: under way at a time. The slots' states, int32 [slots], to look at without a call; NULL: no memory. */
EXPORT const void *colibri_reader_serve(Reader *r, uint8_t *arena, int slots, int64_t bytes, int64_t piece,
                                        int guesses) {
    int64_t least = (bytes + MOST_PIECES - 1) / MOST_PIECES;
    r->arena = arena, r->slots = slots, r->bytes = bytes, r->guesses = guesses;
    r->piece = ((piece > least ? piece : least) + PAGE - 1) / PAGE * PAGE;
    r->pages = (int)(bytes / PAGE), r->pieces = (int)((bytes + r->piece - 1) / r->piece);
    r->state = calloc((size_t)slots + 1, sizeof *r->state);
    r->read = calloc((size_t)slots + 1, sizeof *r->read);
    r->got = calloc((size_t)slots * (size_t)r->pieces + 1, sizeof *r->got);
    return r->state && r->read && r->got ? (const void *)r->state : NULL;
}
