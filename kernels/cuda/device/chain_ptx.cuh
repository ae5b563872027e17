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
// 2^a to two units in the last place; small results are zero.
__device__ inline float power2(float a) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}
// a / b to two units in the last place; zero for b beyond 2^126.
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PTX_CUH_
