// Which instruction sets this machine runs.
#include "ops.h"
#include "qwen_vl_kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

namespace qwen_vl {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
bool has_neon() { return false; }
#endif

}  // namespace

int available_isas() {
  int bits = 1 << QWEN_VL_ISA_SCALAR;
  if (avx2_ops() && has_avx2()) bits |= 1 << QWEN_VL_ISA_AVX2;
  if (avx512_ops() && has_avx512()) bits |= 1 << QWEN_VL_ISA_AVX512;
  if (neon_ops() && has_neon()) bits |= 1 << QWEN_VL_ISA_NEON;
  return bits;
}

const Ops* find_ops(int isa) {
  const Ops* const all[] = {scalar_ops(), avx2_ops(), avx512_ops(), neon_ops()};
  const int bits = available_isas();
  if (isa == QWEN_VL_ISA_AUTO) {
    // The enumeration grows with the speed on each architecture.
    for (int i = QWEN_VL_ISA_NEON; i > QWEN_VL_ISA_SCALAR; --i) {
      if (bits >> i & 1) return all[i];
    }
    return all[QWEN_VL_ISA_SCALAR];
  }
  if (isa < 0 || isa > QWEN_VL_ISA_NEON || !(bits >> isa & 1)) return nullptr;
  return all[isa];
}

}  // namespace qwen_vl
