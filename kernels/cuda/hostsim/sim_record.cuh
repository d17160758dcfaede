// What every thread does, written down for the host. The compiler's own instrumentation for race detectors calls a
// function at each access; here these functions are ours, and no detector is linked (ops/recording.py has the flags).
#pragma once
#if defined(SIM_RECORD)
#define SIM_TELL(...) sim::tell(__VA_ARGS__)
namespace sim {
enum Kind : u8 { READ, WRITE, BARRIER, WARP };
constexpr u8 kShared = 255, kNoArray = 254;  // of an event that is in no argument

struct Event {
  u32 block, at;  // at: byte of the array, or of shared memory
  u16 thread, size, phase, line;  // phase: barriers that the block has passed
  u8 kind, array, unused[2];
};
struct Range {
  u64 begin, end;
};
struct Record {
  Event* events;
  u64 most, count;
  const Range* arrays;
  int number;
};
inline Record record;

SIM_OWN inline void tell(Kind kind, int line, u8 array = kNoArray, u64 at = 0, size_t size = 0) {
  const u64 here = record.count++;
  if (here >= record.most) return;
  const dim3 b = M->block, g = M->grid;
  record.events[here] = {b.x + g.x * (b.y + g.y * b.z), (u32)at, (u16)(M->current - M->fiber), (u16)size,
                         (u16)M->generation, (u16)line, kind, array, {0, 0}};
}

// Of what kernels touch, the arguments' arrays and shared memory count: not stacks, nor the machine's own state.
SIM_OWN inline void touch(const void* p, size_t size, Kind kind) {
  if (!record.events || !M->current) return;  // before the first launch there is no machine
  const u64 at = (u64)p, shared = (u64)M->shared;
  if (at - shared < M->shared_size) return tell(kind, 0, kShared, at - shared, size);
  for (int i = 0; i < record.number; ++i)
    if (at >= record.arrays[i].begin && at < record.arrays[i].end)
      return tell(kind, 0, (u8)i, at - record.arrays[i].begin, size);
}
}  // namespace sim

#define SIM_HOOK(SIZE)                                                                      \
  SIM_OWN void __tsan_read##SIZE(void* p) { sim::touch(p, SIZE, sim::READ); }               \
  SIM_OWN void __tsan_write##SIZE(void* p) { sim::touch(p, SIZE, sim::WRITE); }             \
  SIM_OWN void __tsan_unaligned_read##SIZE(void* p) { sim::touch(p, SIZE, sim::READ); }     \
  SIM_OWN void __tsan_unaligned_write##SIZE(void* p) { sim::touch(p, SIZE, sim::WRITE); }
extern "C" {
SIM_HOOK(1) SIM_HOOK(2) SIM_HOOK(4) SIM_HOOK(8) SIM_HOOK(16)
SIM_OWN void __tsan_read_range(void* p, long size) { sim::touch(p, (size_t)size, sim::READ); }
SIM_OWN void __tsan_write_range(void* p, long size) { sim::touch(p, (size_t)size, sim::WRITE); }
SIM_OWN void __tsan_init() {}
SIM_OWN void __tsan_func_entry(void*) {}
SIM_OWN void __tsan_func_exit(void*) {}
SIM_OWN int __tsan_atomic32_load(const volatile int* p, int) { return *p; }
SIM_OWN int __tsan_atomic32_fetch_add(volatile int* p, int v, int) { return (*p += v) - v; }
SIM_OWN bool __tsan_atomic32_compare_exchange_strong(volatile int* p, int* old, int v, int, int) {
  const int was = *p;
  if (was == *old) return *p = v, true;
  return *old = was, false;
}
}
#define SIM_RECORDED                                                                                           \
  SIM_VISIBLE void simulated_record(sim::Event* events, u64 most, const sim::Range* arrays, int number) {      \
    sim::record = {events, most, 0, arrays, number};                                                           \
  }                                                                                                            \
  SIM_VISIBLE u64 simulated_recorded() { return sim::record.count; }
#else
#define SIM_TELL(...) (void)0
#define SIM_RECORDED
#endif
