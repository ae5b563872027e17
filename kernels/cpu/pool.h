// Threads that wait for work.
#ifndef QWEN_VL_CPU_POOL_H_
#define QWEN_VL_CPU_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace qwen_vl {

class Pool {
 public:
  // With cpus, every thread is a worker pinned to one of them; without, the caller of run() is the
  // first thread.
  Pool(int threads, const std::vector<int>& cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls work(0) to work(count - 1), each on a thread of its own (count <= threads), and returns
  // when all have. Not to be called from two threads at a time. `work` must not throw.
  void run(int count, const std::function<void(int)>& work);

 private:
  void serve(int index, int cpu);

  const int threads_;
  const bool caller_works_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int)>* work_ = nullptr;
  int count_ = 0;
  int running_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace qwen_vl
#endif  // QWEN_VL_CPU_POOL_H_
