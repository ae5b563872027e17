// Weights for four-byte dot products.
#ifndef QWEN_VL_CPU_LIMBS_H_
#define QWEN_VL_CPU_LIMBS_H_

#include <cstdint>

namespace qwen_vl {

// Cuts four weights into signed bytes, weight = (c2 * 2^8 + c1) * 2^8 + c0; words are c2, c1, c0
// of the four, first tap in the lowest byte. A weight of at most 1.125 * 2^22 has |c2| <= 73.
inline void cut_into_bytes(const int32_t* weights, int32_t* words) {
  uint32_t packed[3] = {0, 0, 0};
  for (int k = 0; k < 4; ++k) {
    int32_t rest = weights[k];
    for (int limb = 2; limb >= 0; --limb) {
      const int32_t low = static_cast<int8_t>(rest & 0xff);
      packed[limb] |= (static_cast<uint32_t>(low) & 0xff) << (8 * k);
      rest = (rest - low) >> 8;
    }
  }
  for (int limb = 0; limb < 3; ++limb) words[limb] = static_cast<int32_t>(packed[limb]);
}

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_LIMBS_H_
