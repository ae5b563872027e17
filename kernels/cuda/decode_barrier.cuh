// All blocks of a launch wait for each other.
#ifndef QWEN_VL_DECODE_BARRIER_CUH_
#define QWEN_VL_DECODE_BARRIER_CUH_

#include "decode_types.cuh"

namespace qwen_vl {
namespace decode {

// A counter that only grows: every launch adds a whole number of rounds, so none resets it. A
// launch whose blocks do not all run (it must be a cooperative one) would wait for ever; after
// about a second a block gives up, says so, and waits no more.
class Barrier {
 public:
  static constexpr long long kPatience = 2000000000;  // clocks

  __device__ Barrier(unsigned long long* arrived, int* stuck) : arrived_(arrived), stuck_(stuck) {
    if (threadIdx.x == 0) {
      // Before this block has arrived, the first round cannot have ended.
      const unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(arrived);
      target_ = seen - seen % gridDim.x;
    }
  }

  // Tells the others that what this block wrote can be read.
  __device__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(arrived_), "l"(1ull)
                   : "memory");
    }
  }

  // Waits until all others have told so.
  __device__ void wait() {
    if (threadIdx.x == 0) {
      target_ += gridDim.x;
      const long long start = clock64();
      unsigned long long seen;
      while (!given_up_) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrived_) : "memory");
        if (seen >= target_) break;
        if (clock64() - start > kPatience) {
          given_up_ = true;
          atomicExch(stuck_, 1);
        }
      }
    }
    __syncthreads();
  }

 private:
  unsigned long long* const arrived_;
  int* const stuck_;
  unsigned long long target_ = 0;
  bool given_up_ = false;
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_BARRIER_CUH_
