// Which of the processor's instructions the kernels use.

#ifndef MAXDIFF_PLUGIN_ISA_H_
#define MAXDIFF_PLUGIN_ISA_H_

#include <string>

namespace maxdiff::kernels {

// The instruction sets that the kernels are written for, from the lowest; each includes those before it.
// kAvx512: AVX-512 with its products of bf16 and of int8. kAmx: the tiles of AMX, with both products.
enum class Isa { kAvx512, kAmx };

// What the kernels use in this process.
struct IsaChoice {
  Isa isa = Isa::kAvx512;
  // Features that the lowest set needs and this processor lacks, by the names of /proc/cpuinfo, separated by commas.
  // Where there are any, no kernel may be called.
  std::string missing;
  // What is wrong with MAXDIFF_CPU_ISA; empty if nothing is.
  std::string error;
};

// Made once: what MAXDIFF_CPU_ISA names, or the highest that the processor has and the operating system permits. Where it
// refuses what the processor has, that is said on stderr.
const IsaChoice& ChosenIsa();

// Its name, as MAXDIFF_CPU_ISA has it; empty where no kernel may be called.
std::string IsaName();

inline bool Supported() { return ChosenIsa().missing.empty(); }

inline Isa UsedIsa() { return ChosenIsa().isa; }

}  // namespace maxdiff::kernels

#endif  // MAXDIFF_PLUGIN_ISA_H_
