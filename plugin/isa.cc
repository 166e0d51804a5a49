#include "isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace maxdiff::kernels {
namespace {

// By Isa.
constexpr const char* kNames[] = {"avx512", "amx"};

#if defined(__x86_64__)

// The features that `isa` needs and this processor lacks, by the names of /proc/cpuinfo, separated by commas.
std::string Missing(Isa isa) {
  struct Feature {
    Isa isa;
    const char* name;
    int is_here;
  };
  __builtin_cpu_init();
  const Feature features[] = {
      {Isa::kAvx512, "avx512f", __builtin_cpu_supports("avx512f")},
      {Isa::kAvx512, "avx512bw", __builtin_cpu_supports("avx512bw")},
      {Isa::kAvx512, "avx512dq", __builtin_cpu_supports("avx512dq")},
      {Isa::kAvx512, "avx512vl", __builtin_cpu_supports("avx512vl")},
      {Isa::kAvx512, "avx512_bf16", __builtin_cpu_supports("avx512bf16")},
      {Isa::kAvx512, "avx512_vnni", __builtin_cpu_supports("avx512vnni")},
      {Isa::kAmx, "amx_tile", __builtin_cpu_supports("amx-tile")},
      {Isa::kAmx, "amx_bf16", __builtin_cpu_supports("amx-bf16")},
      {Isa::kAmx, "amx_int8", __builtin_cpu_supports("amx-int8")},
  };
  std::string missing;
  for (const Feature& feature : features) {
    if (feature.isa > isa || feature.is_here) continue;
    missing += (missing.empty() ? "" : ",") + std::string(feature.name);
  }
  return missing;
}

// Asks Linux to let this process use tiles: their state is large, so no process has them before it asks. Gives why it
// refuses; empty if it does not.
std::string RequestTiles() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0) return "";
  return std::string("the operating system refuses the tiles of amx (arch_prctl: ") + std::strerror(errno) + ")";
}

// Why the kernels cannot use `isa`; empty if they can.
std::string Obstacle(Isa isa) {
  const std::string missing = Missing(isa);
  if (!missing.empty()) return "the processor lacks " + missing;
  return isa == Isa::kAmx ? RequestTiles() : "";
}

IsaChoice Choose() {
  IsaChoice choice;
  choice.missing = Missing(Isa::kAvx512);
  const char* set = std::getenv("MAXDIFF_CPU_ISA");
  if (set == nullptr || *set == '\0') {
    if (!Missing(Isa::kAmx).empty()) return choice;
    const std::string refusal = RequestTiles();
    if (refusal.empty()) {
      choice.isa = Isa::kAmx;
    } else {
      std::fprintf(stderr, "warning: %s, so the kernels use avx512\n", refusal.c_str());
    }
    return choice;
  }
  const std::string wanted = set;
  const auto* name = std::find(std::begin(kNames), std::end(kNames), wanted);
  if (name == std::end(kNames)) {
    choice.error = "MAXDIFF_CPU_ISA is '" + wanted + "', expected " + kNames[0] + " or " + kNames[1];
    return choice;
  }
  choice.isa = static_cast<Isa>(name - std::begin(kNames));
  const std::string obstacle = Obstacle(choice.isa);
  if (!obstacle.empty()) {
    const std::string most = choice.missing.empty() ? kNames[0] : "none of the kernels' instruction sets";
    choice.error = "MAXDIFF_CPU_ISA is " + wanted + ", but this machine has at most " + most + ": " + obstacle;
  }
  return choice;
}

#else

IsaChoice Choose() {
  IsaChoice choice;
  choice.missing = "avx512f";  // No kernel is written for another architecture.
  return choice;
}

#endif  // defined(__x86_64__)

}  // namespace

const IsaChoice& ChosenIsa() {
  static const IsaChoice* const choice = new IsaChoice(Choose());
  return *choice;
}

std::string IsaName() { return Supported() ? kNames[static_cast<int>(UsedIsa())] : ""; }

}  // namespace maxdiff::kernels
