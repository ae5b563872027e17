// The C interface of the CUDA kernels.
//
// Code of the sm_80 class throughout (cp.async, ldmatrix, mma.sync): the same for Orin (sm_87) and
// for the H200 (sm_90) that it is measured on.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "../cpu/check.h"
#include "embed.cuh"
#include "strip.cuh"

namespace qwen_vl {

constexpr int kPatchThreads = 256;

// What a block may take of shared memory for a strip: an Orin's 163 KB less what embed() has beside it.
constexpr int kStripBytes = 64 * 1024;

// Where a patch goes.
struct Target {
  uint8_t* out;
  int64_t patch_stride;
  int64_t channel_stride;

  __device__ void put(int patch, int feature, uint32_t bytes) const {
    *reinterpret_cast<uint32_t*>(out + patch * patch_stride + feature / kArea * channel_stride +
                                 feature % kArea) = bytes;
  }
};

// A strip a block: from the frame to patches in memory.
__global__ void __launch_bounds__(kPatchThreads)
    make_patches(Picture picture, StripPlan plan, int strips, Target target) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int row = blockIdx.x / strips, column = blockIdx.x % strips * kStrip;
  const int first = row * picture.unit_columns + column;
  const int units = min(kStrip, picture.unit_columns - column);
  uint8_t* const patches = shared;
  resample_strip<kPatchThreads>(picture, plan, first, units, shared + kStrip * kUnitBytes, patches,
                                QWEN_VL_FEATURES);
  __syncthreads();
  constexpr int kWords = QWEN_VL_FEATURES / 4;
  for (int i = threadIdx.x; i < units * kUnitWords; i += kPatchThreads) {
    target.put(first * 4 + i / kWords, i % kWords * 4, reinterpret_cast<uint32_t*>(patches)[i]);
  }
}

// A unit a block, in chunks: for reductions so strong that no strip fits into shared memory.
__global__ void __launch_bounds__(kPatchThreads)
    make_patches_in_chunks(Picture picture, Target target) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int unit = blockIdx.x;
  resample_unit<kPatchThreads>(picture, unit, shared, [&](int word, uint32_t bytes) {
    target.put(unit * 4 + word / (kUnitWords / 4), word % (kUnitWords / 4) * 4, bytes);
  });
}

}  // namespace qwen_vl

using namespace qwen_vl;

namespace {

constexpr size_t kMaxTables = 16;

// One axis's tables on the device.
struct Tables {
  Axis axis;
  int32_t* memory = nullptr;

  Tables() = default;
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;
  ~Tables() { cudaFree(memory); }

  cudaError_t upload() {
    const size_t n = axis.start.size(), w = axis.weights.size();
    cudaError_t error = cudaMalloc(&memory, (2 * n + w) * sizeof(int32_t));
    const std::vector<int32_t>* parts[] = {&axis.start, &axis.end, &axis.weights};
    size_t at = 0;
    for (const auto* part : parts) {
      if (error) break;
      error = cudaMemcpy(memory + at, part->data(), part->size() * sizeof(int32_t),
                         cudaMemcpyHostToDevice);
      at += part->size();
    }
    return error;
  }
  DeviceAxis view() const {
    const size_t n = axis.start.size();
    return {memory, memory + n, memory + 2 * n, axis.taps};
  }
};

int failed(cudaError_t error, const char* what, char* message, size_t size) {
  if (error == cudaSuccess) return QWEN_VL_OK;
  cudaGetLastError();  // so that the next call does not report it again
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "%s: %s (CUDA error %d)", what,
                cudaGetErrorString(error), static_cast<int>(error));
}

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                          cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

bool aligned(const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

}  // namespace

struct qwen_vl_cuda {
  int device = 0;
  int multiprocessors = 0;
  std::vector<std::shared_ptr<Tables>> recent;
  std::mutex mutex;

  cudaError_t tables(int in, int out, std::shared_ptr<Tables>* found) {
    for (size_t i = 0; i < recent.size(); ++i) {
      if (recent[i]->axis.in == in && recent[i]->axis.out == out) {
        std::rotate(recent.begin(), recent.begin() + i, recent.begin() + i + 1);
        *found = recent.front();
        return cudaSuccess;
      }
    }
    auto made = std::make_shared<Tables>();
    made->axis = make_axis(in, out);
    const cudaError_t error = made->upload();
    if (error) return error;
    recent.insert(recent.begin(), made);
    // Freeing waits for the device, so that no kernel that is under way loses its tables.
    if (recent.size() > kMaxTables) recent.pop_back();
    *found = made;
    return cudaSuccess;
  }
};

namespace {

// Fills `plan` for strips of kStrip units, or of one, whichever fits; with bytes 0 none does.
int make_picture(qwen_vl_cuda* handle, const qwen_vl_frame& frame, const qwen_vl_patches& patches,
                 int strip, Picture* picture, StripPlan* plan, char* message, size_t size) {
  std::shared_ptr<Tables> x, y;
  cudaError_t error = handle->tables(frame.width, patches.width, &x);
  if (!error) error = handle->tables(frame.height, patches.height, &y);
  if (error) return failed(error, "resampling tables", message, size);
  Picture& p = *picture;
  p = {};
  for (int i = 0; i < frame.planes; ++i) {
    p.data[i] = frame.plane[i].data;
    p.step[i] = frame.plane[i].step;
  }
  p.size = static_cast<int64_t>(frame.plane[0].size);
  p.encoding = frame.encoding;
  p.width = frame.width;
  p.height = frame.height;
  const int bytes = layout_of(frame.encoding)->bytes_per_pixel;
  p.channels = bytes ? bytes : 3;
  p.reversed = frame.encoding == QWEN_VL_BGR8 || frame.encoding == QWEN_VL_BGRA8;
  p.columns_first = columns_first(frame, patches);
  p.unit_columns = patches.width / kUnit;
  p.x = x->view();
  p.y = y->view();
  *plan = plan_strip(x->axis, y->axis, p.channels, p.columns_first, strip);
  if (plan->bytes <= kStripBytes) return QWEN_VL_OK;
  *plan = {};
  const int64_t need = smallest_stage(x->axis, y->axis, p.channels, p.columns_first);
  if (need > kStageBytes) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "%dx%d to %dx%d needs %lld bytes of shared memory, %d are there: use the CPU",
                  frame.width, frame.height, patches.width, patches.height,
                  static_cast<long long>(need), kStageBytes);
  }
  return QWEN_VL_OK;
}

int check_projection(const qwen_vl_projection* p, const void* out, int64_t units, char* message,
                     size_t size) {
  if (units < 1 || units > (int64_t{1} << 24)) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%lld units: 1 to %d are possible",
                  static_cast<long long>(units), 1 << 24);
  }
  if (!p || !p->weight || !out) {
    return refuse(QWEN_VL_NULL_POINTER, message, size,
                  "projection, its weight or the place for embeddings is a null pointer");
  }
  if (p->features != QWEN_VL_FEATURES && p->features != 2 * QWEN_VL_FEATURES) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "%d features: %d and %d are possible",
                  p->features, QWEN_VL_FEATURES, 2 * QWEN_VL_FEATURES);
  }
  if (!(p->scale > 0.0f) || p->scale > 3e38f) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "scale %g is no positive number", p->scale);
  }
  if (p->width < 8 || p->width % 8) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "width %d is no multiple of 8", p->width);
  }
  if (p->dtype < QWEN_VL_BF16 || p->dtype > QWEN_VL_FP16 || p->out_dtype < QWEN_VL_BF16 ||
      p->out_dtype > QWEN_VL_FP32) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "weight dtype %d, output dtype %d: bf16 (0) "
                  "and fp16 (1) are possible, for the output fp32 (2) too", p->dtype, p->out_dtype);
  }
  if (!aligned(p->weight, 16) || !aligned(out, 16) || !aligned(p->bias, 8)) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "weight, embeddings and bias must be aligned to 16, 16 and 8 bytes");
  }
  return QWEN_VL_OK;
}

template <class Kernel>
cudaError_t allow(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Calls with(T(), Out()) with the types of weights and embeddings.
template <class With>
cudaError_t with_dtypes(const qwen_vl_projection& p, With with) {
  using B = __nv_bfloat16;
  using H = __half;
  switch (p.dtype * 3 + p.out_dtype) {
    case 0: return with(B(), B());
    case 1: return with(B(), H());
    case 2: return with(B(), float());
    case 3: return with(H(), B());
    case 4: return with(H(), H());
    default: return with(H(), float());
  }
}

template <int kFeatures, int kRows>
cudaError_t launch_project(const FromPatches& source, Units units, const qwen_vl_projection& p,
                           const float* addend, void* out, cudaStream_t stream) {
  return with_dtypes(p, [&](auto weight, auto result) {
    using T = decltype(weight);
    using Out = decltype(result);
    const auto kernel = project<T, Out, kFeatures, kRows>;
    constexpr int kBytes = kProjectBytes<kRows>;
    const cudaError_t error = allow(kernel, kBytes);
    if (error) return error;
    const dim3 grid((units.count + kRows / 4 - 1) / (kRows / 4),
                    (p.width + kTileColumns - 1) / kTileColumns);
    return launch_kernel(kernel, grid, kEmbedThreads, kBytes, stream, source, units,
                         static_cast<const T*>(p.weight), p.bias, p.scale, addend,
                         static_cast<Out*>(out), p.width);
  });
}

template <int kFeatures>
cudaError_t launch_rows(const qwen_vl_cuda& handle, const FromPatches& source, Units units,
                        const qwen_vl_projection& p, const float* addend, void* out,
                        cudaStream_t stream) {
  // Large tiles read less; small ones keep more multiprocessors busy.
  const int64_t large = (static_cast<int64_t>(units.count) * 4 + 127) / 128 *
                        ((p.width + kTileColumns - 1) / kTileColumns);
  return large > handle.multiprocessors
             ? launch_project<kFeatures, 128>(source, units, p, addend, out, stream)
             : launch_project<kFeatures, 64>(source, units, p, addend, out, stream);
}

cudaError_t launch_embed(const qwen_vl_cuda& handle, const FromFrame& source, Units units,
                         const qwen_vl_projection& p, void* out, cudaStream_t stream) {
  constexpr int kRows = 64;
  return with_dtypes(p, [&](auto weight, auto result) {
    using T = decltype(weight);
    using Out = decltype(result);
    const auto kernel = embed<T, Out, kRows>;
    const int bytes = kRows * kPaddedFeatures<QWEN_VL_FEATURES> + kStages * kWeightTile +
                      std::max(source.plan.bytes, kResampleBytes);
    const cudaError_t error = allow(kernel, bytes);
    if (error) return error;
    // Blocks that share rows each make them, which pays only where half of the multiprocessors
    // would be idle.
    const int blocks = (units.count + kRows / 4 - 1) / (kRows / 4);
    const int tiles = (p.width + kTileColumns - 1) / kTileColumns;
    const int splits = 2 * blocks <= handle.multiprocessors && tiles > 1 ? 2 : 1;
    const int tiles_each = (tiles + splits - 1) / splits;
    return launch_kernel(kernel, dim3(blocks, splits), kEmbedThreads, bytes, stream, source, units,
                         static_cast<const T*>(p.weight), p.bias, p.scale, static_cast<Out*>(out),
                         p.width, tiles_each);
  });
}

}  // namespace

extern "C" {

int qwen_vl_abi_version(void) { return QWEN_VL_ABI_VERSION; }

int qwen_vl_cuda_open(qwen_vl_cuda** handle, char* message, size_t size) {
  if (!handle) return refuse(QWEN_VL_NULL_POINTER, message, size, "the handle is a null pointer");
  *handle = nullptr;
  int device = 0, multiprocessors = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error) return failed(error, "no CUDA device", message, size);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, make_patches_in_chunks);
  if (error) {
    cudaGetLastError();
    return refuse(QWEN_VL_CUDA_ERROR, message, size,
                  "the library was not built for sm_%d%d: set CMAKE_CUDA_ARCHITECTURES", major,
                  minor);
  }
  *handle = new (std::nothrow) qwen_vl_cuda();
  if (!*handle) return refuse(QWEN_VL_NO_MEMORY, message, size, "no memory for a handle");
  (*handle)->device = device;
  (*handle)->multiprocessors = multiprocessors;
  return QWEN_VL_OK;
}

int qwen_vl_cuda_patches(qwen_vl_cuda* handle, const qwen_vl_frame* frame,
                         const qwen_vl_patches* patches, void* stream, char* message,
                         size_t size) {
  if (!handle) return refuse(QWEN_VL_NULL_POINTER, message, size, "the handle is a null pointer");
  int status = check_frame(frame, message, size);
  if (!status) status = check_patches(*frame, patches, message, size);
  if (status) return status;
  if (!aligned(patches->data, 4) || patches->patch_stride % 4 || patches->channel_stride % 4) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "patches and their strides must be aligned to 4 bytes");
  }
  std::lock_guard<std::mutex> lock(handle->mutex);
  Picture picture;
  StripPlan plan;
  status = make_picture(handle, *frame, *patches, kStrip, &picture, &plan, message, size);
  if (status) return status;
  const Target target = {patches->data, patches->patch_stride, patches->channel_stride};
  const int rows = patches->height / kUnit;
  const auto s = static_cast<cudaStream_t>(stream);
  if (!plan.bytes) {
    return failed(launch_kernel(make_patches_in_chunks, dim3(picture.unit_columns * rows),
                                kPatchThreads, kResampleBytes, s, picture, target),
                  "patches", message, size);
  }
  const int bytes = plan.bytes + kStrip * kUnitBytes;
  const int strips = (picture.unit_columns + kStrip - 1) / kStrip;
  cudaError_t error = allow(make_patches, kStripBytes + kStrip * kUnitBytes);
  if (!error) {
    error = launch_kernel(make_patches, dim3(strips * rows), kPatchThreads, bytes, s, picture, plan,
                          strips, target);
  }
  return failed(error, "patches", message, size);
}

int qwen_vl_cuda_project(qwen_vl_cuda* handle, const qwen_vl_projection* projection,
                         const uint8_t* patches, const int32_t* units, int64_t unit_count,
                         const float* addend, void* out, void* stream, char* message,
                         size_t size) {
  if (!handle || !patches) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "handle or patches are a null pointer");
  }
  const int status = check_projection(projection, out, unit_count, message, size);
  if (status) return status;
  if (!aligned(patches, 4) || !aligned(addend, 8)) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size,
                  "patches must be aligned to 4 bytes, what is added to 8");
  }
  const FromPatches source = {patches};
  const Units list = {units, static_cast<int>(unit_count)};
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      projection->features == QWEN_VL_FEATURES
          ? launch_rows<QWEN_VL_FEATURES>(*handle, source, list, *projection, addend, out, s)
          : launch_rows<2 * QWEN_VL_FEATURES>(*handle, source, list, *projection, addend, out, s);
  return failed(error, "projection", message, size);
}

int qwen_vl_cuda_embed(qwen_vl_cuda* handle, const qwen_vl_frame* frame,
                       const qwen_vl_patches* patches, const qwen_vl_projection* projection,
                       const int32_t* units, int64_t unit_count, void* out, void* stream,
                       char* message, size_t size) {
  if (!handle || !patches) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "handle or patches are a null pointer");
  }
  int status = check_frame(frame, message, size);
  if (!status) status = check_resize(*patches, message, size);
  if (!status) status = check_projection(projection, out, unit_count, message, size);
  if (status) return status;
  if (projection->features != QWEN_VL_FEATURES) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "%d features: a single frame has %d",
                  projection->features, QWEN_VL_FEATURES);
  }
  const int64_t all = static_cast<int64_t>(patches->width / kUnit) * (patches->height / kUnit);
  if (unit_count > all) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%lld units of a picture of %lld",
                  static_cast<long long>(unit_count), static_cast<long long>(all));
  }
  std::lock_guard<std::mutex> lock(handle->mutex);
  FromFrame source;
  status = make_picture(handle, *frame, *patches, kStrip, &source.picture, &source.plan, message,
                        size);
  if (status) return status;
  return failed(launch_embed(*handle, source, {units, static_cast<int>(unit_count)}, *projection,
                             out, static_cast<cudaStream_t>(stream)),
                "embedding", message, size);
}

void qwen_vl_cuda_close(qwen_vl_cuda* handle) { delete handle; }

}  // extern "C"
