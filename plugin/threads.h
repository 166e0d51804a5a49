// How many threads this process computes with.

#ifndef MAXDIFF_PLUGIN_THREADS_H_
#define MAXDIFF_PLUGIN_THREADS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace maxdiff {

// More than this is taken for a mistake.
inline constexpr int64_t kMaxThreads = 1024;

// Sets the number that XLA's pools and the kernels' pool have, and starts the latter. XLA's pools are made with their
// client and the kernels' is the process's, so the first call decides; another number later is an error.
absl::Status UseThreads(int64_t threads);

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_THREADS_H_
