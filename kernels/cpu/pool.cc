#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace qwen_vl {
namespace {

// A cpu that is offline or outside the process's set is no reason to fail: the thread runs unpinned.
void pin(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
  (void)cpu;
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cpus)
    : threads_(threads), caller_works_(cpus.empty()) {
  for (int i = caller_works_ ? 1 : 0; i < threads; ++i) {
    const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(i) % cpus.size()];
    workers_.emplace_back([this, i, cpu] { serve(i, cpu); });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int count, const std::function<void(int)>& work) {
  if (caller_works_ && count == 1) return work(0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = &work;
    count_ = count;
    running_ = count - (caller_works_ ? 1 : 0);
    ++round_;
  }
  wake_.notify_all();
  if (caller_works_) work(0);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void Pool::serve(int index, int cpu) {
  if (cpu >= 0) pin(cpu);
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    if (index >= count_) continue;
    const std::function<void(int)>& work = *work_;
    lock.unlock();
    work(index);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace qwen_vl
