// SIM_EXPORT(3, rms_norm): a C function simulated_3 that launches the kernel with addresses of its arguments.
#pragma once
namespace sim {
template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(typename std::decay<A>::type*)arguments[I]...);
}
template <class... A>
inline int start(void (*kernel)(A...), const u32* shape, u32 shared, void** arguments, int order, u64 seed) {
  struct Call {
    void (*kernel)(A...);
    void** arguments;
  } one{kernel, arguments};
  const auto body = [](void* p) { call(((Call*)p)->kernel, ((Call*)p)->arguments, std::index_sequence_for<A...>{}); };
  return launch(body, &one, shape, shared, order, seed);
}
}  // namespace sim

#define SIM_VISIBLE extern "C" __attribute__((visibility("default")))
#define SIM_EXPORT(NUMBER, ...)                                                                        \
  SIM_VISIBLE int simulated_##NUMBER(const u32* shape, u32 shared, void** arguments, int order, u64 seed) { \
    return sim::start(__VA_ARGS__, shape, shared, arguments, order, seed);                              \
  }
#define SIM_ERROR \
  SIM_VISIBLE const char* simulated_error() { return sim::M->error; }
