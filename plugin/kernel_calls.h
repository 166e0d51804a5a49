// The kernels as custom calls that compiled programs make.

#ifndef MAXDIFF_PLUGIN_KERNEL_CALLS_H_
#define MAXDIFF_PLUGIN_KERNEL_CALLS_H_

#include <string>

#include "absl/status/status.h"

namespace maxdiff {

// Makes the kernels known to XLA, where kernels::Supported(); once in a process.
absl::Status RegisterKernels();

// The custom calls' targets, separated by commas; empty where the kernels are not supported.
std::string KernelNames();

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_KERNEL_CALLS_H_
