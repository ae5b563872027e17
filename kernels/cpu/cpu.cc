// The C interface of the CPU kernel.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <vector>

#include "check.h"
#include "ops.h"
#include "pool.h"
#include "qwen_vl_kernels.h"
#include "tile.h"

using namespace qwen_vl;

namespace {

constexpr int kMaxThreads = 64;

// Tables of the axes that were used last: a camera keeps its size, a robot has a few cameras.
constexpr size_t kMaxTables = 16;

}  // namespace

struct qwen_vl_cpu {
  qwen_vl_cpu(const Ops* ops_, int threads, const std::vector<int>& cpus)
      : ops(ops_), pool(threads, cpus), scratch(threads) {}

  // Shared, so that a table stays while a job uses it and newer ones push it out.
  std::shared_ptr<const AxisTables> tables(int in, int out) {
    for (size_t i = 0; i < recent.size(); ++i) {
      if (recent[i]->axis.in == in && recent[i]->axis.out == out) {
        std::rotate(recent.begin(), recent.begin() + i, recent.begin() + i + 1);
        return recent.front();
      }
    }
    auto made = std::make_shared<AxisTables>();
    made->axis = make_axis(in, out);
    made->packed = ops->pack(made->axis);
    recent.insert(recent.begin(), made);
    if (recent.size() > kMaxTables) recent.pop_back();
    return made;
  }

  const Ops* ops;
  Pool pool;
  std::vector<Scratch> scratch;
  std::vector<std::shared_ptr<const AxisTables>> recent;
  std::mutex mutex;
};

extern "C" {

int qwen_vl_abi_version(void) { return QWEN_VL_ABI_VERSION; }

int qwen_vl_cpu_isas(void) { return available_isas(); }

int qwen_vl_cpu_open(int32_t threads, const int32_t* cpus, int32_t cpu_count, int32_t isa,
                     qwen_vl_cpu** handle, char* message, size_t size) {
  if (!handle) return refuse(QWEN_VL_NULL_POINTER, message, size, "the handle is a null pointer");
  *handle = nullptr;
  if (threads < 1 || threads > kMaxThreads) {
    return refuse(QWEN_VL_BAD_THREADS, message, size, "%d threads: 1 to %d are possible", threads,
                  kMaxThreads);
  }
  if (cpu_count < 0 || (cpu_count > 0 && !cpus)) {
    return refuse(QWEN_VL_NULL_POINTER, message, size, "%d cpus at a null pointer", cpu_count);
  }
  for (int i = 0; i < cpu_count; ++i) {
    if (cpus[i] < 0 || cpus[i] > 1023) {
      return refuse(QWEN_VL_BAD_THREADS, message, size, "cpu %d is not within 0 and 1023", cpus[i]);
    }
  }
  const Ops* ops = find_ops(isa);
  if (!ops) {
    return refuse(QWEN_VL_BAD_ISA, message, size,
                  "instruction set %d is not available; those of this build on this machine are "
                  "the bits of 0x%x",
                  isa, available_isas());
  }
  try {
    *handle = new qwen_vl_cpu(ops, threads, std::vector<int>(cpus, cpus + cpu_count));
  } catch (const std::bad_alloc&) {
    return refuse(QWEN_VL_NO_MEMORY, message, size, "no memory for a handle");
  } catch (const std::system_error& error) {
    return refuse(QWEN_VL_BAD_THREADS, message, size, "%d threads could not be started: %s",
                  threads, error.what());
  }
  return QWEN_VL_OK;
}

int qwen_vl_cpu_patches(qwen_vl_cpu* handle, const qwen_vl_frame* frame,
                        const qwen_vl_patches* patches, char* message, size_t size) {
  if (!handle) return refuse(QWEN_VL_NULL_POINTER, message, size, "the handle is a null pointer");
  int status = check_frame(frame, message, size);
  if (status) return status;
  status = check_patches(*frame, patches, message, size);
  if (status) return status;
  std::lock_guard<std::mutex> lock(handle->mutex);
  try {
    const bool turned = columns_first(*frame, *patches);
    const auto x = handle->tables(frame->width, patches->width);
    const auto y = handle->tables(frame->height, patches->height);
    const auto same = turned ? handle->tables(frame->width, frame->width) : nullptr;
    const Job job = turned ? make_job(handle->ops, *frame, *patches, same.get(), y.get(), x.get())
                           : make_job(handle->ops, *frame, *patches, x.get(), y.get(), nullptr);
    const int units = patches->height / QWEN_VL_UNIT;
    const int bands = std::min(handle->pool.threads(), units);
    for (int i = 0; i < bands; ++i) handle->scratch[i].reserve(job);
    handle->pool.run(bands, [&](int i) {
      run_band(job, units * i / bands, units * (i + 1) / bands, handle->scratch[i]);
    });
  } catch (const std::bad_alloc&) {
    return refuse(QWEN_VL_NO_MEMORY, message, size,
                  "no memory to resize a frame of %dx%d to %dx%d", frame->width, frame->height,
                  patches->width, patches->height);
  }
  return QWEN_VL_OK;
}

int qwen_vl_cpu_isa(const qwen_vl_cpu* handle) { return handle ? handle->ops->isa : -1; }

uint64_t qwen_vl_cpu_scratch_bytes(const qwen_vl_cpu* handle) {
  if (!handle) return 0;
  uint64_t bytes = 0;
  for (const Scratch& scratch : handle->scratch) bytes += scratch.bytes();
  for (const auto& table : handle->recent) {
    bytes += 4 * (table->axis.start.size() * 2 + table->axis.weights.size() +
                  table->packed.data.size());
  }
  return bytes;
}

void qwen_vl_cpu_close(qwen_vl_cpu* handle) { delete handle; }

}  // extern "C"
