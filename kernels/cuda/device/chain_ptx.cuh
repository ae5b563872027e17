// What the chain of kernels needs besides decode_ptx.cuh. Found by the include path, as that is.
#ifndef QWEN_VL_CHAIN_PTX_CUH_
#define QWEN_VL_CHAIN_PTX_CUH_

#include "decode_ptx.cuh"

namespace qwen_vl {
namespace chain {

// Programmatic dependent launch, from sm_90 on; before it a kernel starts when the one before ends.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when all kernels before this one have ended and what they wrote can be read.
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline uint32_t clock32() { return static_cast<uint32_t>(clock()); }
// Leaves the others alone for some ten nanoseconds.
__device__ inline void nap() { __nanosleep(20); }

// 16 bytes; `to` stays as it is where there is nothing to load.
__device__ inline void load_weights(uint4& to, const void* from, bool real) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(static_cast<int>(real))
      : "memory");
}
// 16 and 4 bytes to shared memory, asynchronously.
__device__ inline void copy_weights(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ inline void copy4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// 16 x 32 codes, signed or not, times 32 x 8 signed bytes.
template <bool kSigned>
__device__ inline void mma_codes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
// 2^a to two units in the last place; small results are zero.
__device__ inline float power2(float a) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}
// 1 / a to one unit in the last place; zero for a beyond 2^126.
__device__ inline float reciprocal(float a) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}
// a / b to two units in the last place; zero for b beyond 2^126.
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PTX_CUH_
