#include "isa.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace maxdiff::kernels {

// Defined by set_*.cc.
namespace emulated_avx2 {
extern const KernelSet kKernels;
}
namespace emulated_avx512 {
extern const KernelSet kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelSet kKernels;
}
namespace avx_vnni {
extern const KernelSet kKernels;
}
namespace avx512_vnni {
extern const KernelSet kKernels;
}
namespace avx512 {
extern const KernelSet kKernels;
}
#endif

struct Isa {
  const char* name;
  const KernelSet* kernels;
  // What the processor must have, by the names of /proc/cpuinfo, separated by commas.
  const char* features;
  bool tiles;
  // Plain C++: never chosen, but where MAXDIFF_CPU_ISA asks for it.
  bool emulated;
};

namespace {

#define MAXDIFF_AVX2 "avx2,fma"
#define MAXDIFF_AVX512 MAXDIFF_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl,avx512_vnni"

// The sets from the lowest: of those that can be had the last one is used. XLA alone computes on another architecture,
// whose sets would be added here.
constexpr Isa kIsas[] = {
    {"emulated_avx2", &emulated_avx2::kKernels, "", false, true},
    {"emulated_avx512", &emulated_avx512::kKernels, "", false, true},
#if defined(__x86_64__)
    {"avx2", &avx2::kKernels, MAXDIFF_AVX2, false, false},
    {"avx_vnni", &avx_vnni::kKernels, MAXDIFF_AVX2 ",avx_vnni", false, false},
    {"avx512_vnni", &avx512_vnni::kKernels, MAXDIFF_AVX512, false, false},
    {"avx512", &avx512::kKernels, MAXDIFF_AVX512 ",avx512_bf16", false, false},
    {"amx", &avx512::kKernels, MAXDIFF_AVX512 ",avx512_bf16,amx_tile,amx_bf16,amx_int8", true, false},
#endif
};

// What the lowest set that is not emulated needs.
constexpr const char* kLeastFeatures = MAXDIFF_AVX2;

// Whether the processor has a feature and the operating system saves its registers.
bool Has(const std::string& feature) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const struct {
    const char* name;
    int is_here;
  } features[] = {
      {"avx2", __builtin_cpu_supports("avx2")},
      {"fma", __builtin_cpu_supports("fma")},
      {"avx_vnni", __builtin_cpu_supports("avxvnni")},
      {"avx512f", __builtin_cpu_supports("avx512f")},
      {"avx512bw", __builtin_cpu_supports("avx512bw")},
      {"avx512dq", __builtin_cpu_supports("avx512dq")},
      {"avx512vl", __builtin_cpu_supports("avx512vl")},
      {"avx512_vnni", __builtin_cpu_supports("avx512vnni")},
      {"avx512_bf16", __builtin_cpu_supports("avx512bf16")},
      {"amx_tile", __builtin_cpu_supports("amx-tile")},
      {"amx_bf16", __builtin_cpu_supports("amx-bf16")},
      {"amx_int8", __builtin_cpu_supports("amx-int8")},
  };
  for (const auto& known : features) {
    if (feature == known.name) return known.is_here != 0;
  }
#endif
  return false;
}

// Those of `features` that this processor lacks.
std::string Missing(const char* features) {
  std::istringstream all(features);
  std::string missing;
  for (std::string feature; std::getline(all, feature, ',');) {
    if (!Has(feature)) missing += (missing.empty() ? "" : ",") + feature;
  }
  return missing;
}

// Asks Linux to let this process use tiles: their state is large, so no process has them before it asks. Gives why it
// refuses; empty if it does not.
std::string RequestTiles() {
#if defined(__x86_64__)
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0) return "";
#endif
  return std::string("the operating system refuses the tiles of amx (arch_prctl: ") + std::strerror(errno) + ")";
}

// Why the kernels cannot use `isa`; empty if they can.
std::string Obstacle(const Isa& isa) {
  const std::string missing = Missing(isa.features);
  if (!missing.empty()) return "the processor lacks " + missing;
  return isa.tiles ? RequestTiles() : "";
}

// The highest set that this machine has; null if it has none. A refusal is added to `refusals`.
const Isa* Highest(std::vector<std::string>* refusals) {
  for (const Isa* isa = std::end(kIsas); isa-- != std::begin(kIsas);) {
    if (isa->emulated || !Missing(isa->features).empty()) continue;
    const std::string obstacle = Obstacle(*isa);
    if (obstacle.empty()) return isa;
    refusals->push_back(obstacle);
  }
  return nullptr;
}

// `avx2, avx512 or amx`.
std::string Alternatives() {
  std::string text;
  for (const Isa& isa : kIsas) {
    const bool is_last = &isa + 1 == std::end(kIsas);
    text += (text.empty() ? "" : is_last ? " or " : ", ") + std::string(isa.name);
  }
  return text;
}

// What MAXDIFF_CPU_ISA asks for; where that cannot be had, `error` says why.
const Isa* Forced(const std::string& wanted, const Isa* highest, std::string* error) {
  const auto is_wanted = [&](const Isa& isa) { return wanted == isa.name; };
  const Isa* isa = std::find_if(std::begin(kIsas), std::end(kIsas), is_wanted);
  if (isa == std::end(kIsas)) {
    *error = "MAXDIFF_CPU_ISA is '" + wanted + "', expected " + Alternatives();
    return highest;
  }
  const std::string obstacle = Obstacle(*isa);
  if (obstacle.empty()) return isa;
  const std::string most = highest == nullptr ? "none of the kernels' instruction sets" : highest->name;
  *error = "MAXDIFF_CPU_ISA is " + wanted + ", but this machine has at most " + most + ": " + obstacle;
  return highest;
}

IsaChoice Choose() {
  IsaChoice choice;
  std::vector<std::string> refusals;
  const Isa* highest = Highest(&refusals);
  const char* set = std::getenv("MAXDIFF_CPU_ISA");
  if (set == nullptr || *set == '\0') {
    choice.isa = highest;
    for (const std::string& refusal : refusals) {
      const std::string instead =
          highest == nullptr ? "no kernel is used" : std::string("the kernels use ") + highest->name;
      std::fprintf(stderr, "warning: %s, so %s\n", refusal.c_str(), instead.c_str());
    }
  } else {
    choice.isa = Forced(set, highest, &choice.error);
  }
  if (choice.isa == nullptr) choice.missing = Missing(kLeastFeatures);
  return choice;
}

}  // namespace

const IsaChoice& ChosenIsa() {
  static const IsaChoice* const choice = new IsaChoice(Choose());
  return *choice;
}

std::string IsaName() { return Supported() ? ChosenIsa().isa->name : ""; }

std::string IsaNames(bool usable) {
  std::string names;
  for (const Isa& isa : kIsas) {
    if (Obstacle(isa).empty() == usable) names += (names.empty() ? "" : ",") + std::string(isa.name);
  }
  return names;
}

const KernelSet& Used() { return *ChosenIsa().isa->kernels; }

bool UsesTiles() { return Supported() && ChosenIsa().isa->tiles; }

}  // namespace maxdiff::kernels
