/* Our own thread pool: the caller works too, units are claimed one by one, idle workers spin a little and then sleep.
   A preempted worker delays only the unit it holds. Units must not care which thread runs them, or when. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

typedef void (*Unit)(void *job, int unit, int thread);

typedef struct {
    /* epoch << 32 | units << 16 | next unit: one word, so that a claim cannot mix two runs */
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic int done;
    _Alignas(64) _Atomic uint32_t epoch;
    _Atomic int sleepers, quit;
    Unit run; /* valid while a claimed unit of the epoch is not done */
    void *job;
    int threads, started;
    pthread_t thread[256];
    pthread_mutex_t lock;
    pthread_cond_t wake;
} Pool;

typedef struct {
    Pool *pool;
    int index;
} Worker;

enum { SPIN_NS = 50000 };

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int claim(Pool *p, uint32_t epoch, int thread) {
    uint64_t t = atomic_load(&p->ticket);
    for (;;) {
        int next = (int)(t & 0xffff), units = (int)(t >> 16 & 0xffff);
        if ((uint32_t)(t >> 32) != epoch || next >= units) return 0;
        if (atomic_compare_exchange_weak(&p->ticket, &t, t + 1)) {
            p->run(p->job, next, thread);
            atomic_fetch_add(&p->done, 1);
            return 1;
        }
    }
}

static void sleep_until_new(Pool *p, uint32_t seen) {
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->epoch) == seen && !atomic_load(&p->quit)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *work(void *arg) {
    Worker w = *(Worker *)arg;
    Pool *p = w.pool;
    uint32_t seen = 0;
    free(arg);
    for (;;) {
        uint64_t begin = now_ns(CLOCK_MONOTONIC);
        uint32_t epoch;
        while ((epoch = atomic_load(&p->epoch)) == seen) {
            if (atomic_load(&p->quit)) return NULL;
            for (int i = 0; i < 8; i++) relax();
            if (now_ns(CLOCK_MONOTONIC) - begin > SPIN_NS) sleep_until_new(p, seen);
        }
        seen = epoch;
        while (claim(p, epoch, w.index)) {
        }
    }
}

/* run(job, unit, thread) for every unit, and back when all are done. units <= 65535. */
static void pool_run(Pool *p, Unit run, void *job, int units) {
    if (p->started == 0 || units == 1) {
        for (int i = 0; i < units; i++) run(job, i, 0);
        return;
    }
    uint32_t epoch = atomic_load(&p->epoch) + 1;
    p->run = run, p->job = job;
    atomic_store(&p->done, 0);
    atomic_store(&p->ticket, (uint64_t)epoch << 32 | (uint64_t)units << 16);
    atomic_store(&p->epoch, epoch);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    while (claim(p, epoch, 0)) {
    }
    for (int spins = 0; atomic_load(&p->done) < units; relax())
        if (++spins > 2000) { /* the worker that holds the last unit may want this core */
            struct timespec nap = {0, 1000};
            nanosleep(&nap, NULL);
            spins = 0;
        }
}

static void pool_stop(Pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->quit, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->started; i++) pthread_join(p->thread[i], NULL);
    p->started = 0;
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
}

/* Fewer threads than asked for is no error: the caller can do all the work. */
static void pool_start(Pool *p, int threads) {
    sigset_t all, before;
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->threads = min_int(max_int(threads, 1), 256);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals belong to Python's thread */
    for (int i = 1; i < p->threads; i++) {
        Worker *w = malloc(sizeof *w);
        if (!w) break;
        w->pool = p, w->index = i;
        if (pthread_create(&p->thread[p->started], NULL, work, w)) {
            free(w);
            break;
        }
        p->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
