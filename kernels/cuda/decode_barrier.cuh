// All blocks of a launch wait for each other.
#ifndef QWEN_VL_DECODE_BARRIER_CUH_
#define QWEN_VL_DECODE_BARRIER_CUH_

#include "decode_tables.cuh"

namespace qwen_vl {
namespace decode {

// A counter that only grows: every launch adds a whole number of rounds, so none resets it. A
// launch whose blocks do not all run (it must be a cooperative one) would wait for ever; after
// about a second a block gives up, says so, and waits no more.
class Barrier {
 public:
  static constexpr long long kPatience = 2000000000;  // clocks

  __device__ explicit Barrier(const Params& p, Tables& tables) : p_(p), tables_(tables) {
    if (threadIdx.x == kServiceThread) {
      // Before this block has arrived, the first round cannot have ended.
      const unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(p.arrived);
      tables.target = seen - seen % gridDim.x;
      tables.given_up = 0;
    }
  }

  // Tells the others that what this block wrote can be read.
  __device__ void arrive() {
    __syncthreads();
    if (threadIdx.x == kServiceThread) add_release(p_.arrived);
  }

  // Waits until all others have told so.
  __device__ void wait() {
    if (threadIdx.x == kServiceThread) {
      const unsigned long long target = tables_.target + gridDim.x;
      tables_.target = target;
      const long long start = clock64();
      while (!tables_.given_up && load_acquire(p_.arrived) < target) {
        if (clock64() - start > kPatience) {
          tables_.given_up = 1;
          atomicExch(p_.stuck, 1);
        }
      }
    }
    __syncthreads();
  }

 private:
  const Params& p_;
  Tables& tables_;
};

}  // namespace decode
}  // namespace qwen_vl
#endif  // QWEN_VL_DECODE_BARRIER_CUH_
