/* The system's own queue of reads (Linux AIO), on a file opened with O_DIRECT: asking costs a system call, looking what
   has come costs two loads, since the kernel writes it into memory that we share. Elsewhere there is none: disk_open
   gives 0, and Python's readers take over. */
#include <errno.h>
#include <unistd.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#define HAS_QUEUE 1
#endif
#endif

typedef struct {
    uint64_t what; /* comes back with the bytes */
    void *to;      /* page-aligned, as bytes and offset are */
    int64_t bytes, offset;
} Wish;

typedef struct {
    uint64_t what;
    int64_t bytes; /* how many came, or -errno */
} Came;

enum { MOST_WISHES = 64 }; /* at once */

#ifdef HAS_QUEUE

typedef aio_context_t Disk;

/* What the kernel maps for a context: events between head, which is ours to move, and tail. */
typedef struct {
    uint32_t id, nr, head, tail, magic, compat_features, incompat_features, header_length;
    struct io_event event[];
} DiskRing;

static DiskRing *disk_ring(Disk d) { return (DiskRing *)(uintptr_t)d; }

/* Queues that nobody uses now: the system takes 30 ms to give one up. */
typedef struct {
    Disk disk;
    int most;
    pid_t process; /* a forked child cannot use its parent's */
} Unused;

static Unused disk_unused[2];
static pthread_mutex_t disk_unused_lock = PTHREAD_MUTEX_INITIALIZER; /* only tried: a fork may copy it locked */

static int disk_reuse(Disk *d, int most) {
    if (pthread_mutex_trylock(&disk_unused_lock)) return 0;
    for (size_t i = 0; !*d && i < sizeof disk_unused / sizeof *disk_unused; i++) {
        Unused *u = &disk_unused[i];
        if (u->disk && u->most == most && u->process == getpid()) *d = u->disk, u->disk = 0;
    }
    pthread_mutex_unlock(&disk_unused_lock);
    return *d != 0;
}

/* The queue is kept for another: which one is to be given up for that, or 0. */
static Disk disk_keep(Disk d, int most) {
    if (pthread_mutex_trylock(&disk_unused_lock)) return d;
    Unused *u = disk_unused, *end = disk_unused + sizeof disk_unused / sizeof *disk_unused;
    while (u < end && u->disk && u->process == getpid()) u++;
    if (u == end) u = disk_unused;
    Disk old = u->process == getpid() ? u->disk : 0;
    *u = (Unused){d, most, getpid()};
    pthread_mutex_unlock(&disk_unused_lock);
    return old;
}

/* idle: nothing is under way, and all that came was taken. Otherwise it returns when nothing is under way any more. */
static void disk_close(Disk d, int most, int idle) {
    if (d && idle) d = disk_keep(d, most);
    if (d) syscall(SYS_io_destroy, d);
}

/* 1, and a queue of `most` reads; 0: not here. */
static int disk_open(Disk *d, int most) {
    *d = 0;
    if (disk_reuse(d, most)) return 1;
    if (syscall(SYS_io_setup, (long)most, d)) return 0;
    const DiskRing *ring = disk_ring(*d);
    if (ring->magic == 0xa10a10a1 && !ring->incompat_features && ring->header_length == sizeof *ring) return 1;
    disk_close(*d, most, 0);
    *d = 0;
    return 0;
}

/* How many of n wishes were taken, in order; -errno when the first was refused. */
static int disk_ask(Disk d, int fd, const Wish *wish, int n) {
    struct iocb block[MOST_WISHES], *list[MOST_WISHES];
    memset(block, 0, (size_t)n * sizeof *block);
    for (int i = 0; i < n; i++) {
        list[i] = &block[i];
        block[i].aio_data = wish[i].what;
        block[i].aio_lio_opcode = IOCB_CMD_PREAD;
        block[i].aio_fildes = (uint32_t)fd;
        block[i].aio_buf = (uintptr_t)wish[i].to;
        block[i].aio_nbytes = (uint64_t)wish[i].bytes;
        block[i].aio_offset = wish[i].offset;
    }
    long taken = syscall(SYS_io_submit, d, (long)n, list);
    return taken < 0 ? -errno : (int)taken;
}

/* Whether something came that was not taken yet. */
static int disk_any(Disk d) {
    DiskRing *ring = disk_ring(d);
    return d && __atomic_load_n(&ring->head, __ATOMIC_RELAXED) != __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);
}

static int disk_take(Disk d, Came *came) {
    DiskRing *ring = disk_ring(d);
    if (!disk_any(d)) return 0;
    struct io_event event = ring->event[ring->head];
    came->what = event.data, came->bytes = event.res;
    __atomic_store_n(&ring->head, (ring->head + 1) % ring->nr, __ATOMIC_RELEASE);
    return 1;
}

/* The same, asleep for at most ns. */
static int disk_wait(Disk d, Came *came, long ns) {
    struct timespec most = {0, ns};
    struct io_event event;
    if (syscall(SYS_io_getevents, d, 1L, 1L, &event, &most) != 1) return 0;
    came->what = event.data, came->bytes = event.res;
    return 1;
}

#else

typedef int Disk;
static int disk_open(Disk *d, int most) { return (void)d, (void)most, 0; }
static void disk_close(Disk d, int most, int idle) { (void)d, (void)most, (void)idle; }
static int disk_ask(Disk d, int fd, const Wish *wish, int n) { return (void)d, (void)fd, (void)wish, (void)n, -ENOSYS; }
static int disk_any(Disk d) { return (void)d, 0; }
static int disk_take(Disk d, Came *came) { return (void)d, (void)came, 0; }
static int disk_wait(Disk d, Came *came, long ns) { return (void)d, (void)came, (void)ns, 0; }

#endif
