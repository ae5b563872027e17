// Enough of CUDA to run the decode step on a CPU: all blocks of a launch at once.
//
// Each thread is a fiber; barriers of blocks and the operations of warps switch between them, and
// so does a look at the counter on which blocks wait for each other. "Device" memory is memory. It
// shows wrong numbers, wrong indices, barriers that some do not reach; it says nothing about speed
// or about races between two barriers.
#ifndef EMULATOR_CUDA_RUNTIME_H_
#define EMULATOR_CUDA_RUNTIME_H_

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::isfinite;
using std::max;
using std::min;

struct Index { unsigned x; };
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kWarp = 32;
constexpr size_t kStack = 96 * 1024;

struct Meeting {
  int arrived = 0;
  uint64_t round = 0;
};

struct Block {
  std::vector<uint8_t> memory;
  Meeting all;
  std::vector<Meeting> warps;
  std::vector<const void*> posted;  // what a lane shows to its warp
  uint8_t* shared = nullptr;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  Index thread = {0}, index = {0};
  bool done = false;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline size_t current = 0;
inline Index grid, threads;
inline std::function<void()> work;

inline Fiber& self() { return fibers[current]; }
inline void yield() { swapcontext(&self().context, &scheduler); }
inline int lane() { return static_cast<int>(self().thread.x % kWarp); }

inline void meet(Meeting& meeting, int count) {
  const uint64_t round = meeting.round;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  while (meeting.round == round) yield();
}
inline void meet_warp() { meet(self().block->warps[self().thread.x / kWarp], kWarp); }

// Shows `mine` to the warp and calls read(their) with what all lanes show.
template <class T, class Read>
void exchange(const T& mine, Read read) {
  Block& block = *self().block;
  block.posted[self().thread.x] = &mine;
  meet_warp();
  const T* theirs[kWarp];
  const size_t first = self().thread.x / kWarp * kWarp;
  for (int i = 0; i < kWarp; ++i) theirs[i] = static_cast<const T*>(block.posted[first + i]);
  read(theirs);
  meet_warp();
}

inline void enter() {
  work();
  self().done = true;
  yield();
}

// Returns whether all threads came to their end within so many turns.
inline bool run(unsigned blocks, unsigned block_threads, size_t shared_bytes, uint64_t turns,
                const std::function<void()>& kernel) {
  grid.x = blocks;
  threads.x = block_threads;
  work = kernel;
  std::vector<Block> all(blocks);
  fibers.clear();
  fibers.resize(blocks * block_threads);
  for (size_t i = 0; i < fibers.size(); ++i) {
    Block& block = all[i / block_threads];
    if (block.memory.empty()) {
      block.memory.assign(shared_bytes + 128, 0xcd);
      const uintptr_t at = reinterpret_cast<uintptr_t>(block.memory.data());
      block.shared = block.memory.data() + (128 - at % 128) % 128;
      block.warps.resize(block_threads / kWarp);
      block.posted.resize(block_threads);
    }
    Fiber& fiber = fibers[i];
    fiber.block = &block;
    fiber.index.x = static_cast<unsigned>(i / block_threads);
    fiber.thread.x = static_cast<unsigned>(i % block_threads);
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  bool any = true;
  for (uint64_t turn = 0; any && turn < turns; ++turn) {
    any = false;
    for (current = 0; current < fibers.size(); ++current) {
      if (fibers[current].done) continue;
      swapcontext(&scheduler, &fibers[current].context);
      any = true;
    }
  }
  fibers.clear();
  return !any;
}

}  // namespace emulator

#define threadIdx (emulator::self().thread)
#define blockIdx (emulator::self().index)
#define gridDim (emulator::grid)

inline void __syncthreads() {
  emulator::meet(emulator::self().block->all, static_cast<int>(emulator::threads.x));
}
inline void __syncwarp() { emulator::meet_warp(); }
inline void __threadfence_system() {}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  T result;
  emulator::exchange(value, [&](const T* const* all) { result = *all[emulator::lane() ^ mask]; });
  return result;
}
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}
inline float __uint_as_float(uint32_t v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t v;
  std::memcpy(&v, &f, 4);
  return v;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(both >> (which >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
}
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline long long clock64() { return 0; }
inline int atomicExch(int* to, int value) {
  const int old = *to;
  *to = value;
  return old;
}

#endif  // EMULATOR_CUDA_RUNTIME_H_
