// RoboScene on CUDA: one thread a pixel, then one a sample, then one an 8x8 block (render.h).
#include "render.h"

namespace rs = roboscene;
namespace {

constexpr int kPixels = rs::kWidth * rs::kHeight;

__global__ void render(const float* env, const float* objects, const uint8_t* bank,
                       const uint8_t* glyphs, float* image, uint8_t* ids) {
  __shared__ float e[rs::kEnvFloats], ob[rs::kMaxObjects * rs::kObjectFloats];
  size_t i = blockIdx.y;
  for (int k = threadIdx.x; k < rs::kEnvFloats; k += blockDim.x) e[k] = env[i * rs::kEnvFloats + k];
  for (int k = threadIdx.x; k < rs::kMaxObjects * rs::kObjectFloats; k += blockDim.x)
    ob[k] = objects[i * rs::kMaxObjects * rs::kObjectFloats + k];
  __syncthreads();
  int pixel = blockIdx.x * blockDim.x + threadIdx.x;
  if (pixel >= kPixels) return;
  float rgb[3];
  int id = rs::render_pixel(e, ob, bank, glyphs, pixel % rs::kWidth, pixel / rs::kWidth, rgb);
  for (int k = 0; k < 3; ++k) image[(i * kPixels + pixel) * 3 + k] = rgb[k];
  if (ids) ids[i * kPixels + pixel] = static_cast<uint8_t>(id);
}

__global__ void develop(const float* env, const float* image, uint8_t* rgb) {
  size_t i = blockIdx.y;
  int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= kPixels * 3) return;
  int pixel = sample / 3;
  rgb[i * kPixels * 3 + sample] = rs::develop(env + i * rs::kEnvFloats, image + i * kPixels * 3,
                                              pixel % rs::kWidth, pixel / rs::kWidth, sample % 3);
}

__global__ void jpeg(const float* env, uint8_t* rgb) {
  size_t i = blockIdx.y;
  int block = blockIdx.x * blockDim.x + threadIdx.x;
  float quality = env[i * rs::kEnvFloats + rs::kQuality];
  if (block >= kPixels / 64 || quality <= 0) return;
  rs::jpeg_block(rgb + i * kPixels * 3, block % (rs::kWidth / 8), block / (rs::kWidth / 8),
                 quality);
}

}  // namespace

// As roboscene_render_cpu with device pointers; scratch is float [n, 336, 448, 3].
// Returns the CUDA error of the launches (0 is success).
extern "C" int roboscene_render_cuda(const float* env, const float* objects, const uint8_t* bank,
                                     const uint8_t* glyphs, int n, float* scratch, uint8_t* rgb,
                                     uint8_t* ids, void* stream) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  render<<<dim3((kPixels + 255) / 256, n), 256, 0, s>>>(env, objects, bank, glyphs, scratch, ids);
  develop<<<dim3((kPixels * 3 + 255) / 256, n), 256, 0, s>>>(env, scratch, rgb);
  jpeg<<<dim3((kPixels / 64 + 63) / 64, n), 64, 0, s>>>(env, rgb);
  return static_cast<int>(cudaGetLastError());
}
