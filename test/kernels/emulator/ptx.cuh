// The operations of kernels/cuda/device/ptx.cuh, by their description in the PTX manual.
#ifndef QWEN_VL_CUDA_PTX_CUH_
#define QWEN_VL_CUDA_PTX_CUH_

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace qwen_vl {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies arrive when their group is waited for, not before: a read that comes too early gets junk.
struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
  int size;
};
inline std::vector<std::vector<Copy>>& groups() {
  static const void* owner = nullptr;
  static std::vector<std::vector<std::vector<Copy>>> all;
  if (owner != emulator::block->fibers.data()) {
    owner = emulator::block->fibers.data();
    all.assign(emulator::block->fibers.size(), {{}});
  }
  return all[emulator::block->current];
}
inline void copy_async(uint32_t to, const void* from) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  std::memset(shared + to, 0xcd, 16);
  groups().back().push_back({to, from, 16});
}
inline void copy_async_word(uint32_t to, const void* from, bool there) {
  if (to % 4 || reinterpret_cast<uintptr_t>(from) % 4) std::abort();
  std::memset(shared + to, 0xcd, 4);
  groups().back().push_back({to, there ? from : nullptr, 4});
}
inline void commit_async() { groups().emplace_back(); }
template <int kLeft>
void wait_async() {
  auto& mine = groups();  // the last one is not committed yet
  while (mine.size() > kLeft + 1) {
    for (const Copy& copy : mine.front()) {
      if (copy.from) std::memcpy(shared + copy.to, copy.from, copy.size);
      else std::memset(shared + copy.to, 0, copy.size);
    }
    mine.erase(mine.begin());
  }
}

struct Fragments {
  uint32_t a[4], b[2];
};

template <class T>
float element(uint32_t pair, int which) {
  T value;
  value.bits = static_cast<uint16_t>(pair >> 16 * which);
  return value;
}

template <class T>
void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::exchange(mine, [&](const Fragments* const* all) {
    const int lane = emulator::lane();
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = c[i];
      for (int k = 0; k < 16; ++k) {
        const int quarter = k % 8 / 2, upper = k / 8;
        const Fragments& left = *all[row % 8 * 4 + quarter];
        const Fragments& right = *all[column * 4 + quarter];
        sum += static_cast<double>(element<T>(left.a[row / 8 + 2 * upper], k % 2)) *
               element<T>(right.b[upper], k % 2);
      }
      c[i] = static_cast<float>(sum);
    }
  });
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_PTX_CUH_
