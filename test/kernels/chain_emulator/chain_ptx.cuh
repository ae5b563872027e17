// What kernels/cuda/device/chain_ptx.cuh says in PTX, for the emulator.
#ifndef QWEN_VL_CHAIN_PTX_CUH_
#define QWEN_VL_CHAIN_PTX_CUH_

#include "decode_ptx.cuh"

namespace qwen_vl {
namespace chain {

inline void let_next_start() {}
inline void await_previous() {}
inline void load_weights(uint4& to, const void* from, bool real) {
  if (real) std::memcpy(&to, from, 16);
}
inline void copy_weights(uint32_t to, const void* from) { decode::copy16(to, from, true); }
inline void copy4(uint32_t to, const void* from) {
  std::memcpy(emulator::self().block->shared + to, from, 4);
}
inline float power2(float a) { return std::exp2(a); }
inline float quotient(float a, float b) { return a / b; }

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PTX_CUH_
