// Barriers, warp operations, atomics. A call whose lanes do not all come, or come with different masks, is an error.
#pragma once
#define threadIdx (sim::M->current->tid)
#define blockIdx (sim::M->block)
#define blockDim (sim::M->threads)
#define gridDim (sim::M->grid)
#define SIM_LINE int line = __builtin_LINE()

namespace sim {
SIM_OWN inline void barrier(int line) {
  Fiber* me = M->current;
  me->status = AT_BARRIER, me->line = line;
  SIM_TELL(BARRIER, line);
  SIM_TSAN(char* at = (char*)&M->generation + (M->generation & 1) + 2 * M->set; __tsan_release(at);)
  leave();
  SIM_TSAN(__tsan_acquire(at);)
}

SIM_OWN inline u64 combine(Op op, const Fiber* warp, u32 mask) {
  u64 all = op == AND || op == ALL ? ~0ull : 0;
  bool first = true;
  for (u32 m = mask; m; m &= m - 1, first = false) {
    const int lane = __builtin_ctz(m);
    const u64 v = warp[lane].value;
    const int a = (int)all, b = (int)v;
    switch (op) {
      case BALLOT: all |= (u64)(v != 0) << lane; break;
      case ANY: all |= v != 0; break;
      case ALL: all = all && v; break;
      case ADD: all += v; break;
      case AND: all &= v; break;
      case OR: all |= v; break;
      case MIN: all = (u64)(first || b < a ? b : a); break;
      case MAX: all = (u64)(first || b > a ? b : a); break;
      default: break;
    }
  }
  return all;
}

// The last lane of `mask` to arrive computes the results of all, and they go on.
SIM_OWN inline u64 together(Op op, u32 mask, u64 value, int source, int line) {
  Fiber *me = M->current, *warp = M->fiber + me->warp * 32;
  Meeting* m = &M->meetings[me->warp];
  if (!(mask >> me->lane & 1)) SIM_FAIL("line %d: lane %u is not in its own mask %08x", line, me->lane, mask);
  if (mask & m->gone)
    SIM_FAIL("line %d: mask %08x names lane %d, which has left", line, mask, __builtin_ctz(mask & m->gone));
  if (!m->here) m->op = op, m->mask = mask, m->line = line;
  if (m->op != op || m->line != line) SIM_FAIL("divergent warp operations at lines %d and %d", line, m->line);
  if (m->mask != mask) SIM_FAIL("line %d: masks %08x and %08x", line, mask, m->mask);
  m->here |= 1u << me->lane;
  SIM_TELL(WARP, line);
  me->status = IN_WARP, me->mask = mask, me->value = value, me->source = source, me->line = line;
  SIM_TSAN(int* turn = &M->warp_generation[me->warp]; char* at = (char*)turn + (*turn & 1) + 2 * M->set;
           if (op == SYNC) __tsan_release(at);)
  if (m->here != mask) {
    leave();
  } else {
    const u64 all = op == SHUFFLE ? 0 : combine(op, warp, mask);
    for (u32 left = mask; left; left &= left - 1) {
      Fiber* f = &warp[__builtin_ctz(left)];
      if (op == SHUFFLE && !(mask >> f->source & 1))
        SIM_FAIL("line %d: shuffle from lane %d outside mask %08x", line, f->source, mask);
      f->result = op == SHUFFLE ? warp[f->source].value : all;
      f->status = RUNS;
    }
    m->here = 0;
    SIM_TSAN(if (op == SYNC) ++*turn;)
  }
  SIM_TSAN(if (op == SYNC) __tsan_acquire(at);)
  return me->result;
}

template <class T>
inline u64 bits(T v) {
  u64 b = 0;
  memcpy(&b, &v, sizeof v);
  return b;
}
template <class T>
inline T value(u64 b) {
  T v;
  memcpy(&v, &b, sizeof v);
  return v;
}
}  // namespace sim

inline void __syncthreads(SIM_LINE) { sim::barrier(line); }
inline void __syncwarp(u32 mask = 0xffffffffu, SIM_LINE) { sim::together(sim::SYNC, mask, 0, 0, line); }
template <class T>
inline T __shfl_sync(u32 mask, T v, int source, SIM_LINE) {
  return sim::value<T>(sim::together(sim::SHUFFLE, mask, sim::bits(v), source & 31, line));
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T v, int lanes, SIM_LINE) {
  return sim::value<T>(sim::together(sim::SHUFFLE, mask, sim::bits(v), (int)sim::M->current->lane ^ lanes, line));
}
inline u32 __ballot_sync(u32 mask, int p, SIM_LINE) { return (u32)sim::together(sim::BALLOT, mask, p != 0, 0, line); }
inline int __any_sync(u32 mask, int p, SIM_LINE) { return (int)sim::together(sim::ANY, mask, p != 0, 0, line); }
inline int __all_sync(u32 mask, int p, SIM_LINE) { return sim::together(sim::ALL, mask, p != 0, 0, line) != 0; }
inline int __reduce_add_sync(u32 mask, int v, SIM_LINE) { return (int)sim::together(sim::ADD, mask, (u32)v, 0, line); }
inline int __reduce_min_sync(u32 mask, int v, SIM_LINE) { return (int)sim::together(sim::MIN, mask, (u32)v, 0, line); }
inline int __reduce_max_sync(u32 mask, int v, SIM_LINE) { return (int)sim::together(sim::MAX, mask, (u32)v, 0, line); }
inline u32 __reduce_or_sync(u32 mask, u32 v, SIM_LINE) { return (u32)sim::together(sim::OR, mask, v, 0, line); }

inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline int atomicMax(int* p, int v) {
  int old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
