// Matrix products by cuBLASLt with bias and residual in its epilogue, one plan a shape: all that
// can be decided beforehand is, a call sets the bias and launches.
//
// cuBLASLt is column-major. Read so, the row-major x[rows][ins], weight[outs][ins] and
// out[rows][outs] are x^T, weight^T and out^T, and out^T = (weight^T)^T * x^T.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "cublaslt.h"
#include "status.h"

using namespace qwen_vl;

struct qwen_vl_lt {
  lt::Functions call = {};
  lt::Handle handle = nullptr;

  ~qwen_vl_lt() {
    if (handle) call.destroy(handle);
  }
};

struct qwen_vl_lt_plan {
  qwen_vl_lt* owner = nullptr;
  qwen_vl_product product = {};
  lt::Descriptor descriptor = nullptr;
  lt::Layout a = nullptr, b = nullptr, d = nullptr;
  lt::Algorithm algorithm = {};
  uint64_t workspace = 0;
  std::mutex mutex;  // the bias is part of the descriptor

  ~qwen_vl_lt_plan() {
    for (lt::Layout layout : {a, b, d}) {
      if (layout) owner->call.layout_destroy(layout);
    }
    if (descriptor) owner->call.descriptor_destroy(descriptor);
  }
};

namespace {

int failed(int error, const char* what, char* message, size_t size) {
  if (!error) return QWEN_VL_OK;
  return refuse(QWEN_VL_CUDA_ERROR, message, size, "%s: cuBLASLt status %d", what, error);
}

template <class F>
bool find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

void* open_any(const char* path) {
  if (path && *path) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"};
  // One that is loaded already, by torch for example, before another version is.
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      if (void* found = dlopen(name, flags)) return found;
    }
  }
  return nullptr;
}

int check_product(const qwen_vl_product* p, char* message, size_t size) {
  if (!p) return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  if (p->rows < 1 || p->outs < 8 || p->ins < 8 || p->outs % 8 || p->ins % 8) {
    return refuse(QWEN_VL_BAD_SIZE, message, size,
                  "product of %d rows with %d x %d: inputs and outputs must be multiples of 8",
                  p->rows, p->outs, p->ins);
  }
  return check_half(p->dtype, "product", message, size);
}

int build(qwen_vl_lt_plan* plan) {
  const lt::Functions& call = plan->owner->call;
  const qwen_vl_product& p = plan->product;
  const int type = p.dtype == QWEN_VL_BF16 ? lt::kBfloat16 : lt::kFloat16;
  const int transposed = lt::kTransposed;
  const uint32_t epilogue = p.bias ? lt::kBias : lt::kNone;
  int error = call.descriptor_create(&plan->descriptor, lt::kComputeFloat32, lt::kFloat32);
  const auto set = [&](int attribute, const auto& value) {
    if (!error) error = call.descriptor_set(plan->descriptor, attribute, &value, sizeof value);
  };
  set(lt::kTransA, transposed);
  set(lt::kEpilogue, epilogue);
  if (p.bias) set(lt::kBiasType, type);
  const auto layout = [&](lt::Layout* to, uint64_t rows, uint64_t columns) {
    if (!error) error = call.layout_create(to, type, rows, columns, static_cast<int64_t>(rows));
  };
  layout(&plan->a, p.ins, p.outs);
  layout(&plan->b, p.ins, p.rows);
  layout(&plan->d, p.outs, p.rows);
  return error;
}

int ask(qwen_vl_lt_plan* plan, int most, lt::Candidate* found, int* count) {
  const lt::Functions& call = plan->owner->call;
  lt::Preference preference = nullptr;
  int error = call.preference_create(&preference);
  const size_t bytes = plan->workspace;
  const uint32_t reductions = lt::kReduceInFloat32;
  if (!error) error = call.preference_set(preference, lt::kWorkspaceBytes, &bytes, sizeof bytes);
  if (!error) {
    error = call.preference_set(preference, lt::kReductions, &reductions, sizeof reductions);
  }
  if (!error) {
    error = call.heuristic(plan->owner->handle, plan->descriptor, plan->a, plan->b, plan->d,
                           plan->d, preference, most, found, count);
  }
  if (preference) call.preference_destroy(preference);
  return error;
}

}  // namespace

extern "C" int qwen_vl_lt_open(const char* path, qwen_vl_lt** handle, uint64_t* version,
                               char* message, size_t size) {
  if (!handle || !version) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "cuBLASLt: a null pointer");
  }
  // Never closed: torch may use the same library, and its own end may come later.
  void* const library = open_any(path);
  if (!library) {
    const char* why = dlerror();
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "cuBLASLt cannot be opened: %s",
                  why ? why : "not found");
  }
  std::unique_ptr<qwen_vl_lt> made(new (std::nothrow) qwen_vl_lt());
  if (!made) return refuse(QWEN_VL_NO_MEMORY, message, size, "no memory for a handle");
  lt::Functions& call = made->call;
  const bool complete =
      find(library, "cublasLtGetVersion", &call.version) &&
      find(library, "cublasLtCreate", &call.create) &&
      find(library, "cublasLtDestroy", &call.destroy) &&
      find(library, "cublasLtMatmulDescCreate", &call.descriptor_create) &&
      find(library, "cublasLtMatmulDescDestroy", &call.descriptor_destroy) &&
      find(library, "cublasLtMatmulDescSetAttribute", &call.descriptor_set) &&
      find(library, "cublasLtMatrixLayoutCreate", &call.layout_create) &&
      find(library, "cublasLtMatrixLayoutDestroy", &call.layout_destroy) &&
      find(library, "cublasLtMatmulPreferenceCreate", &call.preference_create) &&
      find(library, "cublasLtMatmulPreferenceDestroy", &call.preference_destroy) &&
      find(library, "cublasLtMatmulPreferenceSetAttribute", &call.preference_set) &&
      find(library, "cublasLtMatmulAlgoGetHeuristic", &call.heuristic) &&
      find(library, "cublasLtMatmulAlgoCheck", &call.check) &&
      find(library, "cublasLtMatmul", &call.multiply);
  if (!complete) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "cuBLASLt lacks a function: %s", dlerror());
  }
  const int error = call.create(&made->handle);
  if (error) return failed(error, "opening cuBLASLt", message, size);
  *version = call.version();
  *handle = made.release();
  return QWEN_VL_OK;
}

extern "C" int qwen_vl_lt_prepare(qwen_vl_lt* handle, const qwen_vl_product* product,
                                  uint64_t workspace, int32_t most, uint8_t* algorithms,
                                  int32_t* found, qwen_vl_lt_plan** plan, char* message,
                                  size_t size) {
  static_assert(sizeof(lt::Algorithm) == QWEN_VL_LT_ALGORITHM, "as the interface says");
  constexpr int kMost = 64;
  if (!handle || !algorithms || !found || !plan) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  }
  const int status = check_product(product, message, size);
  if (status) return status;
  if (most < 1 || most > kMost) {
    return refuse(QWEN_VL_BAD_SIZE, message, size, "%d algorithms: 1 to %d can be asked for", most,
                  kMost);
  }
  std::unique_ptr<qwen_vl_lt_plan> made(new (std::nothrow) qwen_vl_lt_plan());
  if (!made) return refuse(QWEN_VL_NO_MEMORY, message, size, "no memory for a plan");
  made->owner = handle;
  made->product = *product;
  made->workspace = workspace;
  lt::Candidate candidates[kMost] = {};
  int count = 0;
  int error = build(made.get());
  if (!error) error = ask(made.get(), most, candidates, &count);
  if (error) return failed(error, "preparing a product", message, size);
  *found = 0;
  for (int i = 0; i < count; ++i) {
    if (candidates[i].state || candidates[i].workspace > workspace) continue;
    std::memcpy(algorithms + *found * QWEN_VL_LT_ALGORITHM, &candidates[i].algorithm,
                QWEN_VL_LT_ALGORITHM);
    ++*found;
  }
  if (!*found) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size,
                  "cuBLASLt has no algorithm for %d rows with %d x %d", product->rows,
                  product->outs, product->ins);
  }
  std::memcpy(&made->algorithm, algorithms, QWEN_VL_LT_ALGORITHM);
  *plan = made.release();
  return QWEN_VL_OK;
}

extern "C" int qwen_vl_lt_choose(qwen_vl_lt_plan* plan, const uint8_t* algorithm, char* message,
                                 size_t size) {
  if (!plan || !algorithm) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  }
  lt::Algorithm wanted;
  std::memcpy(&wanted, algorithm, sizeof wanted);
  lt::Candidate result = {};
  const int error = plan->owner->call.check(plan->owner->handle, plan->descriptor, plan->a, plan->b,
                                            plan->d, plan->d, &wanted, &result);
  if (error || result.workspace > plan->workspace) {
    return refuse(QWEN_VL_CUDA_ERROR, message, size, "cuBLASLt does not accept the algorithm");
  }
  plan->algorithm = wanted;
  return QWEN_VL_OK;
}

extern "C" int qwen_vl_lt_multiply(qwen_vl_lt_plan* plan, const void* x, const void* weight,
                                   const void* bias, const void* add, void* out, void* workspace,
                                   void* stream, char* message, size_t size) {
  if (!plan || !x || !weight || !out || (plan->product.bias && !bias) ||
      (plan->product.add && !add) || (plan->workspace && !workspace)) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "product: a null pointer");
  }
  if (!aligned(x, weight, bias, add, out, workspace)) {
    return refuse(QWEN_VL_BAD_OUTPUT, message, size, "product: a pointer is not aligned to 16 bytes");
  }
  const lt::Functions& call = plan->owner->call;
  const float alpha = 1.0f, beta = plan->product.add ? 1.0f : 0.0f;
  std::lock_guard<std::mutex> lock(plan->mutex);
  int error = 0;
  if (plan->product.bias) {
    error = call.descriptor_set(plan->descriptor, lt::kBiasPointer, &bias, sizeof bias);
  }
  if (!error) {
    error = call.multiply(plan->owner->handle, plan->descriptor, &alpha, weight, plan->a, x, plan->b,
                          &beta, add ? add : out, plan->d, out, plan->d, &plan->algorithm, workspace,
                          plan->workspace, static_cast<cudaStream_t>(stream));
  }
  return failed(error, "product", message, size);
}

extern "C" void qwen_vl_lt_forget(qwen_vl_lt_plan* plan) { delete plan; }
extern "C" void qwen_vl_lt_close(qwen_vl_lt* handle) { delete handle; }
extern "C" int qwen_vl_abi_version(void) { return QWEN_VL_ENCODER_ABI_VERSION; }
