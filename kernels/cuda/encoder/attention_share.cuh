// How blocks share attention_sm90.cu's work: every block takes the same number of steps (a tile of
// queries against a tile of keys), whatever that means for the tiles of queries. Those that begin in
// one block and end in others are finished by the first, which waits for what the others leave in
// device memory (stream-K, Osama et al. 2023; the division of keys of Flash-Decoding).
//
// No block waits for one that waits for it: what a block leaves is the first that it works on.
#ifndef QWEN_VL_CUDA_ENCODER_ATTENTION_SHARE_CUH_
#define QWEN_VL_CUDA_ENCODER_ATTENTION_SHARE_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qwen_vl {

// Part of a tile of queries of one head: against its tiles of keys first_step to end_step.
struct Part {
  int first_query, end_query, first_key, end_key, head;
  int first_step, end_step, steps;

  __device__ bool begins() const { return first_step == 0; }
  __device__ bool ends() const { return end_step == steps; }
};

// What a block works on, part by part. Of the list of tiles (qwen_vl_attend_segments), which are
// another kernel's, the first of a segment tells where its rows begin and end.
template <int kQueries, int kKeys>
class Share {
 public:
  // For all threads of a warp. Fewer steps than `least` are no block's share, unless it is whole tiles
  // of queries that it takes.
  __device__ Share(const int4* list, int tiles, int heads, int least, int lane)
      : list_(list), tiles_(tiles) {
    int steps = 0, filled = 0;
    for (int i = lane; i < tiles; i += 32) {
      const int4 tile = list[i];
      steps += steps_of(tile);
      filled += query_tiles(tile);
    }
#pragma unroll
    for (int i = 16; i; i /= 2) {
      steps += __shfl_xor_sync(~0u, steps, i);
      filled += __shfl_xor_sync(~0u, filled, i);
    }
    all_ = steps * heads;
    blocks_ = min(static_cast<int>(gridDim.x), max(filled * heads, all_ / least));
    if (static_cast<int>(blockIdx.x) >= blocks_) return;
    left_ = size(blockIdx.x);
    const int first = start(blockIdx.x);
    head_ = first / steps;
    int before = first % steps;
    // The segment that holds step `before`, 32 entries at a time.
    for (int i = 0; i < tiles; i += 32) {
      int sum = i + lane < tiles ? steps_of(list[i + lane]) : 0;
#pragma unroll
      for (int k = 1; k < 32; k *= 2) {
        const int other = __shfl_up_sync(~0u, sum, k);
        if (lane >= k) sum += other;
      }
      const unsigned after = __ballot_sync(~0u, sum > before);
      if (after) {
        const int found = __ffs(after) - 1;
        const int skipped = __shfl_sync(~0u, sum, found > 0 ? found - 1 : 0);
        entry_ = i + found;
        step_ = before - (found > 0 ? skipped : 0);
        break;
      }
      before -= __shfl_sync(~0u, sum, 31);
    }
  }

  // False: the share is done.
  __device__ bool next(Part* part) {
    if (!left_) return false;
    int4 tile = list_[entry_];
    while (step_ >= steps_of(tile)) {
      step_ = 0;
      if (++entry_ == tiles_) entry_ = 0, ++head_;
      tile = list_[entry_];
    }
    const int steps = key_tiles(tile), first = step_ % steps;
    const int end = min(steps, first + left_);
    const int first_query = tile.z + step_ / steps * kQueries;
    *part = {first_query, min(first_query + kQueries, tile.w), tile.z, tile.w, head_, first, end, steps};
    left_ -= end - first;
    step_ += end - first;
    return true;
  }

  // Steps of a block.
  __device__ int size(int block) const { return start(block + 1) - start(block); }

 private:
  __device__ static int key_tiles(int4 tile) { return (tile.w - tile.z + kKeys - 1) / kKeys; }
  __device__ static int query_tiles(int4 tile) {
    const bool first = tile.x == tile.z && tile.x < tile.y;
    return first ? (tile.w - tile.z + kQueries - 1) / kQueries : 0;
  }
  __device__ static int steps_of(int4 tile) { return query_tiles(tile) * key_tiles(tile); }
  __device__ int start(int block) const {
    return static_cast<int>(static_cast<int64_t>(all_) * block / blocks_);
  }

  const int4* list_;
  int tiles_, all_, blocks_, left_ = 0, head_ = 0;
  int entry_ = 0, step_ = 0;  // segment, and step of all that its queries take
};

// What groups of threads leave for another block: a flag, which is 0 before and after a launch, and
// `kNumbers` floats of each thread.
template <int kNumbers, int kThreads, int kGroups>
class Exchange {
 public:
  static constexpr size_t bytes(int blocks) {
    return static_cast<size_t>(blocks) * kGroups * (kFlagBytes + kNumbers * kThreads * 4);
  }

  __device__ Exchange(void* workspace, int group, int thread, int meeting)
      : flags_(static_cast<uint8_t*>(workspace)),
        numbers_(reinterpret_cast<float4*>(flags_ + gridDim.x * kGroups * kFlagBytes)),
        group_(group), thread_(thread), meeting_(meeting) {}

  __device__ void leave(const float (&numbers)[kNumbers]) const {
    float4* const to = place(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4) {
      to[i / 4 * kThreads] = {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
    }
    __threadfence();
    meet();
    if (thread_ == 0) {
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag(blockIdx.x)) : "memory");
    }
  }

  // Waits for what a block leaves.
  __device__ void take(int block, float (&numbers)[kNumbers]) const {
    if (thread_ == 0) {
      uint32_t there;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag(block)) : "memory");
      } while (!there);
    }
    meet();
    const float4* const from = place(block);
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4) {
      const float4 four = __ldcg(from + i / 4 * kThreads);
      numbers[i] = four.x, numbers[i + 1] = four.y, numbers[i + 2] = four.z, numbers[i + 3] = four.w;
    }
    if (thread_ == 0) *reinterpret_cast<volatile uint32_t*>(flag(block)) = 0;
  }

 private:
  static constexpr int kFlagBytes = 16;
  static_assert(kNumbers % 4 == 0, "16 bytes at a time");

  __device__ uint8_t* flag(int block) const {
    return flags_ + (block * kGroups + group_) * kFlagBytes;
  }
  __device__ float4* place(int block) const {
    return numbers_ + static_cast<size_t>(block * kGroups + group_) * (kNumbers / 4 * kThreads) + thread_;
  }
  __device__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(meeting_), "n"(kThreads) : "memory");
  }

  uint8_t* flags_;
  float4* numbers_;
  int group_, thread_, meeting_;
};

}  // namespace qwen_vl
#endif  // QWEN_VL_CUDA_ENCODER_ATTENTION_SHARE_CUH_
