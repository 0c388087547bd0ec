// A thread pool of explicit size for the kernels: the caller takes part, one job at a time.
// Not OpenMP (its runtime clashes with torch's, and torchrun sets OMP_NUM_THREADS=1), not work stealing: a
// job is a number of independent items, taken from one counter. Which thread takes which item never shows
// in the results, since kernels are elementwise and sums have a defined order.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace overspill {

class ThreadPool {
 public:
  // threads counts the caller: 1 starts no thread. Throws std::invalid_argument outside 1..1024.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Throws std::runtime_error in a forked child, whose copy of the pool has no threads.
  void check_process() const;

  // Calls item(0) … item(count - 1), each once, on any thread, and returns when all are done. Callers from
  // several threads take turns. item must not throw. Every item runs with the default floating-point
  // environment (round to nearest, denormals kept), whatever the calling thread has set.
  void run(std::size_t count, const std::function<void(std::size_t)>& item);

 private:
  struct State;
  int threads_;
  std::unique_ptr<State> state_;
};

}  // namespace overspill
