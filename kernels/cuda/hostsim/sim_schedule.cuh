// Launches: blocks one after another, their threads in the order asked for, shared memory poisoned and fenced.
#pragma once
namespace sim {
constexpr size_t kSharedPage = 4096, kSharedMap = (kMostShared + kSharedPage - 1) / kSharedPage * kSharedPage;
constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Shared memory that no block has had before, so that a race detector sees no other block in it.
SIM_OWN inline char* fresh(size_t size) {
  constexpr size_t most = 1 << 30;
  size = (size + 127) / 64 * 64;
  if (!M->fresh || M->fresh_left < size) {
    void* p = mmap(nullptr, most, PROT_READ | PROT_WRITE, kAnonymous, -1, 0);
    if (p == MAP_FAILED) abort();
    M->fresh = (char*)p, M->fresh_left = most;
  }
  char* mine = M->fresh;
  M->fresh += size, M->fresh_left -= size;
  return mine;
}

// Threads at a barrier, in warp operations and at their end, when none can run: what went wrong.
SIM_OWN inline bool stuck(int waiting, int done) {
  Fiber* one = nullptr;
  for (int i = 0; i < M->count; ++i) {
    Fiber* f = &M->fiber[i];
    if (f->status != DONE && (!one || f->status == IN_WARP)) one = f;
  }
  M->current = one;
  if (waiting + done < M->count)
    note("deadlock at line %d: %d at a barrier, %d done, mask %08x", one->line, waiting, done, one->mask);
  else if (done) note("__syncthreads at line %d after %d threads have left", one->line, done);
  else
    for (int i = 0; i < M->count; ++i)
      if (M->fiber[i].line != one->line)
        note("divergent __syncthreads at lines %d and %d", one->line, M->fiber[i].line);
  return M->failed;
}

// Every thread of the warp runs until it can go no further. Returns how often one ran.
SIM_OWN inline int run_warp(int warp) {
  const int first = warp * 32, length = M->count - first < 32 ? M->count - first : 32;
  int ran = 0;
  for (bool any = true; any;) {
    any = false;
    const int start = M->order == RANDOM ? (int)(random() % (u64)length) : 0;
    const int step = M->order == BACKWARD || (M->order == RANDOM && (random() & 1)) ? length - 1 : 1;
    for (int j = 0, i = M->order == BACKWARD ? length - 1 : start; j < length; ++j, i = (i + step) % length) {
      if (M->fiber[first + i].status != RUNS) continue;
      enter(&M->fiber[first + i]);
      any = true, ++ran;
      if (M->failed) return ran;
    }
    if (M->order == RANDOM && (random() & 3) == 0) break;
  }
  return ran;
}

SIM_OWN inline void run_block() {
  const int warps = (M->count + 31) / 32;
  SIM_TSAN(M->shared = fresh(M->shared_size);)
  memset(M->shared, 0xff, M->shared_size);  // NaN, -1: who reads before writing gets nonsense
  SIM_TSAN(__tsan_release(&M->home);)
  M->generation = 0;
  memset(M->warp_generation, 0, sizeof M->warp_generation);
  memset(M->meetings, 0, sizeof M->meetings);
  if (M->count % 32) M->meetings[warps - 1].gone = ~0u << M->count % 32;
  for (int i = 0; i < M->count; ++i) {
    Fiber* f = &M->fiber[i];
    if (i >= M->made[M->set]) make(f), M->made[M->set] = i + 1;
    f->status = RUNS, f->warp = (u32)i / 32, f->lane = (u32)i % 32;
    f->tid = {i % M->threads.x, i / M->threads.x % M->threads.y, i / (M->threads.x * M->threads.y)};
  }
  for (;;) {
    int ran = 0, done = 0, waiting = 0;
    const int start = M->order == RANDOM ? (int)(random() % (u64)warps) : 0;
    for (int k = 0; k < warps && !M->failed; ++k)
      ran += run_warp(M->order == BACKWARD ? warps - 1 - k : (start + k) % warps);
    if (M->failed) return;
    for (int i = 0; i < M->count; ++i) done += M->fiber[i].status == DONE, waiting += M->fiber[i].status == AT_BARRIER;
    if (done == M->count) return;
    if (ran) continue;
    if (stuck(waiting, done)) return;
    for (int i = 0; i < M->count; ++i) M->fiber[i].status = RUNS;
    ++M->generation;
  }
}

SIM_OWN inline void on_fault(int number, siginfo_t* info, void*) {
  if (!M->current || !pthread_equal(pthread_self(), M->thread)) {
    signal(number, SIG_DFL);
    return;
  }
  SIM_FAIL("invalid memory access at %p", info->si_addr);
}

// Shared memory ends at a page that cannot be touched.
SIM_OWN inline bool share(size_t size) {
  if (!M->shared_map) {
    void* p = mmap(nullptr, kSharedMap + kSharedPage, PROT_READ | PROT_WRITE, kAnonymous, -1, 0);
    if (p == MAP_FAILED || mprotect((char*)p + kSharedMap, kSharedPage, PROT_NONE)) return false;
    M->shared_map = (char*)p;
  }
  M->shared = M->shared_map + kSharedMap - (size + 15) / 16 * 16;
  M->shared_size = size;
  return true;
}

SIM_OWN inline bool refuse(const char* why) {
  snprintf(M->error, sizeof M->error, "%s", why);
  return false;
}

SIM_OWN inline bool launch(void (*body)(void*), void* arguments, const u32* shape, u32 shared, int order, u64 seed) {
  M->grid = {shape[0], shape[1], shape[2]}, M->threads = {shape[3], shape[4], shape[5]};
  const u64 threads = (u64)shape[3] * shape[4] * shape[5], blocks = (u64)shape[0] * shape[1] * shape[2];
  if (threads < 1 || threads > kMostThreads) return refuse("a block has 1 to 1024 threads");
  if (!blocks || shape[1] > 65535 || shape[2] > 65535) return refuse("a grid of no blocks, or of too many");
  if (shared > kMostShared || !share(shared)) return refuse("too much shared memory");
  M->count = (int)threads, M->body = body, M->arguments = arguments, M->order = (Order)order;
  M->random = seed * 2654435761u + 88172645463325252ull, M->failed = false, M->current = nullptr;
  M->thread = pthread_self();
  SIM_TSAN(M->home_tsan = __tsan_get_current_fiber(); __tsan_release(&M->home);)
  struct sigaction action, segv, bus;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
  const u64 start = order == RANDOM ? random() % blocks : 0;
  for (u64 k = 0; k < blocks && !M->failed; ++k) {
    const u64 b = order == BACKWARD ? blocks - 1 - k : (k + start) % blocks;
    M->block = {u32(b % shape[0]), u32(b / shape[0] % shape[1]), u32(b / shape[0] / shape[1])};
    SIM_TSAN(M->set = k & 1;)
    M->fiber = M->sets[M->set];
    run_block();
  }
  sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
  M->current = nullptr;
  if (M->failed) M->made[0] = M->made[1] = 0;  // fibers that were left in the middle are made anew
  SIM_TSAN(__tsan_acquire(&M->arguments);)
  return !M->failed;
}
}  // namespace sim
