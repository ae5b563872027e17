// What kernels/cuda/device/chain_ptx.cuh says in PTX, for the emulator.
#ifndef QWEN_VL_CHAIN_PTX_CUH_
#define QWEN_VL_CHAIN_PTX_CUH_

#include "decode_ptx.cuh"

namespace qwen_vl {
namespace chain {

inline void let_next_start() {}
inline void await_previous() {}
// Each look takes a clock.
inline uint32_t clock32() {
  static uint32_t now = 0;
  return now++;
}
inline void nap() {}
inline void load_weights(uint4& to, const void* from, bool real) {
  if (real) std::memcpy(&to, from, 16);
}
inline void copy_weights(uint32_t to, const void* from) { decode::copy16(to, from, true); }
inline void copy4(uint32_t to, const void* from) {
  std::memcpy(emulator::self().block->shared + to, from, 4);
}
template <bool kSigned>
void mma_codes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
               uint32_t b1) {
  struct Operands { uint32_t a[4], b[2]; };
  const Operands own = {{a0, a1, a2, a3}, {b0, b1}};
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  emulator::exchange(own, [&](const Operands* const* all) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 32; ++k) {
        const int shift = k % 4 * 8;
        const uint32_t a = all[g * 4 + k % 16 / 4]->a[i / 2 + k / 16 * 2] >> shift & 0xff;
        const uint32_t b = all[(2 * t + i % 2) * 4 + k % 16 / 4]->b[k / 16] >> shift & 0xff;
        c[i] += (kSigned ? static_cast<int8_t>(a) : static_cast<int>(a)) * static_cast<int8_t>(b);
      }
    }
  });
}
inline float power2(float a) { return std::exp2(a); }
inline float reciprocal(float a) { return 1.f / a; }
inline float quotient(float a, float b) { return a / b; }

}  // namespace chain
}  // namespace qwen_vl
#endif  // QWEN_VL_CHAIN_PTX_CUH_
