// The memory behind buffers and temporaries of one client.
//
// XLA:CPU allocates a program's temporaries and results anew at every execution. Through malloc,
// large blocks go back to the kernel each time, and the page faults of touching them again cost
// more than many an operation that fills them. Here large blocks are kept for the next execution
// and ask for huge pages. Where none of them fits, the pages of smaller ones are moved together:
// a decoder's temporaries are where the denoiser's weights were.
#ifndef MAXDIFF_PLUGIN_MEMORY_H_
#define MAXDIFF_PLUGIN_MEMORY_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "status.h"
#include "xla/pjrt/plugin/xla_cpu/cpu_memory.h"

namespace maxdiff {

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  struct Stats {
    int64_t bytes_in_use = 0;
    int64_t peak_bytes_in_use = 0;
    int64_t num_allocs = 0;
    int64_t largest_alloc_size = 0;
    // Blocks kept for reuse, on top of those in use.
    int64_t cached_bytes = 0;
  };

  ~MemoryPool() {
    for (const auto& [size, block] : free_) munmap(block.base, size);
  }

  absl::StatusOr<std::unique_ptr<xla::CpuMemory>> Allocate(size_t size, size_t alignment) {
    if (size < kSmallest || alignment > kPage) return AllocateSmall(size, alignment);
    if (size > SIZE_MAX - 2 * kHugePage) return OutOfMemory(size);
    const size_t wanted = (size + kSmallest - 1) / kSmallest * kSmallest;
    Block block = TakeCached(wanted);
    if (block.base == nullptr && wanted >= kSmallestMoved) block = MapOverCached(wanted);
    if (block.base == nullptr) block = Map(wanted);
    if (block.base == nullptr) return OutOfMemory(size);
    Count(size, block.size);
    return std::make_unique<PooledMemory>(shared_from_this(), block, size);
  }

  Stats stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  static constexpr size_t kPage = 4096;
  // Smaller blocks are malloc's business; larger ones are multiples of it.
  static constexpr size_t kSmallest = size_t{64} << 10;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr int64_t kAlwaysKept = int64_t{128} << 20;
  // Smaller blocks are weights, of which there are many, each as large as another.
  static constexpr size_t kSmallestMoved = size_t{64} << 20;

  struct Block {
    void* base = nullptr;
    size_t size = 0;
    // Whether it consists of what were several mappings, which no one call moves.
    bool is_joined = false;
  };

  class PooledMemory final : public xla::CpuMemory {
   public:
    PooledMemory(std::shared_ptr<MemoryPool> pool, Block block, size_t size)
        : pool_(std::move(pool)), block_(block), size_(size) {}
    ~PooledMemory() override { pool_->Release(block_); }
    void* base() const override { return block_.base; }
    size_t size_bytes() const override { return size_; }

   private:
    std::shared_ptr<MemoryPool> pool_;
    Block block_;
    size_t size_;
  };

  class SmallMemory final : public xla::CpuMemory {
   public:
    SmallMemory(std::shared_ptr<MemoryPool> pool, void* base, size_t size)
        : pool_(std::move(pool)), base_(base), size_(size) {}
    ~SmallMemory() override {
      std::free(base_);
      pool_->Uncount(size_);
    }
    void* base() const override { return base_; }
    size_t size_bytes() const override { return size_; }

   private:
    std::shared_ptr<MemoryPool> pool_;
    void* base_;
    size_t size_;
  };

  static absl::Status OutOfMemory(size_t size) {
    return absl::ResourceExhaustedError(
        absl::StrCat("out of host memory: ", size, " bytes could not be allocated"));
  }

  absl::StatusOr<std::unique_ptr<xla::CpuMemory>> AllocateSmall(size_t size, size_t alignment) {
    void* base = nullptr;
    if (posix_memalign(&base, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1)) != 0) {
      return OutOfMemory(size);
    }
    Count(size, size);
    return std::make_unique<SmallMemory>(shared_from_this(), base, size);
  }

  // The smallest cached block that fits without wasting more than an eighth of it.
  Block TakeCached(size_t wanted) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.lower_bound(wanted);
    if (found == free_.end() || found->first - wanted > found->first / 8) return {};
    Block block = found->second;
    free_.erase(found);
    stats_.cached_bytes -= block.size;
    return block;
  }

  // Maps `size` bytes and moves the pages of cached blocks there, the largest first; no page twice, so
  // that what is not filled is new. Gives nothing when the kernel refuses.
  Block MapOverCached(size_t size) {
    Block block = Map(size);
    if (block.base == nullptr) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    size_t filled = 0;
    auto next = free_.end();
    while (next != free_.begin()) {
      const auto largest = std::prev(next);
      const Block from = largest->second;
      // Whole huge pages: parts would be moved one small page after the other.
      const size_t bytes = std::min(size - filled, from.size) / kHugePage * kHugePage;
      if (bytes == 0) break;
      next = largest;
      if (from.is_joined) continue;
      char* to = static_cast<char*>(block.base) + filled;
      if (mremap(from.base, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
        // What was at `to` may be gone, and the place another's.
        munmap(block.base, filled);
        munmap(to + bytes, size - filled - bytes);
        return {};
      }
      next = free_.erase(largest);
      stats_.cached_bytes -= bytes;
      filled += bytes;
      block.is_joined = true;
      if (from.size > bytes) {
        const Block rest{static_cast<char*>(from.base) + bytes, from.size - bytes};
        free_.emplace(rest.size, rest);
      }
    }
    return block;
  }

  // Maps `size` bytes, large ones at a huge page's boundary, so that all of them but a last part
  // smaller than a huge page can be huge pages. When the kernel refuses, the cache is given back
  // first.
  Block Map(size_t size) {
    const size_t slack = size < kHugePage ? 0 : kHugePage;
    void* mapped = MapPages(size + slack);
    if (mapped == MAP_FAILED) {
      Trim(0);
      mapped = MapPages(size + slack);
    }
    if (mapped == MAP_FAILED) return {};
    if (slack == 0) return {mapped, size};
    const uintptr_t start = reinterpret_cast<uintptr_t>(mapped);
    const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > start) munmap(mapped, aligned - start);
    const uintptr_t tail = start + slack - aligned;
    if (tail > 0) munmap(reinterpret_cast<void*>(aligned + size), tail);
    void* base = reinterpret_cast<void*>(aligned);
    // Advice: without huge pages the block works as well, only slower.
    (void)madvise(base, size, MADV_HUGEPAGE);
    return {base, size};
  }

  static void* MapPages(size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }

  void Count(size_t requested, size_t held) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_allocs += 1;
    stats_.bytes_in_use += held;
    stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
    stats_.largest_alloc_size =
        std::max(stats_.largest_alloc_size, static_cast<int64_t>(requested));
    TrimLocked(CacheLimit());
  }

  void Uncount(size_t held) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.bytes_in_use -= held;
  }

  void Release(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.bytes_in_use -= block.size;
    stats_.cached_bytes += block.size;
    free_.emplace(block.size, block);
    TrimLocked(CacheLimit());
    // Of more than half of the machine's memory the kernel may take pages when others need them; as
    // long as it does not, the next execution finds them as they are. Advice: what is not marked so is
    // only kept from others.
    if (stats_.cached_bytes > kPhysicalBytes / 2) (void)madvise(block.base, block.size, MADV_FREE);
  }

  // But for a little, the cache never makes the process larger than its own use once made it. The
  // little is for weights on their way: each is released when it was packed, while what is in use
  // only grows.
  int64_t CacheLimit() const {
    const int64_t unused = stats_.peak_bytes_in_use - stats_.bytes_in_use;
    return std::max(unused, kAlwaysKept);
  }

  void Trim(int64_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    TrimLocked(limit);
  }

  // The smallest block that is enough goes, else the largest: few calls, and a program's temporaries, which are
  // one large block, are not given up for a little excess.
  void TrimLocked(int64_t limit) {
    while (stats_.cached_bytes > limit && !free_.empty()) {
      auto block = free_.lower_bound(stats_.cached_bytes - limit);
      if (block == free_.end()) block = std::prev(block);
      munmap(block->second.base, block->first);
      stats_.cached_bytes -= block->first;
      free_.erase(block);
    }
  }

  inline static const int64_t kPhysicalBytes =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);

  mutable std::mutex mutex_;
  std::multimap<size_t, Block> free_;
  Stats stats_;
};

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_MEMORY_H_
