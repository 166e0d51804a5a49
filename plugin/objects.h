// The objects behind the C API's opaque handles.
//
// Lifetimes are the C API's: devices, memories and the topology live as long as their client;
// everything else belongs to the caller, who destroys it before the client.
#ifndef MAXDIFF_PLUGIN_OBJECTS_H_
#define MAXDIFF_PLUGIN_OBJECTS_H_

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"
#include "status.h"
#include "values.h"
#include "xla/future.h"
#include "xla/pjrt/pjrt_client.h"
#include "xla/pjrt/pjrt_compiler.h"
#include "xla/pjrt/pjrt_device_description.h"
#include "xla/pjrt/pjrt_executable.h"
#include "xla/shape.h"

struct PJRT_Event {
  xla::Future<> future;
};

struct PJRT_DeviceDescription {
  explicit PJRT_DeviceDescription(const xla::PjRtDeviceDescription* source)
      : description(source),
        debug_string(source->DebugString()),
        to_string(source->ToString()),
        kind(source->device_kind()) {
    attributes.AddAll(source->Attributes());
  }

  const xla::PjRtDeviceDescription* description;
  std::string debug_string;
  std::string to_string;
  std::string kind;
  maxdiff::NamedValues attributes;
};

struct PJRT_Device {
  PJRT_Device(PJRT_Client* owner, xla::PjRtDevice* source)
      : client(owner), device(source), description(&source->description()) {}

  PJRT_Client* client;
  xla::PjRtDevice* device;
  PJRT_DeviceDescription description;
  std::vector<PJRT_Memory*> memories;
};

struct PJRT_Memory {
  PJRT_Client* client;
  xla::PjRtMemorySpace* memory;
  std::vector<PJRT_Device*> devices;
};

struct PJRT_TopologyDescription {
  explicit PJRT_TopologyDescription(const xla::PjRtTopologyDescription* source)
      : topology(source), owned_descriptions(source->DeviceDescriptions()) {
    for (const auto& description : owned_descriptions) {
      descriptions.push_back(std::make_unique<PJRT_DeviceDescription>(description.get()));
      description_pointers.push_back(descriptions.back().get());
    }
    attributes.AddAll(source->Attributes());
  }

  const xla::PjRtTopologyDescription* topology;
  std::vector<std::unique_ptr<const xla::PjRtDeviceDescription>> owned_descriptions;
  std::vector<std::unique_ptr<PJRT_DeviceDescription>> descriptions;
  std::vector<PJRT_DeviceDescription*> description_pointers;
  maxdiff::NamedValues attributes;
};

struct PJRT_Client {
  PJRT_Client(std::unique_ptr<xla::PjRtClient> source, std::shared_ptr<maxdiff::MemoryPool> pool)
      : memory(std::move(pool)), client(std::move(source)) {
    for (xla::PjRtDevice* device : client->devices()) {
      owned_devices.push_back(std::make_unique<PJRT_Device>(this, device));
      PJRT_Device* wrapper = owned_devices.back().get();
      devices.push_back(wrapper);
      if (device->IsAddressable()) addressable_devices.push_back(wrapper);
      device_of.emplace(device, wrapper);
    }
    for (xla::PjRtMemorySpace* memory : client->memory_spaces()) {
      owned_memories.push_back(std::make_unique<PJRT_Memory>(PJRT_Memory{this, memory, {}}));
      PJRT_Memory* wrapper = owned_memories.back().get();
      memories.push_back(wrapper);
      memory_of.emplace(memory, wrapper);
      for (xla::PjRtDevice* device : memory->devices()) {
        wrapper->devices.push_back(device_of.at(device));
      }
    }
    for (PJRT_Device* device : devices) {
      for (xla::PjRtMemorySpace* memory : device->device->memory_spaces()) {
        device->memories.push_back(memory_of.at(memory));
      }
    }
  }

  std::shared_ptr<maxdiff::MemoryPool> memory;
  // Outlives all that follows, which refers to it.
  std::unique_ptr<xla::PjRtClient> client;
  std::vector<std::unique_ptr<PJRT_Device>> owned_devices;
  std::vector<std::unique_ptr<PJRT_Memory>> owned_memories;
  std::vector<PJRT_Device*> devices;
  std::vector<PJRT_Device*> addressable_devices;
  std::vector<PJRT_Memory*> memories;
  std::unordered_map<xla::PjRtDevice*, PJRT_Device*> device_of;
  std::unordered_map<xla::PjRtMemorySpace*, PJRT_Memory*> memory_of;
  std::once_flag topology_once;
  std::unique_ptr<PJRT_TopologyDescription> topology;
};

struct PJRT_Buffer {
  PJRT_Client* client;
  std::unique_ptr<xla::PjRtBuffer> buffer;
  std::mutex mutex;
  std::optional<std::vector<int64_t>> unpadded_dims;
  std::vector<int64_t> minor_to_major;
  std::vector<std::unique_ptr<xla::PjRtBuffer::ExternalReference>> external_references;
};

// What the C API returns by pointer with the executable's lifetime, computed once on demand.
struct PJRT_Executable {
  std::shared_ptr<xla::PjRtLoadedExecutable> executable;
  std::mutex mutex;
  std::optional<maxdiff::NamedValues> cost_analysis;
  std::optional<std::string> fingerprint;
  std::optional<std::string> optimized_program;
  std::optional<std::vector<PJRT_Buffer_Type>> output_types;
  std::optional<std::vector<size_t>> output_ranks;
  std::vector<int64_t> output_dims;
  std::optional<std::vector<const char*>> memory_kinds;
  std::vector<size_t> memory_kind_sizes;
};

struct PJRT_LoadedExecutable {
  PJRT_Client* client;
  std::mutex mutex;
  // Null once deleted.
  std::shared_ptr<xla::PjRtLoadedExecutable> executable;
  std::vector<PJRT_Device*> addressable_devices;
  // Of one device, in order.
  std::vector<xla::Shape> parameter_shapes;
  std::optional<std::string> fingerprint;
};

// Bytes handed to the caller together with the function that frees them.
struct PJRT_SerializedExecutable {
  std::string bytes;
};
struct PJRT_SerializedCompileOptions {
  std::string bytes;
};
struct PJRT_DeviceAssignmentSerialized {
  std::string bytes;
};
struct PJRT_SerializedTopology {
  std::string bytes;
};

namespace maxdiff {

inline PJRT_Event* NewEvent(xla::Future<> future) {
  return new PJRT_Event{std::move(future)};
}

inline PJRT_Buffer* NewBuffer(PJRT_Client* client, std::unique_ptr<xla::PjRtBuffer> buffer) {
  auto* wrapper = new PJRT_Buffer{};
  wrapper->client = client;
  wrapper->buffer = std::move(buffer);
  return wrapper;
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_OBJECTS_H_
