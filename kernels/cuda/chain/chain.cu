// The C interface of the chain: checks, and one CUDA graph for each number of sequences.
#include <cuda_runtime.h>

#include <cstring>
#include <new>
#include <vector>

#include "../../cpu/check.h"
#include "../decode_host.h"
#include "../decode_sample.cuh"
#include "kernels.h"
#include "plan.cuh"

using namespace qwen_vl;
using namespace qwen_vl::chain;
using qwen_vl::decode::failed;

namespace {

__global__ void __launch_bounds__(32 * kRows) choose_kernel(const __grid_constant__ Choice p) {
  choose(p);
}
__global__ void write_state(qwen_vl_decode_row* to, const qwen_vl_decode_row row) { *to = row; }
__global__ void write_launch(qwen_vl_decode_launch* to, const qwen_vl_decode_launch launch) {
  *to = launch;
}

const void* product_of(const qwen_vl_decode_model& m, int op, int rows, int ahead = kAhead) {
  const int form = op == kHead ? m.head_form : m.form;
  const bool wide = m.width > 8 * kThreads;
  return m.dtype == 0 ? product_bf16(form, op, rows, wide, ahead)
                      : m.dtype == 1 ? product_fp16(form, op, rows, wide, ahead) : nullptr;
}
const void* attention_of(const qwen_vl_decode_model& m) {
  return m.dtype == 0 ? attention_bf16(m.head_dim) : attention_fp16(m.head_dim);
}

const void* embed_of(const qwen_vl_decode_model& m) {
  return m.dtype == 0 ? embed_bf16() : embed_fp16();
}

int check_model(const qwen_vl_decode_model* m, char* message, size_t size) {
  if (!m) return refuse(QWEN_VL_NULL_POINTER, message, size, "no model");
  const int group = m->kv_heads > 0 ? m->heads / m->kv_heads : 0;
  const bool shape =
      m->layers > 0 && m->width > 0 && m->width % 256 == 0 && m->width <= kMaxWidth &&
      m->mlp > 0 && m->mlp % 32 == 0 && m->kv_heads > 0 && m->heads % m->kv_heads == 0 &&
      group <= 8 && (m->head_dim == 64 || m->head_dim == 128) && m->vocab > 0 &&
      m->vocab % 16 == 0 && m->heads * m->head_dim % 256 == 0;
  if (!shape)
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "no chain of kernels for %d layers of %d (mlp %d), %d heads and %d of keys of "
                  "%d, vocabulary %d", m->layers, m->width, m->mlp, m->heads, m->kv_heads,
                  m->head_dim, m->vocab);
  for (int op = 0; op < kOps; ++op)
    if (!product_of(*m, op, 1))
      return refuse(QWEN_VL_BAD_ENCODING, message, size,
                    "no chain of kernels for dtype %d with weights %d and output matrix %d",
                    m->dtype, m->form, m->head_form);
  if (decode::form_bytes(m->form, m->mlp) % kStepRow || (decode::grouped(m->form) &&
      (m->group != kGroup || m->width % kGroup || m->mlp % kGroup)))
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "no chain of kernels for %d inputs in groups of %d: groups of %d, and rows of "
                  "weights that are multiples of %d bytes", m->mlp, m->group, kGroup, kStepRow);
  return QWEN_VL_OK;
}

int device_blocks(int* blocks, int* shared, int* all_shared, bool* programmatic, char* message,
                  size_t size) {
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (!e) e = cudaDeviceGetAttribute(blocks, cudaDevAttrMultiProcessorCount, device);
  if (!e) e = cudaDeviceGetAttribute(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!e)
    e = cudaDeviceGetAttribute(all_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (!e) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  *programmatic = major >= 9;
  return failed(e, "device attributes", message, size);
}

}  // namespace

struct qwen_vl_decode_chain {
  qwen_vl_decode_model model;
  std::vector<qwen_vl_decode_layer> layers;
  Model places;
  bool programmatic;
  int shared, all_shared;  // bytes of a block at most, and of a multiprocessor
  int pace = 0;  // of gate and up, see Product
  cudaGraphExec_t graph[kRows + 1] = {};
  qwen_vl_decode_launch last = {};

  // One kernel into the stream that is captured.
  cudaError_t add(const void* kernel, int grid, int threads, int bytes, void* argument, bool first,
                  cudaStream_t stream) const {
    cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    // All alike, so that a multiprocessor takes blocks of the next kernel beside those of this.
    if (!e)
      e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
    if (e) return e;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = programmatic && !first ? 1 : 0;
    void* arguments[] = {argument};
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }

  cudaError_t add_step(int count, cudaStream_t stream) const {
    Model m = places;
    m.count = count;
    const int rows = instance_rows(count);
    const Ahead ahead = choose_ahead(model, layers.data(), m, shared, all_shared);
    bool first = true;
    cudaError_t e = cudaSuccess;
    auto link = [&](const void* kernel, int grid, int threads, int bytes, void* argument) {
      if (!e) e = add(kernel, grid, threads, bytes, argument, first, stream);
      first = false;
    };
    auto product = [&](int op, int layer) {
      Product p;
      const int bytes = set_product(model, layers.data(), m, op, layer, ahead.of(op), &p);
      p.pace = pace;
      link(product_of(model, op, rows, ahead.of(op)), model.blocks, kThreads, bytes, &p);
    };
    link(embed_of(model), count, kEmbedThreads, 0, &m);
    for (int layer = 0; layer < model.layers; ++layer) {
      product(kQkv, layer);
      Attention a = {m, layer};
      link(attention_of(model), attention_grid(m, model.blocks), kAttendThreads, kAttendBytes, &a);
      product(kOut, layer);
      product(kGateUp, layer);
      product(kDown, layer);
    }
    product(kHead, 0);
    Choice c = {m, model.blocks};
    link(reinterpret_cast<const void*>(choose_kernel), 1, 32 * kRows, 0, &c);
    return e;
  }

  cudaError_t build(int count) {
    cudaStream_t stream;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e) return e;
    e = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    cudaGraph_t captured = nullptr;
    if (!e) {
      e = add_step(count, stream);
      const cudaError_t end = cudaStreamEndCapture(stream, &captured);
      if (!e) e = end;
    }
    if (!e) e = cudaGraphInstantiate(&graph[count], captured, 0);
    if (captured) cudaGraphDestroy(captured);
    cudaStreamDestroy(stream);
    return e;
  }

  void forget() {
    for (cudaGraphExec_t& made : graph) {
      if (made) cudaGraphExecDestroy(made);
      made = nullptr;
    }
  }

  bool fits(int count) const {
    Model m = places;
    m.count = count;
    const Ahead ahead = choose_ahead(model, layers.data(), m, shared, all_shared);
    for (int op = 0; op < kOps; ++op) {
      Product p;
      if (set_product(model, layers.data(), m, op, 0, ahead.of(op), &p) > shared) return false;
    }
    return true;
  }
};

extern "C" {

QWEN_VL_API int qwen_vl_chain_workspace(qwen_vl_decode_model* model, int64_t* bytes, char* message,
                                        size_t size) {
  int code = check_model(model, message, size), shared = 0, all_shared = 0;
  bool programmatic = false;
  if (!code)
    code = device_blocks(&model->blocks, &shared, &all_shared, &programmatic, message, size);
  if (!code) *bytes = place(*model, nullptr);
  return code;
}

QWEN_VL_API int qwen_vl_chain_create(const qwen_vl_decode_model* model,
                                     qwen_vl_decode_chain** chain, int32_t* rows, char* message,
                                     size_t size) {
  int code = check_model(model, message, size), blocks = 0;
  if (code) return code;
  if (!chain || !rows || !model->workspace || !model->layer)
    return refuse(QWEN_VL_NULL_POINTER, message, size, "no place, workspace or layers");
  qwen_vl_decode_chain* made = new (std::nothrow) qwen_vl_decode_chain;
  if (!made) return refuse(QWEN_VL_CUDA_ERROR, message, size, "no memory for a chain");
  made->model = *model;
  made->layers.resize(model->layers);
  code = device_blocks(&blocks, &made->shared, &made->all_shared, &made->programmatic, message,
                       size);
  if (!code && (place(*model, &made->places) > model->workspace_bytes || blocks != model->blocks))
    code = refuse(QWEN_VL_SHORT_BUFFER, message, size,
                  "a workspace of %lld bytes for %d blocks; this GPU has %d",
                  static_cast<long long>(model->workspace_bytes), model->blocks, blocks);
  if (!code)
    code = failed(cudaMemcpy(made->layers.data(), model->layer,
                             model->layers * sizeof(qwen_vl_decode_layer), cudaMemcpyDeviceToHost),
                  "the table of layers", message, size);
  *rows = 0;
  for (int n = 1; !code && n <= kRows && made->fits(n); ++n) *rows = n;
  if (!code && !*rows)
    code = refuse(QWEN_VL_BAD_SIZE, message, size,
                  "activations of %d do not fit the %d bytes of shared memory of a block",
                  model->mlp, made->shared);
  if (code) {
    delete made;
    made = nullptr;
  }
  *chain = made;
  return code;
}

QWEN_VL_API int qwen_vl_chain_admit(qwen_vl_decode_chain* chain, int32_t slot,
                                    const qwen_vl_decode_row* row, void* stream, char* message,
                                    size_t size) {
  if (!chain || !row) return refuse(QWEN_VL_NULL_POINTER, message, size, "no chain or row");
  if (slot < 0 || slot >= kRows)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "slot %d of %d", slot, kRows);
  write_state<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(chain->places.state + slot, *row);
  return failed(cudaGetLastError(), "admission", message, size);
}

QWEN_VL_API int qwen_vl_chain_step(qwen_vl_decode_chain* chain,
                                   const qwen_vl_decode_launch* launch, void* stream,
                                   char* message, size_t size) {
  if (!chain || !launch || !launch->results)
    return refuse(QWEN_VL_NULL_POINTER, message, size, "no chain, launch or results");
  const auto fit = [&](int count) { return chain->fits(count); };
  if (const int refused = decode::check_launch(*launch, fit, message, size)) return refused;
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  cudaError_t e = cudaSuccess;
  if (!chain->graph[launch->count]) e = chain->build(launch->count);
  if (!e && memcmp(&chain->last, launch, sizeof(*launch)) != 0) {
    write_launch<<<1, 1, 0, queue>>>(
        const_cast<qwen_vl_decode_launch*>(chain->places.launch), *launch);
    e = cudaGetLastError();
    chain->last = *launch;
  }
  for (int i = 0; !e && i < launch->steps; ++i)
    e = cudaGraphLaunch(chain->graph[launch->count], queue);
  const int code = failed(e, "the decode step", message, size);
  if (code || !launch->logits) return code;
  decode::Params p = {};
  p.m = chain->model;
  p.l = *launch;
  p.state = chain->places.state;
  p.best = chain->places.best;
  p.stuck = stuck_of(chain->places, chain->model.blocks);
  decode::sample_filtered<<<launch->count, decode::kSampleThreads, 0, queue>>>(p);
  return failed(cudaGetLastError(), "sampling", message, size);
}

QWEN_VL_API int qwen_vl_chain_pace(qwen_vl_decode_chain* chain, int32_t pace, char* message,
                                      size_t size) {
  if (!chain) return refuse(QWEN_VL_NULL_POINTER, message, size, "no chain");
  if (pace < 0 || pace > kMostPace)
    return refuse(QWEN_VL_BAD_SIZE, message, size, "a pace of %d clocks; expected 0 to %d", pace,
                  kMostPace);
  chain->pace = pace;
  chain->forget();
  return QWEN_VL_OK;
}

QWEN_VL_API void qwen_vl_chain_destroy(qwen_vl_decode_chain* chain) {
  if (!chain) return;
  chain->forget();
  delete chain;
}

}  // extern "C"
