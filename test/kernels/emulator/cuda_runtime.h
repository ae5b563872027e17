// Enough of CUDA to run this repository's kernels on a CPU, one block after the other.
//
// Each thread of a block is a fiber; __syncthreads and the operations of a warp switch between
// them. "Device" memory is memory. It shows wrong bytes, wrong indices, missing barriers that a
// fiber runs past, and deadlocks; it says nothing about speed or about races in one instruction.
#ifndef EMULATOR_CUDA_RUNTIME_H_
#define EMULATOR_CUDA_RUNTIME_H_

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
#define __ldg(p) (*(p))

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace qwen_vl {
// What a kernel declares as its dynamic shared memory; filled with junk before each block.
alignas(128) inline uint8_t shared[232448];
}  // namespace qwen_vl

namespace emulator {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 * 1024;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  dim3 thread;
  bool done = false;
};

struct Barrier {
  int arrived = 0;
  uint64_t round = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<const void*> posted;  // what a lane shows to its warp
  size_t current = 0;
  dim3 index;
  std::function<void()> work;
};

inline Block* block = nullptr;

inline void yield() {
  Fiber& fiber = block->fibers[block->current];
  swapcontext(&fiber.context, &block->scheduler);
}

inline void wait(Barrier& barrier, int count) {
  const uint64_t round = barrier.round;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.round;
    return;
  }
  while (barrier.round == round) yield();
}

inline int lane() { return static_cast<int>(block->current % kWarp); }

inline void wait_warp() { wait(block->warps[block->current / kWarp], kWarp); }

// Shows `mine` to the warp and calls read(their) with what all lanes show.
template <class T, class Read>
void exchange(const T& mine, Read read) {
  block->posted[block->current] = &mine;
  wait_warp();
  const T* theirs[kWarp];
  const size_t first = block->current / kWarp * kWarp;
  for (int i = 0; i < kWarp; ++i) theirs[i] = static_cast<const T*>(block->posted[first + i]);
  read(theirs);
  wait_warp();
}

inline void enter() {
  block->work();
  block->fibers[block->current].done = true;
  yield();
}

inline bool run(dim3 grid, dim3 threads, size_t shared_bytes, const std::function<void()>& work) {
  if (shared_bytes > sizeof(qwen_vl::shared) || threads.x % kWarp) return false;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      Block now;
      block = &now;
      now.index = dim3(x, y);
      now.work = work;
      now.fibers.resize(threads.x);
      now.warps.resize(threads.x / kWarp);
      now.posted.resize(threads.x);
      std::memset(qwen_vl::shared, 0xcd, sizeof(qwen_vl::shared));
      for (size_t i = 0; i < now.fibers.size(); ++i) {
        Fiber& fiber = now.fibers[i];
        fiber.stack.resize(kStack);
        fiber.thread = dim3(static_cast<unsigned>(i), 0, 0);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
      }
      for (bool any = true; any;) {
        any = false;
        for (now.current = 0; now.current < now.fibers.size(); ++now.current) {
          if (now.fibers[now.current].done) continue;
          swapcontext(&now.scheduler, &now.fibers[now.current].context);
          any = true;
        }
      }
    }
  }
  return true;
}

}  // namespace emulator

#define threadIdx (emulator::block->fibers[emulator::block->current].thread)
#define blockIdx (emulator::block->index)

inline void __syncthreads() {
  emulator::wait(emulator::block->all, static_cast<int>(emulator::block->fibers.size()));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  T result;
  emulator::exchange(value, [&](const T* const* all) { result = *all[emulator::lane() ^ mask]; });
  return result;
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = (static_cast<uint64_t>(high) << 32) | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}

inline uintptr_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uintptr_t>(static_cast<const uint8_t*>(p) - qwen_vl::shared);
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
using cudaStream_t = void*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaMalloc(int32_t** p, size_t n) {
  *p = static_cast<int32_t*>(std::malloc(n));
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  std::memcpy(to, from, n);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : 8;
  return cudaSuccess;
}
template <class F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, F) { return cudaSuccess; }
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) { return cudaSuccess; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  return emulator::run(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                       [=] { kernel(arguments...); })
             ? cudaSuccess
             : cudaErrorInvalidValue;
}

#endif  // EMULATOR_CUDA_RUNTIME_H_
