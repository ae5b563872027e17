// What kernels/cuda/device/decode_ptx.cuh says in PTX, for the emulator.
#ifndef QWEN_VL_DECODE_PTX_CUH_
#define QWEN_VL_DECODE_PTX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define QWEN_VL_DYNAMIC_SHARED(name) uint8_t* const name = emulator::self().block->shared

namespace qwen_vl {
namespace decode {

inline uint32_t shared_of(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulator::self().block->shared);
}

// Copies are done at the last moment that their group may take, as junk before it.
struct Pending {
  uint32_t to;
  const void* from;
  bool whole;
};
inline std::vector<std::vector<std::vector<Pending>>> groups;  // of each thread, oldest first

inline std::vector<std::vector<Pending>>& mine() {
  if (groups.size() < emulator::fibers.size()) groups.resize(emulator::fibers.size());
  auto& own = groups[emulator::current];
  if (own.empty()) own.emplace_back();
  return own;
}
inline void copy16(uint32_t to, const void* from, bool whole) {
  std::memset(emulator::self().block->shared + to, 0xcd, 16);
  mine().back().push_back({to, from, whole});
}
inline void commit() { mine().emplace_back(); }
template <int kLeft>
void wait_groups() {
  auto& own = mine();
  while (own.size() > kLeft + 1) {
    for (const Pending& p : own.front()) {
      uint8_t* to = emulator::self().block->shared + p.to;
      if (p.whole) {
        std::memcpy(to, p.from, 16);
      } else {
        std::memset(to, 0, 16);
      }
    }
    own.erase(own.begin());
  }
}
inline void prefetch_l2(const void*) {}
inline int64_t clock_ns() { return 1; }

inline uint32_t transpose8(uint32_t a) {
  const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
  uint32_t result = 0;
  emulator::exchange(a, [&](const uint32_t* const* all) {
    for (int j = 0; j < 2; ++j) {
      const uint32_t v = *all[(column + j) * 4 + row / 2];
      result |= (v >> (row % 2 * 16) & 0xffffu) << (16 * j);
    }
  });
  return result;
}

template <class T>
float half_of(uint32_t v, int high) {
  const uint16_t bits = static_cast<uint16_t>(v >> (16 * high));
  T value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}
template <class T>
void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1) {
  struct Operands { uint32_t a[4], b[2]; };
  const Operands own = {{a0, a1, a2, a3}, {b0, b1}};
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  emulator::exchange(own, [&](const Operands* const* all) {
    for (int i = 0; i < 4; ++i) {
      const int high = i / 2, column = 2 * t + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32_t a = all[g * 4 + k % 8 / 2]->a[high + k / 8 * 2];
        const uint32_t b = all[column * 4 + k % 8 / 2]->b[k / 8];
        c[i] += half_of<T>(a, k % 2) * half_of<T>(b, k % 2);
      }
    }
  });
}
inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
  mma<__nv_bfloat16>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma_fp16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
  mma<__half>(c, a0, a1, a2, a3, b0, b1);
}
template <uint32_t kMask, uint32_t kBits>
uint32_t and_or(uint32_t a) { return (a & kMask) | kBits; }

inline void add_release(unsigned long long* to) { ++*to; }
inline unsigned long long load_acquire(const unsigned long long* from) {
  emulator::yield();
  return *from;
}

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_PTX_CUH_
