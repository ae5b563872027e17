// The first token of an answer in one launch: the norm of the prompt's last hidden state, the product
// with the vocabulary and the greedy choice. The matrix is read once (467 MB of the 2B model); logits
// are not written.
//
//     a block      one a multiprocessor; makes the normed row for itself, in shared memory
//     a warp       four rows of the matrix at a time, every lane 16 bytes of each; the four sums are
//                  taken together, so that a group of eight lanes ends with one of them
//     the choice   best, next best, sum of exponentials: of a lane, a warp, a block; the block that
//                  comes last takes it over all blocks (counter as in CUDA's threadFenceReduction)
#include "qwen_vl_prompt.h"
#include "status.h"
#include "vector.cuh"

namespace qwen_vl {
namespace {

constexpr int kThreads = 384, kWarps = kThreads / 32;
constexpr int kRows = 4;      // of a warp at a time
constexpr int kLane = 256;    // elements that the lanes of a warp hold together
constexpr int kMostWidth = 8192;
constexpr int kMostBlocks = 1024;

// Of the logits seen so far; empty where `sum` is 0.
struct Best {
  float value = -INFINITY, second = -INFINITY;
  float sum = 0.0f;  // of exp(logit - value)
  int index = 0;
  int finite = 1;

  __device__ void take(float logit, int at) {
    finite &= isfinite(logit) ? 1 : 0;
    if (logit > value) {
      second = value;
      sum = sum * __expf(value - logit) + 1.0f;
      value = logit;
      index = at;
    } else {
      second = fmaxf(second, logit);
      sum += __expf(logit - value);
    }
  }

  __device__ void merge(const Best& b) {
    finite &= b.finite;
    if (b.sum == 0.0f) return;
    const bool other = sum == 0.0f || b.value > value || (b.value == value && b.index < index);
    const Best& high = other ? b : *this;
    const Best& low = other ? *this : b;
    Best merged = high;
    merged.finite = finite;
    if (low.sum != 0.0f) {
      merged.second = fmaxf(high.second, low.value);
      merged.sum = high.sum + low.sum * __expf(low.value - high.value);
    }
    *this = merged;
  }

  __device__ Best from(int lane_step) const {
    Best b;
    b.value = __shfl_xor_sync(~0u, value, lane_step);
    b.second = __shfl_xor_sync(~0u, second, lane_step);
    b.sum = __shfl_xor_sync(~0u, sum, lane_step);
    b.index = __shfl_xor_sync(~0u, index, lane_step);
    b.finite = __shfl_xor_sync(~0u, finite, lane_step);
    return b;
  }
};

struct Workspace {
  unsigned arrived;
  Best parts[kMostBlocks];
};

template <class T>
struct First {
  const T* x;
  const T* norm;
  const T* head;
  Workspace* workspace;
  double* out;
  int vocab, width;
  float eps;
};

// x, normed and rounded as the norm's kernel does it, into shared memory.
template <class T>
__device__ inline void make_row(const First<T>& p, T* row, float* shared) {
  float squares = 0.0f;
  for (int i = threadIdx.x * 8; i < p.width; i += kThreads * 8) {
    const Eight x = Eight::load(p.x + i);
#pragma unroll
    for (float v : x.v) squares += v * v;
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) squares += shared[i];
  const float factor = rsqrtf(squares / p.width + p.eps);
  for (int i = threadIdx.x * 8; i < p.width; i += kThreads * 8) {
    Eight x = Eight::load(p.x + i);
    const Eight weight = Eight::load(p.norm + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.v[j] *= factor * weight.v[j];
    x.store(row + i);
  }
  __syncthreads();
}

// Sums over the lanes of four numbers: lanes of equal (lane & 24) get the same one, whose number is
// returned by row_of.
__device__ inline float sum_of_four(const float (&s)[kRows], int lane) {
  const bool upper = lane & 16, odd = lane & 8;
  const float a = (upper ? s[1] : s[0]) + __shfl_xor_sync(~0u, upper ? s[0] : s[1], 16);
  const float b = (upper ? s[3] : s[2]) + __shfl_xor_sync(~0u, upper ? s[2] : s[3], 16);
  float sum = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
  for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}
__device__ inline int row_of(int lane) { return (lane & 16 ? 1 : 0) + (lane & 8 ? 2 : 0); }

// kPiece: chunks of kLane elements whose loads are under way together; their number divides a row's.
template <class T, int kPiece>
__global__ void __launch_bounds__(kThreads, 1) first_token(const First<T> p) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ float sums[kWarps];
  __shared__ Best bests[kWarps];
  __shared__ bool last;
  T* const row = reinterpret_cast<T*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  make_row(p, row, sums);

  Best best;
  const int stride = gridDim.x * kWarps * kRows;
  for (int first = (blockIdx.x * kWarps + warp) * kRows; first < p.vocab; first += stride) {
    float dot[kRows] = {};
    for (int at = lane * 8; at < p.width; at += kPiece * kLane) {
      uint4 raw[kRows][kPiece];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        // Rows behind the end are those before it: read, but not counted.
        const T* const from =
            p.head + static_cast<int64_t>(min(first + r, p.vocab - 1)) * p.width + at;
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          raw[r][i] = __ldcs(reinterpret_cast<const uint4*>(from + i * kLane));
        }
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const Eight x = Eight::load(row + at + i * kLane);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Eight w = Eight::of<T>(raw[r][i]);
#pragma unroll
          for (int j = 0; j < 8; ++j) dot[r] = fmaf(w.v[j], x.v[j], dot[r]);
        }
      }
    }
    const float logit = sum_of_four(dot, lane);
    if (first + row_of(lane) < p.vocab) best.take(logit, first + row_of(lane));
  }
#pragma unroll
  for (int step = 8; step <= 16; step *= 2) best.merge(best.from(step));
  if (lane == 0) bests[warp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 1; i < kWarps; ++i) best.merge(bests[i]);
    p.workspace->parts[blockIdx.x] = best;
    __threadfence();
    last = atomicAdd(&p.workspace->arrived, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || warp) return;
  __threadfence();
  Best all;
  for (int i = lane; i < static_cast<int>(gridDim.x); i += 32) {
    const volatile Best& part = p.workspace->parts[i];
    Best other;
    other.value = part.value, other.second = part.second, other.sum = part.sum;
    other.index = part.index, other.finite = part.finite;
    all.merge(other);
  }
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) all.merge(all.from(step));
  if (lane == 0) {
    p.out[0] = all.index;
    p.out[1] = 1.0 / all.sum;
    p.out[2] = static_cast<double>(all.value) - all.second;
    p.out[3] = all.finite;
    p.workspace->arrived = 0;
  }
}

int processors() {
  int device, count;
  if (cudaGetDevice(&device) ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) {
    cudaGetLastError();
    return 0;
  }
  return count < kMostBlocks ? count : kMostBlocks;
}

template <class T>
void launch(const First<T>& p, cudaStream_t stream) {
  const int chunks = p.width / kLane;
  const auto run = [&](auto kernel) {
    kernel<<<processors(), kThreads, p.width * 2, stream>>>(p);
  };
  if (chunks % 6 == 0) {
    run(first_token<T, 6>);
  } else if (chunks % 7 == 0) {
    run(first_token<T, 7>);
  } else {
    run(first_token<T, 1>);
  }
}

}  // namespace
}  // namespace qwen_vl

using namespace qwen_vl;

extern "C" uint64_t qwen_vl_first_token_workspace(void) {
  return processors() ? sizeof(Workspace) : 0;
}

extern "C" int qwen_vl_first_token(const qwen_vl_rows* shape, const void* x, const void* norm,
                                   float eps, const void* head, void* workspace, double* out,
                                   void* stream, char* message, size_t size) {
  if (!shape) return refuse(QWEN_VL_NULL_POINTER, message, size, "first token: a null pointer");
  int status = check_half(shape->dtype, "first token", message, size);
  if (!status) {
    status = check_pointers("first token", message, size, x, norm, head,
                            static_cast<const void*>(workspace), static_cast<const void*>(out));
  }
  if (status) return status;
  if (shape->rows < 1 || shape->width < kLane || shape->width % kLane || shape->width > kMostWidth) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "first token of %d with a width of %d: a multiple of %d up to %d is possible",
                  shape->rows, shape->width, kLane, kMostWidth);
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    launch(First<T>{static_cast<const T*>(x), static_cast<const T*>(norm),
                    static_cast<const T*>(head), static_cast<Workspace*>(workspace), out,
                    shape->rows, shape->width, eps},
           static_cast<cudaStream_t>(stream));
  };
  if (shape->dtype == QWEN_VL_BF16) {
    run(__nv_bfloat16());
  } else {
    run(__half());
  }
  return launched("first token", message, size);
}
