// The instructions of the decode step that C++ has no name for; all of the sm_80 class. Found by
// the include path, so that test/kernels/decode_emulator can put its own in their place.
#ifndef QWEN_VL_DECODE_PTX_CUH_
#define QWEN_VL_DECODE_PTX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define QWEN_VL_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

namespace qwen_vl {
namespace decode {

__device__ inline uint32_t shared_of(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes to shared memory, or zeros.
__device__ inline void copy16(uint32_t to, const void* from, bool whole) {
  const int bytes = whole ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
__device__ inline void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ inline int64_t clock_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// An 8x8 matrix of 16-bit elements, row by row over the lanes, transposed.
__device__ inline uint32_t transpose8(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

__device__ inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_fp16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// (a & mask) | bits in one instruction.
template <uint32_t kMask, uint32_t kBits>
__device__ inline uint32_t and_or(uint32_t a) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(kMask), "n"(kBits));
  return d;
}

// Adds one after everything that this thread's block wrote before its last barrier.
__device__ inline void add_release(unsigned long long* to) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(1ull) : "memory");
}
__device__ inline unsigned long long load_acquire(const unsigned long long* from) {
  unsigned long long seen;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
  return seen;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_PTX_CUH_
