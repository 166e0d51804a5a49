// Threads and memory that the kernels share.

#ifndef MAXDIFF_PLUGIN_POOL_H_
#define MAXDIFF_PLUGIN_POOL_H_

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace maxdiff::kernels {

// Runs jobs of equal tasks on the process's threads. The calling thread works too, so a job ends even if no other is
// free.
class Pool {
 public:
  static Pool& Get() {
    static Pool* pool = new Pool();
    return *pool;
  }

  // Makes them `threads` with the calling one; never fewer than there are. Throws std::system_error where the system
  // starts no more.
  void Start(int threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (workers_ < threads - 1) {
      std::thread([this] { Serve(); }).detach();
      workers_ += 1;
    }
  }

  int threads() const { return workers_ + 1; }

  // Calls work(task) for each of `tasks`. Throws what one of the calls has thrown; the rest may not be made then.
  void Run(int64_t tasks, const std::function<void(int64_t)>& work) {
    const int workers = workers_;
    if (tasks <= 1 || workers == 0) {
      for (int64_t task = 0; task < tasks; ++task) work(task);
      return;
    }
    auto job = std::make_shared<Job>(tasks, &work);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(job);
    }
    const int64_t helpers = std::min<int64_t>(workers, tasks - 1);
    for (int64_t i = 0; i < helpers; ++i) wake_.notify_one();
    job->Work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto place = std::find(jobs_.begin(), jobs_.end(), job);
      if (place != jobs_.end()) jobs_.erase(place);
    }
    job->Wait();
    if (job->failure != nullptr) std::rethrow_exception(job->failure);
  }

 private:
  struct Job {
    Job(int64_t tasks, const std::function<void(int64_t)>* work) : tasks(tasks), work(work) {}

    // `work` lives as long as tasks are left, since its owner waits for all of them.
    void Work() {
      for (;;) {
        const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks) return;
        Do(task);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }

    // After a failure the tasks that are left are only counted.
    void Do(int64_t task) {
      if (failed.load(std::memory_order_relaxed)) return;
      try {
        (*work)(task);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
        failed.store(true, std::memory_order_relaxed);
      }
    }

    void Wait() {
      // What is left runs on other threads and is soon done.
      for (int spin = 0; spin < 200; ++spin) {
        if (done.load(std::memory_order_acquire) == tasks) return;
        std::this_thread::yield();
      }
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [this] { return done.load(std::memory_order_acquire) == tasks; });
    }

    const int64_t tasks;
    const std::function<void(int64_t)>* work;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
    // The first exception. Written before its task is counted as done, read when all are.
    std::exception_ptr failure;
    std::mutex mutex;
    std::condition_variable finished;
  };

  Pool() = default;

  void Serve() {
    pthread_setname_np(pthread_self(), "maxdiff-kernels");
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !jobs_.empty(); });
        job = jobs_.front();
        if (job->next.load(std::memory_order_relaxed) >= job->tasks) {
          jobs_.pop_front();
          continue;
        }
      }
      job->Work();
    }
  }

  std::atomic<int> workers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
};

// Memory of one thread that calls reuse, aligned to cache lines.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Throws std::bad_alloc where there is no more.
  template <typename T>
  T* Get(int64_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      size_ = data_ == nullptr ? 0 : bytes;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Scratch memory of a call, which later calls take over whatever their thread: large memory is there once for each call that
// runs at the same time.
class CallScratch {
 public:
  CallScratch() {
    std::lock_guard<std::mutex> lock(Mutex());
    if (Free().empty()) {
      scratch_ = std::make_unique<Scratch>();
    } else {
      scratch_ = std::move(Free().back());
      Free().pop_back();
    }
  }
  ~CallScratch() {
    std::lock_guard<std::mutex> lock(Mutex());
    Free().push_back(std::move(scratch_));
  }
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;

  template <typename T>
  T* Get(int64_t count) {
    return scratch_->Get<T>(count);
  }

 private:
  static std::mutex& Mutex() {
    static std::mutex* mutex = new std::mutex();
    return *mutex;
  }
  static std::vector<std::unique_ptr<Scratch>>& Free() {
    static auto* free = new std::vector<std::unique_ptr<Scratch>>();
    return *free;
  }

  std::unique_ptr<Scratch> scratch_;
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace maxdiff::kernels

#endif  // MAXDIFF_PLUGIN_POOL_H_
