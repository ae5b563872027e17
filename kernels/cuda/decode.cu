// The C interface of libqwen_vl_decode: checks, layout of memory, launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../cpu/check.h"
#include "decode_kernels.h"
#include "decode_sample.cuh"
#include "decode_tables.cuh"

using namespace qwen_vl;
using namespace qwen_vl::decode;

namespace {

constexpr int kMinDepth = 2;

int failed(cudaError_t error, const char* what, char* message, size_t size) {
  if (error == cudaSuccess) return QWEN_VL_OK;
  cudaGetLastError();  // so that the next call does not report it again
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "%s: %s (CUDA error %d)", what,
                cudaGetErrorString(error), static_cast<int>(error));
}

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
    return refuse(QWEN_VL_BAD_SIZE, message, size, "no decode kernel for groups of %d: 32, 64 or 128",
                  m->group);
  if (groups && (m->width % m->group || m->mlp % m->group))
    return refuse(QWEN_VL_BAD_SIZE, message, size, "groups of %d do not divide %d or %d", m->group,
                  m->width, m->mlp);
  return QWEN_VL_OK;
}

// Shared memory of a launch of `rows` sequences.
struct SharedLayout {
  int depth, slot_bytes, act_stride, slots, act, sums, tables, total;
};

int padded(int form, int inputs) {
  const int per = form_inputs(form);
  return (inputs + per - 1) / per * per;
}

SharedLayout layout_for(const qwen_vl_decode_model& m, int rows, int limit) {
  SharedLayout l = {};
  const int longest = std::max({padded(m.form, m.mlp), padded(m.form, m.heads * m.head_dim),
                                padded(m.form, m.width), padded(m.head_form, m.width)});
  l.slot_bytes = kItem + std::max(scale_bytes(m.form, m.group), scale_bytes(m.head_form, m.group));
  // Behind an op's inputs stay the sums that they were made from (stage_norm).
  l.act_stride = std::max(longest * 2, padded(m.form, m.width) * 2 + m.width * 4) + kActPad;
  l.act_stride = std::max(l.act_stride, padded(m.head_form, m.width) * 2 + m.width * 4 + kActPad);
  const int slots = kWarps * 8 * ((rows + 1) / 2) * 16;
  const int act = std::max({rows * l.act_stride, kAttendBytes,
                            static_cast<int>(kWarps * kRows * sizeof(Best))});
  const int sums = grouped(m.form) ? longest / m.group * kRows * 4 : 0;
  const int tables = static_cast<int>(offsetof(Tables, layer)) +
                     m.layers * static_cast<int>(sizeof(qwen_vl_decode_layer));
  auto up = [](int n) { return (n + 127) / 128 * 128; };
  const int fixed = up(slots) + up(act) + up(sums) + up(tables);
  l.depth = std::min(kMaxDepth, (limit - fixed) / (kWarps * l.slot_bytes));
  l.slots = up(kWarps * std::max(l.depth, 0) * l.slot_bytes);
  l.act = l.slots + up(slots);
  l.sums = l.act + up(act);
  l.tables = l.sums + up(sums);
  l.total = l.tables + up(tables);
  if (l.total > limit && l.depth > 0) --l.depth;
  return l;
}

bool fits(const qwen_vl_decode_model& m, int rows, int limit) {
  const SharedLayout l = layout_for(m, rows, limit);
  return l.depth >= kMinDepth && l.total <= limit && rows * (m.width / 256) <= kNormUnits;
}

cudaError_t device_limits(int* blocks, int* shared) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (!e) e = cudaDeviceGetAttribute(blocks, cudaDevAttrMultiProcessorCount, device);
  if (!e) e = cudaDeviceGetAttribute(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return e;
}

// Cuts the workspace up; returns its size.
int64_t place(const qwen_vl_decode_model& m, Params* p) {
  uint8_t* const start = static_cast<uint8_t*>(m.workspace);
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    uint8_t* at = start + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  const int64_t row = 4ll * kRows * m.width, heads = 1ll * kRows * m.heads;
  Params q = {};
  q.state = reinterpret_cast<qwen_vl_decode_row*>(take(kRows * sizeof(qwen_vl_decode_row)));
  q.arrived = reinterpret_cast<unsigned long long*>(take(8));
  q.stuck = reinterpret_cast<int*>(take(4));
  q.x[0] = reinterpret_cast<float*>(take(row));
  q.x[1] = reinterpret_cast<float*>(take(row));
  q.part_out = reinterpret_cast<float*>(take(row * m.parts_out));
  q.part_down = reinterpret_cast<float*>(take(row * m.parts_down));
  q.attention = reinterpret_cast<float*>(take(heads * kMaxSplits * m.head_dim * 4));
  q.attention_scale = reinterpret_cast<float2*>(take(heads * kMaxSplits * 8));
  q.q = take(heads * m.head_dim * 2);
  q.act = take(2ll * kRows * m.mlp);
  q.best = reinterpret_cast<Best*>(take(1ll * kRows * m.blocks * sizeof(Best)));
  q.m = m;
  if (p) *p = q;
  return used;
}

__global__ void write_row(qwen_vl_decode_row* to, const qwen_vl_decode_row row) { *to = row; }

}  // namespace

extern "C" {

QWEN_VL_API int qwen_vl_abi_version(void) { return QWEN_VL_ABI_VERSION; }

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
  if (launch->count < 1 || launch->count > kRows || launch->steps < 1 ||
      !fits(*model, launch->count, shared))
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%d steps of %d sequences", launch->steps,
                  launch->count);
  for (int i = 0; i < launch->count; ++i)
    if (launch->slot[i] < 0 || launch->slot[i] >= kRows)
      return refuse(QWEN_VL_BAD_SIZE, message, size, "slot %d of %d", launch->slot[i], kRows);
  if (launch->logits && launch->steps != 1)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "logits of %d steps at once", launch->steps);
  const SharedLayout l = layout_for(*model, launch->count, shared);
  p.l = *launch;
  p.depth = l.depth;
  p.slot_bytes = l.slot_bytes;
  p.act_stride = l.act_stride;
  p.offset_slots = l.slots;
  p.offset_act = l.act;
  p.offset_sums = l.sums;
  p.offset_tables = l.tables;
  auto by = [](int n) { return n == 1 ? 0u : static_cast<uint32_t>((0x100000000ull + n - 1) / n); };
  p.by_norm_units = by(model->width / 256);
  p.by_attention = by(model->heads * model->head_dim / 8);
  p.by_mlp = by(model->mlp / 8);
  p.by_blocks = by(blocks);
  const void* kernel = kernel_of(*model);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  void* arguments[] = {&p};
  if (!e)
    e = cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kThreads), arguments, l.total, queue);
  code = failed(e, "the decode step", message, size);
  if (code || !launch->logits) return code;
  sample_filtered<<<launch->count, kSampleThreads, 0, queue>>>(p);
  return failed(cudaGetLastError(), "sampling", message, size);
}

}  // extern "C"
