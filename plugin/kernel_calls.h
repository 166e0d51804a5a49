// The kernels as custom calls that compiled programs make.

#ifndef MAXDIFF_PLUGIN_KERNEL_CALLS_H_
#define MAXDIFF_PLUGIN_KERNEL_CALLS_H_

#include "absl/status/status.h"

namespace maxdiff {

// Makes the kernels known to XLA; once in a process, where kernels::Supported().
absl::Status RegisterKernels();

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_KERNEL_CALLS_H_
