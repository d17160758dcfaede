/* How fast this machine reads memory: the floor under every decode figure. */
#include <sys/mman.h>

typedef struct {
    const uint8_t *data;
    size_t part;
    int ahead; /* asked for as the kernels ask, as four streams */
    float sink[256];
    uint64_t cpu_ns[256];
} Probe;

static void probe_unit(void *job, int unit, int thread) {
    Probe *p = job;
    uint64_t begin = now_ns(CLOCK_THREAD_CPUTIME_ID);
    const uint8_t *at = p->data + (size_t)unit * p->part;
    v16 s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    const Cursor straight = {0};
    for (size_t i = 0; i < p->part; i += 256) {
        if (p->ahead) read_ahead(&straight, at + i, 256);
        for (int j = 0; j < 4; j++) s[j] = v_add(s[j], v_load((const float *)(at + i + 64 * (size_t)j)));
    }
    p->sink[thread] += v_sum(v_add(v_add(s[0], s[1]), v_add(s[2], s[3]))); /* or it would be optimised away */
    p->cpu_ns[thread] += now_ns(CLOCK_THREAD_CPUTIME_ID) - begin;
}

/* Best of `passes` reads of `bytes` with `threads` threads, in bytes a second; by_cpu: per CPU second of the slowest
   thread instead of per second on the wall, which other programs' use of the machine disturbs less. streams: 1, or 4 as
   the kernels read; 0: passes take turns. Negative: no memory. */
EXPORT double colibri_probe(int threads, int64_t bytes, int passes, int by_cpu, int streams) {
    Pool pool;
    Probe p;
    int units = 64 * max_int(1, threads);
    memset(&p, 0, sizeof p);
    p.part = (size_t)bytes / (size_t)units / 256 * 256;
    size_t size = p.part * (size_t)units + (4u << 20);
    uint8_t *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return -1;
#ifdef MADV_HUGEPAGE
    madvise(map, size, MADV_HUGEPAGE);
#endif
    memset(map, 1, size);
    p.data = (const uint8_t *)(((uintptr_t)map + (2u << 20) - 1) & ~(uintptr_t)((2u << 20) - 1));
    pool_start(&pool, threads);
    double best = 0;
    for (int i = 0; i < passes; i++) {
        memset(p.cpu_ns, 0, sizeof p.cpu_ns);
        p.ahead = streams ? streams == 4 : i % 2;
        uint64_t begin = now_ns(CLOCK_MONOTONIC), cpu = 1;
        pool_run(&pool, probe_unit, &p, units);
        uint64_t wall = now_ns(CLOCK_MONOTONIC) - begin;
        for (int t = 0; t < 256; t++) cpu = p.cpu_ns[t] > cpu ? p.cpu_ns[t] : cpu;
        double rate = (double)p.part * units / ((double)(by_cpu ? cpu : wall) * 1e-9);
        best = rate > best ? rate : best;
    }
    pool_stop(&pool);
    munmap(map, size);
    return best;
}
