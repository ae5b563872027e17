// The C interface of libqwen_vl_decode: checks, layout of memory, launches.
#include <cuda_runtime.h>

#include <cstdint>

#include "../cpu/check.h"
#include "decode_host.h"
#include "decode_kernels.h"
#include "decode_memory.cuh"
#include "decode_sample.cuh"

using namespace qwen_vl;
using namespace qwen_vl::decode;

namespace {

const void* kernel_of(const qwen_vl_decode_model& m) {
  return m.dtype == 0 ? step_kernel_bf16(m.form, m.head_form)
                      : m.dtype == 1 ? step_kernel_fp16(m.form, m.head_form) : nullptr;
}

int check_model(const qwen_vl_decode_model* m, char* message, size_t size) {
  if (!m) return refuse(QWEN_VL_NULL_POINTER, message, size, "no model");
  const int group = m->kv_heads > 0 ? m->heads / m->kv_heads : 0;
  const bool shape =
      m->layers > 0 && m->layers <= kMaxLayers && m->width > 0 && m->width % 256 == 0 &&
      m->mlp > 0 && m->mlp % 32 == 0 && m->kv_heads > 0 && m->heads % m->kv_heads == 0 &&
      group <= 8 && (m->head_dim == 64 || m->head_dim == 128) && m->vocab > 0 &&
      m->vocab % kTile == 0 && m->heads * m->head_dim % 256 == 0;
  if (!shape)
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "no decode kernel for %d layers of %d (mlp %d), %d heads and %d of keys of %d, "
                  "vocabulary %d: width a multiple of 256, heads of 64 or 128, at most 8 to one "
                  "of keys, mlp a multiple of 32 and vocabulary of 16 are needed",
                  m->layers, m->width, m->mlp, m->heads, m->kv_heads, m->head_dim, m->vocab);
  if (!kernel_of(*m))
    return refuse(QWEN_VL_BAD_ENCODING, message, size,
                  "no decode kernel for dtype %d with weights %d and output matrix %d", m->dtype,
                  m->form, m->head_form);
  const bool groups = grouped(m->form);
  if (groups && m->group != 32 && m->group != 64 && m->group != 128)
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "no decode kernel for groups of %d: 32, 64 or 128", m->group);
  if (groups && (m->width % m->group || m->mlp % m->group))
    return refuse(QWEN_VL_BAD_SIZE, message, size, "groups of %d do not divide %d or %d", m->group,
                  m->width, m->mlp);
  return QWEN_VL_OK;
}

cudaError_t device_limits(int* blocks, int* shared) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (!e) e = cudaDeviceGetAttribute(blocks, cudaDevAttrMultiProcessorCount, device);
  if (!e) e = cudaDeviceGetAttribute(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return e;
}

__global__ void write_row(qwen_vl_decode_row* to, const qwen_vl_decode_row row) { *to = row; }

}  // namespace

extern "C" {

QWEN_VL_API int qwen_vl_abi_version(void) { return QWEN_VL_DECODE_ABI_VERSION; }

QWEN_VL_API int qwen_vl_decode_workspace(const qwen_vl_decode_model* model, int64_t* bytes,
                                         char* message, size_t size) {
  const int code = check_model(model, message, size);
  if (code) return code;
  if (!bytes) return refuse(QWEN_VL_NULL_POINTER, message, size, "no place for the size");
  if (model->blocks < 1 || model->parts_out < 1 || model->parts_down < 1)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%d blocks, %d and %d parts: expected 1 or more",
                  model->blocks, model->parts_out, model->parts_down);
  *bytes = place(*model, nullptr);
  return QWEN_VL_OK;
}

QWEN_VL_API int qwen_vl_decode_capacity(const qwen_vl_decode_model* model, int32_t* blocks,
                                        int32_t* rows, char* message, size_t size) {
  int code = check_model(model, message, size);
  if (code) return code;
  if (!blocks || !rows) return refuse(QWEN_VL_NULL_POINTER, message, size, "no place for results");
  int shared = 0, resident = 0;
  code = failed(device_limits(blocks, &shared), "device attributes", message, size);
  if (code) return code;
  *rows = 0;
  for (int n = 1; n <= kRows; ++n)
    if (fits(*model, n, shared)) *rows = n;
  if (!*rows)
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "activations of %d do not fit the %d bytes of shared memory of a block",
                  model->mlp, shared);
  const void* kernel = kernel_of(*model);
  const SharedLayout l = layout_for(*model, *rows, shared);
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (!e) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, l.total);
  code = failed(e, "the decode kernel", message, size);
  if (!code && resident < 1)
    code = refuse(QWEN_VL_BAD_SIZE, message, size, "a block of %d bytes does not fit this GPU",
                  l.total);
  return code;
}

QWEN_VL_API int qwen_vl_decode_admit(const qwen_vl_decode_model* model, int32_t slot,
                                     const qwen_vl_decode_row* row, void* stream, char* message,
                                     size_t size) {
  if (!model || !row || !model->workspace)
    return refuse(QWEN_VL_NULL_POINTER, message, size, "no model, row or workspace");
  if (slot < 0 || slot >= kRows)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "slot %d of %d", slot, kRows);
  Params p;
  place(*model, &p);
  write_row<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(p.state + slot, *row);
  return failed(cudaGetLastError(), "admission", message, size);
}

QWEN_VL_API int qwen_vl_decode_step(const qwen_vl_decode_model* model,
                                    const qwen_vl_decode_launch* launch, void* stream,
                                    char* message, size_t size) {
  int code = check_model(model, message, size);
  if (code) return code;
  if (!launch || !launch->results || !model->workspace)
    return refuse(QWEN_VL_NULL_POINTER, message, size, "no launch, results or workspace");
  int blocks = 0, shared = 0;
  code = failed(device_limits(&blocks, &shared), "device attributes", message, size);
  if (code) return code;
  Params p;
  if (place(*model, &p) > model->workspace_bytes || blocks != model->blocks)
    return refuse(QWEN_VL_SHORT_BUFFER, message, size,
                  "a workspace of %lld bytes for %d blocks; this GPU has %d",
                  static_cast<long long>(model->workspace_bytes), model->blocks, blocks);
  const auto fit = [&](int count) { return fits(*model, count, shared); };
  if (const int refused = decode::check_launch(*launch, fit, message, size)) return refused;
  const int bytes = set_launch(*launch, shared, &p);
  const void* kernel = kernel_of(*model);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  void* arguments[] = {&p};
  if (!e)
    e = cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kThreads), arguments, bytes, queue);
  code = failed(e, "the decode step", message, size);
  if (code || !launch->logits) return code;
  sample_filtered<<<launch->count, kSampleThreads, 0, queue>>>(p);
  return failed(cudaGetLastError(), "sampling", message, size);
}

}  // extern "C"
