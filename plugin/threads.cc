#include "threads.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "isa.h"
#include "pool.h"

namespace maxdiff {
namespace {

// 0 until it was set.
std::atomic<int> number_of_threads{0};

int Parallelism() {
  const int set = number_of_threads;
  return set > 0 ? set : std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

absl::Status UseThreads(int64_t threads) {
  if (threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("client option cpu_threads is ", threads, ", expected 1 to ", kMaxThreads));
  }
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  const int set = number_of_threads;
  if (set > 0 && set != threads) {
    return absl::FailedPreconditionError(
        absl::StrCat("client option cpu_threads is ", threads, ", but this process already computes with ", set));
  }
  if (kernels::Supported()) {
    try {
      kernels::Pool::Get().Start(static_cast<int>(threads));
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot start ", threads, " threads: ", error.what()));
    }
  }
  number_of_threads = static_cast<int>(threads);
  return absl::OkStatus();
}

}  // namespace maxdiff

// XLA asks this function of TensorFlow's library how many threads its pools get. The plugin comes before that library in
// the order in which symbols are looked up, so its own answer is the one that counts.
namespace tsl::port {

__attribute__((visibility("default"))) int MaxParallelism() { return maxdiff::Parallelism(); }
__attribute__((visibility("default"))) int MaxParallelism(int) { return maxdiff::Parallelism(); }

}  // namespace tsl::port
