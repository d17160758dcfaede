// State of the simulated machine, and the switch between fibers. Sanitizers are told of every switch.
#pragma once
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIM_ASAN(...) __VA_ARGS__
#else
#define SIM_ASAN(...)
#endif
#if defined(__SANITIZE_THREAD__) && !defined(SIM_RECORD)
#include <sanitizer/tsan_interface.h>
#define SIM_TSAN(...) __VA_ARGS__
#else
#define SIM_TSAN(...)
#endif
// The simulator's own code is not what is looked at.
#define SIM_OWN __attribute__((noinline, no_sanitize("thread", "address", "undefined")))

namespace sim {
enum Status : u8 { RUNS, AT_BARRIER, IN_WARP, DONE };
enum Order { FORWARD, BACKWARD, RANDOM };
enum Op : u8 { SYNC, SHUFFLE, BALLOT, ANY, ALL, ADD, MIN, MAX, AND, OR };

constexpr int kMostThreads = 1024;
constexpr size_t kStack = 128 << 10;
constexpr size_t kMostShared = 232448;  // bytes that one block of an H100 can have

struct Fiber {
  void* stack_pointer;
  char* stack;
  dim3 tid;
  Status status;
  u32 lane, warp, mask;
  int source, line;
  u64 value, result;
  void *tsan, *fake;
};

// The warp operation that some lanes of a warp have come to; one at a time.
struct Meeting {
  u32 mask, here, gone;  // gone: lanes that have left the kernel, or never were
  Op op;
  int line;
};

struct Machine {
  Fiber sets[2][kMostThreads];  // neighbouring blocks take turns, so that a race detector sees them unordered
  Fiber *fiber, *current;
  void *home, *home_tsan, *home_fake;
  const void* home_stack;
  size_t home_size;
  dim3 block, threads, grid;
  int count, set, made[2], generation, warp_generation[32];
  Meeting meetings[kMostThreads / 32];
  Order order;
  u64 random;
  bool failed;
  char error[512];
  void (*body)(void*);
  void* arguments;
  char *shared_map, *shared;
  size_t shared_size;
  char* fresh;
  size_t fresh_left;
  pthread_t thread;
};
inline Machine* M = (Machine*)calloc(1, sizeof(Machine));

extern "C" void sim_switch(void** save, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(".text\n.weak sim_switch\n.hidden sim_switch\n.type sim_switch,@function\nsim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size sim_switch,.-sim_switch\n");
#else
#error "the simulator's switch between fibers is written for x86-64"
#endif

SIM_OWN inline u64 random() {
  u64 x = M->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return M->random = x;
}

SIM_OWN inline void leave() {
  Fiber* me = M->current;
  SIM_TSAN(__tsan_switch_to_fiber(M->home_tsan, 1);)
  SIM_ASAN(__sanitizer_start_switch_fiber(&me->fake, M->home_stack, M->home_size);)
  sim_switch(&me->stack_pointer, M->home);
  SIM_ASAN(__sanitizer_finish_switch_fiber(me->fake, &M->home_stack, &M->home_size);)
}

SIM_OWN inline void enter(Fiber* fiber) {
  M->current = fiber;
  SIM_TSAN(__tsan_switch_to_fiber(fiber->tsan, 1);)
  SIM_ASAN(__sanitizer_start_switch_fiber(&M->home_fake, fiber->stack, kStack);)
  sim_switch(&M->home, fiber->stack_pointer);
  SIM_ASAN(__sanitizer_finish_switch_fiber(M->home_fake, nullptr, nullptr);)
}

SIM_OWN inline void note(const char* format, ...) {
  if (M->failed) return;
  const dim3 b = M->block, t = M->current ? M->current->tid : dim3{0, 0, 0};
  int at = snprintf(M->error, sizeof M->error, "block (%u,%u,%u) thread (%u,%u,%u): ", b.x, b.y, b.z, t.x, t.y, t.z);
  va_list rest;
  va_start(rest, format);
  vsnprintf(M->error + at, sizeof M->error - (size_t)at, format, rest);
  va_end(rest);
  M->failed = true;
}

// The kernel is wrong: the launch ends here.
#define SIM_FAIL(...) (sim::note(__VA_ARGS__), sim::give_up())
[[noreturn]] SIM_OWN inline void give_up() {
  M->current->status = DONE;
  leave();
  abort();
}

SIM_OWN inline void entry() {
  SIM_ASAN(__sanitizer_finish_switch_fiber(nullptr, &M->home_stack, &M->home_size);)
  for (;;) {
    SIM_TSAN(__tsan_acquire(&M->home);)
    M->body(M->arguments);
    SIM_TSAN(__tsan_release(&M->arguments);)
    M->current->status = DONE;
    M->meetings[M->current->warp].gone |= 1u << M->current->lane;
    leave();
  }
}

SIM_OWN inline void make(Fiber* fiber) {
  if (!fiber->stack) {
    void* p = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    fiber->stack = (char*)p;
  }
  void** top = (void**)(fiber->stack + kStack - 64);
  *--top = nullptr;
  *--top = (void*)entry;
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  fiber->stack_pointer = top;
  SIM_TSAN(if (fiber->tsan) __tsan_destroy_fiber(fiber->tsan); fiber->tsan = __tsan_create_fiber(0);)
}
}  // namespace sim
