// Which of the processor's instructions the kernels use.

#ifndef MAXDIFF_PLUGIN_ISA_H_
#define MAXDIFF_PLUGIN_ISA_H_

#include <string>

#include "kernels.h"

namespace maxdiff::kernels {

// An instruction set that the kernels are written for.
struct Isa;

// What the kernels use in this process.
struct IsaChoice {
  // Null where no kernel may be called.
  const Isa* isa = nullptr;
  // Features that the lowest set needs and this processor lacks, by the names of /proc/cpuinfo, separated by commas.
  // Empty where there is a set.
  std::string missing;
  // What is wrong with MAXDIFF_CPU_ISA; empty if nothing is.
  std::string error;
};

// Made once: what MAXDIFF_CPU_ISA names, or the highest that the processor has and the operating system permits. Where it
// refuses what the processor has, that is said on stderr.
const IsaChoice& ChosenIsa();

// Its name, as MAXDIFF_CPU_ISA has it; empty where no kernel may be called.
std::string IsaName();

// The names of what MAXDIFF_CPU_ISA may be on this machine, from the lowest, separated by commas; or of what it may not.
std::string IsaNames(bool usable);

inline bool Supported() { return ChosenIsa().isa != nullptr; }

// The kernels, where Supported().
const KernelSet& Used();

// Whether they use the tiles of AMX.
bool UsesTiles();

}  // namespace maxdiff::kernels

#endif  // MAXDIFF_PLUGIN_ISA_H_
